"""A schedule's likelihood bound against the enumerated path ELBO and the exact likelihood."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import TableDenoiser, law_of_events, law_of_steps, masked_share

from relaylm.core.plan import Alpha
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.likelihood import bound
from relaylm.measure.schedule_likelihood import (
    BoundTable,
    _at_least,
    _binomial,
    measure_table,
    schedule_bound,
    schedule_weights,
    step_costs,
)
from relaylm.models.denoiser import Architecture, FromLogits, Transformer

LENGTH, SYMBOLS = 3, 3
START = (SYMBOLS,) * LENGTH
MODELS = {"a": TableDenoiser(1), "b": TableDenoiser(2), "c": TableDenoiser(3)}
TEXTS = np.array(list(itertools.product(range(SYMBOLS), repeat=LENGTH)))  # every x there is
SCHEDULES = [
    "a:3",
    "a:1 b:2",
    "b:1 a:1 b:1",
    "a:1 b:1 c:1",
    "c:2 a:2",
    "a:1@20% b:2@50% c:1@30%",
    "interleaved(a:2 b:2)",
]


def path_elbo(x: Sequence[int], times: Sequence[float], models: Sequence[str], kind: str) -> float:
    """-ELBO by its definition: over every path of the forward process given x, log q(path | x) - log p(path)."""
    y = [masked_share(kind, t) for t in times]
    total = 0.0
    for steps in itertools.product(range(len(models)), repeat=LENGTH):  # the step at which each position is written
        chance, log_q, log_p = 1.0, 0.0, 0.0
        for k in range(len(models)):
            state = tuple(x[j] if steps[j] < k else SYMBOLS for j in range(LENGTH))
            p_LV = MODELS[models[k]](state, times[k])
            rho = 1 - y[k + 1] / y[k]
            for j in range(LENGTH):
                if steps[j] < k:
                    continue
                moved = rho if steps[j] == k else 1 - rho
                chance *= moved
                if moved:
                    log_q += math.log(moved)
                    log_p += math.log(moved) + (math.log(p_LV[j, x[j]]) if steps[j] == k else 0.0)
        total += chance * (log_q - log_p)
    return total


def event_elbo(x: Sequence[int], edges: Sequence[float], models: Sequence[str], kind: str) -> float:
    """The same at T = infinity: each position falls into a stretch, and those of one stretch come in any order."""
    y = [masked_share(kind, t) for t in edges]
    total = 0.0
    for where in itertools.product(range(len(models)), repeat=LENGTH):
        chance = math.prod(y[k] - y[k + 1] for k in where)
        orders = [o for o in itertools.permutations(range(LENGTH)) if [where[j] for j in o] == sorted(where)]
        for order in orders:
            state = list(START)
            for j in order:
                p_LV = MODELS[models[where[j]]](tuple(state), 0.5)
                total -= chance / len(orders) * math.log(p_LV[j, x[j]])
                state[j] = x[j]
    return total


@pytest.fixture(scope="module")
def table():  # type: ignore[no-untyped-def]
    return measure_table(MODELS, TEXTS, SYMBOLS, draws=None)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("text", SCHEDULES)
def test_the_bound_is_the_enumerated_path_elbo(table, text: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    timetable = Schedule.parse(text).timetable()
    found = schedule_bound(table, Schedule.parse(text), alpha=Alpha(kind)).nats_N
    expected = [path_elbo(x, timetable.times, timetable.models, kind) for x in TEXTS]
    assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("text", SCHEDULES)
def test_the_bound_is_never_below_the_truth(table, text: str) -> None:  # type: ignore[no-untyped-def]
    timetable = Schedule.parse(text).timetable()
    law = law_of_steps(START, timetable.times, lambda k, state: MODELS[timetable.models[k]], SYMBOLS)
    found = schedule_bound(table, timetable).nats_N
    truth = np.array([-math.log(law[tuple(x)]) for x in TEXTS.tolist()])
    assert (found >= truth - 1e-12).all()
    assert (found > truth + 1e-6).any()


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("text", ["a", "a:40% b:60%", "cells(a b c a)", "b:1@20% a:5@50% c:1@30%"])
def test_at_infinity(table, text: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    schedule = Schedule.parse(text)
    edges, names = [1.0, *schedule.ends], [segment.model for segment in schedule.segments]
    found = schedule_bound(table, schedule, math.inf, Alpha(kind)).nats_N
    assert found == pytest.approx([event_elbo(x, edges, names, kind) for x in TEXTS], abs=1e-10)
    law = law_of_events(START, edges, [MODELS[name] for name in names], SYMBOLS, kind)
    assert (found >= np.array([-math.log(law[tuple(x)]) for x in TEXTS.tolist()]) - 1e-12).all()


def test_many_steps_approach_infinity(table) -> None:  # type: ignore[no-untyped-def]
    schedule = Schedule.parse("a:40% b:60%")
    limit = schedule_bound(table, schedule, math.inf).nats_N
    gaps = [np.abs(schedule_bound(table, schedule, steps).nats_N - limit).max() for steps in (10, 100, 1000)]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 0.005


def test_steps_add_up(table) -> None:  # type: ignore[no-untyped-def]
    timetable = Schedule.parse("a:1 b:2 c:1 a:2").timetable()
    costs = step_costs(table, timetable.times)
    picked = sum(costs[list(MODELS).index(name), k] for k, name in enumerate(timetable.models))
    assert schedule_bound(table, timetable).nats_N.mean() == pytest.approx(picked, abs=1e-12)


def test_draws_are_unbiased_and_models_share_them() -> None:
    exact = measure_table(MODELS, TEXTS, SYMBOLS, draws=None)
    many = np.tile(TEXTS, (200, 1))
    drawn = measure_table(MODELS, many, SYMBOLS, draws=4)
    for text in ("a:1 b:2", "c:2 a:2"):
        schedule = Schedule.parse(text)
        value, truth = schedule_bound(drawn, schedule), schedule_bound(exact, schedule)
        error = value.nats_N.std() / math.sqrt(len(many))
        assert abs(value.nats_N.mean() - truth.nats_N.mean()) < 4 * error
        assert value.low < value.bits < value.high
    other = measure_table({"b": MODELS["b"]}, many, SYMBOLS, draws=4)
    assert (other.c_KND[0] == drawn.c_KND[1]).all()
    assert set(drawn.m_ND[0]) == {1, 2, 3}


def test_a_few_draws_are_enough_for_lumpy_weights() -> None:
    """A network of 8 positions, all 255 sets of which are enumerated for the truth. Two draws for each of 12 rows say
    what larger steps at the masked end cost, without bias, and three times as exactly as the draws by themselves."""
    network = Transformer(Architecture(vocab_size=9, length=8, width=16, depth=1, heads=1, mask_id=8))
    network.initialise(torch.Generator().manual_seed(0)).eval().requires_grad_(False)
    network.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    tokens = np.random.default_rng(2).integers(0, 8, (12, 8))
    usual, lumpy = Schedule.parse("m:8"), Schedule.parse("m:1@40% m:5@60%")

    def cost(table: BoundTable) -> float:
        return float(np.mean(schedule_bound(table, lumpy).nats_N - schedule_bound(table, usual).nats_N))

    truth = cost(measure_table({"m": network}, tokens, 8, draws=None))
    with_g, without = [], []
    for seed in range(60):
        table = measure_table({"m": network}, tokens, 8, draws=2, seed=seed)
        with_g.append(cost(table))
        bare = BoundTable(table.models, table.length, table.m_ND, table.weight_ND, table.c_KND)
        vars(bare)["smooth_K2M"] = np.zeros_like(table.smooth_K2M)
        without.append(cost(bare))
    for found in (with_g, without):
        assert abs(np.mean(found) - truth) < 4 * np.std(found, ddof=1) / math.sqrt(60)
    assert np.std(with_g) < np.std(without) / 3


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_uniform_network_has_the_bits_of_its_vocabulary_whatever_was_drawn(rows: int) -> None:
    """Of 64 positions in 4 steps few numbers of masked positions count, and 2 draws of each row hardly meet them."""
    uniform = FromLogits(lambda x, t: torch.zeros(*x.shape, 5, dtype=torch.float64))
    table = measure_table({"m": uniform}, np.zeros((rows, 64), dtype=int), 4, draws=2)
    assert schedule_bound(table, Schedule.parse("m:4")).bits == pytest.approx(2)


def test_one_model_at_infinity_is_the_usual_bound() -> None:
    """The trainer's bound on a network, on the same text: two unbiased estimates of one number."""
    network = Transformer(Architecture(9, 16, width=16, depth=2, heads=2))
    network.initialise(torch.Generator().manual_seed(0)).eval().requires_grad_(False)
    network.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    tokens = np.random.default_rng(0).integers(0, 8, (200, 16))
    usual = bound(network, tokens, draws=8)
    drawn = measure_table({"m": network}, tokens, 8, draws=8, seed=7)
    ours = schedule_bound(drawn, Schedule.parse("m"), math.inf)
    assert abs(ours.bits - usual.bits) < (ours.high - ours.low + usual.high - usual.low) / 2
    assert ours.to_json()["perplexity"] == pytest.approx(2**ours.bits)
    weights = schedule_weights(("m",), Schedule.parse("m"), math.inf, 16)
    assert weights[0] == pytest.approx([0] + [1] * 16)


def test_binomials_against_scipy() -> None:
    y = np.array([0.0, 1e-9, 0.3, 0.999, 1.0])
    m = np.arange(1025)
    assert _binomial(y, 1024) == pytest.approx(scipy.stats.binom.pmf(m, 1024, y[:, None]), abs=1e-11)
    assert _at_least(y, 1024) == pytest.approx(scipy.stats.binom.sf(m - 1, 1024, y[:, None]), abs=1e-10)


def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    tokens = TEXTS[:5]
    bound(MODELS["a"], tokens, mask_id=SYMBOLS, draws=2, batch_size=2, on_rows=lambda *pair: told.append(pair))
    assert told == [(2, 5), (4, 5), (5, 5)]
    told.clear()
    measure_table(MODELS, tokens, SYMBOLS, draws=3, batch_size=6, on_rows=lambda *pair: told.append(pair))
    assert told == [(6, 15), (12, 15), (15, 15)]


def test_messages(table) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="asks for model"):
        schedule_bound(table, Schedule.parse("a:1 z:1"))
    with pytest.raises(UserError, match="looks at the time"):
        measure_table({"t": TableDenoiser(1, edges=(1.0, 0.5, 0.0))}, TEXTS, SYMBOLS)
    with pytest.raises(UserError, match="too many sets"):
        measure_table(MODELS, np.zeros((1, 20), dtype=int), SYMBOLS, draws=None)
    with pytest.raises(UserError, match="follow its plans"):
        schedule_bound(table, Schedule.parse("a:100% spaced:2"), math.inf)
    with pytest.raises(UserError, match="infinite"):
        schedule_bound(table, Schedule.parse("a:1 b:1").timetable(), math.inf)
