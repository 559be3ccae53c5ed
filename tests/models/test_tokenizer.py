"""Tokenizers: known answers, round trips, and that nothing is lost without a word."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from relaylm.errors import UserError
from relaylm.models.tokenizer import ByteTokenizer, JsonTokenizer, Text8Tokenizer, load_tokenizer, vocabulary

TEXT8 = Text8Tokenizer()
BYTES = ByteTokenizer()


def byte_level() -> str:
    """GPT-2's kind in small: every byte a token, one merge, and <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {symbol: i for i, symbol in enumerate([*alphabet, "he", "<|endoftext|>"])}
    backend = Backend(models.BPE(vocab=tokens, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend.to_str()


def word_pieces() -> str:
    """BERT's kind in small: lower-cases, strips accents, has [MASK] in the middle, wraps texts and cuts them short."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "the"]
    backend = Backend(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(words[:5])
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    return backend.to_str()


GPT2, BERT = JsonTokenizer(byte_level()), JsonTokenizer(word_pieces())


def test_text8_known_answers() -> None:
    assert TEXT8.encode(" abz") == [0, 1, 2, 26]
    assert TEXT8.decode([20, 8, 5, 0, 27, 1]) == "the _a"
    assert (TEXT8.size, TEXT8.eos_id, TEXT8.bos_id, TEXT8.mask_id, vocabulary(TEXT8)) == (
        27,
        None,
        None,
        None,
        (28, 27),
    )


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("The 3 men", "the three men"),
        ("in 1984, Éva said: no!", "in one nine eight four va said no "),
        ("a\n\n\tb", "a b"),
        ("\N{KELVIN SIGN}elvin İ ١", " elvin "),
        ("", ""),
    ],
)
def test_text8_normalise(raw: str, clean: str) -> None:
    assert Text8Tokenizer.normalise(raw) == clean


@pytest.mark.parametrize("odd", ["T", "1", "_", "é", "\n", "."])
def test_text8_names_what_it_lacks(odd: str) -> None:
    with pytest.raises(UserError, match="a-z and the space") as error:
        TEXT8.encode(f"ab{odd}c")
    assert repr(odd) in str(error.value) and "\n" not in str(error.value)


@given(st.text(alphabet=" abcdefghijklmnopqrstuvwxyz"))
def test_text8_round_trip(text: str) -> None:
    assert TEXT8.decode(TEXT8.encode(text)) == text


@given(st.text())
def test_text8_normalised_text_can_be_encoded(text: str) -> None:
    clean = TEXT8.normalise(text)
    assert TEXT8.normalise(clean) == clean and "  " not in clean
    assert TEXT8.decode(TEXT8.encode(clean)) == clean
    assert TEXT8.encode(text, strict=False) == TEXT8.encode(clean)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.integers(-2, 300)))
def test_no_position_of_a_row_vanishes(ids: list[int]) -> None:
    for tokenizer in (TEXT8, BYTES):
        text = tokenizer.decode_partial(ids, tokenizer.size)
        assert text.count("_") >= sum(not 0 <= token < tokenizer.size for token in ids)
    assert len(TEXT8.decode(ids)) == len(ids)


def test_bytes_known_answers() -> None:
    assert BYTES.encode("é_") == [0xC3, 0xA9, 0x5F]
    assert BYTES.decode([0xC3, 256, 0xA9]) == "\N{REPLACEMENT CHARACTER}_\N{REPLACEMENT CHARACTER}"
    assert vocabulary(BYTES) == (257, 256)
    with pytest.raises(UserError, match="surrogate"):
        BYTES.encode("\ud800")
    assert BYTES.encode("\ud800", strict=False) == [ord("?")]


def test_rows_may_be_arrays() -> None:
    assert TEXT8.decode(np.array([1, 27], dtype=np.int64)) == "a_"
    assert GPT2.decode(np.array(GPT2.encode("hé"))) == "hé"


def test_json_special_tokens() -> None:
    assert (GPT2.size, GPT2.eos_id, GPT2.bos_id, GPT2.mask_id, vocabulary(GPT2)) == (258, 257, 257, None, (259, 258))
    assert (BERT.size, BERT.eos_id, BERT.bos_id, BERT.mask_id, BERT.pad_id, vocabulary(BERT)) == (8, 3, 2, 4, 0, (8, 4))
    assert JsonTokenizer(word_pieces(), mask_token="the").mask_id == 7
    with pytest.raises(UserError, match=r"no token '<nope>'"):
        JsonTokenizer(word_pieces(), mask_token="<nope>")


@given(st.text())
def test_json_byte_level_round_trip(text: str) -> None:
    assert GPT2.decode(GPT2.encode(text)) == text


def test_json_adds_and_cuts_nothing() -> None:
    assert BERT.encode("The cats the CATS") == [7, 5, 6, 7, 5, 6]  # no [CLS], no truncation to 2, no padding to 10
    assert BERT.decode([7, 5, 6]) == "the cats"
    assert GPT2.encode("he<|endoftext|>")[-1] == 257 and len(GPT2.encode("he")) == 1


def test_json_shows_the_mask() -> None:
    assert BERT.decode([7, 4, 5]) == "the [MASK] cat"
    assert BERT.decode_partial([7, 4, 5], 4) == "the_cat"
    assert GPT2.decode([*GPT2.encode("he"), 258, -1]) == "he__"
    assert GPT2.decode_partial([*GPT2.encode("he"), 258], 258, blank="░") == "he░"


def test_json_names_what_it_lacks() -> None:
    with pytest.raises(UserError, match="'dog' is not in"):
        BERT.encode("the dog")
    assert BERT.encode("the dog", strict=False) == [7, 1]
    assert BERT.encode("cát the\u0301") == [5, 7]  # accents are for the normaliser to strip
    silent = JsonTokenizer(Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).to_str())
    assert silent.encode("axb", strict=False) == [0, 1]  # this model drops what it does not know
    with pytest.raises(UserError, match="'x' is not in"):
        silent.encode("axb")


def test_the_token_for_what_is_unknown_may_be_written_out() -> None:
    words = JsonTokenizer(Backend(models.WordLevel(vocab={"a": 0, "other": 1}, unk_token="other")).to_str())
    assert words.encode("other") == [1]
    for odd in ("b", "[UNK]"):
        with pytest.raises(UserError, match="is not in"):
            words.encode(odd)


def test_holes_in_a_vocabulary_are_blanks() -> None:
    sparse = JsonTokenizer(Backend(models.WordLevel(vocab={"a": 0, "b": 3}, unk_token="a")).to_str())
    assert sparse.size == 4 and sparse.decode([0, 1, 3]) == "a_b"


def test_load(tmp_path) -> None:
    assert isinstance(load_tokenizer("text8"), Text8Tokenizer)
    assert isinstance(load_tokenizer({"type": "bytes"}), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text(byte_level())
    for spec in (tmp_path, str(tmp_path / "tokenizer.json"), GPT2.to_json()):
        loaded = load_tokenizer(spec, tmp_path)
        assert loaded.encode("hé") == GPT2.encode("hé")
        assert loaded.files() == GPT2.files() and json.dumps(loaded.to_json())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.json", "there is no tokenizer 'nowhere.json'"),
        ({"type": "magic"}, "'magic' is not known"),
        ({"type": "json", "file": "../../secret", "sha256": "0"}, "is stored in the file tokenizer.json"),
        ({"type": "json", "file": "tokenizer.json", "sha256": "0" * 64}, "cut short or changed"),
        ({**GPT2.to_json(), "mask_token": 3}, "mask_token that is text"),
    ],
)
def test_load_refuses(tmp_path, spec, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level())
    with pytest.raises(UserError, match=message):
        load_tokenizer(spec, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}', b"[" * 100_000])
def test_load_refuses_what_is_not_a_tokenizer(tmp_path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="is not a tokenizers JSON"):
        load_tokenizer(tmp_path)
