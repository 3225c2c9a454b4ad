// The board: everything that the stream of events says. Each part is drawn anew with each event.

import { RANGES, address, shown } from "./address.js";
import { bar, el, link, place, put } from "./dom.js";
import { Graph } from "./graphs.js";
import { MISSES, events, hotPrefixes, members, namespaces, operations, slowCalls, tenants } from "./tables.js";
import { count, ms, nbytes, nbytesPerS, percent, short } from "./words.js";

const STYLES = ["s1", "s2", "s3", "s4", "s5", "s7", "s8"];
const PARTS_MAX = STYLES.length;
const KEPT = { recent: 360, day: 288 }; // samples
const SECTIONS = [
  ["now", "Overview"], ["history", "History"], ["members", "Members"], ["events", "Events"], ["operations", "Operations"], ["namespaces", "Namespaces"],
  ["hot", "Prefixes"], ["slow", "Slow calls"], ["look", "Look up"],
];

export class Board {
  constructor() {
    this.before = null;
    this.rates = null;
    this.history = null;
    this.graphs = [];
    this.members = new Map(); // the last status of each, and its rates
  }

  show(now) {
    if (now.who) this.begin(now);
    this.measure(now);
    this.sample(now.samples);
    this.head(now);
    this.tiles(now);
    this.findings(now.findings);
    members(now.cluster, this.members);
    events(now.events, now.cluster);
    this.fill(now);
    operations(now.latencies);
    tenants(now.tenants);
    namespaces(now, this.rates);
    this.misses(now.totals);
    hotPrefixes(now.hot);
    slowCalls(now.slow);
    this.before = now;
    this.navigation();
  }

  begin(now) {
    this.who = now.who;
    this.before = this.rates = null;
    this.history = now.history;
    place("history-note").hidden = this.history !== null || !now.who.models.length;
    place("history-note").textContent = "The history is kept per tenant and not shown to identities that are limited to models.";
    this.drawHistory();
  }

  // Links to the sections that there are, and to the ranges of the graphs.
  navigation() {
    const sections = SECTIONS.filter(([id]) => !place(id).hidden);
    put(place("sections"), ...sections.map(([id, name]) => el("a", { href: address({ at: id }), text: name })));
    const { range, ...rest } = shown();
    const ranges = Object.keys(RANGES).map((name) =>
      el("a", { href: address({ ...rest, range: name, at: "" }), "aria-current": name === range ? "true" : null, text: name.replace(/(\d+)/, "$1 ").replace("m", "min") }),
    );
    put(place("ranges"), ...ranges);
  }

  // ---- what changed ------------------------------------------------------------------------

  measure(now) {
    for (const member of now.cluster?.members || []) this.measureMember(member.id, member.status);
    const before = this.before;
    if (!before || before.instance !== now.instance || now.uptime_ms <= before.uptime_ms) return;
    const seconds = (now.uptime_ms - before.uptime_ms) / 1000;
    const spaces = new Map(before.namespaces.map((space) => [space.digest, space.counters]));
    this.rates = { all: change(before.totals, now.totals, seconds), spaces: new Map() };
    for (const space of now.namespaces) {
      const earlier = spaces.get(space.digest);
      if (earlier) this.rates.spaces.set(space.digest, change(earlier, space.counters, seconds));
    }
  }

  measureMember(id, status) {
    const known = this.members.get(id);
    if (!status) this.members.delete(id);
    else if (!known || status.uptime_ms < known.status.uptime_ms) this.members.set(id, { status, rates: null });
    else if (status.uptime_ms > known.status.uptime_ms) {
      const rates = change(known.status.totals, status.totals, (status.uptime_ms - known.status.uptime_ms) / 1000);
      this.members.set(id, { status, rates });
    }
  }

  sample(newest) {
    if (!newest) return;
    if (!this.history) {
      this.history = newest;
      this.drawHistory();
      return;
    }
    if (["recent", "day"].map((name) => this.add(name, newest[name])).some(Boolean)) this.refresh();
  }

  add(name, newest) {
    if (!newest) return false;
    const known = this.history[name];
    const fresh = known ? Math.min(newest.count - known.count, newest.times.length) : newest.times.length;
    if (fresh <= 0) return false;
    const added = { ...newest };
    for (const [column, values] of Object.entries(newest)) {
      if (Array.isArray(values)) added[column] = [...(known?.[column] || []), ...values.slice(-fresh)].slice(-KEPT[name]);
    }
    this.history[name] = added;
    return true;
  }

  // ---- history -----------------------------------------------------------------------------

  drawHistory() {
    const onChoose = (time) => this.graphs.forEach((graph) => graph.choose(time));
    const made = [
      ["Hit rate", { series: [{ key: "hit", label: "of requested pages", style: "s1" }], format: percent, tick: (value) => `${100 * value} %`, top: 1 }],
      ["Throughput", {
        series: [{ key: "got_nbytes", label: "read", style: "s1" }, { key: "put_nbytes", label: "written", style: "s2" }],
        format: nbytesPerS, base: 1024,
      }],
      ["Pages per second", {
        series: [
          { key: "asked", label: "requested", style: "s1" }, { key: "put", label: "written", style: "s2" },
          { key: "got", label: "read", style: "s3" }, { key: "evicted", label: "evicted", style: "s5" },
        ],
        format: short,
      }],
      ["Misses per second, by reason", {
        series: MISSES.map(([label, , key, style]) => ({ key, label, style })), format: short, kind: "areas",
      }],
      ["Stored bytes", {
        series: [{ key: "ram_nbytes", label: "RAM", style: "s1" }, { key: "disk_nbytes", label: "disk", style: "s3" }],
        format: nbytes, base: 1024,
      }],
    ];
    if (this.history && "get_p99_ms" in this.history.recent) {
      for (const [op, title] of [["lookup", "Lookup latency"], ["get", "Get latency"], ["put", "Put latency"]]) {
        const series = [{ key: `${op}_p50_ms`, label: "p50", style: "s1" }, { key: `${op}_p99_ms`, label: "p99", style: "s2" }];
        made.push([title, { series, format: ms }]);
      }
    }
    this.graphs = made.map(([title, options]) => new Graph(title, { ...options, onChoose }));
    place("graphs").replaceChildren(...this.graphs.map((graph) => graph.box));
    this.refresh();
  }

  refresh() {
    const { range } = shown();
    const data = this.samplesOf(range);
    const hit = data.asked?.map((asked, at) => (asked ? data.hits[at] / asked : null));
    for (const graph of this.graphs) graph.show({ ...data, hit }, RANGES[range]);
  }

  // Those of the day end with the recent ones.
  samplesOf(range) {
    const { recent, day } = this.history || {};
    if (!recent) return { times: [], every_s: 10 };
    if (range !== "24h" || !day) return recent;
    const last = day.times[day.times.length - 1];
    const after = recent.times.filter((time) => time <= last).length;
    const joined = Object.entries(recent).map(([name, values]) =>
      Array.isArray(values) ? [name, [...(day[name] || []), ...values.slice(after)]] : [name, values],
    );
    return { ...Object.fromEntries(joined), every_s: day.every_s };
  }

  // ---- now ---------------------------------------------------------------------------------

  head(now) {
    const state = el("b", { class: now.state === "SERVING" ? "good" : "warn", text: now.state.toLowerCase() });
    const name = now.cluster ? now.cluster.own : now.ram ? "one node" : "a node";
    document.title = now.cluster ? `${now.cluster.own} · kvstore` : "kvstore console";
    put(place("node"), el("strong", { text: name }), `${now.cluster ? ` of ${now.cluster.cluster}` : ""}, ${now.version}, `, state, `, up ${ms(now.uptime_ms)}`);
    const tenant = this.who.tenant === "*" ? "all tenants" : this.who.tenant;
    place("who").textContent = this.who.asked ? `${this.who.name}: ${this.who.role} of ${tenant}` : "no authentication";
  }

  tiles(now) {
    const { totals, ram, disk, cluster } = now;
    place("cluster").hidden = !cluster;
    place("h-now").textContent = cluster ? `This member: ${cluster.own}` : ram ? "This node" : "Your tenant on this node";
    if (cluster) {
      const { sums } = cluster;
      const known = [...this.members.values()].map((member) => member.rates).filter(Boolean);
      const rates = known.length ? Object.fromEntries(Object.keys(known[0]).map((name) => [name, known.reduce((sum, one) => sum + one[name], 0)])) : null;
      const { queue_pages: waiting, queue_nbytes: waitingNbytes } = sums.peers;
      const lost = cluster.lost.length ? `, ${cluster.lost.length} lost` : "";
      place("h-cluster").textContent = `Cluster: ${cluster.cluster}`;
      const tiles = [...traffic(rates, sums.totals), ...tiers(sums.ram, sums.disk.capacity_nbytes ? sums.disk : null)];
      tiles.push(["To replicate", nbytes(waitingNbytes), `${count(waiting)} pages`]);
      tiles.push(["Members", `${sums.answered} of ${cluster.members.length}`, `answer${lost}`]);
      const health = { green: "good", yellow: "warn", red: "bad" }[cluster.health] || "";
      const thin = sums.peers.pages_under_replicated;
      tiles.push(["Health", el("span", { class: health, text: cluster.health || "–" }), thin ? `${count(thin)} pages have too few copies` : "of members and copies"]);
      tile(place("cluster-tiles"), tiles);
    }
    const rates = this.rates?.all;
    const tiles = traffic(rates, totals);
    if (ram) {
      tiles.push(...tiers(ram, disk));
      tiles.push(["Sessions", count(now.session_count), `${count(now.refused_calls)} calls refused`]);
      tiles.push(["Evicted", rates ? short(rates.pages_evicted) : "–", "pages per second"]);
      tiles.push(["Overhead", nbytes(now.rss_nbytes), "memory without pages"]);
    } else tiles.push(["Evicted", rates ? short(rates.pages_evicted) : "–", "pages per second"]);
    tile(place("tiles"), tiles);
  }

  findings(findings) {
    const items = findings.map(({ name, state, found, remedy }) =>
      el("li", {},
        el("b", { class: state === "fail" ? "bad" : state, text: state }),
        el("span", {}, el("strong", { text: `${name}: ` }), found, el("span", { class: "faint", text: remedy ? ` → ${remedy}` : "" })),
      ),
    );
    const well = el("li", {}, el("b", { class: "good", text: "ok" }), el("span", { text: "This node knows of no problem." }));
    put(place("findings"), ...(items.length ? items : [well]));
  }

  // ---- what fills it -----------------------------------------------------------------------

  fill(now) {
    const boxes = [];
    const add = (name, key, capacity, used) => {
      const largest = now.namespaces.map((space) => ({ space, nbytes: space[key] * space.page_nbytes })).filter((part) => part.nbytes);
      largest.sort((one, other) => other.nbytes - one.nbytes);
      const parts = largest.slice(0, PARTS_MAX).map((part, at) => ({ ...part, style: STYLES[at] }));
      const whole = capacity || used;
      const rest = Math.max(0, used - parts.reduce((sum, part) => sum + part.nbytes, 0));
      const bars = parts.map(({ nbytes: size, style }) => ({ share: size / whole, style }));
      if (rest) bars.push({ share: rest / whole, style: "s6" });
      const keys = parts.map(({ space, nbytes: size, style }) =>
        el("span", { class: style }, link(address({ ns: space.digest, at: "look" }), `${space.model} (${space.tenant})`), el("b", { text: ` ${nbytes(size)}` })),
      );
      if (rest) keys.push(el("span", { class: "s6" }, el("b", { text: `${capacity ? "other, and unused ends of slots" : "other"} ${nbytes(rest)}` })));
      const said = capacity ? `${nbytes(used)} of ${nbytes(capacity)}, ${percent(used, capacity)}` : nbytes(used);
      boxes.push(el("div", { class: "tier" }, el("h3", { text: `${name}: ${said}` }), bar(bars), el("div", { class: "keys" }, ...keys)));
    };
    const there = now.page_nbytes; // which is all that a tenant is told of
    add("RAM", "page_count", now.ram?.capacity_nbytes, now.ram ? now.ram.used_nbytes : there.ram);
    if (now.disk || there.disk) add("Disk", "disk_page_count", now.disk?.capacity_nbytes, now.disk ? now.disk.used_nbytes : there.disk);
    put(place("fill"), ...boxes);
    place("tiers").className = now.latencies ? "half" : "full";
  }

  misses(totals) {
    const most = Math.max(1, ...MISSES.map(([, key]) => totals[key]));
    const lines = MISSES.map(([label, key, , style, why]) =>
      el("div", { class: "reason", title: why }, el("span", { text: label }), bar([{ share: totals[key] / most, style }]), el("span", { text: short(totals[key]) })),
    );
    put(place("misses"), ...lines);
  }
}

function traffic(rates, totals) {
  const per = (name, format) => (rates ? format(rates[name]) : "–");
  return [
    ["Hit rate", rates ? percent(rates.prefix_hits, rates.pages_asked) : "–", `${percent(totals.prefix_hits, totals.pages_asked)} since the start`],
    ["Requested", per("pages_asked", short), "pages per second"],
    ["Read", per("nbytes_got", nbytesPerS), `${nbytes(totals.nbytes_got)} since the start`],
    ["Written", per("nbytes_put", nbytesPerS), `${nbytes(totals.nbytes_put)} since the start`],
  ];
}

function tiers(ram, disk) {
  const of = (tier) => `${nbytes(tier.used_nbytes)} of ${nbytes(tier.capacity_nbytes)}`;
  return [
    ["RAM", percent(ram.used_nbytes, ram.capacity_nbytes), of(ram)],
    ["Disk", disk ? percent(disk.used_nbytes, disk.capacity_nbytes) : "none", disk ? of(disk) : "no disk tier"],
    ["Pages", short(ram.page_count), disk ? `in RAM, ${short(disk.page_count)} on disk` : "in RAM"],
  ];
}

function tile(list, tiles) {
  put(list, ...tiles.map(([name, value, more]) => el("div", {}, el("dt", { text: name }), el("dd", {}, value, el("small", { text: more })))));
}

// By second. A namespace that was forgotten takes its counts away: no negative rates.
function change(before, now, seconds) {
  return Object.fromEntries(Object.keys(now).map((name) => [name, Math.max(0, now[name] - (before[name] || 0)) / seconds]));
}
