"""Requests laid out as token ids."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_json
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from relaylm.errors import UserError
from relaylm.models.denoiser import FromLogits
from relaylm.models.family import Family
from relaylm.models.tokenizer import ByteTokenizer, JsonTokenizer, Text8Tokenizer
from relaylm.sampling.sample import lay_out

TEXT8 = Text8Tokenizer()


def table(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tokens.shape, 4)


def reader(tokenizer: Any = TEXT8, length: int = 8, vocab_size: int = 300, mask_id: int = 299) -> Family:
    return Family({"a": FromLogits(table)}, mask_id, vocab_size, length, tokenizer)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, [-1] * 8),
        ({"length": 3}, [-1] * 3),
        ({"max_new_tokens": 2}, [-1, -1]),
        ({"prompt": "ab"}, [1, 2, -1, -1, -1, -1, -1, -1]),
        ({"prompt": ""}, [-1] * 8),
        ({"prompt": "a ", "suffix": "z", "length": 5}, [1, 0, -1, -1, 26]),
        ({"prompt": "ab", "suffix": "c", "max_new_tokens": 2}, [1, 2, -1, -1, 3]),
        ({"suffix": "abcdefg"}, [-1, 1, 2, 3, 4, 5, 6, 7]),
        ({"infill": "a__b_"}, [1, -1, -1, 2, -1]),
        ({"infill": "_"}, [-1]),
        ({"infill": "a_", "length": 2, "prompt": ""}, [1, -1]),
    ],
)
def test_lay_out(request_: dict[str, Any], expected: list[int]) -> None:
    laid = lay_out(reader(), **request_)
    assert laid.dtype == np.int64 and laid.tolist() == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": "abcdefghi"}, "the prompt takes 9 positions, but the length is 8"),
        ({"prompt": "abcde", "suffix": "fghi"}, "the prompt and the suffix take 9 positions, but the length is 8"),
        ({"suffix": "abc", "length": 2}, "the suffix takes 3 positions, but the length is 2"),
        ({"prompt": "abcdefgh"}, "nothing is left to write: the prompt takes all 8 positions"),
        (
            {"prompt": "ab", "suffix": "c", "length": 3},
            "nothing is left to write: the prompt and the suffix take all 3",
        ),
        ({"prompt": "abc", "max_new_tokens": 6}, "the prompt takes 3 and max_new_tokens is 6, but .* length is 8"),
        ({"max_new_tokens": 9}, "^max_new_tokens is 9, but the family's length is 8"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"length": 0}, "length must be at least 1, not 0"),
        ({"length": 9}, "length 9 is more than the family's 8"),
        ({"length": 4, "max_new_tokens": 2}, "not both"),
        ({"prompt": "The"}, "the prompt cannot be read: 'T' is not a symbol of the text8 tokenizer.*lower-case a-z"),
        ({"suffix": "n0"}, "the suffix cannot be read: '0' is not"),
        ({"infill": "A_"}, "the infill text cannot be read: 'A'"),
        ({"infill": "ab"}, "nothing is left to write: the infill text has no _"),
        ({"infill": ""}, "nothing is left to write"),
        ({"infill": "a_", "prompt": "b"}, "without prompt, suffix"),
        ({"infill": "a_", "suffix": "b"}, "without prompt, suffix"),
        ({"infill": "a_", "max_new_tokens": 1}, "without prompt, suffix and max_new_tokens"),
        ({"infill": "a_", "length": 5}, "takes 2 positions, but length is 5"),
        ({"infill": "_" * 9}, "takes 9 positions, but the family's length is 8"),
    ],
)
def test_lay_out_refuses(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lay_out(reader(), **request_)


def test_lay_out_without_a_tokenizer() -> None:
    assert lay_out(reader(None), length=3).tolist() == [-1] * 3
    for key in ("prompt", "suffix", "infill"):
        with pytest.raises(UserError, match="has no tokenizer"):
            lay_out(reader(None), **{key: "a_"})


def test_lay_out_tokenises_between_blanks() -> None:
    tokenizer = JsonTokenizer(tiny_json())
    family = reader(tokenizer, vocab_size=tokenizer.size, mask_id=0)
    a, (space,) = tokenizer.encode("a"), tokenizer.encode(" ")
    assert lay_out(family, infill="a _a_").tolist() == [*a, space, -1, *a, -1]
    assert lay_out(reader(ByteTokenizer()), infill="é_").tolist() == [0xC3, 0xA9, -1]


def test_lay_out_refuses_a_given_mask() -> None:
    backend = Backend.from_str(tiny_json())
    backend.add_special_tokens(["[MASK]"])
    tokenizer = JsonTokenizer(backend.to_str())
    with pytest.raises(UserError, match="the prompt contains the mask token"):
        lay_out(reader(tokenizer, vocab_size=tokenizer.size, mask_id=0), prompt="a[MASK]")


@given(st.text(alphabet="_ab z", min_size=1, max_size=40).filter(lambda text: "_" in text))
def test_an_infill_text_shows_as_it_was_given(text: str) -> None:
    for tokenizer in (TEXT8, ByteTokenizer()):
        assert tokenizer.decode_partial(lay_out(reader(tokenizer, 40), infill=text), 299) == text


@given(prompt=st.text(" ab", max_size=9), suffix=st.text(" ab", max_size=9), length=st.none() | st.integers(-1, 10),
       new=st.none() | st.integers(-1, 10))  # fmt: skip
def test_lay_out_keeps_what_is_given(prompt: str, suffix: str, length: int | None, new: int | None) -> None:
    try:
        laid = lay_out(reader(), prompt, suffix, None, length, new).tolist()
    except UserError:
        return
    assert laid[: len(prompt)] == TEXT8.encode(prompt) and laid[len(laid) - len(suffix) :] == TEXT8.encode(suffix)
    assert 1 <= laid.count(-1) == len(laid) - len(prompt) - len(suffix) and len(laid) <= 8
    assert (length is None or len(laid) == length) and (new is None or laid.count(-1) == new)
