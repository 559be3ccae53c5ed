"""Decoding rules: each is its published definition, written out again here row by row in plain Python; rows do not
depend on their mates; what is called exact in law is, and what is not is not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LinearDenoiser, TableDenoiser, g_test, p_value
from hypothesis import example, settings, strategies
from hypothesis import given as hypothesis_given

from relaylm.core.noise import token_noise, uniforms
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, FromLogits, Transformer
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling import rule_call
from relaylm.sampling import rules as decoding
from relaylm.sampling.blocks import window_seed
from relaylm.sampling.confidence import RuleRun, decode
from relaylm.sampling.denoise import Options, denoise
from relaylm.sampling.law import Law
from relaylm.sampling.policy import SwitchByMaskFraction, resolve
from relaylm.sampling.result import Event, Samples
from relaylm.sampling.rule_call import uniforms_at
from relaylm.sampling.rules import (
    RULES,
    Rule,
    at_least,
    blocks_of,
    dream_counts,
    llada_counts,
    most_sure,
    parse_rule,
    remask,
    within_factor,
)
from relaylm.sampling.sample import sample

NAMES = ("a", "b", "c")
SCHEDULES = {1: "a:100%", 2: "a:25% b:75%", 3: "a:25% b:50% c:25%"}
STARTS = {1: (0.0,), 2: (0.75, 0.0), 3: (0.75, 0.25, 0.0)}  # the times at which the models' turns end
EVERY = (
    "random",
    "random:5",
    "low-confidence",
    "low-confidence:5",
    "dream-origin",
    "dream-maskgit",
    "dream-entropy",
    "dream-margin",
    "threshold:0.4",
    "threshold:0.4:5",
    "factor:1",
    "factor:2:5",
    "surest:3",
    "surest:2:3",
    "eb:2",
    "eb:1:5",
    "dus:5",
    "dus:8",
    "remdm-cap:0.3",
    "remdm-rescale:0.5",
    "remdm-conf",
    "remdm-loop:0.1:0.6:0.3:0.7",
)


# ------------------------------------------------------------------------------------------------ the definitions


@dataclass
class Literal:
    """One row decoded by the book: no batches, no tensors but the network's own."""

    models: list[Any]
    ends: tuple[float, ...]
    mask_id: int
    seed: int
    row: int
    law: Law
    greedy: bool
    x: list[int]
    calls: list[tuple[int, int]] = field(default_factory=list)  # model, positions asked for
    wrote: dict[int, int] = field(default_factory=dict)  # position -> model that wrote it last

    def __post_init__(self) -> None:
        self.free = [j for j, token in enumerate(self.x) if token < 0]
        self.x = [self.mask_id if token < 0 else token for token in self.x]
        self.draws = [0] * len(self.x)

    def masked(self) -> list[int]:
        return [j for j in self.free if self.x[j] == self.mask_id]

    def model_at(self, t: float) -> int:
        return next(k for k, end in enumerate(self.ends) if t > end + 1e-12)

    def look(self, model: int, t: float, positions: list[int]) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
        """For each position a token, the law it was drawn from, and the model's own probabilities."""
        self.calls.append((model, len(positions)))
        tokens = torch.tensor([self.x])
        logits = self.models[model].logits(tokens, torch.tensor([t], dtype=torch.float64))[0].double().numpy().copy()
        logits[:, self.mask_id] = -math.inf
        where = torch.tensor(positions)
        draws, size = torch.tensor([self.draws[j] for j in positions]), logits.shape[1]
        noises = token_noise(self.seed, torch.full_like(where, self.row), where, draws, size).numpy()
        seen = {}
        for j, noise in zip(positions, noises, strict=True):
            own = softmax(logits[j])
            law = truncate(softmax(logits[j] / self.law.temperature), self.law.top_p)
            with np.errstate(divide="ignore"):
                race = np.log(law) - np.log(noise)
            seen[j] = (int(law.argmax() if self.greedy else race.argmax()), law, own)
            self.draws[j] += 1
        return seen

    def write(self, model: int, position: int, token: int) -> None:
        self.x[position] = token
        self.wrote[position] = model

    def blocks(self, length: int | None) -> list[list[int]]:
        if length is None:
            return [self.free]
        first = self.free[0]
        edges = range(first, len(self.x), length)
        return [[j for j in self.free if start <= j < start + length] for start in edges]


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def truncate(p: np.ndarray, top_p: float | None) -> np.ndarray:
    """The nucleus: the likeliest tokens until their mass reaches top_p."""
    if top_p is None:
        return p
    kept, mass = np.zeros(len(p), dtype=bool), 0.0
    for v in np.argsort(-p, kind="stable"):
        if mass >= top_p:
            break
        kept[v], mass = True, mass + p[v]
    q = np.where(kept, p, 0.0)
    return q / q.sum()


def how_sure(name: str, seen: tuple[int, np.ndarray, np.ndarray]) -> float:
    token, law, own = seen
    if name in ("low-confidence", "threshold", "factor"):
        return float(own[token])
    if name == "dream-maskgit":
        return float(law[token])
    if name == "dream-margin":
        top = sorted(law)[::-1]
        return float(top[0] - top[1])
    return float(sum(p * math.log(p) for p in law if p > 0))


def llada(row: Literal, rule: Rule, steps: int) -> None:
    """LLaDA's generate: blocks from the left, and in each the surest (or, `random`, the largest u) stay."""
    blocks = row.blocks(rule.block)
    each = steps // len(blocks)
    u = uniforms(row.seed, np.array([row.row]), len(row.x))[0]
    for b, block in enumerate(blocks):
        base, rest = divmod(len([j for j in block if row.x[j] == row.mask_id]), each)
        for i in range(each):
            count = base + (i < rest)
            if count == 0:
                continue
            t = (steps - b * each - i) / steps
            model, here = row.model_at(t), [j for j in block if row.x[j] == row.mask_id]
            if rule.name == "random":
                here = sorted(here, key=lambda j: -u[j])[:count]
                for j, (token, _, _) in row.look(model, t, here).items():
                    row.write(model, j, token)
                continue
            seen = row.look(model, t, here)
            for j in sorted(here, key=lambda j: (-how_sure(rule.name, seen[j]), j))[:count]:
                row.write(model, j, seen[j][0])


def dream(row: Literal, rule: Rule, steps: int) -> None:
    """Dream's diffusion_generate with alg = origin, maskgit_plus, entropy or topk_margin."""
    times = [1 - k * (1 - 1e-3) / steps for k in range(steps + 1)]
    u = uniforms(row.seed, np.array([row.row]), len(row.x))[0]
    for k in range(steps):
        t, s, here = times[k], times[k + 1], row.masked()
        model, told = row.model_at((steps - k) / steps), (steps - k) / steps
        if rule.name == "dream-origin":  # with chance 1 - s/t: given u <= t, that u > s
            due = [j for j in here if u[j] > s or k == steps - 1]
            if due:
                for j, (token, _, _) in row.look(model, told, due).items():
                    row.write(model, j, token)
            continue
        count = len(here) if k == steps - 1 else int(len(here) * (1 - s / t))
        if count:
            seen = row.look(model, told, here)
            for j in sorted(here, key=lambda j: (-how_sure(rule.name, seen[j]), j))[:count]:
                row.write(model, j, seen[j][0])


def fast_dllm(row: Literal, rule: Rule, steps: int) -> None:
    """Fast-dLLM: until a block is done, all that is sure enough, and the surest in any case."""
    for block in row.blocks(rule.block):
        while here := [j for j in block if row.x[j] == row.mask_id]:
            t = len(row.masked()) / len(row.free)
            model = row.model_at(t)
            seen = row.look(model, t, here)
            sure = {j: how_sure(rule.name, seen[j]) for j in here}
            order = sorted(here, key=lambda j: (-sure[j], j))
            if rule.name == "threshold":
                kept = [order[0], *(j for j in order[1:] if sure[j] >= rule.numbers[0])]
            else:
                count = 1
                while count < len(order) and sure[order[count]] >= 1 - rule.numbers[0] / (count + 2):
                    count += 1
                kept = order[:count]
            for j in kept:
                row.write(model, j, seen[j][0])


def surest(row: Literal, rule: Rule, steps: int) -> None:
    """Rising entropy, at least a distance apart; with N sets at a look, the others follow in calls of their own."""
    distance, sets = map(int, rule.numbers)
    most = -(-len(row.x) // distance)
    while left := row.masked():
        for k in range(sets):
            if not row.masked():
                break
            t = len(row.masked()) / len(row.free)
            model = row.model_at(t)
            row.draws = [0] * len(row.x)  # draws that were not kept decided nothing
            if k == 0:
                seen = row.look(model, t, left)
                order = sorted(left, key=lambda j: (-how_sure(rule.name, seen[j]), j))
            taken: list[int] = []
            for j in order:
                if all(abs(j - other) >= distance for other in taken):
                    taken.append(j)
            order = [j for j in order if j not in taken]
            if k > 0 and taken:
                seen = row.look(model, t, sorted(taken))
            elif len(left) > most:  # more than a call can write: their entropies first, then draws where it writes
                row.calls[-1] = (model, len(left) + len(taken))
            for j in taken:
                row.write(model, j, seen[j][0])


def eb_sampler(row: Literal, rule: Rule, steps: int) -> None:
    """EB-Sampler: rising entropy, as many as keep their sum less the largest within the bound."""
    for block in row.blocks(rule.block):
        while here := [j for j in block if row.x[j] == row.mask_id]:
            t = len(row.masked()) / len(row.free)
            model = row.model_at(t)
            seen = row.look(model, t, here)
            entropy = {j: -how_sure(rule.name, seen[j]) for j in here}
            order = sorted(here, key=lambda j: (entropy[j], j))
            for count in range(len(order), 0, -1):
                first = [entropy[j] for j in order[:count]]
                if count == 1 or sum(first) - max(first) <= rule.numbers[0]:
                    break
            for j in order[:count]:
                row.write(model, j, seen[j][0])
            row.draws = [0] * len(row.x)  # draws that were not kept decided nothing


def dus(row: Literal, rule: Rule, steps: int) -> None:
    """DUS: in each block strides B // 2, B // 4, ..., 1; a smaller last level joins the one before it."""
    assert rule.block is not None
    size, first = min(rule.block, len(row.x)), row.free[0]
    for start in range(first, len(row.x), size):
        levels: list[list[int]] = []
        stride = size // 2
        while stride >= 1:
            done = {j for level in levels for j in level}
            levels.append([j for j in range(size) if j % stride == 0 and j not in done])
            stride //= 2
        if len(levels) > 1 and len(levels[-1]) < len(levels[-2]):
            levels[-2:] = [levels[-2] + levels[-1]]
        for level in levels:
            if due := sorted(start + j for j in level if start + j in row.masked()):
                t = len(row.masked()) / len(row.free)
                model = row.model_at(t)
                for j, (token, _, _) in row.look(model, t, due).items():
                    row.write(model, j, token)


def remdm_rates(rule: Rule, t: float, s: float) -> tuple[float, float, float]:
    """alpha_t, alpha_s and sigma (for conf: sigma_max)."""
    a_t, a_s = 1 - t, 1 - s
    largest = 1.0 if a_t == 0 else min(1.0, (1 - a_s) / a_t)
    if rule.name == "remdm-cap":
        return a_t, a_s, min(rule.numbers[0], largest)
    if rule.name == "remdm-rescale":
        return a_t, a_s, rule.numbers[0] * largest
    if rule.name == "remdm-conf":
        return a_t, a_s, largest
    eta, on, off, alpha = rule.numbers
    if t <= off or s == 0:
        return max(0.0, 1 - t * (1 - alpha) / off), 1 - s * (1 - alpha) / off, 0.0
    if t > on:
        return (1 - t) * alpha / (1 - on), min(1.0, (1 - s) * alpha / (1 - on)), 0.0
    return alpha, alpha, eta


def remdm(row: Literal, rule: Rule, steps: int) -> None:
    """ReMDM: at each step a written token is masked again with probability sigma, a masked one is written with
    probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)."""
    psi: dict[int, float] = {}
    for k in range(steps):
        t, s = (steps - k) / steps, (steps - k - 1) / steps
        a_t, a_s, sigma = remdm_rates(rule, t, s)
        u = uniforms(row.seed, np.array([row.row]), len(row.x), draw=k + 1)[0]
        total = sum(math.exp(-p) for p in psi.values())
        due, again = [], []
        for j in row.free:
            if row.x[j] == row.mask_id:
                own = 0.0 if rule.name == "remdm-conf" else sigma
                if u[j] < (a_s - (1 - own) * a_t) / (1 - a_t):
                    due.append(j)
            else:
                own = sigma * math.exp(-psi[j]) / total if rule.name == "remdm-conf" else sigma
                if u[j] < own:
                    again.append(j)
        model = row.model_at(t)
        seen = row.look(model, t, due) if due else {}  # the network sees the row before anything is masked again
        for j, (token, law, _) in seen.items():
            row.write(model, j, token)
            psi[j] = float(law[token])
        for j in again:
            row.x[j] = row.mask_id
            del psi[j]


def literal(rule: Rule) -> Callable[[Literal, Rule, int], None]:
    own = {"relaylm": surest, "EB-Sampler": eb_sampler, "DUS": dus}
    return {"LLaDA": llada, "Dream": dream, "Fast-dLLM": fast_dllm, "ReMDM": remdm, **own}[rule.source]


# ------------------------------------------------------------------------------------------------ small models


def tiny(seed: int, length: int = 12, depth: int = 1) -> Transformer:
    model = Transformer(Architecture(9, length, width=8, depth=depth, heads=2))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(seed + 9))
    return model


def make_models(kind: str, count: int) -> tuple[dict[str, Any], int, int]:
    """Models by name, their mask and their length."""
    if kind == "table":
        return {name: TableDenoiser(k, 4, 2) for k, name in enumerate(NAMES[:count])}, 2, 4
    if kind == "linear":
        return {name: LinearDenoiser(k, 12, 9) for k, name in enumerate(NAMES[:count])}, 8, 12
    return {name: tiny(k, depth=k + 1).double() for k, name in enumerate(NAMES[:count])}, 8, 12


def make_given(length: int, n: int) -> np.ndarray:
    """A prompt, a suffix and a token in the middle of some rows."""
    given_nL = np.full((n, length), -1)
    if length > 4:
        given_nL[:, 0] = 1
        given_nL[1::3, 6] = 0
        given_nL[2::3, -1] = 1
    return given_nL


def run(models: dict[str, Any], rule: Rule, mask_id: int, given_nL: np.ndarray, steps: int = 9, **more: Any) -> Samples:
    plan = make_plan(len(given_nL), given_nL.shape[1], 3, given_nL, more.pop("first_row", 0))
    schedule = more.pop("schedule", Schedule.parse(SCHEDULES[len(models)]))
    more = {"batch_size": 4, **more}
    return decode(models, schedule, plan, rule, mask_id=mask_id, steps=None if rule.adaptive else steps, **more)


# ------------------------------------------------------------------------------------------------ equal to the book


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["table", "linear", "transformer"])
@pytest.mark.parametrize("text", EVERY)
def test_each_rule_is_its_definition(text: str, kind: str, count: int) -> None:
    models, mask_id, length = make_models(kind, count)
    rule = parse_rule(text.replace(":5", ":2") if length == 4 else text)
    given_nL = make_given(length, 4)
    steps = 12  # a multiple of the number of blocks
    options: list[dict[str, Any]] = [{"law": Law()}]
    if kind == "linear" and count == 2:
        options += [{"law": Law(temperature=0.8, top_p=0.7)}]
        options += [] if rule.planned else [{"law": Law(), "greedy": True}]
    for option in options:
        samples = run(models, rule, mask_id, given_nL, steps, **option)
        spent = 0.0
        calls = dict.fromkeys(models, 0)
        for r in range(len(given_nL)):
            row = Literal(
                list(models.values()),
                STARTS[count],
                mask_id,
                3,
                r,
                option["law"],
                option.get("greedy", False),
                given_nL[r].tolist(),
            )
            literal(rule)(row, rule, steps)
            assert samples.tokens[r].tolist() == row.x
            assert [samples.trace.model_nL[r, j] for j in sorted(row.wrote)] == [
                row.wrote[j] for j in sorted(row.wrote)
            ]
            for model, asked in row.calls:
                calls[NAMES[model]] += 1
                spent += 1000.0 + asked
        assert samples.cost.calls == calls
        if kind == "linear":
            assert samples.cost.flops == spent


@pytest.mark.parametrize("kind", ["linear", "transformer"])
@pytest.mark.parametrize("text", ["surest:3", "surest:2:3", "eb:2", "low-confidence", "threshold:0.4", "dream-margin"])
def test_logits_made_a_few_places_at_a_time_are_the_same(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one place, and of five, which do not divide their number; of a model that gives logits and of one that
    has a head."""
    models, mask_id, length = make_models(kind, 2)
    rule, given_nL = parse_rule(text), make_given(length, 4)
    whole = run(models, rule, mask_id, given_nL, 12).tokens
    for places in (1, 5):
        monkeypatch.setattr(rule_call, "CELLS_CPU", 9 * places)
        assert (run(models, rule, mask_id, given_nL, 12).tokens == whole).all(), places


@pytest.mark.parametrize("text", EVERY)
def test_rows_do_not_depend_on_their_mates(text: str) -> None:
    """Bit for bit at one call shape: together, alone among padding, and in another order."""
    models = {"a": tiny(1), "b": tiny(2, depth=2)}
    rule = parse_rule(text)
    given_nL = np.full((9, 12), -1)
    given_nL[:, 0] = 1
    whole = run(models, rule, 8, given_nL, 12).tokens
    for r in (0, 7):
        assert (run(models, rule, 8, given_nL[:1], 12, first_row=r).tokens[0] == whole[r]).all()
    again = run(models, rule, 8, given_nL, 12)
    assert (again.tokens == whole).all()
    assert (run(models, rule, 8, given_nL, 12, first_row=100).tokens != whole).any()
    linear, _, _ = make_models("linear", 2)  # in float64 summed in one order: the same in every shape
    assert (
        run(linear, rule, 8, given_nL, 12, batch_size=9).tokens
        == run(linear, rule, 8, given_nL, 12, batch_size=2).tokens
    ).all()


@pytest.mark.parametrize("text", EVERY)
def test_what_is_given_stays_and_the_trace_tells_who_wrote_last(text: str) -> None:
    models, mask_id, length = make_models("linear", 3)
    rule, given_nL = parse_rule(text), make_given(length, 7)
    events: list[Event] = []
    samples = run(models, rule, mask_id, given_nL, 12, callback=events.append)
    fixed_nL = given_nL >= 0
    assert (samples.tokens[fixed_nL] == given_nL[fixed_nL]).all()
    assert (samples.trace.model_nL[fixed_nL] == -1).all() and (samples.trace.step_nL[fixed_nL] == 0).all()
    assert (samples.tokens != mask_id).all() and (samples.tokens < mask_id).all()
    assert ((samples.trace.model_nL >= 0) == ~fixed_nL).all() and (samples.trace.step_nL[~fixed_nL] >= 1).all()
    # What the callback heard, played back, is the sample; the last to write a position is in the trace.
    state_nL = np.where(fixed_nL, given_nL, mask_id)
    for event in events:
        assert not fixed_nL[event.row, event.positions].any()
        state_nL[event.row, event.positions] = event.tokens
        for j, token in zip(event.positions, event.tokens, strict=True):
            if token != mask_id:
                wrote = (NAMES.index(event.model), event.step)
                kept = samples.trace.model_nL[event.row, j], samples.trace.step_nL[event.row, j]
                last = not any(e.row == event.row and j in e.positions for e in events[events.index(event) + 1 :])
                assert not last or rule.adaptive or kept == wrote
    assert (state_nL == samples.tokens).all()
    assert len(events) == samples.cost.total_calls
    if not rule.adaptive:
        table = Schedule.parse(SCHEDULES[3]).timetable(12)
        for step, model in zip(samples.trace.step_nL[~fixed_nL], samples.trace.model_nL[~fixed_nL], strict=True):
            assert table.s(int(step)) == NAMES[model]


@pytest.mark.parametrize("text", ["low-confidence:5", "dream-entropy", "threshold:0.4", "remdm-cap:0.3"])
def test_a_dynamic_policy_sees_each_row(text: str) -> None:
    models, mask_id, length = make_models("linear", 2)
    given_nL = make_given(length, 5)
    rule = parse_rule(text)
    policy = SwitchByMaskFraction("a", "b", 0.2, 0.6)
    seen: list[Any] = []

    def watched(state: Any) -> str:
        seen.append(state)
        return policy(state)

    samples = run(models, rule, mask_id, given_nL, 12, schedule=watched)
    assert (samples.tokens == run(models, rule, mask_id, given_nL, 12, schedule=policy, batch_size=2).tokens).all()
    assert samples.cost.calls["a"] and samples.cost.calls["b"] and len(seen) == samples.cost.total_calls
    first = [state for state in seen if state.calls == 0]
    later = [state for state in seen if state.calls > 0]
    assert len(first) == 5 and all(state.masked == state.free and state.mean_logprob is None for state in first)
    assert all(state.min_logprob <= state.mean_logprob < 0 and state.model in "ab" for state in later)
    assert all(state.t == pytest.approx(state.masked / state.free) for state in seen if rule.adaptive)


@pytest.mark.parametrize("text", ["low-confidence", "threshold:0.4", "remdm-cap:0.3"])
def test_out_of_memory_halves_the_batch_and_changes_nothing(text: str) -> None:
    models, mask_id, length = make_models("linear", 2)
    given_nL, rule = make_given(length, 7), parse_rule(text)
    whole = run(models, rule, mask_id, given_nL)

    class Small:
        """Four rows are too many for it, from its third call on."""

        def __init__(self, model: LinearDenoiser) -> None:
            self.model, self.calls, self.flops = model, 0, model.flops

        def logits_at(self, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2 and len(tokens_BL) > 3:
                raise torch.OutOfMemoryError("no room")
            return self.model.logits_at(tokens_BL, t_B, positions_BK)

    small = run({name: Small(model) for name, model in models.items()}, rule, mask_id, given_nL)
    assert (small.tokens == whole.tokens).all() and small.cost.calls == whole.cost.calls
    assert small.cost.batch_size == 2 and whole.cost.batch_size == 4 and small.cost.flops == whole.cost.flops


def test_one_step_of_a_confidence_rule_is_one_step_of_the_ancestral_sampler() -> None:
    """At T = 1 everything is written at once from the first draw, whatever the rule."""
    models, mask_id, length = make_models("linear", 1)
    plan = make_plan(6, length, 3)
    ancestral = denoise(models, Schedule.parse("a"), plan, mask_id=mask_id, steps=1).tokens
    for name in ("random", "low-confidence", "dream-origin", "dream-maskgit", "dream-entropy", "dream-margin"):
        assert (run(models, parse_rule(name), mask_id, np.full((6, length), -1), 1).tokens == ancestral).all()


def test_ancestral_by_name_is_the_sampler_itself() -> None:
    models, mask_id, length = make_models("linear", 2)
    schedule, plan = Schedule.parse(SCHEDULES[2]), make_plan(5, length, 3)
    mine = decode(models, schedule, plan, parse_rule("ancestral"), mask_id=mask_id, steps=9, batch_size=4)
    theirs = denoise(models, schedule, plan, mask_id=mask_id, steps=9, batch_size=4)
    assert (mine.tokens == theirs.tokens).all() and mine.cost.calls == theirs.cost.calls


# ------------------------------------------------------------------------------------------------ the small functions


@hypothesis_given(strategies.integers(0, 300), strategies.integers(1, 60))
def test_llada_counts(masked: int, steps: int) -> None:
    counts = llada_counts(masked, steps)
    assert counts.sum() == masked and len(counts) == steps
    assert counts.max() - counts.min() <= 1 and (np.diff(counts) <= 0).all()


@hypothesis_given(strategies.integers(0, 300), strategies.integers(1, 60))
def test_dream_counts_write_everything(masked: int, steps: int) -> None:
    counts = dream_counts(masked, steps)
    assert counts.sum() == masked and (counts >= 0).all() and len(counts) == steps


@settings(max_examples=60)
@hypothesis_given(
    strategies.lists(strategies.tuples(strategies.sampled_from([0.1, 0.5, 0.6, 0.9, 1.0]), strategies.booleans()),
                     min_size=1, max_size=7),
    strategies.integers(0, 7),
    strategies.sampled_from([0.3, 0.6, 0.95]),
    strategies.sampled_from([0.2, 1.0, 2.5]),
)  # fmt: skip
def test_choices_by_hand(places: list[tuple[float, bool]], count: int, threshold: float, factor: float) -> None:
    sure_BK = torch.tensor([[p for p, _ in places]], dtype=torch.float64)
    open_BK = torch.tensor([[o for _, o in places]])
    order = sorted((j for j, (_, o) in enumerate(places) if o), key=lambda j: (-places[j][0], j))

    def chosen(found_BK: torch.Tensor) -> set[int]:
        return set(found_BK[0].nonzero()[:, 0].tolist())

    assert chosen(most_sure(sure_BK, open_BK, torch.tensor([count]))) == set(order[:count])
    expected = {j for rank, j in enumerate(order) if rank == 0 or places[j][0] >= threshold}
    assert chosen(at_least(sure_BK, open_BK, threshold)) == expected
    n = 0
    while n < len(order) and (n == 0 or (n + 2) * (1 - places[order[n]][0]) <= factor + 1e-12):
        n += 1
    assert chosen(within_factor(sure_BK, open_BK, factor)) == set(order[:n])


def test_uniforms_at_are_the_plans() -> None:
    rows = np.array([0, 5, 2**31])
    for draw in (0, 1, 77):
        mine = uniforms_at(9, torch.from_numpy(rows), 4, torch.full((3,), draw)).numpy()
        assert (mine == uniforms(9, rows, 4, draw)).all()


def test_rules_in_words_and_back() -> None:
    for rule in RULES:
        assert parse_rule(str(rule)) == rule and parse_rule(rule.name) == rule
    assert parse_rule("threshold:0.7:16") == parse_rule("threshold:0.7", 16)
    assert parse_rule("remdm-loop:0.01").numbers == (0.01, 0.55, 0.05, 0.9)
    assert str(parse_rule("low-confidence", 32)) == "low-confidence:32"


@pytest.mark.parametrize(
    "text, word",
    [
        ("greedy", "the rules are"),
        ("threshold:x", "the rules are"),
        ("threshold:1.5", "at most 1"),
        ("remdm-cap:0", "above 0"),
        ("remdm-conf:1", "too many"),
        ("low-confidence:2.5", "too many numbers or a broken one"),
        ("low-confidence:0", "at least 1"),
        ("low-confidence:inf", "not finite"),
        ("low-confidence:nan", "not finite"),
        ("low-confidence:1e400", "not finite"),
        ("threshold:nan", "not finite"),
        ("factor:inf", "not finite"),
        ("threshold:0.9:-inf", "not finite"),
        ("random:-3", "at least 1"),
        ("remdm-loop:0.5", "(1 - ALPHA) / ALPHA"),
        ("remdm-loop:0.02:0.05:0.55:0.9", "OFF < ON"),
    ],
)
def test_a_broken_rule_is_refused_in_one_line(text: str, word: str) -> None:
    with pytest.raises(UserError) as error:
        parse_rule(text)
    assert word in str(error.value) and "\n" not in str(error.value)


odd = strategies.floats().map(str) | strategies.integers().map(str) | strategies.text(".-+_e019", max_size=6)


@hypothesis_given(
    strategies.sampled_from([rule.name for rule in RULES]),
    strategies.lists(odd | strategies.floats(0, 1).map(str), max_size=5),
)
@example("random", ["1e30"])
@example("threshold", ["0.1234567", "12345678"])
def test_any_numbers_are_a_rule_or_refused_in_one_line(name: str, words: list[str]) -> None:
    try:
        rule = parse_rule(":".join([name, *words]))
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert parse_rule(str(rule)) == rule and all(map(math.isfinite, rule.numbers))
    if rule.block is not None:  # of any size: beyond the row's it is the whole row
        block_nL, count = blocks_of(rule, np.full((2, 7), -1))
        assert count == math.ceil(7 / min(rule.block, 7)) and block_nL.max() == count - 1


def test_each_rule_is_defined_at_the_head_of_the_module() -> None:
    defined = {line.split()[0]: line.split()[1] for line in str(decoding.__doc__).splitlines() if line[:5].strip()}
    defined = {name: source.rstrip(":,") for name, source in defined.items() if name in {rule.name for rule in RULES}}
    assert defined == {rule.name: rule.source for rule in RULES}


def test_what_cannot_go_together_is_refused() -> None:
    models, mask_id, length = make_models("linear", 2)
    free = np.full((2, length), -1)
    uneven = free.copy()
    uneven[1, :6] = 1

    def refused(word: str, rule: str, given_nL: np.ndarray = free, **more: Any) -> None:
        with pytest.raises(UserError) as error:
            run(models, parse_rule(rule), mask_id, given_nL, **{"steps": 9, **more})
        assert word in str(error.value)

    refused("no multiple of 3", "low-confidence:5", steps=10)
    refused("rows would have", "low-confidence:5", uneven)
    refused("shares of time", "dream-entropy", schedule=Schedule.parse("a:4@50% b:5@50%"))
    refused("finite number", "low-confidence", steps=math.inf)
    refused("single steps, not times", "threshold", schedule=Schedule.parse("interleaved:25%").bind("a", "b"))
    refused("in shares (L50% H50%), not in counts", "threshold", schedule=Schedule.parse("a:8 b:8"))
    refused("asks for model", "low-confidence", schedule=Schedule.parse("z"))
    refused("asked for model", "low-confidence", schedule=lambda state: "z")
    with pytest.raises(UserError, match="its own number of steps"):
        plan = make_plan(1, length)
        decode(models, Schedule.parse("a"), plan, parse_rule("threshold"), mask_id=mask_id, steps=4)
    with pytest.raises(UserError, match="no blocks"):
        parse_rule("dream-entropy", 8)
    broken = {"a": FromLogits(lambda tokens_BL, t_B: torch.full((*tokens_BL.shape, 9), math.nan))}
    with pytest.raises(UserError, match="not finite"):
        run(broken, parse_rule("low-confidence"), mask_id, free)


@pytest.mark.parametrize("text", ["threshold", "factor", "surest:2", "surest:2:3", "eb", "eb:0.1:2"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("after", [0, 1])
def test_a_damaged_network_is_refused_and_not_asked_for_ever(text: str, value: float, after: int) -> None:
    """Rules that go on until nothing is masked: here what is drawn may be the mask again, or nothing be chosen."""
    asked = 0

    def logits(tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += 1
        assert asked < 100, "it does not end"
        even = torch.zeros(4, 4)[tokens_BL]  # as an embedding, which has no row for tokens beyond the vocabulary
        return even if asked <= after else torch.full_like(even, value)

    rule, models = parse_rule(text), {"a": FromLogits(logits)}
    with pytest.raises(UserError, match="not finite"):
        decode(models, Schedule.parse("a:100%"), make_plan(3, 12, 7), rule, mask_id=3)


# ------------------------------------------------------------------------------------------------ laws


def conditionals(seed: int, length: int = 3, symbols: int = 3) -> tuple[FromLogits, dict[tuple[int, ...], float]]:
    """A joint law, and the denoiser that knows it: at each masked position the law given what stands."""
    joint = np.random.default_rng(seed).dirichlet(np.full(symbols**length, 0.4)).reshape((symbols,) * length)

    def logits(tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        out = np.full((*tokens_BL.shape, symbols + 1), -30.0)
        for state in {tuple(row) for row in tokens_BL.tolist()}:
            where = (tokens_BL == torch.tensor(state)).all(dim=1).numpy()
            fixed = joint[tuple(slice(None) if token == symbols else slice(token, token + 1) for token in state)]
            for j, token in enumerate(state):
                if token == symbols:
                    out[where, j, :symbols] = np.log(fixed.sum(axis=tuple(k for k in range(length) if k != j)) + 1e-300)
        return torch.from_numpy(out)

    law = {state: float(joint[state]) for state in itertools.product(range(symbols), repeat=length)}
    return FromLogits(logits), law


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.rates is None], ids=lambda rule: rule.name)
def test_the_exact_flag_tells_the_truth(rule: Rule) -> None:
    """One position at a time with a denoiser that is exactly right: exact rules give its law, the others do not."""
    model, law = conditionals(4)
    # Three positions in three steps by LLaDA's counts (Dream's own always leave two for the last step). With times by
    # chance two may be written at once; in 2,000 steps that happens to one row in 700.
    steps = 2000 if rule.counts is None else 3
    if rule.counts is not None:
        rule = replace(rule, counts=llada_counts)
    if rule.source == "Fast-dLLM":
        rule = parse_rule(f"{rule.name}:{1.0 if rule.name == 'threshold' else 1e-6}")
    rule = parse_rule(one) if (one := {"eb": "eb:1e-9", "dus": "dus:1"}.get(rule.name)) else rule
    n = 3000
    samples = run({"a": model}, rule, 3, np.full((n, 3), -1), steps, batch_size=n)
    p = p_value(samples.tokens, law, 3)
    assert p > 1e-3 if rule.exact else p < 1e-6
    assert bool(samples.changes_law) == (not rule.exact or rule.own_order)


@pytest.mark.parametrize("text", ["remdm-cap:0.3", "remdm-rescale:0.5", "remdm-conf", "remdm-loop:0.2:0.6:0.2:0.7"])
def test_the_exact_flag_of_remasking_rules_tells_the_truth(text: str) -> None:
    """By enumeration of every way a row can go. Positions are independent and the denoiser is right, so writing several
    at once costs nothing: what is left is whether masking again prefers some tokens."""
    rule, steps, mask_id = parse_rule(text), 8, 2
    assert rule.rates is not None
    p_LV = np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
    length, free = len(p_LV), (mask_id,) * len(p_LV)
    law, forgotten = {free: 1.0}, 0.0
    for k in range(steps):
        t, s = (torch.tensor([[(steps - k - j) / steps]], dtype=torch.float64) for j in (0, 1))
        after: dict[tuple[int, ...], float] = {}
        for state, weight in law.items():
            psi = [-math.inf if token == mask_id else p_LV[j, token] for j, token in enumerate(state)]
            rates = rule.rates(t, s, torch.tensor([psi], dtype=torch.float64), *rule.numbers)
            a_t, a_s, sigma = (x.expand(1, length)[0].tolist() for x in rates)
            choices = []
            for j, token in enumerate(state):
                if token != mask_id:
                    choices.append([(token, 1 - sigma[j]), (mask_id, sigma[j])])
                    forgotten += weight * sigma[j]
                else:
                    chance = (a_s[j] - (1 - sigma[j]) * a_t[j]) / (1 - a_t[j])
                    choices.append([(mask_id, 1 - chance), *((v, chance * p_LV[j, v]) for v in range(mask_id))])
            for way in itertools.product(*choices):
                new = tuple(token for token, _ in way)
                after[new] = after.get(new, 0.0) + weight * math.prod(p for _, p in way)
        law = {state: weight for state, weight in after.items() if weight > 1e-15}
    right = {x: math.prod(p_LV[j, v] for j, v in enumerate(x)) for x in itertools.product((0, 1), repeat=length)}
    assert set(law) == set(right) and forgotten > 0.1
    off = max(abs(law[x] - right[x]) for x in right)
    assert off < 1e-12 if rule.exact else off > 5e-3
    if not rule.exact:  # likely tokens are kept
        assert all(sum(law[x] for x in right if x[j] == 0) > p_LV[j, 0] + 1e-3 for j in range(length))
    # What was enumerated is what is sampled.
    logits_LV = torch.from_numpy(np.log(np.concatenate([p_LV, np.full((length, 1), 1e-9)], axis=1)))
    model = FromLogits(lambda tokens_BL, t_B: logits_LV.expand(len(tokens_BL), -1, -1).clone())
    samples = run({"a": model}, rule, mask_id, np.full((4000, length), -1), steps, batch_size=4000)
    assert p_value(samples.tokens, law, mask_id) > 1e-3
    assert bool(samples.changes_law) == (not rule.exact)


@pytest.mark.parametrize(
    "text",
    ["remdm-cap:0.005", pytest.param("remdm-rescale:0.005", marks=pytest.mark.slow), "remdm-loop:0.01:0.6:0.2:0.5"],
)
def test_remasking_keeps_the_law_of_a_right_denoiser(text: str) -> None:
    model, law = conditionals(4)
    samples = run({"a": model}, parse_rule(text), 3, np.full((1500, 3), -1), 400, batch_size=1500)
    assert samples.cost.total_calls > 1.1 * 1500 * 3  # tokens were drawn again
    assert p_value(samples.tokens, law, 3) > 1e-3


def remdm_law(rule: Rule, tables: list[TableDenoiser], steps: int, mask_id: int) -> dict[tuple[int, ...], float]:
    """The exact law of ReMDM with one sigma for all positions, over all partly masked rows; model k % K at step k."""
    length = tables[0].length
    law = {(mask_id,) * length: 1.0}
    for k in range(steps):
        t, s = (steps - k) / steps, (steps - k - 1) / steps
        a_t, a_s, sigma = remdm_rates(rule, t, s)
        hazard = (a_s - (1 - sigma) * a_t) / (1 - a_t)
        after: dict[tuple[int, ...], float] = {}
        for state, weight in law.items():
            p_LV = tables[k % len(tables)](state, t)
            choices = []
            for j, token in enumerate(state):
                if token != mask_id:
                    choices.append([(token, 1 - sigma), (mask_id, sigma)])
                else:
                    choices.append([(mask_id, 1 - hazard), *((v, hazard * p_LV[j, v]) for v in range(mask_id))])
            for way in itertools.product(*choices):
                new = tuple(token for token, _ in way)
                after[new] = after.get(new, 0.0) + weight * math.prod(p for _, p in way)
        law = after
    return {state: weight for state, weight in law.items() if mask_id not in state or weight > 1e-12}


@pytest.mark.parametrize("text", ["remdm-cap:0.4", "remdm-rescale:0.6", "remdm-loop:0.2:0.7:0.4:0.6"])
def test_remdm_has_its_law(text: str) -> None:
    """Against the enumeration of every way a row can go, with two models that alternate."""
    rule, tables = parse_rule(text), [TableDenoiser(1, 2, 3), TableDenoiser(2, 2, 3)]
    models = dict(zip("ab", tables, strict=True))
    law = remdm_law(rule, tables, 6, 3)
    schedule = Schedule.parse("interleaved:50%").bind("a", "b").timetable(6)
    order = [models[name] for name in schedule.models]
    assert order == [tables[k % 2] for k in range(6)] or order == [tables[(k + 1) % 2] for k in range(6)]
    if order[0] is tables[1]:
        law = remdm_law(rule, tables[::-1], 6, 3)
    n = 6000
    samples = decode(models, schedule, make_plan(n, 2, 11), rule, mask_id=3, batch_size=n)
    assert p_value(samples.tokens, law, 3) > 1e-3
    plain = decode(models, schedule, make_plan(n, 2, 11), parse_rule("ancestral"), mask_id=3, batch_size=n)
    assert p_value(plain.tokens, law, 3) < 1e-3  # remasking changes what a wrong model writes


@pytest.mark.parametrize("text", ["remdm-cap:0.3", "remdm-rescale:0.5"])
def test_remasking_leaves_the_share_of_masks_as_it_is(text: str) -> None:
    rule = parse_rule(text)
    assert rule.rates is not None
    rng, n, steps = np.random.default_rng(0), 200_000, 7
    masked = torch.ones(1, n, dtype=torch.bool)
    forgotten = 0
    for k in range(steps):
        t, s = (torch.tensor([[(steps - k - j) / steps]], dtype=torch.float64) for j in (0, 1))
        rates = rule.rates(t, s, torch.zeros(1, n), *rule.numbers)
        due, again = remask(rates, masked, ~masked, torch.from_numpy(rng.random((1, n))))
        assert not (due & ~masked).any() and not (again & masked).any()
        masked, forgotten = (masked & ~due) | again, forgotten + int(again.sum())
        assert float(masked.double().mean()) == pytest.approx(float(s), abs=5 * 0.5 / math.sqrt(n))
    assert forgotten > n / 10 and not masked.any()


@pytest.mark.parametrize("text", [text for text in EVERY if not parse_rule(text).planned])
def test_calls_as_a_graph_makes_them_write_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that never end early, and outcomes looked at one call late: same tokens, same costs."""
    models, mask_id, length = make_models("transformer", 2)
    rule, schedule, plan = parse_rule(text), Schedule.parse("a:25% b:75%"), make_plan(9, length, 3)
    steps = None if rule.adaptive else 9 if rule.block is None else 12
    options: dict[str, Any] = {"mask_id": mask_id, "batch_size": 2}
    want = decode(models, schedule, plan, rule, steps=steps, **options)
    for module in ("rules", "rule_call"):
        monkeypatch.setattr(f"relaylm.sampling.{module}.may_stop", lambda done: False)
    followed, times = resolve(schedule, steps, rule)
    late = RuleRun(models, followed, plan, rule, times, Options(law=Law(), **options), greedy=False)
    late.ahead = 2
    while late.step():
        pass
    got = late.samples(0.0)
    assert (got.tokens == want.tokens).all() and (got.trace.step_nL == want.trace.step_nL).all()
    assert (got.trace.model_nL == want.trace.model_nL).all()
    assert got.cost.calls == want.cost.calls and got.cost.flops == want.cost.flops
    assert got.cost.padded_calls == got.cost.network_calls * 2 - got.cost.total_calls


def test_llada_random_writes_in_every_order_alike() -> None:
    """Of four positions in two steps: each pair is first with the same chance."""
    model = TableDenoiser(0, 4, 2)
    samples = run({"a": model}, parse_rule("random"), 2, np.full((3000, 4), -1), 2, batch_size=3000)
    first = (samples.trace.step_nL == 2) @ (1 << np.arange(4))
    observed = np.bincount(first, minlength=16)
    chance = np.array([1 / 6 if bin(k).count("1") == 2 else 0.0 for k in range(16)])
    assert g_test(observed, chance) > 1e-3


# ------------------------------------------------------------------------------------------------ for people


@pytest.fixture(scope="module")
def family() -> Family:
    models = {}
    for depth in (1, 2, 3):
        model = Transformer(Architecture(28, 24, width=16, depth=depth, heads=2))
        model.initialise(torch.Generator().manual_seed(depth)).eval().requires_grad_(False)
        model.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(depth))
        models[f"{depth}b"] = model
    return Family(models, 27, 28, 24, Text8Tokenizer(), "toy")


def test_sample_takes_a_rule(family: Family) -> None:
    samples = sample(family, "sandwich:50%", 3, rule="low-confidence", block_length=6, prompt="the cat ", steps=12)
    assert all(text.startswith("the cat ") and len(text) == 24 for text in samples.texts)
    assert samples.steps == 12 and samples.changes_law == ("rule=low-confidence:6",)
    assert samples.cost.calls["1b"] == samples.cost.calls["3b"] == 3 * 6 and samples.cost.blocks_saved
    # 16 positions in blocks of 6, 6 and 4: four steps each, of which the last block needs four.
    free = sample(family, "heavy", 3, rule="threshold:0.3")
    assert free.steps < 24 and free.cost.total_calls < 3 * 24
    greedy = [sample(family, rule="low-confidence", temperature=0, seed=seed, steps=8).texts for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    for rule in ("ancestral", "random", "dream-origin", "dream-entropy"):  # whether planned or not
        cold = sample(family, rule=rule, temperature=0, top_p=0.5, steps=4)
        assert cold.changes_law == ("top_p=0.5", "temperature=0")
    with pytest.raises(UserError, match="temperature must be above 0"):
        sample(family, temperature=0)
    with pytest.raises(UserError, match="goes with the name"):
        sample(family, block_length=4)
    assert sample(family, rule="dream-entropy", top_p=0.5).changes_law == ("top_p=0.5",)


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40, 1e-31, 1e31, 1e39, 1e308, math.inf])
def test_a_temperature_beyond_float32_is_refused(family: Family, temperature: float) -> None:
    """Not by blaming the weights for logits over it that are infinite or NaN."""
    with pytest.raises(UserError, match=r"^temperature must lie from 1e-30 to 1e\+30") as told:
        sample(family, temperature=temperature, steps=2)
    assert str(told.value).endswith(f"not {temperature}")


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"rule": "low-confidence"}])
def test_the_outermost_temperatures(family: Family, temperature: float, options: dict[str, Any]) -> None:
    """The coldest draws the likeliest token, the hottest any token but the mask."""
    found = sample(family, "heavy", 20, temperature=temperature, steps=1, **options)
    assert (found.tokens < 27).all()
    if temperature < 1:
        assert (found.tokens == sample(family, "heavy", 20, rule="ancestral", temperature=0, steps=1).tokens).all()
    elif not options:
        assert len(set(found.tokens.ravel().tolist())) == 27


@pytest.mark.parametrize("rule", [None, "random:5", "low-confidence", "threshold:0.2", "remdm-cap:0.2"])
def test_a_continuation_is_window_after_window(family: Family, rule: str | None) -> None:
    steps = None if rule == "threshold:0.2" else 8
    whole = sample(family, "sandwich:50%", 2, rule=rule, prompt="one ", length=40, stride=9, seed=5, steps=steps)
    first = sample(family, "sandwich:50%", 2, rule=rule, prompt="one ", seed=5, steps=steps)
    assert whole.tokens.shape == (2, 40) and (whole.tokens[:, :24] == first.tokens).all()
    text, calls = first.tokens, first.cost.total_calls
    for window, fresh in enumerate((9, 7), start=1):
        given_nL = np.concatenate([text[:, -(24 - fresh) :], np.full((2, fresh), -1)], axis=1)
        seed = window_seed(5, window)
        part = sample(family, "sandwich:50%", 2, rule=rule, given=given_nL, seed=seed, steps=steps)
        text, calls = np.concatenate([text, part.tokens[:, -fresh:]], axis=1), calls + part.cost.total_calls
    assert (whole.tokens == text).all() and whole.cost.total_calls == calls
    assert (whole.trace.model_nL[:, 4:] >= 0).all() and (whole.trace.model_nL[:, :4] == -1).all()


def test_a_continuation_has_as_many_steps_as_its_longest_window(family: Family) -> None:
    """Four free positions in the first window, nine in the others: one written at a step."""
    prompt = "the cat sat on the m"
    whole = sample(family, n=2, rule="threshold:1", prompt=prompt, length=42, stride=9, seed=5)
    assert sample(family, n=2, rule="threshold:1", prompt=prompt, seed=5).steps == 4
    assert whole.steps == 9 == whole.trace.step_nL.max()


def test_a_stride_is_checked(family: Family) -> None:
    for options, word in (
        ({"length": 40, "stride": 24}, "from 1 to 23"),
        ({"length": 20, "stride": 4}, "longer than the family"),
        ({"stride": 4}, "takes a length"),
        ({"stride": 4, "length": 40, "suffix": "end"}, "no suffix"),
    ):
        with pytest.raises(UserError, match=word):
            sample(family, **options)
