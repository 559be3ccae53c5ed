"""`relaylm reproduce`: the paper's experiments on a family, and one report with a verdict on each of its claims.

Every experiment leaves `data/NAME.json` in the output folder, whole or not at all, with the command, seed, machine and
commit; one that is there for the same settings is not run again, and within an experiment samples come from the store.
So an interrupted run goes on where it was. The report is made from these files alone and can be made again at any time.

What this family cannot show (a depth, a twin, a second corpus that is not at hand) is shown from the results that are
kept with the project, marked as such with the command that remakes it, or said to be missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import experiments, mdlm_experiments, paper
from relaylm.bound import held_out
from relaylm.checkpoint import write_json
from relaylm.claims import Verdict, verdicts
from relaylm.document import Block, Heading, Table, Text, write
from relaylm.errors import UserError
from relaylm.experiments import SCALES, Experiment, Scale, Setup
from relaylm.family import Family
from relaylm.provenance import how_made
from relaylm.sections import SECTIONS, where_it_peaks
from relaylm.store import Store, content_key

COMMITTED = Path(__file__).resolve().parent.parent / "results" / "reproduce" / "data"
FORMAT = 1  # of an experiment's data
BENCH = Path(__file__).resolve().parent.parent / "results" / "bench" / "h200.json"


def _two(setup: Setup) -> str | None:
    return None if len(setup.family.names) > 1 else "a family of at least two models"


EXPERIMENTS = (
    Experiment(
        "schedules",
        "Hand-made schedules with 25% light steps",
        ("fig:12b-4b-barplot-perplexity", paper.OWT, "app:more_configs"),
        _two,
        experiments.schedules,
    ),
    Experiment(
        "search",
        "All 210 placements of 40% light steps",
        (
            "fig:best_worst_barplot",
            "fig:top20config_barplot",
            "fig:bottom20config_barplot",
            "fig:per_segment_ppl_barplot",
        ),
        _two,
        experiments.all_210,
    ),
    Experiment("depths", "The light model's depth", ("tab:scaling_models",), _two, experiments.depths),
    Experiment("shares", "The share of light steps", ("tab:scaling_steps",), _two, mdlm_experiments.shares),
    Experiment("time", "Where the time goes", ("sec:scaling",), _two, mdlm_experiments.where_time_goes),
    Experiment(
        "prefixes", "Prefix-conditional generation", (paper.PREFIX_128, paper.PREFIX_256), _two, experiments.prefixes
    ),
    Experiment(
        "disagreement",
        "Disagreement of models by timestep",
        ("fig:loss_diff", "fig:kldiv-plot"),
        _two,
        experiments.disagreement,
    ),
    Experiment(
        "second-corpus",
        "A second corpus, short rows",
        (paper.LM1B, "fig:lm1b-kldiv-plot"),
        lambda setup: None if setup.second is not None else "a family of a second corpus (--second)",
        experiments.second_corpus,
    ),
    Experiment(
        "bpe",
        "Tokens in place of characters",
        (),
        lambda setup: None if setup.bpe is not None else "a family with a large vocabulary (--bpe)",
        experiments.bpe,
    ),
    Experiment(
        "precision",
        "Exact sampling against MDLM's float32 sampler",
        (),
        lambda setup: (
            None
            if setup.bpe is not None or setup.family.vocab_size > 1000
            else "a family with a large vocabulary (--bpe): with few symbols float32 cuts nothing off"
        ),
        mdlm_experiments.precision,
        edition=2,
    ),
    Experiment("strides", "Larger strides beside smaller models", (), _two, experiments.strides),
    Experiment("tuner", "What the tuner finds", (), _two, experiments.tuner, edition=3),
    Experiment(
        "training",
        "How importance moves with training",
        (),
        lambda setup: None if len(setup.stages) > 1 else "the same pair at two or more stages of training (--stages)",
        experiments.training,
    ),
)
NAMES = tuple(experiment.name for experiment in EXPERIMENTS)


def reproduce(
    family: Family,
    scale: str | Scale = "cpu",
    out: str | Path = "reproduce",
    *,
    only: Sequence[str] | None = None,
    store: str | Path | None = None,
    text: str | Path | None = None,
    second: Family | None = None,
    bpe: Family | None = None,
    stages: Sequence[Family] = (),
    judge: Any = None,
    seed: int = 0,
    progress: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the experiments (or `only` some), write the report to `out`, and say what was done and what the verdicts are.

    `scale` is cpu, gpu or paper. `text` is a file of held-out text (default: heldout.txt in the family's folder, if
    there is one). `second`, `bpe` and `stages` are the families that some experiments need beside the first. An
    experiment that fails is noted in the report, the others go on, and an error is raised at the end."""
    if isinstance(scale, str):
        if scale not in SCALES:
            raise UserError(f"{scale!r} is not a scale: choose {', '.join(SCALES)}")
        scale = SCALES[scale]
    if unknown := [name for name in only or () if name not in NAMES]:
        raise UserError(f"{unknown[0]!r} is not an experiment: choose from {', '.join(NAMES)}")
    folder = Path(out).expanduser()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    setup = Setup(
        family,
        scale,
        Store(Path(store).expanduser() if store is not None else folder / "store") if family.digest else None,
        held_out(family, text),
        second,
        held_out(second, None),
        bpe,
        held_out(bpe, None),
        tuple(stages),
        judge,
        seed,
        progress,
        note,
    )
    done: dict[str, dict[str, Any]] = {}
    try:
        for experiment in EXPERIMENTS:
            if only is None or experiment.name in only:
                done[experiment.name] = _run(experiment, setup, folder)
    finally:
        # Also after Ctrl-C: what is there is shown.
        found = report(folder, {name: item["reason"] for name, item in done.items() if "reason" in item})
    failed = [f"{name} ({item['reason']})" for name, item in done.items() if item["status"] == "failed"]
    if failed:
        raise RuntimeError(f"failed: {'; '.join(failed)}. The rest is in {folder / 'report.html'}")
    return {"out": str(folder), "scale": asdict(scale), "experiments": done, **found}


def _run(experiment: Experiment, setup: Setup, folder: Path) -> dict[str, Any]:
    """One experiment, unless it is there already; its data goes to a file."""
    if (missing := experiment.needs(setup)) is not None:
        return {"status": "not run", "reason": f"it needs {missing}"}
    setup = placed(experiment, setup)
    file, key = folder / "data" / f"{experiment.name}.json", _key(experiment, setup)
    if (known := load(file)) is not None and known.get("key") == key:
        return {"status": "kept", "seconds": known["seconds"]}
    setup.note(f"{experiment.name}: {experiment.title}")
    began = time.perf_counter()
    try:
        result = experiment.run(setup)
    except UserError as error:
        return {"status": "not run", "reason": str(error)}
    except Exception as error:
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
    seconds = time.perf_counter() - began
    about = {
        "format": FORMAT,
        "experiment": experiment.name,
        "key": key,
        "scale": asdict(setup.scale),
        "family": {"name": setup.family.name, "digest": setup.family.digest, "models": list(setup.family.names)},
        "seed": setup.seed,
        **how_made(setup.family.device),
        "seconds": seconds,
    }
    write_json(file, {**about, "result": _rounded(result)})
    return {"status": "ran", "seconds": seconds}


def placed(experiment: Experiment, setup: Setup) -> Setup:
    """The setup as an experiment sees it: two are about the family of `--bpe` alone, whichever the first one is."""
    if experiment.name not in ("bpe", "precision") or setup.bpe is None:
        return setup
    return replace(setup, family=setup.bpe, text=setup.bpe_text)


def _key(experiment: Experiment, setup: Setup) -> str:
    """A hash of all that fixes what an experiment finds, but for the clock."""
    used: dict[str, list[Family | None]] = {
        "second-corpus": [setup.second],
        "training": list(setup.stages),
    }
    others = used.get(experiment.name, [])
    families = [setup.family.digest, *(family.digest if family is not None else None for family in others)]
    text = None if setup.text is None else content_key("text", setup.text[:: max(1, len(setup.text) // 4096)].tolist())
    name = experiment.name if experiment.edition == 1 else f"{experiment.name} {experiment.edition}"
    return content_key(
        name, asdict(setup.scale), families, text, str(setup.judge), setup.seed, setup.family.device.type
    )


def load(file: Path) -> dict[str, Any] | None:
    """An experiment's data; None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _rounded(value: Any) -> Any:
    """Plain JSON with seven digits, which is more than anything here means."""
    if isinstance(value, float):
        return None if not np.isfinite(value) else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {str(k): _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------ the report


def report(folder: Path, reasons: dict[str, str] | None = None) -> dict[str, Any]:
    """Write report.md, report.html, figures and tables from the data in a folder, and from the committed data where it
    has none or is incomplete."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    own = {name: load(folder / "data" / f"{name}.json") for name in NAMES}
    same = COMMITTED.parent.resolve() == folder.resolve()
    kept = {name: None if same else load(COMMITTED / f"{name}.json") for name in NAMES}
    sources = {name: source for name in NAMES if (source := own[name] or kept[name])}
    body: list[Block] = []
    shown: dict[str, str] = {}
    for experiment in EXPERIMENTS:
        name = experiment.name
        mine, theirs = own[name], kept[name]
        body.append(Heading(experiment.title))
        labels = ", ".join(f"`{label}`" for label in experiment.paper)
        body.append(Text(f"`--only {name}`. " + (f"In the paper: {labels}." if labels else "Not in the paper.")))
        if mine is not None:
            missing = mine["result"].get("missing") or []
            body.append(Text(_made(mine) + (f" Not in this family: {', '.join(missing)}." if missing else "")))
            body += SECTIONS[name](_completed(name, mine["result"]), folder / "figures")
            shown[name] = "own"
        if theirs is not None and (mine is None or mine["result"].get("missing")):
            why = f"Not run here: {reasons[name]}. " if mine is None and reasons and name in reasons else ""
            kept_text = f"**From the results kept with the project.** {_made(theirs)} Remake it: `{theirs['command']}`"
            body.append(Text(why + kept_text))
            marked = folder / "figures" / "committed"
            marked.mkdir(exist_ok=True)
            body += [_renamed(block) for block in SECTIONS[name](_completed(name, theirs["result"]), marked)]
            shown.setdefault(name, "committed")
        elif mine is None:
            why = (reasons or {}).get(name, "it was not asked for")
            body.append(Text(f"Not shown: {why}. Run `relaylm reproduce --only {name}` with what it needs."))
    if peaks := where_it_peaks({name: source["result"] for name, source in sources.items()}):
        body += [Heading("What decides where the disagreement peaks"), *peaks]
    judged = _judged(sources)
    head = _head(own, kept, shown)
    blocks = [*head, *_claims(judged, [name for name, kind in shown.items() if kind == "committed"]), *body, *_slips()]
    write(blocks, "relaylm: the paper's experiments", folder)
    return {
        "report": str(folder / "report.html"),
        "claims": [
            {"claim": v.claim.name, "verdict": v.verdict, "findings": [asdict(f) for f in v.findings]} for v in judged
        ],
        "shown": shown,
    }


def _judged(data: dict[str, dict[str, Any]]) -> list[Verdict]:
    results = {name: _completed(name, item["result"]) for name, item in data.items()}
    return verdicts(results if "time" in results else {**results, "time": _completed("time", {})})


def recorded_verdicts(folder: Path = COMMITTED) -> list[Verdict]:
    """Verdicts on the paper's claims from the data in a folder alone."""
    return _judged({name: item for name in NAMES if (item := load(folder / f"{name}.json")) is not None})


def _completed(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Where time was measured without a GPU, the paper's size comes from the recorded bench."""
    if name != "time" or result.get("paper_size") or not BENCH.is_file():
        return result
    found = json.loads(BENCH.read_text(encoding="utf-8"))
    recorded = f"recorded on one {found['machine']['gpu']}, {found['date']}: `{found['command']}`"
    return {**result, "paper_size": mdlm_experiments.paper_size(found), "recorded": recorded}


def _renamed(block: Block) -> Block:
    if isinstance(block, Table):
        return Table(f"committed-{block.name}", block.caption, block.head, block.rows)
    return block


def _made(data: dict[str, Any]) -> str:
    machine, family = data["machine"], data["family"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return (
        f"Family {family['name'] or 'unnamed'} ({', '.join(family['models'])}), scale {data['scale']['name']}, "
        f"seed {data['seed']}, {data['date']}, {where}, commit {(data['commit'] or 'unknown')[:12]}, "
        f"{data['seconds']:.0f} s." + (f" {data['note']}" if data.get("note") else "")
    )


def _head(own: dict[str, Any], kept: dict[str, Any], shown: dict[str, str]) -> list[Block]:
    first = next((data for data in [*own.values(), *kept.values()] if data is not None), None)
    lines = ["What the paper 'Not All Denoising Steps Are Equal' reports, measured again."]
    if first is not None:
        machine = first["machine"]
        made = [data for data in own.values() if data is not None] or [first]
        if len({(data["command"], data["commit"], data["date"]) for data in made}) == 1:
            lines.append(f"Command: `{first['command']}`; commit {first['commit'] or 'unknown'}; {first['date']};")
        else:
            lines.append("Experiments were run apart, and each says by which command and commit, and when;")
        lines.append(f"seed {first['seed']}; {machine['gpu'] or machine['cpu']}; torch {first['versions']['torch']}.")
    counts = [
        f"{sum(v == kind for v in shown.values())} {text}"
        for kind, text in (("own", "run here"), ("committed", "from kept results"))
    ]
    lines.append(
        f"Experiments: {', '.join(counts)}, {len(NAMES) - len(shown)} not shown. Intervals are 95%; differences of"
    )
    lines.append("log-perplexity are paired (the same random numbers in every schedule), so 0.01 is 1% of perplexity.")
    return [Heading("The paper's experiments", 1), Text(" ".join(lines))]


def _claims(judged: Sequence[Verdict], kept: Sequence[str]) -> list[Block]:
    blocks: list[Block] = [Heading("Claims and verdicts")]
    blocks.append(
        Text(
            "The criteria of the paper's claims were written before the data was there; what bpe, precision and tuner "
            "say to them was added with theirs. A finding says yes or no only where its 95% interval lies on one "
            "side, else it is open. Confirmed: all say yes; partly: some do, the others are open; not confirmed: some "
            "say no, none yes; depends: both occur. Findings are not corrected for their number: of forty about one "
            "goes astray by chance."
            + (f" Data of {', '.join(kept)} are from the results kept with the project." if kept else "")
        )
    )
    rows = []
    for verdict in judged:
        counts = {
            word: sum(f.says is says for f in verdict.findings)
            for word, says in (("yes", True), ("no", False), ("open", None))
        }
        tally = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        claim = verdict.claim
        rows.append([claim.name, f"**{verdict.verdict}**", tally, claim.criterion, claim.shown, claim.paper])
    head = ["claim", "verdict", "findings", "criterion", "see here", "in the paper"]
    blocks.append(Table("claims", "Verdicts", head, rows))
    word = {True: "yes", False: "no", None: "open"}
    rows = [[v.claim.name, f.where, word[f.says], f.evidence] for v in judged for f in v.findings]
    blocks.append(Table("findings", "What each verdict rests on", ["claim", "where", "says", "evidence"], rows))
    return blocks


def _slips() -> list[Block]:
    rows = [[slip.where, slip.says, slip.found] for slip in paper.slips()]
    text = "Recomputed from the paper's own tables and equations."
    return [Heading("The paper's own slips"), Text(text), Table("slips", "", ["where", "says", "but"], rows)]
