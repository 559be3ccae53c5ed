"""Block diffusion: cached against recomputed, the law against enumeration, the bound, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import law_of_events, law_of_steps, p_value
from torch import Tensor

import relaylm
from relaylm import Family, UserError
from relaylm.core.schedule import Schedule
from relaylm.measure.evaluate import Evaluator
from relaylm.measure.likelihood import bound, masked_sums
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.layers import Past
from relaylm.sampling.blocks import window_seed


def network(depth: int, seed: int, symbols: int = 6, length: int = 12, block: int = 4, **more: Any) -> Transformer:
    """Random weights in float64, large enough that every token matters."""
    sizes = {"width": 16, "heads": 2, "vocab_size": symbols + 1, "length": length, "block_length": block}
    model = Transformer(Architecture(depth=depth, **sizes, **more)).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


class Uncached:
    """The same network, as a denoiser of whole rows that can do nothing else."""

    def __init__(self, model: Transformer) -> None:
        self.logits, self.logits_at, self.flops = model.logits, model.logits_at, model.flops
        self.vocab_size, self.mask_id, self.block_length = model.vocab_size, model.mask_id, model.block_length


class FromScratch:
    """The same network, whose past is remembered as tokens: keys and values of every finished block are computed again
    in every call, in calls of one block."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.head, self.flops, self.depth = model, model.head, model.flops, model.depth
        self.vocab_size, self.mask_id, self.block_length = model.vocab_size, model.mask_id, model.block_length

    def extend(self, tokens: Tensor, past: Past | None = None) -> Past:
        kept = tokens[:, None, :, None]  # in the form of keys
        if past is not None:
            kept = torch.cat([past.layers[0][0], kept], dim=2)
        return Past(((kept, kept),))

    def hidden_at(self, tokens: Tensor, t: Tensor, positions: Tensor | None, past: Past | None = None) -> Tensor:
        made = None
        for block in () if past is None else past.layers[0][0][:, 0, :, 0].split(self.block_length, dim=1):
            made = self.model.extend(block, made)
        return self.model.hidden_at(tokens, t, positions, made)


A, B = network(1, 1), network(3, 2)
CASES: list[dict[str, Any]] = [
    {"schedule": "sandwich:50%", "steps": 4},
    {"schedule": "a:1 b:2"},
    {"schedule": "heavy", "spacing": 2},
    {"schedule": "L50% H50%", "steps": float("inf")},
    {"schedule": "heavy", "rule": "low-confidence", "steps": 2},
    {"schedule": "light", "steps": 3, "length": 10},
    {"schedule": "L50% H50%", "steps": 4, "given": np.array([1, 2, 3, 4, 5, -1, -1, 0, -1, -1, 2])},
    {"schedule": lambda state: "a" if state.masked > 2 else "b", "steps": 4},
]


def family(wrap: Any = lambda model: model) -> Family:
    return Family({"a": wrap(A), "b": wrap(B)}, 6, 7, 12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["schedule"])[:12])
def test_cached_is_uncached(case: dict[str, Any]) -> None:
    """Bit for bit where finished blocks are computed again in calls of the same shape; against whole rows in one call,
    whose products are summed in another order, the same tokens."""
    cached = relaylm.sample(family(), n=5, seed=3, batch_size=5, **case)
    scratch = relaylm.sample(family(FromScratch), n=5, seed=3, batch_size=5, **case)
    whole = relaylm.sample(family(Uncached), n=5, seed=3, batch_size=2, **case)
    assert (cached.tokens == scratch.tokens).all() and (cached.tokens == whole.tokens).all()
    assert cached.cost.flops == scratch.cost.flops and cached.cost.calls == scratch.cost.calls
    assert cached.cost.flops < whole.cost.flops  # what the cache is for
    for name in ("step_nL", "u_nL", "model_nL"):
        assert (getattr(cached.trace, name) == getattr(whole.trace, name)).all()


@pytest.mark.parametrize("adaln", [False, True])
def test_logits_with_a_past_are_those_without_bit_for_bit(adaln: bool) -> None:
    model = network(3, 5, adaln=adaln)
    tokens, t = torch.randint(0, 7, (4, 12), generator=torch.Generator().manual_seed(0)), torch.ones(4)
    whole, past, scratch, kept = model.logits(tokens, t), None, FromScratch(model), None
    for start in (0, 4, 8):
        here = tokens[:, start : start + 4]
        found = model.head(model.hidden_at(here, t, None, past), t)
        assert torch.equal(found, model.head(scratch.hidden_at(here, t, None, kept), t))
        torch.testing.assert_close(found, whole[:, start : start + 4], rtol=1e-12, atol=1e-12)
        past, kept = model.extend(here, past), scratch.extend(here, kept)
    prompt = model.extend(tokens[:, :8])  # two blocks in one call
    found = model.head(model.hidden_at(tokens[:, 8:], t, None, prompt), t)
    torch.testing.assert_close(found, whole[:, 8:], rtol=1e-12, atol=1e-12)
    for position in range(12):  # a token moves its own block and what follows, nothing before
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % 7
        moved = (model.logits(other, t) - whole).abs().amax(dim=(0, 2)) > 1e-9
        assert not moved[: position // 4 * 4].any() and moved[position // 4 * 4 :].all()


def test_rows_do_not_depend_on_their_group() -> None:
    alone = [
        relaylm.sample(family(), "sandwich:50%", n=1, seed=1, steps=4, first_row=r, batch_size=2) for r in range(5)
    ]
    together = relaylm.sample(family(), "sandwich:50%", n=5, seed=1, steps=4, batch_size=2)
    assert (np.concatenate([one.tokens for one in alone]) == together.tokens).all()
    assert sum(one.cost.flops or 0 for one in alone) == pytest.approx(together.cost.flops)


def test_cost_is_that_of_the_calls() -> None:
    """One step a block: two calls for each of three blocks, less the last one's for later blocks."""
    samples = relaylm.sample(family(), "heavy", n=2, steps=1)
    assert samples.cost.calls == {"b": 2 * (3 + 2)}
    expected = sum(B.flops(4, 4, past) for past in (0, 4, 8)) + sum(B.flops(4, 0, past) for past in (0, 4))
    assert samples.cost.flops == 2 * expected == samples.cost.flops_all_heavy
    one = relaylm.sample(family(), "heavy", n=2, steps=4)
    assert one.cost.flops_saved == 0  # as many steps in a block as it has positions: what savings are counted against
    assert B.flops(4, 4, 8) == B.flops(4, 4) + 4 * 16 * 8 * (2 * 4 + 4)


def test_events_say_where_in_the_row_they_write() -> None:
    events: list[relaylm.Event] = []
    samples = relaylm.sample(family(), "heavy", n=3, length=10, batch_size=2, callback=events.append)
    tokens = np.full((3, 10), -1)
    for event in events:
        tokens[event.row, event.positions] = event.tokens
    assert (tokens == samples.tokens).all()
    assert samples.law == "blocks:4 uniform:4" and samples.trace.step_nL.max() <= samples.steps == 12


# ------------------------------------------------------------------------------------------------ the law

SYMBOLS, LENGTH, BLOCK, DRAWS = 2, 4, 2, 12_000
LIGHT, HEAVY = network(1, 3, SYMBOLS, LENGTH, BLOCK), network(2, 4, SYMBOLS, LENGTH, BLOCK)


def table(model: Transformer, before: tuple[int, ...]) -> Any:
    """Probabilities of a block's tokens after others, from the whole row in one call."""

    def of(state: tuple[int, ...], t: float) -> np.ndarray:
        logits = model.logits(torch.tensor([[*before, *state]]), torch.ones(1))[0, len(before) :, :SYMBOLS]
        return logits.softmax(dim=-1).numpy()

    return of


def enumerated(names: str, steps: float, given: tuple[int, ...] = (-1,) * LENGTH) -> dict[tuple[int, ...], float]:
    """The law of rows: that of the first block, times that of the second after each outcome of it."""
    models, law = {"L": LIGHT, "H": HEAVY}, {(): 1.0}
    for start in range(0, LENGTH, BLOCK):
        after = {}
        empty = tuple(SYMBOLS if token < 0 else token for token in given[start : start + BLOCK])
        for before, weight in law.items():
            if steps == float("inf"):
                edges = [1 - k / len(names) for k in range(len(names) + 1)]
                ways = law_of_events(empty, edges, [table(models[name], before) for name in names], SYMBOLS)
            else:
                times = [1 - k / steps for k in range(int(steps) + 1)]
                ways = law_of_steps(empty, times, lambda k, _, b=before: table(models[names[k]], b), SYMBOLS)
            after |= {before + state: weight * chance for state, chance in ways.items() if chance}
        law = after
    return law


@pytest.mark.parametrize(
    ("schedule", "names", "steps", "given"),
    [
        ("H2", "HH", 2, (-1, -1, -1, -1)),
        ("L1 H2", "LHH", 3, (-1, -1, -1, -1)),
        ("L50% H50%", "LH", float("inf"), (-1, -1, -1, -1)),
        ("L1 H2", "LHH", 3, (1, -1, -1, 0)),
    ],
)
def test_samples_follow_the_enumerated_law(schedule: str, names: str, steps: float, given: tuple[int, ...]) -> None:
    two = Family({"l": LIGHT, "h": HEAVY}, SYMBOLS, SYMBOLS + 1, LENGTH)
    own = None if schedule[1].isdigit() and "%" not in schedule else steps
    tokens = relaylm.sample(two, schedule, DRAWS, steps=own, given=np.array(given), seed=5, batch_size=DRAWS).tokens
    law = enumerated(names, steps, given)
    assert p_value(tokens, law, SYMBOLS) > 1e-4
    swapped = enumerated(names.translate(str.maketrans("LH", "HL")), steps, given)
    assert p_value(tokens, swapped, SYMBOLS) < 1e-4  # the test can fail


def test_the_bound_is_exact_where_plans_do_not_matter() -> None:
    """With one step a block the law is a product that no plan changes: the bound is -log p. With more steps the mean
    over plans lies above it."""
    row = np.array([[1, 0, 0, 1]])
    for steps, names in ((1, "H"), (2, "LH")):
        schedule = Schedule.parse("h:1" if steps == 1 else "l:1 h:1")
        found = plan_bound({"l": LIGHT, "h": HEAVY}, schedule, np.tile(row, (600, 1)), SYMBOLS, batch_size=200)
        exact = -np.log(enumerated(names, steps)[tuple(row[0].tolist())])
        if steps == 1:
            np.testing.assert_allclose(found.nats_N, exact, rtol=1e-9)
        else:
            assert found.nats_N.mean() > exact and found.nats_N.std() > 0
            whole = {"l": Uncached(LIGHT), "h": Uncached(HEAVY)}
            again = plan_bound(whole, schedule, np.tile(row, (600, 1)), SYMBOLS, batch_size=200)
            np.testing.assert_allclose(found.nats_N, again.nats_N, rtol=1e-9)


# ------------------------------------------------------------------------------------------------ what is refused


def test_what_does_not_go_with_blocks_is_refused() -> None:
    rows = np.zeros((2, 12), dtype=np.int64)
    for call in (
        lambda: relaylm.denoise({"a": A}, Schedule.parse("a:4"), relaylm.make_plan(1, 12), mask_id=6),
        lambda: bound(A, rows),
        lambda: Evaluator(family(), None, np.full((1, 12), -1), "b"),  # type: ignore[arg-type]
        lambda: masked_sums({"a": A}, [], rows, rows == 0, np.ones(2), 6),
    ):
        with pytest.raises(UserError, match="block of 4 positions"):
            call()
    with pytest.raises(UserError, match="blocks of its own"):
        relaylm.sample(family(), rule="low-confidence:4", steps=4)
    with pytest.raises(UserError, match="whole blocks of 4, not 10"):
        Family({"a": A}, 6, 7, 10)
    with pytest.raises(UserError, match="blocks of positions: a 4, c 2"):
        Family({"a": A, "c": network(2, 1, block=2)}, 6, 7, 12)
    with pytest.raises(UserError, match="neither causal nor"):
        network(1, 1, causal=True)


def test_windows_of_any_two_seeds_have_noise_of_their_own() -> None:
    """Block k of one seed is not block j of a seed nearby, at the ends of the range either."""
    seeds = [*range(50), *range(2**64 - 50, 2**64)]
    found = [window_seed(seed, k) for seed in seeds for k in range(200)]
    assert len(set(found)) == len(found) and 0 <= min(found) <= max(found) < 2**64
    assert [window_seed(seed, 0) for seed in seeds] == seeds
