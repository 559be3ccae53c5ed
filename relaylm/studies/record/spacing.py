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

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relaylm.core.pairs import PairTable, default_spacing, spacing_loss, uniform_loss
from relaylm.core.schedule import Schedule, Spacing
from relaylm.files import read_object
from relaylm.measure import metrics
from relaylm.measure.likelihood import spread_rows
from relaylm.measure.pairs import measure_pairs
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.models.family import Family
from relaylm.sampling.rules import Rule, parse_rule
from relaylm.show.figures import plot_front
from relaylm.studies.record.common import begun, command, keep, text_of

PLANS = (
    "uniform:64,uniform:32,uniform:16,spaced:5,spaced:8,spaced:11,spaced:16,spaced:25,spaced:40,spaced:64,"
    "spaced:11:prefix,spaced:25:prefix"
)


def main() -> None:
    """The command."""
    options = command(
        __doc__,
        "family out",
        rows=160,
        pair_rows=160,
        plans=(PLANS, f"beside uniform steps as many as positions (default: {PLANS})"),
        chunk=(32, "rows between two writes of OUT.json"),
        batch_size=128,
        device="auto",
        dtype=(str, "of the blocks; the table of pairs is measured in float32 always"),
        draw=(False, "only the figure, from what is there"),
    )
    if options.draw:
        print(plot_front(read_object(options.out), options.out.with_suffix(".svg")))
        return
    family = Family.load(options.family, device=options.device, dtype=options.dtype)
    text, heavy, length = text_of(family, options.family), family.roles()[1], family.length
    plans = {label: read_plan(label) for label in (f"uniform:{length}", *options.plans.split(","))}
    rows_NL = spread_rows(text, length, options.rows)
    record = {"model": heavy, "precision": family.precision}
    if known := begun(options.out, family, record):
        table, kept = PairTable.from_json(known["pairs"]), {plan["plan"]: plan for plan in known["plans"]}
    else:
        exact = Family.load(options.family, device=options.device, dtype="float32")  # rounding looks like information
        pair_rows, kept = spread_rows(text, length, options.pair_rows), {}
        table = measure_pairs(exact[heavy], pair_rows, family.mask_id, device=exact.device, name=heavy, progress=True)
    measured: dict[str, dict[str, Any]] = {
        label: kept.get(label, {"nats": [], "calls": 0.0, "flops": 0.0}) for label in plans
    }
    for start in range(0, len(rows_NL), options.chunk):
        for (spacing, steps, rule), own in zip(plans.values(), measured.values(), strict=True):
            done = len(own["nats"])
            if done >= min(start + options.chunk, len(rows_NL)):
                continue
            got = plan_bound(
                {heavy: family[heavy]}, Schedule(Schedule.parse(f"{heavy}:100%").segments, spacing=spacing),
                rows_NL[done : start + options.chunk], family.mask_id, steps=steps, rule=rule, first_row=done,
                device=family.device, batch_size=options.batch_size,
            )  # fmt: skip
            assert got.cost is not None and got.cost.flops is not None
            own["nats"] += got.nats_N.tolist()
            for key, added in (("calls", got.cost.total_calls), ("flops", got.cost.flops)):
                own[key] = (own[key] * done + added) / len(own["nats"])
        found = [entry(label, measured, table, length) for label in plans]
        summary = {"default_spacing": str(default_spacing(table, length)), "correlation": correlation(found)}
        rows = {"rows": len(found[0]["nats"]), "length": length}
        keep(options.out, family, {**record, **rows, **summary, "plans": found, "pairs": table.to_json()})
        print(rows, summary, {p["plan"]: round(p["loss"], 2) for p in found}, flush=True)


def read_plan(label: str) -> tuple[Spacing | None, float | None, Rule | None]:
    """The spacing, the steps and the rule of a plan; what it has not is None."""
    kind, _, what = label.partition(":")
    if kind == "uniform":
        return None, math.inf if what == "inf" else int(what), None
    return (Spacing.parse(label), None, None) if kind == "spaced" else (None, None, parse_rule(label))


def entry(label: str, measured: Mapping[str, Mapping[str, Any]], table: PairTable, length: int) -> dict[str, Any]:
    """A plan's loss against the first one with its 95% interval, hundredths of a nat a position, its cost for a row and
    the share of the first one's operations that it saves."""
    own, first = measured[label], next(iter(measured.values()))
    n = min(len(own["nats"]), len(first["nats"]))
    own_N, first_N = np.array(own["nats"][:n]), np.array(first["nats"][:n])
    loss = metrics.mean_estimate(100 * (own_N - first_N) / length)
    bits = metrics.mean_estimate(own_N / (length * np.log(2)))
    return {
        "plan": label,
        **{**loss.named("loss"), "bits": bits.value, "ci": bits.ci, "rows": n},
        **{"calls": own["calls"], "flops": own["flops"], "saved": 1 - own["flops"] / first["flops"]},
        "predicted": predicted(table, *read_plan(label), length),
        "nats": own["nats"],
    }


def predicted(
    table: PairTable, spacing: Spacing | None, steps: float | None, rule: Rule | None, length: int
) -> float | None:
    """The predicted loss against one position at a time, hundredths of a nat a position; None for a rule."""
    if rule is not None:
        return None
    if spacing is not None:
        return 100 * spacing_loss(table, spacing, length)
    return 0.0 if steps is None or math.isinf(steps) else 100 * uniform_loss(table, int(steps), length)


def correlation(found: list[dict[str, Any]]) -> float | None:
    """Pearson's r of measured and predicted losses."""
    both = [(row["loss"], row["predicted"]) for row in found if row["predicted"] is not None]
    return float(np.corrcoef(np.array(both).T)[0, 1]) if len(both) > 2 else None


if __name__ == "__main__":
    main()
