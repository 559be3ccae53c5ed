r"""Generative perplexity: how well a left-to-right model predicts the samples.

A judge is any causal model: the family's own (`None` or "own": the same token ids, no network access, always in
float32), a Hugging Face model ("hf:gpt2-large"), a GGUF file ("gguf:PATH"), or any object with `logits(tokens, t)`.
The two in the middle need `pip install relaylm[eval]` and read text: samples are decoded and tokenised again for them.

**What is scored.** A text x_1 .. x_c is charged -log p(x_i | x_<i) for i = 2 .. c: nothing is put before the text, so
its first token is given, as MDLM does it. Rows are never dropped; one with a single token has nothing to score and
counts as unscored. With a prompt two sums are kept: over everything, and over what was written alone (for a judge that
reads text: the tokens that end after the prompt does).

**Long texts.** What does not fit the judge's context W is read through windows that advance by W/2; each token is
scored once, by the first window that holds it, so with at least W/2 tokens before it (from the first window on).

**MDLM's recipe** (`recipe="mdlm"`), to the letter: texts are cut at `max_length` tokens, padded with eos to the longest
of the call, split into blocks of 1024 that do not see each other, and in each block all tokens but the first are scored
unless they are an eos that is not the block's first (the first padding counts, text after an eos too). The one
difference: MDLM drops the rows that do not fill a last batch, and nothing here is dropped.

Shapes: n rows, B windows in a call, L positions, M scored positions, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.errors import UserError, reason
from relaylm.files import expand, file_sha256
from relaylm.models.denoiser import Transformer
from relaylm.models.family import Family
from relaylm.models.folder import load_network
from relaylm.sampling.engine import settings

RECIPES = ("plain", "mdlm")
Encoder = Callable[[str], tuple[list[int], list[int]]]  # a text's ids, and where in the text each token ends


@dataclass(frozen=True)
class Judge:
    """A causal model, ready to score."""

    name: str
    key: str
    """Identifies its numbers in a store: a hash of weights and tokenizer."""
    nll: Callable[[Tensor, Tensor], Tensor]
    """(ids_BL, real_B) -> -log p(x_i | x_<i) of positions 2..L, float64 (B, L - 1); `real_B` tokens are not padding."""
    context: int
    device: torch.device
    tokens_per_call: int
    encode: Encoder | None = None
    """None: it reads the family's own token ids."""
    eos_id: int | None = None
    largest_id: int | None = None
    features: Callable[[Tensor, Tensor], Tensor] | None = None
    """(ids_BL, real_B) -> the last layer's state at each row's last token, (B, D); None: it does not show any."""


@dataclass(frozen=True)
class Scores:
    """Sums of -log p in nats and numbers of scored tokens, by row: over everything, and over what was written."""

    nll_n: np.ndarray
    count_n: np.ndarray
    written_nll_n: np.ndarray
    written_count_n: np.ndarray
    cut_n: np.ndarray  # tokens beyond max_length, which MDLM's recipe does not read


# ------------------------------------------------------------------------------------------------ scoring


def score(
    judge: Judge,
    tokens_nL: np.ndarray,
    texts: Sequence[str] = (),
    given_nL: np.ndarray | None = None,
    prompts: Sequence[str] | None = None,
    *,
    recipe: str = "plain",
    max_length: int | None = None,
) -> Scores:
    """Score rows. `given_nL` (-1 where free) or, for a judge that reads text, `prompts` (the text each row began with)
    say what was given; both None: all was written."""
    if recipe not in RECIPES:
        raise UserError(f"{recipe!r} is not a recipe: choose {' or '.join(RECIPES)}")
    rows, written = _tokenise(judge, tokens_nL, texts, given_nL, prompts)
    cut_n, context = np.zeros(len(rows), dtype=np.int64), judge.context
    if recipe == "mdlm":
        if judge.encode is not None:
            if judge.eos_id is None:
                raise UserError(f"MDLM's recipe needs an eos token, and the judge {judge.name} has none")
            context = _block(judge)
        longest = max_length or tokens_nL.shape[1]
        cut_n = np.array([max(0, len(row) - longest) for row in rows])
        rows, written = _cut_and_padded(rows, written, longest, judge.eos_id)
    work = [(r, *span) for r, row in enumerate(rows) for span in windows(len(row), context, recipe == "mdlm")]
    nll_n, count_n = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    written_nll_n, written_count_n = nll_n.copy(), count_n.copy()
    work.sort(key=lambda item: item[1] - item[2])  # the longest first, so that batches hold windows of a length
    at = 0
    while at < len(work):
        longest = work[at][2] - work[at][1]
        batch = work[at : at + max(1, judge.tokens_per_call // longest)]
        at += len(batch)
        with settings(judge.device):
            nll_BL = (
                judge.nll(*_padded([rows[r][start:stop] for r, start, stop, _ in batch], judge.device)).cpu().numpy()
            )
        for b, (r, start, stop, first) in enumerate(batch):
            ids = rows[r][start:stop]
            weight = np.arange(start, stop) >= first
            if recipe == "mdlm" and judge.eos_id is not None:
                weight &= mdlm_weights(ids, judge.eos_id)
            keep = np.flatnonzero(weight[1:])
            new = written[r][start + 1 : stop][keep]
            nll = nll_BL[b, keep]
            if np.isnan(nll).any() or np.isneginf(nll).any():
                raise UserError(
                    f"the judge {judge.name} gave a score that is not a number: its weights are damaged, or overflow"
                )
            nll_n[r] += nll.sum()
            count_n[r] += len(keep)
            written_nll_n[r] += nll[new].sum()
            written_count_n[r] += new.sum()
    return Scores(nll_n, count_n, written_nll_n, written_count_n, cut_n)


def _block(judge: Judge) -> int:
    """Tokens of a block of MDLM's recipe, for a judge that reads text."""
    return min(judge.context, 4096 if "llama2" in judge.name else 1024)


def _cut_and_padded(
    rows: Sequence[np.ndarray], written: Sequence[np.ndarray], longest: int, eos_id: int | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows as MDLM reads them. Of the padding only the first eos can be scored, so at most one is added."""
    rows, written = [row[:longest] for row in rows], [mark[:longest] for mark in written]
    width = max(len(row) for row in rows)
    if eos_id is not None:
        short = [len(row) < width for row in rows]
        rows = [np.append(row, eos_id) if s else row for row, s in zip(rows, short, strict=True)]
        written = [np.append(mark, True) if s else mark for mark, s in zip(written, short, strict=True)]
    return rows, written


def features(judge: Judge, tokens_nL: np.ndarray, texts: Sequence[str] = ()) -> np.ndarray:
    """Each row as a vector, (n, D): the judge's last state after reading it, as MAUVE takes them from GPT-2. A row
    longer than the judge's context is represented by its beginning."""
    if judge.features is None:
        raise UserError(f"the judge {judge.name} gives probabilities alone, no states to compare texts by")
    rows, _ = _tokenise(judge, tokens_nL, texts, None, None)
    if not all(len(row) for row in rows):
        raise UserError(f"a sample is empty, so the judge {judge.name} has no state for it")
    rows = [row[: judge.context] for row in rows]
    size = max(1, judge.tokens_per_call // max(len(row) for row in rows))
    found = []
    for start in range(0, len(rows), size):
        with settings(judge.device):
            found.append(judge.features(*_padded(rows[start : start + size], judge.device)).float().cpu().numpy())
    return np.concatenate(found)


def windows(length: int, context: int, blocks: bool = False) -> list[tuple[int, int, int]]:
    """(start, stop, first) of each window over a text: it reads [start, stop) and scores [first, stop). With `blocks`
    windows do not overlap, and the first token of each is not scored."""
    spans = []
    if blocks:
        spans = [(start, min(length, start + context), start + 1) for start in range(0, length, context)]
    elif length > 1:
        stop = min(length, context)
        spans = [(0, stop, 1)]
        while stop < length:
            first, stop = stop, min(length, stop + max(1, context // 2))
            spans.append((stop - context, stop, first))
    return [(start, stop, first) for start, stop, first in spans if first < stop]


def mdlm_weights(ids_L: np.ndarray, eos_id: int) -> np.ndarray:
    """Which tokens of a block count: all that are not eos, and the first eos."""
    eos_L = ids_L == eos_id
    return ~eos_L | (np.cumsum(eos_L) == 1)


def _tokenise(
    judge: Judge,
    tokens_nL: np.ndarray,
    texts: Sequence[str],
    given_nL: np.ndarray | None,
    prompts: Sequence[str] | None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each row's ids for the judge, and which of them were written rather than given."""
    if judge.encode is None:
        if judge.largest_id is not None and tokens_nL.max(initial=0) > judge.largest_id:
            raise UserError(f"the judge {judge.name} knows the tokens 0 to {judge.largest_id}, not {tokens_nL.max()}")
        free_nL = np.ones(tokens_nL.shape, dtype=bool) if given_nL is None else given_nL < 0
        return list(tokens_nL.astype(np.int64)), list(free_nL)
    if len(texts) != len(tokens_nL):
        raise UserError(f"the judge {judge.name} reads text, and this family has no tokenizer to write it with")
    if given_nL is not None and prompts is None and (given_nL >= 0).any():
        raise UserError(f"the judge {judge.name} reads text: say what the prompts were as text")
    rows, written = [], []
    for r, text in enumerate(texts):
        ids, ends = judge.encode(text)
        rows.append(np.array(ids, dtype=np.int64))
        written.append(np.array(ends, dtype=np.int64) > (len(prompts[r]) if prompts is not None else 0))
    return rows, written


def _padded(pieces: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pieces of different lengths as one batch, and their lengths."""
    longest = max(len(piece) for piece in pieces)
    ids_BL = np.zeros((len(pieces), longest), dtype=np.int64)
    for b, piece in enumerate(pieces):
        ids_BL[b, : len(piece)] = piece
    real_B = torch.tensor([len(piece) for piece in pieces])
    return torch.from_numpy(ids_BL).to(device), real_B.to(device)


# ------------------------------------------------------------------------------------------------ judges


def load_judge(spec: Any, family: Family) -> Judge:
    """The judge that `spec` names: None or "own", "hf:NAME", "gguf:PATH", a Judge, or an object with `logits`."""
    if isinstance(spec, Judge):
        return spec
    if spec is None or spec == "own":
        return _own_judge(family)
    if isinstance(spec, str):
        kind, _, name = spec.partition(":")
        if kind == "hf" and name:
            tokenizer, model = _pretrained(spec, name, {}, {"use_safetensors": True})
            return _text_judge(spec, model, tokenizer, family.device, weights_digest(model))
        if kind == "gguf" and name:
            return _from_gguf(spec, family.device, expand(name))
        raise UserError(f"there is no judge {spec!r}: write own, hf:NAME or gguf:PATH")
    if hasattr(spec, "logits"):
        return from_logits(spec, type(spec).__name__, device=family.device)
    raise UserError(f"a {type(spec).__name__} cannot judge: give own, hf:NAME, gguf:PATH or an object with `logits`")


def from_logits(
    model: Any, name: str, *, device: torch.device | str = "cpu", eos_id: int | None = None, key: str | None = None
) -> Judge:
    """A judge from a causal model that reads the family's own token ids: `logits(tokens_BL, t_B)`, where
    t means nothing."""
    where = torch.device(getattr(model, "device", device))
    architecture = getattr(model, "architecture", None)
    context = int(architecture.length) if architecture is not None else int(getattr(model, "length", 1 << 30))
    vocab_size = getattr(model, "vocab_size", None)
    tokens_per_call = 65_536 if where.type == "cuda" else 4096

    def nll(ids_BL: Tensor, real_B: Tensor) -> Tensor:
        t_B = torch.ones(len(ids_BL), device=where)
        if isinstance(model, Transformer) and not model.architecture.adaln:
            return _nll_by_pieces(
                model, model.hidden_at(ids_BL, t_B, None), ids_BL, 2**26 if where.type == "cuda" else 2**22
            )
        return _cross_entropy(model.logits(ids_BL, t_B)[:, :-1], ids_BL[:, 1:])

    def last_state(ids_BL: Tensor, real_B: Tensor) -> Tensor:
        assert isinstance(model, Transformer)
        hidden_BD = model.hidden_at(ids_BL, torch.ones(len(ids_BL), device=where), None)[_last(real_B)]
        return model.output_layer.norm_final(hidden_BD)

    if key is None:
        key = weights_digest(model) if isinstance(model, torch.nn.Module) else f"unnamed:{name}"
    largest = None if vocab_size is None else int(vocab_size) - 1
    shows = last_state if isinstance(model, Transformer) else None
    return Judge(name, key, nll, context, where, tokens_per_call, None, eos_id, largest, shows)


def _last(real_B: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's last token that is not padding."""
    return torch.arange(len(real_B), device=real_B.device), real_B - 1


def _nll_by_pieces(model: Transformer, hidden_BLD: Tensor, ids_BL: Tensor, cells: int) -> Tensor:
    """-log p from the residual stream, the head on so many positions at a time that its logits stay small."""
    hidden_MD, target_M = hidden_BLD[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten()
    size = max(1, cells // model.vocab_size)
    parts = [
        _cross_entropy(model.head(hidden_MD[i : i + size]), target_M[i : i + size])
        for i in range(0, len(target_M), size)
    ]
    return torch.cat(parts).view(len(ids_BL), -1) if parts else ids_BL.new_zeros((len(ids_BL), 0)).double()


def _cross_entropy(logits_XV: Tensor, target_X: Tensor) -> Tensor:
    logits = logits_XV if logits_XV.dtype == torch.float64 else logits_XV.float()
    flat = F.cross_entropy(logits.flatten(0, -2), target_X.flatten(), reduction="none")
    return (flat.cpu() if flat.device.type == "mps" else flat).view(target_X.shape).double()


def _own_judge(family: Family) -> Judge:
    """The family's own, in float32 whatever its denoisers compute in."""
    stored, entry, key = family.stored, family.entry("judge"), None
    if entry is not None:
        files = sorted(entry["files"].items())
        key = "own:" + hashlib.sha256(repr([digest for _, digest in files]).encode()).hexdigest()
    if stored is not None and entry is not None and stored.dtype not in (torch.float32, torch.float64):
        network: Transformer | None = load_network(stored.folder, "judge", entry, family.device, torch.float32)
    else:
        network = family.judge
    if network is None:
        raise UserError("this family has no judge of its own: choose one, as hf:gpt2-large or gguf:PATH")
    eos = family.tokenizer.eos_id if family.tokenizer is not None else None
    return from_logits(network, "own", device=family.device, eos_id=eos, key=key)


def weights_digest(module: torch.nn.Module) -> str:
    """A sha256 of every parameter and buffer (names, shapes, types and bytes), and of the architecture of a network
    that has one: how many heads there are, or what a position sees, does not show in tensors."""
    numbers = getattr(getattr(module, "architecture", None), "to_json", None)
    shape = "" if numbers is None else json.dumps(numbers(), sort_keys=True)
    total = hashlib.sha256(shape.encode())
    for name, value in sorted(module.state_dict().items()):
        total.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        total.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def reading_key(family: Family, judge: Judge, recipe: str) -> list[Any]:
    """What fixes a judge's scores of a family's tokens beside the judge's key: for a judge that reads text the
    tokenizer, for MDLM's recipe the eos and the length of blocks. Nothing otherwise."""
    key: list[Any] = [] if recipe != "mdlm" else [{"eos": judge.eos_id, "block": _block(judge)}]
    if judge.encode is not None and family.tokenizer is not None:
        files = {name: hashlib.sha256(data).hexdigest() for name, data in family.tokenizer.files().items()}
        key.append({"tokenizer": family.tokenizer.to_json(), "files": files})
    return key


def _from_gguf(spec: str, device: torch.device, path: Path) -> Judge:
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r} for the judge: write gguf:PATH")
    for needed in ("gguf", "accelerate"):  # which transformers needs for this, and says so less clearly
        if importlib.util.find_spec(needed) is None:
            raise UserError(f"a GGUF judge needs the package {needed}: `pip install relaylm[eval]` brings it")
    tokenizer, model = _pretrained(spec, str(path.parent), {"gguf_file": path.name}, {"gguf_file": path.name})
    return _text_judge(f"gguf:{path.name}", model, tokenizer, device, file_sha256(path))


def _pretrained(spec: str, name: str, for_tokenizer: dict[str, Any], for_model: dict[str, Any]) -> tuple[Any, Any]:
    """A tokenizer and a float32 model of transformers. No remote code is run."""
    try:
        import transformers
    except ImportError:
        raise UserError("this judge needs the packages of `pip install relaylm[eval]`") from None
    tokenizers: Any = transformers.AutoTokenizer
    models: Any = transformers.AutoModelForCausalLM
    try:
        tokenizer = tokenizers.from_pretrained(name, trust_remote_code=False, **for_tokenizer)
        return tokenizer, models.from_pretrained(name, trust_remote_code=False, dtype=torch.float32, **for_model)
    except Exception as error:  # a damaged file ends in errors of several libraries
        raise UserError(f"the judge {spec} cannot be loaded ({reason(error)})") from None


def _text_judge(name: str, model: Any, tokenizer: Any, device: torch.device, digest: str) -> Judge:
    """A judge around a transformers model and its (fast) tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"the judge {name} has no fast tokenizer, which is needed to tell prompts from continuations")
    model = model.eval().requires_grad_(False).to(device)
    config = model.config
    context = getattr(config, "n_positions", None) or getattr(config, "max_position_embeddings", None) or 1024
    vocab_size = int(config.vocab_size)
    tokens_per_call = max(1, (2**28 if device.type == "cuda" else 2**26) // vocab_size)

    def encode(text: str) -> tuple[list[int], list[int]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]

    def run(ids_BL: Tensor, real_B: Tensor, **options: bool) -> Any:
        mask_BL = (torch.arange(ids_BL.shape[1], device=ids_BL.device) < real_B[:, None]).long()
        return model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False, **options)

    def nll(ids_BL: Tensor, real_B: Tensor) -> Tensor:
        return _cross_entropy(run(ids_BL, real_B).logits[:, :-1], ids_BL[:, 1:])

    def last_state(ids_BL: Tensor, real_B: Tensor) -> Tensor:
        states: Tensor = run(ids_BL, real_B, output_hidden_states=True).hidden_states[-1]
        return states[_last(real_B)]

    backend = tokenizer.backend_tokenizer.to_str()
    key = f"{digest}:{hashlib.sha256(backend.encode()).hexdigest()}"
    eos_id, width = tokenizer.eos_token_id, min(int(context), 2048)
    return Judge(name, key, nll, width, device, tokens_per_call, encode, eos_id, features=last_state)


def log_perplexity(scores: Scores) -> np.ndarray:
    """Each row's mean -log p over what was written; NaN where nothing was scored."""
    count_n = scores.written_count_n
    return np.where(count_n > 0, scores.written_nll_n / np.maximum(count_n, 1), math.nan)
