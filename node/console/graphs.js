// Graphs over time, drawn by hand as SVG. Values are numbers or null, where there is nothing.

import { el, put, svg } from "./dom.js";
import { clock } from "./words.js";

const MARGIN = { right: 8, top: 7, bottom: 18 };
const HEIGHT = 140;
const LABEL_PX = 64; // at least, from one time to the next
const SPAN_S_MIN = 30;
const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];
const GAP = 3; // samples that may be missing within a line

// A graph of `series` [{key, label, style}]. `kind`: lines, or areas one on the other. `tick` formats the values of the axis,
// `base` is 1024 for bytes. `onChoose` is called with the time that is pointed at.
export class Graph {
  constructor(title, { series, format, tick = format, kind = "lines", top = null, base = 10, onChoose }) {
    Object.assign(this, { title, series, format, tick, kind, top, base, onChoose });
    this.at = null; // the time that is pointed at; null: the newest
    this.data = { times: [], every_s: 10 };
    this.start = this.end = 0;
    this.left = 0;
    this.legend = el("div", { class: "legend" });
    this.picture = svg("svg", { role: "img", tabindex: "0" });
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.box = el("div", { class: "graph" }, el("h3", { text: title }), this.legend, this.picture);
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.onChoose(null));
    this.picture.addEventListener("blur", () => this.onChoose(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Show the last `span` seconds of the data: from its first sample, if that is later.
  show(data, span) {
    const last = data.times.length ? data.times[data.times.length - 1] : 0;
    const old = data.times.filter((time) => time < last - span).length;
    const kept = Object.entries(data).map(([name, values]) => [name, Array.isArray(values) ? values.slice(old) : values]);
    this.data = Object.fromEntries(kept);
    this.end = last;
    this.start = Math.min(this.data.times[0] ?? 0, last - SPAN_S_MIN);
    this.draw();
  }

  // ---- where -----------------------------------------------------------------------------

  get width() {
    return this.picture.clientWidth || 300;
  }

  x(time) {
    const room = this.width - this.left - MARGIN.right;
    return this.left + (room * (time - this.start)) / (this.end - this.start || 1);
  }

  // The sample next to a time; the newest for null, -1 without any.
  index(time) {
    const { times } = this.data;
    if (time === null) return times.length - 1;
    let best = -1;
    times.forEach((one, at) => {
      if (best < 0 || Math.abs(one - time) < Math.abs(times[best] - time)) best = at;
    });
    return best;
  }

  point(x) {
    const room = this.width - this.left - MARGIN.right;
    const at = this.index(this.start + ((x - this.left) / room) * (this.end - this.start));
    this.onChoose(at < 0 ? null : this.data.times[at]);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
    const last = this.data.times.length - 1;
    if (!step || last < 0) return;
    this.onChoose(this.data.times[Math.max(0, Math.min(last, this.index(this.at) + step))]);
    event.preventDefault();
  }

  choose(time) {
    this.at = time;
    this.tell();
  }

  // ---- draw ------------------------------------------------------------------------------

  draw() {
    const width = this.width;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const layers = this.layers();
    const high = this.top ?? nice(Math.max(0, ...layers.flatMap((layer) => layer.tops.filter((v) => v !== null))), this.base);
    const labels = [0, 0.5, 1].map((share) => [share, this.tick(high * share)]);
    this.left = 8 + Math.max(...labels.map(([, text]) => textWidth(text)));
    const y = (value) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * (value / (high || 1));
    const parts = labels.flatMap(([share, text]) => [
      svg("line", { class: "rule", x1: this.left, x2: width - MARGIN.right, y1: y(high * share), y2: y(high * share) }),
      svg("text", { x: this.left - 5, y: y(high * share) + 4, "text-anchor": "end", text }),
    ]);
    parts.push(...this.times(width));
    for (const layer of layers) parts.push(...this.shape(layer, y));
    this.picture.replaceChildren(...parts, this.cursor);
    this.tell();
  }

  // The axis of time: clock times as far apart as they need, none of them cut.
  times(width) {
    if (!this.data.times.length) {
      return [svg("text", { x: width / 2, y: HEIGHT / 2 - 10, "text-anchor": "middle", text: "no samples yet" })];
    }
    const span = this.end - this.start;
    const most = Math.max(1, (width - this.left - MARGIN.right) / LABEL_PX);
    const step = STEPS_S.find((seconds) => span / seconds <= most) || STEPS_S[STEPS_S.length - 1];
    const offset = 60 * new Date(1000 * this.end).getTimezoneOffset();
    const parts = [];
    for (let time = Math.ceil((this.start - offset) / step) * step + offset; time <= this.end; time += step) {
      const text = clock(time, step < 60);
      const half = textWidth(text) / 2;
      const x = this.x(time);
      parts.push(svg("line", { class: "rule", x1: x, x2: x, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 3 }));
      parts.push(svg("text", { x: Math.max(half, Math.min(width - half, x)), y: HEIGHT - 3, "text-anchor": "middle", text }));
    }
    return parts;
  }

  // Of each series where it begins and where it ends, from below.
  layers() {
    const sums = this.data.times.map(() => 0);
    return this.series.map(({ key, style }) => {
      const values = this.data.times.map((_, at) => this.data[key]?.[at] ?? null);
      if (this.kind === "lines") return { style, tops: values, floors: null };
      const floors = [...sums];
      values.forEach((value, at) => (sums[at] += value ?? 0));
      return { style, tops: [...sums], floors };
    });
  }

  // Runs of values that follow each other in time; a gap stays one.
  shape({ style, tops, floors }, y) {
    const { times, every_s: every } = this.data;
    const runs = [];
    tops.forEach((value, at) => {
      if (value === null) return;
      const run = runs[runs.length - 1];
      const follows = run && run[run.length - 1] === at - 1 && times[at] - times[at - 1] < GAP * every;
      if (follows) run.push(at);
      else runs.push([at]);
    });
    const spot = (at, value) => `${this.x(times[at]).toFixed(1)},${y(value).toFixed(1)}`;
    return runs.map((run) => {
      const edge = run.map((at) => spot(at, tops[at]));
      if (!floors) {
        if (edge.length === 1) edge.push(`${edge[0].split(",")[0] - 2},${edge[0].split(",")[1]}`);
        return svg("polyline", { class: `line ${style}`, points: edge.join(" ") });
      }
      const floor = run.map((at) => spot(at, floors[at])).reverse();
      return svg("polygon", { class: `area ${style}`, points: [...edge, ...floor].join(" ") });
    });
  }

  // The values of one time: in the legend, and in words for those who do not see the picture.
  tell() {
    const at = this.index(this.at);
    const pointed = this.at !== null && at >= 0;
    const values = this.series.map(({ key, label, style }) => {
      const value = this.data[key]?.[at] ?? null;
      return { label, style, text: value === null ? "–" : this.format(value) };
    });
    const when = pointed ? clock(this.data.times[at], true) : "";
    const spans = values.map(({ label, style, text }) => el("span", { class: style }, `${label} `, el("b", { text })));
    put(this.legend, ...spans, el("small", { class: "faint", text: when }));
    const words = values.map(({ label, text }) => `${label} ${text}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.title}, ${when || "now"}: ${words}`);
    this.cursor.setAttribute("visibility", pointed ? "visible" : "hidden");
    if (pointed) for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, this.x(this.data.times[at]));
  }
}

const context = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return Math.ceil(context.measureText(text).width) + 1;
}

// The next round value, of which the half is round, too.
function nice(value, base) {
  if (value <= 0) return base === 10 ? 1 : base;
  const power = base ** Math.floor(Math.log(value) / Math.log(base) + 1e-9);
  const steps = base === 10 ? [1, 2, 4, 6, 8, 10] : [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
  return power * (steps.find((step) => step * power >= value) || base);
}
