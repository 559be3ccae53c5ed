"""What spaced plans lose in likelihood, measured and predicted: the table of pairs, and the bound of each plan.

    python -m relaylm.studies.record.spacing FAMILY OUT.json [--rows 160] [--pair-rows 160] [--device cuda]

Rows are the family's held-out text. Every plan is measured on the same rows with the same seed, and its loss is the
paired difference to T = L uniform steps, in hundredths of a nat for one position. OUT.json has the table, losses and
their predictions.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError
from relaylm.files import write_json
from relaylm.measure import metrics
from relaylm.measure.likelihood import held_out, spread_rows
from relaylm.measure.pairs import PairTable, default_spacing, measure_pairs, spacing_loss, uniform_loss
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.provenance import how_made
from relaylm.models.family import Family

DISTANCES = (5, 8, 11, 16, 25, 40, 64)
PREFIXES = (11, 25)
STEPS = (64, 32, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--pair-rows", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--single", action="store_true", help="also one position at a time (T = infinity)")
    options = parser.parse_args()
    family = Family.load(options.family, device=options.device)
    exact = Family.load(options.family, device=options.device, dtype="float32")  # rounding would look like information
    if (text := held_out(family)) is None:
        raise UserError(f"{options.family} has no held-out text beside it (heldout.txt)")
    heavy, length = family.roles()[1], family.length
    pair_rows = spread_rows(text, length, options.pair_rows)
    table = measure_pairs(exact[heavy], pair_rows, family.mask_id, device=exact.device, name=heavy, progress=True)
    rows_NL = spread_rows(text, length, options.rows)
    found: list[dict[str, Any]] = []
    about = {"family": {"name": family.name, "digest": family.digest}, "model": heavy, "seed": 0, "rows": len(rows_NL)}
    for label, schedule, steps in plans(heavy, length, options.single):
        got = plan_bound(
            {heavy: family[heavy]}, schedule, rows_NL, family.mask_id, steps=steps, device=family.device,
            batch_size=options.batch_size, progress=True,
        )  # fmt: skip
        found.append({"plan": label, **measured(got.nats_N, found, length), **got.to_json()})
        found[-1]["predicted"] = 100 * predicted(table, schedule.spacing, steps, length)
        found[-1]["nats"] = got.nats_N.tolist()
        print({key: value for key, value in found[-1].items() if key != "nats"}, flush=True)
        summary = {"default_spacing": str(default_spacing(table, length)), "correlation": correlation(found)}
        torch.cuda.empty_cache()
        write_json(
            options.out, {**about, **how_made(family.device), **summary, "plans": found, "pairs": table.to_json()}
        )


def plans(heavy: str, length: int, single: bool) -> list[tuple[str, Schedule, float | None]]:
    """What is measured: a label, the schedule, its steps. The first is what losses are relative to."""
    alone = Schedule.parse(f"{heavy}:100%")
    spaced = [Spacing(d) for d in DISTANCES] + [Spacing(d, "prefix") for d in PREFIXES]
    found: list[tuple[str, Schedule, float | None]] = [(f"uniform:{length}", alone, length)]
    found += [(f"uniform:{steps}", alone, steps) for steps in STEPS if steps < length]
    found += [(str(s), Schedule(alone.segments, spacing=s), None) for s in spaced if s.distance < length]
    return found + ([("uniform:inf", alone, math.inf)] if single else [])


def measured(nats_N: np.ndarray, before: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """The loss against the first plan and its 95% interval, hundredths of a nat a position."""
    first_N = np.array(before[0]["nats"]) if before else nats_N
    loss, low, high = (float(v) for v in metrics.mean_interval(100 * (nats_N - first_N) / length))
    return {"loss": loss, "loss_ci": [low, high]}


def predicted(table: PairTable, spacing: Spacing | None, steps: float | None, length: int) -> float:
    """The predicted loss against one position at a time, nats a position."""
    if spacing is not None:
        return spacing_loss(table, spacing, length)
    return 0.0 if steps is None or math.isinf(steps) else uniform_loss(table, int(steps), length)


def correlation(found: list[dict[str, Any]]) -> float | None:
    """Pearson's r of measured and predicted losses."""
    if len(found) < 3:
        return None
    return float(np.corrcoef([row["loss"] for row in found], [row["predicted"] for row in found])[0, 1])


if __name__ == "__main__":
    main()
