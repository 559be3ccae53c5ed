"""Odd calls of the library: each ends in one UserError that names the argument, before anything is sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from search_oracle import small_family

import relaylm
from relaylm.errors import UserError
from relaylm.measure.compare import compare
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.denoise import rows_in_call

V, LENGTH = 28, 12


def family() -> Family:
    uniform = relaylm.FromLogits(lambda tokens, t: torch.zeros(*tokens.shape, V))
    return Family({"a": uniform}, V - 1, V, LENGTH, Text8Tokenizer())


def given(value: Any, dtype: Any = None) -> np.ndarray:
    row = np.full(LENGTH, -1, dtype=np.float64 if dtype is None else dtype)
    row[0] = value
    return row


ODD_NUMBERS = (0, -1, 1.5, "2", True, math.nan, 2**70, [1], np.float32(2.0))
ODD: list[tuple[str, Any]] = [(name, value) for name in ("n", "batch_size") for value in ODD_NUMBERS]
ODD += [("length", value) for value in (0, -1, 1.5, "2", True, math.nan)]
ODD += [("first_row", value) for value in (-1, 1.5, "2", True, math.nan, 2**32)]
ODD += [("seed", value) for value in (-1, 1.5, "2", math.nan, 2**64)]
ODD += [("steps", value) for value in (0, -1, 1.5, "2", math.nan, -math.inf, [3])]
ODD += [("max_new_tokens", 0), ("max_new_tokens", "3"), ("top_k", 0), ("top_k", 1.5), ("stride", 0), ("stride", "x")]
ODD += [("temperature", value) for value in ("hot", -1.0, 0.0, math.nan, math.inf, [1.0], True)]
ODD += [("top_p", value) for value in ("x", 0.0, 1.5, math.nan, -1)]
ODD += [
    (name, value) for name in ("prompt", "suffix", "infill", "stop", "light", "heavy") for value in (5, b"a", ["a"])
]
ODD += [("schedule", value) for value in (3, None, [], {}, "", "a:x", "\ud800")]
ODD += [("family", value) for value in ("wiki-char", None, 3)]
ODD += [(name, value) for name in ("callback", "on_calls") for value in (3, "x")]
ODD += [("rule", "no-such-rule"), ("rule", 3), ("spacing", 0), ("spacing", "x"), ("spacing", 1.5)]
ODD += [
    ("given", given(-5, np.int64)),
    ("given", given(1.7)),
    ("given", given(math.nan)),
    ("given", np.full(LENGTH, 2**64 - 1, dtype=np.uint64)),
    ("given", given(V - 1, np.int64)),
    ("given", given(V, np.int64)),
    ("given", np.zeros(0, dtype=np.int64)),
    ("given", np.zeros((3, LENGTH), dtype=np.int64)),
    ("given", np.zeros((2, 1, LENGTH), dtype=np.int64)),
    ("given", [[1], [1, 2]]),
    ("given", "abc"),
    ("given", [None]),
    ("given", np.zeros(LENGTH, dtype=bool)),
]


@pytest.mark.parametrize(("name", "value"), ODD, ids=[f"{name}-{k}" for k, (name, _) in enumerate(ODD)])
def test_an_odd_argument_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {"family": family(), "schedule": "a", "n": 2, "steps": 2, name: value}
    if name == "stride":
        options["length"] = 2 * LENGTH
    if name == "spacing":
        options["steps"] = None
    with pytest.raises(UserError) as caught:
        relaylm.sample(options.pop("family"), **options)
    assert len(str(caught.value).splitlines()) == 1


def test_rows_for_which_n_is_missing() -> None:
    with pytest.raises(UserError, match="for 3 rows give n=3"):
        relaylm.sample(family(), "a", given=np.full((3, LENGTH), -1), steps=2)


@pytest.mark.parametrize("value", [None, 3, 1.5, True])
def test_what_is_no_source_of_a_family_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="loaded from"):
        Family.load(value)


@pytest.mark.parametrize("value", [None, 3, "x"])
def test_what_is_no_denoiser_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="function"):
        relaylm.FromLogits(value)


def test_logits_of_other_positions_are_refused() -> None:
    odd = Family({"a": relaylm.FromLogits(lambda tokens, t: torch.zeros(len(tokens), 5, V))}, V - 1, V, LENGTH)
    with pytest.raises(UserError, match="all rows and positions"):
        relaylm.sample(odd, "a", 2)


@pytest.mark.parametrize("options", [{}, {"rule": "low-confidence"}, {"spacing": 3}])
def test_logits_of_a_larger_vocabulary_are_refused(options: dict[str, Any]) -> None:
    """Two outputs too many must not write tokens that nobody can read."""
    peak = torch.nn.functional.one_hot(torch.tensor(V), V + 2) * 50.0
    odd = Family({"a": relaylm.FromLogits(lambda tokens, t: peak.expand(*tokens.shape, -1))}, V - 1, V, LENGTH)
    with pytest.raises(UserError, match=f"wrote token {V}"):
        relaylm.sample(odd, "a", 2, **options)


@pytest.mark.parametrize(("name", "value"), [("plan", np.zeros((2, 3))), ("mask_id", None), ("mask_id", "x")])
def test_an_odd_call_of_denoise_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {"plan": relaylm.make_plan(2, LENGTH), "mask_id": V - 1, name: value}
    with pytest.raises(UserError, match=name):
        relaylm.denoise(family().models, "a:4", **options)


def test_one_schedule_may_be_text_everywhere() -> None:
    own = family()
    drawn = [
        relaylm.sample_reference(own.models, s, 2, 8, mask_id=V - 1) for s in ("a:4", relaylm.Schedule.parse("a:4"))
    ]
    assert (drawn[0].tokens == drawn[1].tokens).all()
    toy = small_family()
    one, listed = (compare(toy, s, 2, length=8, rivals=False, progress=False) for s in ("heavy", ["heavy"]))
    assert [row["schedule"] for row in one["rows"]] == [row["schedule"] for row in listed["rows"]]
    with pytest.raises(UserError, match="nothing to compare"):
        compare(toy, "", 2)
    with pytest.raises(UserError, match="must be a Family"):
        relaylm.search("wiki-char")  # type: ignore[arg-type]


def test_denoise_reads_a_schedule_from_text() -> None:
    models, plan = family().models, relaylm.make_plan(2, LENGTH, seed=1)
    said = relaylm.denoise(models, "a:100% spaced:3", plan, mask_id=V - 1)
    meant = relaylm.denoise(models, relaylm.Schedule.parse("a:100% spaced:3"), plan, mask_id=V - 1)
    assert (said.tokens == meant.tokens).all() and said.schedule == meant.schedule
    for odd in (None, 3, "", "b:4"):
        with pytest.raises(UserError, match=r"schedule|policy"):
            relaylm.denoise(models, odd, plan, mask_id=V - 1)  # type: ignore[arg-type]


def test_a_family_is_shown_in_a_line() -> None:
    assert repr(family()) == "<Family without a name: a; length 12, vocabulary 28>"
    assert repr(Family.load("wiki-char")) == "<Family wiki-char: 4b, 8b, 12b; length 256, vocabulary 28>"


@pytest.mark.parametrize("name", ["n", "length", "first_row", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", None, math.nan])
def test_an_odd_plan_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        relaylm.make_plan(**{"n": 2, "length": LENGTH, name: value})


@pytest.mark.parametrize(
    "function",
    [
        lambda tokens, t: torch.zeros(*tokens.shape, V, dtype=torch.bool),
        lambda tokens, t: torch.zeros(*tokens.shape, V, dtype=torch.int64),
        lambda tokens, t: torch.zeros(*tokens.shape, V, dtype=torch.complex64),
        lambda tokens, t: np.zeros((*tokens.shape, V)),
        lambda tokens, t: torch.zeros(V),
        lambda tokens, t: None,
    ],
    ids=range(6),
)
@pytest.mark.parametrize("rule", [None, "low-confidence", "threshold:0.9"])
def test_odd_logits_are_refused(function: Any, rule: str | None) -> None:
    odd = Family({"a": relaylm.FromLogits(function)}, V - 1, V, LENGTH)
    with pytest.raises(UserError, match="logits"):
        relaylm.sample(odd, "a", 2, rule=rule)


class Whole:
    """A denoiser that is not `FromLogits`: its logits go to the draw as they are."""

    def logits_at(self, tokens: Any, t: Any, positions: Any) -> torch.Tensor:
        return torch.zeros(*positions.shape, V, dtype=torch.bool)

    def logits(self, tokens: Any, t: Any) -> torch.Tensor:
        return torch.zeros(*tokens.shape, V, dtype=torch.bool)


@pytest.mark.parametrize("rule", [None, "low-confidence"])
def test_odd_logits_of_any_denoiser_are_refused(rule: str | None) -> None:
    with pytest.raises(UserError, match="floating-point"):
        relaylm.sample(Family({"a": Whole()}, V - 1, V, LENGTH), "a", 2, rule=rule)  # type: ignore[dict-item]


# ------------------------------------------------------------------------------------------------------------ memory


def test_rows_that_are_not_there_are_not_computed() -> None:
    seen: list[int] = []

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        return torch.zeros(*tokens.shape, V)

    few = Family({"a": relaylm.FromLogits(logits)}, V - 1, V, LENGTH)
    for rule in (None, "low-confidence"):
        relaylm.sample(few, "a", 1, steps=2, batch_size=1_000_000, rule=rule)
    assert max(seen) <= 2**15 // LENGTH
    assert rows_in_call(7, 3, LENGTH, "cpu") == 7  # a batch of common size keeps its shape, so that bits do not change
    assert rows_in_call(1_000_000, 5000, LENGTH, "cpu") == 5000
    assert rows_in_call(None, 3, LENGTH, "cpu") == 3


@pytest.mark.parametrize("rule", [None, "low-confidence"])
@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")],
    ids=["numpy", "torch"],
)
def test_the_batch_is_halved_when_memory_runs_out(rule: str | None, error: Exception) -> None:
    seen: list[int] = []

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        if len(tokens) > fits:
            raise error
        return torch.zeros(*tokens.shape, V)

    few = Family({"a": relaylm.FromLogits(logits)}, V - 1, V, LENGTH)
    fits = 100
    whole = relaylm.sample(few, "a", 16, steps=2, batch_size=16, rule=rule).tokens
    fits = 3
    assert (relaylm.sample(few, "a", 16, steps=2, batch_size=16, rule=rule).tokens == whole).all()
    assert min(seen) == 2
    fits = 0
    with pytest.raises(UserError, match="memory"):
        relaylm.sample(few, "a", 16, steps=2, batch_size=16, rule=rule)
