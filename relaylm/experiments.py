r"""The paper's experiments, each a plain function of a `Setup` that returns plain JSON values.

They stand on what the other rooms do: `comparison` draws and judges, `importance` sets models side by side, `search`
tries schedules, `bench` holds the clock. Here is only which of it makes up which table or figure, how large it is at
each scale, and what can be said of it with intervals. Samples go through the store, so an interrupted experiment goes
on where it was.

Everything is paired: a row has the same plan under every schedule. `contrasts` keeps what later verdicts need of that
(differences of log-perplexity between any two schedules, with 95% intervals) before the rows themselves are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm import metrics, paper
from relaylm.bound import spread_rows
from relaylm.comparison import compare
from relaylm.contenders import SLACK, Entry, expected_flops, one_model, steps_within
from relaylm.errors import UserError
from relaylm.importance import importance
from relaylm.sampler import sample
from relaylm.schedule import Schedule, Segment

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.store import Store

STRETCHES = 8  # of the time axis, in `strides`
SPARSE = 4  # there a stretch has one step where there were so many
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


SCALES = {
    "cpu": Scale("cpu", 64, 64, 16, 8, 64, 10, (0, 25, 50, 75, 100), 8, 16, (64, 256), 16, (0.2, 0.4), prefixes=(4,)),
    "gpu": Scale(
        "gpu", None, 1600, 160, 400, 500, 20, tuple(range(0, 101, 10)), 256, 64, (256, 1024, 2048), 400,
        (0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "paper": Scale(
        "paper", None, 1600, 160, 1600, 500, 20, tuple(range(0, 101, 10)), 64, 160, (1000,), 400,
        (0.1, 0.2, 0.3, 0.4, 0.5), "mdlm",
    ),
}  # fmt: skip


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
    stages: tuple[Family, ...] = ()  # one pair at several stages of its training
    judge: Any = None
    seed: int = 0
    progress: bool = False
    note: Callable[[str], None] = field(default=lambda text: None)

    def length(self, family: Family | None = None) -> int:
        whole = (family or self.family).length
        return min(whole, self.scale.length or whole)

    def steps(self, family: Family | None = None) -> int:
        """T: as many steps as positions, at most the paper's 1,000."""
        return min(1000, self.length(family))


@dataclass(frozen=True)
class Experiment:
    """`needs` says in a few words what is missing for it, or None; `paper` lists labels of the paper. An `edition` that
    finds more than the one before makes data of that one again."""

    name: str
    title: str
    paper: tuple[str, ...]
    needs: Callable[[Setup], str | None]
    run: Callable[[Setup], dict[str, Any]]
    edition: int = 1


# ------------------------------------------------------------------------------------------------ comparisons


def depth_of(family: Family, name: str) -> int:
    return int(getattr(family.models[name], "depth", 0))


def lights(family: Family) -> list[str]:
    """Every model but the heavy one, the smallest first."""
    return [name for name in family.names if name != family.heavy]


def judged(setup: Setup, schedules: Sequence[str | Schedule], family: Family | None = None, **options: Any) -> Any:
    """`compare` at this scale, contrasts added and single rows dropped."""
    chosen = family or setup.family
    given = "prompts" in options
    result = compare(
        chosen,
        schedules,
        options.pop("n", setup.scale.samples),
        steps=options.pop("steps", setup.steps(chosen)),
        length=None if given else setup.length(chosen),
        seed=options.pop("seed", setup.seed),
        judge=setup.judge,
        recipe=setup.scale.recipe,
        store=setup.store,
        progress=setup.progress,
        **options,
    )
    return {**{k: v for k, v in result.items() if k not in ("samples_needed", "store_notes")}, **contrasts(result)}


def contrasts(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the single samples: each pair of schedules that were asked for, and the middle of the trajectory
    against its ends. Differences are in mean log-perplexity; `rows` come back without their single values."""
    log_by = {row["schedule"]: numbers(row["log_ppls"]) for row in result["rows"]}
    asked = [row["schedule"] for row in result["rows"] if row["kind"] == "asked"]
    pairs = [
        {"first": a, "second": b, **_difference(log_by[a] - log_by[b])} for a, b in combinations(asked, 2)
    ]  # fmt: skip
    out: dict[str, Any] = {"contrasts": pairs}
    quarters = [f"quarter:{k}" for k in (1, 2, 3, 4)]
    if set(quarters) <= set(asked):
        q1, q2, q3, q4 = (log_by[name] for name in quarters)
        out["middle_minus_ends"] = _difference((q2 + q3) / 2 - (q1 + q4) / 2)
    out["rows"] = [{k: v for k, v in row.items() if k != "log_ppls"} for row in result["rows"]]
    return out


def _difference(d_n: np.ndarray) -> dict[str, Any]:
    d = d_n[np.isfinite(d_n)]
    if len(d) < 2:
        return {"difference": None, "ci": [None, None], "error": None, "rows": len(d)}
    mean, low, high = (float(v) for v in metrics.mean_interval(d))
    error = float(d.std(ddof=1)) / math.sqrt(len(d))
    return {"difference": mean, "ci": [metrics.finite(low), metrics.finite(high)], "error": error, "rows": len(d)}


def numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values])


def schedules(setup: Setup) -> dict[str, Any]:
    """The seven hand-made schedules at 25% light steps for each light depth, with the equal-compute rivals."""
    out = {}
    for k, light in enumerate(lights(setup.family)):
        setup.note(f"schedules with light {light}")
        out[light] = judged(setup, paper.SCHEDULES, light=light, rivals=k == 0 or setup.scale.name != "cpu")
    depths = {light: depth_of(setup.family, light) for light in out}
    missing = [f"{d} blocks" for d in paper.DEPTHS if d != 12 and d not in depths.values()]
    return {"by_light": out, "depths": depths, "heavy": setup.family.heavy, "missing": missing}


def depths(setup: Setup) -> dict[str, Any]:
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


def prefixes(setup: Setup) -> dict[str, Any]:
    """The seven schedules after a prefix of an eighth and a quarter of the row."""
    family, length, n = setup.family, setup.length(), setup.scale.samples
    rows_nL, source = held_out_rows(setup, family, setup.text, n)
    out = {}
    for part in setup.scale.prefixes:
        given_nL = np.where(np.arange(length) < length // part, rows_nL, -1)
        setup.note(f"prefixes of {length // part}")
        out[str(length // part)] = judged(setup, paper.SCHEDULES, prompts=given_nL, rivals=False)
    return {"by_prefix": out, "source": source}


def held_out_rows(setup: Setup, family: Family, text: np.ndarray | None, n: int) -> tuple[np.ndarray, str]:
    """n rows of held-out text, or of the heavy model's own writing where there is none."""
    length = setup.length(family)
    if text is not None:
        rows = spread_rows(text, length, n)
        return rows[np.arange(n) % len(rows)], "held-out text"
    drawn = sample(family, "heavy", n, steps=setup.steps(family), seed=setup.seed + 1, given=np.full(length, -1))
    return drawn.tokens, "samples of the heavy model, for want of a held-out text"


# ------------------------------------------------------------------------------------------------ disagreement


def disagreement(setup: Setup) -> dict[str, Any]:
    """Loss difference and KL by timestep, each model against the heavy one, the twin's baseline taken off."""
    return curves(setup, setup.family, setup.text)


def curves(setup: Setup, family: Family, text: np.ndarray | None) -> dict[str, Any]:
    found = importance(
        family,
        text,
        states="data" if text is not None else "trajectory",
        timesteps=setup.scale.timesteps,
        sequences=setup.scale.sequences,
        length=setup.length(family),
        steps=setup.steps(family) if text is None else None,
        seed=setup.seed,
        progress=setup.progress,
    )
    missing = [] if family.heavy in family.twins else ["a twin of the heavy model"]
    return {**found, "missing": missing if text is not None else [*missing, "held-out text"]}


def second_corpus(setup: Setup) -> dict[str, Any]:
    """Schedules and KL on another corpus with short rows, as the paper does with LM1B."""
    assert setup.second is not None
    return {
        "schedules": judged(setup, paper.SCHEDULES, setup.second),
        "disagreement": curves(setup, setup.second, setup.second_text),
    }


def bpe(setup: Setup) -> dict[str, Any]:
    """Schedules and KL with a large vocabulary; `setup.family` is the one of `--bpe` here (`reproduce.placed`)."""
    return {"schedules": schedules(setup), "disagreement": disagreement(setup)}


def training(setup: Setup) -> dict[str, Any]:
    """Where the disagreement of one pair peaks at several stages of its training."""
    stages = []
    for family in setup.stages:
        found = curves(setup, family, setup.text)
        pair = found["pairs"][0]
        tokens = (family.meta.get("training") or {}).get(pair["heavy"], {}).get("tokens")
        stages.append({"family": family.name, "tokens": tokens, "twin": not found["missing"], "pair": pair})
    return {"stages": sorted(stages, key=lambda stage: stage["tokens"] or 0)}


# ------------------------------------------------------------------------------------------------ strides


def strides(setup: Setup) -> dict[str, Any]:
    """Which steps tolerate a smaller model, and which a larger stride: one stretch of time at a time, either the light
    model there or the heavy one in a quarter of the steps."""
    steps, n = setup.steps(), setup.scale.stride_samples
    edges = [round(steps * j / STRETCHES) for j in range(STRETCHES + 1)]
    tried: dict[str, tuple[str, int]] = {}
    chosen: list[str | Schedule] = [f"H{steps}"]
    for j, (start, stop) in enumerate(pairwise(edges)):
        here = stop - start
        for kind, model, count in (("light", "L", here), ("stride", "H", max(1, here // SPARSE))):
            parts = [("H", start, start), (model, count, here), ("H", steps - stop, steps - stop)]
            segments = (Segment(name, k, Fraction(width, steps)) for name, k, width in parts if k)
            schedule = Schedule(tuple(segments))
            tried[str(schedule.bind(*setup.family.roles()))] = (kind, j)
            chosen.append(schedule.bind(*setup.family.roles()))
    found = judged(setup, chosen, n=n, steps=None, rivals=False)
    heavy = f"H{steps}"
    by = {pair["second"]: pair for pair in found["contrasts"] if pair["first"] == heavy}
    rows = {row["schedule"]: row for row in found["rows"]}
    out = [
        {
            "kind": kind,
            "stretch": j,
            "from": 1 - edges[j] / steps,
            "to": 1 - edges[j + 1] / steps,
            "loss": None if by[text]["difference"] is None else -by[text]["difference"],
            "ci": [None if v is None else -v for v in reversed(by[text]["ci"])],
            "flops_saved": rows[text]["flops_saved"],
        }
        for text, (kind, j) in tried.items()
    ]
    return {"stretches": STRETCHES, "sparse": SPARSE, "n": n, "steps": steps, "rows": out}


# ------------------------------------------------------------------------------------------------ search


def all_210(setup: Setup) -> dict[str, Any]:
    """Every placement of four light segments of ten, the best again on fresh samples."""
    found = _search(setup, "exhaustive", light_segments=4, n=setup.scale.search_samples, confirm=setup.scale.confirm)
    keep = ("name", "ppl", "ppl_ci", "log_ppl", "saved")
    return {**found, "schedules": [{key: row[key] for key in keep} for row in found["schedules"]]}


def tuner(setup: Setup) -> dict[str, Any]:
    """What the tuner finds at each budget (models, steps and their density), beside the equal-compute rivals.

    What a search confirms has few rows, some of which chose. So the few schedules that matter at each budget, and
    all-heavy, are judged once more, on as many rows as anything here and on random numbers of their own (`fresh`)."""
    found = _search(setup, "tune", budget=list(setup.scale.budgets), rows=21 * setup.scale.search_samples)
    rows = finalists(setup, found)
    if not rows:
        return found
    heavy = _alone(found["heavy"], found["steps"])
    chosen = list(dict.fromkeys([heavy, *(row["schedule"] for row in rows)]))
    setup.note(f"tuner: {len(chosen)} schedules on fresh rows")
    # With steps None each schedule takes its own number, and the first, all-heavy, gives that of the anchors.
    judged_again = judged(setup, chosen, steps=None, rivals=False, seed=setup.seed + FRESH)
    by = {row["schedule"]: row for row in judged_again["rows"]}
    figures = ("gen_ppl", "gen_ppl_ci", "entropy", "entropy_ci")
    fresh = {key: judged_again[key] for key in ("n", "seed", "steps", "length", "judge", "recipe", "contrasts")}
    rows = [{**row, **{key: by[row["schedule"]][key] for key in figures}} for row in rows]
    return {**found, "fresh": {**fresh, "heavy": heavy, "rows": rows}}


def finalists(setup: Setup, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each budget: what the search recommends, the sandwich, single models in as many steps as the budget allows,
    and the best mixture that it measured. On a CPU of the last two only the single model that it measured as best."""
    out = []
    names: dict[Any, str] = {}  # of schedules that do the same, the first one's
    for goal in found.get("front", []):
        limit = goal["limit"] * (1 + SLACK)
        within = [row for row in found["confirmed"] if row["price"] <= limit]
        best = sorted(within, key=lambda row: row["against_heavy"]["difference"])
        sandwich = max((row for row in within if row["what"] == "sandwich"), key=lambda row: row["price"], default=None)
        mixture = next((row for row in best if row["kind"] == "mixed"), None)
        single = next((row for row in best if row["kind"] == "rival" and row["what"] != "sandwich"), None)
        others = [single] if setup.scale.name == "cpu" else [*_single_models(setup, found, limit), mixture]
        unique = {_identity(row): row for row in [goal, sandwich, *others] if row is not None}
        for same, row in unique.items():
            about = {key: row[key] for key in ("what", "kind", "steps", "saved")}
            name = names.setdefault(same, row["schedule"])
            recommended = same == _identity(goal)
            out.append({"budget": goal["saved_at_least"], "schedule": name, **about, "recommended": recommended})
    return out


def _identity(row: Mapping[str, Any]) -> Any:
    return Entry("", Schedule.parse(row["schedule"]), row["steps"], "asked").identity


def _single_models(setup: Setup, found: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
    """From the heavy model down, each alone in as many steps as a limit allows, to the first that may take all."""
    family, steps = setup.family, int(found["steps"])
    free_n = np.array([found["length"]])

    def price(name: str, count: int) -> float:
        return expected_flops(family.models, one_model(name), count, free_n, found["length"])

    rows = []
    for name in found["models"][::-1]:
        whole = price(name, steps) <= limit
        count = steps if whole else steps_within(family.models, name, limit, free_n, found["length"])
        if count is not None:
            fewer = "" if whole else f" in {count} steps"
            saved = 1 - price(name, count) / found["all_heavy_price"]
            about = {"what": f"{name} alone{fewer}", "kind": "rival", "schedule": _alone(name, count)}
            rows.append({**about, "steps": count, "saved": saved})
        if whole:
            break
    return rows


def _alone(model: str, steps: int) -> str:
    return str(Schedule((Segment(model, steps),)))


def _search(setup: Setup, method: str, **options: Any) -> dict[str, Any]:
    """A search that is stopped by Ctrl-C shows its best so far; an experiment is done or not done."""
    from relaylm.schedule_search import search

    setup.note(f"search: {method}")
    try:
        found = search(
            setup.family,
            method,
            steps=setup.steps(),
            length=setup.length(),
            seed=setup.seed,
            judge=setup.judge,
            recipe=setup.scale.recipe,
            store=setup.store,
            progress=setup.progress,
            **options,
        )
    except UserError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if found["stopped"] is not None:
        raise KeyboardInterrupt
    return found
