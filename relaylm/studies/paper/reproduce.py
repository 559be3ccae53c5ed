"""`relaylm reproduce`: the paper's experiments on a family, and one report with a verdict on each of its claims.

Every experiment leaves `data/NAME.json` in the output folder, whole or not at all, with the command, seed, machine and
commit; one that is there for the same settings is not run again, and within an experiment samples come from the store.
So an interrupted run resumes. `report` makes the report from these files alone.

What a family cannot show (a depth, a twin, a second corpus) is shown from the project's records, if a folder of them is
given, marked as such with the command that remakes it, or said to be missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.errors import UserError
from relaylm.files import expand, write_json
from relaylm.measure.estimate import announce_samples
from relaylm.measure.likelihood import held_out
from relaylm.measure.provenance import how_made, load_record, records_folder
from relaylm.measure.store import Store, content_key
from relaylm.models.family import Family
from relaylm.studies.paper import experiments as ours
from relaylm.studies.paper import mdlm_experiments as mdlm
from relaylm.studies.paper import model_sections as models
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper import schedule_sections as show
from relaylm.studies.paper.claims import WORDS, Verdict, verdicts
from relaylm.studies.paper.document import Block, Board, Folded, Table, write
from relaylm.studies.paper.experiments import SCALES, Experiment, Need, Scale, Setup

FORMAT = 1  # of an experiment's data
Data = dict[str, Any]


TWO: Need = ("a family of at least two models", lambda setup: len(setup.family.names) > 1)
SECOND: Need = ("a family of a second corpus (--second)", lambda setup: setup.second is not None)
TOKENS: Need = ("a family with a large vocabulary (--bpe)", lambda setup: setup.bpe is not None)
MANY_TOKENS: Need = (
    "a family with a large vocabulary (--bpe): with few symbols float32 cuts nothing off",
    lambda setup: setup.bpe is not None or setup.family.vocab_size > 1000,
)
STAGES: Need = ("the same pair at two or more stages of training (--stages)", lambda setup: len(setup.stages) > 1)
SEVEN = f"fig:12b-4b-barplot-perplexity {paper.OWT} app:more_configs"
SEARCH = "fig:best_worst_barplot fig:top20config_barplot fig:bottom20config_barplot fig:per_segment_ppl_barplot"

# fmt: off
EXPERIMENTS = (
    Experiment("schedules", "Hand-made schedules with 25% light steps", SEVEN, TWO, ours.schedules, show.schedules),
    Experiment("search", "All 210 placements of 40% light steps", SEARCH, TWO, ours.all_210, show.search),
    Experiment("depths", "The light model's depth", "tab:scaling_models", TWO, ours.depths, show.depths),
    Experiment("shares", "The share of light steps", "tab:scaling_steps", TWO, mdlm.shares, show.shares),
    Experiment("time", "Where the time goes", "sec:scaling", TWO, mdlm.where_time_goes, models.time,
               completed=mdlm.with_paper_size),
    Experiment("prefixes", "Prefix-conditional generation", f"{paper.PREFIX_128} {paper.PREFIX_256}", TWO,
               ours.prefixes, show.prefixes),
    Experiment("disagreement", "Disagreement of models by timestep", "fig:loss_diff fig:kldiv-plot", TWO,
               lambda setup: ours.curves(setup, setup.family, setup.text), models.disagreement),
    Experiment("second-corpus", "A second corpus, short rows", f"{paper.LM1B} fig:lm1b-kldiv-plot", SECOND,
               ours.second_corpus, models.second_corpus, others=lambda setup: (setup.second,)),
    Experiment("bpe", "Tokens in place of characters", "", TOKENS, ours.bpe, models.bpe, on_tokens=True, edition=2,
               others=lambda setup: (setup.bpe_twin,), completed=ours.with_searches),
    Experiment("precision", "Exact sampling against MDLM's float32 sampler", "", MANY_TOKENS, mdlm.precision,
               models.precision, on_tokens=True, edition=2),
    Experiment("strides", "Larger strides beside smaller models", "", TWO, ours.strides, show.strides),
    Experiment("spaced", "The schedules on spaced plans", "", TWO, ours.spaced, show.spaced,
               others=lambda setup: (setup.bpe,)),
    Experiment("tuner", "What the tuner finds", "", TWO, ours.tuner, show.tuner, edition=3),
    Experiment("training", "How importance moves with training", "", STAGES, ours.training, models.training,
               others=lambda setup: setup.stages),
)
# fmt: on
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
    bpe_twin: Family | None = None,
    stages: Sequence[Family] = (),
    judge: Any = None,
    seed: int = 0,
    records: str | Path | None = None,
    progress: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the experiments (or `only` some), write the report to `out`, and return what was done and the verdicts.

    `scale` is cpu, gpu or paper. `text` is a file of held-out text (default: heldout.txt in the family's folder, if
    there is one). `second`, `bpe` and `stages` are the families that some experiments need beside the first, `bpe_twin`
    has models of `bpe` from another seed. `records` is a folder of earlier results (default: `results` in the current
    folder, if it is there). An experiment that fails is noted in the report, the others go on, and an error is raised
    at the end."""
    if isinstance(scale, str):
        if scale not in SCALES:
            raise UserError(f"{scale!r} is not a scale: choose {', '.join(SCALES)}")
        scale = SCALES[scale]
    if unknown := [name for name in only or () if name not in NAMES]:
        raise UserError(f"{unknown[0]!r} is not an experiment: choose from {', '.join(NAMES)}")
    if (kept := records_folder(records)) is None:
        note("no records of earlier results (--records): what this family cannot show is left out of the report")
    folder = expand(out)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    keep = Store(expand(store) if store is not None else folder / "store") if family.digest else None
    others: dict[str, Any] = {"second": second, "bpe": bpe, "bpe_twin": bpe_twin, "stages": tuple(stages)}
    texts: dict[str, Any] = {
        "text": held_out(family, text),
        "second_text": held_out(second, None),
        "bpe_text": held_out(bpe, None),
    }
    setup = Setup(family, scale, keep, **others, **texts, judge=judge, seed=seed, progress=progress, note=note)
    done: dict[str, Data] = {}
    chosen = [experiment for experiment in EXPERIMENTS if only is None or experiment.name in only]
    if progress:
        due = [e.name for e in chosen if e.needs[1](setup) and not _known(e, e.placed(setup), folder)]
        work = _samples(setup)
        announce_samples(family, sum(work[name] for name in due), setup.length(), "--only NAME runs one experiment")
    try:
        for experiment in chosen:
            done[experiment.name] = _run(experiment, setup, folder)
    finally:
        # Also after Ctrl-C: what is there is shown.
        found = report(folder, {name: item["reason"] for name, item in done.items() if "reason" in item}, kept)
    failed = [f"{name} ({item['reason']})" for name, item in done.items() if item["status"] == "failed"]
    if failed:
        raise RuntimeError(f"failed: {'; '.join(failed)}. The rest is in {folder / 'report.html'}")
    return {"out": str(folder), "scale": scale.settings(), "experiments": done, **found}


def _run(experiment: Experiment, setup: Setup, folder: Path) -> Data:
    """One experiment, unless it is there already; its data goes to a file."""
    what, there = experiment.needs
    if not there(setup):
        return {"status": "not run", "reason": f"it needs {what}"}
    setup = experiment.placed(setup)
    if (known := _known(experiment, setup, folder)) is not None:
        return {"status": "kept", "seconds": known["seconds"]}
    setup.note(f"{experiment.name}: {experiment.title}")
    began = time.perf_counter()
    try:
        result = experiment.run(setup)
    except UserError as error:
        return {"status": "not run", "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    seconds = time.perf_counter() - began
    about = {
        "format": FORMAT,
        "experiment": experiment.name,
        "key": _key(experiment, setup),
        "scale": setup.scale.settings(),
        "family": {"name": setup.family.name, "digest": setup.family.digest, "models": list(setup.family.names)},
        "seed": setup.seed,
        **how_made(setup.family.device),
        "seconds": seconds,
    }
    write_json(folder / "data" / f"{experiment.name}.json", {**about, "result": _rounded(result)})
    return {"status": "ran", "seconds": seconds}


def _known(experiment: Experiment, setup: Setup, folder: Path) -> Data | None:
    """The data of an experiment that was run with these settings before."""
    known = load(folder / "data" / f"{experiment.name}.json")
    return known if known is not None and known.get("key") == _key(experiment, setup) else None


def _samples(setup: Setup) -> dict[str, int]:
    """About how many samples of the heavy model each experiment is worth, for an estimate of its time."""
    scale, lighter = setup.scale, len(setup.family.names) - 1
    seven, curves = scale.samples * (7 * lighter + 4), scale.sequences // 2
    return {
        "schedules": seven,
        "search": 210 * scale.search_samples // 6 + scale.confirm,
        "depths": 0,  # they are among those of the schedules
        "shares": scale.samples * len(scale.shares),
        "time": 4 * scale.timed_rows,
        "prefixes": 7 * scale.samples * len(scale.prefixes),
        "disagreement": curves,
        "second-corpus": seven + curves,
        "bpe": seven + curves + scale.samples // 2 * len(scale.shares),
        "precision": scale.precision_samples * sum(scale.precision_steps) // setup.length(),
        "strides": 17 * scale.stride_samples,
        "spaced": 4 * scale.samples,  # seventeen schedules in far fewer calls
        "tuner": 21 * scale.search_samples + 8 * scale.samples,
        "training": curves * len(setup.stages),
    }


def _key(experiment: Experiment, setup: Setup) -> str:
    """A hash of all that fixes what an experiment finds, but for the clock."""
    families = [family.digest if family is not None else None for family in (setup.family, *experiment.others(setup))]
    texts = [_text_key(setup.text)]
    if setup.second_text is not None and any(family is setup.second for family in experiment.others(setup)):
        texts.append(_text_key(setup.second_text))
    text = texts[0] if len(texts) == 1 else texts
    name = experiment.name if experiment.edition == 1 else f"{experiment.name} {experiment.edition}"
    scale, device = setup.scale.settings(), setup.family.device.type
    return content_key(name, scale, families, text, str(setup.judge), setup.seed, device)


def _text_key(tokens_N: np.ndarray | None) -> str | None:
    return None if tokens_N is None else content_key("text", tokens_N[:: max(1, len(tokens_N) // 4096)].tolist())


def load(file: Path) -> Data | None:
    """An experiment's data; None where there is none that can be read."""
    found = load_record(file)
    return found if found is not None and found.get("format") == FORMAT else None


def load_all(folder: Path | None) -> dict[str, Data]:
    """The data of the experiments in a folder, by name."""
    files = {} if folder is None else {name: load(folder / "data" / f"{name}.json") for name in NAMES}
    return {name: data for name, data in files.items() if data is not None}


def _rounded(value: Any) -> Any:
    """Plain JSON with seven digits, which is more than anything here means."""
    if isinstance(value, float):
        return None if not np.isfinite(value) else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {str(k): _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------ the report


def report(folder: Path, reasons: dict[str, str] | None = None, records: Path | None = None) -> dict[str, Any]:
    """Write report.md, report.html, figures and tables from the data in a folder, and from the records' where it has
    none or is incomplete. `reasons` says of experiments why they were not run."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    same = records is None or (records / "reproduce").resolve() == folder.resolve()
    own, kept = load_all(folder), {} if same or records is None else load_all(records / "reproduce")
    body: list[Block] = []
    shown: dict[str, str] = {}
    for experiment in EXPERIMENTS:
        name, labels = experiment.name, ", ".join(experiment.paper.split())
        body += [f"## {experiment.title}", f"In the paper: {labels}." if labels else "Not in the paper."]
        missing, why = [], (reasons or {}).get(name)
        if name in own:
            if missing := own[name]["result"].get("missing", []):
                body.append(f"Not in this family: {', '.join(missing)}.")
            body += experiment.show(experiment.completed(own[name]["result"], records), folder / "figures")
            body.append(Folded("How it was made", f"`relaylm reproduce --only {name}`. {_made(own[name])}"))
            shown[name] = "own"
        if name in kept and (name not in own or missing):
            before = f"Not run here: {why}. " if why and name not in own else ""
            before += f"**From the results kept with the project.** {_made(kept[name])}"
            body.append(f"{before} Remake it: `{kept[name]['command']}`")
            marked = folder / "figures" / "committed"
            marked.mkdir(exist_ok=True)
            blocks = experiment.show(experiment.completed(kept[name]["result"], records), marked)
            body += [replace(b, name=f"committed-{b.name}") if isinstance(b, Table) else b for b in blocks]
            shown.setdefault(name, "committed")
        elif name not in own:
            why = why or "it was not asked for"
            body.append(f"Not shown: {why}. Run `relaylm reproduce --only {name}` with what it needs.")
    sources = {**kept, **own}
    if peaks := models.where_it_peaks({name: source["result"] for name, source in sources.items()}):
        body += ["## What decides where the disagreement peaks", *peaks]
    judged = judge_all(sources, records)
    committed = [name for name, kind in shown.items() if kind == "committed"]
    blocks = [*_head(own, kept, shown), *_claims(judged, committed), *body, *_slips()]
    write(blocks, "relaylm: the paper's experiments", folder, paper.named)
    claims = [
        {"claim": v.claim.name, "verdict": v.verdict, "findings": [asdict(f) for f in v.findings]} for v in judged
    ]
    return {"report": str(folder / "report.html"), "claims": claims, "shown": shown}


def judge_all(data: dict[str, Data], records: Path | None = None) -> list[Verdict]:
    """Verdicts on the paper's claims from experiments' data, completed from the records."""
    results = {e.name: e.completed(data.get(e.name, {}).get("result", {}), records) for e in EXPERIMENTS}
    return verdicts({name: result for name, result in results.items() if result})


def _made(data: Data) -> str:
    machine, family = data["machine"], data["family"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return (
        f"Family {family['name'] or 'unnamed'} ({', '.join(family['models'])}), scale {data['scale']['name']}, "
        f"seed {data['seed']}, {data['date']}, {where}, commit {(data['commit'] or 'unknown')[:12]}, "
        f"{data['seconds']:.0f} s." + (f" {data['note']}" if data.get("note") else "")
    )


def _head(own: dict[str, Data], kept: dict[str, Data], shown: dict[str, str]) -> list[Block]:
    text = "What the paper 'Not All Denoising Steps Are Equal' reports, measured again. "
    if made := list(own.values()) or list(kept.values())[:1]:
        first, machine = made[0], made[0]["machine"]
        if len({(data["command"], data["commit"], data["date"]) for data in made}) == 1:
            text += f"Command: `{first['command']}`; commit {first['commit'] or 'unknown'}; {first['date']}; "
        else:
            text += "Experiments were run apart, and each says by which command and commit, and when; "
        text += f"seed {first['seed']}; {machine['gpu'] or machine['cpu']}; torch {first['versions']['torch']}. "
    here, recorded = (list(shown.values()).count(kind) for kind in ("own", "committed"))
    text += f"Experiments: {here} run here, {recorded} from kept results, {len(NAMES) - len(shown)} not shown. "
    text += "Intervals are 95%; differences of log-perplexity are paired (the same random numbers in every schedule), "
    return ["# The paper's experiments", f"{text}so 0.01 is 1% of perplexity."]


def _claims(judged: Sequence[Verdict], kept: Sequence[str]) -> list[Block]:
    text = (
        "The criteria of the paper's claims were written before the data was there; what bpe, precision and tuner "
        "say to them was added with theirs. A finding says yes or no only where its 95% interval lies on one "
        "side, else it is open. Confirmed: all say yes; partly: some do, the others are open; not confirmed: some "
        "say no, none yes; depends: both occur. Findings are not corrected for their number: of forty about one "
        "is wrong by chance."
    )
    rows = [
        {"claim": v.claim.name, "verdict": f"**{v.verdict}**", "findings": v.tally, "criterion": v.claim.criterion}
        | {"see here": v.claim.shown, "in the paper": v.claim.paper}
        for v in judged
    ]
    found = [[v.claim.name, f.where, WORDS[f.says], f.evidence] for v in judged for f in v.findings]
    return [
        "## Claims and verdicts",
        *([f"Data of {', '.join(kept)} are from the results kept with the project."] if kept else []),
        Board(
            Table.of("claims", "Verdicts", rows),
            Table("findings", "What each verdict rests on", ["claim", "where", "says", "evidence"], found),
            {experiment.name: experiment.title for experiment in EXPERIMENTS},
        ),
        Folded("How verdicts are reached", text),
    ]


def _slips() -> list[Block]:
    rows = [{"where": slip.where, "says": slip.says, "but": slip.found} for slip in paper.slips()]
    text = "Recomputed from the paper's own tables and equations."
    return ["## The paper's own slips", text, Table.of("slips", "Statements and what the numbers give", rows)]
