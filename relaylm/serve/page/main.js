// The page of `relaylm serve`: what to write and under which schedule; lanes that are written as one watches.
import { access, denoise, get } from "./client.js";
import { Lane, Transport, amount, bars, compare, make, paint, themeButton } from "./show/renderer.js";
import { SNIPPETS } from "./snippets.js";
import { Strip } from "./strip.js";

const $ = id => document.getElementById(id);
const PRESETS = ["heavy", "sandwich:25%", "sandwich:50%", "small-first:25%", "light"];
const FIELDS = ["model", "prompt", "infill", "length", "seed", "suffix", "rule", "temperature", "top_p", "schedule", "number", "pace"];
let families = [], family, lanes = [], running = null, kept = null;
let lookup = null, reopen = false; // a look at the schedule that is due, and whether the strip is to be drawn anew

const strip = new Strip($("strip"), $("tools"), () => {
  $("schedule").value = strip.notation;
  changed();
});
const transport = new Transport($("controls"), draw);

// ------------------------------------------------------------------------------------------------ settings

const mode = () => document.querySelector("[name=mode]:checked").value;
const number = id => ($(id).value.trim() === "" ? undefined : Number($(id).value));
// Whether a schedule is written in counts of steps (L32 H192 L32): then it says how many there are.
const inCounts = text => /^(?!quarter:|random:)(?:[LH]:?|[\w.-]+:)\d+(?![\d.%/])/.test(text);
const setPace = (pace, value) => { $("pace").value = pace; if (value !== undefined) $("number").value = value; showPace(); };

// The fields of a request, those that are set.
function request(schedule) {
  const rule = $("rule").value;
  const pace = inCounts(schedule) ? "" : $("pace").value;
  const fields = {
    model: family.id, schedule,
    spacing: { spacing: number("number"), prefix: $("number").value + ":prefix" }[pace],
    steps: { steps: number("number"), inf: "inf" }[pace],
    ...(mode() === "infill" ? { infill: $("infill").value }
      : { prompt: $("prompt").value || undefined, suffix: $("suffix").value || undefined, length: number("length") }),
    seed: number("seed") ?? 0, rule: rule || undefined, temperature: number("temperature"), top_p: number("top_p"),
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

// Everything that can be set, in the address: a link restores it. The API key is not part of it.
function remember() {
  const words = new URLSearchParams({ mode: mode() });
  for (const id of FIELDS) if (id === mode() || (!["prompt", "infill"].includes(id) && $(id).value !== "")) words.set(id, $(id).value);
  if (!$("compare").checked) words.set("compare", "no");
  history.replaceState(null, "", "#" + words);
}

function restore() {
  const words = new URLSearchParams(location.hash.slice(1));
  $("form").reset();
  openFamily(families.find(({ id }) => id === words.get("model")) ?? families[0]);
  for (const id of FIELDS) if (words.has(id) && id !== "model") $(id).value = words.get(id);
  for (const radio of document.querySelectorAll("[name=mode]")) radio.checked = radio.value === (words.get("mode") ?? "prompt");
  $("compare").checked = words.get("compare") !== "no";
  $("more").open = ["suffix", "rule", "temperature", "top_p"].some(id => $(id).value !== "");
  showMode();
  showPace();
}

function openFamily(chosen) {
  family = chosen;
  const { models, length, spacing, rules, heavy } = family.relaylm;
  $("model").value = family.id;
  $("legend").replaceChildren();
  for (const { name, blocks, parameters, colour } of models) {
    const item = make("span", $("legend"));
    paint(make("i", item, "swatch"), colour);
    item.append(name + (blocks ? " · " + blocks + " blocks" : "") + (parameters ? " · " + amount(parameters) : ""));
  }
  $("length").max = length;
  $("length").value = Math.min(length, 192);
  $("rule").replaceChildren();
  make("option", $("rule"), "", "none").value = "";
  for (const rule of rules) make("option", $("rule"), "", rule).value = rule;
  $("heavy-name").textContent = heavy;
  $("schedule").value = models.length > 1 ? "sandwich:50%" : "heavy";
  const distance = /^(?:spaced:)?(\d+)(:prefix)?/.exec(spacing ?? "");
  setPace(distance?.[2] ? "prefix" : "spacing", distance?.[1] ?? 16);
}

function showMode() {
  const infill = mode() === "infill";
  $("prompt").hidden = infill;
  $("infill").hidden = !infill;
  for (const field of document.querySelectorAll(".only-prompt")) field.hidden = infill;
  $("mode-help").textContent = infill ? "One _ for each token to be written." : "What you type stays; the rest is written.";
}

// A schedule in counts has one number of steps: for another it must be in shares.
function inShares() {
  if (inCounts($("schedule").value) && !strip.fixed) $("schedule").value = strip.notation;
}

function showPace() {
  const pace = $("pace").value;
  $("number-field").hidden = ["inf", "own"].includes(pace);
  $("number-label").textContent = pace === "steps" ? "Steps" : "Distance";
}

// ------------------------------------------------------------------------------------------------ the schedule

// Something was changed: keep it in the address, ask what it would cost, and write the snippets anew.
function changed(open = false) {
  if (!family) return;
  remember();
  showSnippet();
  for (const button of $("presets").children) button.setAttribute("aria-pressed", String(button.value === $("schedule").value));
  clearTimeout(lookup);
  reopen ||= open;
  lookup = setTimeout(plan, 120);
}

async function plan() {
  clearTimeout(lookup);
  lookup = null;
  try {
    const { model, schedule, steps, spacing, rule, length, infill } = request($("schedule").value.trim());
    const found = await get("v1/schedule", { model, schedule, steps, spacing, rule, length, infill });
    if (schedule !== $("schedule").value.trim()) return; // it was edited again in the meantime
    const calls = found.calls && Object.values(found.calls).reduce((a, b) => a + b, 0);
    $("plan").textContent = [
      calls ? "about " + Math.round(calls) + " calls for " + found.length + " positions" : found.length + " positions",
      found.flops ? amount(found.flops, "FLOP") : "", found.saved > 0.0005 ? (100 * found.saved).toFixed(1) + "% saved against " + family.relaylm.heavy + " alone in " + found.length + " steps" : "",
    ].filter(Boolean).join(" · ");
    $("plan").classList.remove("bad");
    if (reopen) openSchedule(found);
    reopen = false;
  } catch (error) {
    if (error.status === 401) askForKey();
    $("plan").textContent = error.message;
    $("plan").classList.add("bad");
  }
}

function openSchedule({ schedule, segments, placement, steps }) {
  const fixed = schedule.includes("@") ? "Its steps are not evenly spaced in time: edit it as text, or start from another."
    : ["ordered", "cells"].includes(placement) ? ""
    : placement.split(":")[0] + " places single steps: edit it as text, or start from another.";
  if (inCounts(schedule)) setPace("steps", steps);
  strip.open(family.relaylm.models, segments, fixed);
}

// What was typed may hold a spacing of its own: it belongs into the field beside it.
function typed() {
  const own = /^(.*?)[\s,]+spaced:(\d+)(:prefix|:sets)?$/.exec($("schedule").value.trim());
  if (own) {
    $("schedule").value = own[1];
    setPace(own[3] === ":prefix" ? "prefix" : "spacing", own[2]);
  }
  changed(true);
}

// ------------------------------------------------------------------------------------------------ a run

function problem(message = "") {
  $("problem").textContent = message;
  $("problem").hidden = !message;
}

function askForKey() {
  $("more").open = true;
  $("key").focus();
}

// A strip's stretches as runs along time, from 1 down to 0: [model, from, to].
function runsOf(segments) {
  const whole = segments.reduce((sum, { share }) => sum + share, 0);
  let at = 1;
  return segments.map(({ model, share }) => [
    family.relaylm.models.findIndex(({ name }) => name === model), at, at = Math.max(0, at - share / whole),
  ]);
}

function lane(name, segments) {
  const root = make("section", $("lanes"), "lane"), title = make("h3", root, "", name);
  const view = new Lane(root, name, family.relaylm.models, runsOf(segments), (from, position) => {
    for (const other of lanes) if (other.view !== from) other.view.inspect(position, false);
  });
  view.blank = family.relaylm.tokenizer === "text8" ? 1 : 4;
  view.text.classList.toggle("grid", view.blank === 1);
  return { name, view, count: make("span", title, "soft"), start: null, done: null };
}

// One lane after the other, so that each has the machine to itself and its milliseconds can be compared. What the heavy
// model alone wrote is kept until something other than the schedule is changed.
async function run() {
  if (!family) return;
  stop();
  problem();
  remember();
  const control = running = new AbortController(), { heavy } = family.relaylm;
  busy(true);
  if (lookup) await plan();
  if (running !== control) return;
  $("lanes").replaceChildren();
  $("costs").replaceChildren();
  $("differ").textContent = "";
  const beside = $("compare").checked ? lane(heavy + " alone", [{ model: heavy, share: 1 }]) : null;
  const mine = lane("Your schedule", strip.segments), bodies = [$("schedule").value.trim(), heavy].map(request);
  const key = JSON.stringify(bodies[1]);
  lanes = beside ? [beside, mine] : [mine];
  $("lanes").classList.toggle("two", lanes.length > 1);
  $("result").hidden = false;
  try {
    if (beside && kept?.key === key) begin(Object.assign(beside, { start: kept.start, done: kept.done }), kept.sample);
    await follow(mine, bodies[0], control.signal);
    if (beside && !beside.done) {
      await follow(beside, bodies[1], control.signal);
      kept = { key, start: beside.start, done: beside.done, sample: beside.view.sample };
    }
  } catch (error) {
    control.abort();
    if (running === control && error.name !== "AbortError") {
      problem(error.message);
      if (error.status === 401) askForKey();
    }
  } finally {
    if (running === control) finish();
  }
}

function begin({ view }, sample) {
  view.open(sample);
  refresh();
}

async function follow(one, body, signal) {
  const models = family.relaylm.models, { view } = one;
  for await (const { event, data } of denoise(body, signal)) {
    if (event === "start") {
      one.start = data;
      const given = data.given[0], empty = () => ({
        pieces: [...given], writer: given.map(() => -1), call: given.map(text => (text === null ? null : 0)),
        logprob: given.map(() => null), token: given.map(() => null), calls: [],
      });
      begin(one, empty());
      for (const { view: next } of lanes) if (!next.sample) next.open(empty()); // it waits for its turn
    } else if (event === "written" && data.row === 0) {
      const step = one.start.law.startsWith("uniform") ? data.step : null; // else it counts calls
      view.add({ ...data, step, model: models.findIndex(({ name }) => name === data.model) });
      refresh();
    } else if (event === "done") {
      one.done = data.relaylm;
      view.sample.pieces = data.pieces?.[0] ?? view.sample.pieces; // characters of several tokens are whole now
      refresh();
    } else if (event === "error") throw new Error(data.error.message);
  }
  if (!one.done) throw new Error("the stream ended early");
}

const stop = () => running?.abort();

function busy(on) {
  $("run").hidden = on;
  $("stop").hidden = !on;
  $("controls").hidden = on;
  $("save").disabled = on || !lanes.some(({ start }) => start);
  $("result").setAttribute("aria-busy", String(on));
}

function finish() {
  running = null;
  busy(false);
  for (const { start, view } of lanes) if (!start) view.root.remove(); // stopped before its turn
  lanes = lanes.filter(({ start }) => start);
  $("lanes").classList.toggle("two", lanes.length > 1);
  if (!lanes.length) return;
  for (const { view } of lanes) view.text.classList.remove("grid"); // all is known: lines may break at words
  transport.open(Math.max(...lanes.map(({ view }) => view.sample.calls.length)), Infinity);
  $("controls").hidden = transport.total === 0;
}

// Draws at most once a frame what has arrived.
let waiting = false;
function refresh() {
  if (waiting) return;
  waiting = true;
  const now = () => { waiting = false; draw(running ? null : transport.at); };
  document.hidden ? setTimeout(now, 50) : requestAnimationFrame(now);
}

// Every lane after `at` calls; null: all that are known, while more come.
function draw(at) {
  const open = lanes.filter(({ start }) => start);
  for (const { view, count } of open) {
    const total = view.sample.calls.length;
    view.show(at === null ? total : at >= transport.total ? Infinity : at);
    count.textContent = view.at + (view.at < total ? " of " + total : "") + " calls";
  }
  const said = [];
  if (open.length > 1) {
    const { differ, both } = compare(open[0].view, open[1].view);
    if (both) said.push(differ ? differ + " of " + both + " tokens differ; they have a line above." : "The same " + both + " tokens in both.");
  }
  const changes = [...new Set(open.flatMap(({ done }) => done?.changes_law ?? []))];
  if (changes.length) said.push("Not the models' own distribution: " + changes.join(", ") + ".");
  $("differ").textContent = said.join(" ");
  drawCosts(open);
}

function drawCosts(open) {
  const models = family.relaylm.models, label = ({ name }) => (open.length > 1 && name !== "Your schedule" ? family.relaylm.heavy : "yours");
  const most = values => Math.max(...values, 1e-12);
  const made = open.map(({ view }) => view.made());
  const calls = made.map(row => row.reduce((a, b) => a + b, 0)), whole = most(open.map(({ view }) => view.sample.calls.length));
  const group = title => { const root = make("div", $("costs")); make("h3", root, "", title); return make("div", root); };
  $("costs").replaceChildren();
  bars(group("Calls"), open.map((one, k) => ({
    label: label(one), note: String(calls[k]), parts: made[k].map((count, m) => [count / whole, models[m].colour]),
  })));
  const totals = (title, value, text) => {
    const values = open.map(value), top = most(values.filter(Number.isFinite));
    const off = k => (k && Number.isFinite(values[0] * values[k]) ? " (" + (values[k] > values[0] ? "+" : "") + (100 * (values[k] / values[0] - 1)).toFixed(0) + "%)" : "");
    if (values.some(Number.isFinite)) bars(group(title), open.map((one, k) => ({
      label: label(one), note: Number.isFinite(values[k]) ? text(values[k]) + off(k) : "…", parts: [[(values[k] ?? 0) / top, null]],
    })));
  };
  totals("FLOPs", ({ done, start }) => done?.flops ?? start.planned?.flops ?? undefined, value => amount(value, "FLOP"));
  totals("Milliseconds computing", ({ done }) => done && 1000 * done.seconds_computing, value => value.toFixed(value < 100 ? 1 : 0));
}

// ------------------------------------------------------------------------------------------------ elsewhere

const say = text => { $("said").textContent = text; };

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(what + " copied.");
  } catch {
    say("The browser does not allow copying here: select the text, or the address above.");
  }
}

function showSnippet() {
  const language = document.querySelector("[name=snippet]:checked").value;
  $("snippet").textContent = SNIPPETS[language](request($("schedule").value.trim()), access);
}

// The stand-alone player with these lanes in it, as `relaylm sample --html` writes it.
async function save() {
  const template = await (await fetch("player.html")).text();
  const models = family.relaylm.models;
  const cost = ({ done }) => (done ? [
    Object.values(done.calls).reduce((a, b) => a + b, 0) + " calls", done.flops ? amount(done.flops, "FLOP") : "",
  ].filter(Boolean).join(", ") : "stopped");
  const open = lanes.filter(({ start }) => start), [{ start }] = open;
  const data = {
    title: start.family + ": " + open.map(one => one.start.schedule).join(" and "),
    about: start.law + ", seed " + start.seed + "; " + open.map(one => one.name + " " + cost(one)).join("; "),
    heavy: family.relaylm.heavy,
    models: models.map(({ name, colour }) => ({ name, colour })),
    lanes: open.map(({ name, view }) => ({ label: name, strip: view.strip, samples: [view.sample] })),
  };
  const escape = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const parts = { $TITLE: escape(data.title), $DATA: JSON.stringify(data).replaceAll("<", "\\u003c").replaceAll(">", "\\u003e") };
  const page = template.replace(/\$(?:TITLE|DATA)/g, found => parts[found]);
  const link = make("a", null);
  link.href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  link.download = "relaylm.html";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say("Saved as relaylm.html.");
}

// ------------------------------------------------------------------------------------------------ start

for (const preset of PRESETS) {
  const button = make("button", $("presets"), "", preset.replace(":", " ").replace("small-first", "light first"));
  Object.assign(button, { type: "button", value: preset });
  button.addEventListener("click", () => { $("schedule").value = preset; typed(); });
}
themeButton($("theme"));
$("form").addEventListener("submit", event => { event.preventDefault(); run(); });
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", () => { stop(); $("run").hidden = false; $("run").focus(); });
$("dice").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 1e6); changed(); });
$("schedule").addEventListener("change", typed);
$("schedule").addEventListener("keydown", event => { if (event.key === "Enter" && !event.ctrlKey) { event.preventDefault(); typed(); } });
$("model").addEventListener("change", () => { openFamily(families.find(({ id }) => id === $("model").value)); typed(); });
$("pace").addEventListener("change", () => {
  const was = $("number-label").textContent;
  showPace();
  if ($("number-label").textContent !== was) $("number").value = was === "Distance" ? number("length") ?? family.relaylm.length : 16;
  inShares();
  changed();
});
$("number").addEventListener("input", inShares);
$("rule").addEventListener("change", () => { if ($("rule").value && $("pace").value !== "steps") { setPace("own"); changed(); } });
for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", () => { showMode(); changed(); });
for (const radio of document.querySelectorAll("[name=snippet]")) radio.addEventListener("change", showSnippet);
for (const id of FIELDS) if (!["schedule", "model"].includes(id)) $(id).addEventListener("input", () => changed());
$("compare").addEventListener("change", () => changed());
$("key").addEventListener("change", () => { access.key = $("key").value; families.length ? changed() : start(); });
$("share").addEventListener("click", () => { remember(); copy(location.href, "Link"); });
$("copy").addEventListener("click", () => copy($("snippet").textContent, "Code"));
$("save").addEventListener("click", save);
addEventListener("hashchange", () => { restore(); typed(); });

async function start() {
  try {
    families = (await get("v1/models")).data;
  } catch (error) {
    if (error.status === 401) askForKey();
    return problem(error.message);
  }
  problem();
  $("model").replaceChildren();
  for (const { id } of families) make("option", $("model"), "", id).value = id;
  restore();
  typed();
}
start();
