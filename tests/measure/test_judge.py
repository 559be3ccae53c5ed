"""Judges that are tables, and MDLM's recipe written out a second time."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.errors import UserError
from relaylm.measure import judge as module
from relaylm.measure.judge import Judge, features, from_logits, load_judge, log_perplexity, mdlm_weights, score, windows
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family

VOCAB = 7


class Bigram:
    """p(x_i | x_{i-1}) from a table."""

    vocab_size = VOCAB

    def __init__(self, length: int = 1 << 20) -> None:
        self.length = length
        self.table_VV = torch.from_numpy(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)))

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        return self.table_VV[tokens_BL]

    def log_p(self, row: np.ndarray) -> np.ndarray:
        log_VV = self.table_VV.log_softmax(dim=-1).numpy()
        return log_VV[row[:-1], row[1:]]


class Sum:
    """Logits that depend on all tokens since the start of the window, so that the context shows."""

    vocab_size = VOCAB

    def __init__(self, length: int) -> None:
        self.length = length
        self.table = torch.from_numpy(np.random.default_rng(1).normal(size=(97, VOCAB)))

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        return self.table[((tokens_BL + 1) * (torch.arange(tokens_BL.shape[1]) + 3)).cumsum(dim=1) % 97]

    def nll(self, ids: np.ndarray) -> np.ndarray:
        """-log p of positions 1.. of one window."""
        logits = self.logits(torch.from_numpy(ids)[None], torch.ones(1))[0, :-1]
        return F.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none").numpy()


def text_judge(model: Any, eos_id: int | None = 0, tokens_per_call: int = 64) -> Judge:
    """A judge that reads text: the digits of a text are its ids."""

    def encode(text: str) -> tuple[list[int], list[int]]:
        return [int(c) for c in text], list(range(1, len(text) + 1))

    def nll(ids_BL: Tensor, real_B: Tensor) -> Tensor:
        logits = model.logits(ids_BL, torch.ones(len(ids_BL)))[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids_BL[:, 1:], reduction="none")

    return Judge("digits", "digits", nll, model.length, torch.device("cpu"), tokens_per_call, encode, eos_id)


def rows(n: int = 9, length: int = 30, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (n, length))


# ------------------------------------------------------------------------------------------------ known answers


def test_a_table_as_judge() -> None:
    bigram, tokens = Bigram(), rows()
    scores = score(from_logits(bigram, "bigram"), tokens)
    expected = np.array([-bigram.log_p(row).sum() for row in tokens])
    assert scores.nll_n == pytest.approx(expected)
    assert (scores.count_n == 29).all() and (scores.cut_n == 0).all()
    assert scores.written_nll_n == pytest.approx(expected)
    assert log_perplexity(scores) == pytest.approx(expected / 29)


def test_a_uniform_judge_has_the_perplexity_of_its_vocabulary() -> None:
    class Uniform:
        def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
            return torch.zeros(*tokens_BL.shape, VOCAB)

    scores = score(from_logits(Uniform(), "uniform"), rows())
    assert np.exp(log_perplexity(scores)) == pytest.approx(np.full(9, VOCAB))


def test_a_single_token_has_no_score_and_is_not_dropped() -> None:
    scores = score(from_logits(Bigram(), "bigram"), rows(4, 1))
    assert (scores.count_n == 0).all() and np.isnan(log_perplexity(scores)).all() and len(scores.nll_n) == 4


def test_continuation_and_everything() -> None:
    bigram, tokens = Bigram(), rows()
    given = np.full(tokens.shape, -1)
    for r in range(len(given)):
        given[r, :r] = tokens[r, :r]  # prompts of 0 to 8 tokens
    scores = score(from_logits(bigram, "bigram"), tokens, given_nL=given)
    for r, row in enumerate(tokens):
        nll = -bigram.log_p(row)
        assert scores.nll_n[r] == pytest.approx(nll.sum())
        assert scores.written_nll_n[r] == pytest.approx(nll[max(0, r - 1) :].sum())  # position r on; the first is free
        assert scores.written_count_n[r] == 29 - max(0, r - 1)


def test_continuation_of_text() -> None:
    model, tokens = Sum(1 << 20), rows()
    texts = ["".join(map(str, row)) for row in tokens]
    prompts = [text[:r] for r, text in enumerate(texts)]
    scores = score(text_judge(model), tokens, texts, None, prompts)
    for r, row in enumerate(tokens):
        nll = model.nll(row)
        assert scores.nll_n[r] == pytest.approx(nll.sum())
        assert scores.written_nll_n[r] == pytest.approx(nll[max(0, r - 1) :].sum())


def test_batches_do_not_matter() -> None:
    model = Sum(1 << 20)
    texts = ["".join(map(str, row[: 1 + 3 * r])) for r, row in enumerate(rows())]
    small, large = (score(text_judge(model, None, size), rows(), texts) for size in (1, 10_000))
    assert (small.nll_n == large.nll_n).all() and (small.count_n == large.count_n).all()
    assert small.count_n.tolist() == [len(text) - 1 for text in texts]


# ------------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("context", [2, 3, 5, 8, 100])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 9, 31])
def test_windows_score_each_token_once(length: int, context: int) -> None:
    scored = []
    for start, stop, first in windows(length, context):
        assert 0 <= start < first < stop <= length and stop - start <= context
        assert first - start >= min(first, context // 2)
        scored += range(first, stop)
    assert scored == list(range(1, length))


def test_long_rows_are_read_through_windows() -> None:
    model = Sum(8)
    row = rows(1, 30)[0]
    expected = model.nll(row[:8]).sum()  # the first window scores 1..7, each further one its last 4
    for stop in (12, 16, 20, 24, 28):
        expected += model.nll(row[stop - 8 : stop])[-4:].sum()
    expected += model.nll(row[22:30])[-2:].sum()
    scores = score(from_logits(model, "sum"), row[None])
    assert scores.nll_n[0] == pytest.approx(expected) and scores.count_n[0] == 29


# ------------------------------------------------------------------------------------------------ MDLM's recipe


def literal_mdlm(model: Any, texts: list[str], max_length: int, context: int, eos: int) -> tuple[float, float]:
    """MDLM's definition, line by line (2.4 of the notes): sum and number of what its metric averages."""
    ids = [[int(c) for c in text][:max_length] for text in texts]  # truncation=True, max_length
    width = max(len(row) for row in ids)
    samples = torch.tensor([row + [eos] * (width - len(row)) for row in ids])  # padding=True, pad := eos
    total = weight = 0.0
    for chunk in torch.split(samples, context, dim=-1):
        logits = model.logits(chunk, torch.ones(len(chunk))).transpose(-1, -2)
        nlls = F.cross_entropy(logits[..., :-1], chunk[..., 1:], reduction="none")
        first_eos = (chunk == eos).cumsum(-1) == 1
        token_mask = chunk != eos
        counted = (first_eos[..., 1:] + token_mask[..., 1:]).double()
        total += float((nlls * counted).sum())
        weight += float(counted.sum())
    return total, weight


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("context", [5, 8, 64])
def test_mdlm_recipe_to_the_letter(seed: int, context: int) -> None:
    """Ragged texts with eos (id 0) anywhere: first, last, in runs, at the edges of blocks, all of it, or nowhere."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(11):
        ids = rng.integers(1, VOCAB, rng.integers(1, 26))
        ids[rng.random(len(ids)) < rng.choice([0, 0.1, 0.5, 1])] = 0
        texts.append("".join(map(str, ids)))
    texts += ["0" * 9, "1", "0", "12345" * 5]
    model = Sum(context)
    scores = score(text_judge(model), np.zeros((15, 20), dtype=int), texts, recipe="mdlm", max_length=20)
    total, weight = literal_mdlm(model, texts, 20, context, 0)
    assert scores.nll_n.sum() == pytest.approx(total, rel=1e-12)
    assert scores.count_n.sum() == weight
    assert scores.cut_n.tolist() == [max(0, len(text) - 20) for text in texts]


def test_mdlm_weights() -> None:
    assert mdlm_weights(np.array([0, 1, 0, 2, 0]), 0).tolist() == [True, True, False, True, False]
    assert mdlm_weights(np.array([1, 2]), 0).tolist() == [True, True]


def test_mdlm_blocks_of_1024_whatever_the_judge_can_read() -> None:
    model = Sum(4096)
    text = "".join(map(str, rows(1, 1500)[0]))
    scores = score(text_judge(model, eos_id=99), rows(1, 1500), [text], recipe="mdlm", max_length=1500)
    assert scores.count_n[0] == 1498  # the first token of each of two blocks is given


# ------------------------------------------------------------------------------------------------ loading


def family_with_judge() -> Family:
    denoiser = Transformer(Architecture(VOCAB, 16, width=16, depth=1, heads=2))
    family = Family({"1b": denoiser.initialise(torch.Generator().manual_seed(0))}, VOCAB - 1, VOCAB, 16)
    judge = Transformer(Architecture(VOCAB, 16, width=16, depth=2, heads=2, causal=True))
    judge.initialise(torch.Generator().manual_seed(1)).eval().requires_grad_(False)
    judge.output_layer.linear.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    family.judge = judge
    return family


def test_the_familys_own_judge() -> None:
    family = family_with_judge()
    judge, tokens = load_judge(None, family), rows(5, 16)
    scores = score(judge, tokens)
    logits = family.judge.logits(torch.from_numpy(tokens), torch.ones(5))[:, :-1]  # type: ignore[union-attr]
    expected = F.cross_entropy(logits.transpose(1, 2), torch.from_numpy(tokens[:, 1:]), reduction="none").sum(dim=1)
    assert scores.nll_n == pytest.approx(expected.numpy(), rel=1e-5)
    assert judge.context == 16 and judge.key == module.weights_digest(family.judge)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="knows the tokens"):
        score(judge, tokens + VOCAB)


def test_features_are_the_state_that_foretells_the_next_token() -> None:
    family = family_with_judge()
    judge, tokens = load_judge(None, family), rows(5, 12)
    small = replace(judge, tokens_per_call=24)
    found = features(small, tokens)
    network = family.judge
    assert network is not None and found.shape == (5, 16)
    logits = F.linear(torch.from_numpy(found), network.output_layer.linear.weight, network.output_layer.linear.bias)
    expected = network.logits(torch.from_numpy(tokens), torch.ones(5))[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    longer = np.concatenate([rows(5, 16), rows(5, 16, seed=1)], axis=1)  # beyond the context: its beginning
    assert np.array_equal(features(judge, longer), features(judge, longer[:, :16]))
    with pytest.raises(UserError, match="probabilities alone"):
        features(from_logits(Bigram(), "bigram"), tokens)


def test_the_judge_of_a_stored_family_is_float32(tmp_path: Path) -> None:
    family = family_with_judge()
    family.save_pretrained(tmp_path / "family", dtype="float32")
    loaded = Family.load(tmp_path / "family", dtype="bfloat16")
    tokens = rows(5, 16)
    exact = score(load_judge(None, family), tokens).nll_n
    assert score(load_judge("own", loaded), tokens).nll_n == pytest.approx(exact, rel=1e-6)
    assert load_judge(None, loaded).key == load_judge(None, Family.load(tmp_path / "family")).key


@pytest.mark.parametrize("spec", ["gpt2", "hf:", "gguf:", "gguf:no-such-file.gguf", 3])
def test_no_such_judge(spec: Any) -> None:
    with pytest.raises(UserError):
        load_judge(spec, family_with_judge())


def test_messages() -> None:
    family = family_with_judge()
    family.judge = None
    with pytest.raises(UserError, match="no judge of its own"):
        load_judge(None, family)
    with pytest.raises(UserError, match="recipe"):
        score(from_logits(Bigram(), "b"), rows(), recipe="best")
    with pytest.raises(UserError, match="reads text"):
        score(text_judge(Bigram()), rows())


@pytest.mark.slow
def test_a_transformers_model(tmp_path: Path) -> None:
    """A small GPT-2 from a folder: the same numbers as by hand, prompts told from continuations by their characters."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {c: i for i, c in enumerate("abcdefgh ")} | {"<|endoftext|>": 9, "ab": 10, "cd": 11}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b"), ("c", "d")]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=12, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path, safe_serialization=True)
    judge = load_judge(f"hf:{tmp_path}", family_with_judge())
    assert judge.context == 16 and judge.eos_id == 9
    texts = ["abcabcd<|endoftext|>ef", "h", "cdcdcd ab"]
    scores = score(judge, np.zeros((3, 4), dtype=int), texts, None, ["abc", "", "cdc"])
    for r, text in enumerate(texts):
        ids = torch.tensor([fast(text)["input_ids"]])
        with torch.no_grad():
            nll = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum") if ids.shape[1] > 1 else 0
        assert scores.nll_n[r] == pytest.approx(float(nll), abs=1e-4)
        assert scores.count_n[r] == ids.shape[1] - 1
    assert scores.written_count_n.tolist() == [5, 0, 4]  # after ab c; nothing; cd|cd cd _ ab with cd astride
    assert math.isfinite(scores.nll_n.sum())
    vectors = features(judge, np.zeros((3, 4), dtype=int), texts)  # padded to one length, and not felt
    for r, text in enumerate(texts):
        with torch.no_grad():
            state = model.transformer(torch.tensor([fast(text)["input_ids"]])).last_hidden_state[0, -1]
        assert vectors[r] == pytest.approx(state.numpy(), abs=1e-5)
    with pytest.raises(UserError, match="a sample is empty"):
        features(judge, np.zeros((1, 4), dtype=int), [""])


def test_no_remote_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def refuse(*arguments: object, **options: object) -> None:
        seen.append(options["trust_remote_code"])
        raise OSError("gone")

    def accept(*arguments: object, **options: object) -> None:
        seen.append(options["trust_remote_code"])

    auto = SimpleNamespace(from_pretrained=accept), SimpleNamespace(from_pretrained=refuse)
    package = SimpleNamespace(AutoTokenizer=auto[0], AutoModelForCausalLM=auto[1])
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "judge.gguf").write_bytes(b"")
    for spec in ("hf:gpt2", f"gguf:{tmp_path / 'judge.gguf'}"):
        with pytest.raises(UserError, match=r"cannot be loaded \(gone\)"):
            load_judge(spec, family_with_judge())
    assert seen == [False] * 4
