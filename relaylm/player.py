"""`sample --html`: one page that plays the denoising of samples, step by step, in any browser and without a network.

The page holds everything it needs: the texts of the tokens, when each was written and by which model, and what the
calls cost up to then. Tokens keep the colours of `picture`; under them the schedule is drawn as a strip over time, with
a tick for every call, and a meter sets the operations so far against the heavy model making the same calls.

Nothing that a model wrote is ever read as HTML: it travels as JSON with every < escaped, and the page only ever sets
text. What a page shows can be linked to: `page.html#2/40` is the second sample after its 40th call.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.picture import colour_of
from relaylm.schedule import Schedule
from relaylm.terminal import pieces_of, writers_of

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.sampler import Samples


def page(family: Family, samples: Samples, schedule: Schedule | None = None, heavy: str | None = None) -> str:
    """The page. `schedule` (bound to models' names) gives the strip; `heavy` is what the meter compares with."""
    content = contents(family, samples, schedule, heavy)
    # < ends no script element and starts no comment this way; U+2028 and the like are escaped by json already.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
    parts = {"$TITLE": escape(content["title"]), "$DATA": data}
    return re.sub(r"\$(TITLE|DATA)", lambda found: parts[found.group()], _PAGE)


def contents(
    family: Family, samples: Samples, schedule: Schedule | None = None, heavy: str | None = None
) -> dict[str, Any]:
    """What the page knows, as plain JSON values."""
    heavy = heavy or family.names[-1]
    used = [name for name in family.names if name in samples.trace.models]
    times = None
    if not math.isinf(samples.steps):
        steps_taken = int(samples.steps)
        uniform = tuple((steps_taken - k) / steps_taken for k in range(steps_taken + 1))
        times = uniform if schedule is None else schedule.timetable(steps_taken).times
    rows = [_sample(family, samples, row, used, heavy, times) for row in range(len(samples.tokens))]
    rewritten = sum(len(row["calls"]) for row in rows) != samples.cost.total_calls
    if rewritten or not _accounts_for(rows, samples):
        for call in (call for row in rows for call in row["calls"]):
            call["flops"] = None
    steps = "infinitely many" if math.isinf(samples.steps) else str(int(samples.steps))
    return {
        "title": f"{family.name or 'relaylm'}: {samples.schedule}",
        "about": f"{steps} steps, seed {samples.seed}"
        + (f"; {', '.join(samples.changes_law)}: not the models' own law" if samples.changes_law else "")
        + (f"; {samples.cost.total_calls} calls in all, shown are those whose tokens lasted" if rewritten else ""),
        "heavy": heavy,
        "models": [{"name": name, "colour": colour_of(family.names.index(name))} for name in used],
        "strip": [] if schedule is None else strip(schedule, samples.steps, used),
        "samples": rows,
    }


def _accounts_for(rows: Sequence[dict[str, Any]], samples: Samples) -> bool:
    """Do the calls as they are played come to what the samples cost? Some decoding rules ask a call for more logits
    than it writes tokens; the page then counts calls alone."""
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
    family: Family, samples: Samples, row: int, used: list[str], heavy: str, times: Sequence[float] | None
) -> dict[str, Any]:
    """One row: its tokens' texts, their writers, and its calls in order of time."""
    length = samples.tokens.shape[1]
    writers = writers_of(family, samples, row)
    free = np.flatnonzero(samples.trace.model_nL[row] >= 0)
    order = samples.trace.u_nL[row][free] if times is None else samples.trace.step_nL[row][free]
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
        calls.append(
            {
                "t": float(when) if times is None else times[len(times) - 1 - int(when)],
                "step": None if times is None else int(when),
                "model": used.index(name),
                "flops": [spent, spent_heavy] if counted else None,
            }
        )
    return {
        "pieces": pieces_of(family, samples.tokens[row]),
        "writer": [-1 if writer < 0 else used.index(family.names[writer]) for writer in writers],
        "call": call_L.tolist(),
        "calls": calls,
    }


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$TITLE</title>
<style>
:root { color-scheme: light; --ink: #1b1d21; --paper: #ffffff; --soft: #62666d; --line: #d9dce1; --mask: #eceef1; }
:root[data-theme="dark"] {
  color-scheme: dark; --ink: #e9eaec; --paper: #15171a; --soft: #9a9fa7; --line: #33373d; --mask: #24272c;
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.15rem; margin: 0; overflow-wrap: anywhere; }
header { display: flex; gap: 1rem; align-items: baseline; justify-content: space-between; }
.soft { color: var(--soft); font-size: .875rem; }
#text { font: 17px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: break-spaces;
  line-break: anywhere; margin: 1rem 0; min-height: 9rem; } /* a fixed grid: nothing moves as spaces are written */
#text span { border-bottom: 2px solid transparent; }
#text .mask { color: transparent; background: var(--mask); user-select: none; }
#text .given { color: var(--soft); }
#text .written { background: color-mix(in srgb, var(--c) 22%, transparent); border-bottom-color: var(--c); }
#text .now { background: var(--c); color: #000; }
#strip { position: relative; height: 34px; margin-top: .5rem; border-radius: 4px; background: var(--mask); }
#strip i { position: absolute; top: 0; height: 22px; background: var(--c); }
#strip b { position: absolute; top: 24px; width: 1px; height: 9px; background: var(--soft); opacity: .55; }
#head { position: absolute; top: -4px; bottom: -4px; width: 3px; margin-left: -1px; background: var(--ink);
  box-shadow: 0 0 0 1px var(--paper); }
.ends { display: flex; justify-content: space-between; gap: .75rem; margin-bottom: 1rem; }
.ends span:not(#state) { white-space: nowrap; } #state { text-align: center; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem .75rem; align-items: center; margin: .75rem 0; }
.controls input[type=range] { flex: 1 1 14rem; min-width: 8rem; }
button, select { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .25rem .7rem; cursor: pointer; }
:focus-visible { outline: 2px solid #0072B2; outline-offset: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; background: var(--c); }
table { border-spacing: 0 .3rem; width: 100%; font-variant-numeric: tabular-nums; }
td { white-space: nowrap; } td:first-child { width: 8rem; color: var(--soft); }
td:last-child { width: 7rem; text-align: right; }
.bar { display: flex; height: 14px; background: var(--mask); border-radius: 3px; overflow: hidden; }
.bar i { height: 100%; background: var(--c); }
kbd { border: 1px solid var(--line); border-radius: 4px; padding: 0 .3rem; font: inherit; }
</style>
</head>
<body>
<header><h1 id="title"></h1><button id="theme" type="button" aria-label="dark or light">◐</button></header>
<div id="about" class="soft"></div>
<div id="text" aria-label="the sample"></div>
<div id="strip" role="img" aria-label="the schedule: which model runs when, and the calls that were made"></div>
<div class="ends soft"><span>all masked (t = 1)</span><span id="state" aria-live="off"></span><span>text (t = 0)</span>
</div>
<div class="controls">
<button id="play" type="button">Play</button>
<input id="slider" type="range" min="0" step="1" value="0" aria-label="calls made so far">
<label>speed <select id="speed"></select></label>
<label id="which">sample <select id="sample"></select></label>
</div>
<div id="legend" class="legend soft"></div>
<table id="meter" aria-label="cost so far"></table>
<p class="soft"><kbd>space</kbd> play or pause, <kbd>←</kbd> <kbd>→</kbd> one call, <kbd>home</kbd> <kbd>end</kbd>,
<kbd>↑</kbd> <kbd>↓</kbd> another sample, <kbd>+</kbd> <kbd>-</kbd> speed, <kbd>d</kbd> dark or light</p>
<noscript>This page needs JavaScript; it loads nothing from anywhere.</noscript>
<script type="application/json" id="data">$DATA</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, parent, text) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8], SECONDS = 8;  // a whole sample takes so long at speed 1
let which = 0, at = 0, playing = false, last = 0, due = 0, spans = [];

$("title").textContent = data.title;
$("about").textContent = data.about;
for (const speed of SPEEDS) make("option", $("speed"), "×" + speed).value = speed;
$("speed").value = 1;
data.samples.forEach((_, k) => make("option", $("sample"), k + 1).value = k);
$("which").hidden = data.samples.length < 2;
for (const [model, from, to] of data.strip) {
  const run = make("i", $("strip"));
  run.style.left = 100 * (1 - from) + "%";
  run.style.width = 100 * (from - to) + "%";
  run.style.setProperty("--c", data.models[model].colour);
  run.title = data.models[model].name + ", t from " + from.toFixed(3) + " to " + to.toFixed(3);
}
const head = make("div", $("strip"));
head.id = "head";
const counts = data.models.map(model => {
  const item = make("span", $("legend"));
  make("i", item).style.setProperty("--c", model.colour);
  return make("span", item);
});

function flops(number) {
  const scale = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => number >= size);
  return scale ? (number / scale[0]).toPrecision(3) + " " + scale[1] + "FLOP" : number.toFixed(0) + " FLOP";
}

function open_sample(k) {
  which = k;
  $("sample").value = k;
  const sample = data.samples[k];
  $("slider").max = sample.calls.length;
  $("text").replaceChildren();
  spans = sample.pieces.map(() => make("span", $("text")));
  document.querySelectorAll("#strip b").forEach(tick => tick.remove());
  for (const call of sample.calls) make("b", $("strip")).style.left = 100 * (1 - call.t) + "%";
  show(Math.min(at, sample.calls.length));
}

function show(place) {
  const sample = data.samples[which], calls = sample.calls;
  at = Math.max(0, Math.min(place, calls.length));
  spans.forEach((span, j) => {
    const call = sample.call[j], piece = sample.pieces[j], written = call <= at;
    const now = call === at && at < calls.length;
    const kind = !written ? "mask" : call === 0 ? "given" : now ? "written now" : "written";
    if (span.className === kind && span.dataset.written === String(written)) return;
    span.className = kind;
    span.dataset.written = written;
    span.textContent = written ? piece : "░".repeat(Math.max(1, piece.length));
    if (written && call > 0) {
      span.style.setProperty("--c", data.models[sample.writer[j]].colour);
      span.title = data.models[sample.writer[j]].name + ", call " + call;
    } else span.removeAttribute("title");
  });
  const call = at ? calls[at - 1] : null;
  head.style.left = call ? (at === calls.length ? "100%" : 100 * (1 - call.t) + "%") : "0%";
  $("slider").value = at;
  $("state").textContent = "call " + at + " of " + calls.length + (call ? ", t = " + call.t.toFixed(3)
    + (call.step === null ? "" : ", step " + call.step) + ", " + data.models[call.model].name : "");
  const made = data.models.map((_, m) => calls.slice(0, at).filter(c => c.model === m).length);
  counts.forEach((count, m) => count.textContent = data.models[m].name + ": " + made[m] + " calls");
  meter(calls, call, made);
  const link = "#" + (which + 1) + "/" + at;
  if (!playing && location.hash !== link) history.replaceState(null, "", link);
}

function meter(calls, call, made) {
  const end = calls.length ? calls[calls.length - 1].flops : null;
  $("meter").replaceChildren();
  const line = (label, parts, note) => {
    const row = make("tr", $("meter"));
    make("td", row, label);
    const bar = make("div", make("td", row));
    bar.className = "bar";
    for (const [share, colour] of parts) {
      const part = make("i", bar);
      part.style.width = 100 * share + "%";
      part.style.setProperty("--c", colour);
    }
    make("td", row, note);
  };
  if (end) {
    const [spent, heavy] = call ? call.flops : [0, 0];
    const by = data.models.map(() => 0);
    let before = 0;
    for (const one of calls.slice(0, at)) { by[one.model] += one.flops[0] - before; before = one.flops[0]; }
    line("this schedule", by.map((cost, m) => [cost / end[1], data.models[m].colour]), flops(spent));
    const colour = data.models.find(model => model.name === data.heavy)?.colour ?? "var(--soft)";
    line(data.heavy + " alone", [[heavy / end[1], colour]], flops(heavy));
    line("saved so far", [[heavy ? 1 - spent / heavy : 0, "var(--soft)"]],
      heavy ? (100 * (1 - spent / heavy)).toFixed(1) + "%" : "");
  } else line("calls", made.map((count, m) => [count / (calls.length || 1), data.models[m].colour]), at + " calls");
}

function play(on) {
  playing = on;
  $("play").textContent = on ? "Pause" : "Play";
  if (!on) return show(at);
  if (at >= data.samples[which].calls.length) show(0);
  last = performance.now();
  due = 0;
  setTimeout(tick, 30);
}

function tick() {
  if (!playing) return;
  const now = performance.now();
  const total = data.samples[which].calls.length;
  due += (now - last) / 1000 / SECONDS * total * Number($("speed").value);
  last = now;
  const whole = Math.floor(due);
  due -= whole;
  if (whole) show(at + whole);
  if (at >= total) return play(false);
  setTimeout(tick, 30);
}

function theme(name) { document.documentElement.dataset.theme = name; }
function faster(by) {
  const k = SPEEDS.indexOf(Number($("speed").value)) + by;
  $("speed").value = SPEEDS[Math.max(0, Math.min(k, SPEEDS.length - 1))];
}
const other = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const turn = by => open_sample((which + by + data.samples.length) % data.samples.length);
const step = by => { play(false); show(at + by); };
const KEYS = {
  " ": () => play(!playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => step(-Infinity),
  End: () => step(Infinity), ArrowUp: () => turn(-1), ArrowDown: () => turn(1), "+": () => faster(1),
  "=": () => faster(1), "-": () => faster(-1), d: other,
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === " " && event.target.tagName === "BUTTON" && event.target.id !== "play") return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
});
$("play").addEventListener("click", () => play(!playing));
$("slider").addEventListener("input", () => { const place = Number($("slider").value); play(false); show(place); });
$("sample").addEventListener("change", () => open_sample(Number($("sample").value)));
$("theme").addEventListener("click", other);
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
function follow() {
  const link = location.hash.match(/^#(\\d+)\\/(\\d+)$/);
  if (!link) return false;
  at = Number(link[2]);
  open_sample(Math.max(0, Math.min(Number(link[1]), data.samples.length) - 1));
  return true;
}
addEventListener("hashchange", () => { play(false); follow(); });
if (!follow()) {
  open_sample(0);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play(true); else show(Infinity);
}
</script>
</body>
</html>
"""
