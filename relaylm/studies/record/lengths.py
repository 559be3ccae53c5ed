"""What saving a sixth of the FLOPs costs in likelihood, by length: by fewer steps, the sandwich, or light steps first.

    python -m relaylm.studies.record.lengths FAMILY OUT [--device cuda]

Rows are windows of the family's held-out text, and there are as many steps as positions. Larger steps cost what tokens
that are written at once know of each other, which falls with the number of steps; what a smaller model costs does not.
OUT/lengths.json has the numbers, OUT/lengths.png shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from relaylm.measure.likelihood import spread_rows
from relaylm.models.family import Family
from relaylm.search.search import search
from relaylm.show.figures import finish, nth, panels, points, save_figure
from relaylm.studies.record.common import command, keep, text_of

SAVED = 1 / 6
LENGTHS = (32, 64, 128, 256, 512, 1024)
KINDS = {
    "steps": "heavy model in fewer steps",
    "sandwich": "sandwich",
    "first": "light for the first eighth, then fewer steps",
}


def main() -> None:
    """The command."""
    symbols = (16384, "of held-out text at each length")
    options = command(__doc__, "family out", device="auto", symbols=symbols)
    family = Family.load(options.family, device=options.device)
    text, found = text_of(family, options.family), []
    for length in (length for length in LENGTHS if length <= family.length):
        rows_NL = spread_rows(text, length, options.symbols // length)
        result = search(family, budget=SAVED, quick=True, length=length, text=rows_NL, progress=True)
        found.append({"length": length, "rows": len(rows_NL), **picked(result)})
        print(length, {kind: found[-1][kind]["schedule"] for kind in KINDS}, flush=True)
    keep(options.out / "lengths.json", family, {"saved": SAVED, "lengths": found})
    draw(found, options.out / "lengths.png")


def picked(result: dict[str, Any]) -> dict[str, Any]:
    """Of a quick search, the schedule of each kind and its nats a token above all-heavy."""
    kinds = {}
    for row in result["bounds"]:
        segments, loss = row["schedule"].split(), row["against_heavy"]
        is_first = row["what"] == "light first, then fewer steps" and "@12.5%" in segments[0]
        alone = len(segments) == 1 and segments[0].startswith(f"{result['heavy']}:") and row["steps"] < result["steps"]
        if kind := "sandwich" if row["what"] == "sandwich" else "first" if is_first else "steps" if alone else "":
            kinds[kind] = {"schedule": row["schedule"], "saved": row["saved"]}
            kinds[kind] |= {"loss": loss["difference"], "ci": loss["ci"]}
    return kinds


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """Loss against length, a curve for each kind."""
    figure, (axes,) = panels(6.4, 4.0)
    for k, (kind, label) in enumerate(KINDS.items()):
        loss, ci = (100 * np.array([row[kind][key] for row in found]) for key in ("loss", "ci"))
        points(axes, [row["length"] * 1.03 ** (k - 1) for row in found], loss, ci, label=label, **nth(k))
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["length"] for row in found], [str(row["length"]) for row in found])
    finish(axes, "positions, and steps", "bound above all-heavy,\nhundredths of a nat a symbol", zero="grey")
    save_figure(figure, file, "a sixth of the FLOPs saved")


if __name__ == "__main__":
    main()
