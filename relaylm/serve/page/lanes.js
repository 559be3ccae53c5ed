// A run: one lane for the schedule and one for the heavy model alone, drawn as they are written, with their costs.
import { denoise } from "./client.js";
import { Lane, Transport, amount, bars, compare, counted, make } from "./show/renderer.js";

const $ = id => document.getElementById(id);
const sum = values => values.reduce((a, b) => a + b, 0);
let family = null, lanes = []; // of the last run
let running = null, kept = null, waiting = false;
const transport = new Transport($("controls"), draw);

// One lane after the other, so that each has the machine to itself and its milliseconds can be compared. What the heavy
// model alone wrote is kept until something other than the schedule is changed. `beside` is its request, or null.
export async function runLanes(chosen, segments, request, beside) {
  stop();
  transport.play(false);
  const control = running = new AbortController();
  family = chosen.relaylm;
  $("lanes").replaceChildren();
  $("costs").replaceChildren();
  $("differ").textContent = "";
  const all = [{ model: family.heavy, share: 1 }], key = JSON.stringify(beside);
  const heavy = beside ? lane(family.heavy + " alone", family.heavy, all) : null;
  const mine = lane("Your schedule", "yours", segments);
  lanes = heavy ? [heavy, mine] : [mine];
  $("lanes").classList.toggle("two", lanes.length > 1);
  busy(true);
  try {
    if (heavy && kept?.key === key) {
      Object.assign(heavy, kept.lane);
      heavy.view.open(kept.sample);
    }
    await follow(mine, request, control.signal);
    if (heavy && !heavy.done) {
      await follow(heavy, beside, control.signal);
      kept = { key, lane: { start: heavy.start, done: heavy.done }, sample: heavy.view.sample };
    }
  } catch (error) {
    control.abort();
    if (running === control && error.name !== "AbortError") throw error;
  } finally {
    if (running === control) finish();
  }
}

export const stop = () => running?.abort();

// A strip's stretches as runs along time, from 1 down to 0: [model, from, to].
function runsOf(segments) {
  const whole = sum(segments.map(({ share }) => share));
  let at = 1;
  return segments.map(({ model, share }) => [
    family.models.findIndex(({ name }) => name === model), at, at = Math.max(0, at - share / whole),
  ]);
}

function lane(name, label, segments) {
  const root = make("section", $("lanes"), "lane"), title = make("h3", root, "", name);
  const view = new Lane(root, name, family.models, runsOf(segments), (from, position) => {
    for (const other of lanes) if (other.view !== from) other.view.inspect(position, false);
  });
  view.blank = family.tokenizer === "text8" ? 1 : 4;
  view.text.classList.toggle("grid", view.blank === 1);
  return { name, label, view, count: make("span", title, "soft"), start: null, done: null };
}

async function follow(one, body, signal) {
  const { view } = one;
  for await (const { event, data } of denoise(body, signal)) {
    if (event === "start") {
      one.start = data;
      const given = data.given[0], nothing = given.map(() => null), empty = () => ({
        pieces: [...given], writer: given.map(() => -1), call: given.map(text => (text === null ? null : 0)),
        logprob: [...nothing], token: [...nothing], calls: [],
      });
      view.open(empty());
      for (const { view: next } of lanes) if (!next.sample) next.open(empty()); // it waits for its turn
    } else if (event === "written" && data.row === 0) {
      const step = one.start.law.startsWith("uniform") ? data.step : null; // else it counts calls
      view.add({ ...data, step, model: family.models.findIndex(({ name }) => name === data.model) });
    } else if (event === "done") {
      one.done = data.relaylm;
      view.sample.pieces = data.pieces?.[0] ?? view.sample.pieces; // characters of several tokens are whole now
    } else if (event === "error") throw new Error(data.error.message);
    refresh();
  }
  if (!one.done) throw new Error("the stream ended early");
}

function busy(on) {
  const [goes, comes] = on ? [$("run"), $("stop")] : [$("stop"), $("run")];
  const moves = document.activeElement === goes; // the focus, too
  goes.hidden = true;
  comes.hidden = false;
  if (moves) comes.focus();
  $("controls").hidden = on;
  $("save").disabled = on || !lanes.length;
  $("result").hidden = !lanes.length;
  $("result").setAttribute("aria-busy", String(on));
}

function finish() {
  running = null;
  for (const { start, view } of lanes) if (!start) view.root.remove(); // stopped before its turn
  lanes = lanes.filter(({ start }) => start);
  $("lanes").classList.toggle("two", lanes.length > 1);
  busy(false);
  if (!lanes.length) return;
  for (const { view } of lanes) view.text.classList.remove("grid"); // all is known: lines may break at words
  transport.open(Math.max(...lanes.map(({ view }) => view.sample.calls.length)), Infinity);
  $("controls").hidden = transport.total === 0;
}

// ------------------------------------------------------------------------------------------------ drawing

// Draws at most once a frame what has arrived.
function refresh() {
  if (waiting) return;
  waiting = true;
  const now = () => { waiting = false; draw(running ? null : transport.at); };
  document.hidden ? setTimeout(now, 50) : requestAnimationFrame(now);
}

// Every lane after `at` calls; null: all that are known, while more come.
function draw(at) {
  const open = lanes.filter(({ start }) => start), said = [];
  for (const { view, count } of open) {
    const total = view.sample.calls.length;
    view.show(at === null ? total : at >= transport.total ? Infinity : at);
    count.textContent = (view.at < total ? view.at + " of " : "") + counted(total, "call");
  }
  if (open.length > 1) {
    const { differ, both } = compare(open[0].view, open[1].view);
    if (differ) said.push(differ + " of " + counted(both, "token") + " differ; a line above marks where.");
    else if (both) said.push("The same " + counted(both, "token") + " in both.");
  }
  const changes = [...new Set(open.flatMap(({ done }) => done?.changes_law ?? []))];
  if (changes.length) said.push("Not the models' own distribution: " + changes.join(", ") + ".");
  $("differ").textContent = said.join(" ");
  drawCosts(open);
}

function drawCosts(open) {
  $("costs").replaceChildren();
  const most = values => Math.max(...values.filter(Number.isFinite), 1e-12);
  const group = (title, lines) => {
    const root = make("div", $("costs"));
    make("h3", root, "", title);
    bars(make("div", root), lines);
  };
  const made = open.map(({ view }) => view.made()), whole = most(open.map(({ view }) => view.sample.calls.length));
  group("Calls", open.map(({ label }, k) => ({
    label, note: String(sum(made[k])), parts: made[k].map((count, m) => [count / whole, family.models[m].colour]),
  })));
  const totals = (title, value, text) => {
    const values = open.map(value), top = most(values), known = values.map(Number.isFinite);
    const against = k => {
      const change = Math.round(100 * (values[k] / values[0] - 1));
      return k && known[0] ? " (" + (change > 0 ? "+" : "") + change + "%)" : "";
    };
    if (known.some(Boolean)) group(title, open.map(({ label }, k) => ({
      label, note: known[k] ? text(values[k]) + against(k) : "…", parts: [[(values[k] ?? 0) / top, null]],
    })));
  };
  totals("FLOPs", ({ done, start }) => done?.flops ?? start.planned?.flops, value => amount(value, "FLOP"));
  totals("Milliseconds", ({ done }) => done && 1000 * done.seconds_computing,
    value => value.toFixed(value < 100 ? 1 : 0));
}

// ------------------------------------------------------------------------------------------------ the player

// Saves the stand-alone player with these lanes in it, as `relaylm sample --html` writes it; returns the file's name.
export async function save() {
  const template = await (await fetch("player.html")).text(), [{ start }] = lanes;
  const cost = ({ done }) => (done ? counted(sum(Object.values(done.calls)), "call")
    + (done.flops ? ", " + amount(done.flops, "FLOP") : "") : "stopped");
  const data = {
    title: start.family + ": " + lanes.map(one => one.start.schedule).join(" and "),
    about: start.law + ", seed " + start.seed + "; " + lanes.map(one => one.name + " " + cost(one)).join("; "),
    heavy: family.heavy,
    models: family.models.map(({ name, colour }) => ({ name, colour })),
    lanes: lanes.map(({ name, view }) => ({ label: name, strip: view.strip, samples: [view.sample] })),
  };
  const parts = {
    $TITLE: data.title.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"),
    $DATA: JSON.stringify(data).replaceAll("<", "\\u003c").replaceAll(">", "\\u003e"),
  };
  const page = template.replace(/\$(?:TITLE|DATA)/g, found => parts[found]);
  const link = make("a", null);
  link.href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  link.download = "relaylm.html";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return link.download;
}
