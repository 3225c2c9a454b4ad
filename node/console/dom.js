// Elements, and how they change in place: what has the focus, is selected or is pointed at stays.

const SVG = "http://www.w3.org/2000/svg";

export const place = (id) => document.getElementById(id);

// An element. Whatever others have named becomes text, never markup.
export function el(tag, options = {}, ...children) {
  return filled(document.createElement(tag), options, children);
}

export function svg(tag, options = {}, ...children) {
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

export function link(href, text, style = "") {
  return href ? el("a", { href, class: style || null, text }) : el("span", { class: style || null, text });
}

// Make the children of `box` equal to these, which have no listeners.
export function put(box, ...children) {
  const old = [...box.childNodes];
  children.forEach((child, at) => {
    const fresh = child instanceof Node ? child : document.createTextNode(child);
    if (at < old.length) merge(old[at], fresh);
    else box.append(fresh);
  });
  for (const rest of old.slice(children.length)) rest.remove();
}

function merge(old, fresh) {
  if (old.nodeName !== fresh.nodeName) old.replaceWith(fresh);
  else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
  } else {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (name === "style") old.style.cssText = fresh.style.cssText; // the policy forbids the attribute, not this
      else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    put(old, ...fresh.childNodes);
  }
}

// Fill a table. A column is [name, class]; a cell is text, an element, or {span, text} over several columns.
export function fill(table, columns, lines, sums = []) {
  const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", { class: kind, scope: "col", text: name })));
  const body = lines.map((line) => row(columns, line));
  const foot = sums.length ? [el("tfoot", {}, ...sums.map((line) => row(columns, line)))] : [];
  put(table, el("thead", {}, head), el("tbody", {}, ...body), ...foot);
}

function row(columns, line) {
  let at = 0;
  const cells = line.map((cell) => {
    const [label, kind] = columns[at];
    const span = cell?.span || 1;
    at += span;
    if (span > 1) return el("td", { class: `${cell.style || ""} whole`, colspan: span, text: cell.text });
    return el("td", { class: kind, "data-label": label }, cell);
  });
  return el("tr", {}, ...cells);
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

// The timeline of a call of this length: [{at, took, style}].
export function timeline(whole, parts) {
  const rects = parts.map(({ at, took, style }) =>
    svg("rect", { class: style, x: (100 * at) / whole, y: 0, width: Math.max(0.4, (100 * took) / whole), height: 8 }),
  );
  return svg("svg", { class: "timeline", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, ...rects);
}
