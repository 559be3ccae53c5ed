"""The scheduler, call by call and without threads: texts as alone, fairness, limits, leaving and joining."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from conftest import tiny_family

import relaylm
from relaylm.models.denoiser import FromLogits
from relaylm.models.family import Family
from relaylm.sampling.engine import settings
from relaylm.sampling.result import Event
from relaylm.serve.compute import Computer
from relaylm.serve.families import settled
from relaylm.serve.host import Host, Part
from relaylm.serve.request import COMPLETIONS, DENOISE, Ask, Limits, Refused, read_ask
from relaylm.serve.rows import Ended
from relaylm.serve.scheduler import PATIENCE, Job, Scheduler


@pytest.fixture(autouse=True)
def _as_in_the_thread_that_makes_calls() -> Iterator[None]:
    with settings("cpu"):
        yield


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Sent:
    """A request that was submitted, and what came of it."""

    ask: Ask
    parts: list[Part] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ends: list[Refused | None] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.ends) == len(self.parts)

    def texts(self, family: Family) -> list[str]:
        assert family.tokenizer is not None
        return [family.tokenizer.decode(row) for part in self.parts for row in part.tokens_nL]


class Hosted(Host):
    """A host whose calls are made by the test."""

    def __init__(self, family: Family, **limits: Any) -> None:
        computer = Computer({"tiny": family}, Limits(**limits))
        super().__init__({"tiny": family}, Limits(**limits), computer)
        self.scheduler: Scheduler = computer.scheduler


def make_host(family: Family, **limits: Any) -> Hosted:
    host = Hosted(family, **limits)
    host.scheduler.clock = Clock()
    return host


class Idle:
    """An engine that computes nothing, for tests of who goes when."""

    device = torch.device("cpu")

    def seat(self, place: int, plan: Any, row: int) -> None: ...

    def release(self) -> None: ...

    def send(self, call: Any) -> torch.Tensor:
        return torch.zeros(2, call.shape.kept)


def idle_host(family: Family, **limits: Any) -> Hosted:
    host = make_host(family, **limits)
    host.scheduler.engine_for = lambda lane, places: Idle()  # type: ignore[assignment, return-value]
    return host


def send(host: Hosted, **fields: Any) -> Sent:
    sent = Sent(read_ask({"seed": 0, "stream": True, **fields}, DENOISE | COMPLETIONS))

    def put(part: Part, what: Event | Ended) -> None:
        if isinstance(what, Event):
            sent.events.append(what)
            part.tokens_nL[what.row, what.positions] = what.tokens
        else:
            part.end(what)
            sent.ends.append(what.error)

    family = host.families["tiny"]
    requests = [settled(family, sent.ask, prompt) for prompt in sent.ask.prompts]
    sent.parts, _ = host._prepare("tiny", family, sent.ask, requests)
    sent.jobs = [Job(part.rows, partial(put, part)) for part in sent.parts]
    host.scheduler.submit(sent.jobs)
    return sent


def finish(host: Hosted, each: Callable[[], None] = lambda: None) -> None:
    while host.scheduler.step():
        each()
    assert not host.scheduler.active and not host.scheduler.waiting
    for lane in host.scheduler.lanes.values():
        assert sorted(lane.free) == list(range(host.scheduler.max_rows))


REQUESTS: list[dict[str, Any]] = [
    {"schedule": "heavy", "length": 32},
    {"schedule": "sandwich:50%", "length": 32, "steps": 8},
    {"schedule": "L25% H75%", "spacing": 4, "prompt": "the history of "},
    {"schedule": "L25% H75%", "spacing": "3:prefix", "prompt": "the ", "suffix": " end"},
    {"schedule": "interleaved:50%", "steps": 16, "length": 20, "temperature": 0.7},
    {"infill": "the ____ of __ river", "steps": "inf", "schedule": "light"},
    {"prompt": ["a", "the history of "], "max_tokens": 9, "top_p": 0.8},
    {"rule": "low-confidence", "steps": 8, "length": 16},
    {"rule": "threshold:0.5", "length": 16, "schedule": "L50% H50%"},
    {"rule": "remdm-cap:0.2", "length": 16, "steps": 8, "temperature": 0.9},
    {"rule": "random", "length": 16, "steps": 4},
    {"rule": "dus:8", "length": 16, "temperature": 0},
    {"rule": "surest:4", "length": 16},
    {"rule": "low-confidence", "length": 16, "steps": 4, "temperature": 0},
]


@pytest.mark.parametrize("ahead", [0, 2])  # calls
def test_every_text_is_that_of_sample_whatever_else_is_served(family: Family, ahead: int) -> None:
    chance = random.Random(1)
    host, sent = make_host(family, max_rows=9, max_queue=1000, batch_size=4), []
    host.scheduler.ahead = ahead
    for seed in range(2 * len(REQUESTS)):
        fields = REQUESTS[seed % len(REQUESTS)]
        sent.append(
            send(host, **fields, n=chance.choice([1, 2, 5]), seed=seed % 7 + 2**40 * (seed % 2), stream=seed % 3 > 0)
        )
        for _ in range(chance.randrange(6)):
            host.scheduler.step()
    finish(host)
    same = ("steps", "spacing", "length", "seed", "suffix", "infill", "top_p", "rule", "temperature")
    for one in sent:
        ask = one.ask
        assert one.ends == [None] * len(one.parts)
        texts: list[str] = []
        for number, prompt in enumerate(ask.prompts):
            samples = relaylm.sample(
                family,
                ask.schedule,
                ask.n,
                prompt=prompt,
                max_new_tokens=ask.max_tokens,
                first_row=number * ask.n,
                batch_size=one.parts[number].rows.batch,
                **{name: getattr(ask, name) for name in same},
            )
            texts += samples.texts
            cost = one.parts[number].cost
            assert cost is not None
            assert {k: v for k, v in samples.cost.calls.items() if k in cost.calls} == cost.calls
            assert cost.flops == samples.cost.flops and cost.flops_saved == samples.cost.flops_saved
        assert one.texts(family) == texts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_texts_on_a_gpu_are_those_of_sample_when_calls_are_captured() -> None:
    family = tiny_family().to("cuda", "bfloat16")
    host, rounds = make_host(family, max_rows=16, max_queue=1000, batch_size=4), range(3)
    assert host.scheduler.ahead == 2
    sent = []
    with settings("cuda"):
        for seed in rounds:  # the first call of a shape runs eagerly, the second is captured, the others are replayed
            sent += [send(host, **fields, n=3, seed=seed, stream=seed == 1) for fields in REQUESTS[:5]]
            finish(host)
    for one in sent:
        options = {name: getattr(one.ask, name) for name in ("prompt", "suffix", "length", "steps", "spacing", "seed")}
        options |= {"temperature": one.ask.temperature, "batch_size": one.parts[0].rows.batch}
        assert one.texts(family) == relaylm.sample(family, one.ask.schedule, 3, **options).texts


def test_probabilities_are_those_of_the_networks(family: Family) -> None:
    host = make_host(family)
    one = send(host, length=12, steps="inf")
    finish(host)
    assert len(one.events) == 12
    tokens, network = torch.full((1, 12), 27), family["3b"]
    for event in one.events:
        (position,), (token,), (logprob,) = event.positions, event.tokens, event.logprobs or []
        with torch.inference_mode():
            logits = network.logits(tokens, torch.tensor([event.t]))[0, position].double()
            logits[27] = -math.inf
            assert logprob == pytest.approx(float(logits.log_softmax(0)[token]), abs=1e-4)
        tokens[0, position] = token


def test_rows_of_different_requests_share_calls(family: Family) -> None:
    host = make_host(family, batch_size=4)
    made = []
    host.scheduler.on_call = made.append
    for seed in range(4):
        send(host, length=16, steps="inf", seed=seed)
    finish(host)
    assert len(made) == 16 and all(call.rows == 4 and call.padded == 0 for call in made)


def test_a_rule_takes_turns_with_the_calls_of_others(family: Family) -> None:
    host, rules = make_host(family, batch_size=1), []
    host.scheduler.on_call = lambda made: rules.append(made.shape.endswith("rule"))
    send(host, length=16, steps="inf")
    send(host, length=16, rule="low-confidence", steps=16)
    finish(host)
    assert rules == [False, True] * 16


def test_no_row_waits_longer_than_the_bound(family: Family) -> None:
    chance = random.Random(2)
    host, longest = idle_host(family, max_rows=12, max_queue=10_000, batch_size=4), 0
    scheduler = host.scheduler
    for number in range(400):
        if number < 300:  # full calls are always to be had: a lone row of another kind must not wait for them to end
            fields: dict[str, Any] = {"length": 16, "steps": "inf"} if number % 10 else chance.choice(REQUESTS[:7])
            send(host, **fields, seed=number)
        scheduler.step()
        longest = max([longest, *(scheduler.calls - row.since for row in scheduler.active)])
    assert 1 < longest <= PATIENCE + 12
    finish(host)


def test_one_row_does_not_wait_for_a_large_request(family: Family) -> None:
    host = idle_host(family, max_rows=4, batch_size=4, max_queue=500)
    large = send(host, n=100, length=16, steps="inf")
    host.scheduler.step()
    small = send(host, n=1, length=16, steps="inf", seed=5)
    calls = host.scheduler.calls
    while not small.over:
        host.scheduler.step()
    # Its turn comes with the first place that becomes free, after at most the 16 calls of a row.
    assert host.scheduler.calls - calls <= 16 + 16 + 1
    assert not large.over
    finish(host)


def test_a_large_request_is_not_starved_by_small_ones(family: Family) -> None:
    host = idle_host(family, max_rows=4, batch_size=4, max_queue=100_000)
    large = send(host, n=8, length=16, steps="inf")
    for seed in range(300):  # twice as much as can be done
        if large.over:
            break
        send(host, length=16, steps="inf", seed=seed)
        send(host, length=16, steps="inf", seed=1000 + seed)
        host.scheduler.step()
    assert large.over  # though hundreds of rows wait
    assert host.scheduler.rows_waiting > 100
    finish(host)


def test_cancelled_rows_leave_before_the_next_call(family: Family) -> None:
    host = make_host(family, max_rows=4, batch_size=2)
    gone, rule, stays = (
        send(host, length=16, steps="inf", n=4),
        send(host, length=16, rule="threshold", n=3),
        send(host, length=16, steps="inf", seed=3),
    )
    host.scheduler.step()
    before = len(gone.events)
    host.scheduler.cancel([*gone.jobs, *rule.jobs])
    finish(host)
    assert len(gone.events) == before and gone.ends[0] is not None and rule.ends[0] is not None
    assert stays.ends == [None]
    assert stays.texts(family) == relaylm.sample(family, length=16, steps=math.inf, seed=3, batch_size=2).texts


def test_a_request_ends_when_its_time_is_over(family: Family) -> None:
    host = make_host(family, timeout=5, max_rows=2)
    one, waits = send(host, length=16, steps="inf", n=2), send(host, length=16)
    host.scheduler.step()
    host.scheduler.clock.now = 6.0  # type: ignore[attr-defined]
    finish(host)
    assert [one.ends[0].status, waits.ends[0].status] == [504, 504]  # type: ignore[union-attr]


def test_over_the_limits_all_rows_of_a_request_are_refused(family: Family) -> None:
    host = make_host(family, max_rows=2, max_queue=5)
    one = send(host, n=7, length=16, steps=4)  # two places are free, five may wait
    with pytest.raises(Refused) as refused:
        send(host, prompt=["a", "b"], max_tokens=4)
    assert refused.value.status == 429 and refused.value.retry_after is not None
    host.scheduler.step()
    assert host.scheduler.rows_in_flight + host.scheduler.rows_waiting == 7
    finish(host)
    assert one.ends == [None]


def test_requests_that_come_at_once_fill_all_places(family: Family) -> None:
    host = make_host(family, max_rows=2, max_queue=5)
    sent = [send(host, length=16, steps=4) for _ in range(7)]  # before the scheduler has given out a place
    with pytest.raises(Refused):
        send(host, length=16, steps=4)
    finish(host)
    assert all(one.ends == [None] for one in sent)


@pytest.mark.parametrize("stream", [True, False])  # with log-probabilities, and without
def test_a_call_that_fails_ends_its_own_request_only(family: Family, stream: bool) -> None:
    def broken(tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        if tokens_BL.shape[1] == 7:
            raise RuntimeError("device lost")
        return torch.full((*tokens_BL.shape, 28), math.nan if tokens_BL.shape[1] == 8 else 0.0)

    models = {"a": FromLogits(broken), "b": family["3b"]}
    host = Hosted(Family(models, 27, 28, 32, family.tokenizer, light="a", heavy="b"))
    lost, nan, good = (send(host, schedule="a", length=length, steps=4, stream=stream) for length in (7, 8, 9))
    other = send(host, schedule="b", length=8, steps=4, stream=stream)
    finish(host)
    assert lost.ends[0] is not None and lost.ends[0].status == 503 and "device lost" not in lost.ends[0].message
    assert nan.ends[0] is not None and nan.ends[0].status == 503
    assert good.ends == other.ends == [None]


def test_closing_finishes_what_was_accepted(family: Family) -> None:
    host = make_host(family)
    one = send(host, length=16)
    host.scheduler.close()
    with pytest.raises(Refused) as refused:
        send(host, length=16)
    assert refused.value.status == 503
    thread = threading.Thread(target=host.scheduler.work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and one.ends == [None]


def test_engines_of_lengths_that_nobody_asks_for_are_dropped(family: Family) -> None:
    host = idle_host(family)
    for length in range(2, 30):
        send(host, length=length, steps=2)
        finish(host)
    assert len(host.scheduler.lanes) <= 16
