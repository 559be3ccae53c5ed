"""The generator against published answers, the noise against its law, lazy races against full ones, plans on grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import g_test
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm.core.noise import BLOCK, philox, race, split_seed, token_noise, uniforms
from relaylm.core.plan import LINEAR, Alpha, Plan, make_events, make_plan
from relaylm.errors import UserError

ALPHA = 1e-6

# Random123's known-answer file for philox4x32 with ten rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter: str, key: str, output: str) -> None:
    k0, k1 = words(key)
    by_numpy = philox([np.array([word]) for word in words(counter)], (k0, k1))
    by_torch = philox([torch.tensor([word]) for word in words(counter)], (k0, k1))
    assert [int(word[0]) for word in by_numpy] == words(output)
    assert [int(word[0]) for word in by_torch] == words(output)


def test_philox_numpy_equals_torch() -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, size=(4, 10_000))
    by_numpy = philox(list(counter), (0xDEADBEEF, 0xFFFFFFFF))
    by_torch = philox(list(torch.from_numpy(counter)), (0xDEADBEEF, 0xFFFFFFFF))
    for a, b in zip(by_numpy, by_torch, strict=True):
        assert (a == b.numpy()).all() and a.min() >= 0 and a.max() < 2**32


def test_seeds() -> None:
    assert split_seed(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    for bad in (-1, 2**64):
        with pytest.raises(UserError):
            split_seed(bad)
    rows = np.arange(3)
    low, high, zero = uniforms(7, rows, 4), uniforms(7 << 32, rows, 4), uniforms(0, rows, 4)
    assert not (low == high).any() and not (low == zero).any()  # both halves of a seed count


# ------------------------------------------------------------------------------------------------------ the uniforms


def correlated(x: np.ndarray, y: np.ndarray) -> bool:
    """Is the rank correlation of two long samples further from 0 than chance allows?"""
    return float(scipy.stats.spearmanr(x, y).pvalue) < ALPHA


def test_uniforms_are_uniform_and_independent() -> None:
    u_nL = uniforms(3, np.arange(20_000), 10)
    assert u_nL.min() > 0 and u_nL.max() < 1
    assert len(np.unique(u_nL)) == u_nL.size
    assert scipy.stats.kstest(u_nL.ravel(), "uniform").pvalue > ALPHA
    assert scipy.stats.kstest((u_nL.ravel() * 2**26) % 1, "uniform").pvalue > ALPHA  # the low bits too
    other_seed, other_draw = uniforms(4, np.arange(20_000), 10), uniforms(3, np.arange(20_000), 10, draw=1)
    assert not correlated(u_nL[:-1].ravel(), u_nL[1:].ravel())
    assert not correlated(u_nL[:, :-1].ravel(), u_nL[:, 1:].ravel())
    assert not correlated(u_nL.ravel(), other_seed.ravel())
    assert not correlated(u_nL.ravel(), other_draw.ravel())
    # Neighbours jointly, which catches a lattice that a correlation does not see.
    cells = np.bincount((u_nL[:, 0] * 30).astype(int) * 30 + (u_nL[:, 1] * 30).astype(int), minlength=900)
    assert g_test(cells, np.full(900, 1 / 900)) > ALPHA


def test_uniforms_stay_inside_at_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """u = 1 would be later than everything, u = 0 would count as given; not even the extreme words give them."""
    from relaylm.core import noise

    for word in (0, 0xFFFFFFFF):
        monkeypatch.setattr(noise, "philox", lambda counter, key, word=word: (np.zeros_like(counter[0]) + word,) * 4)
        u = uniforms(0, np.arange(1), 1)[0, 0]
        assert 0 < u < 1


def test_correlation_test_can_fail() -> None:
    u = uniforms(3, np.arange(20_000), 2)
    assert correlated(u[:, 0], u[:, 0] + 10 * u[:, 1])


# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_row_is_keyed_by_its_number() -> None:
    whole = make_plan(50, 8, seed=9)
    part = make_plan(7, 8, seed=9, first_row=20)
    assert (part.u_nL == whole.u_nL[20:27]).all() and (part.rows_n == np.arange(20, 27)).all()
    longer = make_plan(50, 12, seed=9)
    assert (longer.u_nL[:, :8] == whole.u_nL).all()  # a position's u does not depend on the length either
    far = make_plan(1, 8, seed=9, first_row=2**32 - 1)
    assert not np.isin(far.u_nL, whole.u_nL).any()


def test_given_positions_have_no_time() -> None:
    layout = np.array([[5, -1, 7], [-1, -1, 2]])
    plan = make_plan(2, 3, given=layout)
    assert (plan.u_nL[layout >= 0] == 0).all() and (plan.u_nL[layout < 0] > 0).all()
    assert (plan.u_nL[layout < 0] == make_plan(2, 3).u_nL[layout < 0]).all()  # what is given moves nothing else


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"length": 0}, {"first_row": -1}, {"first_row": 2**32}, {"n": 2, "first_row": 2**32 - 1}, {"seed": -1}],
)
def test_bad_plans(options: dict[str, int]) -> None:
    with pytest.raises(UserError):
        make_plan(**{"n": 1, "length": 1, **options})


def even(steps: int) -> tuple[float, ...]:
    return tuple((steps - k) / steps for k in range(steps + 1))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 1000])
def test_steps_are_the_ceiling_of_u_times_T(steps: int) -> None:
    """One plan for every T."""
    plan = make_plan(200, 20, seed=1)
    events = make_events(plan, even(steps))
    assert (events.step_nL == np.ceil(plan.u_nL * steps)).all()
    counts = np.bincount(events.step_nL.ravel(), minlength=steps + 1)[1:]
    assert g_test(counts, np.full(steps, 1 / steps)) > ALPHA


@pytest.mark.parametrize("alpha", [LINEAR, Alpha("cosine"), Alpha("polynomial", 2.0), Alpha("polynomial", 0.5)])
def test_a_position_is_masked_until_its_step(alpha: Alpha) -> None:
    """Step i writes what corruption masks at t_i and not at t_{i-1}, on any grid and for any alpha."""
    times = (1.0, 0.9, 0.5, 0.45, 0.1, 0.0)
    plan = make_plan(500, 9, seed=2)
    step = make_events(plan, times, alpha).step_nL
    for i, t in enumerate(times[::-1]):
        assert ((step <= i) == (plan.u_nL > 0) & (plan.u_nL <= 1 - alpha(t))).all()
    assert step.min() >= 1 and step.max() <= 5


def test_a_time_on_the_grid_belongs_to_the_step_above_it() -> None:
    """Step i has 1 - alpha(t_{i-1}) < u <= 1 - alpha(t_i), both ends as they are: ceil(u T) where u T is whole, too."""
    u = np.array([[0.25, 0.5, 0.75, 0.5 + 2.0**-52, 0.5 - 2.0**-53]])
    plan = Plan(0, np.arange(1), np.full((1, 5), -1), u)
    assert make_events(plan, even(4)).step_nL.tolist() == [[1, 2, 3, 3, 2]]


def test_events_know_what_their_step_writes_on_average() -> None:
    """L (t_i - t_{i-1}) positions, also on a grid whose steps differ."""
    times = (1.0, 0.9, 0.5, 0.45, 0.0)
    events = make_events(make_plan(40, 20, seed=3), times)
    width = {i: 20 * (times[4 - i] - times[5 - i]) for i in (1, 2, 3, 4)}
    assert np.allclose(events.expected_E, [width[i] for i in events.step_E.tolist()])
    assert (events.most_E == 20).all() and (make_events(make_plan(2, 20), None).most_E == 1).all()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_events_are_the_plan_in_order(data: st.DataObject) -> None:
    n, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    free = np.array(data.draw(st.lists(st.booleans(), min_size=n * length, max_size=n * length))).reshape(n, length)
    plan = make_plan(n, length, data.draw(st.integers(0, 2**64 - 1)), np.where(free, -1, 3))
    steps = data.draw(st.sampled_from([None, 1, 2, 5, 40]))
    events = make_events(plan, None if steps is None else even(steps))
    assert len(events.step_E) == events.row_ptr_n1[-1] == events.per_row_n.sum()
    for r in range(n):
        mine = range(events.row_ptr_n1[r], events.row_ptr_n1[r + 1])
        groups = [events.positions_F[events.start_E[e] : events.start_E[e] + events.count_E[e]] for e in mine]
        assert sorted(itertools.chain(*groups)) == np.flatnonzero(free[r]).tolist()
        latest = [plan.u_nL[r, group].max() for group in groups]
        earliest = [plan.u_nL[r, group].min() for group in groups]
        assert all(a > b for a, b in zip(earliest, latest[1:], strict=False))  # no event reaches into the next
        for e, group in zip(mine, groups, strict=True):
            if steps is None:
                assert len(group) == 1 and events.step_E[e] == 0 and events.t_E[e] == plan.u_nL[r, group[0]]
            else:
                assert {math.ceil(u * steps) for u in plan.u_nL[r, group]} == {events.step_E[e]}
                assert events.t_E[e] == events.step_E[e] / steps
        if steps is not None:
            assert (events.step_nL[r][~free[r]] == 0).all()
            assert len(groups) == len(set(events.step_nL[r][free[r]].tolist())) <= min(steps, free[r].sum())


def test_event_times_follow_alpha_at_infinity() -> None:
    plan = make_plan(3, 5)
    alpha = Alpha("cosine")
    events = make_events(plan, None, alpha)
    u_E = np.sort(plan.u_nL, axis=1)[:, ::-1].ravel()
    assert np.allclose(1 - alpha(events.t_E), u_E, atol=1e-12)


# --------------------------------------------------------------------------------------------------------- the noise


def lines(n: int, row: int = 0, position: int = 0, draw: int = 0) -> list[torch.Tensor]:
    """n rows from `row` on, at one position and draw."""
    return [torch.arange(row, row + n), torch.full((n,), position), torch.full((n,), draw)]


def test_uniforms_are_those_of_each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are worked on in pieces: here of four rows, the last one short."""
    rows_n = np.array([7, 0, 2**32 - 1, 5, 5, 2**20, 1, 3, 2, 9])
    alone_nL = np.concatenate([uniforms(2**40 + 1, rows_n[i : i + 1], 30, draw=2) for i in range(len(rows_n))])
    monkeypatch.setattr("relaylm.core.noise._PIECE", 4 * 30)
    assert (uniforms(2**40 + 1, rows_n, 30, draw=2) == alone_nL).all()
    assert uniforms(0, rows_n[:0], 30).shape == (0, 30) and uniforms(0, rows_n, 0).shape == (10, 0)


def test_no_two_uses_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and tokens of any draws of a row come from different numbers of the generator."""
    last_words: list[int] = []

    def watched(counter: Sequence[Any], key: tuple[int, int]) -> Any:
        last_words.append(int(np.asarray(counter[3]).flatten()[0]))
        return philox(counter, key)

    monkeypatch.setattr("relaylm.core.noise.philox", watched)
    for draw in range(300):
        uniforms(0, np.arange(1), 2, draw)
        token_noise(0, *lines(1, draw=draw), vocab_size=3)
    assert len(set(last_words)) == len(last_words) == 900
    assert last_words[:6] == [0, 1, 2, 256, 257, 258]  # what it is for is in the low byte


def test_noise_is_exponential_in_every_slot() -> None:
    noise_NV = token_noise(5, *lines(4000), 2 * BLOCK + 3).numpy()
    assert noise_NV.shape == (4000, 2 * BLOCK + 3) and noise_NV.min() > 0
    assert scipy.stats.kstest(noise_NV.ravel(), "expon").pvalue > ALPHA
    for v in range(noise_NV.shape[1]):
        assert scipy.stats.kstest(noise_NV[:, v], "expon").pvalue > ALPHA / 100, v


def test_slots_of_a_block_are_independent() -> None:
    """The minimum and its place are drawn first; what comes out must not remember that."""
    noise_NV = token_noise(6, *lines(20_000), 2 * BLOCK).numpy()
    correlation = np.corrcoef(np.exp(-noise_NV), rowvar=False)  # uniforms
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 6.5 / math.sqrt(20_000)  # within blocks and across them, 8128 pairs
    rank = scipy.stats.rankdata(noise_NV[:, :BLOCK], axis=1)
    for v in (0, 1, 31, 63):  # every rank equally likely, the first (the block's minimum) included
        assert g_test(np.bincount(rank[:, v].astype(int) - 1, minlength=BLOCK), np.full(BLOCK, 1 / BLOCK)) > ALPHA
    # min, max and range jointly: the two smallest of 64 are Exp(64) and, beyond it, Exp(63).
    ordered = np.sort(noise_NV[:, :BLOCK], axis=1)
    assert scipy.stats.kstest(ordered[:, 0] * 64, "expon").pvalue > ALPHA
    assert scipy.stats.kstest((ordered[:, 1] - ordered[:, 0]) * 63, "expon").pvalue > ALPHA
    assert not correlated(ordered[:, 0], ordered[:, 1] - ordered[:, 0])


@pytest.mark.parametrize("change", [{"row": 4000}, {"position": 1}, {"draw": 1}, {"draw": 2}])
def test_rows_positions_and_draws_are_independent(change: dict[str, int]) -> None:
    a, b = token_noise(5, *lines(4000), 70).numpy(), token_noise(5, *lines(4000, **change), 70).numpy()
    assert not np.isin(a, b).any()
    assert not correlated(a.ravel(), b.ravel())
    assert not correlated(a.min(axis=1), b.min(axis=1))
    assert not correlated(a[1:].ravel(), b[:-1].ravel())


def test_noise_and_times_are_independent() -> None:
    u = uniforms(5, np.arange(4000), 1).ravel()
    noise = token_noise(5, *lines(4000), 70).numpy()
    assert not correlated(u, noise[:, 0]) and not correlated(u, noise.min(axis=1))


def test_a_larger_vocabulary_keeps_the_noise_of_a_smaller_one() -> None:
    small, large = token_noise(5, *lines(50), 27), token_noise(5, *lines(50), 300)
    assert torch.equal(small, large[:, :27])


# ---------------------------------------------------------------------------------------------------------- the race


def logits_of(kind: str, n: int, vocab: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(vocab)
    x = torch.randn(n, vocab, generator=rng, dtype=torch.float64)
    if kind == "flat":
        return torch.zeros(n, vocab)
    if kind == "peaked":
        return x * 30
    if kind == "holes":  # -inf nearly everywhere, at least one token left
        x[torch.rand(n, vocab, generator=rng) < 0.9] = -torch.inf
        x[torch.arange(n), torch.randint(vocab, (n,), generator=rng)] = 0.5
        return x
    return x.float() if kind == "float32" else x


@pytest.mark.parametrize("kind", ["flat", "normal", "peaked", "holes", "float32"])
@pytest.mark.parametrize("vocab", [1, 2, 3, 27, 63, 64, 65, 128, 5000])
def test_lazy_race_equals_full_race(vocab: int, kind: str) -> None:
    n = 200 if vocab == 5000 else 2000
    logits = logits_of(kind, n, vocab)
    line = [torch.arange(n), torch.arange(n) % 7, torch.arange(n) % 3]
    full = (logits.double() - token_noise(11, *line, vocab).log()).argmax(dim=1)
    lazy = race(logits, 11, *line)
    assert torch.equal(lazy, full)
    assert torch.isfinite(logits.gather(1, lazy[:, None])).all()


def test_races_do_not_depend_on_other_rows() -> None:
    logits, line = logits_of("normal", 300, 500), [torch.arange(300), torch.arange(300) % 5, torch.zeros(300).long()]
    whole = race(logits, 0, *line)
    some = torch.randperm(300)[:100]
    assert torch.equal(race(logits[some], 0, *(x[some] for x in line)), whole[some])
    assert torch.equal(race(logits[7:8], 0, *(x[7:8] for x in line)), whole[7:8])


def test_adding_a_constant_changes_nothing_and_infinitely_unlikely_tokens_never_win() -> None:
    logits, line = logits_of("normal", 1000, 100), lines(1000)
    assert torch.equal(race(logits, 0, *line), race(logits + 512.0, 0, *line))
    whole = logits.round()
    for offset in (1e15, -4e15):  # where float64 still holds whole numbers, but not the noise beside them
        assert torch.equal(race(whole, 0, *line), race(whole + offset, 0, *line))
    flat = torch.zeros(1000, 100)
    assert torch.equal(race(flat, 0, *line), race(flat + 1e30, 0, *line))
    logits[:, 10:] = -torch.inf
    assert race(logits, 0, *line).max() < 10


@pytest.mark.parametrize("vocab", [3, 64, 130])
def test_winners_follow_softmax(vocab: int) -> None:
    n = 1_000_000 if vocab == 3 else 300_000
    row = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    wins = torch.zeros(vocab, dtype=torch.int64)
    for start in range(0, n, 10_000):
        wins += torch.bincount(race(row.expand(10_000, -1), 2, *lines(10_000, row=start)), minlength=vocab)
    assert g_test(wins.numpy(), row.softmax(dim=1)[0].numpy()) > ALPHA


def test_very_rare_tokens_keep_their_chance() -> None:
    """Probability 1e-5 to 1e-7, where float32 noise of a full-vocabulary sampler begins to fail, in a block with the
    common token and in a block of their own."""
    p = torch.zeros(70, dtype=torch.float64)
    p[1], p[65], p[66] = 1e-5, 1e-5, 1e-7
    p[0] = 1 - p.sum()
    draws, wins = 2_000_000, torch.zeros(70, dtype=torch.int64)
    for start in range(0, draws, 10_000):
        wins += torch.bincount(race(p.log().expand(10_000, -1), 8, *lines(10_000, row=start)), minlength=70)
    for token, chance in ((1, 1e-5), (65, 1e-5), (66, 1e-7)):
        low, high = scipy.stats.poisson.ppf([ALPHA / 2, 1 - ALPHA / 2], chance * draws)
        assert low <= wins[token] <= high, (token, int(wins[token]))
    assert wins[1] > 0 and wins[65] > 0
    assert wins[[0, 1, 65, 66]].sum() == draws


def test_smallest_exponential_is_tiny() -> None:
    """The least noise is 2^-65, not float32's 2^-24: no token that a float64 softmax can hold is shut out."""
    from relaylm.core import noise

    zero, top = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    assert math.isclose(float(noise._exponential(zero, zero)), 2.0**-65)
    assert 30 < float(noise._exponential(top, top)) < math.inf


def test_similar_models_draw_alike() -> None:
    """The race couples: at KL 0.01 about 8 in 100 draws differ, where independent draws would mostly differ."""
    a = torch.randn(1, 27, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = torch.randn(1, 27, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b = a + 0.145 * shift
    kl = float((a.softmax(1) * (a.log_softmax(1) - b.log_softmax(1))).sum())
    assert 0.008 < kl < 0.012
    differ = (race(a.expand(20_000, -1), 0, *lines(20_000)) != race(b.expand(20_000, -1), 0, *lines(20_000))).double()
    assert 0.04 < float(differ.mean()) < 0.12
