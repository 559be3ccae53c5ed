"""relaylm: masked diffusion language models whose denoisers take turns.

A *model schedule* says which denoiser runs at which denoising step: `L125 H750 L125` gives the first and last 125 of
1000 steps to a light model and the rest to a heavy one.

    import relaylm
    family = relaylm.Family.load("path/to/family")
    samples = relaylm.sample(family, "sandwich:25%", n=8, seed=0)

Names are loaded on first use, so that importing the package (and `relaylm --help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "compare": "comparison",
    "Rule": "decoding",
    "parse_rule": "decoding",
    "Architecture": "denoiser",
    "Denoiser": "denoiser",
    "FromLogits": "denoiser",
    "Transformer": "denoiser",
    "Family": "family",
    "Plan": "plan",
    "make_plan": "plan",
    "RowState": "schedule",
    "Schedule": "schedule",
    "Segment": "schedule",
    "SwitchByMaskFraction": "schedule",
    "Timetable": "schedule",
    "all_placements": "schedule",
    "hand_made": "schedule",
    "Samples": "sampler",
    "denoise": "sampler",
    "sample": "sampler",
    "search": "schedule_search",
    "sample_reference": "reference",
    "UserError": "errors",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:  # for editors and type checkers, which cannot follow __getattr__
    from relaylm.comparison import compare
    from relaylm.decoding import Rule, parse_rule
    from relaylm.denoiser import Architecture, Denoiser, FromLogits, Transformer
    from relaylm.errors import UserError
    from relaylm.family import Family
    from relaylm.plan import Plan, make_plan
    from relaylm.reference import sample_reference
    from relaylm.sampler import Samples, denoise, sample
    from relaylm.schedule import (
        RowState,
        Schedule,
        Segment,
        SwitchByMaskFraction,
        Timetable,
        all_placements,
        hand_made,
    )
    from relaylm.schedule_search import search


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relaylm' has no attribute {name!r}")
    return getattr(import_module(f"relaylm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
