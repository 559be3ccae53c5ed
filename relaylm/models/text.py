"""Where text comes from: plain, .xz, .gz and .jsonl files, folders of them, and datasets of the hub, piece by piece.

In a plain file documents are separated by blank lines, and sentences (for the packing `pad`) by line ends; in a .jsonl
file each line is one document. Nothing is held in memory but one piece of about a megabyte, cut where that does not
change the tokens, so a source may be of any size.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from relaylm.errors import UserError, reason
from relaylm.files import expand, file_sha256
from relaylm.models.tokenizer import Tokenizer

_PIECE = 1 << 20  # characters read at a time

# Names people know, and where the hub keeps them: dataset, configuration, revision (where the main one needs a script).
_PARQUET = "refs/convert/parquet"
HUB = {
    "openwebtext": ("Skylion007/openwebtext", None, None),
    "lm1b": ("billion-word-benchmark/lm1b", None, _PARQUET),
    "text8": ("afmck/text8", None, None),
    "enwik8": ("LTCB/enwik8", "enwik8", _PARQUET),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1", None),
}

# Where running text may be cut without changing its tokens: before a single space between two words, of ASCII letters
# if possible (text8 turns anything else into spaces, and would see two of them), then of any letters and digits.
_SEAMS = (re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])"), re.compile(r"(?<=[^\W_]) (?=[^\W_])"))


@dataclass(frozen=True)
class Source:
    """One file, or one dataset of the hub (`hf:NAME`)."""

    name: str
    path: Path | None

    def documents(self) -> Iterator[str] | None:
        """Whole documents, for sources that have them marked; None for plain text."""
        if self.path is None:
            return self._hub_documents()
        return self._json_documents() if ".jsonl" in [s.lower() for s in self.path.suffixes[-2:]] else None

    def open(self) -> TextIO:
        """The file as text, decompressed if need be."""
        assert self.path is not None
        opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(self.path.suffix.lower(), open)
        return opener(self.path, "rt", encoding="utf-8-sig")  # some editors begin a file with a mark of its encoding

    def fingerprint(self) -> dict[str, Any]:
        """What a corpus remembers of its source."""
        if self.path is None:
            return {"name": self.name}
        with _readable(self.name):
            return {"name": self.path.name, "bytes": self.path.stat().st_size, "sha256": file_sha256(self.path)}

    def _json_documents(self) -> Iterator[str]:
        with self.open() as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    text = None
                if not isinstance(text, str):
                    raise UserError(f"line {number} of {self.name} is not a JSON object with the key 'text'")
                yield text

    def _hub_documents(self) -> Iterator[str]:
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"reading {self.name} from the hub needs the package 'datasets': pip install 'relaylm[data]'"
            ) from None
        short = self.name.removeprefix("hf:")
        name, configuration, revision = HUB.get(short, (short, None, None))
        try:  # not streamed: `datasets` keeps it on disk, memory-mapped, and it is read more than once
            rows = datasets.load_dataset(name, configuration, split="train", revision=revision)
        except Exception as error:
            raise UserError(f"cannot load the dataset {name}: {reason(error)}") from None
        yield from (row["text"] for row in rows)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what can go wrong with a file into one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {error.object[error.start]:#x})") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name} is not a whole compressed file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {name}: {reason(error)}") from None


def find_sources(names: Sequence[str | Path] | str | Path) -> list[Source]:
    """The files and datasets that names stand for; a folder stands for the text files in it."""
    found: list[Source] = []
    for name in [names] if isinstance(names, str | Path) else names:
        path = expand(name)
        if str(name).startswith("hf:"):
            found.append(Source(str(name), None))
        elif path.is_file():
            found.append(Source(str(name), path))
        elif path.is_dir():
            named = (p for p in path.rglob("*") if re.search(r"\.(txt|md|jsonl)(\.(xz|gz))?$", p.name.lower()))
            inside = sorted(p for p in named if p.is_file())
            if not inside:
                raise UserError(f"the folder {name} has no .txt, .md or .jsonl files in it, plain or as .xz or .gz")
            found += [Source(str(p), p) for p in inside]
        else:
            raise UserError(f"there is no text file {name} (for a dataset of the hub write hf:NAME)")
    if not found:
        raise UserError("no text to prepare: name at least one file or hf:DATASET")
    return found


def _cut(text: str) -> int:
    """The last place in a text where it may be cut in two; its end if it has none."""
    for seam in _SEAMS:
        for start in (max(0, len(text) - 4096), 0):
            if found := [match.start() for match in seam.finditer(text, start)]:
                return found[-1]
    return len(text)


def _small(text: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces of at most about a megabyte, cut where its tokens are not changed."""
    while len(text) > 2 * _PIECE:
        at = _cut(text[:_PIECE]) or _PIECE
        yield text[:at], False
        text = text[at:]
    yield text, True


def pieces(sources: list[Source], packing: str) -> Iterator[tuple[str, bool]]:
    """The text in order, as (piece, does a document end with it?)."""
    for source in sources:
        with _readable(source.name):
            documents = source.documents()
            if documents is not None:
                for document in documents:
                    yield from _small(document + "\n\n" if packing == "running" else document)
            elif packing == "pad":
                with source.open() as lines:
                    yield from ((line.strip(), True) for line in lines if line.strip())
            else:
                yield from _plain(source, packing)


def _plain(source: Source, packing: str) -> Iterator[tuple[str, bool]]:
    """A plain file: as it stands, or cut at blank lines into documents without the white space around them."""
    separator = re.compile(r"\n[ \t]*\n\s*")
    opened = False  # is a document under way of which a piece has gone out already?
    with source.open() as file:
        rest, block = "", "-"
        while block:
            block = file.read(_PIECE)
            text = rest + block
            if packing == "wrap":
                *whole, text = separator.split(text)
                for document in whole:
                    document = document.rstrip() if opened else document.strip()
                    if document or opened:
                        yield document, True
                    opened = False
            if len(text) < _PIECE:
                rest = text
                continue
            # White space at the end stays for the next round: a blank line may straddle two blocks.
            at = _cut(text)
            if at == len(text):
                at = max(1, len(text.rstrip()) - 1)
            yield text[:at] if opened or packing == "running" else text[:at].lstrip(), False
            rest, opened = text[at:], True
        if packing == "wrap":
            rest = rest.rstrip() if opened else rest.strip()
        if rest or opened:
            yield rest, True


def read_text(names: Sequence[str | Path] | str | Path) -> str:
    """The whole text of a source that `prepare` could read, for what is small enough to be held in memory."""
    return "".join(text for text, _ in pieces(find_sources(names), "running"))


def wrap_marks(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """What `wrap` puts before and after a row: bos, or eos where there is none, and eos."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id, tokenizer.eos_id


def wrapped_rows(tokens_N: np.ndarray, length: int, first: int | None, last: int | None) -> np.ndarray | None:
    """Rows of the packing `wrap` found in a text: `length` tokens that begin with the mark `first` and end with `last`
    where the next row begins. None if no row follows another: then the text is not packed so. A row that did not
    survive being written as text (a word cut in two can come back as other tokens) is left out."""
    if first is None or last is None:
        return None
    ends = tokens_N == last
    begins = np.append(tokens_N, first) == first  # what comes after the text begins a row too
    after = np.append(True, ends)  # does a row end before this token?
    start_S = np.flatnonzero(begins[:-1] & after[:-1])
    start_S = start_S[start_S + length <= len(tokens_N)]
    start_S = start_S[ends[start_S + length - 1] & begins[start_S + length]]
    kept, free = [], 0
    for start in start_S.tolist():
        if start >= free:
            kept.append(start)
            free = start + length
    if not np.isin(np.array(kept, dtype=np.int64) + length, kept).any():
        return None
    return np.asarray(tokens_N[np.array(kept)[:, None] + np.arange(length)])
