r"""A plan, a family and a policy in; samples out.

**Events, not steps.** A row needs a network only at the steps where one of its positions is due. Each row goes at its
own pace: rows whose next event asks for the same model are sent through it together, in batches of one fixed shape,
and a finished row's place is taken by a waiting one. Nothing about a row depends on its neighbours: its noise is keyed
by its own number, and the shape of its calls follows from its own event and the grid, never from who else is there.

**Logits only where they are needed.** The trunk's last block and the vocabulary head run at due positions alone; no
tensor of B x L x V elements is ever made (unless a policy asks for the logits of all masked positions).

With a static schedule the sequence of calls is known before the first one runs, so the host never waits for the
device. A dynamic policy looks at each row between its calls, and does wait.

Shapes: n rows in all, B in a call, L positions, K places for due positions in each row of a call, N due positions kept
for the head, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relaylm import cost as costs
from relaylm.decoding import Rule, parse_rule
from relaylm.diffusion import LINEAR, Alpha
from relaylm.engine import Call, Engine, Law, settings
from relaylm.errors import UserError
from relaylm.event_queue import Group, Queue, alike, call_shapes, distinct_pairs
from relaylm.plan import Events, Plan, make_events, make_plan
from relaylm.schedule import MAX_STEPS, Policy, RowState, Schedule, Timetable

if TYPE_CHECKING:
    from relaylm.family import Family

INFINITY = math.inf


@dataclass(frozen=True)
class Event:
    """What a callback is told, once per row and network call."""

    row: int
    step: int  # the paper's i; 0 at T = infinity
    t: float
    model: str
    positions: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Trace:
    """For each position of each row: when it was written, and by which model."""

    step_nL: np.ndarray  # the paper's step i, T down to 1; 0 where given, and everywhere at T = infinity
    u_nL: np.ndarray  # the time in (0, 1) at which the plan has it written; 0 where given
    model_nL: np.ndarray  # index into `models`; -1 where given
    models: tuple[str, ...]


@dataclass(frozen=True)
class Samples:
    tokens: np.ndarray  # (n, L)
    trace: Trace
    cost: costs.Cost
    schedule: str
    steps: float  # T, possibly infinite
    seed: int
    texts: list[str] = field(default_factory=list)
    changes_law: tuple[str, ...] = ()  # options in force under which samples no longer follow the models' own law

    def to_json(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "tokens": self.tokens.tolist(),
            "schedule": self.schedule,
            "steps": "inf" if math.isinf(self.steps) else int(self.steps),
            "length": int(self.tokens.shape[1]),
            "seed": self.seed,
            "changes_law": list(self.changes_law),
            "cost": self.cost.to_json(),
            "trace": {
                "models": list(self.trace.models),
                "model": self.trace.model_nL.tolist(),
                "step": self.trace.step_nL.tolist(),
            },
        }


class _Memory:
    """What a dynamic policy may know of each row: kept between its calls, handed over as a RowState."""

    def __init__(self, policy: Policy, names: tuple[str, ...], plan: Plan, events: Events, steps: int) -> None:
        self.policy, self.names, self.events, self.steps = policy, names, events, steps
        self.wants_logits = bool(getattr(policy, "wants_logits", False))
        self.length = plan.length
        self.free_n = (plan.given_nL < 0).sum(axis=1)
        self.masked_n = self.free_n.copy()
        self.calls_n = np.zeros(plan.n, dtype=np.int64)
        self.last: dict[int, tuple[str, float, float]] = {}  # model, mean and least log-probability of the last call
        self.logits: dict[int, Tensor] = {}

    def choose(self, row: int, event: int) -> int:
        model, mean, least = self.last.get(row, (None, None, None))
        state = RowState(
            step=int(self.events.step_E[event]),
            steps=self.steps,
            t=float(self.events.t_E[event]),
            masked=int(self.masked_n[row]),
            length=self.length,
            free=int(self.free_n[row]),
            calls=int(self.calls_n[row]),
            model=model,
            mean_logprob=mean,
            min_logprob=least,
            masked_logits=self.logits.get(row),
        )
        name = self.policy(state)
        if name not in self.names:
            raise UserError(f"the policy asked for model {name!r}; the models are {', '.join(self.names)}")
        return self.names.index(name)

    def remember(
        self, call: Call, logprobs_N: Tensor, logits_BLV: Tensor | None, state_nL: Tensor, mask_id: int
    ) -> None:
        logprob_N = logprobs_N.cpu().numpy()
        ends = np.cumsum(call.counts_R)
        name = self.names[call.model]
        for place, (row, count, end) in enumerate(zip(call.rows_R.tolist(), call.counts_R, ends, strict=True)):
            written = logprob_N[end - count : end]
            self.last[row] = (name, float(written.mean()), float(written.min()))
            if logits_BLV is not None:
                self.logits[row] = logits_BLV[place][state_nL[row] == mask_id]
        self.masked_n[call.rows_R] -= call.counts_R
        self.calls_n[call.rows_R] += 1


def denoise(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    *,
    mask_id: int,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    law: Law | None = None,
    batch_size: int | None = None,
    heavy: str | None = None,
    device: torch.device | str = "cpu",
    callback: Callable[[Event], None] | None = None,
    on_calls: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> Samples:
    """Run a plan to its end. The lower of two levels: no tokenizer, no defaults taken from a family.

    `policy` is a Schedule with model names in it (roles already bound), a Timetable, or any function of a RowState;
    `steps` is T, or infinity. `heavy` names the model that savings are counted against (the last one otherwise).
    `batch_size` is kept to, short batches being padded, so that a row's calls always have one shape; only if memory
    runs out is it halved (what was used is in the cost). `on_calls(done, total)` hears of progress in row-calls. An
    `engine` of an earlier run with the same models, law, seed and as many rows brings what it captured on the device.
    """
    began = time.perf_counter()
    names = tuple(models)
    if heavy is not None and heavy not in names:
        raise UserError(f"there is no model {heavy!r} to count savings against; the models are {', '.join(names)}")
    check_plan(models, plan, mask_id)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"the batch size must be at least 1, not {batch_size}")
    law = law or Law()
    rule, times = _resolve(policy, steps)
    events = make_events(plan, times, alpha)
    batch = batch_size or plan.n
    shapes, shapes_E = call_shapes(events, times, alpha, plan.length, batch)
    queue = Queue(plan, events, shapes_E, shapes, in_flight=32 * batch)
    model_E = _static_models(rule, events, names)
    if engine is None:
        engine = Engine(list(models.values()), plan, mask_id, law, device, scored=model_E is None)
    else:
        same = (engine.seed, engine.law, engine.mask_id, engine.scored) == (plan.seed, law, mask_id, model_E is None)
        if not same or len(engine.state_nL) != plan.n + 1 or [*map(id, engine.models)] != [*map(id, models.values())]:
            raise UserError("this engine served other models, rows, noise or another law: leave it out")
        engine.load(plan.rows_n, np.where(plan.given_nL < 0, mask_id, plan.given_nL))
    memory = None
    if model_E is not None:
        queue.foresee(model_E)
    else:
        memory = _Memory(rule, names, plan, events, 0 if times is None else len(times) - 1)
        model_E = np.full(len(events.step_E), -1, dtype=np.int64)

    def look_ahead(rows: np.ndarray) -> None:
        """Settle which model each of these rows goes to next."""
        event = queue.next_n[rows]
        if memory is not None:
            model_E[event] = [memory.choose(int(r), int(e)) for r, e in zip(rows, event, strict=True)]
        queue.model_n[rows] = model_E[event]

    look_ahead(queue.todo)
    done = network_calls = padded = shared = 0
    groups: list[tuple[Group, Tensor]] = []

    def past(call: Call, token_N: Tensor) -> None:
        """What follows a call: its rows go on, and whoever listens hears of it."""
        nonlocal done
        queue.advance(call)
        look_ahead(call.rows_R[queue.next_n[call.rows_R] < queue.end_n[call.rows_R]])
        if callback is not None:
            for event in _told(call, token_N, events, names):
                callback(event)
        done += len(call.rows_R)
        if on_calls is not None:
            on_calls(done, len(model_E))

    with settings(device):
        if memory is None:
            try:
                for group in alike(queue, plan, engine.models):
                    table_UD = engine.beginnings(group.model, group.shape, group.positions_U)
                    groups.append((group, table_UD))
                    network_calls += group.table_calls
                for group, table_UD in groups:
                    for call in group.calls:
                        past(call, engine.begin(call, table_UD, group.slot_L))
                        shared += len(call.rows_R)
            except torch.OutOfMemoryError:  # nothing was written by what failed: the usual way takes less
                engine.release()
            shared = max(0, shared - network_calls * batch)  # these were made, with all their places
            groups.clear()
            queue.line_up()
        while (taken := queue.take()) is not None:
            try:
                token_N, logprob_N, logits_BLV = engine.run(taken, memory is not None and memory.wants_logits)
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
                # Nothing was written by the call that failed: go on from here in smaller batches.
                engine.release()
                batch //= 2
                queue.shapes, queue.shapes_E = call_shapes(events, times, alpha, plan.length, batch)
                continue
            if memory is not None:
                memory.remember(taken, logprob_N, logits_BLV, engine.state_nL, mask_id)
            past(taken, token_N)
            network_calls += 1
            padded += taken.shape.rows - len(taken.rows_R)
    engine.check()
    tokens = engine.state_nL[: plan.n].cpu().numpy()
    assert done == len(model_E) and not (tokens == mask_id).any(), "a planned event was not run"
    cost = _count(models, model_E, events, plan.length, heavy or names[-1], memory is not None and memory.wants_logits)
    if isinstance(rule, Timetable) and (depths := _depths(models)):
        cost.blocks_saved = costs.blocks_saved(depths, rule.models, heavy or names[-1])
    cost.network_calls, cost.padded_calls, cost.batch_size = network_calls, padded, batch
    cost.shared_calls = shared
    cost.seconds = time.perf_counter() - began
    model_nL = np.full(plan.given_nL.shape, -1, dtype=np.int16)
    row_F = np.repeat(np.arange(plan.n), (plan.given_nL < 0).sum(axis=1))
    model_nL[row_F, events.positions_F] = np.repeat(model_E, events.count_E)
    return Samples(
        tokens,
        Trace(events.step_nL, plan.u_nL, model_nL, names),
        cost,
        _named(policy),
        INFINITY if times is None else len(times) - 1,
        plan.seed,
        changes_law=law.changes,
    )


def check_plan(models: Mapping[str, Any], plan: Plan, mask_id: int) -> None:
    """Refuse given tokens that are none of the models'."""
    if (plan.given_nL == mask_id).any():
        raise UserError(f"the mask ({mask_id}) cannot be given as a token: write -1 where a position is free")
    for name, model in models.items():
        if (size := getattr(model, "vocab_size", None)) is not None and plan.given_nL.max() >= size:
            raise UserError(f"token {plan.given_nL.max()} is given, but {name} knows ids 0 to {size - 1} only")


def _resolve(policy: Policy | Schedule, steps: float | None) -> tuple[Policy, tuple[float, ...] | None]:
    """The rule to follow and its grid of times (None at T = infinity)."""
    if steps is not None and not (steps >= 1 and (math.isinf(steps) or steps == int(steps))):
        raise UserError(f"the number of steps must be a whole number from 1 up, or inf, not {steps}")
    if steps is not None and math.isinf(steps):
        if isinstance(policy, Timetable):
            raise UserError(f"the timetable has {policy.steps} steps, but T is infinite")
        return policy, None
    if isinstance(policy, Schedule):
        policy = policy.timetable(None if steps is None else int(steps))
    if isinstance(policy, Timetable):
        if steps is not None and steps != policy.steps:
            raise UserError(f"the timetable has {policy.steps} steps, but T is {int(steps)}")
        return policy, policy.times
    if steps is None or steps > MAX_STEPS:
        raise UserError(f"a dynamic policy needs a number of steps from 1 to {MAX_STEPS}, not {steps}")
    return policy, tuple((int(steps) - k) / int(steps) for k in range(int(steps) + 1))


def _static_models(rule: Policy | Schedule, events: Events, names: tuple[str, ...]) -> np.ndarray | None:
    """The model of every event, where it is known beforehand."""
    if not isinstance(rule, (Schedule, Timetable)):
        return None
    unknown = [name for name in rule.models if name not in names]
    if unknown:
        raise UserError(f"the schedule asks for model {unknown[0]!r}; the models are {', '.join(names)}")
    if isinstance(rule, Timetable):
        by_step = np.array([names.index(name) for name in rule.models])
        return by_step[rule.steps - events.step_E]
    # From the masked end, segment j owns the times in (ends[j], ends[j-1]].
    owner = np.searchsorted(-np.asarray(rule.ends), -events.t_E, side="right")
    return np.array([names.index(segment.model) for segment in rule.segments])[owner]


def _named(policy: Policy | Schedule) -> str:
    """A policy in a few words, for the record."""
    if isinstance(policy, Timetable):
        runs = [(name, len(list(run))) for name, run in groupby(policy.models)]
        return " ".join(f"{name}:{count}" for name, count in runs)
    return str(policy) if isinstance(policy, Schedule) else getattr(policy, "__name__", type(policy).__name__)


def _depths(models: Mapping[str, Any]) -> dict[str, int] | None:
    depths = {name: getattr(model, "depth", None) for name, model in models.items()}
    return None if None in depths.values() else {name: int(depth) for name, depth in depths.items() if depth}


def _count(
    models: Mapping[str, Any], model_E: np.ndarray, events: Events, length: int, heavy: str, full_head: bool
) -> costs.Cost:
    """Charge every call that was made: one per event, with the logits it asked for."""
    names = tuple(models)
    pairs, _, number = distinct_pairs(model_E, events.count_E)
    cost = costs.Cost(calls={name: int((model_E == i).sum()) for i, name in enumerate(names)})
    known = all(hasattr(model, "flops") for model in models.values())
    cost.flops = cost.flops_all_heavy = 0.0 if known else None
    if known:
        for (model, count), times in zip(pairs, number.tolist(), strict=True):
            positions = None if full_head else count
            cost.flops += times * models[names[model]].flops(length, positions)
            cost.flops_all_heavy += times * models[heavy].flops(length, positions)
    return cost


def _told(call: Call, token_N: Tensor, events: Events, names: tuple[str, ...]) -> Iterator[Event]:
    tokens, end = token_N.tolist(), 0
    for row, event, count in zip(call.rows_R.tolist(), call.events_R.tolist(), call.counts_R.tolist(), strict=True):
        positions = call.kept_position_N[end : end + count].tolist()
        step, t = int(events.step_E[event]), float(events.t_E[event])
        yield Event(row, step, t, names[call.model], positions, tokens[end : end + count])
        end += count


# ------------------------------------------------------------------------------------------------ for people


def checked_given(given: Any, n: int, length: int) -> np.ndarray:
    """Token ids, -1 where free: one row for all, or n rows."""
    array = np.asarray(given)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or (array.ndim == 2 and len(array) != n):
        raise UserError(
            f"given must hold whole numbers, in one row or in {n}, not {array.dtype} in shape {array.shape}"
        )
    if not 1 <= array.shape[-1] <= length:
        raise UserError(f"{array.shape[-1]} positions are given, but the family's length is {length}")
    return array


class _Draft:
    """Shows a streamer the first row as it stands after each event, masks included."""

    def __init__(self, streamer: Any, given_L: np.ndarray, mask_id: int) -> None:
        self.show = getattr(streamer, "put_draft", None)
        self.tokens = torch.from_numpy(np.where(given_L < 0, mask_id, given_L))

    def __call__(self, event: Event) -> None:
        if event.row == 0 and self.show is not None:
            self.tokens[event.positions] = torch.tensor(event.tokens)
            self.show(self.tokens[None].clone())


def _batch_size(family: Family, n: int, length: int, models: int) -> int:
    """The family's, but where models take turns at most half of the rows (as long as calls stay large enough to be
    efficient): a batch has one model, and the queue needs rows to choose from to keep it full."""
    whole = family.batch_size(n, length)
    least = (16384 if family.device.type == "cuda" else 1024) // length
    return whole if models < 2 else min(whole, max(1, least, n // 2))


def sample(
    family: Family,
    schedule: str | Schedule | Policy = "heavy",
    n: int = 1,
    *,
    steps: float | None = None,
    length: int | None = None,
    seed: int = 0,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    given: np.ndarray | None = None,
    max_new_tokens: int | None = None,
    stop: str | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    rule: str | Rule | None = None,
    block_length: int | None = None,
    stride: int | None = None,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    first_row: int = 0,
    alpha: Alpha = LINEAR,
    callback: Callable[[Event], None] | Any = None,
    on_calls: Callable[[int, int], None] | None = None,
) -> Samples:
    """n samples from a family under a model schedule.

    `schedule` is text ("L32 H192 L32", "sandwich:25%"), a Schedule, or a dynamic policy. L and H are the family's
    smallest and largest model unless `light` and `heavy` say otherwise. `steps` is T (default: the schedule's own
    count, else the length), or infinity. What is given never changes: a `prompt` at the front, a `suffix` at the end,
    an `infill` text with the tokenizer's blanks (one `_` per free position), or an array `given` of token ids with -1
    at free positions. `temperature`, `top_p` and `top_k` change the law of the samples and are off by default.
    `rule` is a decoding rule (`decoding`), with which `temperature` may be 0 (the likeliest tokens), and with some of
    them a `block_length` goes. `stride` allows a `length` beyond the family's, written in windows (`continuation`).
    `stop` cuts each text at its first occurrence, after sampling. `callback` hears of every event; it may also be a
    streamer in the manner of transformers (`put`, `put_draft`, `end`), which follows the first row.
    """
    from relaylm.family import lay_out

    policy: Policy | Schedule
    light, heavy = family.roles(light, heavy)
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    policy = schedule.bind(light, heavy) if isinstance(schedule, Schedule) else schedule
    if isinstance(policy, Schedule) and (unknown := [name for name in policy.models if name not in family.models]):
        raise UserError(
            f"there is no model {unknown[0]!r} in this family: it has {', '.join(family.names)}; schedules by name are "
            "heavy, light, quarter:1, sandwich:25%, small-first:25%, interleaved:25%, random:7:25%"
        )
    if isinstance(rule, str):
        rule = parse_rule(rule, block_length)
    elif block_length is not None:
        raise UserError("a block length goes with the name of a decoding rule")
    whole = length
    if stride is not None:
        if any(option is not None for option in (suffix, infill, given, max_new_tokens, callback)) or length is None:
            raise UserError(
                "a stride takes a length and perhaps a prompt: no suffix, infill, given, new tokens, callback"
            )
        length = None  # the first window is as long as the family's
    if given is None:
        given = lay_out(family, prompt, suffix, infill, length, max_new_tokens)
    else:
        given = checked_given(given, n, family.length)
        if not all(option is None for option in (prompt, suffix, infill, length, max_new_tokens)):
            raise UserError("given says all about a row: it cannot go with prompt, suffix, infill or a length")
    counted = isinstance(policy, Schedule) and policy.steps is not None
    if steps is None and not counted and not (rule is not None and rule.adaptive):
        steps = policy.steps if isinstance(policy, Timetable) else given.shape[-1]
    plan = make_plan(n, given.shape[-1], seed, given, first_row)
    streamer: Any = callback if hasattr(callback, "put") else None
    if streamer is not None:
        callback = _Draft(streamer, plan.given_nL[0], family.mask_id)
    names = tuple(dict.fromkeys(policy.models)) if isinstance(policy, (Schedule, Timetable)) else family.names
    models = {name: model for name, model in family.models.items() if name in names or name == heavy}

    def run(plan: Plan) -> Samples:
        options: dict[str, Any] = {
            "mask_id": family.mask_id,
            "steps": steps,
            "alpha": alpha,
            "law": Law(1.0 if rule is not None and temperature == 0 else temperature, top_k, top_p),
            "batch_size": batch_size or _batch_size(family, n, plan.length, len(names)),
            "heavy": heavy,
            "device": family.device,
            "callback": callback,
            "on_calls": on_calls,
        }
        if rule is None:
            return denoise(models, policy, plan, **options)
        from relaylm.decode import decode

        return decode(models, policy, plan, rule, greedy=temperature == 0, **options)

    if stride is None:
        samples = run(plan)
    else:
        from relaylm.continuation import continued, window_seed

        assert whole is not None
        samples = continued(
            lambda given_nL, w: run(make_plan(n, family.length, window_seed(seed, w), given_nL, first_row)),
            plan.given_nL,
            family.length,
            whole,
            stride,
        )
    if streamer is not None:  # the whole first row, once it is written
        streamer.put(torch.from_numpy(samples.tokens[:1]))
        streamer.end()
    texts = [] if family.tokenizer is None else [family.tokenizer.decode(row) for row in samples.tokens]
    if stop:
        texts = [text.split(stop)[0] for text in texts]
    return replace(samples, texts=texts)
