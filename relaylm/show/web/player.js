// The stand-alone player: replays the samples in #data, one lane or two beside each other.
import { Lane, Transport, amount, bars, compare, counted, make, paint, still, themeButton } from "./renderer.js";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
let which = 0;

$("title").textContent = data.title;
$("about").textContent = data.about;
$("lanes").classList.toggle("two", data.lanes.length > 1);
const lanes = data.lanes.map(({ label, strip }) => {
  const section = make("section", $("lanes"));
  if (data.lanes.length > 1) make("h2", section, "", label);
  return new Lane(section, label, data.models, strip,
    (from, position) => lanes.forEach(lane => lane !== from && lane.inspect(position, false)));
});
const counts = data.models.map(model => {
  const item = make("span", $("legend"));
  paint(make("i", item, "swatch"), model.colour);
  return make("span", item);
});
const transport = new Transport($("controls"), show);
const choice = make("label", $("controls"), "soft", "sample ");
const select = make("select", choice);
const rows = data.lanes[0].samples.length;
for (let k = 0; k < rows; k++) make("option", select, "", k + 1).value = k;
choice.hidden = rows < 2;

function openSample(k, at) {
  which = k;
  select.value = k;
  data.lanes.forEach((lane, j) => lanes[j].open(lane.samples[k]));
  transport.open(Math.max(...lanes.map(lane => lane.sample.calls.length)), at);
}

function show(at) {
  const end = at >= transport.total;
  lanes.forEach(lane => lane.show(end ? Infinity : at));
  const [first] = lanes, calls = first.sample.calls, call = first.at ? calls[first.at - 1] : null;
  const state = ["call " + at + " of " + transport.total];
  if (call) state.push("t = " + call.t.toFixed(3), ...(call.step === null ? [] : ["step " + call.step]));
  if (call && lanes.length < 2) state.push(data.models[call.model].name);
  const made = lanes.map(lane => lane.made());
  counts.forEach((count, m) => {
    count.textContent = data.models[m].name + ": " + made.map(row => row[m]).join(" and ") + " calls";
  });
  meter(calls, call, made);
  if (lanes.length > 1) {
    const { differ, both } = compare(...lanes);
    state.push(differ + " of " + counted(both, "token") + " differ");
  }
  $("state").textContent = state.join(", ");
  const link = "#" + (which + 1) + "/" + at;
  if (!transport.playing && location.hash !== link) history.replaceState(null, "", link);
}

function meter(calls, call, made) {
  const end = calls.length ? calls[calls.length - 1].flops : null;
  const by = made.map(row => row.map((count, m) => [count / (transport.total || 1), data.models[m].colour]));
  if (lanes.length > 1 || !end) {
    bars($("meter"), lanes.map((lane, j) => ({
      label: lanes.length > 1 ? data.lanes[j].label : "calls", parts: by[j], note: counted(lane.at, "call"),
    })));
    return;
  }
  const [spent, heavy] = call ? call.flops : [0, 0], each = data.models.map(() => 0);
  let before = 0;
  for (const one of calls.slice(0, lanes[0].at)) { each[one.model] += one.flops[0] - before; before = one.flops[0]; }
  const colour = data.models.find(model => model.name === data.heavy)?.colour;
  const parts = each.map((cost, m) => [cost / end[1], data.models[m].colour]);
  bars($("meter"), [
    { label: "this schedule", parts, note: amount(spent, "FLOP") },
    { label: data.heavy + " alone", parts: [[heavy / end[1], colour]], note: amount(heavy, "FLOP") },
    { label: "saved so far", parts: [[heavy ? 1 - spent / heavy : 0, null]],
      note: heavy ? (100 * (1 - spent / heavy)).toFixed(1) + "%" : "" },
  ]);
}

const turnTheme = themeButton($("theme"));
const turn = by => openSample((which + by + rows) % rows, transport.at);
const step = by => { transport.play(false); transport.go(transport.at + by); };
const KEYS = {
  " ": () => transport.play(!transport.playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1),
  Home: () => step(-Infinity), End: () => step(Infinity), ArrowUp: () => turn(-1), ArrowDown: () => turn(1),
  "+": () => transport.faster(1), "=": () => transport.faster(1), "-": () => transport.faster(-1), d: turnTheme,
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === " " && event.target.tagName === "BUTTON" && event.target !== transport.button) return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
});
select.addEventListener("change", () => openSample(Number(select.value), transport.at));

function follow() {
  const link = location.hash.match(/^#(\d+)\/(\d+)$/);
  if (link) openSample(Math.max(0, Math.min(Number(link[1]), rows) - 1), Number(link[2]));
  return Boolean(link);
}
addEventListener("hashchange", () => { transport.play(false); follow(); });
if (!follow()) {
  openSample(0, still() ? Infinity : 0);
  if (!still()) transport.play(true);
}
