"""A family whose schedules have known losses, for searches: no network is run, but every call is counted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from relaylm.core.cost import Price
from relaylm.core.schedule import Schedule
from relaylm.measure.judge import Judge, from_logits
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.search.space import Problem
from relaylm.search.trials import Trials

VOCAB = 28
Harm = Callable[[np.ndarray], np.ndarray]


def network(depth: int, seed: int, length: int = 16, causal: bool = False) -> Transformer:
    model = Transformer(Architecture(VOCAB, length, width=16, depth=depth, heads=2, causal=causal))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed + 100))
    return model


def small_family(depths: Sequence[int] = (1, 3), length: int = 16) -> Family:
    models = {f"{depth}b": network(depth, depth, length) for depth in depths}
    family = Family(models, VOCAB - 1, VOCAB, length, Text8Tokenizer(), "toy")  # type: ignore[arg-type]
    family.judge = network(2, 50, length, causal=True)
    return family


def counted(schedule: Schedule, steps: int, light: str, heavy: str) -> Schedule:
    """The schedule with models' names and in counts of steps."""
    bound = schedule.bind(light, heavy)
    return bound if bound.steps is not None else bound.resample(steps)


@dataclass
class Oracle(Trials):
    """Rows whose log-perplexity is 2 + the schedule's true loss + noise of the row + noise of the row under it."""

    harm: Mapping[str, Harm] = field(default_factory=dict)  # by model, for a unit of time, at time t
    rough: float = 0.0  # what a step of size d adds is rough * d^2
    rough_at: Harm = np.ones_like  # times this, at time t
    sd: float = 0.02
    sd_at: Harm = np.ones_like  # times this, at the time where a schedule first leaves all-heavy
    grid: int = 40  # steps of all-heavy
    asked: list[Schedule] = field(default_factory=list)

    def true_loss(self, schedule: Schedule) -> float:
        table = schedule.timetable()
        edges = np.array(table.times)
        middle, size = (edges[1:] + edges[:-1]) / 2, -np.diff(edges)
        harm = np.array(
            [float(self.harm[name](np.array([t]))[0]) for name, t in zip(table.models, middle, strict=True)]
        )
        return float((harm * size).sum() + self.rough * (self.rough_at(middle) * size**2).sum())

    def noise(self, schedule: Schedule) -> float:
        """Rows under two schedules have the same tokens until these part."""
        table = schedule.timetable()
        for k, name in enumerate(table.models):
            if name != self.heavy or abs(table.times[k + 1] - (1 - (k + 1) / self.grid)) > 1e-9:
                return self.sd * float(self.sd_at(np.array([table.times[k]]))[0])
        return 0.0

    def check(self, schedule: Schedule, first: int, rows: int) -> bool:
        return True  # there are no tokens

    def _draw(self, chunks: Any, what: str) -> None:
        for chunk in chunks:
            self.check_time()
            schedules = list(chunk.schedules.values())
            self.asked += schedules
            calls = {self.heavy: round(chunk.rows * self.expected_calls(schedules))}
            self.spent.made.update(calls)
            self.spent.now.update(calls)
            for law, schedule in chunk.schedules.items():
                loss, sd = self.true_loss(schedule), self.noise(schedule)
                self.hashes[law, chunk.first, chunk.rows] = ""
                for row in range(chunk.first, chunk.first + chunk.rows):
                    common = np.random.default_rng([self.seed, row]).normal()
                    own = np.random.default_rng([self.seed, row, zlib.crc32(law.encode())]).normal()
                    self.log_ppl.setdefault(law, {})[row] = 2.0 + 0.2 * common + loss + sd * own


def oracle_problem(
    depths: Sequence[int] = (4, 12),
    steps: int = 40,
    segments: int = 10,
    densities: Sequence[Fraction] = (Fraction(1),),
    positions: int = 64,
    **options: Any,
) -> Problem:
    family = small_family((1, 3), 64)  # for its device and the like; its networks are not called
    names = tuple(f"{depth}b" for depth in depths)
    judge = from_logits(family.judge, "oracle")
    given = np.full((1, positions), -1)
    trials = Oracle(family, judge, given, names[-1], batch=64, grid=steps, **options)
    prices = {name: Price(float(depth)) for name, depth in zip(names, depths, strict=True)}
    free = np.array([positions])
    return Problem(
        family, trials, names[0], names[-1], names, steps, segments, tuple(densities), "blocks", prices, free
    )


class Never:
    """A causal judge that gives some symbols no probability and all others the same."""

    def __init__(self, *symbols: int) -> None:
        self.symbols = list(symbols)

    def logits(self, tokens: torch.Tensor, t: Any) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, VOCAB)
        logits[..., self.symbols] = -torch.inf
        return logits


def never(*symbols: int) -> Judge:
    return from_logits(Never(*symbols), "never", key=f"never {symbols}")
