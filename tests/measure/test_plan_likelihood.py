"""The bound of plans against enumeration on a model with known answers."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import TableDenoiser, p_value

from relaylm import FromLogits, Schedule, UserError, make_plan
from relaylm.core.spacing import spaced_calls
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound
from relaylm.sampling.confidence import decode
from relaylm.sampling.rules import parse_rule

V, MASK, L = 2, 2, 3


def toy(seed: int) -> FromLogits:
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(L, V + 1, L, V)))

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen = weight[torch.arange(L), tokens].sum(dim=1)
        return torch.cat([seen, torch.full((*seen.shape[:2], 1), -torch.inf, dtype=seen.dtype)], dim=-1)

    return FromLogits(logits)


MODELS = {"a": toy(1), "b": toy(2)}
ROW = [1, 0, 1]


def nll(model: str, seen: tuple[int, ...], position: int) -> float:
    tokens = torch.tensor([[ROW[p] if p in seen else MASK for p in range(L)]])
    log_p = MODELS[model].logits_at(tokens, torch.ones(1), torch.tensor([[position]]))[0, 0].log_softmax(-1)
    return -float(log_p[ROW[position]])


def exact(schedule: Schedule) -> float:
    """The mean over all orders, each equally likely, of the sum over calls."""
    assert schedule.spacing is not None
    total = 0.0
    for order in itertools.permutations(range(L)):
        u = np.zeros((1, L))
        u[0, list(order)] = np.linspace(0.9, 0.1, L)
        call = spaced_calls(u, np.ones((1, L), dtype=bool), schedule.spacing)[0]
        for position in range(L):
            seen = tuple(p for p in range(L) if call[p] < call[position])
            total += nll(schedule.model_at((L - len(seen)) / L), seen, position)
    return total / math.factorial(L)


@pytest.mark.parametrize(
    "text", ["a:100% spaced:1", "a:100% spaced:2", "a:100% spaced:3", "a:100% spaced:2:prefix", "a:50% b:50% spaced:2"]
)
def test_it_is_unbiased(text: str) -> None:
    schedule, n = Schedule.parse(text), 3000
    found = plan_bound(MODELS, schedule, np.tile(ROW, (n, 1)), MASK, batch_size=256)
    error = found.nats_N.std(ddof=1) / math.sqrt(n)
    assert abs(found.nats_N.mean() - exact(schedule)) <= 4 * error + 1e-9
    assert found.bits == pytest.approx(found.nats_N.mean() / L / math.log(2))


def test_steps_and_one_position_at_a_time_agree_with_the_table_of_sets() -> None:
    rows = np.tile(ROW, (3000, 1))
    table = measure_table(MODELS, rows[:2], MASK, draws=None)
    for text, steps in (("a:2 b:1", None), ("a:50% b:50%", math.inf)):
        schedule = Schedule.parse(text)
        found, wanted = plan_bound(MODELS, schedule, rows, MASK, steps=steps), schedule_bound(table, schedule, steps)
        error = found.nats_N.std(ddof=1) / math.sqrt(len(rows))
        assert abs(found.nats_N.mean() - wanted.nats_N.mean()) <= 4 * error


def test_schedules_share_their_plans() -> None:
    rows = np.random.default_rng(0).integers(0, V, (5, L))
    one, two = (plan_bound({"a": toy(1)}, Schedule.parse(f"a:100% spaced:{d}"), rows, MASK, seed=4) for d in (3, 7))
    np.testing.assert_array_equal(one.nats_N, two.nats_N)


@pytest.mark.parametrize("text", ["surest:2", "surest:2:2", "surest:4", "eb:0.6", "eb:1:2", "dus:4", "dus:2"])
@pytest.mark.parametrize("schedule", ["a:100%", "a:50% b:50%"])
def test_a_rule_without_chance_has_its_exact_likelihood(text: str, schedule: str) -> None:
    """Over all rows the probabilities add up to 1, and samples follow them."""
    models, rule = {"a": TableDenoiser(1, 4, 3), "b": TableDenoiser(2, 4, 3)}, parse_rule(text)
    rows = np.array(list(itertools.product(range(3), repeat=4)))
    found = plan_bound(models, Schedule.parse(schedule), rows, 3, rule=rule, batch_size=32)
    law = {tuple(row): float(p) for row, p in zip(rows.tolist(), np.exp(-found.nats_N), strict=True)}
    assert sum(law.values()) == pytest.approx(1)
    samples = decode(
        models, Schedule.parse(schedule), make_plan(8000, 4, 5), rule, mask_id=3, batch_size=2000
    )  # fmt: skip
    assert p_value(samples.tokens, law, 3) > 1e-3
    assert samples.changes_law == (f"rule={rule}",)


@pytest.mark.parametrize(("text", "steps"), [("random", 2), ("ancestral", 3), ("dream-entropy", 3)])
def test_rules_with_steps_have_a_bound(text: str, steps: int) -> None:
    """No smaller than the enumerated likelihood, and equal to it where nothing is left to chance."""
    rows = np.repeat(list(itertools.product(range(V), repeat=L)), 400, axis=0)
    found = plan_bound(MODELS, Schedule.parse("a:100%"), rows, MASK, rule=parse_rule(text), steps=steps)
    total = np.exp(-found.nats_N.reshape(-1, 400)).mean(axis=1).sum()
    assert total == pytest.approx(1, abs=1e-9 if text == "dream-entropy" else 0.05)


@pytest.mark.parametrize("text", ["low-confidence", "threshold:0.5", "remdm-cap:0.1"])
def test_rules_that_look_at_draws_have_none(text: str) -> None:
    rule = parse_rule(text)
    with pytest.raises(UserError, match="no likelihood bound"):
        plan_bound(
            MODELS, Schedule.parse("a:100%"), np.zeros((2, L)), MASK, rule=rule, steps=None if rule.adaptive else 2
        )
