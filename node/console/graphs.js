// Graphs of the last hour and small bars, drawn by hand as SVG. Values are numbers or null, where there is nothing.

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 3600;
const MARGIN = { left: 46, right: 6, top: 6, bottom: 16 };
const HEIGHT = 132;

// An element. Whatever others have named becomes text, never markup.
export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, options, children);
}

function svg(tag, options = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), options, children);
}

function filled(made, { text, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// [{share: 0..1, style: "s1"}] of one whole.
export function bar(parts) {
  const box = el("div", { class: "bar", "aria-hidden": "true" });
  for (const part of parts) {
    const piece = el("i", { class: part.style });
    piece.style.width = `${100 * Math.max(0, Math.min(1, part.share || 0))}%`;
    box.append(piece);
  }
  return box;
}

// A graph of `series` [{key, label, style}] over the last hour. `kind`: lines, or areas one on the other.
export class Graph {
  constructor(title, { series, format, kind = "lines", top = null }) {
    Object.assign(this, { title, series, format, kind, top });
    this.at = null; // the place that is pointed at; null: the newest
    this.data = { times: [] };
    this.legend = el("div", { class: "legend" });
    this.picture = svg("svg", { role: "img", tabindex: "0" });
    this.box = el("div", { class: "graph" }, el("h3", { text: title }), this.legend, this.picture);
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.choose(null));
    this.picture.addEventListener("blur", () => this.choose(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(data) {
    const end = data.times[data.times.length - 1] || 0;
    const old = data.times.filter((time) => time < end - SPAN_S).length;
    const kept = Object.entries(data).map(([name, values]) => [name, Array.isArray(values) ? values.slice(old) : values]);
    this.data = Object.fromEntries(kept);
    this.draw();
  }

  // ---- where -----------------------------------------------------------------------------

  get end() {
    return this.data.times[this.data.times.length - 1] || 0;
  }

  get width() {
    return this.picture.clientWidth || 300;
  }

  x(time) {
    const room = this.width - MARGIN.left - MARGIN.right;
    return MARGIN.left + room * (1 - (this.end - time) / SPAN_S);
  }

  point(x) {
    let best = null;
    this.data.times.forEach((time, place) => {
      if (best === null || Math.abs(this.x(time) - x) < Math.abs(this.x(this.data.times[best]) - x)) best = place;
    });
    this.choose(best);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
    if (!step || !this.data.times.length) return;
    const last = this.data.times.length - 1;
    this.choose(Math.max(0, Math.min(last, (this.at ?? last) + step)));
    event.preventDefault();
  }

  choose(place) {
    this.at = place;
    this.draw();
  }

  // ---- draw ------------------------------------------------------------------------------

  draw() {
    const { times } = this.data;
    const place = Math.min(this.at ?? times.length - 1, times.length - 1);
    this.tell(place);
    const width = this.width;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const layers = this.layers();
    const high = this.top ?? nice(Math.max(0, ...layers.flatMap((layer) => layer.tops.filter((v) => v !== null))));
    const y = (value) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * (value / (high || 1));
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(high * share);
      parts.push(svg("line", { class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      parts.push(svg("text", { x: MARGIN.left - 4, y: at + 3, "text-anchor": "end", text: this.format(high * share) }));
    }
    for (const minutes of width < 400 ? [60, 30, 0] : [60, 45, 30, 15, 0]) {
      const anchor = minutes === 60 ? "start" : minutes ? "middle" : "end";
      const text = minutes ? `−${minutes} min` : "now";
      parts.push(svg("text", { x: this.x(this.end - 60 * minutes), y: HEIGHT - 4, "text-anchor": anchor, text }));
    }
    for (const layer of layers) parts.push(...this.shape(layer, y));
    if (this.at !== null && times.length) {
      const at = this.x(times[place]);
      parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    this.picture.replaceChildren(...parts);
  }

  // Of each series where it begins and where it ends, from below.
  layers() {
    const sums = this.data.times.map(() => 0);
    return this.series.map(({ key, style }) => {
      const values = this.data.times.map((_, place) => this.data[key]?.[place] ?? null);
      if (this.kind === "lines") return { style, tops: values, floors: null };
      const floors = [...sums];
      values.forEach((value, place) => (sums[place] += value ?? 0));
      return { style, tops: [...sums], floors };
    });
  }

  // Runs of values that follow each other in time; a gap stays one.
  shape({ style, tops, floors }, y) {
    const { times, every_s: every } = this.data;
    const runs = [];
    tops.forEach((value, place) => {
      if (value === null) return;
      const run = runs[runs.length - 1];
      const follows = run && run[run.length - 1] === place - 1 && times[place] - times[place - 1] < 3 * every;
      if (follows) run.push(place);
      else runs.push([place]);
    });
    const there = (place, value) => `${this.x(times[place]).toFixed(1)},${y(value).toFixed(1)}`;
    return runs.map((run) => {
      const edge = run.map((place) => there(place, tops[place]));
      if (!floors) {
        if (edge.length === 1) edge.push(`${edge[0].split(",")[0] - 1},${edge[0].split(",")[1]}`);
        return svg("polyline", { class: `line ${style}`, points: edge.join(" ") });
      }
      const floor = run.map((place) => there(place, floors[place])).reverse();
      return svg("polygon", { class: `area ${style}`, points: [...edge, ...floor].join(" ") });
    });
  }

  // The values of one time; for who does not see the picture, in words too.
  tell(place) {
    const said = this.series.map(({ key, label, style }) => {
      const value = this.data[key]?.[place] ?? null;
      return { label, style, text: value === null ? "–" : this.format(value) };
    });
    const when = place >= 0 && this.at !== null ? clock(this.data.times[place]) : "";
    const spans = said.map(({ label, style, text }) => el("span", { class: style }, `${label} `, el("b", { text })));
    this.legend.replaceChildren(...spans, el("small", { class: "faint", text: when }));
    const words = said.map(({ label, text }) => `${label} ${text}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.title} over the last hour; ${when || "now"}: ${words}`);
  }
}

// Calls of which each part is drawn where it lay in time.
export function timeline(call, format) {
  const rows = call.spans.map((span) => {
    const x = (100 * span.at_ms) / call.took_ms;
    const width = Math.max(0.5, (100 * span.took_ms) / call.took_ms);
    const rect = svg("rect", { x, y: 0, width, height: 8 });
    const picture = svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, rect);
    return el("div", { class: "span" }, el("span", { text: span.name }), picture, el("span", { text: format(span.took_ms) }));
  });
  return el("div", { class: "spans" }, ...rows);
}

function nice(value) {
  if (value <= 0) return 1;
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * ten).find((step) => step >= value);
}

export function clock(unix) {
  return new Date(1000 * unix).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
