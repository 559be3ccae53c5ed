"""What the benchmark measures: two models, the size of the problem, and how long to measure.

Shapes: n rows in all, L positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from relaylm.core.plan import Plan, make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import DTYPES, Family, cpu_has_bfloat16, pick_device
from relaylm.sampling.denoise import denoise
from relaylm.sampling.engine import Engine
from relaylm.sampling.result import Samples
from relaylm.studies.bench.published import Side, Window, corrupted, random_network, timed

HEAVY = Schedule.parse("heavy").bind("light", "heavy")


@dataclass(frozen=True)
class Effort:
    """How long to measure. Steps for each noise level, repeats of each light share, seconds to aim at."""

    window: int  # steps of the published reference at each level
    window_other: int  # of the cached and the compiled one
    sweep: int  # steps for each batch size that is tried
    trajectory: int  # steps of the full trajectory of the check, at most T
    runs: int  # end-to-end runs of the engine, each heavy and light
    repeats: int  # of each light share
    share_seconds: float  # for all of the light shares together
    products: int  # matrix products whose median is the machine's rate

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Effort:
        """The usual effort on a device."""
        if quick:
            return cls(4, 3, 2, 8, 1, 2, 10.0, 4)
        if device.type == "cuda":
            return cls(100, 20, 6, 1000, 1, 3, 90.0, 20)
        return cls(100, 34, 6, 256, 2, 3, 240.0, 20)


@dataclass
class Job:
    """Two models and the size of the problem."""

    heavy: Side
    light: Side
    device: torch.device
    length: int
    steps: int
    batch: int  # rows in an engine call
    rows: int  # rows of an end-to-end run
    seed: int
    effort: Effort
    weights: str  # where they are from
    quick: bool

    @classmethod
    def of(
        cls,
        device: str | torch.device = "auto",
        depth: tuple[int, int] = (12, 4),  # heavy and light
        width: int | None = None,
        heads: int | None = None,
        vocab_size: int = 50258,
        length: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,  # the engine's rows per call
        family: Family | str | None = None,  # whose weights to take; random ones otherwise
        samples: int | None = None,  # rows of an end-to-end run
        dtype: str | None = None,  # of the engine's blocks: bfloat16 on CUDA and on a CPU that has it, else float32
        seed: int = 0,
        quick: bool = False,  # shorten every measurement: good for a look, not for a record
    ) -> Job:
        """Sizes left out: 768 wide, L = 1024, T = 1000 on CUDA; 256 wide with 4 heads, L = 256, T = 256 elsewhere;
        heads of 64. A family brings its own."""
        device = pick_device(device)
        cuda, blocks = device.type == "cuda", _dtype(dtype, device)
        if isinstance(family, str):
            family = Family.load(family, device="cpu", dtype="float32")
        length = length or (family.length if family is not None else 1024 if cuda else 256)
        width = width or (768 if cuda else 256)
        if heads is None and width > 64 and width % 64:
            raise UserError(f"heads are 64 wide, so the width must be a multiple of 64, not {width}")
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "length": length, "width": width}
        sizes |= {"heads": heads or max(1, width // 64), "adaln": True}
        if family is None:
            networks = [random_network(Architecture(depth=d, **sizes), seed + i) for i, d in enumerate(depth)]
        else:
            networks = [_copied(family.models[name]) for name in family.roles()[::-1]]
        heavy, light = (_side(network, device, blocks) for network in networks)
        a = heavy.published.architecture
        pair = Family({"small": light.engine, "large": heavy.engine}, a.mask_id, a.vocab_size, length)
        batch = batch_size or pair.batch_size(1 << 20, length)
        rows = samples or (2 * batch if cuda else batch)
        steps = steps or (1000 if cuda and family is None else length)
        effort, weights = Effort.of(device, quick), "random" if family is None else family.name or "family"
        return cls(heavy, light, device, length, steps, min(batch, rows), rows, seed, effort, weights, quick)

    @property
    def cuda(self) -> bool:
        """Is it measured on a GPU?"""
        return self.device.type == "cuda"

    @property
    def times(self) -> list[float]:
        """The uniform grid, from 1 to 0."""
        return [k / self.steps for k in range(self.steps, -1, -1)]

    def engine(
        self, plan: Plan, share: float, batch: int | None = None, kept: Engine | None = None
    ) -> tuple[float, Samples]:
        """Wall seconds and samples of one run of the engine under a sandwich with a share of light steps; with what an
        earlier run captured, if that was `kept`."""
        models = {"light": self.light.engine, "heavy": self.heavy.engine}
        schedule = Schedule.parse(f"sandwich:{share:g}%").bind("light", "heavy")
        return self.timed(models, schedule, plan, batch_size=batch or self.batch, engine=kept)

    def timed(
        self, models: dict[str, Transformer], schedule: Schedule, plan: Plan, **options: Any
    ) -> tuple[float, Samples]:
        """Wall seconds and samples of one run of the engine."""
        usual = {"mask_id": self.heavy.engine.mask_id, "steps": self.steps, "device": self.device, "heavy": "heavy"}
        return timed(lambda: denoise(models, schedule, plan, **{**usual, **options}), self.device)

    def plan(self, rows: int, free: int, first_row: int = 0) -> Plan:
        """A plan whose positions are given, random tokens, but for the last `free`: fewer calls of the same cost."""
        if free >= self.length:
            return make_plan(rows, self.length, self.seed, first_row=first_row)
        a = self.heavy.engine.architecture
        given = corrupted((rows, self.length), 0.0, a.mask_id, a.vocab_size, self.seed).numpy()
        given[given == a.mask_id] = 0
        given[:, self.length - free :] = -1
        return make_plan(rows, self.length, self.seed, given, first_row)

    def window(self, side: Side, level: float, count: int, batch: int) -> Window:
        """Consecutive steps of MDLM's sampler around a noise level."""
        return Window(side, level, self.steps, count, batch, self.length, self.seed)


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        half = device.type == "cuda" or (device.type == "cpu" and cpu_has_bfloat16())
        return torch.bfloat16 if half else torch.float32
    if name not in DTYPES or name == "float64":
        raise UserError(f"the engine's blocks cannot compute in {name}: write float32, bfloat16 or float16")
    return DTYPES[name]


def _copied(model: Any) -> Transformer:
    """A family's model in float32, which the benchmark may change."""
    if not isinstance(model, Transformer):
        raise UserError("bench needs a family of Transformers")
    return copy.deepcopy(model).to("cpu", torch.float32)


def _side(network: Transformer, device: torch.device, dtype: torch.dtype) -> Side:
    """A model as MDLM's code and as the engine runs it."""
    engine = copy.deepcopy(network) if network.time_conditioning else copy.deepcopy(network).fold()
    engine = engine.to(device)
    return Side(network.to(device), engine if dtype == torch.float32 else engine.cast(dtype), device)
