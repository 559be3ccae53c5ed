"""The bound of continuations against enumeration, and what pairs and strata take off its variance."""

import itertools
import math

import numpy as np
import pytest
import torch

from relaylm import FromLogits, Schedule, UserError, make_plan
from relaylm.core.spacing import spaced_calls
from relaylm.measure.plan_likelihood import _plans, continuation_bound, plan_bound
from relaylm.sampling.rules import parse_rule

V, MASK = 2, 2
LONG, GIVEN = 5, 1  # the last 4 of 5 positions are scored


def wide(seed: int, time: bool = False) -> FromLogits:
    """Positions that depend on each other, and on the time where asked for."""
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(rng.normal(size=(LONG, V + 1, LONG, V)) * 1.5)

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen = weight[torch.arange(LONG), tokens].sum(dim=1) * (1 + time * t[:, None, None].double())
        return torch.cat([seen, torch.full((*seen.shape[:2], 1), -torch.inf, dtype=seen.dtype)], dim=-1)

    return FromLogits(logits)


WIDE = {"a": wide(1, time=True), "b": wide(2)}
TEXT = [1, 0, 1, 1, 0]


def wide_nll(model: str, seen: list[int], position: int, t: float) -> float:
    tokens = torch.tensor([[TEXT[p] if p in seen else MASK for p in range(LONG)]])
    log_p = WIDE[model].logits(tokens, torch.tensor([t]))[0, position].log_softmax(-1)
    return -float(log_p[TEXT[position]])


def enumerated(schedule: Schedule, steps: int | None) -> float:
    """The mean over all assignments of steps to the free positions, or over all orders for a spaced schedule."""
    free = list(range(GIVEN, LONG))
    if steps is not None:
        table = schedule.timetable(steps)
        written = [(dict(zip(free, each)), table) for each in itertools.product(range(1, steps + 1), repeat=len(free))]
        total = 0.0
        for step, _ in written:
            for position in free:
                seen = [p for p in range(LONG) if step.get(p, steps + 1) > step[position]]
                total += wide_nll(table.s(step[position]), seen, position, step[position] / steps)
        return total / len(written)
    assert schedule.spacing is not None
    total = 0.0
    for order in itertools.permutations(free):
        u = np.zeros((1, LONG))
        u[0, list(order)] = np.linspace(0.9, 0.1, len(free))
        call = spaced_calls(u, u > 0, schedule.spacing)[0]
        for position in free:
            seen = [p for p in range(LONG) if call[p] < call[position]]
            t = (LONG - len(seen)) / len(free)
            total += wide_nll(schedule.model_at(t), seen, position, t)
    return total / math.factorial(len(free))


def estimates(text: str, steps: float | None, rows: int, **options: int) -> np.ndarray:
    free = np.tile(np.arange(LONG) >= GIVEN, (rows, 1))
    found = continuation_bound(WIDE, Schedule.parse(text), np.tile(TEXT, (rows, 1)), free, MASK, steps=steps, **options)
    return found.nats_N


@pytest.mark.parametrize(
    ("text", "steps", "calls"),
    [
        ("a:50% b:50%", 4, 8),  # single calls in pairs
        ("a:50% b:50%", 4, 2),  # single calls alone
        ("a:50% b:50%", 4, 16),  # whole plans, a pair in each group
        ("a:50% b:50% spaced:2", None, 8),
        ("a:50% b:50% spaced:2", None, 32),
    ],
)
def test_continuations_are_unbiased(text: str, steps: int | None, calls: int) -> None:
    found = estimates(text, steps, 3000, calls=calls, groups=2)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - enumerated(Schedule.parse(text), steps)) <= 4 * error


@pytest.mark.parametrize(("steps", "calls", "groups"), [(4, 8, 2), (4, 4, 4), (4, 32, 2)])
def test_the_standard_error_is_that_of_rows_drawn_again(steps: int, calls: int, groups: int) -> None:
    """On average its square is the variance of the estimates, with two groups as with four."""
    free = np.tile(np.arange(LONG) >= GIVEN, (2000, 1))
    rows, schedule = np.tile(TEXT, (2000, 1)), Schedule.parse("a:50% b:50%")
    found = continuation_bound(WIDE, schedule, rows, free, MASK, steps=steps, calls=calls, groups=groups)
    assert (found.error_N**2).mean() == pytest.approx(found.nats_N.var(ddof=1), rel=0.15)


@pytest.mark.parametrize("plans", [2, 6, 8])
def test_the_plans_of_a_group_divide_the_numbers_of_masks_evenly(plans: int) -> None:
    """Of D plans one has its x in each D-th of (0, 1), and they come in pairs that add up to 1."""
    u_NGDL, x_NGD = _plans(5, np.arange(40), 7, 3, plans, False)
    assert (np.sort(np.floor(x_NGD * plans), axis=2) == np.arange(plans)).all()
    np.testing.assert_allclose(np.sort(x_NGD, axis=2), np.sort(1 - x_NGD, axis=2), atol=1e-12)
    np.testing.assert_allclose(u_NGDL[:, :, : plans // 2] + u_NGDL[:, :, plans // 2 :], 1)


def test_bits_are_for_one_free_position() -> None:
    """What a plan has as given is not scored, nor counted."""
    given = np.tile([1, -1, -1, 1, 0], (6, 1))
    plan = make_plan(6, LONG, 1, given)
    found = plan_bound(WIDE, Schedule.parse("a:100% spaced:2"), np.tile(TEXT, (6, 1)), MASK, plan=plan)
    assert found.bits == pytest.approx(found.nats_N.mean() / (2 * math.log(2)))
    forced = plan_bound(
        WIDE, Schedule.parse("a:100%"), np.tile(TEXT, (6, 1)), MASK, plan=plan, rule=parse_rule("surest:2")
    )
    assert forced.bits == pytest.approx(forced.nats_N.mean() / (2 * math.log(2)))


def test_a_row_without_a_free_position_has_no_bits() -> None:
    plan = make_plan(2, LONG, 0, np.array([[1, -1, -1, 1, 0], TEXT]))
    with pytest.raises(UserError, match="every row needs a free position"):
        plan_bound(WIDE, Schedule.parse("a:100% spaced:2"), np.tile(TEXT, (2, 1)), MASK, plan=plan)


def test_a_step_schedule_without_an_end_is_that_of_many_steps() -> None:
    found, many = (estimates("a:50% b:50%", steps, 2000, calls=8, groups=2) for steps in (math.inf, 4096))
    assert abs(found.mean() - many.mean()) <= 4 * math.hypot(found.std(), many.std()) / math.sqrt(2000)


def test_plans_of_one_order_differ_where_the_model_depends_on_when() -> None:
    """Of a pair u and 1 - u one is written by each model, also where there is only one position, and one order."""
    models = {}
    for name, p in (("a", 0.9), ("b", 0.5)):
        models[name] = FromLogits(lambda x, t, p=p: torch.tensor([1 - p, p, 0.0]).log().expand(*x.shape, 3))  # type: ignore[misc]
        models[name].time_conditioning = False
    rows, free = np.ones((5, LONG), dtype=int), np.tile(np.arange(LONG) == 2, (5, 1))
    found = continuation_bound(models, Schedule.parse("a:50% b:50%"), rows, free, MASK, steps=math.inf, calls=8)
    np.testing.assert_allclose(found.nats_N, -(math.log(0.9) + math.log(0.5)) / 2, rtol=1e-6)


def test_about_as_many_calls_are_made_as_were_asked_for() -> None:
    """A plan of spaced:4 takes about 6 calls, and each of 2 groups at least one plan."""
    uniform = FromLogits(lambda x, t: torch.zeros(*x.shape, V + 1))
    rows, free, spaced = np.zeros((20, 40), dtype=int), np.ones((20, 40), dtype=bool), Schedule.parse("a:100% spaced:4")
    for calls, most in ((2, 14), (24, 28), (96, 112)):
        found = continuation_bound({"a": uniform}, spaced, rows, free, MASK, calls=calls, groups=2)
        assert 0.8 * calls < found.calls / 20 < most


CHAIN = [1] * 8


def conditionals() -> FromLogits:
    """The true conditionals of a chain whose neighbours are equal with probability 0.9: every order of writing has the
    same likelihood, and what is masked is the easier to predict the less of it there is."""
    texts = torch.tensor(list(itertools.product(range(V), repeat=len(CHAIN))))
    p = torch.where(texts[:, 1:] == texts[:, :-1], 0.9, 0.1).double().prod(dim=1) / V

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        fits = ((tokens[:, None] == texts) | (tokens[:, None] == MASK)).all(dim=2) * p
        chance = torch.stack([(fits[:, :, None] * (texts == v)).sum(dim=1) for v in range(V)], dim=-1)
        return torch.cat([chance.log(), torch.full((*chance.shape[:2], 1), -torch.inf)], dim=-1)

    model = FromLogits(logits)
    model.time_conditioning = False
    return model


@pytest.mark.parametrize("steps", [4, math.inf])
def test_pairs_and_strata_have_less_variance_than_independent_calls(steps: float) -> None:
    free = np.tile(np.arange(len(CHAIN)) >= 1, (1000, 1))
    rows, schedule, models = np.tile(CHAIN, (1000, 1)), Schedule.parse("b:100%"), {"b": conditionals()}
    plain, ours = (
        continuation_bound(models, schedule, rows, free, MASK, steps=steps, calls=16, groups=groups)
        for groups in (16, 4)
    )
    assert ours.nats_N.var() < 0.5 * plain.nats_N.var()
    if math.isinf(steps):
        exact = 7 * math.log(10 / 9)  # after the first, each is as its neighbour
        for found in (plain, ours):
            error = found.nats_N.std() / math.sqrt(len(rows))
            assert abs(found.nats_N.mean() - exact) <= 4 * error
        whole = continuation_bound(models, schedule, rows[:9], free[:9], MASK, steps=steps, calls=64)
        np.testing.assert_allclose(whole.nats_N, exact)  # every order gives the chain rule's sum


def test_standard_errors_are_those_of_the_estimates() -> None:
    free = np.tile(np.arange(LONG) >= GIVEN, (2000, 1))
    rows, schedule = np.tile(TEXT, (2000, 1)), Schedule.parse("b:100%")
    found = continuation_bound(WIDE, schedule, rows, free, MASK, steps=4, calls=16, groups=8)
    assert np.sqrt((found.error_N**2).mean()) == pytest.approx(found.nats_N.std(), rel=0.1)


def test_rows_do_not_depend_on_what_is_beside_them() -> None:
    rows = np.random.default_rng(0).integers(0, V, (6, LONG))
    free = np.arange(LONG) >= np.array([1, 1, 2, 3, 4, 4])[:, None]
    schedule = Schedule.parse("a:50% b:50%")
    together = continuation_bound(WIDE, schedule, rows, free, MASK, steps=4, calls=8)
    alone = [
        continuation_bound(
            WIDE, schedule, rows[[r]], free[[r]], MASK, steps=4, calls=8, numbers_N=np.array([r])
        ).nats_N[0]
        for r in range(6)
    ]
    np.testing.assert_allclose(together.nats_N, alone, rtol=1e-12)


def test_one_free_position_takes_one_call_where_the_time_does_not_matter() -> None:
    model = wide(2)
    model.time_conditioning = False
    free = np.arange(LONG)[None] == 3
    found = continuation_bound({"b": model}, Schedule.parse("b:100%"), np.array([TEXT]), free, MASK, steps=math.inf)
    assert found.calls == 1 and found.nats_N[0] == pytest.approx(wide_nll("b", [0, 1, 2, 4], 3, 1.0))
    assert found.error_N[0] == 0


def test_continuations_that_cannot_be_scored() -> None:
    schedule, rows = Schedule.parse("b:100%"), np.array([TEXT])
    with pytest.raises(UserError, match="nothing to score"):
        continuation_bound(WIDE, schedule, rows, np.zeros((1, LONG), dtype=bool), MASK, steps=4)
    with pytest.raises(UserError, match="at least one call for each group"):
        continuation_bound(WIDE, schedule, rows, np.ones((1, LONG), dtype=bool), MASK, steps=4, calls=2)


def test_a_rule_that_leaves_nothing_to_chance_has_its_exact_likelihood() -> None:
    """Over all continuations of a context the probabilities add up to 1."""
    texts = np.array([[1, *rest] for rest in itertools.product(range(V), repeat=LONG - 1)])
    free = np.tile(np.arange(LONG) >= 1, (len(texts), 1))
    rule, schedule = parse_rule("eb:0.6"), Schedule.parse("b:100%")
    found = continuation_bound(WIDE, schedule, texts, free, MASK, rule=rule, groups=2)
    assert np.exp(-found.nats_N).sum() == pytest.approx(1)
    np.testing.assert_allclose(found.error_N, 0, atol=1e-12)


def test_rows_without_a_context_have_the_bound_of_whole_rows() -> None:
    rows, schedule = np.tile(TEXT, (400, 1)), Schedule.parse("a:50% b:50% spaced:2")
    ours = continuation_bound(WIDE, schedule, rows, np.ones_like(rows, dtype=bool), MASK, calls=4, groups=4).nats_N
    theirs = plan_bound(WIDE, schedule, rows, MASK).nats_N
    assert abs(ours.mean() - theirs.mean()) <= 4 * math.hypot(ours.std(), theirs.std()) / math.sqrt(400)
