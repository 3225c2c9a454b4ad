// Looking up a page: which there are under a key, what they are made of, their planes as statistics and pictures.

import { address, consoleOf, shown } from "./address.js";
import { el, link, place } from "./dom.js";
import { ask, bytes } from "./node.js";
import { decode, drawCounts, drawHeat, slices, statistics } from "./planes.js";
import { count, ms, nbytes, number } from "./words.js";

const SHOWN_NBYTES = 8 << 20; // of one plane: the units that fit
export class LookUp {
  // `remove` asks, and removes a page; null: who is here may not.
  constructor(remove) {
    this.remove = remove;
    this.members = []; // of the cluster, for links to the owners of a page
    this.turn = 0; // of what was asked last: what comes later of one before is not shown
    place("look-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const [ns, key] = [place("look-space").value, place("look-key").value.trim()];
      if (!ns) this.say("This node has no namespace yet.");
      else if (location.hash === address({ ns, key })) this.find(ns, key);
      else location.hash = address({ ns, key }); // which `follow` sees
    });
  }

  // Look up what the page's address names.
  follow() {
    const { ns, key } = shown();
    if (!ns) return;
    const select = place("look-space");
    if (![...select.options].some((option) => option.value === ns)) select.append(el("option", { value: ns, text: ns }));
    select.value = ns;
    place("look-key").value = key;
    this.find(ns, key);
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
    const { namespace, pages } = told;
    const about = namespaceFacts(namespace);
    if (pages.length === 1) {
      this.say("");
      place("look-found").replaceChildren(this.owners(told));
      this.page(namespace, pages[0]);
    } else if (!pages.length) {
      this.say(place("look-key").value ? "This node has no page under that key." : "This node has no page of this namespace.");
      place("look-found").replaceChildren(this.owners(told), about);
    } else {
      this.say(`${told.more ? "The first " : ""}${pages.length} pages${place("look-key").value ? " under that key" : ""}:`);
      const choices = pages.map((page) => el("li", {}, el("code", {}, link(address({ ns: namespace.digest, key: page.prefix_hash }), page.prefix_hash))));
      place("look-found").replaceChildren(about, el("ul", { class: "found" }, ...choices));
    }
  }

  // Links to the consoles of the members that own the key.
  owners(told) {
    if (!told.owners.length) return el("p");
    const { digest } = told.namespace;
    const links = told.owners.flatMap((id, at) => {
      const member = this.members.find((one) => one.id === id);
      const there = member && consoleOf(member, member.status?.metrics_port, { ns: digest, key: place("look-key").value });
      return [at ? ", " : "", link(there, id)];
    });
    return el("p", {}, "Its owners: ", ...links);
  }

  page(namespace, page) {
    const where = [page.in_ram ? "RAM" : "", page.on_disk ? "disk" : ""].filter(Boolean).join(" and ");
    const facts = [
      ["Key", page.prefix_hash], ["Where", where], ["Bytes", nbytes(page.nbytes)],
      ["Tokens", count(namespace.layout.page_tokens)], ["Stored", page.in_ram ? `${ms(page.age_ms)} ago` : "–"], ["Last used", `${ms(page.idle_ms)} ago`],
      ["Pinned", page.pin_ttl_ms ? `for ${ms(page.pin_ttl_ms)}` : "no"], ["Expires", page.ttl_ms ? `in ${ms(page.ttl_ms)}` : "no"],
      ["Readers now", count(page.holds)], ["Checksum", page.checksum], ["Signed", namespace.keyed ? "yes; its HMAC is not verified here" : "no"],
    ];
    const list = factList(facts);
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
    place("look-found").append(namespaceFacts(namespace), list, choice, planes);
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

function factList(facts) {
  return el("dl", { class: "facts" }, ...facts.map(([name, text]) => el("div", { class: (text.textContent || text).length > 24 ? "long" : null }, el("dt", { text: name }), el("dd", {}, text))));
}

function namespaceFacts(namespace) {
  return factList([
    ["Namespace", link(address({ ns: namespace.digest }), namespace.digest)], ["Model", namespace.model], ["Revision", namespace.revision || "–"],
    ["Tenant", namespace.tenant], ["Epoch", namespace.epoch], ["Page size", nbytes(namespace.page_nbytes)],
  ]);
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
