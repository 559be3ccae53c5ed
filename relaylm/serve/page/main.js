// The page of `relaylm serve`: what to write, and under which schedule.
import { access, get } from "./client.js";
import { runLanes, save, stop } from "./lanes.js";
import { amount, make, paint, themeButton } from "./show/renderer.js";
import { SNIPPETS } from "./snippets.js";
import { Strip } from "./strip.js";

const $ = id => document.getElementById(id);
const PRESETS = ["heavy", "sandwich:25%", "sandwich:50%", "small-first:25%", "light"];
const MORE = ["suffix", "rule", "temperature", "top_p"];
const FIELDS = ["model", "prompt", "infill", "length", "seed", "schedule", "pace", "number", ...MORE];
const NAMES = { model: "family", rule: "rule", pace: "way to choose what calls write" }; // of what has a list
let families = [], family;
// A look at the schedule that is due, the last one, and whether the strip is to be drawn anew.
let lookup = null, looked = null, reopen = false;
let taken = ""; // the notation as it was last looked at

const strip = new Strip($("strip"), $("tools"), () => {
  $("schedule").value = strip.notation;
  changed();
});

// ------------------------------------------------------------------------------------------------ settings

const radios = name => [...document.querySelectorAll("[name=" + name + "]")];
const chosen = name => radios(name).find(({ checked }) => checked).value;
const number = id => ($(id).value.trim() === "" ? undefined : Number($(id).value));
const schedule = () => $("schedule").value.trim();
// Whether a schedule is written in counts of steps (L32 H192 L32): then it says how many there are.
const inCounts = text => /^(?!quarter:|random:)(?:[LH]:?|[\w.-]+:)\d+(?![\d.%/])/.test(text);

// The fields of a request under a schedule, those that are set.
function request(under) {
  const pace = inCounts(under) ? "" : $("pace").value;
  const text = chosen("mode") === "infill" ? { infill: $("infill").value }
    : { prompt: $("prompt").value || undefined, suffix: $("suffix").value || undefined, length: number("length") };
  const fields = {
    model: family.id,
    schedule: under,
    spacing: { spacing: number("number"), prefix: $("number").value + ":prefix" }[pace],
    steps: { steps: number("number"), inf: "inf" }[pace],
    ...text,
    seed: number("seed") ?? 0,
    rule: $("rule").value || undefined,
    temperature: number("temperature"),
    top_p: number("top_p"),
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

// Everything that can be set, in the address: a link restores it. The API key is not part of it.
function remember() {
  const mode = chosen("mode"), words = new URLSearchParams({ mode });
  for (const id of FIELDS) {
    const text = id === "prompt" || id === "infill";
    if (text ? id === mode : $(id).value !== "") words.set(id, $(id).value);
  }
  if (!$("compare").checked) words.set("compare", "no");
  history.replaceState(null, "", "#" + words);
}

function restore() {
  const words = new URLSearchParams(location.hash.slice(1)), strange = [];
  $("form").reset();
  openFamily(families.find(({ id }) => id === words.get("model")) ?? families[0]);
  for (const id of FIELDS) {
    if (!words.has(id)) continue;
    const field = $(id), value = words.get(id);
    const known = field.tagName !== "SELECT" || [...field.options].some(option => option.value === value);
    if (!known) strange.push(id);
    else if (id !== "model") field.value = value;
  }
  problem(strange.map(id => "The link's " + NAMES[id] + " " + words.get(id) + " is not known to this server: "
    + $(id).selectedOptions[0].textContent + " is chosen instead.").join(" "));
  const infill = words.get("mode") === "infill";
  for (const radio of radios("mode")) radio.checked = (radio.value === "infill") === infill;
  $("compare").checked = words.get("compare") !== "no";
  $("more").open = MORE.some(id => $(id).value !== "");
  showMode();
  showPace();
  typed();
}

function openFamily(found) {
  family = found;
  const { models, length, spacing, rules, heavy } = family.relaylm;
  $("model").value = family.id;
  $("legend").replaceChildren();
  for (const { name, blocks, parameters, colour } of models) {
    const item = make("span", $("legend"));
    paint(make("i", item, "swatch"), colour);
    item.append([name, blocks && blocks + " blocks", parameters && amount(parameters)].filter(Boolean).join(" · "));
  }
  $("length").max = length;
  $("length").value = Math.min(length, 192);
  $("rule").replaceChildren();
  make("option", $("rule"), "", "none").value = "";
  for (const rule of rules) make("option", $("rule"), "", rule).value = rule;
  $("heavy-name").textContent = heavy;
  $("schedule").value = models.length > 1 ? "sandwich:50%" : "heavy";
  setPace(spacing ? "own" : "spacing", 16);
}

function showMode() {
  const infill = chosen("mode") === "infill";
  $("prompt").hidden = infill;
  $("infill").hidden = !infill;
  for (const field of document.querySelectorAll(".only-prompt")) field.hidden = infill;
  $("mode-help").textContent = infill ? "One _ for each token to be written."
    : "What you type stays; the rest is written.";
}

function setPace(pace, value = undefined) {
  $("pace").value = pace;
  if (value !== undefined) $("number").value = value;
  showPace();
}

function showPace() {
  const pace = $("pace").value, [own] = $("pace").options;
  own.textContent = $("rule").value ? "what the rule chooses"
    : family.relaylm.spacing ? "at the usual distance" : "what is usual";
  $("number-field").hidden = ["inf", "own"].includes(pace);
  $("number-label").textContent = pace === "steps" ? "Steps" : "Distance";
}

// ------------------------------------------------------------------------------------------------ the schedule

// Something was changed: keep it in the address, ask what it would cost, and write the snippets anew.
function changed(open = false) {
  if (!family) return;
  taken = $("schedule").value;
  remember();
  showSnippet();
  for (const button of $("presets").children) {
    button.setAttribute("aria-pressed", String(button.value === $("schedule").value));
  }
  clearTimeout(lookup);
  reopen ||= open;
  lookup = setTimeout(plan, 120);
}

function plan() {
  clearTimeout(lookup);
  lookup = null;
  return looked = look();
}

async function look() {
  try {
    const { seed, temperature, top_p, ...asked } = request(schedule());
    if (asked.prompt?.length > 2000) delete asked.prompt; // an address has its limits
    const found = await get("v1/schedule", asked);
    if (asked.schedule !== schedule()) return; // it was edited again in the meantime
    const { calls, flops, saved, length, law } = found, reference = family.relaylm.heavy + " alone in " + length + " steps";
    const made = calls && Math.round(Object.values(calls).reduce((a, b) => a + b, 0));
    $("plan").textContent = [
      made ? "about " + made + " calls for " + length + " positions" : length + " positions",
      law,
      flops && amount(flops, "FLOP"),
      saved > 0.0005 && (100 * saved).toFixed(1) + "% saved against " + reference,
    ].filter(Boolean).join(" · ");
    $("plan").classList.remove("bad");
    if (reopen) openSchedule(found);
    reopen = false;
  } catch (error) {
    if (error.status === 401) askForKey();
    $("plan").textContent = error.message;
    $("plan").classList.add("bad");
    if (reopen && error.status === 400) await openAnyway(schedule());
  }
}

// What is wrong may be the text or a number: the strip shows the schedule all the same, never one of another family.
async function openAnyway(under) {
  const { id, relaylm: { models, heavy } } = family;
  let found = { schedule: heavy, segments: [{ model: heavy, share: 1 }], placement: "ordered" };
  try {
    found = await get("v1/schedule", { model: id, schedule: under });
    reopen = false;
  } catch {
    if (strip.models === models) return; // it stays as it was
  }
  if (under === schedule()) openSchedule(found);
}

function openSchedule({ schedule: canonical, segments, placement, steps }) {
  const other = "edit it as text, or start from another.";
  const fixed = canonical.includes("@") ? "Its steps are not evenly spaced in time: " + other
    : ["ordered", "cells"].includes(placement) ? "" : placement.split(":")[0] + " places single steps: " + other;
  if (inCounts(canonical)) setPace("steps", steps);
  strip.open(family.relaylm.models, segments, fixed);
}

// What was typed may hold a spacing of its own: it belongs into the field beside it.
function typed() {
  const own = /^(.*?)[\s,]+spaced:(\d+)(:prefix|:sets)?$/.exec(schedule());
  if (own) {
    $("schedule").value = own[1];
    setPace(own[3] === ":prefix" ? "prefix" : "spacing", own[2]);
  }
  changed(true);
}

// A schedule in counts has one number of steps: for another it must be in shares.
function inShares() {
  if (inCounts(schedule()) && !strip.fixed) $("schedule").value = strip.notation;
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

async function run() {
  if (!family) return;
  problem();
  remember();
  if ($("schedule").value !== taken) typed();
  await (lookup ? plan() : looked);
  const beside = $("compare").checked ? request(family.relaylm.heavy) : null;
  try {
    await runLanes(family, strip.segments, request(schedule()), beside);
  } catch (error) {
    problem(error.message);
    if (error.status === 401) askForKey();
  }
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
  if (family) $("snippet").textContent = SNIPPETS[chosen("snippet")](request(schedule()), access);
}

// ------------------------------------------------------------------------------------------------ start

const on = (target, event, act) => (typeof target === "string" ? $(target) : target).addEventListener(event, act);

for (const preset of PRESETS) {
  const button = make("button", $("presets"), "", preset.replace(":", " ").replace("small-first", "light first"));
  Object.assign(button, { type: "button", value: preset });
  on(button, "click", () => { $("schedule").value = preset; typed(); });
}
themeButton($("theme"));
on("form", "submit", event => { event.preventDefault(); run(); });
on(document, "keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") stop();
});
on("stop", "click", () => { stop(); $("run").hidden = false; $("run").focus(); });
on("dice", "click", () => { $("seed").value = Math.floor(Math.random() * 1e6); changed(); });
on("schedule", "change", typed);
on("schedule", "keydown", event => {
  if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) { event.preventDefault(); typed(); }
});
on("model", "change", () => { problem(); openFamily(families.find(({ id }) => id === $("model").value)); typed(); });
on("pace", "change", () => {
  const was = $("number-label").textContent;
  showPace();
  if ($("number-label").textContent !== was) {
    $("number").value = was === "Distance" ? number("length") ?? family.relaylm.length : 16;
  }
  inShares();
  changed();
});
on("number", "input", inShares);
on("rule", "change", () => {
  if ($("rule").value && $("pace").value !== "steps") setPace("own");
  showPace();
  changed();
});
for (const radio of radios("mode")) on(radio, "change", () => { showMode(); changed(); });
for (const radio of radios("snippet")) on(radio, "change", showSnippet);
for (const id of FIELDS) if (!["schedule", "model"].includes(id)) on(id, "input", () => { problem(); changed(); });
on("compare", "change", () => changed());
on("key", "change", () => { access.key = $("key").value; families.length ? changed() : start(); });
on("share", "click", () => { remember(); copy(location.href, "Link"); });
on("copy", "click", () => copy($("snippet").textContent, "Code"));
on("save", "click", async () => say("Saved as " + await save() + "."));
on(window, "hashchange", restore);

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
}
start();
