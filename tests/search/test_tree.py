"""Shared trajectories are independent ones, bit for bit; what is shared is counted; what was saved is not run again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LinearDenoiser
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, build, expected_shapes
from relaylm.models.family import Family
from relaylm.sampling.sample import sample
from relaylm.search import tree
from relaylm.search.exhaustive import all_placements
from relaylm.search.tree import Grown, Stopped

VOCAB, LENGTH = 29, 24
MASK = VOCAB - 1


class Counted:
    """A random network whose logits are far from flat, which counts the rows that are really there."""

    def __init__(self, depth: int) -> None:
        a = Architecture(VOCAB, LENGTH, 16, depth, 2)
        rng = torch.Generator().manual_seed(depth)
        state = {
            name: torch.randn(shape, generator=rng) * (0.3 if len(shape) > 1 else 0.1) + ("norm" in name)
            for name, shape in expected_shapes(a).items()
        }
        self.network = build(a, state)
        self.vocab_size = VOCAB
        self.passes = 0

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        return self.network.logits(tokens_BL, t_B)

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        self.passes += 1
        return self.network.logits_at(tokens_BL, t_B, positions_BK)

    def flops(self, length: int, positions: int | None = None) -> float:
        return self.network.flops(length, positions)


NETWORKS = {f"{depth}b": Counted(depth) for depth in (1, 2, 3)}
FAMILY = Family(NETWORKS, MASK, VOCAB, LENGTH)


def grow(
    family: Family,
    schedules: list[Any],
    n: int,
    *,
    steps: Any = None,
    light: Any = None,
    heavy: Any = None,
    **options: Any,
) -> Grown:
    """`tree.grow` of schedules as users write them, each in T of `steps`."""
    each = steps if isinstance(steps, list) else [steps] * len(schedules)
    bound = [family.bind(schedule, *family.roles(light, heavy)) for schedule in schedules]
    counted = [s if T is None or s.spacing is not None else s.resample(T) for s, T in zip(bound, each, strict=True)]
    return tree.grow(family, counted, n, **options)


def check(schedules: list[Any], n: int, steps: Any, **options: Any) -> tuple[Grown, list[int]]:
    """Grow, run each schedule by itself, and compare everything; returns also how many calls each takes by itself."""
    grown = grow(FAMILY, schedules, n, steps=steps, **options)
    each = steps if isinstance(steps, list) else [steps] * len(schedules)
    options, alone = {**options, "batch_size": grown.batch_size}, []
    for s, (schedule, T) in enumerate(zip(schedules, each, strict=True)):
        samples = sample(FAMILY, schedule, n, steps=T, **options)
        np.testing.assert_array_equal(grown.tokens_SnL[s], samples.tokens)
        alone.append(samples.cost)
        one = grow(FAMILY, [schedule], n, steps=T, **options)  # nothing is shared
        calls = dict(zip(one.models, one.calls_made_K.tolist(), strict=True))
        assert {name: c for name, c in calls.items() if c} == {k: c for k, c in samples.cost.calls.items() if c}
        assert one.flops_made == pytest.approx(samples.cost.flops, rel=1e-12)
        assert one.calls_tree_K.tolist() == one.calls_made_K.tolist()
    each_K = np.array([sum(cost.calls.get(name, 0) for cost in alone) for name in grown.models])
    assert (grown.calls_made_K <= grown.calls_tree_K).all() and (grown.calls_tree_K <= each_K).all()
    return grown, [cost.total_calls for cost in alone]


names = st.sampled_from(["1b", "2b", "3b"])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int | None]:
    """A schedule and a number of steps: cells on two grids, single steps, counts, segments with their own time."""
    kind = draw(st.sampled_from(["cells", "cells", "ordered", "timed", "interleaved", "spaced", "spaced"]))
    if kind == "spaced":
        cells = draw(st.sampled_from(["cells(1b 3b 3b)", "cells(1b 3b 1b 3b)", "2b:30% 3b:70%", "3b:100%"]))
        return f"{cells} spaced:{draw(st.sampled_from(['4', '4', '6', '4:prefix']))}", None
    if kind == "cells":
        return f"cells({' '.join(draw(st.lists(names, min_size=4, max_size=4)))})", draw(st.sampled_from([8, 8, 12]))
    if kind == "ordered":
        parts = draw(st.lists(st.tuples(names, st.integers(1, 5)), min_size=1, max_size=3))
        return " ".join(f"{name}:{count}" for name, count in parts), None
    if kind == "timed":
        a, b, c = (draw(st.tuples(names, st.integers(1, 4))) for _ in range(3))
        return f"{a[0]}:{a[1]}@25% {b[0]}:{b[1]}@50% {c[0]}:{c[1]}@25%", None
    return "interleaved(1b:25% 3b:75%)", 8


@settings(max_examples=25, deadline=None)
@given(
    st.lists(schedules(), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 1000),
    st.booleans(),
)
def test_grown_together_is_as_grown_alone(
    chosen: list[tuple[str, int | None]], n: int, batch: int, first_row: int, prompted: bool
) -> None:
    given = None
    if prompted:
        given = np.full((n, 20), -1)
        rng = np.random.default_rng(first_row)
        given[rng.random((n, 20)) < 0.4] = 5
        given[0] = 7  # a row with nothing to do
    parsed = [Schedule.parse(text) for text, _ in chosen]
    steps = [
        T if T is not None or s.spacing is not None else (s.steps or 20)
        for s, (_, T) in zip(parsed, chosen, strict=True)
    ]
    texts = [text for text, _ in chosen]
    check(texts, n, steps, batch_size=batch, first_row=first_row, given=given, seed=3)


def test_all_placements() -> None:
    placements = all_placements(6, 3)
    grown, alone = check(placements, 6, 12, batch_size=4, light="1b", heavy="3b")
    prefixes = {(str(s)[:j]) for s in placements for j in range(1, 7)}
    naive, shared = len(placements) * 6, len(prefixes)
    assert (naive, shared) == (120, 68)
    # Every cell holds two of twelve steps: calls go with cells up to chance.
    assert grown.calls_tree_K.sum() / sum(alone) == pytest.approx(shared / naive, abs=0.03)


def test_ten_choose_four_takes_790_segments() -> None:
    length, rows = 10, 40
    family = Family({"a": LinearDenoiser(0, length, 50), "b": LinearDenoiser(1, length, 50)}, 49, 50, length)
    placements = all_placements(10, 4)
    grown = grow(family, placements, rows, steps=10, light="a", heavy="b", batch_size=64)
    by_step = [sum(i in row for row in sample(family, "a", rows, steps=10).trace.step_nL) for i in range(10, 0, -1)]
    nodes = [len({str(placement)[: j + 1] for placement in placements}) for j in range(10)]
    assert sum(nodes) == 790
    assert grown.calls_tree_K.sum() == sum(calls * width for calls, width in zip(by_step, nodes, strict=True))
    for s in (0, 77, 150, 209):
        alone = sample(family, placements[s], rows, steps=10, light="a", heavy="b", batch_size=64)
        np.testing.assert_array_equal(grown.tokens_SnL[s], alone.tokens)


def test_calls_are_those_that_were_made() -> None:
    """Batches of one row, so that passes through a network are row-calls."""
    for network in NETWORKS.values():
        network.passes = 0
    grown = grow(FAMILY, all_placements(4, 2), 5, steps=8, batch_size=1, light="1b", heavy="3b")
    assert [network.passes for network in NETWORKS.values()] == grown.calls_made_K.tolist()
    assert grown.network_calls == grown.calls_made_K.sum() and grown.padded_calls == 0
    flops = {name: network.flops(LENGTH, 1) for name, network in NETWORKS.items()}
    least = sum(flops[name] * c for name, c in zip(grown.models, grown.calls_made_K, strict=True))
    alone = [sample(FAMILY, s, 5, steps=8, batch_size=1, light="1b", heavy="3b").cost for s in all_placements(4, 2)]
    assert grown.flops_made is not None
    assert least <= grown.flops_made < sum(cost.flops or 0 for cost in alone)


def test_an_engine_serves_again() -> None:
    """What an earlier call left in it does not show: other rows, prompts, schedules, numbers of steps."""
    engines: dict[Any, Any] = {}
    prompt = np.where(np.arange(LENGTH) < 2, 1, -1)
    for schedules, n, options in (
        (all_placements(4, 2), 5, {"steps": 8}),
        (["heavy", "light"], 3, {"steps": 12, "first_row": 7, "given": prompt}),
        (["heavy"], 1, {"steps": 3}),
    ):
        known = grow(FAMILY, schedules, n, batch_size=4, seed=3, **options)
        again = grow(FAMILY, schedules, n, batch_size=4, seed=3, engines=engines, **options)
        np.testing.assert_array_equal(again.tokens_SnL, known.tokens_SnL)
    assert len(engines) == 1
    grow(FAMILY, ["heavy"], 1, batch_size=4, seed=4, steps=3, engines=engines)
    assert len(engines) == 2  # the seed is part of what is captured


def test_twins_merge_at_once() -> None:
    """Two names for one network: all schedules write the same, so each row has one state at every level."""
    network = Counted(2)
    family = Family({"a": network, "b": network}, MASK, VOCAB, LENGTH)
    grown = grow(family, all_placements(4, 2), 3, steps=8, light="a", heavy="b", batch_size=4)
    assert len(grown.final_UL) == 3
    assert grown.merged > 0
    one = sample(family, "a", 3, steps=8, batch_size=4)
    np.testing.assert_array_equal(grown.tokens_SnL, np.broadcast_to(one.tokens, (6, 3, LENGTH)))
    # Four cells, a and b at each where any schedule wants them.
    assert grown.calls_made_K.sum() == 2 * one.cost.total_calls


def test_grids_that_begin_alike_share_their_beginning() -> None:
    grown, (first, second) = check(["3b:4@50% 3b:4@50%", "3b:4@50% 3b:2@50%"], 8, None, batch_size=4)
    half = sample(FAMILY, "3b", 8, steps=8).trace
    shared = sum(len(set(row[row > 4])) for row in half.step_nL)
    assert grown.calls_made_K.sum() == first + second - shared


def passes() -> int:
    return sum(network.passes for network in NETWORKS.values())


class Shelf:
    """A store that breaks when it is handed one piece more than there is room for."""

    def __init__(self, room: int = 1000) -> None:
        self.kept: dict[str, str] = {}
        self.room, self.taken = room, 0
        self.passes = [passes()]  # at the beginning, and when each piece was handed over

    def save(self, key: str, record: dict[str, Any]) -> None:
        self.passes.append(passes())
        if len(self.kept) >= self.room:
            raise KeyboardInterrupt
        assert key not in self.kept
        self.kept[key] = json.dumps(record)

    def load(self, key: str) -> dict[str, Any] | None:
        self.taken += key in self.kept
        return json.loads(self.kept[key]) if key in self.kept else None


@pytest.mark.parametrize("piece", [64, 4])
def test_interrupted_work_goes_on_where_it_was(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "PIECE", piece)

    def run(shelf: Shelf) -> Grown:
        options: dict[str, Any] = {"steps": 8, "batch_size": 2, "light": "1b", "heavy": "3b"}
        return grow(FAMILY, all_placements(4, 2), 5, load=shelf.load, save=shelf.save, **options)

    whole = run(full := Shelf())
    assert len(full.kept) == 4 if piece == 64 else len(full.kept) > 8  # levels, or more
    shelf = Shelf(room=2)
    with pytest.raises(KeyboardInterrupt):
        run(shelf)
    shelf.room, start = 1000, passes()
    again = run(shelf)
    assert shelf.taken == 2
    # Of all the passes only those of the two finished pieces were not made again.
    assert passes() - start == again.network_calls == full.passes[-1] - full.passes[2]
    np.testing.assert_array_equal(again.tokens_SnL, whole.tokens_SnL)
    assert again.calls_made_K.tolist() == whole.calls_made_K.tolist()
    third = run(shelf)
    assert third.network_calls == 0
    np.testing.assert_array_equal(third.tokens_SnL, whole.tokens_SnL)


def test_other_work_is_not_taken_for_this() -> None:
    shelf = Shelf()
    base: dict[str, Any] = {"steps": 8, "batch_size": 2, "light": "1b", "heavy": "3b"}
    for change in ({}, {"seed": 1}, {"batch_size": 3}, {"first_row": 7}, {"light": "2b"}, {"given": np.full(20, -1)}):
        options = {**base, **change}
        shared = grow(FAMILY, ["1100", "0011"], 3, load=shelf.load, save=shelf.save, **options)
        np.testing.assert_array_equal(shared.tokens_SnL, grow(FAMILY, ["1100", "0011"], 3, **options).tokens_SnL)
    assert shelf.taken == 0


def test_one_step_is_not_one_stretch_of_a_spaced_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same times and the same rows before, and write other positions at a call."""
    monkeypatch.setattr(tree, "PIECE", 1)
    shelf, options = Shelf(), {"batch_size": 4}
    given: Any = ["3b:1", "3b:100% spaced:4", "3b:100% spaced:6", "3b:100% spaced:6:prefix"]
    found = grow(FAMILY, given, 4, load=shelf.load, save=shelf.save, **options)
    assert len(shelf.kept) == 4 and shelf.taken == 0
    np.testing.assert_array_equal(found.tokens_SnL, grow(FAMILY, given, 4, **options).tokens_SnL)


def test_stopping() -> None:
    asked = iter([False] * 5)
    start = passes()
    with pytest.raises(Stopped):
        grow(FAMILY, ["1100", "0011"], 3, steps=8, stop=lambda: next(asked, True))
    assert passes() - start == 5


def test_progress_ends_at_its_total() -> None:
    heard: list[tuple[int, int]] = []
    grown = grow(FAMILY, all_placements(4, 2), 3, steps=8, on_calls=lambda *pair: heard.append(pair))
    assert heard[-1] == (grown.calls_tree_K.sum(), grown.calls_tree_K.sum())
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)


def test_messages() -> None:
    with pytest.raises(UserError, match="written in shares"):
        grow(FAMILY, ["heavy"], 1)
    with pytest.raises(UserError, match="no model '9b'"):
        tree.grow(FAMILY, [Schedule.parse("9b:3")], 1)
    with pytest.raises(UserError, match="cannot be given"):
        grow(FAMILY, ["heavy"], 1, steps=3, given=np.full(4, MASK))
    with pytest.raises(UserError, match="batch_size must be"):
        grow(FAMILY, ["heavy"], 1, steps=3, batch_size=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Captured calls serve level after level; the bits are those of independent runs there as well."""
    networks = {name: Counted(int(name[0])).network.to("cuda") for name in NETWORKS}
    family = Family(networks, MASK, VOCAB, LENGTH)
    placements = all_placements(6, 3)
    grown = grow(family, placements, 40, steps=12, light="1b", heavy="3b", batch_size=16)
    for s in (0, 7, 19):
        alone = sample(family, placements[s], 40, steps=12, light="1b", heavy="3b", batch_size=16)
        np.testing.assert_array_equal(grown.tokens_SnL[s], alone.tokens)
    engines: dict[Any, Any] = {}
    for first_row in (0, 40):  # the second time with what the first captured
        options: dict[str, Any] = {"steps": 12, "light": "1b", "heavy": "3b", "batch_size": 16, "first_row": first_row}
        again = grow(family, placements[:3], 40, engines=engines, **options)
        np.testing.assert_array_equal(again.tokens_SnL, grow(family, placements[:3], 40, **options).tokens_SnL)
