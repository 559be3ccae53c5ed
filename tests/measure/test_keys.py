"""What is in a store is found only by what would give the same again: one input changed at a time, with one store."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.compare import compare
from relaylm.measure.evaluate import conditions
from relaylm.measure.judge import Judge, load_judge, weights_digest
from relaylm.measure.store import open_store
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.search.trials import Trials

VOCAB, LENGTH = 28, 8


class Backwards(Text8Tokenizer):
    """The same ids for other letters."""

    symbols = Text8Tokenizer.symbols[0] + Text8Tokenizer.symbols[:0:-1]

    def to_json(self) -> dict[str, Any]:
        return {"type": "backwards"}


def network(seed: int, depth: int = 1, **shape: Any) -> Transformer:
    model = Transformer(Architecture(VOCAB, LENGTH, width=16, depth=depth, **{"heads": 2, **shape}))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    for k, tensor in enumerate(model.parameters()):
        tensor.data += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(100 * seed + k))
    return model


def family(heads: int = 2, tokenizer: Text8Tokenizer | None = None, **judge: Any) -> Family:
    models = {"a": network(0, heads=heads), "b": network(1, 2, heads=heads)}
    made = Family(models, VOCAB - 1, VOCAB, LENGTH, tokenizer or Text8Tokenizer())
    made.judge = network(2, causal=True, **judge)
    return made


def nll(ids_BL: Tensor, real_B: Tensor) -> Tensor:
    return ids_BL[:, 1:].double() / 3


def reader(eos: int | None = None) -> Judge:
    """A judge that reads text letter by letter, of five kinds, whose loss depends on the letter."""

    def encode(text: str) -> tuple[list[int], list[int]]:
        return [ord(c) % 5 for c in text], list(range(1, len(text) + 1))

    return Judge("letters", "letters", nll, 1 << 20, torch.device("cpu"), 4096, encode, eos)


def log_ppls(of: Family, store: Path | None, **options: Any) -> Any:
    found = compare(of, ["a", "b"], 4, steps=4, rivals=False, progress=False, store=store, **options)
    return [row["log_ppls"] for row in found["rows"]]


def trials(of: Family, folder: Path | None, judge: Any, recipe: str = "plain") -> np.ndarray:
    referee, given = load_judge(judge, of), np.full((1, LENGTH), -1)
    made = Trials(of, referee, given, "b", 0, recipe=recipe, batch=4, store=open_store(folder))
    return made.scores([Schedule.parse("a:4"), Schedule.parse("b:4")], 4)


CHANGES: dict[str, tuple[Family, Family, list[dict[str, Any]]]] = {
    "heads of the denoisers": (family(), family(4), [{}, {}]),
    "heads of the judge": (family(), family(), [{}, {}]),
    "tokenizer": (family(), family(tokenizer=Backwards()), [{"judge": reader()}, {"judge": reader()}]),
    "eos": (family(), family(), [{"judge": reader(eos=eos), "recipe": "mdlm"} for eos in (2, 3)]),
}
CHANGES["heads of the judge"][1].judge = network(2, causal=True, heads=4)


@pytest.mark.parametrize("what", CHANGES)
def test_one_changed_input_is_another_record(what: str, tmp_path: Path) -> None:
    before, after, (first, second) = CHANGES[what]
    assert log_ppls(before, tmp_path, **first) == log_ppls(before, tmp_path, **first)
    fresh = log_ppls(after, None, **second)
    assert log_ppls(after, tmp_path, **second) == fresh != log_ppls(before, None, **first)


@pytest.mark.parametrize("what", CHANGES)
def test_a_search_knows_them_too(what: str, tmp_path: Path) -> None:
    before, after, (first, second) = CHANGES[what]
    options = [{"judge": None, **each} for each in (first, second)]
    trials(before, tmp_path, **options[0])
    fresh = trials(after, None, **options[1])
    if what == "heads of the denoisers":  # a store holds one family
        with pytest.raises(UserError, match="another folder"):
            trials(after, tmp_path, **options[1])
    else:
        np.testing.assert_array_equal(trials(after, tmp_path, **options[1]), fresh)
    assert (trials(before, None, **options[0]) != fresh).any()


def test_what_a_position_sees_is_part_of_a_network() -> None:
    """Equal tensors, other functions."""
    digests = {
        weights_digest(network(3, **shape)) for shape in ({}, {"heads": 4}, {"causal": True}, {"block_length": 4})
    }
    assert len(digests) == 4 and weights_digest(network(3)) in digests


def test_a_narrow_residual_stream_is_another_condition() -> None:
    plain, narrow = family(), family()
    for model in narrow.models.values():
        model.narrow = True  # type: ignore[attr-defined]
    assert conditions(plain, 4) != conditions(narrow, 4) == {**conditions(plain, 4), "dtype": narrow.precision}


def test_the_length_of_mdlms_blocks_is_part_of_the_key(tmp_path: Path) -> None:
    """It goes by the judge's context, and by its name."""
    of, options = family(), {"recipe": "mdlm", "store": tmp_path}
    short = dataclasses.replace(reader(eos=2), context=3)
    log_ppls(of, judge=dataclasses.replace(short, context=1 << 20), **options)
    assert log_ppls(of, judge=short, **options) == log_ppls(of, None, judge=short, recipe="mdlm")
