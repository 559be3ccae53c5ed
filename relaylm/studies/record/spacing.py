"""What plans and rules lose in likelihood, measured and predicted: the table of pairs, and the bound of each.

    python -m relaylm.studies.record.spacing FAMILY OUT.json [--rows 160] [--pair-rows 160] [--plans uniform:256,...]
    python -m relaylm.studies.record.spacing FAMILY OUT.json --draw

Rows are the family's held-out text. Everything is measured on the same rows with the same seed, and a loss is the
paired difference to the first plan, T = L uniform steps, in hundredths of a nat for one position. Plans are written
`uniform:T` (or `inf`), `spaced:D[:prefix]`, or as a decoding rule that has a bound (`surest:11`, `eb:1`, `dus:64`).
OUT.json has the table, losses with what they cost, and predictions where the plan alone decides. It is written after
every chunk of rows; a run that is stopped leaves the rows it has, and is continued by the same command. With `--draw`
only the figure is made, OUT.svg.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.core.pairs import PairTable, default_spacing, spacing_loss, uniform_loss
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError
from relaylm.files import write_json
from relaylm.measure import metrics
from relaylm.measure.likelihood import held_out, spread_rows
from relaylm.measure.pairs import measure_pairs
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.provenance import how_made
from relaylm.models.family import Family
from relaylm.sampling.rules import Rule, parse_rule
from relaylm.show.figures import plot_front

PLANS = (
    "uniform:64,uniform:32,uniform:16,spaced:5,spaced:8,spaced:11,spaced:16,spaced:25,spaced:40,spaced:64,"
    "spaced:11:prefix,spaced:25:prefix"
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--pair-rows", type=int, default=160)
    parser.add_argument("--plans", default=PLANS, help=f"beside uniform steps as many as positions (default: {PLANS})")
    parser.add_argument("--chunk", type=int, default=32, help="rows between two writes of OUT.json")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="of the blocks; the table of pairs is measured in float32 always")
    parser.add_argument("--draw", action="store_true", help="only the figure, from what is there")
    options = parser.parse_args()
    if options.draw:
        print(plot_front(json.loads(options.out.read_text()), options.out.with_suffix(".svg")))
        return
    family = Family.load(options.family, device=options.device, dtype=options.dtype)
    if (text := held_out(family)) is None:
        raise UserError(f"{options.family} has no held-out text beside it (heldout.txt)")
    heavy, length = family.roles()[1], family.length
    labels = list(dict.fromkeys([f"uniform:{length}", *options.plans.split(",")]))
    asked = [read_plan(label) for label in labels]
    rows_NL = spread_rows(text, length, options.rows)
    about = {"family": {"name": family.name, "digest": family.digest}, "model": heavy, "seed": 0}
    about["precision"] = family.precision
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    same = all(known.get(key) == value for key, value in about.items())
    nats: dict[str, list[float]] = {p["plan"]: p["nats"] for p in known.get("plans", []) if same}
    spent: dict[str, list[float]] = {p["plan"]: [p["calls"], p["flops"]] for p in known.get("plans", []) if same}
    if same:
        table = PairTable.from_json(known["pairs"])
    else:
        exact = Family.load(options.family, device=options.device, dtype="float32")  # rounding looks like information
        pair_rows = spread_rows(text, length, options.pair_rows)
        table = measure_pairs(exact[heavy], pair_rows, family.mask_id, device=exact.device, name=heavy, progress=True)
    for start in range(0, len(rows_NL), options.chunk):
        for label, (spacing, steps, rule) in zip(labels, asked, strict=True):
            done = len(nats.setdefault(label, []))
            if done >= min(start + options.chunk, len(rows_NL)):
                continue
            got = plan_bound(
                {heavy: family[heavy]}, Schedule(Schedule.parse(f"{heavy}:100%").segments, spacing=spacing),
                rows_NL[done : start + options.chunk], family.mask_id, steps=steps, rule=rule, first_row=done,
                device=family.device, batch_size=options.batch_size,
            )  # fmt: skip
            assert got.cost is not None and got.cost.flops is not None
            before = spent.get(label, [0.0, 0.0])
            total = np.array(before) * done + [got.cost.total_calls, got.cost.flops]
            nats[label] += got.nats_N.tolist()
            spent[label] = (total / len(nats[label])).tolist()
        found = [entry(label, nats, spent, table, length) for label in labels]
        summary = {"default_spacing": str(default_spacing(table, length)), "correlation": correlation(found)}
        rows = {"rows": len(nats[labels[0]]), "length": length}
        how = how_made(family.device)
        write_json(options.out, {**about, **rows, **how, **summary, "plans": found, "pairs": table.to_json()})
        print(rows, summary, {p["plan"]: round(p["loss"], 2) for p in found}, flush=True)


def read_plan(label: str) -> tuple[Spacing | None, float | None, Rule | None]:
    """The spacing, the steps and the rule of a plan; what it has not is None."""
    kind, _, what = label.partition(":")
    if kind == "uniform":
        return None, math.inf if what == "inf" else int(what), None
    return (Spacing.parse(label), None, None) if kind == "spaced" else (None, None, parse_rule(label))


def entry(
    label: str, nats: dict[str, list[float]], spent: dict[str, list[float]], table: PairTable, length: int
) -> dict[str, Any]:
    """A plan's loss against the first one with its 95% interval, hundredths of a nat a position, its cost for a row and
    the share of the first one's operations that it saves."""
    first = next(iter(nats))
    n = min(len(nats[label]), len(nats[first]))
    own_N, first_N = np.array(nats[label][:n]), np.array(nats[first][:n])
    loss, low, high = (float(v) for v in metrics.mean_interval(100 * (own_N - first_N) / length))
    bits, bits_low, bits_high = (float(v) for v in metrics.mean_interval(own_N / (length * np.log(2))))
    calls, flops = spent[label]
    out = {"plan": label, "loss": loss, "loss_ci": [low, high], "bits": bits, "ci": [bits_low, bits_high], "rows": n}
    out |= {"calls": calls, "flops": flops, "saved": 1 - flops / spent[first][1]}
    spacing, steps, rule = read_plan(label)
    out["predicted"] = None if rule is not None else 100 * predicted(table, spacing, steps, length)
    return {**out, "nats": nats[label]}


def predicted(table: PairTable, spacing: Spacing | None, steps: float | None, length: int) -> float:
    """The predicted loss against one position at a time, nats a position."""
    if spacing is not None:
        return spacing_loss(table, spacing, length)
    return 0.0 if steps is None or math.isinf(steps) else uniform_loss(table, int(steps), length)


def correlation(found: list[dict[str, Any]]) -> float | None:
    """Pearson's r of measured and predicted losses."""
    both = [(row["loss"], row["predicted"]) for row in found if row["predicted"] is not None]
    return float(np.corrcoef(np.array(both).T)[0, 1]) if len(both) > 2 else None


if __name__ == "__main__":
    main()
