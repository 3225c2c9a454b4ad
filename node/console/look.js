// Looking up a page: which there are under a key, what they are made of, their planes as statistics and pictures.

import { el } from "./graphs.js";
import { ask, bytes } from "./node.js";
import { decode, drawCounts, drawHeat, slices, statistics } from "./planes.js";
import { count, ms, nbytes, number } from "./words.js";

const SHOWN_NBYTES = 8 << 20; // of one plane: the units that fit
const place = (id) => document.getElementById(id);

export class LookUp {
  // `remove` asks, and removes a page; null: who is here may not.
  constructor(remove) {
    this.remove = remove;
    this.turn = 0; // of what was asked last: what comes later of one before is not shown
    place("look-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(place("look-space").value.trim(), place("look-key").value.trim());
    });
  }

  start(namespace, key) {
    place("look-space").value = namespace;
    place("look-key").value = key;
    place("look").scrollIntoView({ block: "start" });
    this.find(namespace, key);
  }

  async find(namespace, key) {
    const turn = ++this.turn;
    place("look-found").replaceChildren();
    this.say("looking");
    try {
      const told = await ask("look-up", { namespace, key });
      if (turn === this.turn) this.show(told);
    } catch (error) {
      if (turn === this.turn) this.say(error.message, true);
    }
  }

  say(text, failed = false) {
    place("look-said").textContent = text;
    place("look-said").className = failed ? "error" : "";
  }

  show(told) {
    const owned = told.owners.length ? ` Its owners are ${told.owners.join(", ")}.` : "";
    if (!told.pages.length) {
      this.say(`This node has no page under that key.${owned}`);
      return;
    }
    if (told.pages.length > 1) {
      this.say(`${told.more ? "More than " : ""}${told.pages.length} pages match. Which one?`);
      const choices = told.pages.map((page) =>
        el("li", {}, el("button", { type: "button", class: "plain mono", text: page.prefix_hash, onclick: () => this.start(told.namespace.digest, page.prefix_hash) })),
      );
      place("look-found").replaceChildren(el("ul", {}, ...choices));
      return;
    }
    this.say(owned.trim());
    this.page(told.namespace, told.pages[0]);
  }

  page(namespace, page) {
    const where = [page.in_ram ? "RAM" : "", page.on_disk ? "disk" : ""].filter(Boolean).join(" and ");
    const facts = [
      ["Key", page.prefix_hash], ["Model", namespace.model], ["Tenant", namespace.tenant], ["Where", where], ["Bytes", nbytes(page.nbytes)],
      ["Tokens", count(namespace.layout.page_tokens)], ["Stored", page.in_ram ? `${ms(page.age_ms)} ago` : "–"], ["Last used", `${ms(page.idle_ms)} ago`],
      ["Pinned", page.pin_ttl_ms ? `for ${ms(page.pin_ttl_ms)}` : "no"], ["Expires", page.ttl_ms ? `in ${ms(page.ttl_ms)}` : "no"],
      ["Readers now", count(page.holds)], ["Checksum", page.checksum], ["Signed", namespace.keyed ? "yes; its HMAC is not verified here" : "no"],
    ];
    const list = el("dl", { class: "facts" }, ...facts.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text }))));
    const all = slices(namespace.layout);
    const layers = [...new Set(all.map((slice) => slice.layer))].sort((one, other) => one - other);
    const pick = el("select", { id: "look-layer" }, ...layers.map((layer) => el("option", { value: layer, text: String(layer) })));
    const planes = el("div", { class: "planes" });
    const at = { namespace: namespace.digest, key: page.prefix_hash };
    const draw = () => this.layer(planes, at, all.filter((slice) => slice.layer === Number(pick.value)));
    pick.addEventListener("change", draw);
    const choice = el("div", { class: "pick" }, el("div", {}, el("label", { for: "look-layer", text: `Layer, of ${layers.length}` }), pick));
    if (this.remove) {
      choice.append(el("button", { type: "button", class: "danger", text: "Remove this page", onclick: () => this.remove(at, (text) => this.say(text)) }));
    }
    place("look-found").replaceChildren(list, choice, planes);
    draw();
  }

  async layer(box, at, chosen) {
    const turn = ++this.turn;
    box.replaceChildren();
    for (const slice of chosen) {
      const units = Math.max(1, Math.min(slice.units, Math.floor(SHOWN_NBYTES / slice.unitNbytes)));
      const nbytesShown = Math.min(units * slice.unitNbytes, SHOWN_NBYTES);
      try {
        const data = await bytes(at, slice.offset, nbytesShown);
        if (turn !== this.turn) return;
        box.append(plane(slice, decode(slice.dtype, data), units));
      } catch (error) {
        if (turn === this.turn) this.say(error.message, true);
        return;
      }
    }
  }
}

function plane(slice, values, units) {
  const told = statistics(values);
  const box = el("div", { class: "plane" }, el("h3", { text: `${slice.group}: ${slice.name}` }));
  const part = values.length < slice.units * slice.unitElements ? ", of which the first are shown" : "";
  box.append(el("p", { class: "faint", text: `${slice.dtype} ${slice.shape.join(" × ")}, ${nbytes(slice.nbytes)} from ${count(slice.offset)}${part}` }));
  if (told.mean !== null) {
    const heat = el("canvas", { class: "heat", role: "img", "aria-label": `${slice.name}: units top to bottom, elements left to right` });
    const counts = el("canvas", { class: "counts", role: "img", "aria-label": `${slice.name}: histogram of the values` });
    drawHeat(heat, values, units, Math.min(slice.unitElements, values.length), told);
    drawCounts(counts, values, told, getComputedStyle(document.documentElement).getPropertyValue("--s1"));
    box.append(heat, counts);
  }
  const figures = [
    ["least", number(told.min)], ["mean", number(told.mean)], ["greatest", number(told.max)], ["deviation", number(told.std)],
    ["zeros", count(told.zero)], ["NaN", count(told.nan)], ["infinite", count(told.inf)], ["values", count(told.count)],
  ];
  box.append(el("p", { class: "keys" }, ...figures.map(([name, text]) => el("b", { class: (name === "NaN" || name === "infinite") && text !== "0" ? "bad" : "", text: `${name} ${text}` }))));
  return box;
}
