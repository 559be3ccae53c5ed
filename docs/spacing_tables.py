"""Tables on what a call writes together, from the records under results/. Each function takes that folder and returns
Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import FAMILIES, listed, load, table

from relaylm.core.schedule import Spacing
from relaylm.core.spacing import expected_calls
from relaylm.studies.record.front_figures import KINDS

FIRST = {  # cells of README's table: T = L, as few uniform steps as the spacing has calls, the spacing, surest first
    "wiki-bpe": ("uniform:512", "uniform:64", "spaced:46", "surest:37"),
    "wiki-char": ("uniform:256", "uniform:16", "heavy spaced:11", "surest:11"),
}
UNITS = {"wiki-bpe": "tokens", "wiki-char": "characters"}
MIXED = ("light-first", "sandwich", "light-last", "smaller", "tuner")


def spacing(records: Path) -> str:
    """What plans lose in likelihood on the bundled tokens."""
    found = load(records, "spacing/wiki-bpe")
    length, rows = 512, []
    for plan in found["plans"]:
        kind, _, what = plan["plan"].partition(":")
        calls, label = _calls(plan["plan"], length), f"`{plan['plan']}`"
        if kind == "uniform":
            label = f"T = {'infinity' if what == 'inf' else what}, uniform steps"
        low, high = plan["loss_ci"]
        loss = "0" if plan is found["plans"][0] else f"{plan['loss']:+.2f} ({low:.2f} to {high:.2f})"
        rows.append((calls, {"plan": label, "calls a row": f"{calls:.0f}", "loss (95%)": loss}))
    return table([row for _, row in sorted(rows, key=lambda row: -row[0])])


def front(records: Path) -> str:
    """What a spacing gives, in four lines for each family."""
    rows: list[dict[str, str]] = []
    for name, labels in FIRST.items():
        found = load(records, f"front/{name}")
        for label in labels:
            cell = next(cell for cell in found["cells"] if cell["label"] == label)
            kind, _, steps = label.removeprefix("heavy ").partition(":")
            what = {"uniform": f"`-T {steps}`", "spaced": f"**`--spacing {steps}`**"}.get(kind, f"`--rule {label}`")
            base = label == labels[0]
            what = f"{found['length']} {UNITS[name]}, {what}" if base else what
            row = {"written by": what, "calls": f"{cell['calls']:.0f}", "FLOPs saved": f"{cell['saved']:.0%}"}
            row["perplexity"] = f"{cell['gen_ppl']:#.3g}".rstrip(".")
            row["extra log-perplexity"] = "" if base else _shown(cell["samples"])
            rows.append({**row, "loss in likelihood": "" if base else _shown(cell["bound"])})
    tokens, characters = (load(records, f"front/{name}") for name in FIRST)
    how = (
        f"Perplexity of {tokens['n']:,} samples (tokens) and {characters['n']:,} (characters) under a causal network, "
    )
    how += f"likelihood of {tokens['bound_rows']} and {characters['bound_rows']} rows of real text; differences to the "
    how += (
        "first line of each in hundredths of a nat a position, with 95% intervals. A step that writes nothing needs no "
    )
    return f"{table(rows)}\n\n{how}call."


def fronts(records: Path) -> str:
    """What each way of saving operations loses on samples and in likelihood, of each family that has a record."""
    return "\n\n".join(_front(path.stem, load(records, f"front/{path.stem}")) for path in _records(records))


def mixtures(records: Path) -> str:
    """Several models, or one smaller model, on spaced plans against the heavy model alone on spaced plans."""
    rows = []
    for path in _records(records):
        cells = load(records, f"front/{path.stem}")["cells"]
        for kind in MIXED:
            own = {cell["level"]: cell["against_sets"] for cell in cells if cell["kind"] == kind}
            row = {"family": f"`{path.stem}`", "against spaced sets of the heavy model": KINDS[kind]}
            for level in (0.8, 0.9, 0.95):
                found = own.get(level)
                row[f"{level:.0%} saved"] = f"{_shown(found['samples'])}; {_shown(found['bound'])}" if found else ""
            rows += [row] if any(own.values()) else []
    return table(rows)


def predicted(records: Path) -> str:
    """How well the tables of pairs predict losses."""
    found = [load(records, f"spacing/{name}") for name in FAMILIES]
    for one in found:
        one["number"] = sum(plan["predicted"] is not None for plan in one["plans"])
    columns = {"family": "`{family[name]}`", "plans": "{number}", "rows of text": "{rows}"}
    columns |= {"r of measured and predicted losses": "{correlation:.3f}"}
    return listed(found, columns | {"spacing as good as T = L": "`{default_spacing}`"})


def parallel(records: Path) -> str:
    """Rounds, work and time of windows of calls."""
    runs = [{"seconds": run["milliseconds"] / 1000, **run} for run in load(records, "spacing/parallel")["runs"]]
    columns = {"W": "{window}", "rounds": "{rounds}", "calls": "{calls}"}
    return listed(runs, columns | {"calls against the sequential run": "{work:.2f}", "seconds": "{seconds:.1f}"})


def _records(records: Path) -> list[Path]:
    return sorted((records / "front").glob("*.json"), reverse=True)


def _front(name: str, found: Mapping[str, Any]) -> str:
    """Two tables, samples and likelihood, and what one position at a time gives."""
    levels = sorted({cell["level"] for cell in found["cells"] if cell["level"] is not None})
    parts = []
    for part, title in (("samples", "samples: extra log-perplexity"), ("bound", "loss in likelihood")):
        rows = []
        for kind, what in KINDS.items():
            own = {cell["level"]: cell for cell in found["cells"] if cell["kind"] == kind and cell[part]}
            if own and None not in own:
                row = {title: what}
                for level in levels:
                    near = level not in own or abs(own[level]["saved"] - level) < 0.015
                    other = "" if near else f" ({own[level]['saved']:.0%})"
                    row[f"{level:.0%} saved"] = _shown(own[level][part]) + other if level in own else ""
                if part == "samples":
                    entropies = [cell["word_entropy"] for cell in own.values()]
                    row["entropy of words"] = f"{min(entropies):.2f} to {max(entropies):.2f}"
                rows.append(row)
        parts.append(table(rows))
    base = next(cell for cell in found["cells"] if cell["kind"] == "reference")
    gpu = found["machine"]["gpu"]
    head = f"`{name}`, {found['heavy']}, length {found['length']}, {found['n']:,} samples of a cell"
    few = {cell["kind"] for cell in found["cells"] if cell["n"] < found["n"]}
    if few:
        head += f" (a quarter as many for {', '.join(what for kind, what in KINDS.items() if kind in few)})"
    head += " and "
    head += f"{found['bound_rows']} rows of held-out text, {gpu}; T = {found['length']} has an entropy of words of "
    head += f"{base['word_entropy']:.2f}:"
    for one in (cell for cell in found["cells"] if cell["kind"] == "inf"):
        last = f"One position at a time ({-one['saved']:.0%} more FLOPs): samples {_shown(one['samples'])}, likelihood "
        parts.append(f"{last}{_shown(one['bound'])}.")
    return "\n\n".join([head, *parts])


def _shown(item: Mapping[str, Any] | None) -> str:
    """A loss with half of its interval."""
    if item is None or item["loss"] is None or None in item["ci"]:
        return "-"
    loss = f"{item['loss']:+.1f}"
    return f"{'0.0' if float(loss) == 0 else loss} ± {(item['ci'][1] - item['ci'][0]) / 2:.1f}"


def _calls(plan: str, length: int) -> float:
    """Mean calls of a row under uniform steps or a spacing."""
    kind, _, what = plan.partition(":")
    if kind == "spaced":
        return expected_calls(length, Spacing.parse(what))
    steps = float(what)
    return length if math.isinf(steps) else steps * (1 - (1 - 1 / steps) ** length)
