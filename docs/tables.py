"""Tables of the documents, from the records under results/. Each function takes that folder and returns Markdown."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paper_cost

from relaylm.convert import formats
from relaylm.core.schedule import Spacing
from relaylm.core.spacing import expected_calls
from relaylm.studies.paper.document import markdown_table
from relaylm.studies.record import front as front_record

FAMILIES = {
    "wiki-char": "Wikipedia in 27 symbols, length 256",
    "books-char": "novels in 27 symbols, length 128",
    "wiki-bpe": "Wikipedia articles, 8,192 BPE entries, length 256 (an earlier training than the bundled one)",
}
SCHEDULES = {
    "heavy": "12 blocks",
    "sandwich:25%": "sandwich: a quarter of the steps by 4 blocks",
    "8b": "8 blocks",
    "sandwich:50%": "sandwich: half of the steps by 4 blocks",
    "light": "4 blocks",
}


def _load(records: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((records / f"{name}.json").read_text(encoding="utf-8")))


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def _hundredths(value: float, ci: Sequence[float], digits: int = 1) -> str:
    """A loss with its interval, in hundredths."""
    value, low, high = (100 * v for v in (value, *ci))
    return f"{value:+.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def reported(records: Path, name: str, columns: Mapping[str, str], **where: str) -> str:
    """A table of the recorded report: some of its columns, by new titles, and the rows where columns have a value."""
    with (records / "reproduce" / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]
    return _table([{title: row[key] for key, title in columns.items()} for row in rows])


# ------------------------------------------------------------------------------------------------ spacing


def spacing(records: Path) -> str:
    """What plans lose in likelihood on the bundled tokens, measured and predicted."""
    found = _load(records, "spacing/wiki-bpe")
    length, rows = 512, []
    for plan in found["plans"]:
        kind, _, what = plan["plan"].partition(":")
        calls, label = _calls(plan["plan"], length), f"`{plan['plan']}`"
        if kind == "uniform":
            label = f"T = {'infinity' if what == 'inf' else what}, uniform steps"
        low, high = plan["loss_ci"]
        loss = "0" if plan is found["plans"][0] else f"{plan['loss']:+.2f} ({low:.2f} to {high:.2f})"
        rows.append((calls, {"plan": label, "calls a row": f"{calls:.0f}", "loss (95%)": loss}))
    return _table([row for _, row in sorted(rows, key=lambda row: -row[0])])


KINDS = {"uniform": "uniform steps", "sets": "spaced sets", "prefix": "spaced, in the plan's order"}
KINDS |= {"surest": "surest first, spaced", "dus": "DUS", "eb": "EB-Sampler"}


def kind_of(plan: str) -> str:
    """What decides which positions a call writes, of a recorded plan: a key of KINDS."""
    name, _, rest = plan.partition(":")
    return ("prefix" if rest.endswith("prefix") else "sets") if name == "spaced" else name


def together(name: str, records: Path) -> str:
    """What is lost in likelihood at a number of calls, by which positions a call writes."""
    found = _load(records, f"spacing/{name}")
    length = found.get("length", 512)
    whole = [p for p in found["plans"] if not (p["plan"].startswith("surest") and p["plan"].count(":") > 1)]
    plans = [(kind_of(p["plan"]), p.get("calls") or _calls(p["plan"], length), p) for p in whole]
    kinds = [kind for kind in KINDS if any(kind == own for own, _, _ in plans)]
    full = plans[0][1]
    rows = []
    for _, target, _ in sorted((p for p in plans[1:] if p[0] == "uniform" and p[1] < full), key=lambda p: -p[1]):
        row = {f"calls of {full:.0f}": f"about {target:.0f}"}
        for kind in kinds:
            near = [p for p in plans if p[0] == kind and abs(math.log(p[1] / target)) < 0.265]
            best = min(near, key=lambda p: abs(math.log(p[1] / target)), default=None)
            row[KINDS[kind]] = "" if best is None else _loss(best[2], best[1], target)
        rows.append(row)
    what = f"`{name}`, 12 blocks, length {length}, {found['rows']} rows on {_machine(found)}"
    return f"{what}:\n\n{_table(rows)}"


def front(records: Path, families: Sequence[str] = ("wiki-bpe", "wiki-char", "books-char"), all_of: bool = True) -> str:
    """What each way of saving operations loses on samples and in likelihood, a table for each family that has a record,
    or for the first. Where none has, what is lost at a number of calls."""
    there = [name for name in families if (records / "front" / f"{name}.json").is_file()]
    shown = [_front(name, _load(records, f"front/{name}")) for name in (there if all_of else there[:1])]
    return "\n\n".join(shown) if shown else together("wiki-bpe", records)


def _front(name: str, found: Mapping[str, Any]) -> str:
    levels = sorted({cell["level"] for cell in found["cells"] if cell["level"] is not None})
    rows = []
    for kind, title in {**front_record.KINDS, "also": "the tuner's choice"}.items():
        own = {cell["level"]: cell for cell in found["cells"] if cell["kind"] == kind}
        row = {f"{level:.0%} saved": _front_cell(own.get(level), level) for level in levels}
        if own and any(row.values()):
            rows.append({"`" + name + "`": title, **row})
    what = (
        f"`{name}`, {found['heavy']}, length {found['length']}, {found['n']} samples of a cell (a quarter as many for "
    )
    what += f"EB-Sampler and low-confidence), {found['bound_rows']} held-out rows, {_machine(found)}: extra "
    what += "log-perplexity of samples; loss in likelihood, nats for one position; both in hundredths"
    return f"{what}:\n\n{_table(rows)}"


def _front_cell(cell: Mapping[str, Any] | None, level: float) -> str:
    """Both losses with half of their intervals; the share saved where it is not that of the column."""
    if cell is None:
        return ""

    def shown(item: Mapping[str, Any] | None) -> str:
        if item is None or item["loss"] is None or None in item["ci"]:
            return "-"
        return f"{item['loss']:+.1f} ± {(item['ci'][1] - item['ci'][0]) / 2:.1f}"

    other = "" if abs(cell["saved"] - level) < 0.015 else f" ({cell['saved']:.0%})"
    return f"{shown(cell['samples'])}; {shown(cell['bound'])}{other}"


def predicted(records: Path) -> str:
    """How well the tables of pairs predict losses."""
    rows = []
    for name in ("wiki-char", "wiki-bpe"):
        found = _load(records, f"spacing/{name}")
        both = [p for p in found["plans"] if p["predicted"] is not None]
        row = {"family": f"`{name}`", "plans": str(len(both)), "rows of text": str(found["rows"])}
        row |= {"r of measured and predicted losses": f"{found['correlation']:.3f}"}
        rows.append({**row, "spacing as good as T = L": f"`{found['default_spacing']}`"})
    return _table(rows)


def parallel(records: Path) -> str:
    """Rounds and work of windows of calls."""
    rows = []
    for run in _load(records, "spacing/parallel-4b")["runs"]:
        row = {"W": str(run["window"]), "rounds": str(run["rounds"]), "calls": str(run["calls"])}
        rows.append({**row, "calls against the sequential run": f"{run.get('work', 1):.2f}"})
    return _table(rows)


def _loss(plan: Mapping[str, Any], calls: float, target: float) -> str:
    """A loss with its margin and its plan; with the number of calls where that is another than the row's."""
    margin = (plan["loss_ci"][1] - plan["loss_ci"][0]) / 2
    text = plan["plan"].removeprefix("uniform:").removesuffix(":prefix")
    label = f"T = {text}" if plan["plan"].startswith("uniform") else f"`{plan['plan']}`"
    other = f", {calls:.0f} calls" if abs(math.log(calls / target)) > 0.1 else ""
    return f"{plan['loss']:+.1f} ± {margin:.1f} ({label}{other})"


def _calls(plan: str, length: int) -> float:
    """Mean calls of a row under uniform steps or a spacing."""
    kind, _, what = plan.partition(":")
    if kind == "spaced":
        return expected_calls(length, Spacing.parse(what))
    steps = float(what)
    return length if math.isinf(steps) else steps * (1 - (1 - 1 / steps) ** length)


def _machine(found: Mapping[str, Any]) -> str:
    return str(found["machine"]["gpu"] or "a CPU")


# ------------------------------------------------------------------------------------------------ speed


def speed(records: Path) -> str:
    """The engine against MDLM's sampler."""
    found = _load(records, "bench/h200")
    rows = []
    for which, title in (("", "12 blocks"), ("_light", "4 blocks")):
        theirs, ours = (found[f"{key}{which}_ms_per_row_step"] for key in ("reference", "engine"))
        compiled = "" if which else f"{found['reference_compiled_ms_per_row_step']:.2f}"
        cells = {"milliseconds per row and step": title, "MDLM's sampler": f"{theirs:.2f}", "compiled": compiled}
        rows.append({**cells, "relaylm": f"{ours:.3g}", "times faster": f"**{theirs / ours:.1f}**"})
    return _table(rows)


def bench(records: Path) -> str:
    """What else the benchmark measured, on a GPU and on a CPU."""
    columns = []
    for name, machine in (("h200", "one H200"), ("cpu", "two CPU cores")):
        f = _load(records, f"bench/{name}")
        size, slope, memory = f["settings"], f["slope"], f["peak_memory_engine"]
        light, theirs = (
            f[f"{key}_light_ms_per_row_step"] / f[f"{key}_ms_per_row_step"] for key in ("engine", "reference")
        )
        cells = {"": machine, "width, length, T": f"{size['width']}, {size['length']}, {size['steps']}"}
        cells["times faster than MDLM's sampler: 12 blocks, 4 blocks"] = f"{f['speedup']:.1f}, {f['speedup_light']:.1f}"
        cells["than its cached, its compiled form"] = f"{f['speedup_over_cache']:.1f}, {f['speedup_over_compiled']:.1f}"
        cells["cost of a call of 4 blocks, of 12"] = f"{light:.1%} (MDLM's sampler: {theirs:.1%})"
        low, high = slope["ci"]
        cells["share of time saved by a light share of 1"] = f"{slope['value']:.3f} ({low:.3f} to {high:.3f})"
        cells["rate, of the largest matrix products"] = (
            f"{f['fraction_of_limit']:.0%} of {f['matmul_tflops']:.3g} TFLOP/s"
        )
        cells["peak memory, of MDLM's sampler"] = f"{memory / f['peak_memory_reference']:.1%}" if memory else ""
        cells["mean KL to the float32 network, nats"] = f"{f['kl_to_fp32']:.1e}"
        cells["tokens a second"] = f"{f['engine_tokens_per_s']:,.0f}"
        cells["of a causal model with a KV cache, at its best batch"] = f"{f['ar_tokens_per_s']['best']:,.0f}"
        columns.append(cells)
    head, *rows = ([key, *(cells[key] for cells in columns)] for key in columns[0])
    return markdown_table(head, rows)


def kernels(records: Path) -> str:
    """Where a call of the blocks spends its time, per row, and the rate of each kind of product."""
    found = _load(records, "bench/h200")
    parts, length, width = found["breakdown"], found["settings"]["length"], found["settings"]["width"]
    square = 2 * length * width**2  # operations of a row's product with a square matrix
    # In 11 blocks; the first one's queries, keys and values come from a table and its attention's output is not added
    # in place; of the last one only keys are made.
    flops = {
        "nvjet_sm90_tss_192x192": ("products that add to the residual stream (cuBLAS)", (10 + 11 * 4) * square),
        "_twice_gelu": ("MLP up, with GELU (Triton)", 11 * 4 * square),
        "cudnn": ("attention, heads of 64 (cuDNN)", 11 * 4 * length**2 * width),
        "_rotated": ("queries, keys and values, with rotation (Triton)", (10 * 3 + 1) * square),
        "_norm": ("norms", 0),
    }
    rows = []
    for start, (what, operations) in flops.items():
        us = next(k["microseconds"] for k in parts["kernels"] if k["name"].startswith(start)) / parts["kernels_rows"]
        rate, beyond = operations / us / 1e6, us - operations / found["matmul_tflops"] / 1e6
        cells = {"kernel": what, "µs": f"{us:.0f}", "TFLOP/s": f"{rate:.0f}" if rate else ""}
        rows.append({**cells, "µs beyond the limit": f"{beyond:.0f}"})
    places = {"blocks": "in the blocks", "head": "in the head", "drawing": "in the draw", "host": "on the host"}
    shares = ", ".join(f"{parts[key]:.1%} {place}" for key, place in places.items())
    return f"Of the wall time {shares}. A call of the blocks, per row:\n\n{_table(rows)}"


# ------------------------------------------------------------------------------------------------ schedules and rules


def quality(records: Path) -> str:
    """Cost and quality of five schedules of the bundled family, and of two in an eighth of the steps."""
    found = {
        (r["schedule"], r["dial"]): r for r in _load(records, "compose/wiki-char")["rows"] if r["line"] == "ancestral"
    }
    rows = []
    for steps, names in ((256, list(SCHEDULES)), (32, ["heavy", "light"])):
        for name in names:
            row, most = found[name, f"T={steps}"], found["heavy", "T=256"]
            low, high = row["gen_ppl_ci"]
            cells = {"steps by": SCHEDULES[name], "steps": str(steps), "FLOPs": f"{row['flops'] / most['flops']:.0%}"}
            cells |= {"perplexity (95%)": f"{row['gen_ppl']:.2f} ± {(high - low) / 2:.2f}"}
            rows.append({**cells, "entropy of words": f"{row['word_entropy']:.2f}"})
    return _table(rows)


def rules(records: Path) -> str:
    """Each decoding rule with the heavy model alone, on two families, beside held-out text."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name in ("wiki-char", "wiki-bpe"):
        found = _load(records, f"compose/{name}")
        text = {**found["heldout"], "line": "held-out text", "dial": "", "calls": 0}
        for row in [*(row for row in found["rows"] if row["schedule"] == "heavy"), text]:
            cells = rows.setdefault((row["line"], row["dial"]), {"rule": row["line"], "dial": row["dial"]})
            cells[f"{name}: perplexity"] = f"{row['gen_ppl']:.2f}"
            cells[f"{name}: entropy of words"] = f"{row['word_entropy']:.3f}"
            cells[f"{name}: calls"] = f"{row['calls'] / found['n']:.0f}" if row["calls"] else ""
    return _table(list(rows.values()))


def equal_compute(records: Path) -> str:
    """Extra log-perplexity of the sandwich, of the tuner's best mixture and of single models, at three savings."""
    rows = []
    for family in FAMILIES:
        for budget in _load(records, f"search/{family}")["all"]:
            found = sorted(budget["rows"], key=lambda row: row["against_heavy"]["difference"])
            loss = {
                r["schedule"]: _hundredths(r["against_heavy"]["difference"], r["against_heavy"]["ci"]) for r in found
            }
            sandwich = next(row for row in found if row["what"] == "sandwich")
            mixed = next(row for row in found if row["kind"] == "mixed")
            alone = [row for row in found if row["kind"] == "rival" and row is not sandwich]
            heavy = next(row for row in alone if row["schedule"].startswith("12b:"))
            other = next(row for row in alone if row is not heavy)
            name, steps = other["what"].replace("b alone", " blocks"), heavy["schedule"].removeprefix("12b:")
            name += f" ({other['saved']:.0%} saved)" if other["saved"] > budget["saved"] + 0.03 else ""
            cells = {"family": f"`{family}`", "FLOPs saved": f"{budget['saved']:.0%}"}
            cells |= {"sandwich of 4 and 12 blocks": loss[sandwich["schedule"]]}
            cells |= {"best mixture of the tuner": loss[mixed["schedule"]]}
            cells |= {"12 blocks in fewer steps": f"{steps} steps: {loss[heavy['schedule']]}"}
            rows.append({**cells, "one smaller model": f"{name}: {loss[other['schedule']]}"})
    return _table(rows)


def tuner(records: Path) -> str:
    """The tuner against the winner of all 210 placements, on fresh rows."""
    rows = []
    for family in FAMILIES:
        found = _load(records, f"search/{family}")["two"]
        for schedule in dict.fromkeys(run["schedule"] for run in found["tune"]):
            runs = [run for run in found["tune"] if run["schedule"] == schedule]
            beside = runs[0]["against_winner"], found["worst_against_winner"]
            against, worst = (_hundredths(item["difference"], item["ci"]) for item in beside)
            cells = {"family": f"`{family}`", "winner of the 210": f"`{found['winner']['schedule']}`"}
            cells |= {"the worst against it": worst, "calls of the tree": f"{found['calls']['ratio']:.0%}"}
            cells |= {"tuner": f"`{schedule}`", "seeds": f"{len(runs)} of {len(found['tune'])}"}
            cells |= {"its calls": f"{max(run['calls_of_naive_search'] for run in runs):.0%}"}
            rows.append({**cells, "against the winner": against})
    return _table(rows)


def lengths(records: Path) -> str:
    """What a sixth of the FLOPs costs in the likelihood bound, by length."""
    kinds = {"steps": "12 blocks in fewer steps", "sandwich": "sandwich"}
    kinds |= {"first": "4 blocks for the first eighth, then fewer steps"}
    rows = []
    for family in FAMILIES:
        for row in _load(records, f"search/{family}-lengths")["lengths"]:
            loss = {title: _hundredths(row[kind]["loss"], row[kind]["ci"], 2) for kind, title in kinds.items()}
            rows.append({"family": f"`{family}`", "positions": str(row["length"]), **loss})
    return _table(rows)


# ------------------------------------------------------------------------------------------------ training, the paper


def training(records: Path) -> str:
    """Held-out bits per symbol of three families."""
    rows = []
    for family, text in FAMILIES.items():
        found = _load(records, f"train/{family}")
        splits = found["corpus"].get("splits", found["corpus"])
        models, size = found["models"], splits["train"]["tokens"]
        names = {"4 blocks": "4b", "8 blocks": "8b", "12 blocks": "12b", "judge": "judge"}
        bits = {title: f"{models[name]['heldout']['bits']:.3f}" for title, name in names.items()}
        symbols = f"{size / 1e6:.1f}M, {models['12b']['tokens'] / size:.1f} times"
        rows.append({"preset": f"`{family}`", "text": text, "symbols": symbols, **bits})
    return _table(rows)


def lighten(records: Path) -> str:
    """A sibling against networks of its size, in likelihood and in judged samples on a spaced plan."""
    found = _load(records, "lighten/wiki-char")
    heavy, samples = found["of"], {one["schedule"]: one for one in found["samples"]}
    seen = {name: f"{summary['tokens']:,}" for name, summary in found["training"].items()}
    titles = {"sibling": f"{found['blocks']} blocks of the heavy model, distilled", heavy: "the heavy model itself"}
    titles |= dict.fromkeys(("scratch1", "scratch10"), "from scratch")
    rows = []
    for name in ("sibling", "scratch1", "scratch10", *sorted(set(found["bounds"]) - set(titles)), heavy):
        bits, plan = found["bounds"][name], f"spaced:{found['spacing']}"
        row = {"model": titles.get(name, f"`{name}` of the family"), "characters seen": seen.get(name, "545M")}
        row["bits a character (95%)"] = f"{bits['bits']:.3f} ({bits['low']:.3f} to {bits['high']:.3f})"
        for title, schedule in (("alone", f"{name} {plan}"), ("half of the calls", f"{name}:50% {heavy}:50% {plan}")):
            one = samples.get(schedule)
            low, high = one["gen_ppl_ci"] if one else (0, 0)
            row[f"perplexity, {title}"] = f"{one['gen_ppl']:.1f} ({low:.1f} to {high:.1f})" if one else ""
        rows.append(row)
    return _table(rows)


def judges(records: Path) -> str:
    """How far two judges agree."""
    found = _load(records, "judges/wiki-char")
    tau, (low, high) = found["kendall_tau"]["value"], found["kendall_tau"]["ci"]
    return (
        f"On {found['n']} samples of each of the seven hand-made schedules Kendall's tau of the two orders is "
        f"{tau:.2f} ({low:.2f} to {high:.2f}), and they put {len(found['differ'])} of {len(found['pairs'])} pairs of "
        "schedules in opposite orders, each significantly."
    )


def serving(records: Path) -> str:
    """A server under load."""
    found = _load(records, "serve/cpu")
    full, memory = found["saturation"], _load(records, "serve/memory")["memory"]
    speed, spent = full["rows_per_second"], full["processor_seconds_per_row"]
    rows = [
        {
            "": f"{full['clients']} clients at once",
            "rows a second": f"{speed['server']:.2f}",
            "processor seconds a row": f"{spent['server']:.3f}",
        },
        {
            "": "`relaylm.sample`, same batch size",
            "rows a second": f"{speed['sample']:.2f}",
            "processor seconds a row": f"{spent['sample']:.3f}",
        },
    ]
    waits = [
        {
            "load": f"{100 * one['load']:.0f}%",
            "requests": str(one["requests"]),
            **{p: f"{one[p]:.1f} s" for p in ("p50", "p95", "p99")},
        }
        for one in found["latency"]
    ]
    grown = 100 * memory["growth_over_second_half"]
    flat = f"Over {memory['requests']:,} requests the memory of the server grew by {grown:.1f}% in the second half."
    return f"{_table(rows)}\n\n{_table(waits)}\n\n{flat}"


def campaigns(records: Path) -> str:
    """What the campaigns tried, and how often that failed."""
    found = {path.stem: _load(records, f"campaigns/{path.stem}") for path in records.glob("campaigns/*.json")}
    faults, fuzz = found["faults"], found["fuzz"]
    tried = {
        "kills": f"{found['kills']['counts']['kills']:,} kills of {len(found['kills']['kinds'])} commands",
        "faults": f"{faults['cases']:,} of {faults['faults possible']:,} in {len(faults['changes on disk'])} commands",
        "fuzz": f"{fuzz['counts']['inputs']:,} inputs for {len(fuzz['counts']) - 1} parsers",
        "laws": f"{found['laws']['counts']['tests']} tests",
        "soak": f"{found['soak']['counts']['requests']:,} requests in {found['soak']['seconds_asked']:,} s",
        "supply": f"{found['supply']['counts']['packages']} packages",
    }
    rows = [
        {
            "campaign": f"`{name}`",
            "tried": what,
            "failures": str(len(found[name]["failures"])),
            "seed": str(found[name]["seed"]),
            "Python, torch": " ".join(found[name]["versions"][key] for key in ("python", "torch")),
            "commit": f"`{found[name]['commit'][:7]}`",
        }
        for name, what in tried.items()
    ]
    return _table(rows)


def loaded(records: Path) -> str:
    """Which public models load."""
    rows = [
        {"format": f"`{one.name}`", "models": one.models, "by": one.network, "masks": one.law, "note": one.note}
        for one in formats.LOADED
    ]
    return _table(rows)


def refused(records: Path) -> str:
    """Which public models do not load."""
    return _table([{"models": one.models, "why": one.why} for one in formats.REFUSED])


def cost(records: Path) -> str:
    """What the paper's experiments cost at the paper's size."""
    bench, entries = _load(records, "bench/h200"), _load(records, "train/throughput")["entries"]
    titles = {"owt": "OpenWebText family, 4 to 12 blocks and a second 12", "lm1b": "LM1B family, the same"}
    rows = []
    for preset, title in titles.items():
        found = paper_cost.training_hours(preset, entries)
        cells = {"training": title, "H200-hours": f"{found['total']:,.0f}"}
        rows.append({**cells, "at a utilisation of": f"{found['utilisation']:.0%} ({found['source']})"})
    hours = paper_cost.sampling_hours(bench)
    hours["**all**"] = {key: sum(both[key] for both in hours.values()) for key in ("mdlm", "engine")}
    head = ["sampling", "MDLM's sampler, H200-hours", "relaylm, H200-hours"]
    body = [[name, f"{both['mdlm']:.1f}", f"{both['engine']:.2f}"] for name, both in hours.items()]
    further = ", ".join(f"{name} {value:.1f}" for name, value in paper_cost.further_hours(bench).items())
    text = f"Beside these, which are the paper's, `--scale paper` runs, in H200-hours: {further}."
    return f"{_table(rows)}\n\n{markdown_table(head, body)}\n\n{text}"


# ------------------------------------------------------------------------------------------------ harness


def harness(records: Path) -> str:
    """Schedules side by side in lm-evaluation-harness."""
    found = _load(records, "lm-eval/wiki-bpe")
    rows = []
    for entry in found["schedules"]:
        law = f"spaced:{entry['spacing']}" if "spacing" in entry else f"T = {entry['steps']}"

        def score(task: str, metric: str, form: str = ".2f", of: Mapping[str, Any] = entry["scores"]) -> str:
            name, _, kind = metric.partition(",")
            value, error = of[f"relaylm_{task}"][metric], of[f"relaylm_{task}"][f"{name}_stderr,{kind}"]
            return f"{value:{form}}" + (f" ± {error:{form}}" if isinstance(error, float) else "")

        cells = {"schedule": f"`{entry['schedule']}`, {law}", "choice, accuracy": score("choice", "acc_norm,none")}
        cells["cloze, accuracy"] = score("cloze", "acc,none")
        cells["bits per byte"] = score("perplexity", "bits_per_byte,none", ".3f")
        cells["generation, exact match"] = score("generation", "exact_match,first-word")
        rows.append({**cells, "error of one estimate": f"{entry['standard_error_median']:.2f}"})
    samples = max(max(entry["samples"].values()) for entry in found["schedules"])
    return f"{_table(rows)}\n\nAt most {samples} documents a task, about {found['calls']} calls a likelihood."
