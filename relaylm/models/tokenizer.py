"""Text to token ids and back.

Three tokenizers are enough: the 27 symbols of text8, bytes, and any `tokenizers` JSON (GPT-2's, BERT's, one's own).
`encode` drops nothing silently: a symbol that a tokenizer lacks is an error that names it, so that a prompt is never
changed (`strict=False`, for training text, replaces it in the customary way). `decode` drops nothing: an id that has no
symbol, such as the mask, shows as a blank `_`.

The mask is the family's, not the tokenizer's: unless a tokenizer has its own mask token, the id after its last one.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from relaylm.errors import UserError, reason
from relaylm.files import expand, read_bytes

BLANK = "_"

# Names under which well-known tokenizers keep their special tokens, the most telling first.
EOS = ("<|endoftext|>", "</s>", "[SEP]", "<|end_of_text|>", "<eos>", "[EOS]")
BOS = ("<|endoftext|>", "<s>", "[CLS]", "<|begin_of_text|>", "<bos>", "[BOS]")
MASK = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
PAD = ("[PAD]", "<pad>", "<|pad|>")
UNKNOWN = ("[UNK]", "<unk>")


class Tokenizer(Protocol):
    """What a family needs. A tokenizer of one's own inherits from this and has `encode`, `_text` and `to_json`."""

    size: int  # ids run from 0 to size - 1
    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None  # its own mask token, one of its ids; None: the family's mask comes after the last id

    def encode(self, text: str, strict: bool = True) -> list[int]:
        """The ids of a text. A symbol that the tokenizer lacks is a UserError; with `strict=False` it is replaced in
        the way that is customary for this tokenizer."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode(text, strict=False)` gives for each text, on all cores where the tokenizer can do that."""
        return [self.encode(text, strict=False) for text in texts]

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` needs to make it again, beside `files`."""
        ...

    def files(self) -> dict[str, bytes]:
        """What has to lie beside that JSON, by file name."""
        return {}

    def _text(self, ids: list[int]) -> str:
        """The text of ids that all have a symbol."""
        ...

    def _unknown(self, tokens: set[int]) -> set[int]:
        return {token for token in tokens if not 0 <= token < self.size}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a row; ids without a symbol (the mask of a family, -1) become `_`."""
        return self.decode_partial(ids, None)

    def decode_partial(self, ids: Iterable[int], mask_id: int | None, blank: str = BLANK) -> str:
        """The text of a row in which every mask shows as one blank, even if the tokenizer has a token for it."""
        tokens = ids.tolist() if hasattr(ids, "tolist") else [*map(int, ids)]
        blanks = self._unknown(distinct := {*tokens}) | ({mask_id} & distinct)
        if not blanks:
            return self._text(tokens)
        runs = ((gone, [*run]) for gone, run in groupby(tokens, key=blanks.__contains__))
        return "".join(blank * len(run) if gone else self._text(run) for gone, run in runs)


class Text8Tokenizer(Tokenizer):
    """text8's 27 symbols: 0 is the space, 1 to 26 are a to z."""

    size = 27
    symbols = " abcdefghijklmnopqrstuvwxyz"
    _digits = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def encode(self, text: str, strict: bool = True) -> list[int]:
        """One id for each letter."""
        if not strict:
            text = self.normalise(text)
        elif odd := re.search("[^a-z ]", text):
            raise UserError(
                f"{odd.group()!r} is not a symbol of the text8 tokenizer, which knows lower-case a-z and the space "
                f"(no capitals, digits spelled out)"
            )
        return list(text.encode("ascii").translate(_TEXT8_IDS))

    @classmethod
    def normalise(cls, text: str) -> str:
        """A text by text8's rules (Mahoney's script): ASCII letters lower-cased, each ASCII digit spelled out between
        spaces, and every run of anything else, accented letters included, turned into one space."""
        text = re.sub("[A-Z]+", lambda match: match.group().lower(), text)
        text = re.sub("[0-9]", lambda match: f" {cls._digits[int(match.group())]} ", text)
        return re.sub("[^a-z]+", " ", text)

    def to_json(self) -> dict[str, Any]:
        """The kind."""
        return {"type": "text8"}

    def _text(self, ids: list[int]) -> str:
        return "".join(self.symbols[token] for token in ids)


_TEXT8_IDS = bytes(max(0, Text8Tokenizer.symbols.find(chr(code))) for code in range(256))


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8. Bytes that are not UTF-8 decode to the replacement character."""

    size = 256

    def encode(self, text: str, strict: bool = True) -> list[int]:
        """One id for each byte."""
        if not strict:
            return list(text.encode("utf-8", errors="replace"))
        check_unicode(text)
        return list(text.encode("utf-8"))

    def to_json(self) -> dict[str, Any]:
        """The kind."""
        return {"type": "bytes"}

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizers` JSON, kept byte for byte so saving it changes nothing. Special tokens are found by their usual
    names; `mask_token` names a mask that has another. Only the text is encoded: no special tokens are added, nothing is
    truncated or padded, whatever the JSON says."""

    file_name = "tokenizer.json"

    def __init__(self, data: bytes | str, mask_token: str | None = None, where: str = "the tokenizer") -> None:
        self._data = data.encode() if isinstance(data, str) else data
        try:
            self._backend = tokenizers.Tokenizer.from_str(self._data.decode("utf-8"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            raise UserError(f"{where} is not a tokenizers JSON ({reason(error)})") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{where} has no tokens")
        self.size = max(vocabulary.values()) + 1
        self._ids = set(vocabulary.values())
        if mask_token is not None and mask_token not in vocabulary:
            raise UserError(f"{where} has no token {mask_token!r} to be the mask")
        self._mask_token = mask_token

        def find(names: Iterable[str]) -> int | None:
            return next((vocabulary[name] for name in names if name in vocabulary), None)

        self.eos_id, self.bos_id, self.pad_id = find(EOS), find(BOS), find(PAD)
        self.mask_id = find(MASK if mask_token is None else (mask_token,))
        unknown = getattr(self._backend.model, "unk_token", None)
        self._unknown_names = UNKNOWN if unknown is None else (unknown,)
        self._unknown_id = find(self._unknown_names)

    def encode(self, text: str, strict: bool = True) -> list[int]:
        """The ids by the JSON's own rules."""
        if not strict:
            return list(self._backend.encode(whole_characters(text), add_special_tokens=False).ids)
        check_unicode(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        covered = bytearray(len(text))
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self._unknown_id and text[start:end] not in self._unknown_names:
                raise UserError(f"{text[start:end]!r} is not in the tokenizer's vocabulary")
            covered[start:end] = b"\1" * (end - start)
        # Some models drop what they do not know (and give later offsets wrong, so the culprit is found one by one).
        # Spaces, accents and control characters are the normaliser's business.
        visible = [i for i, symbol in enumerate(text) if unicodedata.category(symbol)[0] not in "ZMC"]
        if not all(covered[i] for i in visible):
            odd = next((text[i] for i in visible if not self.encode(text[i], strict=False)), text)
            raise UserError(f"{odd!r} is not in the tokenizer's vocabulary")
        return list(encoding.ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores."""
        batch = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)  # without offsets, if it can
        return [encoding.ids for encoding in batch([*map(whole_characters, texts)], add_special_tokens=False)]

    def to_json(self) -> dict[str, Any]:
        """The kind, the file and its sha256."""
        mask = {} if self._mask_token is None else {"mask_token": self._mask_token}
        return {"type": "json", "file": self.file_name, "sha256": hashlib.sha256(self._data).hexdigest(), **mask}

    def files(self) -> dict[str, bytes]:
        """The JSON as it was read."""
        return {self.file_name: self._data}

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _unknown(self, tokens: set[int]) -> set[int]:
        return tokens - self._ids


def load_tokenizer(spec: str | Path | Mapping[str, Any], folder: str | Path | None = None) -> Tokenizer:
    """A tokenizer from "text8", "bytes", a JSON file or a folder with a tokenizer.json, or what `to_json` gave (with
    the folder that its files lie in)."""
    plain = {"text8": Text8Tokenizer, "bytes": ByteTokenizer}
    kind = spec.get("type") if isinstance(spec, Mapping) else spec
    if isinstance(kind, str) and kind in plain:
        return plain[kind]()
    if isinstance(spec, Mapping):
        return _from_json(spec, folder)
    path = expand(spec)
    if path.is_dir():
        path = path / JsonTokenizer.file_name
    if not path.is_file():
        raise UserError(
            f"there is no tokenizer {str(spec)!r}: write text8, bytes, a tokenizers JSON file or a folder with one, or "
            "bpe:SIZE in `relaylm prepare`"
        )
    return JsonTokenizer(read_bytes(path), where=str(path))


def _from_json(spec: Mapping[str, Any], folder: str | Path | None) -> Tokenizer:
    mask_token, expected = spec.get("mask_token"), spec.get("sha256")
    if spec.get("type") != "json":
        raise UserError(f"tokenizer type {spec.get('type')!r} is not known: it is text8, bytes or json")
    if spec.get("file") != JsonTokenizer.file_name or not isinstance(expected, str):
        raise UserError(f"a json tokenizer is stored in the file {JsonTokenizer.file_name} with its sha256")
    if folder is None or not isinstance(mask_token, str | None):
        raise UserError("a json tokenizer needs the folder that its file lies in, and a mask_token that is text")
    path = Path(folder) / JsonTokenizer.file_name
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != expected:
        raise UserError(f"{path} does not have the sha256 that was recorded for it: it was cut short or changed")
    return JsonTokenizer(data, mask_token, where=str(path))


def portable_json(tokenizer: Tokenizer) -> bytes | None:
    """The tokenizer as a `tokenizers` JSON, for readers that know no other: the same ids for the same text. None for
    one of a kind unknown here."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.files()[tokenizer.file_name]
    if isinstance(tokenizer, Text8Tokenizer):
        letters = dict(enumerate(tokenizer.symbols))
    elif isinstance(tokenizer, ByteTokenizer):
        # The byte-level alphabet: visible Latin-1 characters stand for themselves, the others come after it in order.
        letters = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
        letters |= {byte: chr(256 + k) for k, byte in enumerate(b for b in range(256) if b not in letters)}
    else:
        return None
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in letters.items()}, merges=[]))
    backend.decoder = decoders.Fuse()
    if isinstance(tokenizer, ByteTokenizer):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    return str(backend.to_str()).encode()


def vocabulary(tokenizer: Tokenizer) -> tuple[int, int]:
    """The vocabulary size and mask id of a family made for this tokenizer."""
    return (tokenizer.size + 1, tokenizer.size) if tokenizer.mask_id is None else (tokenizer.size, tokenizer.mask_id)


def check_unicode(text: str) -> None:
    """Refuse text that cannot be written."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{text[error.start]!r} is half a character (a lone surrogate), not text") from None


def whole_characters(text: str) -> str:
    """A text in which every half of a character (a lone surrogate) is a question mark, so that it can be written."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
