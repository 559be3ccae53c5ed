"""relaylm: fast, exact sampling from masked diffusion language models.

A *schedule* says which positions a network call writes together, and which network makes it: `heavy spaced:16` lets a
call write positions that are at least 16 apart; `L125 H750 L125` gives the first and last 125 of 1000 steps to a light
model and the rest to a heavy one.

    import relaylm
    family = relaylm.Family.load("wiki-bpe")
    samples = relaylm.sample(family, "heavy spaced:40", n=8, seed=0)

Names are loaded on first use, so that importing the package (and `relaylm --help`) does not import torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Threads that wait for each other sleep instead of spinning: on a busy machine spinning makes a small network ten times
# slower, on an idle one sleeping costs little. It has an effect only before torch is imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

_HOMES = {
    "compare": "measure.compare",
    "Rule": "sampling.rules",
    "parse_rule": "sampling.rules",
    "Architecture": "models.denoiser",
    "Denoiser": "models.denoiser",
    "FromLogits": "models.denoiser",
    "Transformer": "models.denoiser",
    "Family": "models.family",
    "Plan": "core.plan",
    "make_plan": "core.plan",
    "RowState": "core.schedule",
    "Schedule": "core.schedule",
    "Segment": "core.schedule",
    "SwitchByMaskFraction": "sampling.policy",
    "Timetable": "core.schedule",
    "all_placements": "search.exhaustive",
    "hand_made": "core.schedule",
    "Samples": "sampling.result",
    "denoise": "sampling.denoise",
    "sample": "sampling.sample",
    "search": "search.search",
    "sample_reference": "sampling.reference",
    "UserError": "errors",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:  # for editors and type checkers, which cannot follow __getattr__
    from relaylm.core.plan import Plan, make_plan
    from relaylm.core.schedule import RowState, Schedule, Segment, Timetable, hand_made
    from relaylm.errors import UserError
    from relaylm.measure.compare import compare
    from relaylm.models.denoiser import Architecture, Denoiser, FromLogits, Transformer
    from relaylm.models.family import Family
    from relaylm.sampling.denoise import denoise
    from relaylm.sampling.policy import SwitchByMaskFraction
    from relaylm.sampling.reference import sample_reference
    from relaylm.sampling.result import Samples
    from relaylm.sampling.rules import Rule, parse_rule
    from relaylm.sampling.sample import sample
    from relaylm.search.exhaustive import all_placements
    from relaylm.search.search import search


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relaylm' has no attribute {name!r}")
    return getattr(import_module(f"relaylm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Package(ModuleType):
    """Keeps `relaylm.search` the public function: importing the folder of that name would set the attribute to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
