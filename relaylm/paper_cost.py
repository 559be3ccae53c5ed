r"""What the paper's experiments cost at the paper's size, from measured throughput; the numbers of docs/reproduce.md.

Training needs, for each of a family's networks, steps x batch rows of `training_flops` operations; at a utilisation u
of an H200's peak that is so many hours. u is the best of `results/train/throughput.json` at the same width (and length,
if that was measured), else 40%; which of these it was is said.

Sampling is counted in row-steps of each depth. A row-step takes t_4 and t_12 milliseconds in the recorded bench (4 and
12 blocks at L = 1024); other depths lie on the line through the two, and other lengths cost in proportion to
`call_flops`. The engine's search shares beginnings: 790 of 2,100 segment runs.

    python -m relaylm.paper_cost        renders the tables between markers in docs/reproduce.md again
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relaylm.cost import call_flops
from relaylm.recipe import load_preset

ROOT = Path(__file__).resolve().parent.parent
PEAK = 989e12  # H200, dense bf16, by the data sheet
ASSUMED = 0.4  # utilisation where none was measured
VOCABULARY = {"owt": 50258, "lm1b": 30522}
TREE = 790 / 2100
STEPS = 1000
LIGHTS = (4, 6, 8, 10)
Work = dict[int, float]  # depth -> row-steps


def utilisation(width: int, length: int, folder: Path | None = None) -> tuple[float, str]:
    """Share of the peak that training reached at this width (at this length, if that was measured), and the source."""
    file = (folder or ROOT / "results" / "train") / "throughput.json"
    entries = json.loads(file.read_text(encoding="utf-8"))["entries"] if file.is_file() else []
    found = []
    for entry in entries:
        shape = re.match(r"\d+ x (\d+), L=(\d+)", entry["shape"])
        if shape and int(shape.group(1)) == width:
            found.append((int(shape.group(2)) == length, entry["mfu"], entry["shape"]))
    if not found:
        return ASSUMED, "assumed, not measured"
    _, mfu, shape_text = max(found)
    return mfu, f"measured at {shape_text}, without dropout"


def training_hours(preset: str, folder: Path | None = None) -> dict[str, Any]:
    """H200-hours for each network of a family; the judge is the paper's GPT-2, which is not trained."""
    from relaylm.trainer import training_flops

    chosen = load_preset(preset)
    share, source = utilisation(chosen.width, chosen.length, folder)
    vocabulary, rows = VOCABULARY[preset], chosen.recipe.steps * chosen.recipe.batch

    def hours(depth: int) -> float:
        flops = training_flops(chosen.architecture(depth, vocabulary, vocabulary - 1), chosen.length)
        return rows * flops / (share * PEAK) / 3600

    each = {f"{depth} blocks": hours(depth) for depth in chosen.depths}
    each["12 blocks, second seed"] = hours(chosen.twin or 12)
    return {"hours": each, "total": sum(each.values()), "utilisation": share, "source": source}


def _work(light: int, share: float, runs: float, steps: int = STEPS) -> Work:
    """Row-steps of `runs` samples with a share of light steps."""
    return _sum([{light: runs * steps * share}, {12: runs * steps * (1 - share)}])


def _sum(parts: Sequence[Work]) -> Work:
    total: Work = {}
    for part in parts:
        for depth, value in part.items():
            total[depth] = total.get(depth, 0.0) + value
    return total


def sampling_work() -> dict[str, tuple[Work, int, float]]:
    """Each experiment's row-steps by depth, its length, and the share of it that remains with shared beginnings."""
    seven = [_work(4, 0.25, 5 * 1600), _work(4, 1, 1600), _work(4, 0, 1600)]
    more = [_work(light, 0.25, 5 * 1600) for light in LIGHTS[1:]] + [_work(light, 1, 1600) for light in LIGHTS[1:]]
    shares = [_work(4, share / 100, 1600) for share in range(10, 100, 10)]
    short = [_work(4, 0.25, 5 * 1600, 128), _work(4, 1, 1600, 128), _work(4, 0, 1600, 128)]
    return {
        "seven schedules, light 4": (_sum(seven), 1024, 1.0),
        "seven schedules, light 6, 8, 10": (_sum(more), 1024, 1.0),
        "search of 210": (_work(4, 0.4, 210 * 160), 1024, TREE),
        "light shares 10 to 90%": (_sum(shares), 1024, 1.0),
        "prefixes of 128 and 256": (_sum([*seven, *seven]), 1024, 1.0),
        "seven schedules on LM1B": (_sum(short), 128, 1.0),
    }


def further_hours(bench: Mapping[str, Any]) -> dict[str, float]:
    """H200-hours of what `--scale paper` runs beside the paper's own experiments, with the engine: the search of the
    tuner may take as many calls as 6,600 all-heavy samples, and judges 25 schedules that save 30% on average; the
    float32 arm is MDLM's sampler itself, on 160 samples of seven schedules."""
    strides = [_work(4, 1 / 8, 8 * 400), _work(4, 0, 400 + 8 * 400 * (1 - 3 / 32))]
    seven = sampling_work()["seven schedules, light 4"][0]
    work = {
        "larger strides": (_sum(strides), 1024, 1.0),
        "the tuner": (_work(4, 0, 6600 + 0.7 * 25 * 1600), 1024, 1.0),
        "exact against float32": (seven, 1024, 1.0),
    }
    hours = sampling_hours(bench, work)
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


def render_cost(bench: Mapping[str, Any] | None = None, folder: Path | None = None) -> str:
    """The tables as Markdown."""
    bench = bench or json.loads((ROOT / "results" / "bench" / "h200.json").read_text(encoding="utf-8"))
    lines = ["| training | H200-hours | at a utilisation of |", "|---|---|---|"]
    for preset, title in (
        ("owt", "OpenWebText family, 4 to 12 blocks and a second 12"),
        ("lm1b", "LM1B family, the same"),
    ):
        found = training_hours(preset, folder)
        lines.append(f"| {title} | {found['total']:,.0f} | {found['utilisation']:.0%} ({found['source']}) |")
    hours = sampling_hours(bench)
    lines += ["", "| sampling | MDLM's sampler, H200-hours | relaylm, H200-hours |", "|---|---|---|"]
    for name, both in hours.items():
        lines.append(f"| {name} | {both['mdlm']:.1f} | {both['engine']:.2f} |")
    total = {key: sum(both[key] for both in hours.values()) for key in ("mdlm", "engine")}
    lines.append(f"| **all** | **{total['mdlm']:.0f}** | **{total['engine']:.1f}** |")
    further = ", ".join(f"{name} {value:.1f}" for name, value in further_hours(bench).items())
    lines += ["", f"Beside these, which are the paper's, `--scale paper` runs, in H200-hours: {further}."]
    lines[-1] += " Disagreement by timestep and the judge take minutes."
    return "\n".join(lines)


def render_verdicts(data: Path | None = None) -> str:
    """The recorded run's verdicts as a Markdown table, or that there is none."""
    from relaylm.reproduce import COMMITTED, NAMES, load, recorded_verdicts

    folder = data or COMMITTED
    made = {name: item for name in NAMES if (item := load(folder / f"{name}.json")) is not None}
    if not made:
        return "No run is recorded yet; the command above makes one."
    first, second = next(iter(made.values())), made.get("second-corpus")
    names = [item["family"]["name"] for item in made.values()]
    names += [second["result"]["schedules"]["family"]["name"]] if second is not None else []
    machine = first["machine"]["gpu"] or first["machine"]["cpu"]
    days = sorted({item["date"] for item in made.values()})
    lines = [f"{', '.join(dict.fromkeys(names))}; {machine}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}:"]
    lines += ["", "| claim of the paper | verdict here | findings |", "|---|---|---|"]
    for verdict in recorded_verdicts(folder):
        words = {"yes": True, "no": False, "open": None}
        counts = {word: sum(f.says is says for f in verdict.findings) for word, says in words.items()}
        tally = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        lines.append(f"| {verdict.claim.name} | {verdict.verdict} | {tally} |")
    if missing := [name for name in NAMES if name not in made]:
        families = "--family runs/wiki-char/family"
        families += " --bpe runs/wiki-bpe/family" if {"bpe", "precision"} & set(missing) else ""
        command = f"relaylm reproduce --scale gpu {families} --out results/reproduce --only {' '.join(missing)}"
        lines += ["", f"Not recorded yet: {', '.join(missing)}. To make them:", "", "```bash", command, "```"]
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """A document with what stands between its markers rendered anew."""
    for name, render in (("cost", render_cost), ("verdicts", render_verdicts)):
        begin, end = f"<!-- {name}: rendered -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        if pattern.search(text):
            body = f"{begin}\n\n{render()}\n\n{end}"
            text = pattern.sub(lambda _, body=body: body, text)  # type: ignore[misc]
    return text


def main() -> int:
    path = ROOT / "docs" / "reproduce.md"
    path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
