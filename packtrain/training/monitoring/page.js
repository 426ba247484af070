"use strict";
// Draws one run or several. The data is in the page, or comes from where the page came from, only what is new each time.
// Names, settings and samples reach the page as text only.

const at = (id) => document.getElementById(id);
const COLORS = ["#2f7ed8", "#e4761b", "#17a37b", "#c9417f", "#8a63d2", "#b58900", "#0ea5b7", "#dc4c4c", "#6b8e23", "#8a6f5a"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const WAIT = 2; // seconds for which an answer may wait for the end of the run
const HIDDEN_WAIT = 20; // the same in a page that nobody sees
const MISSING = 5; // seconds between two questions where no answer came
const runs = new Map(); // by name, in the order of the data
let seen = { session: "", version: 0 };
let page = {}; // the last answer without its runs
let one = false; // whether the page is of a run that goes on in the process that serves it

// ---- texts -----------------------------------------------------------------------------------------------------

const number = (n, digits = 0) =>
  n == null ? "–" : n.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const short = (n) => (n == null ? "–" : Math.abs(n) >= 1e-3 && Math.abs(n) < 1e5 ? String(+n.toPrecision(4)) : n.toExponential(2));
const loss = (n) => (n == null ? "–" : Math.abs(n) < 1e5 ? n.toFixed(4) : n.toExponential(3));

function clock(seconds) {
  if (seconds == null) return "–";
  const s = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(s / 3600);
  return hours ? `${hours}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}

function sizeText(nbytes) {
  if (nbytes == null) return "–";
  let unit = 0;
  for (; nbytes >= 1024 && unit < 4; unit++) nbytes /= 1024;
  return unit ? `${nbytes.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}` : `${Math.round(nbytes)} B`;
}

function ago(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// ---- elements --------------------------------------------------------------------------------------------------

/** An element with attributes and children; texts become text. */
function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function draw(tag, given, text) {
  const element = document.createElementNS(at("seed").namespaceURI, tag);
  for (const [name, value] of Object.entries(given)) if (value !== "") element.setAttribute(name, value);
  if (text != null) element.textContent = text;
  return element;
}

function swatch(color) {
  const square = make("i");
  square.style.background = color;
  return square;
}

// ---- data ------------------------------------------------------------------------------------------------------

/** Take an answer. Returns false if something between it and the last one is missing. */
function take(data) {
  if (data.since === 0) runs.clear();
  const names = new Set(data.runs.map((run) => run.name));
  for (const name of runs.keys()) if (!names.has(name)) runs.delete(name);
  for (const run of data.runs) {
    const known = runs.get(run.name) ?? { hidden: false, curves: { train: {}, valid: {} }, samples: [], settings: {}, about: {} };
    for (const part of ["train", "valid"]) {
      for (const [name, values] of Object.entries(run[part].columns)) {
        const column = (known.curves[part][name] ??= []);
        if (column.length < run[part].from) return false;
        column.length = run[part].from;
        column.push(...values);
      }
    }
    runs.set(run.name, { ...known, ...run, curves: known.curves });
  }
  const { runs: _, ...rest } = data;
  page = { ...rest, messages: data.messages ?? page.messages };
  one = page.live;
  seen = { session: data.session, version: data.version };
  return true;
}

// ---- charts ----------------------------------------------------------------------------------------------------

const HALF = 50; // the running mean goes over about a 25th of the curve

function runningMean(values) {
  const half = Math.floor(values.length / HALF);
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value == null ? 0 : 1));
  }
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const count = counts[i + reach + 1] - counts[i - reach];
    return value == null || !count ? null : (sums[i + reach + 1] - sums[i - reach]) / count;
  });
}

/** Multiples of 1, 2 or 5 times a power of ten from low to high, at most `most` steps. */
function ticks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => (high - low) / s <= most) ?? power * 10;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) && found.length <= most + 1; k++) found.push(k * step);
  return found;
}

/** A chart: `show` takes curves {name, color, dash, x, y, low, high, bad, dots}. */
class Chart {
  constructor(title, size, text, logarithmic = false) {
    this.text = text;
    this.logarithmic = logarithmic;
    this.curves = [];
    this.pointed = null; // the place of the cross, in the curves' x
    this.heading = make("h2", {}, title);
    this.title = title;
    this.svg = draw("svg", { role: "img", tabindex: "0" });
    this.about = make("div", { class: "about", "aria-live": "polite" });
    this.about.hidden = true;
    this.plot = make("div", { class: "plot" }, this.svg, this.about);
    this.box = make("div", { class: `chart ${size}` }, this.heading, this.plot);
    this.svg.addEventListener("pointermove", (event) => this.point(this.xAt(event.clientX)));
    this.svg.addEventListener("pointerdown", (event) => this.point(this.xAt(event.clientX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    at("charts").append(this.box);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(curves) {
    this.curves = curves.filter((curve) => curve.y.some((value) => value != null));
    this.box.hidden = !this.curves.length;
    this.heading.replaceChildren(this.title);
    if (runs.size === 1 && this.curves.length > 1) {
      for (const { name, color } of this.curves) this.heading.append(make("span", {}, swatch(color), name));
    }
    const last = this.curves.map((curve) => `${curve.name} ${this.text(curve.y.findLast((value) => value != null))}`);
    this.svg.setAttribute("aria-label", `${this.title}: ${last.slice(0, 8).join(", ")}. Arrow keys read values.`);
    this.draw();
  }

  measure() {
    const { width, height } = this.plot.getBoundingClientRect();
    const finite = (list) => list.filter((value) => value != null);
    const logs = this.logarithmic && at("log").checked;
    let [low, high, first, last] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const curve of this.curves) {
      for (const value of finite([...curve.y, ...(curve.low ?? []), ...(curve.high ?? [])])) {
        if (logs && value <= 0) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
      for (const value of finite(curve.x)) {
        first = Math.min(first, value);
        last = Math.max(last, value);
      }
    }
    if (low > high) [low, high] = [0, 1];
    if (first > last) [first, last] = [0, 1];
    const scale = logs && low > 0 ? Math.log : (value) => value;
    const back = scale === Math.log ? Math.exp : (value) => value;
    const air = (scale(high) - scale(low)) / 20 || Math.abs(scale(high)) / 20 || 1;
    this.frame = {
      width, height, left: 54, right: width - 10, top: 8, bottom: height - 24, scale, back,
      low: scale(low) - air, high: scale(high) + air,
      first: Math.min(first, last > 0 ? 0 : first), last: last > first ? last : first + 1,
    };
  }

  x(value) {
    const f = this.frame;
    return f.left + ((f.right - f.left) * (value - f.first)) / (f.last - f.first);
  }

  y(value) {
    const f = this.frame;
    const scaled = f.scale(Math.max(value, f.scale === Math.log ? 1e-300 : -Infinity));
    return f.bottom - ((f.bottom - f.top) * (scaled - f.low)) / (f.high - f.low);
  }

  xAt(client) {
    const f = this.frame;
    return f.first + ((client - this.svg.getBoundingClientRect().left - f.left) / (f.right - f.left)) * (f.last - f.first);
  }

  draw() {
    if (this.box.hidden || !this.plot.clientWidth) return;
    this.measure();
    const { width, height } = this.frame;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.axes(), ...this.curves.flatMap((curve) => this.lines(curve)));
    this.cross = draw("g", {});
    this.svg.append(this.cross);
    this.point(this.pointed);
  }

  axes() {
    const f = this.frame;
    const found = [];
    for (const value of ticks(f.back(f.low), f.back(f.high), f.height < 220 ? 4 : 6)) {
      const y = this.y(value);
      found.push(draw("path", { d: `M${f.left} ${y.toFixed(1)}H${f.right}`, class: "gridline" }));
      found.push(draw("text", { x: f.left - 6, y: y + 4, "text-anchor": "end" }, tickText(value)));
    }
    const over = at("over").value;
    const marks = over === "seconds" ? timeTicks(f.first, f.last, f.width / 90) : ticks(f.first, f.last, Math.max(2, Math.floor(f.width / 80)));
    for (const value of marks.filter((mark) => over === "seconds" || Number.isInteger(mark))) {
      const text = over === "seconds" ? clock(value) : tickText(value);
      const place = this.x(value) > f.right - 20 ? "end" : "middle";
      found.push(draw("text", { x: this.x(value), y: f.bottom + 16, "text-anchor": place }, text));
      found.push(draw("path", { d: `M${this.x(value).toFixed(1)} ${f.bottom}v4`, class: "axis" }));
    }
    found.push(draw("path", { d: `M${f.left} ${f.bottom}H${f.right}`, class: "axis" }));
    return found;
  }

  lines(curve) {
    const { color, dash = "" } = curve;
    const found = [];
    const smooth = at("smooth").checked && !curve.dots && curve.y.length > 2 * HALF;
    const style = { fill: "none", stroke: color, "stroke-linejoin": "round" };
    if (smooth && curve.low && runs.size === 1) {
      const up = curve.x.map((x, i) => [x, curve.high[i]]).filter(([, y]) => y != null);
      const down = curve.x.map((x, i) => [x, curve.low[i]]).filter(([, y]) => y != null).reverse();
      const outline = [...up, ...down].map(([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("L");
      found.push(draw("path", { d: `M${outline}Z`, fill: color, "fill-opacity": 0.25, stroke: color, "stroke-opacity": 0.25 }));
    } else if (smooth) {
      found.push(draw("path", { ...style, d: this.path(curve.x, curve.y), "stroke-opacity": 0.22 }));
    }
    const shown = smooth ? runningMean(curve.y) : curve.y;
    found.push(draw("path", { ...style, d: this.path(curve.x, shown), "stroke-width": 1.8, "stroke-dasharray": dash }));
    if (shown.length === 1 || (curve.dots && shown.length <= 60)) {
      curve.x.forEach((x, i) => {
        if (shown[i] != null) found.push(draw("circle", { cx: this.x(x), cy: this.y(shown[i]), r: 2.8, fill: color }));
      });
    }
    (curve.bad ?? []).forEach((bad, i) => {
      if (bad) found.push(draw("path", { d: `M${this.x(curve.x[i]).toFixed(1)} ${this.frame.bottom}v-10`, stroke: "#dc2626", "stroke-width": 2 }));
    });
    return found;
  }

  path(xs, ys) {
    let path = "";
    let pen = "M";
    xs.forEach((x, i) => {
      if (ys[i] == null || x == null) pen = "M";
      else {
        path += `${pen}${this.x(x).toFixed(1)} ${this.y(ys[i]).toFixed(1)}`;
        pen = "L";
      }
    });
    return path || "M0 0";
  }

  /** Show the values next to a place, or none. */
  point(x) {
    this.pointed = x;
    if (!this.cross || !this.frame) return;
    this.cross.replaceChildren();
    this.about.hidden = x == null || !this.curves.length;
    if (this.about.hidden) return;
    const near = this.curves.map((curve) => ({ curve, i: nearest(curve.x, x) })).filter(({ curve, i }) => i >= 0 && curve.y[i] != null);
    if (!near.length) return;
    const place = near.reduce((best, { curve, i }) => (Math.abs(curve.x[i] - x) < Math.abs(best - x) ? curve.x[i] : best), near[0].curve.x[near[0].i]);
    const f = this.frame;
    this.cross.append(draw("path", { d: `M${this.x(place).toFixed(1)} ${f.top}V${f.bottom}`, class: "cross" }));
    for (const { curve, i } of near) this.cross.append(draw("circle", { cx: this.x(curve.x[i]), cy: this.y(curve.y[i]), r: 3.4, fill: curve.color }));
    const over = at("over").value;
    const head = over === "seconds" ? clock(place) : `${over === "step" ? "step" : "tokens"} ${number(Math.round(place))}`;
    const rows = near.slice(0, 12).map(({ curve, i }) =>
      make("div", {}, swatch(curve.color), make("span", { class: "name" }, curve.name), make("span", {}, this.text(curve.y[i]))),
    );
    if (near.length > 12) rows.push(make("div", {}, `${near.length - 12} more`));
    this.about.replaceChildren(make("b", {}, head), ...rows);
    const left = this.x(place) > f.width / 2;
    this.about.style.left = left ? "" : `${this.x(place) + 10}px`;
    this.about.style.right = left ? `${f.width - this.x(place) + 10}px` : "";
    this.about.style.top = "8px";
  }

  key(event) {
    const curve = this.curves[0];
    if (!curve) return;
    const here = this.pointed == null ? curve.x.length - 1 : nearest(curve.x, this.pointed);
    const far = event.shiftKey ? 10 : 1;
    const next = { ArrowLeft: here - far, ArrowRight: here + far, Home: 0, End: curve.x.length - 1 }[event.key];
    if (event.key === "Escape") this.point(null);
    else if (next != null) this.point(curve.x[Math.min(Math.max(next, 0), curve.x.length - 1)]);
    else return;
    event.preventDefault();
  }
}

function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4));
}

function timeTicks(first, last, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find((s) => (last - first) / s <= Math.max(2, most)) ?? 86400 * Math.ceil((last - first) / 86400 / Math.max(2, most));
  const found = [];
  for (let t = Math.ceil(first / step) * step; t <= last; t += step) found.push(t);
  return found;
}

/** The index of the value next to x in an ascending list; -1 if there is none. */
function nearest(values, x) {
  let best = -1;
  for (let i = 0; i < values.length; i++) {
    if (values[i] != null && (best < 0 || Math.abs(values[i] - x) <= Math.abs(values[best] - x))) best = i;
  }
  return best;
}

// ---- the parts of the page -------------------------------------------------------------------------------------

const charts = {};

/** The chart of a name, made when it is first needed. */
const chart = (name, ...given) => (charts[name] ??= new Chart(...given));

function drawCharts() {
  const shown = [...runs.values()].filter((run) => !run.hidden);
  const over = at("over").value;
  const single = runs.size === 1;
  if (!runs.size) return Object.values(charts).forEach((chart) => chart.show([]));
  const curve = (run, part, column, more) => {
    const columns = run.curves[part];
    return { name: run.name, color: run.color, dash: run.dash, x: columns[over] ?? [], y: columns[column] ?? [], ...more };
  };
  const each = (part, column, more) => shown.map((run) => curve(run, part, column, more));
  if (single) {
    const [run] = runs.values();
    const { low, high, bad } = run.curves.train;
    const both = [
      curve(run, "train", "loss", { name: "training", color: COLORS[0], low, high, bad }),
      curve(run, "valid", "val_loss", { name: "validation", color: COLORS[1], dots: true }),
    ];
    chart("loss", "Loss", "wide", loss, true).show(run.hidden ? [] : both);
  } else {
    chart("valid", "Validation loss", "half", loss, true).show(each("valid", "val_loss", { dots: true }));
    chart("train", "Training loss", "half", loss, true).show(each("train", "loss"));
  }
  const share = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
  chart("accuracy", "Validation accuracy", "", share).show(each("valid", "val_accuracy", { dots: true }));
  const speed = (run) => (run.curves.train.positions_per_second?.some((one) => one != null) ? "positions_per_second" : "tokens_per_second");
  chart("speed", "Tokens per second", "", number).show(shown.map((run) => curve(run, "train", speed(run))));
  if (!charts.rate) at("charts").append(at("memory")); // beside the speed
  chart("rate", "Learning rate", "", short).show(each("train", "lr"));
  chart("norm", "Norm of the gradients", "", short).show(each("train", "grad_norm"));
}

function figure(name, value, more = "") {
  const found = make("dd", {}, value);
  if (more) found.append(make("small", {}, more));
  return [make("dt", {}, name), found];
}

const STATES = { none: "no runs yet", planning: "planning …", finishing: "all steps are done, writing the result …", done: "finished" };

function drawHead() {
  at("title").textContent = page.title;
  document.title = page.title;
  const [run] = runs.values();
  const count = [...runs.values()].filter((one) => one.state === "running").length;
  const state = page.end?.[0] ?? (runs.size ? run.state : one ? "planning" : "none");
  at("state").className = runs.size > 1 ? "" : state;
  at("state").textContent = runs.size > 1 ? `${runs.size} runs, ${count} running` : (STATES[state] ?? state);
  const first = state === "planning" || (state === "running" && !run.step) ? "Curves appear after the first step." : "";
  at("more").textContent = page.end?.[1] || page.doing || first;
  at("more").className = at("more").textContent.includes("\n") ? "table" : ""; // a refusal with its bytes
  at("figures").hidden = runs.size !== 1;
  at("progress").hidden = state !== "planning";
  at("progress").removeAttribute("value"); // it moves without saying how far
  if (runs.size !== 1) return void (at("about").textContent = "");
  at("about").textContent = [run.about?.title, run.damaged ? `${run.damaged} damaged lines left out` : ""].filter(Boolean).join("; ");
  at("progress").hidden = !run.steps || ["finished", "done"].includes(state);
  at("progress").value = run.steps ? run.step / run.steps : 0;
  document.title = run.steps && run.state === "running" ? `${Math.floor((100 * run.step) / run.steps)} % ${page.title}` : page.title;
  const of = run.steps ? `of ${number(run.steps)}` : "";
  const best = (value, step) => (value == null ? "" : `best ${loss(value)}, step ${number(step)}`);
  const none = run.state === "running" ? "none yet" : "";
  const peak = page.memory?.peak ?? run.peak_bytes;
  const limit = run.about?.budget_bytes;
  at("figures").replaceChildren(
    ...[
      figure("step", number(run.step), of),
      figure("time", clock(run.seconds), run.state === "running" && run.left ? `${clock(run.left)} left` : ""),
      figure("loss", loss(run.loss), best(run.best_loss, run.best_step)),
      figure("validation loss", loss(run.val_loss), best(run.best_val_loss, run.best_val_step) || none),
      figure("learning rate", short(run.curves.train.lr?.at(-1))),
      figure("tokens/s", number(run.tokens_per_second), run.tokens == null ? "" : `${number(run.tokens)} learnt`),
      figure("memory", sizeText(peak || null), ["peak", run.planned_bytes && `plan ${sizeText(run.planned_bytes)}`, limit && `limit ${sizeText(limit)}`].filter(Boolean).join(", ")),
    ].map((parts) => make("div", {}, ...parts)),
  );
}

const COLUMNS = [
  ["step", (run) => number(run.step) + (run.steps ? `/${number(run.steps)}` : "")],
  ["loss", (run) => loss(run.loss)],
  ["best", (run) => loss(run.best_loss), "best_loss"],
  ["val", (run) => loss(run.val_loss)],
  ["best", (run) => loss(run.best_val_loss), "best_val_loss"],
  ["learnt", (run) => number(run.tokens)],
  ["tokens/s", (run) => number(run.tokens_per_second)],
  ["time", (run) => clock(run.seconds)],
  ["last record", (run) => (run.changed ? ago(page.now - run.changed) : "–")],
];

function drawTable() {
  at("runs").hidden = one || runs.size < 1;
  if (at("runs").hidden) return;
  const head = make("tr", {}, make("th", {}, "run"), make("th", {}, "state"));
  for (const [name] of COLUMNS) head.append(make("th", { class: "number" }, name));
  for (const name of page.differing) head.append(make("th", {}, name));
  const least = (key) => Math.min(...[...runs.values()].map((run) => run[key] ?? Infinity));
  const rows = [...runs.values()].map((run) => {
    const row = make("tr", {}, make("td", { class: "name" }, swatch(run.color), run.name), make("td", {}, STATES[run.state] ?? run.state));
    for (const [, text, key] of COLUMNS) {
      const best = key && runs.size > 1 && run[key] != null && run[key] === least(key);
      row.append(make("td", { class: best ? "number best" : "number" }, text(run)));
    }
    for (const name of page.differing) row.append(make("td", {}, run.settings[name] ?? "–"));
    return row;
  });
  at("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

/** Buttons that hide and show runs. They are kept, so that the focus stays. */
function drawLegend() {
  at("view").hidden = ![...runs.values()].some((run) => run.curves.train.step?.length || run.curves.valid.step?.length);
  at("legend").hidden = runs.size < 2;
  const names = [...runs.keys()].join("\n");
  if (at("legend").hidden || drawLegend.names === names) return;
  drawLegend.names = names;
  const buttons = [...runs.keys()].map((name) => {
    const run = runs.get(name);
    const button = make("button", { type: "button", "aria-pressed": String(!run.hidden) }, swatch(run.color), make("span", { class: "name" }, name));
    button.addEventListener("click", () => {
      const now = runs.get(name);
      now.hidden = !now.hidden;
      button.setAttribute("aria-pressed", String(!now.hidden));
      drawCharts();
    });
    return button;
  });
  at("legend").replaceChildren(...buttons);
}

function drawMessages() {
  at("said").hidden = !page.messages?.length;
  const key = (page.messages ?? []).join("\n");
  if (drawMessages.key === key) return;
  drawMessages.key = key;
  at("messages").replaceChildren(...(page.messages ?? []).map((text) => make("pre", {}, text)));
  at("messages").scrollTop = at("messages").scrollHeight; // the newest is the last
}

function drawRun() {
  const [run] = runs.values();
  const single = runs.size === 1;
  at("texts").hidden = !single || !run.samples.length;
  at("memory").hidden = !single || !(run.about?.rows?.length || run.planned_bytes);
  at("chosen").hidden = !single || !Object.keys(run.settings).length;
  const served = !page.end || at("plan").open; // the server goes with its run
  at("plan").hidden = !single || !seen.session || still != null || !served;
  if (!single) return;
  const texts = run.samples.map(({ step, text }) => make("article", {}, make("small", {}, `step ${number(step)}`), make("pre", {}, text)));
  const last = `${run.samples.length} ${run.samples.at(-1)?.step}`;
  if (last !== drawRun.samples) at("samples").replaceChildren(...texts.reverse());
  drawRun.samples = last;
  const row = (kind, name, nbytes, why) =>
    make("tr", { class: kind }, make("td", {}, name), make("td", { class: "number" }, sizeText(nbytes)), make("td", {}, why));
  const rows = (run.about?.rows ?? []).map(([name, nbytes, why]) => row("", name, nbytes, why));
  if (run.planned_bytes) rows.push(row("total", "plan", run.planned_bytes, ""));
  const peak = page.memory?.peak || run.peak_bytes;
  if (peak) rows.push(row("", "peak", peak, run.planned_bytes ? `${((100 * peak) / run.planned_bytes).toFixed(1)} % of the plan` : ""));
  if (page.memory && !page.end) rows.push(row("", "now", page.memory.now, "private memory of the process"));
  if (run.about?.budget_bytes) rows.push(row("", "limit", run.about.budget_bytes, "--memory"));
  at("bytes").replaceChildren(make("tbody", {}, ...rows));
  const settings = Object.entries(run.settings).filter(([, value]) => value !== "");
  const key = JSON.stringify(settings);
  if (drawRun.settings === key) return;
  drawRun.settings = key;
  at("settings").replaceChildren(make("tbody", {}, ...settings.map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "name" }, value)))));
}

at("plan").addEventListener("toggle", () => {
  at("plan").querySelector("iframe")?.remove();
  const [name] = runs.keys();
  if (!at("plan").open || !name) return;
  const frame = make("iframe", { title: "the plan", sandbox: "allow-scripts" });
  frame.src = `plan?run=${encodeURIComponent(name)}`;
  at("plan").append(frame);
});

function show() {
  [...runs.values()].forEach((run, i) => {
    run.color = COLORS[i % COLORS.length];
    run.dash = DASHES[Math.floor(i / COLORS.length) % DASHES.length];
  });
  drawHead();
  drawTable();
  drawLegend();
  drawCharts();
  drawRun();
  drawMessages();
}

for (const id of ["over", "smooth", "log"]) at(id).addEventListener("change", drawCharts);

// ---- asking ----------------------------------------------------------------------------------------------------

const text = at("data").textContent;
const still = text ? JSON.parse(text) : null;

let asking = new AbortController();
let answered = null; // when the last answer came
const SEEN = "the page is seen again";

/** No answer came. After the end of a run none is expected; a run that is resumed at this address is shown again. */
function lost() {
  if (page.end) return;
  const from = answered ? ` What you see is from ${answered.toLocaleTimeString()}.` : "";
  at("state").textContent = "connection lost";
  at("state").className = "lost";
  at("more").textContent = `The process gives no answer: it was killed, or cannot be reached; asking again every ${MISSING} s.${from}`;
}

/** Ask for what is new, again and again. The server answers at once when the run ends. */
async function ask() {
  for (let at_once = true; ; ) {
    const wait = at_once || page.end ? 0 : document.hidden ? HIDDEN_WAIT : WAIT;
    at_once = false;
    asking = new AbortController();
    const late = setTimeout(() => asking.abort(), 1000 * (wait + 10));
    try {
      const answer = await fetch(`data?since=${seen.version}&session=${seen.session}&wait=${wait}`, { signal: asking.signal });
      if (!answer.ok) throw new Error(String(answer.status));
      const whole = take(await answer.json());
      answered = new Date();
      if (whole) show();
      else seen = { session: "", version: 0 };
      if (!page.end) continue;
    } catch {
      at_once = true;
      if (asking.signal.reason === SEEN) continue;
      lost();
    } finally {
      clearTimeout(late);
    }
    await new Promise((done) => setTimeout(done, 1000 * MISSING));
  }
}

document.addEventListener("visibilitychange", () => document.hidden || asking.abort(SEEN));

if (still) {
  take(still);
  show();
  at("state").textContent += `, as of ${new Date(1000 * page.now).toLocaleString()}`;
} else ask();
