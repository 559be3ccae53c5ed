"""Captured calls without a GPU: what is kept, what is overwritten and which call a graph stands for.

A graph is played by a function that is fixed when it is made, reads its own buffer and writes into its own results,
which the next call of any graph spoils, as on a device where graphs share their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from relaylm import Schedule, denoise, make_plan
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.sampling import confidence, engine, graphs
from relaylm.sampling.confidence import decode
from relaylm.sampling.engine import Engine
from relaylm.sampling.law import Law
from relaylm.sampling.parallel import denoise_ahead, states_of
from relaylm.sampling.rules import parse_rule

LENGTH, MASK, SPOILT = 12, 9, -77


def network(depth: int) -> Transformer:
    generator = torch.Generator().manual_seed(depth)
    model = Transformer(Architecture(10, LENGTH, 16, depth, heads=2)).initialise(generator)
    model.output_layer.linear.weight.data.normal_(0, 0.5, generator=generator)
    return model.eval().requires_grad_(False)


MODELS = {"a": network(1), "b": network(2)}
GIVEN = np.full((13, LENGTH), -1)
GIVEN[::3, 2:5] = 4


class Played:
    """In place of `graphs._Graph`."""

    made: ClassVar[list[Played]] = []

    def __init__(self, make: Any, index: Tensor, b: int, device: Any, pool: Any) -> None:
        self.make, self.graph, self.sent = make, self, (index.clone(), torch.ones(b, dtype=torch.float64))
        self.results = list(tensors(make(*self.sent)))
        self.made.append(self)

    def pool(self) -> None: ...

    def replay(self, index: np.ndarray, t_B: np.ndarray) -> Any:
        for other in self.made:
            for result in other.results:
                result.fill_(SPOILT)
        self.sent[0].copy_(torch.from_numpy(index))
        self.sent[1].copy_(torch.from_numpy(t_B))
        result = self.make(*self.sent)
        self.results = list(tensors(result))
        return result


def tensors(result: Any) -> Iterator[Tensor]:
    for each in result if isinstance(result, tuple) else (result,):
        if isinstance(each, Tensor):
            yield each


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    """Calls go as on CUDA; the list has the graphs."""
    Played.made = []
    for module in (engine, confidence):
        monkeypatch.setattr(module, "calls_on", lambda device: graphs.Graphs(device, engine.Eager(device).run))
    monkeypatch.setattr(graphs, "_Graph", Played)
    monkeypatch.setattr(graphs.Graphs, "captures", lambda self, model: isinstance(model, Transformer))
    monkeypatch.setattr(graphs.Graphs, "_keep_pace", lambda self: None)
    yield Played.made


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.trace.model_nL, wanted.trace.model_nL)
    assert found.cost.calls == wanted.cost.calls and found.cost.flops == wanted.cost.flops


RUNS = [("a:100%", 6), ("a:3 b:5 a:4", None), ("a:50% b:50% spaced:3", None), ("b:100%", float("inf"))]


@pytest.mark.parametrize(("schedule", "steps"), RUNS)
def test_captured_runs_are_the_eager_ones(
    schedule: str, steps: float | None, captured: list[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, events = make_plan(13, LENGTH, 5, GIVEN), []
    options: dict[str, Any] = {"mask_id": MASK, "steps": steps, "batch_size": 4}
    found = denoise(MODELS, Schedule.parse(schedule), plan, callback=events.append, **options)
    assert captured
    monkeypatch.setattr(graphs.Graphs, "captures", lambda self, model: False)
    heard: list[Any] = []
    same(found, denoise(MODELS, Schedule.parse(schedule), plan, callback=heard.append, **options))
    assert events == heard


def test_a_policy_that_looks_at_log_probabilities(captured: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, options = make_plan(13, LENGTH, 5), {"mask_id": MASK, "steps": 8, "batch_size": 4}

    def policy(state: Any) -> str:
        return "a" if state.mean_logprob is None or state.mean_logprob > -1.5 else "b"

    found = denoise(MODELS, policy, plan, **options)
    assert captured and min(found.cost.calls.values()) > 0
    monkeypatch.setattr(graphs.Graphs, "captures", lambda self, model: False)
    same(found, denoise(MODELS, policy, plan, **options))


@pytest.mark.parametrize("text", ["low-confidence", "threshold:0.4", "eb:1", "surest:3", "surest:3:2", "remdm-cap:0.2"])
def test_captured_rules_are_the_eager_ones(text: str, captured: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    rule, schedule, plan = parse_rule(text), Schedule.parse("a:25% b:75%"), make_plan(13, LENGTH, 5, GIVEN)
    options: dict[str, Any] = {"mask_id": MASK, "steps": None if rule.adaptive else 8, "batch_size": 4}
    found = decode(MODELS, schedule, plan, rule, **options)
    assert captured
    monkeypatch.setattr(graphs.Graphs, "captures", lambda self, model: False)
    same(found, decode(MODELS, schedule, plan, rule, **options))


def test_graphs_of_a_kept_engine_serve_other_rows(captured: list[Played]) -> None:
    schedule, options = Schedule.parse("a:3 b:5"), {"mask_id": MASK, "batch_size": 4}
    plans = [make_plan(13, LENGTH, 5, given) for given in (GIVEN, np.roll(GIVEN, 3, axis=1))]
    kept = Engine(list(MODELS.values()), plans[0], MASK, Law(), "cpu")
    found = [denoise(MODELS, schedule, plan, engine=kept, **options) for plan in plans]
    graphs_of_one_engine = len(captured)
    for plan, samples in zip(plans, found, strict=True):
        same(samples, denoise(MODELS, schedule, plan, **options))
    assert 0 < graphs_of_one_engine < len(captured)
    kept.release()
    same(denoise(MODELS, schedule, plans[0], engine=kept, **options), found[0])


def test_captured_calls_in_parallel(captured: list[Played]) -> None:
    schedule, plan = Schedule.parse("a:100%"), make_plan(2, LENGTH, 3)
    options: dict[str, Any] = {"mask_id": MASK, "steps": float("inf")}
    kept = Engine(list(MODELS.values()), states_of(plan, 4), MASK, Law(), "cpu")
    wanted = denoise(MODELS, schedule, plan, batch_size=8, **options)
    for _ in range(2):
        found = denoise_ahead(MODELS, schedule, plan, 4, engine=kept, **options)
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert captured
