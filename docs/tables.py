"""Tables of the documents, from the records under results/. Each function takes that folder and returns Markdown."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paper_cost

from relaylm.convert import formats
from relaylm.models.family import BUNDLED
from relaylm.studies.paper.document import markdown_table

FAMILIES = {
    "wiki-char": "Wikipedia in 27 symbols, length 256",
    "books-char": "novels in 27 symbols, length 128",
    "wiki-bpe": "Wikipedia articles, 8,192 BPE entries, length 512",
}
SCHEDULES = {
    "heavy": "12 blocks",
    "sandwich:25%": "sandwich: a quarter of the steps by 4 blocks",
    "8b": "8 blocks",
    "sandwich:50%": "sandwich: half of the steps by 4 blocks",
    "light": "4 blocks",
}


def load(records: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((records / f"{name}.json").read_text(encoding="utf-8")))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def listed(items: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of items: columns by their titles, as formats of an item's fields."""
    return table([{title: form.format(**item) for title, form in columns.items()} for item in items])


def _hundredths(value: float, ci: Sequence[float], digits: int = 1) -> str:
    """A loss with its interval, in hundredths."""
    value, low, high = (100 * v for v in (value, *ci))
    return f"{value:+.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def reported(records: Path, name: str, columns: Mapping[str, str], **where: str) -> str:
    """A table of the recorded report: some of its columns, by new titles, and the rows where columns have a value."""
    with (records / "reproduce" / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]
    return table([{title: row[key] for key, title in columns.items()} for row in rows])


# ------------------------------------------------------------------------------------------------ speed


def speed(records: Path) -> str:
    """The engine against MDLM's sampler in as many steps and on spaced plans, with a causal network beside them:
    milliseconds of a row, of many rows together and of one alone."""
    full, spaced = load(records, "bench/h200"), load(records, "bench/h200-spaced")
    steps, length = full["settings"]["steps"], full["settings"]["length"]
    causal = 1000 * length / max(found["ar_tokens_per_s"]["best"] for found in (full, spaced))
    plan = next(run for run in spaced["spaced"] if run["distance"] == 40)

    def ms(found: Mapping[str, Any], *samplers: str) -> list[Any]:
        return [steps * found[f"{sampler}_ms_per_row_step"] for sampler in samplers]

    on_spaced_plans = [*ms(spaced, "reference", "reference_compiled"), causal, plan["ms_per_row"]]
    one_row = ("MDLM's sampler", "MDLM's sampler, compiled", "causal, with a cache", "spaced:40")
    lines = {
        f"12 blocks, T = {steps:,}": [*ms(full, "reference", "reference_compiled"), causal, *ms(full, "engine")],
        f"4 blocks, T = {steps:,}": [*ms(full, "reference_light"), None, None, *ms(full, "engine_light")],
        f"12 blocks, `spaced:40` ({plan['calls_per_row']:.0f} calls)": on_spaced_plans,
        "the same, one row alone": [spaced["latency"][name]["ms"] for name in one_row],
    }
    rows = []
    for title, values in lines.items():
        theirs, compiled, other, ours = ("" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.1f}" for v in values)
        cells = {"milliseconds a row": title, f"MDLM's sampler, T = {steps:,}": theirs, "compiled": compiled}
        cells |= {"causal, with a KV cache": other, "relaylm": ours}
        rows.append({**cells, "times faster": f"**{values[0] / values[-1]:.1f}**"})
    return table(rows)


def spaced_speed(records: Path) -> str:
    """Spaced plans at the paper's size, many rows together, and everything with one row alone."""
    found = load(records, "bench/h200-spaced")
    together = {
        "plan": "`spaced:{distance}`",
        "calls a row": "{calls_per_row:.0f}",
        "rows a second": "{rows_per_second:.1f}",
        "tokens a second": "{tokens_per_second:,.0f}",
        "times MDLM's sampler": "{speedup:.1f}",
        "of the rate of matrix products": "{fraction_of_limit:.1%}",
    }
    alone = [{"name": name, **run} for name, run in found["latency"].items()]
    one_row = {"one row": "{name}", "milliseconds": "{ms:,.1f}", "calls": "{calls:,}"}
    return f"{listed(found['spaced'], together)}\n\n{listed(alone, one_row)}"


def captured(records: Path) -> str:
    """What CUDA graphs give decoding rules. Only ratios: other work shared the GPU."""
    tests = load(records, "bench/cuda-rules")["tests"]
    found = tests["test_decoding_rules_keep_the_device_busy"]["result"]
    rules = [name for name in found if not name.endswith(", eager")]
    ratios = (f"{found[name]['rows_per_s'] / found[f'{name}, eager']['rows_per_s']:.2f}" for name in rules)
    return markdown_table(["rule", *(f"`{name}`" for name in rules)], [["rows a second, captured over eager", *ratios]])


def looks(records: Path) -> str:
    """What rules that take entropies cost on two CPU cores, and what taking them less often loses in likelihood."""
    found = load(records, "bench/cpu-rules")["rules"]
    runs = [{"name": name, "seconds": 1 / run["rows_per_second"], **run} for name, run in found.items()]
    columns = {"12 blocks, 256 positions, vocabulary 50,258": "`{name}`", "calls a row": "{calls_per_row:.0f}"}
    columns |= {"GFLOP a row": "{gflop_per_row:.0f}", "seconds a row": "{seconds:.2f}"}
    plans = {plan["plan"]: plan for plan in load(records, "spacing/wiki-char-looks")["plans"]}
    lost = [
        {"plan": name, "calls": plans[name]["calls"], "loss": plans[name]["loss"], "low": low, "high": high}
        for name in ("spaced:11", "surest:11", "surest:11:2", "surest:11:4")
        for low, high in [plans[name]["loss_ci"]]
    ]
    lose = {"`wiki-char`, 12 blocks": "`{plan}`", "calls a row": "{calls:.1f}"}
    lose |= {"loss in likelihood": "{loss:+.1f} ({low:.1f} to {high:.1f})"}
    return f"{listed(runs, columns)}\n\n{listed(lost, lose)}"


BENCH = {
    "width, length, T": "{settings[width]}, {settings[length]}, {settings[steps]}",
    "times faster than MDLM's sampler: 12 blocks, 4 blocks": "{speedup:.1f}, {speedup_light:.1f}",
    "than its cached, its compiled form": "{speedup_over_cache:.1f}, {speedup_over_compiled:.1f}",
    "cost of a call of 4 blocks, of 12": "{engine_light:.1%} (MDLM's sampler: {reference_light:.1%})",
    "share of time saved by a light share of 1": "{slope[value]:.3f} ({slope[ci][0]:.3f} to {slope[ci][1]:.3f})",
    "rate, of the largest matrix products": "{fraction_of_limit:.0%} of {matmul_tflops:.3g} TFLOP/s",
    "peak memory, of MDLM's sampler": "{memory}",
    "mean KL to the float32 network, nats": "{kl_to_fp32:.1e}",
    "tokens a second": "{engine_tokens_per_s:,.0f}",
    "of a causal model with a KV cache, at its best batch": "{ar_tokens_per_s[best]:,.0f}",
}


def bench(records: Path) -> str:
    """What else the benchmark measured, on a GPU and on a CPU."""
    columns = []
    for name, machine in (("h200", "one H200"), ("cpu", "two CPU cores")):
        f = {**load(records, f"bench/{name}"), "memory": ""}
        for key in ("engine", "reference"):
            f[f"{key}_light"] = f[f"{key}_light_ms_per_row_step"] / f[f"{key}_ms_per_row_step"]
        if f["peak_memory_engine"]:
            f["memory"] = f"{f['peak_memory_engine'] / f['peak_memory_reference']:.1%}"
        columns.append({"": machine, **{title: form.format(**f) for title, form in BENCH.items()}})
    head, *rows = ([key, *(cells[key] for cells in columns)] for key in columns[0])
    return markdown_table(head, rows)


def kernels(records: Path) -> str:
    """Where a call of the blocks spends its time, per row, and the rate of each kind of product."""
    found = load(records, "bench/h200")
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
    return f"Of the wall time {shares}. A call of the blocks, per row:\n\n{table(rows)}"


# ------------------------------------------------------------------------------------------------ schedules and rules


def quality(records: Path) -> str:
    """Cost and quality of five schedules of the bundled family, and of two in an eighth of the steps."""
    found = {
        (r["schedule"], r["dial"]): r for r in load(records, "compose/wiki-char")["rows"] if r["line"] == "ancestral"
    }
    rows = []
    for steps, names in ((256, list(SCHEDULES)), (32, ["heavy", "light"])):
        for name in names:
            row, most = found[name, f"T={steps}"], found["heavy", "T=256"]
            low, high = row["gen_ppl_ci"]
            cells = {"steps by": SCHEDULES[name], "steps": str(steps), "FLOPs": f"{row['flops'] / most['flops']:.0%}"}
            cells |= {"perplexity (95%)": f"{row['gen_ppl']:.2f} ± {(high - low) / 2:.2f}"}
            rows.append({**cells, "entropy of words": f"{row['word_entropy']:.2f}"})
    return table(rows)


def rules(records: Path) -> str:
    """Each decoding rule with the heavy model alone, beside held-out text."""
    found = load(records, "compose/wiki-char")
    rows = [{**row, "each": f"{row['calls'] / found['n']:.0f}"} for row in found["rows"] if row["schedule"] == "heavy"]
    rows.append({**found["heldout"], "line": "held-out text", "dial": "", "each": ""})
    columns = {"rule": "{line}", "dial": "{dial}", "perplexity": "{gen_ppl:.2f}"}
    return listed(rows, columns | {"entropy of words": "{word_entropy:.3f}", "calls": "{each}"})


def equal_compute(records: Path) -> str:
    """Extra log-perplexity of the sandwich, of the tuner's best mixture and of single models, at three savings."""
    rows = []
    for family in FAMILIES:
        searched = load(records, f"search/{family}")
        for budget in searched["all"]:
            found = sorted(budget["rows"], key=lambda row: row["against_heavy"]["difference"])
            loss = {
                r["schedule"]: _hundredths(r["against_heavy"]["difference"], r["against_heavy"]["ci"]) for r in found
            }
            sandwich = next(row for row in found if row["what"] == "sandwich")
            mixed = next(row for row in found if row["kind"] == "mixed")
            alone = [row for row in found if row["kind"] == "rival" and row is not sandwich]
            large = searched["two"]["heavy"]
            mine = [row for row in alone if row["schedule"].startswith(f"{large}:")]
            spaced = next((row for row in mine if "spaced" in row["schedule"]), None)
            heavy = min((row for row in mine if "spaced" not in row["schedule"]), key=lambda row: row["saved"])
            other = next(row for row in alone if row not in mine and "spaced" not in row["schedule"])
            name = re.sub(r"^(\d+)b alone|^d(\d+) alone", r"\1\2 blocks", other["what"])
            steps = heavy["schedule"].removeprefix(f"{large}:")
            name += f" ({other['saved']:.0%} saved)" if other["saved"] > budget["saved"] + 0.03 else ""
            cells = {"family": f"`{family}`", "FLOPs saved": f"{budget['saved']:.0%}"}
            cells |= {"sandwich of 4 and 12 blocks": loss[sandwich["schedule"]]}
            cells |= {"best mixture of the tuner": loss[mixed["schedule"]]}
            cells |= {"12 blocks in fewer steps": f"{steps} steps: {loss[heavy['schedule']]}"}
            cells |= {"one smaller model": f"{name}: {loss[other['schedule']]}"}
            far = f"`{spaced['schedule'].split()[-1]}`: {loss[spaced['schedule']]}" if spaced else ""
            rows.append(cells | {"12 blocks on a spaced plan": far})
    shown = [key for key in rows[0] if any(row[key] for row in rows)]
    return table([{key: row[key] for key in shown} for row in rows])


def tuner(records: Path) -> str:
    """The tuner against the winner of all 210 placements, on fresh rows."""
    rows = []
    for family in FAMILIES:
        found = load(records, f"search/{family}")["two"]
        for schedule in dict.fromkeys(run["schedule"] for run in found["tune"]):
            runs = [run for run in found["tune"] if run["schedule"] == schedule]
            beside = runs[0]["against_winner"], found["worst_against_winner"]
            against, worst = (_hundredths(item["difference"], item["ci"]) for item in beside)
            cells = {"family": f"`{family}`", "winner of the 210": f"`{found['winner']['schedule']}`"}
            cells |= {"the worst against it": worst, "calls of the tree": f"{found['calls']['ratio']:.0%}"}
            cells |= {"tuner": f"`{schedule}`", "seeds": f"{len(runs)} of {len(found['tune'])}"}
            cells |= {"its calls": f"{max(run['calls_of_naive_search'] for run in runs):.0%}"}
            rows.append({**cells, "against the winner": against})
    return table(rows)


def lengths(records: Path) -> str:
    """What a sixth of the FLOPs costs in the likelihood bound, by length."""
    kinds = {"steps": "12 blocks in fewer steps", "sandwich": "sandwich"}
    kinds |= {"first": "4 blocks for the first eighth, then fewer steps"}
    rows = []
    for family in FAMILIES:
        for row in load(records, f"search/{family}-lengths")["lengths"]:
            loss = {title: _hundredths(row[kind]["loss"], row[kind]["ci"], 2) for kind, title in kinds.items()}
            rows.append({"family": f"`{family}`", "positions": str(row["length"]), **loss})
    return table(rows)


# ------------------------------------------------------------------------------------------------ training, the paper


def training(records: Path) -> str:
    """Held-out bits per symbol of three families."""
    rows = []
    for family, text in FAMILIES.items():
        if family == "wiki-bpe":  # which comes with the package, with what its training found
            about = json.loads((BUNDLED / family / "family.json").read_text(encoding="utf-8"))["meta"]
            found, form = {"corpus": about["corpus"], "models": about["training"]}, "d{}"
        else:
            found, form = load(records, f"train/{family}"), "{}b"
        splits = found["corpus"].get("splits", found["corpus"])
        models, size = found["models"], splits["train"]["tokens"]
        names = {f"{depth} blocks": form.format(depth) for depth in (4, 8, 12)} | {"judge": "judge"}
        bits = {t: f"{models[name]['heldout']['bits']:.3f}" if name in models else "" for t, name in names.items()}
        symbols = f"{size / 1e6:.1f}M, {models[names['12 blocks']]['tokens'] / size:.1f} times"
        rows.append({"preset": f"`{family}`", "text": text, "symbols": symbols, **bits})
    return table(rows)


def lighten(records: Path) -> str:
    """A sibling against networks of its size, in likelihood and in judged samples on a spaced plan."""
    found = load(records, "lighten/wiki-char")
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
    return table(rows)


def judges(records: Path) -> str:
    """How far two judges agree."""
    found = load(records, "judges/wiki-char")
    tau, (low, high) = found["kendall_tau"]["value"], found["kendall_tau"]["ci"]
    pairs, apart = len(found["pairs"]), len(found["differ"])
    return (
        f"On {found['n']} samples of each of the seven hand-made schedules Kendall's tau of the two orders is "
        f"{tau:.2f} ({low:.2f} to {high:.2f}); of {pairs} pairs of schedules {apart} differ significantly in opposite "
        "directions."
    )


def texts(records: Path) -> str:
    """Samples of the bundled tokens beside real and shuffled text, under two judges."""
    found = load(records, "judges/wiki-bpe-texts")
    rows = []
    for one in found["texts"]:
        cells = {f"{one['n']} rows of": one["text"], "calls a row": f"{one['calls']:.0f}" if one["calls"] else ""}
        for judge, title in (("own judge", "its own judge"), ("other judge", "SmolLM2-135M")):
            low, high = one[judge]["gen_ppl_ci"]
            cells[f"perplexity, {title}"] = f"{one[judge]['gen_ppl']:.0f} ({low:.0f} to {high:.0f})"
        cells["entropy of words"] = f"{one['word_entropy']:.2f}"
        rows.append({**cells, "repeated 4-grams": f"{one['repetition_4']:.2%}", "MAUVE": f"{one['mauve']:.2g}"})
    return table(rows)


def serving(records: Path) -> str:
    """A server under load."""
    found = load(records, "serve/cpu")
    full, memory = found["saturation"], load(records, "serve/memory")["memory"]
    speed, spent = full["rows_per_second"], full["processor_seconds_per_row"]
    who = {"server": f"{full['clients']} clients at once", "sample": "`relaylm.sample`, same batch size"}
    rows = [
        {"": title, "rows a second": f"{speed[key]:.2f}", "processor seconds a row": f"{spent[key]:.3f}"}
        for key, title in who.items()
    ]
    waits = {"load": "{load:.0%}", "requests": "{requests}"} | {p: f"{{{p}:.1f}} s" for p in ("p50", "p95", "p99")}
    grown = 100 * memory["growth_over_second_half"]
    flat = f"Over {memory['requests']:,} requests the memory of the server grew by {grown:.1f}% in the second half."
    return f"{table(rows)}\n\n{listed(found['latency'], waits)}\n\n{flat}"


def serving_gpu(records: Path) -> str:
    """A server under load on a GPU."""
    rows = []
    titles = {"wiki-bpe": "`wiki-bpe`, 512 tokens", "paper-size": "12 x 768, 1,024 tokens, random weights"}
    for name, title in titles.items():
        found = load(records, f"serve/h200-{name}")
        full = found["saturation"]
        speed = full["rows_per_second"]
        cells = {"network": title, "rows a second": f"{speed['server']:.0f}", "offline": f"{speed['sample']:.0f}"}
        cells["share"] = f"{full['ratio_by_clock']:.0%}"
        for one in found["latency"]:
            waits = " / ".join(f"{1000 * one[p]:.0f}" for p in ("p50", "p95", "p99"))
            cells[f"at {one['load']:.0%} load, ms: p50 / p95 / p99"] = waits
        rows.append(cells)
    return table(rows)


def campaigns(records: Path) -> str:
    """What the campaigns tried, and how often that failed."""
    found = {path.stem: load(records, f"campaigns/{path.stem}") for path in records.glob("campaigns/*.json")}
    faults, fuzz = found["faults"], found["fuzz"]
    tried = {
        "kills": f"{found['kills']['counts']['kills']:,} kills of {len(found['kills']['kinds'])} commands",
        "faults": f"{faults['cases']:,} of {faults['faults possible']:,} in {len(faults['changes on disk'])} commands",
        "fuzz": f"{fuzz['counts']['inputs']:,} inputs for {len(fuzz['counts']) - 1} parsers",
        "fuzz-store": f"{found['fuzz-store']['counts']['inputs']:,} inputs for the store alone",
        "laws": f"{found['laws']['counts']['tests']} tests",
        "soak": f"{found['soak']['counts']['requests']:,} requests in {found['soak']['seconds_asked']:,} s",
        "supply": f"{found['supply']['counts']['packages']} packages",
    }
    rows = [
        {**found[name], "campaign": name, "tried": what, "number": len(found[name]["failures"])}
        for name, what in tried.items()
    ]
    columns = {"campaign": "`{campaign}`", "tried": "{tried}", "failures": "{number}", "seed": "{seed}"}
    columns |= {"Python, torch": "{versions[python]} {versions[torch]}", "commit": "`{commit:.7}`"}
    return listed(rows, columns)


def loaded(records: Path) -> str:
    """Which public models load."""
    columns = {"format": "`{name}`", "models": "{models}", "by": "{network}", "masks": "{law}", "note": "{note}"}
    return listed([vars(one) for one in formats.LOADED], columns)


def refused(records: Path) -> str:
    """Which public models do not load."""
    return table([{"models": one.models, "why": one.why} for one in formats.REFUSED])


def cost(records: Path) -> str:
    """What the paper's experiments cost at the paper's size."""
    bench, entries = load(records, "bench/h200"), load(records, "train/throughput")["entries"]
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
    return f"{table(rows)}\n\n{markdown_table(head, body)}\n\n{text}"


# ------------------------------------------------------------------------------------------------ harness


def harness(records: Path) -> str:
    """Schedules side by side in lm-evaluation-harness."""
    found = load(records, "lm-eval/wiki-bpe")
    rows = []
    for entry in found["schedules"]:
        law = f"spaced:{entry['spacing']}" if "spacing" in entry else f"T = {entry['steps']}"

        def score(task: str, metric: str, form: str = ".2f", of: Mapping[str, Any] = entry["scores"]) -> str:
            name, _, kind = metric.partition(",")
            value, error = of[f"relaylm_{task}"][metric], of[f"relaylm_{task}"][f"{name}_stderr,{kind}"]
            return f"{value:{form}}" + (f" ± {1.96 * error:{form}}" if isinstance(error, float) else "")

        cells = {"schedule": f"`{entry['schedule']}`, {law}", "choice, accuracy": score("choice", "acc_norm,none")}
        cells["cloze, accuracy"] = score("cloze", "acc,none")
        cells["bits per byte"] = score("perplexity", "bits_per_byte,none", ".3f")
        cells["generation, exact match"] = score("generation", "exact_match,first-word")
        rows.append({**cells, "error of one estimate": f"{entry['standard_error_median']:.2f}"})
    sizes = ", ".join(f"{task.removeprefix('relaylm_')} {n}" for task, n in found["schedules"][0]["samples"].items())
    what = "Whole tasks" if found["limit"] is None else f"At most {found['limit']} documents a task"
    return f"{table(rows)}\n\n{what} (documents: {sizes}), about {found['calls']} calls a likelihood."
