r"""The paper's experiments, each a plain function of a `Setup` that returns plain JSON values.

`compare` draws and judges, `importance` sets models side by side, `search` tries schedules, `bench` measures time. Here
is only which of it makes up which table or figure, how large it is at each scale, and which intervals belong to it.
Samples go through the store, so an interrupted experiment resumes.

Everything is paired: a row has the same plan under every schedule (`contrasts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.core.schedule import Schedule, Segment, Spacing
from relaylm.core.spacing import expected_calls
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.compare import compare
from relaylm.measure.importance import importance, second_seeds
from relaylm.measure.likelihood import spread_rows
from relaylm.measure.provenance import load_record
from relaylm.measure.rivals import SLACK, Entry, expected_flops, one_model, steps_within
from relaylm.measure.store import Store
from relaylm.models.family import Family
from relaylm.sampling.sample import sample
from relaylm.search.search import search
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import against, contrasts
from relaylm.studies.paper.document import Block

STRETCHES = 8  # of the time axis, in `strides`
SPARSE = 4  # there a stretch has one step where there were so many
DISTANCE = 16  # of spaced plans, where a family has no spacing of its own
FRESH = 1000  # added to the seed for rows that a search has not seen


@dataclass(frozen=True)
class Scale:
    """How large everything is. `length` None is the family's own."""

    name: str
    length: int | None
    samples: int  # of each schedule
    search_samples: int  # of each of the 210
    confirm: int  # fresh samples of the search's best
    sequences: int  # at each timestep
    timesteps: int
    shares: tuple[int, ...]  # light steps, per cent
    timed_rows: int  # of the wall-clock runs, engine and MDLM's sampler
    precision_samples: int
    precision_steps: tuple[int, ...]
    stride_samples: int
    budgets: tuple[float, ...]  # shares of the all-heavy cost to save, for the tuner
    recipe: str = "plain"  # of generative perplexity
    prefixes: tuple[int, ...] = (8, 4)  # one part in so many of a row is given
    rivals: bool = True  # of every light model and at every budget; else of the first, and the best one alone

    def settings(self) -> dict[str, Any]:
        """All numbers; `rivals` follows from the name."""
        return {key: value for key, value in asdict(self).items() if key != "rivals"}


TENTHS = tuple(range(0, 101, 10))
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5)
SMALL: dict[str, Any] = {"prefixes": (4,), "rivals": False}
SCALES = {
    "cpu": Scale("cpu", 64, 64, 16, 8, 64, 10, (0, 25, 50, 75, 100), 8, 16, (64, 256), 16, (0.2, 0.4), **SMALL),
    "gpu": Scale("gpu", None, 1600, 160, 400, 500, 20, TENTHS, 256, 64, (512,), 400, BUDGETS),
    "paper": Scale("paper", None, 1600, 160, 1600, 500, 20, TENTHS, 64, 160, (1000,), 400, BUDGETS, "mdlm"),
}


@dataclass(frozen=True)
class Setup:
    """What an experiment may use."""

    family: Family
    scale: Scale
    store: Store | None = None
    text: np.ndarray | None = None  # held-out tokens
    second: Family | None = None  # of another corpus, short rows
    second_text: np.ndarray | None = None
    bpe: Family | None = None  # with a large vocabulary
    bpe_text: np.ndarray | None = None
    bpe_twin: Family | None = None  # of the same models from another seed
    stages: tuple[Family, ...] = ()  # one pair at several stages of its training
    judge: Any = None
    seed: int = 0
    progress: bool = False
    note: Callable[[str], None] = field(default=lambda text: None)

    def length(self, family: Family | None = None) -> int:
        """Positions in a row."""
        whole = (family or self.family).length
        return min(whole, self.scale.length or whole)

    def steps(self, family: Family | None = None) -> int:
        """T: as many steps as positions, at most the paper's 1,000."""
        return min(1000, self.length(family))

    def judging(self) -> dict[str, Any]:
        """What every comparison and search has in common."""
        about = {"judge": self.judge, "recipe": self.scale.recipe, "store": self.store}
        return {**about, "progress": self.progress}


Result = dict[str, Any]


Need = tuple[str, Callable[[Setup], bool]]  # in words, and whether it is there


@dataclass(frozen=True)
class Experiment:
    """What is run, what of the paper it belongs to (its labels there), and how its result is shown. An `edition` that
    finds more than the one before makes that one's data again."""

    name: str
    title: str
    paper: str
    needs: Need
    run: Callable[[Setup], Result]
    show: Callable[[Mapping[str, Any], Path], list[Block]]
    on_tokens: bool = False  # about the family of `--bpe`, if there is one, and not the first
    others: Callable[[Setup], Sequence[Family | None]] = lambda setup: ()  # families that it uses besides
    completed: Callable[[Result, Path | None], Result] = lambda result, records: result  # from a folder of records
    edition: int = 1

    def placed(self, setup: Setup) -> Setup:
        """The setup as this experiment sees it."""
        return replace(setup, family=setup.bpe, text=setup.bpe_text) if self.on_tokens and setup.bpe else setup


def depth_of(family: Family, name: str) -> int:
    """Blocks of a model."""
    return int(getattr(family.models[name], "depth", 0))


def lights(family: Family) -> list[str]:
    """Every model but the heavy one, the smallest first."""
    return [name for name in family.names if name != family.heavy]


def judged(setup: Setup, schedules: Sequence[str | Schedule], family: Family | None = None, **options: Any) -> Result:
    """`compare` at this scale, contrasts added and single rows dropped."""
    result = compared(setup, schedules, family or setup.family, **options)
    return {**{k: v for k, v in result.items() if k not in ("samples_needed", "store_notes")}, **contrasts(result)}


def compared(setup: Setup, schedules: Sequence[str | Schedule], family: Family, **options: Any) -> Result:
    """`compare` at this scale."""
    usual = {"n": setup.scale.samples, "steps": setup.steps(family), "seed": setup.seed, **setup.judging()}
    usual |= {"length": None if "prompts" in options else setup.length(family)}
    return compare(family, schedules, **{**usual, **options})


def schedules(setup: Setup) -> Result:
    """The seven hand-made schedules at 25% light steps for each light depth, with the equal-compute rivals."""
    out = {}
    for k, light in enumerate(lights(setup.family)):
        setup.note(f"schedules with light {light}")
        out[light] = judged(setup, paper.SCHEDULES, light=light, rivals=k == 0 or setup.scale.rivals)
    depths = {light: depth_of(setup.family, light) for light in out}
    missing = [f"{d} blocks" for d in paper.DEPTHS if d != 12 and d not in depths.values()]
    return {"by_light": out, "depths": depths, "heavy": setup.family.heavy, "missing": missing}


def depths(setup: Setup) -> Result:
    """The sandwich with light models of each depth (the samples are those of `schedules`)."""
    family, heavy = setup.family, setup.family.heavy
    by_name = {f"{name}:12.5% {heavy}:75% {name}:12.5%": name for name in lights(family)}
    found = judged(setup, [*by_name, heavy], rivals=False)
    rows = []
    for row in found["rows"]:
        if row["kind"] == "asked":
            name = by_name.get(row["schedule"], heavy)
            rows.append({**row, "light": name, "depth": depth_of(family, name)})
    missing = [f"{d} blocks" for d in paper.DEPTHS if d not in [row["depth"] for row in rows]]
    return {**found, "rows": rows, "missing": missing}


def prefixes(setup: Setup) -> Result:
    """The seven schedules after a prefix of an eighth and a quarter of the row."""
    rows_nL, source = held_out_rows(setup, setup.scale.samples)
    length, out = setup.length(), {}
    for part in setup.scale.prefixes:
        given_nL = np.where(np.arange(length) < length // part, rows_nL, -1)
        setup.note(f"prefixes of {length // part}")
        out[str(length // part)] = judged(setup, paper.SCHEDULES, prompts=given_nL, rivals=False)
    return {"by_prefix": out, "source": source}


def held_out_rows(setup: Setup, n: int) -> tuple[np.ndarray, str]:
    """n rows of held-out text, or of the heavy model's own writing where there is none."""
    length = setup.length()
    if setup.text is not None:
        rows = spread_rows(setup.text, length, n)
        return rows[np.arange(n) % len(rows)], "held-out text"
    drawn = sample(setup.family, "heavy", n, steps=setup.steps(), seed=setup.seed + 1, given=np.full(length, -1))
    return drawn.tokens, "samples of the heavy model, as there is no held-out text"


def curves(setup: Setup, family: Family, text: np.ndarray | None, twin: Family | None = None) -> Result:
    """Loss difference and KL by timestep, each model against the heavy one, the twin's baseline taken off; on a
    family's own trajectories where there is no held-out text. Models of `twin` are second seeds of its own."""
    scale, length = setup.scale, setup.length(family)
    options: dict[str, Any] = {"timesteps": scale.timesteps, "sequences": scale.sequences, "progress": setup.progress}
    options |= {"states": "trajectory", "steps": setup.steps(family)} if text is None else {"states": "data"}
    twins = {} if twin is None else second_seeds(family, twin)
    found = importance(family, text, length=length, seed=setup.seed, twins=twins, **options)
    if twin is not None:
        trained = {name: (twin.meta.get("training") or {}).get(name) for name in twins}
        found["twin"] = {"name": twin.name, "digest": twin.digest, "training": trained}
    missing = [] if family.heavy in {**family.twins, **twins} else ["a twin of the heavy model"]
    return {**found, "missing": missing if text is not None else [*missing, "held-out text"]}


def second_corpus(setup: Setup) -> Result:
    """Schedules and KL on another corpus with short rows, as the paper does with LM1B."""
    assert setup.second is not None
    return {
        "schedules": judged(setup, paper.SCHEDULES, setup.second),
        "disagreement": curves(setup, setup.second, setup.second_text),
    }


def bpe(setup: Setup) -> Result:
    """Schedules, KL and shares with a large vocabulary; `setup.family` is the one of `--bpe` here."""
    kl = curves(setup, setup.family, setup.text, setup.bpe_twin)
    return {"schedules": schedules(setup), "disagreement": kl, "shares": by_share(setup, setup.scale.samples // 2)}


def with_searches(result: Result, records: Path | None) -> Result:
    """The 210 placements and the tuner of the same models, where they are among the records."""
    about = result.get("disagreement", {}).get("family", {})
    for key, end in (("search", "-210"), ("tuner", "")):
        found = load_record(records / "search" / f"{about.get('name')}{end}.json" if records is not None else None)
        if found is not None and "steps" in found and found["family"]["digest"] == about["digest"]:
            result = {**result, key: found}
    return result


def by_share(setup: Setup, n: int) -> Result:
    """The sandwich with more and more light steps."""
    names = {share: {0: "heavy", 100: "light"}.get(share, f"sandwich:{share}%") for share in setup.scale.shares}
    found = judged(setup, list(names.values()), n=n, rivals=False)
    return {**found, "shares": list(names), "labels": list(names.values())}


def training(setup: Setup) -> Result:
    """Where the disagreement of one pair peaks at several stages of its training."""
    stages = []
    for family in setup.stages:
        found = curves(setup, family, setup.text)
        pair = found["pairs"][0]
        tokens = (family.meta.get("training") or {}).get(pair["heavy"], {}).get("tokens")
        stages.append({"family": family.name, "tokens": tokens, "twin": not found["missing"], "pair": pair})
    return {"stages": sorted(stages, key=lambda stage: stage["tokens"] or 0)}


def strides(setup: Setup) -> Result:
    """Which steps tolerate a smaller model, and which a larger stride: one stretch of time at a time, either the light
    model there or the heavy one in a quarter of the steps."""
    steps, n = setup.steps(), setup.scale.stride_samples
    edges = [round(steps * j / STRETCHES) for j in range(STRETCHES + 1)]
    tried: dict[str, tuple[str, int]] = {}
    heavy, out = f"H{steps}", []
    for j, (start, stop) in enumerate(pairwise(edges)):
        here = stop - start
        for kind, model, count in (("light", "L", here), ("stride", "H", max(1, here // SPARSE))):
            parts = [("H", start, start), (model, count, here), ("H", steps - stop, steps - stop)]
            segments = (Segment(name, k, Fraction(width, steps)) for name, k, width in parts if k)
            tried[str(Schedule(tuple(segments)).bind(*setup.family.roles()))] = (kind, j)
    found = judged(setup, [heavy, *tried], n=n, steps=None, rivals=False)
    saved = {row["schedule"]: row["flops_saved"] for row in found["rows"]}
    for text, (kind, j) in tried.items():
        span = {"from": 1 - edges[j] / steps, "to": 1 - edges[j + 1] / steps, "flops_saved": saved[text]}
        out.append({"kind": kind, "stretch": j, **span, **loss(found, text, heavy)})
    return {"stretches": STRETCHES, "sparse": SPARSE, "n": n, "steps": steps, "rows": out}


def spaced(setup: Setup) -> Result:
    """The seven schedules on spaced plans, and the light model in one stretch of time, for each family there is."""
    families = list({id(family): family for family in (setup.family, setup.bpe) if family is not None}.values())
    return {"families": [on_spaced_plans(setup, family) for family in families if len(family.names) > 1]}


def on_spaced_plans(setup: Setup, family: Family) -> Result:
    """The same of one family, at its own spacing. The anchors of the comparison take as many uniform steps as a spaced
    row takes calls, so that they cost little."""
    length, (light, heavy) = setup.length(family), family.roles()
    spacing = spacing_of(family, length)
    setup.note(f"{spacing} of {family.name}")
    eighth, tried = Fraction(1, STRETCHES), {}
    for j in range(STRETCHES):
        parts = [("H", j * eighth), ("L", eighth), ("H", (STRETCHES - 1 - j) * eighth)]
        alone = Schedule(tuple(Segment(name, share) for name, share in parts if share)).bind(light, heavy)
        tried[str(alone)] = j
    names = {f"{name} {spacing}": name for name in (*paper.SCHEDULES, *tried)}
    steps = max(1, round(expected_calls(length, spacing)))
    found = compared(setup, list(names), family, steps=steps, rivals=False)
    rows = [{**row, "schedule": names[row["schedule"]]} for row in found["rows"] if row["kind"] == "asked"]
    shown = contrasts({"rows": rows}, {"stretches_middle_minus_ends": list(tried)})
    stretches = []
    for row in shown["rows"]:
        if row["schedule"] in tried:
            j = tried[row["schedule"]]
            span = {"from": 1 - j / STRETCHES, "to": 1 - (j + 1) / STRETCHES, "flops_saved": row["flops_saved"]}
            stretches.append({"kind": "light", "stretch": j, **span, **loss(shown, row["schedule"], "heavy")})
    return {
        **{key: found[key] for key in ("n", "length", "seed", "light", "heavy", "judge", "recipe")},
        **{"family": family.name, "spacing": str(spacing), "calls": rows[-1]["calls"] / found["n"]},
        **{key: value for key, value in shown.items() if key.endswith("middle_minus_ends")},
        "contrasts": [pair for pair in shown["contrasts"] if not {pair["first"], pair["second"]} & set(tried)],
        "rows": [row for row in shown["rows"] if row["schedule"] not in tried],
        **{"stretches": STRETCHES, "by_stretch": stretches},
    }


def loss(found: Result, name: str, other: str) -> Result:
    """What one schedule loses against another, with its interval."""
    value, low, high = (metrics.finite(v) for v in against(found["contrasts"], name, other))
    return {"loss": value, "ci": [low, high]}


def spacing_of(family: Family, length: int) -> Spacing:
    """The family's own spacing for this length, else a usual one; below the length."""
    chosen = family.spacing(length) or Spacing(min(DISTANCE, length // 4))
    return replace(chosen, distance=max(1, min(chosen.distance, length - 1)))


def all_210(setup: Setup) -> Result:
    """Every placement of four light segments of ten, the best again on fresh samples."""
    found = _search(setup, "exhaustive", light_segments=4, n=setup.scale.search_samples, confirm=setup.scale.confirm)
    keep = ("name", "ppl", "ppl_ci", "log_ppl", "saved")
    return {**found, "schedules": [{key: row[key] for key in keep} for row in found["schedules"]]}


def tuner(setup: Setup) -> Result:
    """What the tuner finds at each budget (models, steps and their density), beside the equal-compute rivals.

    What a search confirms has few rows, some of which chose. So the few schedules that matter at each budget, and
    all-heavy, are judged once more, on as many rows as anything here and on random numbers of their own (`fresh`)."""
    found = _search(setup, "tune", budget=list(setup.scale.budgets), rows=21 * setup.scale.search_samples)
    rows = finalists(setup, found)
    if not rows:
        return found
    heavy = f"{found['heavy']}:{found['steps']}"
    chosen = list(dict.fromkeys([heavy, *(row["schedule"] for row in rows)]))
    setup.note(f"tuner: {len(chosen)} schedules on fresh rows")
    # With steps None each schedule takes its own number, and the first, all-heavy, gives that of the anchors.
    judged_again = judged(setup, chosen, steps=None, rivals=False, seed=setup.seed + FRESH)
    by = {row["schedule"]: row for row in judged_again["rows"]}
    figures = ("gen_ppl", "gen_ppl_ci", "entropy", "entropy_ci")
    fresh = {key: judged_again[key] for key in ("n", "seed", "steps", "length", "judge", "recipe", "contrasts")}
    rows = [{**row, **{key: by[row["schedule"]][key] for key in figures}} for row in rows]
    return {**found, "fresh": {**fresh, "heavy": heavy, "rows": rows}}


def finalists(setup: Setup, found: Mapping[str, Any]) -> list[Result]:
    """Of each budget: what the search recommends, the sandwich, single models in as many steps as the budget allows,
    and the best mixture that it measured. Without `rivals`, of the last two the best single model alone."""
    out = []
    names: dict[Any, str] = {}  # of schedules that do the same, the first one's
    for goal in found.get("front", []):
        limit = goal["limit"] * (1 + SLACK)
        within = [row for row in found["confirmed"] if row["price"] <= limit]
        best = sorted(within, key=lambda row: row["against_heavy"]["difference"])
        sandwich = max((row for row in within if row["what"] == "sandwich"), key=lambda row: row["price"], default=None)
        mixture = next((row for row in best if row["kind"] == "mixed"), None)
        single = next((row for row in best if row["kind"] == "rival" and row["what"] != "sandwich"), None)
        others = [*_single_models(setup, found, limit), mixture] if setup.scale.rivals else [single]
        unique = {_identity(row): row for row in [goal, sandwich, *others] if row is not None}
        for same, row in unique.items():
            about = {"budget": goal["saved_at_least"], "schedule": names.setdefault(same, row["schedule"])}
            about |= {key: row[key] for key in ("what", "kind", "steps", "saved")}
            out.append({**about, "recommended": same == _identity(goal)})
    return out


def _identity(row: Mapping[str, Any]) -> Any:
    return Entry("", Schedule.parse(row["schedule"]), row["steps"], "asked").identity


def _single_models(setup: Setup, found: Mapping[str, Any], limit: float) -> list[Result]:
    """From the heavy model down, each alone in as many steps as a limit allows, to the first that may take all."""
    steps, free_n, rows = int(found["steps"]), np.array([found["length"]]), []
    for name in found["models"][::-1]:
        alone = one_model(name)
        price = partial(expected_flops, setup.family.models, alone, free_n=free_n, length=found["length"])
        if (count := steps_within(price, limit, most=steps)) is not None:
            what = f"{name} alone" + (f" in {count} steps" if count < steps else "")
            about = {"what": what, "kind": "rival", "schedule": f"{name}:{count}", "steps": count}
            rows.append({**about, "saved": 1 - price(count) / found["all_heavy_price"]})
        if count == steps:
            break
    return rows


def _search(setup: Setup, method: str, **options: Any) -> Result:
    """A search that is stopped by Ctrl-C shows its best so far; an experiment is done or not done."""
    setup.note(f"search: {method}")
    about = {"steps": setup.steps(), "length": setup.length(), "seed": setup.seed, **setup.judging()}
    try:
        found = search(setup.family, method, **about, **options)
    except UserError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if found["stopped"] is not None:
        raise KeyboardInterrupt
    return found
