r"""What the paper's experiments cost at the paper's size, from measured throughput; the numbers of docs/reproduce.md.

Training needs, for each of a family's networks, steps x batch rows of `training_flops` operations; at a utilisation u
of an H200's peak that is so many hours. u is the best that was measured at the same width (and length, if that was
measured), else 40%.

Sampling is counted in row-steps of each depth. A row-step takes t_4 and t_12 milliseconds in the recorded bench (4 and
12 blocks at L = 1024); other depths lie on the line through the two, and other lengths cost in proportion to
`call_flops`. The engine's search shares beginnings: 790 of 2,100 segment runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from relaylm.core.cost import call_flops
from relaylm.train.recipe import load_preset
from relaylm.train.step import training_flops

PEAK = 989e12  # H200, dense bf16, by the data sheet
ASSUMED = 0.4  # utilisation where none was measured
VOCABULARY = {"owt": 50258, "lm1b": 30522}
TREE = 790 / 2100
Work = Mapping[int, float]  # depth -> row-steps


def utilisation(width: int, length: int, entries: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """The share of the peak that training reached at this width (at this length, if that was measured), and the source.
    `entries` are those of results/train/throughput.json."""
    found = []
    for entry in entries:
        shape = re.match(r"\d+ x (\d+), L=(\d+)", entry["shape"])
        if shape and int(shape.group(1)) == width:
            found.append((int(shape.group(2)) == length, entry["mfu"], entry["shape"]))
    if not found:
        return ASSUMED, "assumed, not measured"
    _, mfu, shape_text = max(found)
    return mfu, f"measured at {shape_text}, without dropout"


def training_hours(preset: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """H200-hours for all networks of a family, a second 12 blocks included; the judge is the paper's GPT-2."""
    chosen = load_preset(preset)
    share, source = utilisation(chosen.width, chosen.length, entries)
    vocabulary, rows = VOCABULARY[preset], chosen.recipe.steps * chosen.recipe.batch
    architectures = [chosen.architecture(d, vocabulary, vocabulary - 1) for d in (*chosen.depths, chosen.twin or 12)]
    flops = sum(training_flops(architecture, chosen.length) for architecture in architectures)
    return {"total": rows * flops / (share * PEAK) / 3600, "utilisation": share, "source": source}


def work(light: int, share: float, runs: float, steps: int = 1000) -> Counter[int]:
    """Row-steps of `runs` samples with a share of light steps."""
    return Counter({light: runs * steps * share}) + Counter({12: runs * steps * (1 - share)})


def sampling_work() -> dict[str, tuple[Work, int, float]]:
    """Each experiment's row-steps by depth, its length, and the share of it that remains with shared beginnings."""

    def seven(light: int, steps: int = 1000) -> Counter[int]:  # all-heavy not included
        return work(light, 0.25, 5 * 1600, steps) + work(light, 1, 1600, steps)

    heavy = work(4, 0, 1600)
    return {
        "seven schedules, light 4": (seven(4) + heavy, 1024, 1.0),
        "seven schedules, light 6, 8, 10": (seven(6) + seven(8) + seven(10), 1024, 1.0),
        "search of 210": (work(4, 0.4, 210 * 160), 1024, TREE),
        "light shares 10 to 90%": (work(4, 0.5, 9 * 1600), 1024, 1.0),
        "prefixes of 128 and 256": (seven(4) + seven(4) + heavy + heavy, 1024, 1.0),
        "seven schedules on LM1B": (seven(4, 128) + work(4, 0, 1600, 128), 128, 1.0),
    }


def further_hours(bench: Mapping[str, Any]) -> dict[str, float]:
    """H200-hours of what `--scale paper` runs beside the paper's own experiments, with the engine: the search of the
    tuner may take as many calls as 6,600 all-heavy samples, and judges 25 schedules that save 30% on average; the
    float32 arm is MDLM's sampler itself, on 160 samples of seven schedules."""
    strides = work(4, 1 / 8, 8 * 400) + work(4, 0, 400 + 8 * 400 * (1 - 3 / 32))
    parts: dict[str, tuple[Work, int, float]] = {
        "larger strides": (strides, 1024, 1.0),
        "the tuner": (work(4, 0, 6600 + 0.7 * 25 * 1600), 1024, 1.0),
        "exact against float32": sampling_work()["seven schedules, light 4"],
    }
    hours = sampling_hours(bench, parts)
    found = {name: both["engine"] for name, both in hours.items()}
    found["exact against float32"] += hours["exact against float32"]["mdlm"] * 160 / 1600
    return found


def sampling_hours(
    bench: Mapping[str, Any], experiments: Mapping[str, tuple[Work, int, float]] | None = None
) -> dict[str, dict[str, float]]:
    """H200-hours of each experiment (the paper's) with MDLM's sampler and with the engine."""
    out: dict[str, dict[str, float]] = {}
    for name, (work, length, shared) in (experiments or sampling_work()).items():
        out[name] = {}
        for sampler, key in (("mdlm", "reference"), ("engine", "engine")):
            heavy, light = bench[f"{key}_ms_per_row_step"], bench[f"{key}_light_ms_per_row_step"]
            total = 0.0
            for depth, row_steps in work.items():
                ms = light + (heavy - light) * (depth - 4) / 8
                if length != 1024:
                    asked = None if sampler == "mdlm" else 1
                    full = call_flops(depth, 768, VOCABULARY["owt"], 1024, asked)
                    ms *= call_flops(depth, 768, VOCABULARY["lm1b"], length, asked) / full
                total += row_steps * ms / 3.6e6
            out[name][sampler] = total * (shared if sampler == "engine" else 1.0)
    return out
