"""The exact sampler's invariants: rows that do not feel their mates, tokens that never change, calls that are all
counted, logits only where they are needed. (Its law is in test_law.)"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LinearDenoiser
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relaylm.core.noise import uniforms
from relaylm.core.plan import Alpha, Plan, make_events, make_plan
from relaylm.core.schedule import RowState, Schedule, Timetable
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, FromLogits, Transformer, build, expected_shapes
from relaylm.models.family import Family
from relaylm.sampling.denoise import denoise
from relaylm.sampling.engine import Engine
from relaylm.sampling.law import Law
from relaylm.sampling.policy import SwitchByMaskFraction
from relaylm.sampling.queue import Queue, call_shapes, changes_ahead
from relaylm.sampling.result import Event, Samples, distinct_pairs
from relaylm.sampling.sample import sample

INF = math.inf


def transformer(vocab: int = 40, length: int = 16, depth: int = 2, width: int = 32, seed: int = 0) -> Transformer:
    """A random network whose logits are far from flat."""
    a = Architecture(vocab, length, width, depth, 2)
    rng = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(shape, generator=rng) * (0.3 if len(shape) > 1 else 0.1) + ("norm" in name)
        for name, shape in expected_shapes(a).items()
    }
    return build(a, state)


def rows_of(numbers: np.ndarray, length: int, seed: int = 0) -> Plan:
    """A plan of any rows in any order, each with the noise that belongs to its number."""
    return Plan(seed, numbers, np.full((len(numbers), length), -1), uniforms(seed, numbers, length))


# ------------------------------------------------------------------------------------------------------- the needle


NEEDLE_MODELS = {"light": transformer(depth=1, seed=1), "heavy": transformer(depth=2, seed=2)}


class TestNeedle:
    """At one call shape a row's tokens are the same bits, whatever its slot and its mates."""

    length, mask, batch, rows = 16, 39, 32, 1000

    def tokens(self, plan: Plan, steps: float = 8, batch: int | None = None) -> np.ndarray:
        schedule = Schedule.parse("light:25% heavy:50% light:25%")
        return denoise(
            NEEDLE_MODELS, schedule, plan, mask_id=self.mask, steps=steps, batch_size=batch or self.batch
        ).tokens

    @pytest.mark.parametrize("steps", [8, 64, INF])
    def test_rows_do_not_feel_their_mates(self, steps: float) -> None:
        """1,000 rows in order; shuffled; in the company of strangers; a slice; each at least 8 batches long."""
        rng = np.random.default_rng(0)
        whole = self.tokens(make_plan(self.rows, self.length), steps)
        assert len(np.unique(whole, axis=0)) > 0.99 * self.rows
        shuffled = rng.permutation(self.rows)
        assert (self.tokens(rows_of(shuffled, self.length), steps) == whole[shuffled]).all()
        strangers = np.concatenate([rng.choice(self.rows, 200, replace=False), rng.integers(10**6, 2**32, 300)])
        rng.shuffle(strangers)
        known = strangers < self.rows
        assert (self.tokens(rows_of(strangers, self.length), steps)[known] == whole[strangers[known]]).all()
        part = make_plan(257, self.length, first_row=411)
        assert (self.tokens(part, steps) == whole[411 : 411 + 257]).all()

    def test_one_row_in_every_slot(self) -> None:
        """One row, at every place of a batch, among mates that differ each time."""
        needle = self.tokens(make_plan(self.rows, self.length))[7]
        rng = np.random.default_rng(1)
        for slot in range(self.batch):
            numbers = rng.integers(0, 2**32, self.batch)
            numbers[slot] = 7
            assert (self.tokens(rows_of(numbers, self.length))[slot] == needle).all(), slot
        same = self.tokens(rows_of(np.full(3 * self.batch, 7), self.length))
        assert (same == needle).all()

    def test_the_needle_would_be_missed_if_rows_were_keyed_by_slot(self) -> None:
        """Sanity of the test: wrong row numbers do change the tokens."""
        plan = make_plan(64, self.length)
        wrong = Plan(plan.seed, plan.rows_n + 1, plan.given_nL, plan.u_nL)
        assert (self.tokens(plan) != self.tokens(wrong)).mean() > 0.3

    def test_across_shapes_the_mismatch_rate_is_small(self, record_property: Any) -> None:
        """At other batch sizes float32 sums may round differently, and a race may then go the other way."""
        plan = make_plan(self.rows, self.length)
        base = self.tokens(plan)
        rates = {batch: float((self.tokens(plan, batch=batch) != base).mean()) for batch in (4, 7, 64, 1000)}
        record_property("mismatch_rate_by_batch_size", rates)
        print(f"tokens that differ from batch size {self.batch}, by batch size: {rates}")
        assert all(rate < 1e-3 for rate in rates.values())


# ---------------------------------------------------------------------------------------------- invariants of a run

VOCAB = 5  # with the mask, id 4


def scheduled(data: st.DataObject, steps: float) -> Any:
    """Some policy over models a and b for T steps."""
    kinds = ["share", "dynamic"] + (["table", "bits"] if math.isfinite(steps) else [])
    kind = data.draw(st.sampled_from(kinds))
    if kind == "share":
        return Schedule.parse(data.draw(st.sampled_from(["a", "b", "a:50% b:50%", "b:25% a:50% b:25%"])))
    if kind == "dynamic":
        return SwitchByMaskFraction("a", "b", 0.3, 0.8)
    if kind == "bits":
        return Schedule.parse("1001").bind("a", "b")
    names = data.draw(st.lists(st.sampled_from("ab"), min_size=int(steps), max_size=int(steps)))
    inner = data.draw(
        st.lists(st.integers(1, 10**6 - 1), min_size=int(steps) - 1, max_size=int(steps) - 1, unique=True)
    )
    return Timetable(tuple(names), (1.0, *(x / 10**6 for x in sorted(inner, reverse=True)), 0.0))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    """Given tokens stay, written tokens stay, every call is counted, and the trace tells what happened."""
    n, length = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    cells = st.lists(st.sampled_from([-1, -1, -1, 0, 3]), min_size=n * length, max_size=n * length)
    layout = np.array(data.draw(cells)).reshape(n, length)
    steps = data.draw(st.sampled_from([1, 2, 3, 8, 30, INF]))
    policy = scheduled(data, steps)
    alpha = data.draw(st.sampled_from([Alpha(), Alpha("cosine"), Alpha("polynomial", 2.0)]))
    models = {"a": LinearDenoiser(1, length, VOCAB), "b": LinearDenoiser(2, length, VOCAB)}
    plan = make_plan(n, length, data.draw(st.integers(0, 1000)), layout)
    events: list[Event] = []
    progress: list[tuple[int, int]] = []
    samples = denoise(
        models,
        policy,
        plan,
        mask_id=4,
        steps=steps,
        alpha=alpha,
        batch_size=data.draw(st.integers(1, 12)),
        callback=events.append,
        on_calls=lambda done, total: progress.append((done, total)),
    )
    tokens, trace, cost, free = samples.tokens, samples.trace, samples.cost, layout < 0

    assert (tokens[~free] == layout[~free]).all()
    assert tokens.min(initial=0) >= 0 and (tokens < 4).all()  # all written, and never with the mask

    # Each free position is written once, and what the callback said is what is there.
    state = np.where(free, 4, layout)
    for event in events:
        assert len(event.positions) == len(event.tokens) > 0
        assert (state[event.row, event.positions] == 4).all()
        state[event.row, event.positions] = event.tokens
    assert (state == tokens).all()

    # Each row's events in order of time, at most one for each step, and for each free position.
    by_row = [[event for event in events if event.row == r] for r in range(n)]
    for r, mine in enumerate(by_row):
        assert len(mine) <= min(steps, free[r].sum())
        order = [event.t for event in mine]
        assert order == sorted(order, reverse=True) and len(set(order)) == len(order)
        assert all(0 < t <= 1 for t in order)
        for event in mine:
            assert (trace.step_nL[r, event.positions] == event.step).all()
            assert {trace.models[m] for m in trace.model_nL[r, event.positions]} == {event.model}
            assert (trace.u_nL[r, event.positions] <= 1 - alpha(event.t) + 1e-12).all()
    assert (trace.model_nL[~free] == -1).all() and (trace.step_nL[~free] == 0).all()
    assert (trace.model_nL[free] >= 0).all()

    # The trace follows the timetable.
    table = policy.timetable(int(steps)) if isinstance(policy, Schedule) and math.isfinite(steps) else policy
    for event in events:
        if isinstance(table, Timetable):
            assert event.model == table.s(event.step) and event.t == table.times[table.steps - event.step]
        elif isinstance(policy, Schedule):
            assert event.model == policy.model_at(event.t) and event.step == 0

    # Calls made are calls reported.
    assert cost.calls == {name: Counter(event.model for event in events)[name] for name in models}
    assert sum(len(model.batches) for model in models.values()) == cost.network_calls
    assert sum(sum(model.batches) for model in models.values()) == cost.total_calls + cost.padded_calls
    assert cost.flops == sum(1000.0 + len(event.positions) for event in events)
    assert [total for _, total in progress] == [len(events)] * len(progress)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert (progress[-1][0] if progress else 0) == len(events)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_schedules_that_agree_on_a_prefix_share_it(data: st.DataObject) -> None:
    """What the first k steps write depends on the first k steps' models alone."""
    steps = data.draw(st.integers(2, 10))
    k = data.draw(st.integers(0, steps))
    names = st.lists(st.sampled_from("ab"), min_size=steps, max_size=steps)
    first, second = data.draw(names), data.draw(names)
    second[:k] = first[:k]
    models = {"a": LinearDenoiser(1, 6, VOCAB), "b": LinearDenoiser(2, 6, VOCAB)}
    plan, grid = make_plan(7, 6, data.draw(st.integers(0, 99))), tuple((steps - j) / steps for j in range(steps + 1))
    one, two = (
        denoise(models, Timetable(tuple(names), grid), plan, mask_id=4, batch_size=data.draw(st.integers(1, 7)))
        for names in (first, second)
    )
    assert (one.trace.step_nL == two.trace.step_nL).all()
    shared = one.trace.step_nL > steps - k
    assert (one.tokens[shared] == two.tokens[shared]).all()
    if first == second:
        assert (one.tokens == two.tokens).all()


def test_all_heavy_in_a_family_is_the_single_model_bit_for_bit() -> None:
    light, heavy, plan = transformer(depth=1, seed=1), transformer(depth=2, seed=2), make_plan(100, 16)
    for steps in (8, INF):
        options: dict[str, Any] = {"mask_id": 39, "steps": steps, "batch_size": 16}
        alone = denoise({"heavy": heavy}, Schedule.parse("heavy:100%"), plan, **options)
        among = denoise(
            {"light": light, "heavy": heavy}, Schedule.parse("H100%").bind("light", "heavy"), plan, **options
        )
        dynamic = denoise({"light": light, "heavy": heavy}, lambda state: "heavy", plan, **options)
        assert (alone.tokens == among.tokens).all() and (alone.tokens == dynamic.tokens).all()
        assert among.cost.calls == {"light": 0, "heavy": alone.cost.total_calls}
        assert among.cost.flops == alone.cost.flops == among.cost.flops_all_heavy


def test_batch_size_schedule_and_steps_do_not_change_the_plan() -> None:
    models, plan = {"a": LinearDenoiser(1, 6, VOCAB)}, make_plan(20, 6)
    runs = [
        denoise(models, Schedule.parse("a"), plan, mask_id=4, steps=steps, batch_size=batch)
        for steps in (1, 5, INF)
        for batch in (1, 3, 20)
    ]
    for run in runs:
        assert (run.trace.u_nL == plan.u_nL).all()
    for same in (runs[:3], runs[3:6], runs[6:]):  # this denoiser is exact, so across shapes too
        assert all((run.tokens == same[0].tokens).all() for run in same)


# ------------------------------------------------------------------------------------------------------------- edges


def run(policy: Any = "a", n: int = 3, length: int = 4, **options: Any) -> Samples:
    models = options.pop("models", None) or {
        "a": LinearDenoiser(1, length, VOCAB),
        "b": LinearDenoiser(2, length, VOCAB),
    }
    plan = make_plan(n, length, given=options.pop("given", None))
    policy = Schedule.parse(policy) if isinstance(policy, str) else policy
    return denoise(models, policy, plan, mask_id=4, **{"steps": 6, **options})


@pytest.mark.parametrize(("n", "length", "steps"), [(1, 1, 1), (1, 1, INF), (1, 5, 1), (4, 1, 3), (1, 6, 10_000)])
def test_smallest_cases(n: int, length: int, steps: float) -> None:
    samples = run(n=n, length=length, steps=steps)
    assert samples.tokens.shape == (n, length) and (samples.tokens < 4).all() and samples.steps == steps
    assert samples.cost.calls["a"] == (n if 1 in (length, steps) else n * length)


@pytest.mark.parametrize("policy", ["a", SwitchByMaskFraction("a", "b", 0.2, 0.7)])
@pytest.mark.parametrize("steps", [6, INF])
def test_nothing_to_do(policy: Any, steps: float) -> None:
    layout = np.array([[0, 1, 2, 3]])
    samples = run(policy, given=layout, steps=steps)
    assert (samples.tokens == layout).all() and samples.cost.total_calls == 0 and samples.cost.network_calls == 0
    assert (samples.trace.model_nL == -1).all()
    samples.to_json()


def test_rows_with_nothing_to_do_among_others() -> None:
    layout = np.array([[0, 1, 2, 3], [-1, 1, 2, 3], [-1, -1, -1, -1]])
    samples = run(given=layout, steps=INF)
    assert samples.cost.calls["a"] == 5 and (samples.tokens[0] == layout[0]).all()


@pytest.mark.parametrize("steps", [0, -1, 2.5, math.nan, -INF])
def test_bad_steps(steps: float) -> None:
    with pytest.raises(UserError):
        run(steps=steps)


@pytest.mark.parametrize(
    ("policy", "steps", "message"),
    [
        ("x", 6, "asks for model 'x'; the models are a, b"),
        ("a:50% x:50%", INF, "asks for model 'x'"),
        ("L50% H50%", 6, "asks for model 'L'"),
        (lambda state: "x", 6, "asked for model 'x'"),
        ("a:3 b:4", 6, "7 steps"),
        (Timetable(("a",), (1.0, 0.0)), 6, "1 steps"),
        (Timetable(("a",), (1.0, 0.0)), INF, "T is infinite"),
        ("interleaved(a:50% b:50%)", INF, "finite"),
        (SwitchByMaskFraction("a", "b", 0.2, 0.7), None, "needs a number of steps"),
        ("a", None, "how many steps"),
    ],
)
def test_schedules_that_cannot_be_run(policy: Any, steps: float | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(policy, steps=steps)


def test_unknown_heavy_model() -> None:
    with pytest.raises(UserError, match="huge"):
        run(heavy="huge")


def test_the_mask_cannot_be_given() -> None:
    with pytest.raises(UserError, match="write -1"):
        run(given=np.array([0, 4, -1, 1]))


def test_json_says_what_was_asked_for() -> None:
    samples = run("a:50% b:50%", steps=INF)
    told = samples.to_json()
    assert told["steps"] == "inf" and told["length"] == 4 and told["seed"] == 0 and told["schedule"] == "a:50% b:50%"
    assert set(told["cost"]) >= {"calls", "flops", "flops_saved", "blocks_saved", "seconds"}
    assert told["cost"]["calls"] == samples.cost.calls


# ------------------------------------------------------------------------------------------ options that change the law

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def shaped(law: Law) -> np.ndarray:
    """The distribution that a law makes of P (with a mask, id 2 of 5, that is always left out)."""
    logits = torch.cat([P[:2].log(), torch.tensor([9.0]), P[2:].log()])[None].clone()
    return law.apply(logits, 2).softmax(-1)[0].numpy()


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (Law(), [0.4, 0.3, 0, 0.2, 0.1]),
        (Law(temperature=0.5), np.array([16, 9, 0, 4, 1]) / 30),
        (Law(temperature=2.0), np.sqrt([4, 3, 0, 2, 1]) / np.sqrt([4, 3, 0, 2, 1]).sum()),
        (Law(top_k=1), [1, 0, 0, 0, 0]),
        (Law(top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Law(top_k=50), [0.4, 0.3, 0, 0.2, 0.1]),
        (Law(top_p=0.39), [1, 0, 0, 0, 0]),
        (Law(top_p=0.41), [4 / 7, 3 / 7, 0, 0, 0]),
        (Law(top_p=0.71), [4 / 9, 3 / 9, 0, 2 / 9, 0]),
        (Law(top_p=1e-9), [1, 0, 0, 0, 0]),
        (Law(top_p=1.0), [0.4, 0.3, 0, 0.2, 0.1]),
        (Law(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0, 0]),  # 4/9 of the three is below a half
        (Law(temperature=0.5, top_p=0.6), [16 / 25, 9 / 25, 0, 0, 0]),
    ],
)
def test_temperature_and_truncation(law: Law, expected: Any) -> None:
    assert np.allclose(shaped(law), expected, atol=1e-12)


def test_options_reach_the_samples_and_are_named() -> None:
    table = torch.cat([P.log(), torch.tensor([3.0])])
    models = {"a": FromLogits(lambda tokens_BL, t_B: table.expand(*tokens_BL.shape, 5))}
    free = run(models=models, n=20_000, steps=2)
    assert np.allclose(np.bincount(free.tokens.ravel(), minlength=4) / 80_000, P, atol=0.01)
    assert free.changes_law == () and free.to_json()["changes_law"] == []
    cut = run(models=models, n=20_000, steps=2, law=Law(temperature=0.5, top_k=3, top_p=0.8))
    assert np.allclose(np.bincount(cut.tokens.ravel(), minlength=4) / 80_000, [16 / 25, 9 / 25, 0, 0], atol=0.01)
    assert cut.changes_law == ("temperature=0.5", "top_k=3", "top_p=0.8")
    assert table[4] == 3.0 and torch.equal(table[:4], P.log())  # a denoiser's own tensor is left alone


def test_options_that_do_nothing_are_not_named() -> None:
    assert Law(temperature=1.0, top_p=1.0).changes == ()


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 0}, {"temperature": INF}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}],
)
def test_bad_options(bad: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Law(**bad)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- dynamic policies


class Watching:
    """A policy that keeps what it was shown."""

    def __init__(self, wants_logits: bool) -> None:
        self.wants_logits = wants_logits
        self.seen: list[RowState] = []

    def __call__(self, state: RowState) -> str:
        self.seen.append(state)
        return "b" if state.masked % 2 else "a"


@pytest.mark.parametrize("wants_logits", [False, True])
@pytest.mark.parametrize("steps", [5, INF])
def test_a_policy_sees_its_row(wants_logits: bool, steps: float) -> None:
    """Every field, worked out again from the trace by going through the row's events."""
    length = 6
    layout = np.array([-1, -1, 2, -1, -1, -1])
    models = {"a": LinearDenoiser(1, length, VOCAB), "b": LinearDenoiser(2, length, VOCAB)}
    for row in range(5):  # one row at a time, so that what the policy saw is in order
        policy, events = Watching(wants_logits), []
        plan = make_plan(1, length, 3, layout, first_row=row)
        samples = denoise(models, policy, plan, mask_id=4, steps=steps, callback=events.append)
        assert len(policy.seen) == len(events) == samples.cost.total_calls
        tokens, last = np.where(layout < 0, 4, layout), None
        logits, logprobs = torch.empty(0), np.empty(0)
        for k, (state, event) in enumerate(zip(policy.seen, events, strict=True)):
            assert (state.step, state.t, state.calls) == (event.step, event.t, k)
            assert (state.steps, state.length, state.free) == (0 if steps == INF else 5, 6, 5)
            assert state.masked == (tokens == 4).sum()
            assert event.model == ("b" if state.masked % 2 else "a")
            if last is None:
                assert state.model is None and state.mean_logprob is None and state.masked_logits is None
            else:
                assert state.model == last.model
                assert math.isclose(state.mean_logprob or 0, logprobs.mean(), rel_tol=1e-12)
                assert math.isclose(state.min_logprob or 0, logprobs.min(), rel_tol=1e-12)
                assert (state.masked_logits is not None) == wants_logits
                if wants_logits:
                    assert torch.allclose(state.masked_logits, logits[torch.from_numpy(tokens == 4)], atol=1e-12)
            now = torch.tensor([event.t], dtype=torch.float64)
            logits = models[event.model].logits(torch.from_numpy(tokens)[None], now)[0]
            written = logits[event.positions][:, :4].log_softmax(-1)  # without the mask
            logprobs = written.gather(1, torch.tensor(event.tokens)[:, None]).numpy()
            tokens[event.positions], last = event.tokens, event
        charge = [length if wants_logits else len(event.positions) for event in events]
        assert samples.cost.flops == sum(1000.0 + k for k in charge)


def test_asking_for_logits_changes_nothing_but_the_price() -> None:
    lazy, curious = (run(Watching(wants), n=30, batch_size=8) for wants in (False, True))
    assert (lazy.tokens == curious.tokens).all() and lazy.cost.calls == curious.cost.calls
    assert (lazy.cost.flops or 0) < (curious.cost.flops or 0)


def test_a_static_schedule_called_as_a_policy_is_the_schedule() -> None:
    """The seam: the same rule, once known beforehand and once asked at every event."""
    schedule = Schedule.parse("a:25% b:50% a:25%")
    for steps in (8, INF):
        static, asked = run(schedule, n=50, steps=steps), run(lambda state: schedule(state), n=50, steps=steps)
        assert (static.tokens == asked.tokens).all() and static.cost.calls == asked.cost.calls
        assert (static.trace.model_nL == asked.trace.model_nL).all()


# --------------------------------------------------------------------------------------------- no tensor of B x L x V


class Largest(TorchDispatchMode):
    """Watches every operation's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.op = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.numel:
                self.numel, self.op = leaf.numel(), str(func)
        return out


class TestNoFullLogits:
    batch, length, vocab = 4, 32, 3000
    model = transformer(vocab, length, depth=2, width=32)

    def largest(self, model: Any, steps: float) -> Largest:
        plan = make_plan(3 * self.batch, self.length)
        with Largest() as watch:
            denoise({"m": model}, Schedule.parse("m"), plan, mask_id=2999, steps=steps, batch_size=self.batch)
        return watch

    @pytest.mark.parametrize("steps", [1, 2, 3, 8, 32, 1000, INF])
    def test_the_exact_sampler_makes_none(self, steps: float) -> None:
        watch = self.largest(self.model, steps)
        assert watch.numel > self.vocab  # it saw the head
        assert watch.numel < self.batch * self.length * self.vocab, watch.op

    def test_full_logits_would_be_seen(self) -> None:
        watch = self.largest(FromLogits(self.model.logits), 32)
        assert watch.numel >= self.batch * self.length * self.vocab


def test_a_streamer_sees_drafts_of_the_first_row_and_then_the_sample() -> None:
    """transformers' manner: put_draft while it is being written, put and end when it is done."""

    class Streamer:
        def __init__(self) -> None:
            self.drafts: list[list[int]] = []
            self.final: list[int] = []
            self.ended = False

        def put_draft(self, value: torch.Tensor) -> None:
            self.drafts.append(value[0].tolist())

        def put(self, value: torch.Tensor) -> None:
            self.final = value[0].tolist()

        def end(self) -> None:
            self.ended = True

    model = transformer(20, 12, depth=1, width=16)
    family = Family({"a": model}, mask_id=19, vocab_size=20, length=12)
    streamer = Streamer()
    samples = sample(family, "a", n=3, seed=1, steps=6, callback=streamer)
    assert streamer.ended and streamer.final == samples.tokens[0].tolist() == streamer.drafts[-1]
    masks = [draft.count(19) for draft in streamer.drafts]
    assert masks == sorted(masks, reverse=True) and masks[-1] == 0 and masks[0] < 12


@pytest.mark.parametrize("text", ["a", "a:12.5% b:75% a:12.5%", "a:45% b:10% a:45%", "interleaved(a:25% b:75%)"])
def test_batches_are_full_although_models_take_turns(text: str) -> None:
    """With four batches' worth of rows hardly a place is empty; each call has one model, and each event its turn."""
    even = FromLogits(lambda tokens_BL, t_B: torch.zeros(*tokens_BL.shape, 3))
    samples = denoise(
        {"a": even, "b": even}, Schedule.parse(text), make_plan(64, 256, 0), mask_id=2, steps=256, batch_size=16
    )
    assert samples.cost.padded_calls < 0.03 * samples.cost.total_calls
    assert samples.cost.network_calls * 16 == samples.cost.total_calls + samples.cost.padded_calls


class TestDamage:
    """Networks that give nonsense are refused; probability zero is not nonsense."""

    @staticmethod
    def draw(column: int, value: float, mask_id: int = 4) -> np.ndarray:
        def logits(tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(*tokens_BL.shape, 5)
            out[..., column] = value
            return out

        plan = make_plan(50, 6, 0)
        return denoise({"a": FromLogits(logits)}, Schedule.parse("a:6"), plan, mask_id=mask_id, batch_size=16).tokens

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("column", [0, 1, 3])
    def test_nan_and_infinity_in_any_column(self, column: int, value: float) -> None:
        with pytest.raises(UserError, match="not finite"):
            self.draw(column, value)

    @pytest.mark.parametrize("mask_id", [0, 4])
    def test_impossible_tokens_are_never_written(self, mask_id: int) -> None:
        tokens = self.draw(1, -math.inf, mask_id)
        assert set(np.unique(tokens)) == {0, 1, 2, 3, 4} - {1, mask_id}


@pytest.mark.parametrize("dynamic", [False, True])
def test_out_of_memory_halves_the_batch_and_loses_nothing(dynamic: bool) -> None:
    """A network that cannot take more than two rows: the same tokens as one that can, in batches of two."""
    model = transformer(20, 12, depth=1, width=16)

    class Small:
        vocab_size = 20

        def logits_at(self, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
            if len(tokens_BL) > 2:
                raise torch.OutOfMemoryError
            return model.logits_at(tokens_BL, t_B, positions_BK)

        def logits(self, tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return model.logits(tokens_BL, t_B)

    policy: Any = SwitchByMaskFraction("a", "a", 0.2, 0.8) if dynamic else Schedule.parse("a:8")
    plan = make_plan(11, 12, 5)
    small = denoise({"a": Small()}, policy, plan, mask_id=19, steps=8, batch_size=8)
    large = denoise({"a": model}, policy, plan, mask_id=19, steps=8, batch_size=8)
    assert small.cost.batch_size == 2 and large.cost.batch_size == 8
    assert np.array_equal(small.tokens, large.tokens)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batch_sizes_below_one_are_refused(batch_size: int) -> None:
    with pytest.raises(UserError, match="batch_size must be"):
        denoise({"a": transformer(5, 4, depth=1, width=8)}, Schedule.parse("a:2"), make_plan(3, 4, 0), mask_id=4,
                batch_size=batch_size)  # fmt: skip


def test_given_is_checked() -> None:
    family = Family({"a": transformer(20, 12, depth=1, width=16)}, mask_id=19, vocab_size=20, length=12)
    row = [3, -1, -1, 5]
    assert sample(family, "a", n=2, given=row, steps=3).tokens[:, [0, 3]].tolist() == [[3, 5], [3, 5]]
    for wrong, more in ((row, {"prompt": "x"}), ([[3, -1]] * 3, {}), ([0.5, -1], {}), ([-1] * 13, {})):
        with pytest.raises(UserError):
            sample(family, "a", n=2, given=wrong, steps=3, **more)


def test_the_record_names_policies_readably() -> None:
    model = transformer(5, 4, depth=1, width=8)

    def always(state: RowState) -> str:
        return "a"

    plan = make_plan(2, 4, 0)
    table = Schedule.parse("a:1 b:2 a:1").timetable()
    assert denoise({"a": model, "b": model}, table, plan, mask_id=4).schedule == "a:1 b:2 a:1"
    assert denoise({"a": model}, always, plan, mask_id=4, steps=3).schedule == "always"


def empty_places(text: str, rows: int, length: int, steps: int, batch: int, known: bool = True) -> float:
    """The share of the places of a schedule's calls that stay empty, a call of b weighing four times one of a: without
    a network."""
    plan, table = make_plan(rows, length, 0), Schedule.parse(text).bind("a", "b").timetable(steps)
    events = make_events(plan, table.times)
    model_E = np.array([name == "b" for name in table.models], dtype=np.int64)[table.steps - events.step_E]
    queue = Queue(events, model_E, length, batch)
    if known:
        queue.foresee()
    places = filled = done = 0
    while (call := queue.take()) is not None:
        assert set(model_E[call.events_R]) == {call.model}
        queue.advance(call)
        weight = 1 + 3 * call.model
        places, filled = places + weight * call.shape.rows, filled + weight * len(call.rows_R)
        done += len(call.rows_R)
    assert done == len(model_E)
    return 1 - filled / places


@pytest.mark.parametrize("share", [10, 25, 50, 80, 90])
def test_two_batches_of_rows_fill_a_sandwich(share: int) -> None:
    """What Queue.take promises, at the size of the paper."""
    assert empty_places(f"sandwich:{share}%", rows=132, length=1024, steps=1000, batch=66) < 0.005


def test_rows_keep_in_step_through_many_models_and_fill_quick_changes() -> None:
    segments = " ".join(f"{'LH'[k % 2]}32" for k in range(8))
    assert empty_places(segments, rows=400, length=256, steps=256, batch=264) < 0.02
    assert empty_places("interleaved:25%", rows=160, length=1024, steps=1000, batch=66) < 0.005
    assert empty_places("interleaved:25%", rows=160, length=1024, steps=1000, batch=66, known=False) < 0.005


@pytest.mark.parametrize(("others", "first"), [(2, [0]), (4, [1, 2])])
def test_a_row_that_decides_how_long_it_takes_does_not_wait(others: int, first: list[int]) -> None:
    """Row 0 has six calls ahead and nobody who wants its model. A full batch of others goes before it only if they take
    longer than it does: 4 rows of 2 calls in batches of 2 take 4 more, 2 rows only 2."""
    given_nL = np.full((1 + others, 6), 0)
    given_nL[0], given_nL[1:, :2] = -1, -1
    events = make_events(make_plan(1 + others, 6, 0, given_nL), None)
    queue = Queue(events, (np.arange(len(events.step_E)) >= 6).astype(np.int64), 6, 2)
    call = queue.take()
    assert call is not None and call.rows_R.tolist() == first


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5))
def test_changes_ahead_are_those_one_counts(rows: list[list[int]]) -> None:
    ptr = np.cumsum([0, *map(len, rows)])
    changes_E, stretch_E = changes_ahead(np.array([m for row in rows for m in row], dtype=np.int64), ptr)
    for row, start in zip(rows, ptr, strict=False):
        for k in range(len(row)):
            runs = [len(list(run)) for _, run in itertools.groupby(row[k:])]
            assert (changes_E[start + k], stretch_E[start + k]) == (len(runs) - 1, runs[0])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3000)), max_size=60))
def test_distinct_pairs_are_those_of_numpy(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    found, which = distinct_pairs(a, b)
    assert found == sorted(set(pairs))
    assert [found[k] for k in which] == pairs


# ------------------------------------------------------------------------------------------------ rows that begin alike


def counted(depth: int, timed: bool = False) -> Transformer:
    """A small network that counts the rows that go through its blocks."""
    shape = Architecture(12, 16, width=16, depth=depth, heads=2, adaln=timed, time_conditioning=timed)
    model = Transformer(shape).initialise(torch.Generator().manual_seed(depth)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(depth))
    model.rows = 0  # type: ignore[assignment]
    blocks = model.hidden_at

    def hidden_at(tokens_BL: Any, *rest: Any) -> Any:
        model.rows += len(tokens_BL)  # type: ignore[assignment, operator]
        return blocks(tokens_BL, *rest)

    model.hidden_at = hidden_at  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("steps", [1, 2, 5, 40, math.inf])
@pytest.mark.parametrize("prompted", [False, True])
def test_rows_that_begin_alike_share_their_first_call(
    steps: float, prompted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as without, and as many rows less through the networks as the cost says."""
    models = {"a": counted(1), "b": counted(2)}
    given_L = np.where(np.arange(16) < 3, 5, -1) if prompted else np.full(16, -1)
    plan = make_plan(60, 16, 7, given_L)
    schedule = Schedule.parse("a:40% b:60%") if steps > 1 else Schedule.parse("b")
    found, rows = {}, {}
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr("relaylm.sampling.first_calls.alike", lambda *_: [])
        for model in models.values():
            model.rows = 0  # type: ignore[assignment]
        found[shared] = denoise(models, schedule, plan, mask_id=11, steps=steps, batch_size=4)
        rows[shared] = sum(int(model.rows) for model in models.values())  # type: ignore[arg-type]
    np.testing.assert_array_equal(found[True].tokens, found[False].tokens)
    spared = found[True].cost.shared_calls
    assert found[False].cost.shared_calls == 0 and found[True].cost.calls == found[False].cost.calls
    assert spared > 0 and rows[True] == 4 * found[True].cost.network_calls
    assert rows[True] - found[True].cost.padded_calls == found[True].cost.total_calls - spared
    assert rows[True] <= rows[False] - spared + found[True].cost.padded_calls


def test_what_does_not_begin_alike_is_not_shared() -> None:
    plain = {"a": counted(1)}
    schedule = Schedule.parse("a")

    def spared(models: Any, plan: Plan) -> int:
        return denoise(models, schedule, plan, mask_id=11, steps=8, batch_size=4).cost.shared_calls

    prompts = np.full((60, 16), -1)
    assert spared(plain, make_plan(60, 16, 0, prompts)) > 0
    prompts[:, 0] = np.arange(60) % 5
    assert spared(plain, make_plan(60, 16, 0, prompts)) == 0
    assert spared({"a": counted(1, timed=True)}, make_plan(60, 16, 0)) == 0  # it looks at the time
    assert spared({"a": LinearDenoiser(0, 16, 12)}, make_plan(60, 16, 0)) == 0  # it does not say whether it does
    assert spared(plain, make_plan(4, 16, 0)) == 0  # one call either way


@pytest.mark.parametrize("text", ["b:3", "a:50% b:50% spaced:4", "b:100% spaced:16"])
def test_savings_are_against_as_many_steps_as_positions_on_the_same_plans(text: str) -> None:
    models = {"a": LinearDenoiser(0, 16, 12), "b": LinearDenoiser(1, 16, 12)}
    plan = make_plan(9, 16, 4, np.where(np.arange(16) % 5 == 0, 3, -1))
    found = denoise(models, Schedule.parse(text), plan, mask_id=11).cost
    whole = denoise(models, Schedule.parse("b"), plan, mask_id=11, steps=16).cost
    assert found.flops_reference == whole.flops == whole.flops_reference and whole.flops_saved == 0
    assert found.flops is not None and whole.flops is not None
    assert found.flops_saved == 1 - found.flops / whole.flops


def test_first_calls_that_write_far_more_than_usual_are_shared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has places for what a step usually writes; here the first of 100 steps writes whole rows."""
    models, n = {"a": counted(1)}, 30
    plan = dataclasses.replace(make_plan(n, 16, 3), u_nL=np.linspace(0.991, 0.999, n * 16).reshape(n, 16))
    found = denoise(models, Schedule.parse("a"), plan, mask_id=11, steps=100, batch_size=8)
    assert found.cost.shared_calls > 0 and found.cost.total_calls == n
    monkeypatch.setattr("relaylm.sampling.first_calls.alike", lambda *_: [])
    known = denoise(models, Schedule.parse("a"), plan, mask_id=11, steps=100, batch_size=8)
    np.testing.assert_array_equal(found.tokens, known.tokens)


class TimedHead:
    """Logits that depend on the time in the head alone, in float64: what a row gets does not depend on its mates."""

    time_conditioning, vocab_size = True, 6

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.embedding = torch.from_numpy(rng.normal(size=(6, 16, 8)))
        self.place, self.out = torch.from_numpy(rng.normal(size=(16, 8))), torch.from_numpy(rng.normal(size=(8, 6)))

    def hidden_at(self, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(tokens_BL), 8, dtype=torch.float64)
        for j in range(tokens_BL.shape[1]):
            total = total + self.embedding[tokens_BL[:, j], j]
        return total[:, None] * self.place[positions_BK]

    def head(self, x_ND: torch.Tensor, t_N: torch.Tensor) -> torch.Tensor:
        each = [x_ND[:, d, None] * self.out[d] for d in range(8)]  # in one order whatever the number of rows
        return sum(each[1:], each[0]) * torch.cos(20 * t_N.double())[:, None]


@pytest.mark.parametrize("steps", [1, 5, math.inf])
def test_the_head_is_given_the_time_of_each_row(steps: float) -> None:
    models, n = {"a": TimedHead()}, 12
    together = denoise(models, Schedule.parse("a"), make_plan(n, 16, 2), mask_id=5, steps=steps, batch_size=5).tokens
    for row in range(n):
        plan = make_plan(1, 16, 2, first_row=row)
        alone = denoise(models, Schedule.parse("a"), plan, mask_id=5, steps=steps, batch_size=1).tokens
        np.testing.assert_array_equal(together[row], alone[0])


def test_out_of_memory_while_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shared call the same tokens come out."""
    models, plan = {"a": counted(1)}, make_plan(60, 16, 7)
    known = denoise(models, Schedule.parse("a"), plan, mask_id=11, steps=8, batch_size=4)
    for place in ("first_features", "run_first"):
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> Any:
                raise torch.OutOfMemoryError("no")

            patch.setattr(f"relaylm.sampling.first_calls.{place}", fail)
            found = denoise(models, Schedule.parse("a"), plan, mask_id=11, steps=8, batch_size=4)
        np.testing.assert_array_equal(found.tokens, known.tokens)
        assert found.cost.shared_calls == 0 and found.cost.batch_size == 4


def test_an_engine_serves_again() -> None:
    """What an earlier run left in it does not show."""
    models, schedule = {"a": counted(1), "b": counted(2)}, Schedule.parse("a:50% b:50%")
    options: dict[str, Any] = {"mask_id": 11, "steps": 8, "batch_size": 4}
    plans = [make_plan(20, 16, 3, given, first) for given, first in ((None, 0), (np.full(16, -1), 100))]
    prompts = np.full((20, 16), -1)
    prompts[:, :4] = np.arange(20)[:, None] % 7
    plans.append(make_plan(20, 16, 3, prompts))
    engine = Engine(list(models.values()), plans[0], 11, Law(), "cpu")
    for plan in (*plans, plans[0]):
        again = denoise(models, schedule, plan, engine=engine, **options)
        np.testing.assert_array_equal(again.tokens, denoise(models, schedule, plan, **options).tokens)
    for other in (make_plan(20, 16, 4), make_plan(19, 16, 3)):
        with pytest.raises(UserError, match="engine"):
            denoise(models, schedule, other, engine=engine, **options)
    with pytest.raises(UserError, match="engine"):
        denoise(models, schedule, plans[0], engine=engine, law=Law(top_k=1), **options)
    with pytest.raises(UserError, match="engine"):  # a policy wants log-probabilities
        denoise(models, SwitchByMaskFraction("a", "b", 0.2, 0.7), plans[0], engine=engine, **options)


@pytest.mark.parametrize("steps", [math.inf, 3, 40])
def test_logits_do_not_feel_a_rows_place_with_several_threads(steps: float) -> None:
    """Bit for bit, at the sampler's own call shapes: also at T = infinity, where one position is due at a time."""
    model = transformer(vocab=28, length=64, width=256)
    threads = torch.get_num_threads()
    plan = make_plan(16, 64, 0)
    times = None if math.isinf(steps) else [k / steps for k in range(int(steps), -1, -1)]
    shapes, _ = call_shapes(make_events(plan, times), 64, 16)
    tokens_BL = torch.randint(0, 28, (16, 64), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(2)
    try:
        for shape in shapes:
            positions_BK = torch.arange(16 * shape.per_row).view(16, -1) % 64
            with torch.inference_mode():
                here = model.logits_at(tokens_BL, torch.ones(16), positions_BK)
                there = model.logits_at(tokens_BL[order], torch.ones(16), positions_BK[order])
            assert torch.equal(here[order], there)
    finally:
        torch.set_num_threads(threads)
