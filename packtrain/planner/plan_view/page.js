"use strict";
// Draws a plan and answers the pointer. Above, addresses over time; below, bytes alive; one time axis for both.
// The view is a range of steps [t0, t1) and of bytes [a0, a1). Names reach the page as text only.

const plan = JSON.parse(document.getElementById("plan").textContent);
const plot = document.getElementById("plot");
const about = document.getElementById("about");
const reset = document.getElementById("reset");
const drawn = document.getElementById("drawn").getContext("2d");
const pointed = document.getElementById("pointed").getContext("2d");
const count = plan.start.length;
const whole = { t0: 0, t1: plan.last, a0: 0, a1: plan.top };
const dashes = (kind) => plan.dashes[kind].split(" ").filter(Boolean).map(Number);
let view = { ...whole };
let ink = {}; // colours of the theme
let box = {}; // places of both plots in CSS pixels

// ---- places ----------------------------------------------------------------------------------------------------

const x = (step) => box.left + ((step - view.t0) / (view.t1 - view.t0)) * box.width;
const y = (address) => box.bottom - ((address - view.a0) / (view.a1 - view.a0)) * (box.bottom - box.top);
const height = (nbytes) => box.below - (nbytes / plan.top) * (box.below - box.above);
const stepAt = (px) => view.t0 + ((px - box.left) / box.width) * (view.t1 - view.t0);
const addressAt = (py) => view.a0 + ((box.bottom - py) / (box.bottom - box.top)) * (view.a1 - view.a0);

function measure() {
  const { width, height: tall } = plot.getBoundingClientRect();
  const narrow = width < 600;
  const left = narrow ? 62 : 76;
  const below = tall - 26;
  const above = below - Math.round(tall * 0.17);
  box = { left, right: width - 8, width: width - 8 - left, top: 8, bottom: above - 30, above, below, tall, narrow };
  for (const context of [drawn, pointed]) {
    context.canvas.width = Math.round(width * devicePixelRatio);
    context.canvas.height = Math.round(tall * devicePixelRatio);
  }
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "grid", "ink", "strong"]) ink[name] = style.getPropertyValue(`--${name}`).trim();
}

function sizeText(nbytes) {
  let unit = 0;
  for (; nbytes >= 1024 && unit < 4; unit++) nbytes /= 1024;
  return unit ? `${nbytes.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}` : `${Math.round(nbytes)} B`;
}

const number = (n) => n.toLocaleString("en");

// ---- live bytes ------------------------------------------------------------------------------------------------

/** Bytes alive at each step: one array for each category, and their sum. */
function countLive() {
  const kinds = plan.categories.map(() => new Float64Array(plan.last + 1));
  for (let i = 0; i < count; i++) {
    kinds[plan.category[i]][plan.start[i]] += plan.nbytes[i];
    kinds[plan.category[i]][plan.end[i]] -= plan.nbytes[i];
  }
  const total = new Float64Array(plan.last + 1);
  for (const kind of kinds) {
    for (let t = 0; t <= plan.last; t++) {
      if (t) kind[t] += kind[t - 1];
      total[t] += kind[t];
    }
  }
  return { kinds, total };
}

const live = countLive();

/** The step from `first` up to `end` at which most bytes are alive. */
function fullest(first, end) {
  let best = first;
  for (let t = first + 1; t < end; t++) if (live.total[t] > live.total[best]) best = t;
  return best;
}

// ---- drawing ---------------------------------------------------------------------------------------------------

function hatch(color, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const context = tile.getContext("2d");
  context.fillStyle = color;
  context.fillRect(0, 0, 6, 6);
  context.strokeStyle = line;
  context.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    context.moveTo(shift - 1, 7);
    context.lineTo(shift + 7, -1);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}

const colors = new Map(plan.categories);
const fills = plan.categories.map(([name, color]) =>
  name === "recomputed" ? hatch(color, colors.get("activation")) : color,
);

function begin(context) {
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, box.right + 8, box.tall);
  context.font = `${box.narrow ? 11 : 12}px system-ui, Helvetica, Arial, sans-serif`;
}

function inside(context, top, bottom, draw) {
  context.save();
  context.beginPath();
  context.rect(box.left, top, box.width, bottom - top);
  context.clip();
  draw();
  context.restore();
}

function line(context, color, dashes, ...points) {
  context.strokeStyle = color;
  context.setLineDash(dashes);
  context.lineWidth = 1;
  context.beginPath();
  points.forEach(([px, py], k) => (k ? context.lineTo(px, py) : context.moveTo(px, py)));
  context.stroke();
  context.setLineDash([]);
}

/** Text that can be read on anything. */
function label(context, text, px, py, align, color = ink.ink) {
  context.textAlign = align;
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = ink.card;
  context.strokeText(text, px, py);
  context.fillStyle = color;
  context.fillText(text, px, py);
}

function drawAxes() {
  const { left, right, bottom, below, above } = box;
  const step = 2 ** Math.max(0, Math.ceil(Math.log2((view.a1 - view.a0) / 8)));
  for (let a = Math.ceil(view.a0 / step) * step; a <= view.a1; a += step) {
    line(drawn, ink.grid, [], [left, y(a)], [right, y(a)]);
    label(drawn, sizeText(a).replace(".0", ""), left - 7, y(a) + 4, "right");
  }
  const wanted = (view.t1 - view.t0) / (box.width / 90);
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
  const every = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((m) => m >= wanted));
  for (let t = Math.ceil(view.t0 / every) * every; t <= view.t1; t += every) {
    line(drawn, ink.ink, [], [x(t), below], [x(t), below + 4]);
    line(drawn, ink.grid, [], [x(t), bottom], [x(t), bottom + 4]);
    if (x(t) < right - 12) label(drawn, number(t), x(t), below + 18, "center");
  }
  label(drawn, "op", left - 12, below + 18, "right");
  label(drawn, "alive", left - 7, above + 10, "right");
  for (const edge of [bottom, below]) line(drawn, ink.ink, [], [left, edge], [right, edge]);
}

/** Every rectangle in sight, on whole pixels; a gap sets large ones apart. */
function drawBuffers() {
  for (let i = 0; i < count; i++) {
    const hidden = plan.end[i] <= view.t0 || plan.start[i] >= view.t1;
    if (hidden || plan.offset[i] + plan.nbytes[i] <= view.a0 || plan.offset[i] >= view.a1) continue;
    const px = snap(x(plan.start[i]));
    const py = snap(y(plan.offset[i] + plan.nbytes[i]));
    const wide = Math.max(snap(x(plan.end[i])) - px, 1 / devicePixelRatio);
    const tall = Math.max(snap(y(plan.offset[i])) - py, 1 / devicePixelRatio);
    drawn.fillStyle = fills[plan.category[i]];
    drawn.fillRect(px, py, wide > 4 ? wide - 0.5 : wide, tall > 4 ? tall - 0.5 : tall);
  }
}

const snap = (p) => Math.round(p * devicePixelRatio) / devicePixelRatio;

/** Categories on top of each other; where several steps share a pixel, the fullest is shown. */
function drawLive() {
  for (let px = box.left; px < box.right; px++) {
    const first = Math.min(Math.max(Math.floor(stepAt(px)), 0), plan.last - 1);
    const t = fullest(first, Math.min(Math.ceil(stepAt(px + 1)), plan.last));
    let base = 0;
    live.kinds.forEach((kind, k) => {
      if (!kind[t]) return;
      drawn.fillStyle = fills[k];
      drawn.fillRect(px, height(base + kind[t]), 1, height(base) - height(base + kind[t]));
      base += kind[t];
    });
  }
  if (plan.samples.length) {
    const points = plan.samples.map(([t, nbytes]) => [x(t), height(nbytes)]);
    line(drawn, ink.strong, dashes("measured"), ...points);
  }
}

function drawLevels() {
  const level = (kind, py) => line(drawn, ink.strong, dashes(kind), [box.left, py], [box.right, py]);
  for (const [kind, nbytes] of plan.levels) {
    if (view.a0 <= nbytes && nbytes <= view.a1) level(kind, y(nbytes));
    if (kind === "budget") level(kind, height(nbytes));
  }
  const [step, nbytes] = plan.peak;
  const at = x(step + 0.5);
  if (at < box.left || at > box.right) return;
  for (const [from, to] of [[box.top, box.bottom + 4], [box.above - 4, box.below]]) {
    line(drawn, ink.strong, [1, 3], [at, from], [at, to]);
  }
  const text = `peak at op ${number(step)}: ${sizeText(nbytes)}`;
  const half = drawn.measureText(text).width / 2 + 2;
  label(drawn, text, Math.min(Math.max(at, box.left + half), box.right - half), box.above - 9, "center", ink.strong);
}

function draw() {
  begin(drawn);
  drawAxes();
  inside(drawn, box.top, box.bottom, drawBuffers);
  inside(drawn, box.above, box.below, drawLive);
  drawLevels();
  reset.hidden = Object.keys(whole).every((k) => view[k] === whole[k]);
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

// ---- pointing --------------------------------------------------------------------------------------------------

function bufferAt(px, py) {
  const [t, a] = [Math.floor(stepAt(px)), addressAt(py)];
  for (let i = 0; i < count; i++) {
    const there = plan.offset[i] <= a && a < plan.offset[i] + plan.nbytes[i];
    if (there && plan.start[i] <= t && t < plan.end[i]) return i;
  }
  return -1;
}

function frame(i) {
  pointed.strokeStyle = ink.strong;
  pointed.lineWidth = 2;
  const [px, py] = [x(plan.start[i]), y(plan.offset[i] + plan.nbytes[i])];
  inside(pointed, box.top, box.bottom, () => {
    pointed.strokeRect(px, py, Math.max(x(plan.end[i]) - px, 2), Math.max(y(plan.offset[i]) - py, 2));
  });
}

function describeBuffer(i) {
  const steps = plan.end[i] - plan.start[i];
  const lines = [
    `${plan.ops[plan.op[i]]} · ${plan.categories[plan.category[i]][0]}`,
    `${sizeText(plan.nbytes[i])} at offset ${number(plan.offset[i])}`,
    `ops ${number(plan.start[i])} to ${number(plan.end[i] - 1)}, ${number(steps)} in all`,
  ];
  if (plan.later[i]) lines.push(`its bytes then serve ${plan.later[i].join(", ")}`);
  return [plan.name[i], lines.join("\n")];
}

function describeStep(t) {
  const parts = plan.categories.map(([name], k) => [name, live.kinds[k][t]]).filter(([, nbytes]) => nbytes);
  const lines = parts.reverse().map(([name, nbytes]) => `${sizeText(nbytes)} ${name}`);
  return [`op ${number(t)}: ${sizeText(live.total[t])} alive`, lines.join("\n")];
}

function show([title, text], event) {
  about.firstElementChild.textContent = title;
  about.lastElementChild.textContent = text;
  about.hidden = false;
  const { width, height: tall } = about.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 14 + tall > innerHeight ? event.clientY - 14 - tall : event.clientY + 14;
  about.style.left = `${Math.max(left, 4)}px`;
  about.style.top = `${Math.max(top, 4)}px`;
}

function leave() {
  begin(pointed);
  about.hidden = true;
}

function point(event) {
  leave();
  const { left, top } = plot.getBoundingClientRect();
  const [px, py] = [event.clientX - left, event.clientY - top];
  if (px < box.left || px >= box.right || py < box.top || py > box.below) return;
  const t = Math.min(Math.floor(stepAt(px)), plan.last - 1);
  line(pointed, ink.strong, [], [px, box.top], [px, box.below]);
  const i = py < box.bottom ? bufferAt(px, py) : -1;
  if (i >= 0) frame(i);
  if (i >= 0) show(describeBuffer(i), event);
  else show(describeStep(t), event);
}

// ---- moving ----------------------------------------------------------------------------------------------------

/** A range of wanted length around a middle, kept inside [0, end]. */
function clamp(from, length, end, least) {
  const kept = Math.min(Math.max(length, least), end);
  const start = Math.min(Math.max(from, 0), end - kept);
  return [start, start + kept];
}

function look(t0, steps, a0, nbytes) {
  const before = JSON.stringify(view);
  const [tFrom, tTo] = clamp(t0, steps, whole.t1, Math.min(4, whole.t1));
  const [aFrom, aTo] = clamp(a0, nbytes, whole.a1, Math.min(256, whole.a1));
  view = { t0: tFrom, t1: tTo, a0: aFrom, a1: aTo };
  redraw();
  return JSON.stringify(view) !== before;
}

/** Zoom with what is under the pointer held in place; below the addresses only time is zoomed. */
function zoom(factor, clientX, clientY) {
  const { left, top } = plot.getBoundingClientRect();
  const [t, a] = [stepAt(clientX - left), addressAt(clientY - top)];
  const f = clientY - top < box.bottom ? factor : 1;
  const [steps, nbytes] = [view.t1 - view.t0, view.a1 - view.a0];
  return look(t - (t - view.t0) * factor, steps * factor, a - (a - view.a0) * f, nbytes * f);
}

const fingers = new Map();

function move(event) {
  const before = fingers.get(event.pointerId);
  if (!before) return point(event);
  const others = [...fingers.values()].filter((finger) => finger !== before);
  fingers.set(event.pointerId, event);
  leave();
  plot.classList.add("moving");
  if (others.length) {
    const gap = (finger) => Math.hypot(finger.clientX - others[0].clientX, finger.clientY - others[0].clientY) + 1;
    zoom(gap(before) / gap(event), (event.clientX + others[0].clientX) / 2, (event.clientY + others[0].clientY) / 2);
    return;
  }
  const steps = ((before.clientX - event.clientX) / box.width) * (view.t1 - view.t0);
  const nbytes = ((event.clientY - before.clientY) / (box.bottom - box.top)) * (view.a1 - view.a0);
  look(view.t0 + steps, view.t1 - view.t0, view.a0 + nbytes, view.a1 - view.a0);
}

function lift(event) {
  fingers.delete(event.pointerId);
  plot.classList.remove("moving");
}

function start() {
  measure();
  draw();
}

function all() {
  leave();
  look(0, whole.t1, 0, whole.a1);
}

plot.addEventListener("pointermove", move);
plot.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, event);
  plot.setPointerCapture(event.pointerId);
  point(event);
});
for (const name of ["pointerup", "pointercancel"]) plot.addEventListener(name, lift);
plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
plot.addEventListener("dblclick", all);
reset.addEventListener("click", all);
plot.addEventListener(
  "wheel",
  (event) => {
    leave();
    if (zoom(Math.exp(Math.sign(event.deltaY) * 0.22), event.clientX, event.clientY)) event.preventDefault();
  },
  { passive: false },
);
for (const row of document.querySelectorAll("#owners tr[data-buffer]")) {
  row.addEventListener("pointerenter", () => frame(Number(row.dataset.buffer)));
  row.addEventListener("pointerleave", leave);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", start);
addEventListener("resize", start);
start();
performance.mark("drawn"); // what a measurement of the time to the first picture looks for
