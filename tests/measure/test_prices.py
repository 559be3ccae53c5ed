"""Prices in any unit against what samples really cost, the table of timings, energy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LinearDenoiser

from relaylm.core.cost import Price, call_flops, mean_price, parse_budget
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import prices as pricing
from relaylm.measure import timing
from relaylm.measure.prices import expected_price, flops_price, prices
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.sampling import denoise as sampler
from relaylm.sampling.engine import Shape
from relaylm.sampling.sample import sample

VOCAB, LENGTH = 12, 16


def network(depth: int) -> Transformer:
    model = Transformer(Architecture(VOCAB, LENGTH, width=8, depth=depth, heads=2))
    model.initialise(torch.Generator().manual_seed(depth)).eval().requires_grad_(False)
    return model


@pytest.fixture
def family() -> Family:
    return Family({f"{d}b": network(d) for d in (1, 2, 3)}, VOCAB - 1, VOCAB, LENGTH, name="toy")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the user's own table is read or changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Clock:
    """A time of our own in place of the real one: it passes when somebody says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (timing, sampler):
            fake = SimpleNamespace(perf_counter=lambda: self.now, strftime=time.strftime, gmtime=time.gmtime)
            patch.setattr(module, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Sleeper:
    """A denoiser whose calls take a known time: so much for a row, and so much for each place for a position. The
    first calls take longer, as they do."""

    def __init__(self, clock: Clock | None = None, row: float = 0.0, place: float = 0.0) -> None:
        self.clock, self.row, self.place, self.calls = clock, row, place, 0

    def logits(self, tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens_BL.shape, VOCAB)

    def logits_at(self, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.clock is not None:
            warm_up = 100 if self.calls <= 2 else 1
            odd = 50 if self.calls % 5 == 0 else 1  # now and then the machine has something else to do
            self.clock.now += len(tokens_BL) * (self.row + self.place * positions_BK.shape[1]) * max(warm_up, odd)
        return torch.zeros(*positions_BK.shape, VOCAB)


def test_the_price_in_flops_is_exact(family: Family) -> None:
    for name, price in prices(family).items():
        model: Any = family[name]
        assert [price.base + price.slope * k for k in (1, 2, 7, 16)] == [model.flops(LENGTH, k) for k in (1, 2, 7, 16)]
    shorter = prices(family, "flops", length=9, models=["2b"])
    a = Architecture(VOCAB, LENGTH, width=8, depth=2, heads=2)
    assert list(shorter) == ["2b"] and shorter["2b"].base + 4 * shorter["2b"].slope == call_flops(2, a.width, 12, 9, 4)


def test_blocks_are_the_papers_count_and_need_steps(family: Family) -> None:
    schedule, free = Schedule.parse("1b:4 3b:12"), np.array([5])  # most steps make no call: they count all the same
    assert expected_price(family, schedule, 16, free, unit="blocks") == 4 * 1 + 12 * 3
    with pytest.raises(UserError, match="infinitely many"):
        expected_price(family, Schedule.parse("1b"), math.inf, free, unit="blocks")


def test_expected_price_is_what_samples_cost(family: Family) -> None:
    schedule = Schedule.parse("1b:25% 3b:75%")
    samples = sample(family, schedule, 300, steps=12, seed=5)
    assert samples.cost.flops is not None
    expected = expected_price(family, schedule, 12, np.full(300, LENGTH))
    assert expected == pytest.approx(samples.cost.flops / 300, rel=0.02)


def test_units_that_are_not_to_be_had(family: Family) -> None:
    with pytest.raises(UserError, match="'parsecs' is no unit of cost: choose flops, blocks, ms, J"):
        prices(family, "parsecs")
    with pytest.raises(UserError, match="joules cannot be measured here"):
        prices(family, "J")
    silent = Family({"a": Sleeper()}, VOCAB - 1, VOCAB, LENGTH)
    for unit in ("flops", "blocks"):
        with pytest.raises(UserError, match="a does not say how many"):
            prices(silent, unit)
    with pytest.raises(UserError, match="9b"):
        prices(family, models=["9b"])


def test_a_call_takes_what_it_takes(clock: Clock) -> None:
    """A thousandth of a second for each of four rows, warm-up and interruptions aside."""
    family = Family({"a": Sleeper(clock, 0.001)}, VOCAB - 1, VOCAB, LENGTH)
    found = timing.time_call(family, "a", steps=16, batch_size=4)
    assert found is not None and found.ms == pytest.approx(1.0) and found.joules is None
    # Sixteen positions in sixteen even steps: one call in 1 - (15/16)^16 of them.
    assert found.positions == pytest.approx(1 / (1 - (15 / 16) ** 16)) and found.shape.rows == 4
    endless = timing.time_call(family, "a", steps=math.inf, batch_size=4)
    assert endless is not None and endless.positions == 1 and endless.ms == pytest.approx(1.0)


def test_the_line_follows_the_positions_asked_for(clock: Clock) -> None:
    """At T = 16 a call has 8 places for positions, at T = 2 all 16, of which it asks for 1.55 and 8 on average."""
    family = Family({"a": Sleeper(clock, 0.001, 0.0002)}, VOCAB - 1, VOCAB, LENGTH)
    near, far = (timing.time_call(family, "a", steps=steps, batch_size=2) for steps in (16, 2))
    assert near is not None and far is not None
    assert (near.shape.per_row, far.shape.per_row) == (8, 16)
    assert (near.ms, far.ms) == (pytest.approx(1 + 0.2 * 8), pytest.approx(1 + 0.2 * 16))
    price = prices(family, "ms", steps=16, batch_size=2)["a"]
    for point in (near, far):
        assert price.base + price.slope * point.positions == pytest.approx(point.ms)


@pytest.mark.parametrize("place", [-0.0001, 0.01])
def test_a_price_is_never_absurd(clock: Clock, place: float) -> None:
    """Noise may make more positions look cheaper, or a call for none cheaper than nothing."""
    family = Family({"a": Sleeper(clock, 0.002, place)}, VOCAB - 1, VOCAB, LENGTH)
    price = prices(family, "ms", steps=16, batch_size=2)["a"]
    assert price.base >= 0 and price.slope >= 0
    near = timing.time_call(family, "a", steps=16, batch_size=2)
    assert near is not None and price.base + price.slope * near.positions == pytest.approx(near.ms)


def test_a_call_for_no_position_costs_no_less_than_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 ms for 2 positions to 10 ms for 4 the line would begin at -8 ms."""
    points = {16.0: (1.0, 2.0, Shape(1, 8, 8)), 2.0: (10.0, 4.0, Shape(1, 16, 16))}
    made = {steps: timing.Timing(ms, None, positions, shape) for steps, (ms, positions, shape) in points.items()}
    monkeypatch.setattr(timing, "time_call", lambda family, name, length, steps, *rest, **options: made[steps])
    family = Family({"a": Sleeper(clock, 0.001)}, VOCAB - 1, VOCAB, LENGTH)
    assert prices(family, "ms", steps=16, batch_size=2)["a"] == Price(0.0, 0.5)


def test_the_prices_foretell_the_time_of_a_run(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a": Sleeper(clock, 0.0005), "b": Sleeper(clock, 0.002)}
    family = Family(dict(models), VOCAB - 1, VOCAB, LENGTH, light="a", heavy="b")
    schedule = Schedule.parse("a:50% b:50%")
    known = prices(family, "ms", steps=8, batch_size=40)
    assert [known[k] for k in "ab"] == [Price(pytest.approx(0.5)), Price(pytest.approx(2.0))]
    monkeypatch.setattr(Sleeper, "logits_at", _undisturbed)
    before = {name: model.calls for name, model in models.items()}
    cost = sample(family, schedule, 400, steps=8, batch_size=40).cost
    batches = {name: model.calls - before[name] for name, model in models.items()}
    # Batches are paid for whether or not their places are all used; what is used is foretold.
    assert 1000 * cost.seconds == pytest.approx(sum(40 * batches[k] * known[k].base for k in "ab"))
    used = sum(cost.calls[k] * known[k].base for k in "ab")
    assert used / 400 == pytest.approx(mean_price(known, schedule, 8, np.array([LENGTH])), rel=0.01)


def _undisturbed(self: Sleeper, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
    assert self.clock is not None
    self.calls += 1
    self.clock.now += len(tokens_BL) * self.row
    return torch.zeros(*positions_BK.shape, VOCAB)


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    made = []
    real = timing._measure

    def measure(*arguments: Any) -> Any:
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(timing, "_measure", measure)
    return lambda: [len(made), made.clear()][0]  # type: ignore[return-value]


def test_what_is_in_the_table_is_not_measured_again(
    family: Family, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = count_measurements(monkeypatch)
    assert timing.time_call(family, "2b", steps=8, batch_size=2, measure=False) is None and measured() == 0
    first = timing.time_call(family, "2b", steps=8, batch_size=2)
    assert measured() == 1
    assert timing.time_call(family, "2b", steps=8, batch_size=2) == first and measured() == 0
    path = timing.table_path(family.device)
    assert path.is_relative_to(cache) and len(json.loads(path.read_text())) == 1

    # What the time depends on is another entry ...
    timing.time_call(family, "3b", steps=8, batch_size=2)
    timing.time_call(family, "2b", steps=8, batch_size=3)
    timing.time_call(family, "2b", steps=8, batch_size=2, length=8)
    timing.time_call(family, "2b", steps=2, batch_size=2)
    assert measured() == 4
    double = Family({"2b": network(2).double()}, VOCAB - 1, VOCAB, LENGTH)
    timing.time_call(double, "2b", steps=8, batch_size=2)
    assert measured() == 1
    # ... and what it does not depend on is the same: other weights, another name.
    other = network(2)
    other.vocab_embed.embedding.data += 1
    again = timing.time_call(Family({"x": other}, VOCAB - 1, VOCAB, LENGTH), "x", steps=8, batch_size=2)
    assert measured() == 0 and first is not None and again is not None and again.ms == first.ms
    timing.time_call(family, "2b", steps=8, batch_size=2, fresh=True)
    assert measured() == 1 and len(json.loads(path.read_text())) == 6


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"x": 3}', None])
def test_a_damaged_table_counts_as_empty(family: Family, damage: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = count_measurements(monkeypatch)
    timing.time_call(family, "1b", batch_size=2)
    path = timing.table_path(family.device)
    if damage is None:  # an entry whose time is no time
        damage = path.read_bytes().replace(b'"ms":', b'"ms": -1, "was":')
    path.write_bytes(damage)
    timing.time_call(family, "1b", batch_size=2)
    assert measured() == 2
    timing.time_call(family, "1b", batch_size=2)
    assert measured() == 0


def test_a_denoiser_that_cannot_be_told_from_others_is_not_kept(cache: Path) -> None:
    family = Family({"a": LinearDenoiser(0, LENGTH, VOCAB)}, VOCAB - 1, VOCAB, LENGTH)
    price = prices(family, "ms", batch_size=2)["a"]
    assert price.base + price.slope > 0  # on a busy machine all of the time may seem to be that of positions
    assert not cache.exists()


def test_samples_are_priced_by_the_table(family: Family) -> None:
    samples = sample(family, "1b:50% 3b:50%", 4, steps=8, batch_size=2)
    assert timing.with_measured(samples, family) == samples.cost  # the table is empty, and nothing is measured
    prices(family, "ms", steps=8, models=["1b"], batch_size=2)
    assert timing.with_measured(samples, family).milliseconds is None  # of one model alone
    known = prices(family, "ms", steps=8, batch_size=2)
    cost = timing.with_measured(samples, family)
    written = {name: (samples.trace.model_nL == k).sum() for k, name in enumerate(samples.trace.models)}
    by_hand = sum(known[k].base * calls + known[k].slope * written[k] for k, calls in cost.calls.items() if calls)
    assert cost.milliseconds == pytest.approx(by_hand) and cost.joules is None
    assert cost.to_json()["milliseconds"] == cost.milliseconds


def test_joules_are_the_counters(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that draws five watts: a call's joules are five times the seconds that calls take on average."""
    monkeypatch.setattr(timing, "energy_counter", lambda device: (lambda: 5 * clock.now, ""))
    monkeypatch.setattr(timing, "ENERGY_SECONDS", 0.1)
    monkeypatch.setattr(Sleeper, "logits_at", _undisturbed)
    family = Family({"a": Sleeper(clock, 0.002)}, VOCAB - 1, VOCAB, LENGTH)
    price = prices(family, "J", batch_size=2)["a"]
    assert (price.base, price.slope) == (pytest.approx(0.01), pytest.approx(0, abs=1e-12))
    samples = sample(family, "a", 2, steps=16, batch_size=2)
    assert timing.with_measured(samples, family).joules is None  # such a denoiser is not in the table
    found = pricing.cost_table(family, ["heavy"], batch_size=2)
    assert found["no_joules"] is None and found["call"]["a"]["J"] == pytest.approx(0.01)
    assert found["call"]["a"]["flops"] is None and "  J" in pricing.render(found)


def test_energy_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.energy_counter(torch.device("cpu")) == (None, "a cpu has no energy counter that relaylm reads")

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    counter, why = timing.energy_counter(torch.device("cuda"))
    assert counter is None and "NVML" in why


def test_the_cost_table(family: Family) -> None:
    found = pricing.cost_table(
        family, ["heavy", "1b:4 3b:12", "light"], batch_size=2, budget=parse_budget("10% blocks")
    )
    json.dumps(found, allow_nan=False)
    assert list(found["call"]) == ["1b", "2b", "3b"]
    heavy, mixed, light = found["schedules"]
    assert [item["schedule"] for item in found["schedules"]] == ["heavy", "1b:4 3b:12", "light"]
    assert heavy["models"] == "3b:100%"
    assert heavy["saved"] == {"flops": 0.0, "blocks": 0.0, "ms": 0.0, "J": None} and heavy["row"] == found["all_heavy"]
    assert mixed["saved"]["blocks"] == pytest.approx(1 / 6) and mixed["row"]["blocks"] == 40
    models: Any = family.models
    flops = mean_price({k: flops_price(m, LENGTH) for k, m in models.items()}, Schedule.parse("1b"), 16, [LENGTH])
    assert light["row"]["flops"] == flops
    assert [item["within"] for item in found["schedules"]] == [False, True, True]
    text = pricing.render(found)
    assert text.count("over the budget") == 1 and "no joules: a cpu" in text and found["table"] in text
    endless = pricing.cost_table(family, ["heavy"], batch_size=2, steps=math.inf)
    assert endless["schedules"][0]["row"]["blocks"] is None and pricing.render(endless)
    with pytest.raises(UserError, match="the budget is in J"):
        pricing.cost_table(family, ["heavy"], batch_size=2, budget=parse_budget("3J"))
    with pytest.raises(UserError, match="length 17"):
        pricing.cost_table(family, length=17)
