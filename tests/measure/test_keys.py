"""What is in a store is found only by what would give the same again: one input changed at a time, with one store."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
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
from relaylm.search.tune import _bound_table

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


def searched(of: Family, folder: Path | None, judge: Any, **options: Any) -> Trials:
    given = options.pop("given", np.full((1, LENGTH), -1))
    return Trials(of, load_judge(judge, of), given, "b", **{"batch": 4, **options}, store=open_store(folder))


def trials(of: Family, folder: Path | None, judge: Any, **options: Any) -> np.ndarray:
    return searched(of, folder, judge, **options).scores([Schedule.parse("a:4"), Schedule.parse("b:4")], 4)


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


@pytest.mark.parametrize("what", ["a", "judge"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_changed_in_memory_are_another_record(what: str, dtype: str, tmp_path: Path) -> None:
    folder = family().save_pretrained(tmp_path / "family", dtype="float32")
    of, store = Family.load(folder, dtype=dtype), tmp_path / "store"
    before = log_ppls(of, store)
    changed: Any = of[what] if what == "a" else of.judge
    changed.output_layer.linear.bias.data[:9] += 2
    fresh = log_ppls(of, None)
    assert log_ppls(of, store) == fresh != before == log_ppls(Family.load(folder, dtype=dtype), store)


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


def test_recipes_and_longest_texts_are_part_of_the_key(tmp_path: Path) -> None:
    """MDLM's recipe cuts texts at the family's length: here the judge has two tokens for a letter."""

    def twice(text: str) -> tuple[list[int], list[int]]:
        return [k for c in text for k in (ord(c) % 5, 3)], [end for end in range(1, len(text) + 1) for _ in (1, 2)]

    judge, found = dataclasses.replace(reader(eos=1), encode=twice), []
    for recipe, length in (("plain", 8), ("mdlm", 8), ("mdlm", 6)):
        of, options = family(), {"judge": judge, "recipe": recipe, "length": 6}
        of.length = length
        found.append(log_ppls(of, tmp_path, **options))
        assert found[-1] == log_ppls(of, None, **options)
    assert all(a != b for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"given": np.array([[3] + [-1] * (LENGTH - 1)])}, {"recipe": "mdlm"}],
    ids=lambda change: next(iter(change)),
)
def test_a_search_asks_for_its_own_rows(change: dict[str, Any], tmp_path: Path) -> None:
    of, judge = family(), None if "given" in change else reader(eos=2)
    before = trials(of, tmp_path, judge)
    fresh = trials(of, None, judge, **change)
    np.testing.assert_array_equal(trials(of, tmp_path, judge, **change), fresh)
    assert (fresh != before).any()


def test_another_batch_size_is_another_search(tmp_path: Path) -> None:
    """The law is the same, but the bits need not be."""
    assert searched(family(), tmp_path, None).base != searched(family(), tmp_path, None, batch=2).base


def test_the_prior_of_a_text_is_not_that_of_another(tmp_path: Path) -> None:
    """Nor of one with the same bytes in other numbers."""
    of, models = family(), dict(family().models)
    problem = SimpleNamespace(family=of, heavy="b", steps=4, trials=searched(of, tmp_path, None))
    tuner: Any = SimpleNamespace(problem=problem, rows=SimpleNamespace(used=0.0))
    one = np.random.default_rng(0).integers(0, 27, (3, LENGTH))
    texts = [one, one[:, ::-1].copy(), one.view(np.int32)]  # the last has a zero after each token
    losses = [_bound_table(tuner, models, text)[0].c_KND for text in texts]
    for text, loss in zip(texts, losses, strict=True):
        fresh: Any = SimpleNamespace(
            problem=SimpleNamespace(**{**vars(problem), "trials": searched(of, None, None)}), rows=tuner.rows
        )
        np.testing.assert_array_equal(loss, _bound_table(fresh, models, text)[0].c_KND)
    assert all((a != b).any() for a, b in itertools.combinations(losses, 2))


def test_the_prior_of_samples_is_that_of_their_steps(tmp_path: Path) -> None:
    """Where there is no text it is measured on the heavy model's samples in as many steps as the search has."""
    of, models, losses = family(), dict(family().models), []
    for steps in (1, LENGTH):
        found = []
        for folder in (tmp_path, None):
            own = {"family": of, "heavy": "b", "steps": steps, "trials": searched(of, folder, None)}
            problem = SimpleNamespace(**own, alone=lambda model, steps=steps: Schedule.parse(f"{model}:{steps}"))
            tuner: Any = SimpleNamespace(problem=problem, rows=SimpleNamespace(used=0.0))
            found.append(_bound_table(tuner, models, None)[0].c_KND)
        np.testing.assert_array_equal(*found)
        losses.append(found[0])
    assert (losses[0] != losses[1]).any()
