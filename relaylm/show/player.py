"""`sample --html`: a page that plays the denoising of samples, call by call, in any browser and without a network.

`web/player.html` is the page, `renderer.js` and `renderer.css` draw in it (as they do in the page of `relaylm serve`),
`player.js` replays; this module puts them together and adds the data: the texts of the tokens, when each was written
and by which model, and the cost of the calls up to then. A model's text is never read as HTML: it is JSON with every <
escaped, and the page sets text only. `page.html#2/40` links to the second sample after its 40th call.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.core.schedule import Schedule
from relaylm.show.colours import colour_of, row_pieces, writers_of

if TYPE_CHECKING:
    from relaylm.models.family import Family
    from relaylm.sampling.result import Samples


@lru_cache(maxsize=1)
def template() -> str:
    """The page without its data: `$TITLE` and `$DATA` are to be filled in, by `page` or by the page of the server."""
    folder = files("relaylm.show") / "web"
    text = {name: (folder / name).read_text(encoding="utf-8") for name in ("player.html", "renderer.css")}
    script = "".join((folder / name).read_text(encoding="utf-8") for name in ("renderer.js", "player.js"))
    # One classic script: a page that is opened as a file cannot import modules.
    script = '"use strict";\n' + re.sub(r"^import [^;]*;\n|^export ", "", script, flags=re.MULTILINE)
    return text["player.html"].replace("$STYLE", text["renderer.css"]).replace("$SCRIPT", script)


def page(family: Family, samples: Samples, schedule: Schedule | None = None, heavy: str | None = None) -> str:
    """The page. `schedule` (bound to models' names) gives the strip; `heavy` is what the meter compares with."""
    content = contents(family, samples, schedule, heavy)
    # Without < nothing ends the script element or starts a comment; json escapes U+2028 and the like.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
    parts = {"$TITLE": escape(content["title"]), "$DATA": data}
    return re.sub(r"\$(TITLE|DATA)", lambda found: parts[found.group()], template())


def contents(
    family: Family, samples: Samples, schedule: Schedule | None = None, heavy: str | None = None
) -> dict[str, Any]:
    """The data of the page, as plain JSON values."""
    heavy = heavy or family.names[-1]
    used = [name for name in family.names if name in samples.trace.models]
    spaced = samples.law.startswith("spaced")  # then a call's time is the share of positions that are masked before it
    times = None
    if not spaced and not math.isinf(samples.steps):
        steps_taken = int(samples.steps)
        uniform = tuple((steps_taken - k) / steps_taken for k in range(steps_taken + 1))
        times = uniform if schedule is None else schedule.timetable(steps_taken).times
    rows = [_sample(family, samples, row, used, heavy, times, spaced) for row in range(len(samples.tokens))]
    rewritten = sum(len(row["calls"]) for row in rows) != samples.cost.total_calls
    if rewritten or not _accounts_for(rows, samples):
        for call in (call for row in rows for call in row["calls"]):
            call["flops"] = None
    steps = "infinitely many" if math.isinf(samples.steps) else str(int(samples.steps))
    runs = [] if schedule is None else strip(schedule, math.inf if spaced else samples.steps, used)
    return {
        "title": f"{family.name or 'relaylm'}: {samples.schedule}",
        "about": f"{samples.law if spaced else f'{steps} steps'}, seed {samples.seed}"
        + (f"; {', '.join(samples.changes_law)}: not the models' own law" if samples.changes_law else "")
        + (f"; {samples.cost.total_calls} calls in all, shown are those whose tokens lasted" if rewritten else ""),
        "heavy": heavy,
        "models": [{"name": name, "colour": colour_of(family.names.index(name))} for name in used],
        "lanes": [{"label": samples.schedule, "strip": runs, "samples": rows}],
    }


def _accounts_for(rows: Sequence[dict[str, Any]], samples: Samples) -> bool:
    """Whether the cost of the calls that are played adds up to the samples' cost. Some decoding rules compute more
    logits in a call than they write tokens; the page then counts calls only."""
    ends = [row["calls"][-1]["flops"] for row in rows if row["calls"]]
    if samples.cost.flops is None or None in ends:
        return False
    return math.isclose(sum(end[0] for end in ends), samples.cost.flops, rel_tol=1e-6)


def strip(schedule: Schedule, steps: float, models: Sequence[str]) -> list[tuple[int, float, float]]:
    """Runs of one model along time, from 1.0 (all masked) down to 0.0: its place in `models`, and the run's ends."""
    if math.isinf(steps):
        edges = [1.0, *schedule.ends]
        return [(models.index(part.model), edges[k], edges[k + 1]) for k, part in enumerate(schedule.segments)]
    table = schedule.timetable(int(steps))
    runs, at = [], 0
    for model, run in groupby(table.models):
        end = at + len(list(run))
        runs.append((models.index(model), table.times[at], table.times[end]))
        at = end
    return runs


def _sample(
    family: Family,
    samples: Samples,
    row: int,
    used: list[str],
    heavy: str,
    times: Sequence[float] | None,
    spaced: bool,
) -> dict[str, Any]:
    """One row: its tokens' texts, their writers, and its calls in order of time."""
    length = samples.tokens.shape[1]
    writers = writers_of(family, samples, row)
    free = np.flatnonzero(samples.trace.model_nL[row] >= 0)
    by_step = times is not None or spaced
    order = samples.trace.step_nL[row][free] if by_step else samples.trace.u_nL[row][free]
    calls: list[dict[str, Any]] = []
    call_L = np.zeros(length, dtype=int)  # which call wrote each position; 0 where it was given
    spent = spent_heavy = 0.0
    price: dict[str, Any] = {name: getattr(family[name], "flops", None) for name in {*used, heavy}}
    counted = None not in price.values()
    for when in sorted(set(order.tolist()), reverse=True):
        positions = free[order == when]
        name = family.names[writers[positions[0]]]
        call_L[positions] = len(calls) + 1
        if counted:
            spent += price[name](length, len(positions))
            spent_heavy += price[heavy](length, len(positions))
        t = float((order <= when).mean()) if spaced else float(when) if times is None else times[-1 - int(when)]
        calls.append(
            {
                "t": t,
                "step": None if times is None else int(when),
                "model": used.index(name),
                "flops": [spent, spent_heavy] if counted else None,
            }
        )
    return {
        "pieces": row_pieces(family, samples.tokens[row]),
        "writer": [-1 if writer < 0 else used.index(family.names[writer]) for writer in writers],
        "call": call_L.tolist(),
        "calls": calls,
    }
