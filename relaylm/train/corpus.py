r"""Text in, token files out.

A corpus is a folder: `train.bin` and `heldout.bin` (token ids as unsigned integers of the smallest width that holds the
vocabulary, memory-mapped when read), `manifest.json` (what was read, how it was cut, sha256 of everything) and the
tokenizer's own files. The *last* `holdout` share of the text is held out and never trained on.

**Packing.** Three rules for turning documents into rows of L tokens:

- `running`: plain text without marks; a row is any window of L tokens.
- `wrap` (MDLM's rule for OpenWebText): documents are joined, each followed by eos; the stream is cut into chunks of
  L - 2, and each is wrapped as bos, chunk, eos. What is left over at the end is dropped.
- `pad` (MDLM's rule for LM1B): one sentence in each row, as bos, sentence, eos (cut to fit), padded to L. Padding is
  not scored: `train.rows` and `heldout.rows` hold the number of real tokens of each row.

What counts as a document, and how a source is read, is in `relaylm.models.text`. Nothing is held in memory but a few
megabytes of text, which are encoded together on all cores (where the tokenizer can), so the corpus may be of any size:
it is read two times (to count, and to encode), three if a BPE vocabulary is trained, which sees the training part
alone. A corpus is written beside its final place and renamed when it is whole.

Shapes: B rows, L positions, N tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from relaylm.console import progress_bar
from relaylm.errors import UserError
from relaylm.files import expand, file_sha256, write_folder, write_json
from relaylm.models.family import on_disk
from relaylm.models.folder import MANIFEST, read_manifest
from relaylm.models.text import find_sources, pieces, wrap_marks
from relaylm.models.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer, vocabulary, whole_characters

FORMAT = 1
PACKINGS = ("running", "wrap", "pad")
SPLITS = ("train", "heldout")
_TOGETHER = 1 << 22  # characters that are encoded at once
_LARGEST_BPE = 1_000_000  # entries
_VERIFY_BELOW = 1 << 30  # bytes: of larger token files only the size is checked


# ---------------------------------------------------------------------------------------------------- writing tokens


class _Tokens:
    """A token file being written, and its hash."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.name, self.dtype, self.count, self.hash = path.name, dtype, 0, hashlib.sha256()
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115  (closed by `close`)

    def write(self, ids: np.ndarray) -> None:
        data = ids.astype(self.dtype).tobytes()
        self.hash.update(data)
        self.file.write(data)
        self.count += len(ids)

    def close(self) -> dict[str, Any]:
        self.file.close()
        return {"sha256": self.hash.hexdigest(), "count": self.count, "dtype": self.dtype.name}


class _Packer:
    """Documents to rows, by one of the three rules."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, packing: str, length: int | None) -> None:
        self.tokenizer, self.packing, self.length = tokenizer, packing, length or 0
        self.tokens = _Tokens(folder / f"{split}.bin", token_dtype(tokenizer.size))
        self.rows = _Tokens(folder / f"{split}.rows", np.dtype(np.int32)) if packing == "pad" else None
        self.waiting: list[np.ndarray] = []  # wrap: the stream that is not a full chunk yet; pad: the sentence at hand
        self.left = self.characters = self.documents = self.truncated = 0  # left: tokens that are waiting

    def add(self, text: str, end: bool, tokens: list[int]) -> None:
        self.characters += len(text)
        self.documents += end
        ids = np.asarray(tokens, dtype=np.int64)
        if (mask := self.tokenizer.mask_id) is not None and (ids == mask).any():
            raise UserError(f"the text has the tokenizer's mask in it, {self.tokenizer.decode([mask])!r}: take it out")
        if self.packing == "running":
            return self.tokens.write(ids)
        if self.packing == "wrap":
            assert self.tokenizer.eos_id is not None
            self.waiting.append(np.append(ids, self.tokenizer.eos_id) if end else ids)
            self.left += len(self.waiting[-1])
            if self.left >= 64 * self.length:
                self._write_chunks()
            return None
        self.waiting.append(ids)
        return self._write_sentence() if end else None

    def _write_chunks(self) -> None:
        """wrap: every full chunk of L - 2 tokens as bos, chunk, eos; the rest waits."""
        first, last = wrap_marks(self.tokenizer)
        assert first is not None and last is not None
        stream, inner = np.concatenate(self.waiting), self.length - 2
        whole = len(stream) // inner
        rows = np.full((whole, self.length), last, dtype=np.int64)
        rows[:, 0] = first
        rows[:, 1:-1] = stream[: whole * inner].reshape(whole, inner)
        self.tokens.write(rows.ravel())
        self.waiting, self.left = [stream[whole * inner :]], len(stream) - whole * inner

    def _write_sentence(self) -> None:
        """pad: bos, sentence, eos and padding, as far as the tokenizer has them."""
        assert self.rows is not None
        bos, eos, pad = (
            [] if i is None else [i] for i in (self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id)
        )
        ids, room = np.concatenate(self.waiting), self.length - len(bos) - len(eos)
        self.truncated += max(0, len(ids) - room)
        real = [*bos, *ids[:room].tolist(), *eos]
        self.tokens.write(np.array(real + [*pad, *eos, 0][:1] * (self.length - len(real))))
        self.rows.write(np.array([len(real)]))
        self.waiting = []

    def close(self) -> dict[str, Any]:
        if self.packing == "wrap" and self.waiting:
            self._write_chunks()
        return {
            "characters": self.characters,
            "documents": self.documents,
            "tokens": self.tokens.count,
            "dropped_tokens": self.left + self.truncated,
            "files": {file.name: file.close() for file in (self.tokens, self.rows) if file is not None},
        }


def token_dtype(size: int) -> np.dtype:
    """The smallest unsigned integer that holds every id of a tokenizer (the mask is never stored)."""
    kind = np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32
    return np.dtype(kind).newbyteorder("<")


def train_bpe(texts: Iterator[str], size: str) -> JsonTokenizer:
    """A byte-level BPE vocabulary of `size` entries, <|endoftext|> among them, in the manner of GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if not (size.isdecimal() and 257 <= int(size) <= _LARGEST_BPE):
        raise UserError(
            f"write the size of a BPE vocabulary as bpe:8192, at least 257 (256 bytes and an end mark) and at most "
            f"{_LARGEST_BPE:,}, not bpe:{size}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(map(whole_characters, texts), trainer=trainer)
    return JsonTokenizer(backend.to_str(), where="the trained vocabulary")


# --------------------------------------------------------------------------------------------------------- prepare


def prepare(
    sources: Sequence[str | Path] | str | Path,
    out_folder: str | Path,
    *,
    tokenizer: str | Path | Tokenizer = "bytes",
    packing: str = "running",
    length: int | None = None,
    holdout: float = 0.02,
    licence: str = "",
    progress: bool = True,
) -> TokenFile:
    """Text files or datasets of the hub to a corpus folder.

    `tokenizer` is "text8", "bytes", "bpe:SIZE" (trained here on the training part), a `tokenizers` JSON file, a family
    (for its own), or an object. `length` is needed for the packings with rows (wrap, pad). `licence` is kept in the
    manifest and goes into model cards. Run again with the same arguments, it checks what is there and returns it.
    """
    if packing not in PACKINGS:
        raise UserError(f"unknown packing {packing!r}: choose {', '.join(PACKINGS)}")
    if packing != "running" and (length is None or length < 4):
        raise UserError(f"packing {packing!r} makes rows: give their length, at least 4, not {length}")
    if not 0 <= holdout < 1:
        raise UserError(f"the held-out share must be at least 0 and below 1, not {holdout}")
    length = None if packing == "running" else length
    texts, out = find_sources(sources), expand(out_folder)
    chosen: Tokenizer | None = None
    if isinstance(tokenizer, str | Path) and (folder := on_disk(tokenizer)).joinpath(MANIFEST).is_file():
        tokenizer = load_tokenizer(read_manifest(folder)["tokenizer"] or "none", folder)
    if not (isinstance(tokenizer, str) and tokenizer.startswith("bpe:")):
        chosen = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    named = isinstance(tokenizer, str) and not Path(tokenizer).exists()
    request = {
        "sources": [source.fingerprint() for source in texts],
        "tokenizer": tokenizer if named or chosen is None else chosen.to_json(),
        "packing": packing,
        "length": length,
        "holdout": holdout,
    }
    if (out / "manifest.json").exists():
        there = TokenFile.load(out)
        if there.manifest["request"] != json.loads(json.dumps(request)):
            changed = [key for key, value in request.items() if there.manifest["request"].get(key) != value]
            raise UserError(f"{out} already holds another corpus ({', '.join(changed)} differ): choose another folder")
        return there
    if out.is_file():
        raise UserError(f"{out} is a file, but a corpus is a folder: choose another name")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not a corpus: choose another folder")

    total = 0
    with progress_bar("count", None, "char", progress) as bar:
        for text, _ in pieces(texts, packing):
            total += len(text)
            bar.update(len(text))
    cut = round(total * (1 - holdout))

    def split(label: str) -> Iterator[tuple[str, str, bool]]:
        """(split, piece, end) in order. Running text is cut at the very character, documents where one begins."""
        position, held, begins = 0, False, True
        with progress_bar(label, total, "char", progress) as bar:
            for text, end in pieces(texts, packing):
                if packing == "running" and position < cut < position + len(text):
                    yield "train", text[: cut - position], False
                    yield "heldout", text[cut - position :], end
                else:
                    held = position >= cut if packing == "running" or begins else held
                    yield "heldout" if held else "train", text, end
                position, begins = position + len(text), end
                bar.update(len(text))

    if chosen is None:
        texts_to_learn = (text for part, text, _ in split("bpe") if part == "train")
        chosen = train_bpe(texts_to_learn, str(tokenizer).removeprefix("bpe:"))
    if packing == "wrap" and chosen.eos_id is None:
        raise UserError("packing 'wrap' joins documents by an end mark, which this tokenizer does not have")

    def fill(new: Path) -> None:
        packers = {part: _Packer(new, part, chosen, packing, length) for part in SPLITS}
        for group in _groups(split("encode")):
            encoded = chosen.encode_batch([text for _, text, _ in group])
            for (part, text, end), tokens in zip(group, encoded, strict=True):
                packers[part].add(text, end, tokens)
        splits = {part: packer.close() for part, packer in packers.items()}
        if not splits["train"]["tokens"]:
            raise UserError("there is no training text: the sources are empty, or shorter than one row")
        if holdout and not splits["heldout"]["tokens"]:
            reason = f"{holdout:.3g} of this text is less than one {'token' if length is None else 'row'}"
            if length is not None and not splits["heldout"]["documents"]:
                reason = f"no document begins in the last {holdout:.3g} of this text, and none is cut in two"
            raise UserError(f"{reason}: hold out more, or nothing (0)")
        for name, data in chosen.files().items():
            (new / name).write_bytes(data)
        vocab_size, mask_id = vocabulary(chosen)
        manifest = {
            "format": FORMAT,
            "request": request,
            "tokenizer": chosen.to_json(),
            "vocab_size": vocab_size,
            "mask_id": mask_id,
            "packing": packing,
            "length": length,
            "licence": licence,
            "splits": splits,
        }
        write_json(new / "manifest.json", manifest)

    return TokenFile.load(write_folder(out, fill, overwrite=False), verify=False)


def _groups(parts: Iterator[tuple[str, str, bool]]) -> Iterator[list[tuple[str, str, bool]]]:
    """The pieces of a text in order, so many together that there is work for every core."""
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part[1])
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


# ----------------------------------------------------------------------------------------------------------- read


@dataclass(frozen=True)
class TokenFile:
    """A corpus that is ready to be read. Arrays are memory-mapped, so opening one costs nothing."""

    folder: Path
    manifest: dict[str, Any]
    train: np.ndarray  # (N,) for running text, (rows, L) otherwise
    heldout: np.ndarray
    train_real: np.ndarray | None = None  # pad: real tokens of each row
    heldout_real: np.ndarray | None = None

    @classmethod
    def load(cls, folder: str | Path, verify: bool = True) -> TokenFile:
        """Open a corpus. Sizes are always checked against the manifest, with `verify` the hashes of files below a
        gigabyte too."""
        folder = expand(folder)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest["format"] != FORMAT:
                raise UserError(f"{folder} has format {manifest['format']}, this version reads {FORMAT}")
            arrays: dict[str, np.ndarray] = {}
            for split in SPLITS:
                for name, facts in manifest["splits"][split]["files"].items():
                    if name not in (f"{split}.bin", f"{split}.rows"):
                        raise KeyError(name)
                    arrays[name] = _open_array(folder / name, facts, verify)
                if manifest["length"] is not None:
                    arrays[f"{split}.bin"] = arrays[f"{split}.bin"].reshape(-1, manifest["length"])
            if not 0 <= int(manifest["mask_id"]) < int(manifest["vocab_size"]) or manifest["packing"] not in PACKINGS:
                raise ValueError("mask_id")
            str(manifest["licence"]), dict(manifest["request"]), dict(manifest["tokenizer"])
            real = arrays.get("train.rows"), arrays.get("heldout.rows")
            return cls(folder, manifest, arrays["train.bin"], arrays["heldout.bin"], *real)
        except UserError:
            raise
        except FileNotFoundError as error:
            missing = Path(error.filename or "").name
            raise UserError(f"{folder} is not a corpus: {missing} is missing (relaylm prepare makes one)") from None
        except OSError as error:
            raise UserError(f"cannot read the corpus {folder}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{folder / 'manifest.json'} is damaged: prepare the corpus again") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made it."""
        return load_tokenizer(self.manifest["tokenizer"], self.folder)

    @property
    def vocab_size(self) -> int:
        """Token ids, the mask's included."""
        return int(self.manifest["vocab_size"])

    @property
    def mask_id(self) -> int:
        """The mask's id, which does not occur in the text."""
        return int(self.manifest["mask_id"])

    @property
    def identity(self) -> dict[str, str]:
        """What a training run remembers of its data: the hashes of the token files."""
        files = {n: f for split in SPLITS for n, f in self.manifest["splits"][split]["files"].items()}
        return {name: facts["sha256"] for name, facts in files.items()}

    def tokens(self, split: str) -> int:
        """How many tokens a part has, marks between texts included, padding not."""
        real = self.train_real if split == "train" else self.heldout_real
        return int(self.manifest["splits"][split]["tokens"] if real is None else real.sum())

    def characters_per_token(self) -> float:
        """Characters of the held-out source text for each of its tokens: those that were dropped count, padding does
        not."""
        facts = self.manifest["splits"]["heldout"]
        return float(facts["characters"] / max(1, self.tokens("heldout") + facts["dropped_tokens"]))

    def check_length(self, length: int) -> None:
        """Refuse a length of rows that the training text, or what is held out to measure it, does not have."""
        self.windows(length)
        if 0 < self.heldout.size < length:
            raise UserError(
                f"the held-out text has {self.heldout.size} tokens, less than one row of {length}: prepare the corpus "
                "again with a larger --holdout, or with --holdout 0 to measure nothing"
            )

    def windows(self, length: int) -> int:
        """How many rows one pass over the training text has."""
        if self.train.ndim == 2:
            if self.train.shape[1] != length:
                raise UserError(f"this corpus was packed in rows of {self.train.shape[1]}, not {length}")
            return len(self.train)
        if len(self.train) < length:
            raise UserError(f"the training text has {len(self.train)} tokens, less than one row of {length}")
        return max(1, (len(self.train) - length + 1) // length)

    def phases(self, length: int) -> int:
        """Running text: how many places the first window can start at so that all windows still fit."""
        return 1 if self.train.ndim == 2 else min(length, len(self.train) - self.windows(length) * length + 1)

    def batch(
        self, index_B: np.ndarray, length: int, phase: np.ndarray | int = 0
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Training rows by number, and the real tokens in each (None: all). Running text is read as windows that start
        at phase + index * length."""
        if self.train.ndim == 2:
            real = None if self.train_real is None else np.asarray(self.train_real[index_B])
            return np.asarray(self.train[index_B]), real
        start_B = phase + index_B * length
        return np.asarray(self.train[start_B[:, None] + np.arange(length)]), None


def _open_array(path: Path, facts: dict[str, Any], verify: bool) -> np.ndarray:
    dtype = np.dtype(facts["dtype"])
    if dtype.name not in ("uint8", "uint16", "uint32", "int32"):
        raise ValueError("dtype")
    size, expected = path.stat().st_size, int(facts["count"]) * dtype.itemsize
    if size != expected:
        raise UserError(f"{path} has {size} bytes, its manifest says {expected}: prepare the corpus again")
    if verify and size < _VERIFY_BELOW and file_sha256(path) != facts["sha256"]:
        raise UserError(f"{path} does not have the sha256 of its manifest: it was changed, prepare the corpus again")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype=dtype)
