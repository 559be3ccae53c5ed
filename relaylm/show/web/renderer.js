// Draws a denoising: the text as it is written, the schedule along time, costs as bars, and the controls of a replay.
// One module for the page of `relaylm serve`, the stand-alone player and reports. Texts are set as textContent only.
//
// A sample is {pieces, writer, call, calls, logprob, token}: for each position the text of its token (null: not known
// yet), the number of the model that wrote it (-1: given), the call that did (0: given, null: not written yet), and
// where they are known its log-probability and id; for each call {t, step, model, flops}. A model is {name, colour}.

export function make(tag, parent, className = "", text = undefined) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent?.append(element);
  return element;
}

export function amount(number, unit = "") {
  const scales = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [0, ""]];
  const [scale, letter] = scales.find(([least]) => number >= least), size = scale || 1;
  const value = number / size;
  return (size === 1 ? String(Math.round(value)) : value.toPrecision(3)) + (letter || unit ? " " : "") + letter + unit;
}

export const counted = (count, word) => count + " " + word + (count === 1 ? "" : "s");

export const paint = (element, colour) => {
  element.classList.add("by");
  element.style.setProperty("--c", colour);
  return element;
};

const SPACE = /\s/u;

export class Lane {
  // The text of one sample in `root`, a line about the token that is pointed at, and the strip of its schedule.
  constructor(root, label, models, strip = [], onInspect = undefined) {
    Object.assign(this, { root, models, strip, onInspect, spans: [], shown: [], at: 0, place: -1, blank: 1 });
    this.text = make("div", root, "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", label + ": arrow keys go through its tokens");
    this.line = make("p", root, "inspect soft");
    this.line.setAttribute("role", "status");
    this.track = make("div", root, "track");
    this.track.setAttribute("aria-hidden", "true");
    this.text.addEventListener("pointerover", event => this.point(event.target));
    this.text.addEventListener("pointerleave", () => this.inspect(-1));
    this.text.addEventListener("click", event => this.point(event.target));
    this.text.addEventListener("focus", () => this.inspect(this.place < 0 ? 0 : this.place));
    this.text.addEventListener("blur", () => this.inspect(-1));
    this.text.addEventListener("keydown", event => this.key(event));
  }

  open(sample) {
    this.sample = sample;
    this.place = -1;
    this.shown = sample.pieces.map(() => "");
    this.text.replaceChildren();
    this.spans = sample.pieces.map(() => make("span", this.text));
    this.track.replaceChildren();
    for (const [model, from, to] of this.strip) {
      const run = paint(make("i", this.track), this.models[model].colour);
      run.style.left = 100 * (1 - from) + "%";
      run.style.width = 100 * (from - to) + "%";
    }
    this.ticks = [];
    this.head = make("b", this.track, "head");
    this.show(0);
  }

  // Adds one call of a sample that is being made.
  add({ positions, tokens, texts, logprobs, model, step, t }) {
    const { pieces, writer, call, calls, logprob, token } = this.sample;
    calls.push({ t, step: step || null, model, flops: null });
    positions.forEach((position, k) => {
      pieces[position] = texts[k];
      token[position] = tokens[k];
      writer[position] = model;
      call[position] = texts[k] === null ? null : calls.length; // a rule may mask a position again
      logprob[position] = logprobs?.[k] ?? null;
    });
  }

  isWritten(position) {
    const call = this.sample.call[position];
    return call !== null && call <= this.at;
  }

  show(place) {
    const { pieces, writer, call, calls } = this.sample;
    this.at = Math.max(0, Math.min(place, calls.length));
    this.spans.forEach((span, j) => {
      const written = this.isWritten(j);
      const now = call[j] === this.at && place < Infinity;
      const kind = !written ? "mask" : call[j] === 0 ? "given" : now ? "written now" : "written";
      const key = kind + call[j] + (pieces[j] ?? "");
      if (this.shown[j] === key) return;
      this.shown[j] = key;
      const extra = ["on", "differs"].filter(name => span.classList.contains(name));
      span.className = [kind, ...extra].join(" ");
      // A mask is as wide as what will stand there, and lines break where they will: nothing moves in a replay.
      span.textContent = written ? pieces[j]
        : pieces[j] === null ? "░".repeat(this.blank)
        : [...pieces[j]].map(letter => SPACE.test(letter) ? letter : "░").join("") || "░";
      if (written && call[j] > 0) paint(span, this.models[writer[j]].colour);
    });
    while (this.ticks.length < calls.length) {
      const tick = make("u", this.track);
      tick.style.left = 100 * (1 - calls[this.ticks.length].t) + "%";
      this.ticks.push(tick);
    }
    const last = this.at ? calls[this.at - 1] : null;
    this.head.style.left = last ? 100 * (1 - last.t) + "%" : "0%";
    this.head.hidden = !last || place === Infinity;
    if (this.place >= 0) this.line.textContent = this.about(this.place);
  }

  // Calls of each model so far.
  made() {
    const made = this.models.map(() => 0);
    for (const call of this.sample.calls.slice(0, this.at)) made[call.model] += 1;
    return made;
  }

  about(position) {
    const { pieces, writer, call, calls, logprob } = this.sample;
    const where = "position " + (position + 1) + " of " + pieces.length;
    if (!this.isWritten(position)) return where + " · not written yet";
    const what = "“" + pieces[position].replace(/\s/gu, letter => letter === "\n" ? "⏎" : "␣") + "” · " + where;
    if (call[position] === 0) return what + " · given";
    const { t, step } = calls[call[position] - 1];
    const chance = logprob?.[position];
    return what + " · by " + this.models[writer[position]].name + " in call " + call[position] + " of " + calls.length
      + ", t = " + t.toFixed(3) + (step ? ", step " + step : "")
      + (Number.isFinite(chance) ? " · probability " + Math.exp(chance).toPrecision(2) : "");
  }

  point(target) {
    const position = this.spans.indexOf(target);
    if (position >= 0) this.inspect(position);
  }

  // Shows what is known of a position; -1: of none.
  inspect(position, others = true) {
    if (position >= this.spans.length) return;
    this.spans[this.place]?.classList.remove("on");
    this.place = position;
    this.spans[position]?.classList.add("on");
    this.line.textContent = position < 0 ? "" : this.about(position);
    if (others) this.onInspect?.(this, position);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.spans.length) return;
    const last = this.spans.length - 1, here = Math.max(0, this.place);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key]
      ?? this.above(here, event.key);
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.inspect(Math.max(0, Math.min(to, last)));
    this.spans[this.place].scrollIntoView({ block: "nearest" });
  }

  // The token in the line above or below.
  above(here, key) {
    const way = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (way === undefined) return undefined;
    const box = span => span.getClientRects()[0] ?? span.getBoundingClientRect();
    const from = box(this.spans[here]);
    let best = here, least = Infinity;
    for (let j = here + way; j >= 0 && j < this.spans.length; j += way) {
      const to = box(this.spans[j]), lines = Math.round(Math.abs(to.top - from.top) / from.height);
      if (lines > 1 && best !== here) break;
      const off = Math.abs(to.left - from.left);
      if (lines && off < least) [best, least] = [j, off];
    }
    return best;
  }
}

// Marks the positions at which two lanes have written different tokens; counts them, and those that both have written.
export function compare(one, other) {
  let differ = 0, both = 0;
  one.spans.forEach((span, j) => {
    const written = one.isWritten(j) && other.isWritten(j) && one.sample.call[j] !== 0;
    const what = one.sample.token ? "token" : "pieces"; // several tokens may make one character
    const differs = written && one.sample[what][j] !== other.sample[what][j];
    both += written;
    differ += differs;
    span.classList.toggle("differs", differs);
    other.spans[j]?.classList.toggle("differs", differs);
  });
  return { differ, both };
}

// Bars below each other: [{label, parts: [[share, colour]], note}].
export function bars(root, lines) {
  root.replaceChildren();
  for (const { label, parts, note } of lines) {
    const row = make("div", root, "bars");
    make("span", row, "soft", label);
    const bar = make("div", row, "bar");
    for (const [share, colour] of parts) {
      const part = make("i", bar);
      if (colour) paint(part, colour);
      part.style.width = 100 * Math.min(1, share) + "%";
    }
    make("span", row, "note", note);
  }
}

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8], SECONDS = 8; // a whole sample takes so long at speed 1

export class Transport {
  // Play, a slider over calls, and a speed. `show(at)` draws the state after `at` calls.
  constructor(root, show) {
    Object.assign(this, { show, at: 0, total: 0, playing: false });
    this.button = make("button", root, "play", "Play");
    this.button.type = "button";
    this.slider = make("input", root);
    Object.assign(this.slider, { type: "range", min: 0, step: 1, value: 0 });
    this.slider.setAttribute("aria-label", "calls made so far");
    const label = make("label", root, "soft", "speed ");
    this.speed = make("select", label);
    for (const speed of SPEEDS) make("option", this.speed, "", "×" + speed).value = speed;
    this.speed.value = 1;
    this.button.addEventListener("click", () => this.play(!this.playing));
    this.slider.addEventListener("input", () => {
      const at = Number(this.slider.value);
      this.play(false);
      this.go(at);
    });
  }

  open(total, at) {
    this.play(false);
    this.total = this.slider.max = total;
    this.go(at);
  }

  go(at) {
    this.at = Math.max(0, Math.min(at, this.total));
    this.slider.value = this.at;
    this.show(this.at);
  }

  play(on) {
    const was = this.playing;
    this.playing = on;
    this.button.textContent = on ? "Pause" : "Play";
    if (!on) return was ? this.go(this.at) : undefined;
    if (this.at >= this.total) this.go(0);
    this.last = performance.now();
    this.due = 0;
    setTimeout(() => this.tick(), 30);
  }

  tick() {
    if (!this.playing) return;
    const now = performance.now();
    this.due += (now - this.last) / 1000 / SECONDS * this.total * Number(this.speed.value);
    this.last = now;
    const whole = Math.floor(this.due);
    this.due -= whole;
    if (whole) this.go(this.at + whole);
    if (this.at >= this.total) return this.play(false);
    setTimeout(() => this.tick(), 30);
  }

  faster(by) {
    const k = SPEEDS.indexOf(Number(this.speed.value)) + by;
    this.speed.value = SPEEDS[Math.max(0, Math.min(k, SPEEDS.length - 1))];
  }
}

// A button that changes between dark and light; what was chosen is kept, else the system decides.
export function themeButton(button) {
  const root = document.documentElement;
  const store = action => { try { return action(); } catch { return null; } }; // storage may be forbidden
  const set = name => { root.dataset.theme = name; };
  set(store(() => localStorage.getItem("relaylm-theme"))
    ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const turn = () => {
    set(root.dataset.theme === "dark" ? "light" : "dark");
    store(() => localStorage.setItem("relaylm-theme", root.dataset.theme));
  };
  button.addEventListener("click", turn);
  return turn;
}

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
