// The schedule as a strip that can be edited: a button for each stretch, a slider for each border between two.
import { make, paint } from "./show/renderer.js";

const WHOLE = 1000, LEAST = 10, PERCENT = 10; // shares are kept in tenths of a percent, so that they add up exactly

export const shareText = share => (share % PERCENT ? (share / PERCENT).toFixed(1) : share / PERCENT) + "%";

// Shares (fractions of 1) in tenths of a percent that add up to all: whole parts first, then the largest remainders.
function inTenths(shares) {
  const tenths = shares.map(share => Math.max(1, Math.floor(share * WHOLE + 1e-9)));
  const order = shares.map((share, k) => [share * WHOLE - tenths[k], k]).sort((a, b) => b[0] - a[0]);
  const left = WHOLE - tenths.reduce((a, b) => a + b, 0);
  for (let k = 0; k < left; k++) tenths[order[k % order.length][1]] += 1;
  return tenths;
}

export class Strip {
  constructor(root, tools, onChange) {
    Object.assign(this, { root, tools, onChange, models: [], segments: [], selected: 0, fixed: false });
  }

  // `segments`: [{model, share}], shares as fractions of 1. A fixed strip is shown and cannot be edited.
  open(models, segments, fixed = "") {
    const tenths = fixed ? segments.map(({ share }) => share * WHOLE) : inTenths(segments.map(({ share }) => share));
    this.models = models;
    this.segments = segments.map(({ model }, k) => ({ model, share: tenths[k] }));
    this.fixed = fixed;
    this.selected = Math.min(this.selected, segments.length - 1);
    this.build();
  }

  get notation() {
    const parts = this.segments.map(({ model, share }) => model + ":" + shareText(share));
    return parts.length === 1 ? this.segments[0].model : parts.join(" ");
  }

  build(focus = null) {
    this.root.replaceChildren();
    this.root.classList.toggle("fixed", Boolean(this.fixed));
    this.buttons = [];
    this.borders = [];
    this.segments.forEach((_, k) => {
      if (k && !this.fixed) this.borders.push(this.border(k));
      this.buttons.push(this.segment(k));
    });
    this.update();
    if (focus === "segment") this.buttons[this.selected].focus();
  }

  segment(k) {
    const button = make("button", this.root, "segment");
    button.type = "button";
    button.disabled = Boolean(this.fixed);
    if (!this.fixed) { make("b", button); make("small", button); }
    button.addEventListener("click", () => this.select(k));
    button.addEventListener("dblclick", event => {
      const box = button.getBoundingClientRect();
      this.split(k, (event.clientX - box.left) / box.width);
    });
    button.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const model = this.models[Number(event.key) - 1];
      if (model) this.assign(k, model.name, "segment");
      else if (event.key === "s") this.split(k);
      else if (event.key === "Delete" || event.key === "Backspace") this.remove(k);
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        this.buttons[k + (event.key === "ArrowLeft" ? -1 : 1)]?.focus();
      } else return;
      event.preventDefault();
    });
    return button;
  }

  border(k) {
    const border = make("div", this.root, "border");
    border.tabIndex = 0;
    border.setAttribute("role", "slider");
    border.setAttribute("aria-orientation", "horizontal");
    border.addEventListener("pointerdown", event => {
      border.setPointerCapture(event.pointerId);
      border.focus();
      event.preventDefault();
    });
    border.addEventListener("pointermove", event => {
      if (!border.hasPointerCapture(event.pointerId)) return;
      const box = this.root.getBoundingClientRect();
      this.move(k, PERCENT * Math.round((event.clientX - box.left) / box.width * WHOLE / PERCENT));
    });
    border.addEventListener("keydown", event => {
      const [from, to] = this.reach(k), by = event.shiftKey ? 1 : PERCENT, at = this.start(k);
      const place = {
        ArrowLeft: at - by, ArrowDown: at - by, ArrowRight: at + by, ArrowUp: at + by,
        PageDown: at - 10 * PERCENT, PageUp: at + 10 * PERCENT, Home: from, End: to,
      }[event.key];
      if (place !== undefined) this.move(k, place);
      else if (event.key === "Delete" || event.key === "Backspace") this.merge(k);
      else return;
      event.preventDefault();
    });
    return border;
  }

  start(k) {
    return this.segments.slice(0, k).reduce((sum, { share }) => sum + share, 0);
  }

  reach(k) {
    const [from, to] = [this.start(k - 1), this.start(k + 1)];
    return [Math.min(from + LEAST, this.start(k)), Math.max(to - LEAST, this.start(k))];
  }

  // Moves the border before segment k to a place in tenths of a percent.
  move(k, place) {
    const [from, to] = this.reach(k), by = Math.max(from, Math.min(place, to)) - this.start(k);
    if (!by) return;
    this.segments[k - 1].share += by;
    this.segments[k].share -= by;
    this.update();
    this.onChange();
  }

  select(k) {
    this.selected = k;
    this.update();
  }

  assign(k, model, focus = null) {
    this.segments[k].model = model;
    this.selected = k;
    this.update();
    this.onChange();
    if (focus === "segment") this.buttons[k].focus();
  }

  // Divides a stretch; its second part goes to another model.
  split(k, where = 0.5) {
    const { model, share } = this.segments[k];
    if (share < 2 * LEAST) return;
    const first = Math.max(LEAST, Math.min(PERCENT * Math.round(share * where / PERCENT), share - LEAST));
    const next = this.segments[k + 1]?.model;
    const others = this.models.map(({ name }) => name).filter(name => name !== model);
    const other = others.find(name => name !== next) ?? others[0] ?? model;
    this.segments.splice(k, 1, { model, share: first }, { model: other, share: share - first });
    this.selected = k + 1;
    this.build("segment");
    this.onChange();
  }

  // Removes the border before segment k: the stretch before it goes on.
  merge(k) {
    this.segments[k - 1].share += this.segments[k].share;
    this.segments.splice(k, 1);
    this.selected = k - 1;
    this.build("segment");
    this.onChange();
  }

  // Removes a stretch: the one before it goes on, or the one after the first.
  remove(k) {
    if (this.segments.length < 2) return;
    const [{ share }] = this.segments.splice(k, 1), into = Math.max(0, k - 1);
    this.segments[into].share += share;
    this.selected = into;
    if (k && this.segments[k]?.model === this.segments[into].model) return this.merge(k);
    this.build("segment");
    this.onChange();
  }

  // Sets how much of the whole a stretch takes; its neighbour gives way.
  resize(k, share) {
    if (k + 1 < this.segments.length) this.move(k + 1, this.start(k) + share);
    else if (k) this.move(k, WHOLE - share);
    this.update();
  }

  update() {
    this.segments.forEach(({ model, share }, k) => {
      const button = this.buttons[k];
      paint(button, this.models.find(({ name }) => name === model)?.colour ?? "#808080");
      button.style.flexGrow = share;
      button.setAttribute("aria-pressed", String(!this.fixed && k === this.selected));
      const all = this.segments.length, which = ", " + (k + 1) + " of " + all;
      button.setAttribute("aria-label", model + ", " + shareText(Math.round(share)) + which);
      if (this.fixed) return;
      button.children[0].textContent = model;
      button.children[1].textContent = shareText(share);
      button.title = "Double click splits it here";
      if (!k) return;
      const [from, to] = this.reach(k), border = this.borders[k - 1];
      const between = this.segments[k - 1].model + " and " + model + ", " + k + " of " + (all - 1);
      border.setAttribute("aria-label", "border between " + between);
      border.setAttribute("aria-valuemin", from / PERCENT);
      border.setAttribute("aria-valuemax", to / PERCENT);
      border.setAttribute("aria-valuenow", this.start(k) / PERCENT);
      border.setAttribute("aria-valuetext", shareText(this.start(k)) + " from the masked end");
    });
    this.drawTools();
  }

  drawTools() {
    const controls = () => [...this.tools.querySelectorAll("button, input")];
    const focused = controls().indexOf(document.activeElement);
    this.tools.replaceChildren();
    if (this.fixed) return void make("span", this.tools, "soft", this.fixed);
    const k = this.selected, { model, share } = this.segments[k];
    const choice = make("div", this.tools, "switch");
    choice.setAttribute("role", "group");
    choice.setAttribute("aria-label", "Model of the stretch");
    for (const one of this.models) {
      const button = make("button", choice);
      button.type = "button";
      button.setAttribute("aria-pressed", String(one.name === model));
      paint(make("i", button, "swatch"), one.colour);
      button.append(one.name);
      button.addEventListener("click", () => this.assign(k, one.name));
    }
    const label = make("label", this.tools, "field", "Share, %");
    const input = make("input", label);
    const only = this.segments.length < 2;
    Object.assign(input, { type: "number", min: 1, max: 100, step: 1, value: share / PERCENT, disabled: only });
    input.addEventListener("change", () => this.resize(k, Math.round(PERCENT * Number(input.value))));
    const act = (text, what, disabled) => {
      const button = make("button", this.tools, "", text);
      Object.assign(button, { type: "button", disabled });
      button.addEventListener("click", what);
    };
    act("Split", () => this.split(k), share < 2 * LEAST);
    act("Remove", () => this.remove(k), only);
    controls()[focused]?.focus();
  }
}
