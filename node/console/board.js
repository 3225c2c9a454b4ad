// The board: everything that the stream of events tells. Each part is drawn anew with each event, unless somebody is at it.

import { bar, clock, el, Graph, timeline } from "./graphs.js";
import { count, ms, nbytes, nbytesPerS, percent, short } from "./words.js";

const STYLES = ["s1", "s2", "s3", "s4", "s5", "s7", "s8"];
const PARTS_MAX = STYLES.length;
const KEPT = 360; // samples of the last hour
const MISSES = [
  ["absent", "miss_absent", "absent", "s1", "never stored here, or removed too long ago to remember"],
  ["evicted", "miss_evicted", "evicted_before", "s2", "evicted to make space"],
  ["writing", "miss_writing", "writing", "s3", "a writer is storing it"],
  ["removed", "miss_removed", "removed", "s4", "removed by a caller"],
  ["expired", "miss_expired", "expired", "s7", "its time to live has ended"],
  ["corrupt", "miss_corrupt", "corrupt", "s5", "did not match its checksum, and was dropped"],
];
const place = (id) => document.getElementById(id);

// Put in the place of what is there, unless somebody has his finger on it.
function put(box, ...children) {
  if (!(box.contains(document.activeElement) && box !== document.activeElement)) box.replaceChildren(...children);
}

function rows(table, columns, lines) {
  const head = columns.map(([name, kind]) => el("th", { class: kind, scope: "col", text: name }));
  const body = lines.map((line) =>
    el("tr", {}, ...line.map((cell, at) => (cell instanceof Node ? el("td", { class: columns[at][1] }, cell) : el("td", { class: columns[at][1], text: cell })))),
  );
  put(table, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

export class Board {
  constructor(onPrefix) {
    this.onPrefix = onPrefix;
    this.before = null;
    this.rates = null;
    this.history = null;
    this.graphs = [];
    this.members = new Map(); // what each said last, and its rates
  }

  show(now) {
    if (now.who) this.begin(now);
    this.measure(now);
    this.sample(now.samples);
    this.head(now);
    this.tiles(now);
    this.findings(now.findings);
    this.cluster(now.cluster);
    this.fill(now);
    this.tenants(now);
    this.spaces(now);
    this.misses(now.totals);
    this.hot(now.hot);
    this.slow(now.slow);
    this.before = now;
  }

  begin(now) {
    this.who = now.who;
    this.before = this.rates = null;
    this.history = now.history;
    place("hour-note").hidden = this.history !== null || !now.who.models.length;
    place("hour-note").textContent = "The last hour is kept per tenant and not shown to identities that are limited to models.";
    this.drawHour();
  }

  // ---- what changed ------------------------------------------------------------------------

  measure(now) {
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

  sample(newest) {
    if (!newest || !newest.times.length) return;
    if (!this.history) {
      this.history = newest;
      this.drawHour();
      return;
    }
    const fresh = Math.min(newest.count - this.history.count, newest.times.length);
    if (fresh <= 0) return;
    for (const [name, values] of Object.entries(newest)) {
      if (Array.isArray(values)) this.history[name] = [...(this.history[name] || []), ...values.slice(-fresh)].slice(-KEPT);
    }
    this.history.count = newest.count;
    this.refreshHour();
  }

  // ---- the last hour -----------------------------------------------------------------------

  drawHour() {
    const data = this.history;
    this.graphs = [
      new Graph("Hit rate", { series: [{ key: "hit", label: "of requested pages", style: "s1" }], format: (value) => percent(value), top: 1 }),
      new Graph("Throughput", {
        series: [{ key: "got_nbytes", label: "read", style: "s1" }, { key: "put_nbytes", label: "written", style: "s2" }],
        format: nbytesPerS,
      }),
      new Graph("Pages per second", {
        series: [
          { key: "asked", label: "requested", style: "s1" }, { key: "put", label: "written", style: "s2" },
          { key: "got", label: "read", style: "s3" }, { key: "evicted", label: "evicted", style: "s5" },
        ],
        format: short,
      }),
      new Graph("Misses per second, by reason", {
        series: MISSES.map(([label, , key, style]) => ({ key, label, style })), format: short, kind: "areas",
      }),
      new Graph("Stored bytes", {
        series: [{ key: "ram_nbytes", label: "RAM", style: "s1" }, { key: "disk_nbytes", label: "disk", style: "s3" }],
        format: nbytes,
      }),
    ];
    if (data && "get_p99_ms" in data) {
      for (const [op, title] of [["lookup", "Lookups"], ["get", "Gets"], ["put", "Puts"]]) {
        const series = [{ key: `${op}_p50_ms`, label: "p50", style: "s1" }, { key: `${op}_p99_ms`, label: "p99", style: "s2" }];
        this.graphs.push(new Graph(`${title}: latency`, { series, format: ms }));
      }
    }
    place("graphs").replaceChildren(...this.graphs.map((graph) => graph.box));
    this.refreshHour();
  }

  refreshHour() {
    const data = this.history || { times: [] };
    const hit = (data.hits || []).map((hits, at) => (data.asked[at] ? hits / data.asked[at] : null));
    for (const graph of this.graphs) graph.show({ ...data, hit });
  }

  // ---- now ---------------------------------------------------------------------------------

  head(now) {
    const state = el("b", { class: now.state === "SERVING" ? "good" : "warn", text: now.state.toLowerCase() });
    const name = now.cluster ? `${now.cluster.own} of ${now.cluster.cluster}` : now.ram ? "one node" : "a node";
    place("node").replaceChildren(`${name}, ${now.version}, `, state, `, up ${ms(now.uptime_ms)}`);
    const tenant = this.who.tenant === "*" ? "all tenants" : this.who.tenant;
    place("who").textContent = this.who.asked ? `${this.who.name}: ${this.who.role} of ${tenant}` : "no authentication";
  }

  tiles(now) {
    const { totals, ram, disk } = now;
    const rates = this.rates?.all;
    const per = (name, format) => (rates ? format(rates[name]) : "–");
    const shown = [
      ["Hit rate", rates ? percent(rates.prefix_hits, rates.pages_asked) : "–", `${percent(totals.prefix_hits, totals.pages_asked)} since the start`],
      ["Requested", per("pages_asked", short), "pages per second"],
      ["Read", per("nbytes_got", nbytesPerS), `${per("pages_got", short)} pages/s`],
      ["Written", per("nbytes_put", nbytesPerS), `${per("pages_put", short)} pages/s`],
      ["Evicted", per("pages_evicted", short), "pages per second"],
    ];
    if (ram) {
      shown.push(["RAM", percent(ram.used_nbytes, ram.capacity_nbytes), `${nbytes(ram.used_nbytes)} of ${nbytes(ram.capacity_nbytes)}`]);
      if (disk) shown.push(["Disk", percent(disk.used_nbytes, disk.capacity_nbytes), `${nbytes(disk.queue_nbytes)} queued`]);
      shown.push(["Pages in RAM", short(ram.page_count), `${count(ram.held_count)} held, ${count(ram.pinned_count)} pinned`]);
      shown.push(["Sessions", count(now.session_count), `${count(now.refused_calls)} calls refused`]);
      shown.push(["Overhead", nbytes(now.rss_nbytes), "memory without pages"]);
    }
    const tiles = shown.map(([name, value, more]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }, el("small", { text: more }))));
    place("tiles").replaceChildren(...tiles);
  }

  findings(findings) {
    const items = findings.map(({ name, state, found, remedy }) =>
      el("li", {},
        el("b", { class: state === "fail" ? "bad" : state, text: state }),
        el("span", {}, el("strong", { text: `${name}: ` }), found, el("span", { class: "faint", text: remedy ? ` → ${remedy}` : "" })),
      ),
    );
    const well = el("li", {}, el("b", { class: "good", text: "ok" }), "This node knows of no problem.");
    put(place("findings"), ...(items.length ? items : [well]));
  }

  // ---- cluster -----------------------------------------------------------------------------

  cluster(cluster) {
    place("cluster").hidden = !cluster;
    if (!cluster) return;
    const there = cluster.members.filter((member) => member.status).length;
    const rest = `view ${cluster.number}, ${cluster.members.length} members, ${there} answer, replicas ${cluster.replicas}`;
    place("cluster-line").textContent = `${cluster.cluster}: ${rest}. Other members' figures are some seconds old.`;
    const zones = new Map();
    for (const member of cluster.members) zones.set(member.zone, [...(zones.get(member.zone) || []), member]);
    const boxes = [...zones].sort(([one], [other]) => one.localeCompare(other)).map(([zone, members]) =>
      el("div", { class: "zone" }, el("h3", { text: zone ? `zone ${zone}` : "no zone" }),
        el("div", { class: "cells" }, ...members.map((member) => this.member(member, member.id === cluster.own)))),
    );
    put(place("map"), ...boxes);
  }

  member(member, own) {
    const { status } = member;
    const told = { DEGRADED: "degraded", DRAINING: "stopping" };
    const state = status ? told[status.state] || member.state : member.error ? "no answer" : "not queried yet";
    const edge = state === "serving" ? "" : state === "no answer" || state === "degraded" ? " bad-edge" : " warn-edge";
    const style = edge === "" ? "good" : edge === " bad-edge" ? "bad" : "warn";
    const head = el("p", { class: "head" }, el("strong", { text: own ? `${member.id} (this one)` : member.id }), el("span", { class: style, text: state }));
    const where = el("p", { class: "faint", text: `${member.address}${member.weight === 1 ? "" : `, weight ${member.weight}`}` });
    if (!status) return el("div", { class: `member${edge}` }, head, where, el("p", { class: "bad", text: member.error }));
    const lines = [head, where, ...tier("RAM", status.ram, "s1"), ...(status.disk ? tier("disk", status.disk, "s3") : [])];
    const { peers } = status;
    lines.push(el("p", { text: `copies of others' pages ${count(peers.copy_count)}, ${nbytes(peers.copy_nbytes)}` }));
    const dropped = peers.pages_dropped ? `, ${count(peers.pages_dropped)} dropped` : "";
    lines.push(el("p", { text: `to replicate ${count(peers.queue_pages)} pages, ${nbytes(peers.queue_nbytes)}${dropped}` }));
    if (peers.sweeping) lines.push(el("p", { text: `rebalance: ${count(peers.sweep_pages_fetched)} of ${count(peers.sweep_pages_missing)} pages fetched` }));
    const rates = this.memberRates(member.id, status);
    const speed = rates ? `, read ${nbytesPerS(rates.nbytes_got)}, written ${nbytesPerS(rates.nbytes_put)}` : "";
    lines.push(el("p", { text: `hit ${percent(status.totals.prefix_hits, status.totals.pages_asked)}${speed}` }));
    return el("div", { class: `member${edge}` }, ...lines);
  }

  memberRates(id, status) {
    const known = this.members.get(id);
    if (!known || status.uptime_ms < known.status.uptime_ms) this.members.set(id, { status, rates: null });
    else if (status.uptime_ms > known.status.uptime_ms) {
      const rates = change(known.status.totals, status.totals, (status.uptime_ms - known.status.uptime_ms) / 1000);
      this.members.set(id, { status, rates });
    }
    return this.members.get(id).rates;
  }

  // ---- what fills it -----------------------------------------------------------------------

  fill(now) {
    const boxes = [];
    const add = (name, key, capacity, used) => {
      const largest = [...now.namespaces].map((space) => ({ space, nbytes: space[key] * space.page_nbytes })).filter((part) => part.nbytes);
      largest.sort((one, other) => other.nbytes - one.nbytes);
      const shown = largest.slice(0, PARTS_MAX);
      const whole = capacity || used;
      const rest = Math.max(0, used - shown.reduce((sum, part) => sum + part.nbytes, 0));
      const parts = shown.map((part, at) => ({ share: part.nbytes / whole, style: STYLES[at] }));
      if (rest) parts.push({ share: rest / whole, style: "s6" });
      const keys = shown.map((part, at) => el("span", { class: STYLES[at] }, el("b", { text: `${part.space.model} (${part.space.tenant}) ${nbytes(part.nbytes)}` })));
      if (rest) keys.push(el("span", { class: "s6" }, el("b", { text: `${capacity ? "other, and unused ends of slots" : "other"} ${nbytes(rest)}` })));
      const said = capacity ? `${nbytes(used)} of ${nbytes(capacity)}, ${percent(used, capacity)}` : nbytes(used);
      boxes.push(el("div", { class: "tier" }, el("h3", { text: `${name}: ${said}` }), bar(parts), el("div", { class: "keys" }, ...keys)));
    };
    const there = now.page_nbytes; // which is all that a tenant is told of
    add("RAM", "page_count", now.ram?.capacity_nbytes, now.ram ? now.ram.used_nbytes : there.ram);
    if (now.disk || there.disk) add("Disk", "disk_page_count", now.disk?.capacity_nbytes, now.disk ? now.disk.used_nbytes : there.disk);
    put(place("fill"), ...boxes);
  }

  tenants(now) {
    place("tenants").hidden = !now.tenants.length;
    place("tiers").className = now.tenants.length ? "half" : "full";
    const beside = (used, quota) => {
      const said = quota ? `${nbytes(used)} of ${nbytes(quota)}` : nbytes(used);
      return el("div", {}, said, quota ? bar([{ share: used / quota, style: "s1" }]) : null);
    };
    const kinds = ["puts", "pins", "holds", "connections", "requests", "bytes"];
    const lines = now.tenants.map((use) => [
      use.tenant, beside(use.ram_nbytes, use.ram_quota_nbytes), beside(use.disk_nbytes, use.disk_quota_nbytes), count(use.pin_count),
      kinds.filter((kind) => use[`refused_${kind}`]).map((kind) => `${count(use[`refused_${kind}`])} ${kind}`).join(", "),
    ]);
    rows(place("tenant-rows"), [["Tenant", "name"], ["RAM"], ["Disk"], ["Pins", "n"], ["Refused"]], lines);
  }

  spaces(now) {
    const lines = now.namespaces.map((space) => {
      const { counters } = space;
      const rates = this.rates?.spaces.get(space.digest);
      const per = (name, format) => (rates ? format(rates[name]) : "–");
      const worst = MISSES.map(([label, key]) => [counters[key], label]).sort((one, other) => other[0] - one[0])[0];
      return [
        space.model, el("code", { text: space.digest.slice(0, 12) }), space.tenant, nbytes(space.page_nbytes), count(space.page_count), nbytes(space.page_count * space.page_nbytes),
        count(space.disk_page_count), percent(counters.prefix_hits, counters.pages_asked), per("pages_asked", short), per("nbytes_got", nbytesPerS), per("nbytes_put", nbytesPerS),
        worst[0] ? `${worst[1]} ${short(worst[0])}` : "",
      ];
    });
    const columns = [["Model", "name"], ["Namespace"], ["Tenant"], ["Page size", "n"], ["In RAM", "n"], ["Bytes", "n"], ["On disk", "n"], ["Hit", "n"], ["Requested/s", "n"], ["Read", "n"], ["Written", "n"], ["Most misses"]];
    rows(place("space-rows"), columns, lines);
    const left = now.namespace_count - now.namespaces.length;
    place("space-note").hidden = !left;
    place("space-note").textContent = `and ${count(left)} more namespaces, with fewer bytes: kvstore ls`;
    place("spaces").replaceChildren(...now.namespaces.map((space) => el("option", { value: space.digest, text: `${space.model} (${space.tenant})` })));
  }

  misses(totals) {
    const most = Math.max(1, ...MISSES.map(([, key]) => totals[key]));
    const lines = MISSES.map(([label, key, , style, why]) =>
      el("div", { class: "reason", title: why }, el("span", { text: label }), bar([{ share: totals[key] / most, style }]), el("span", { text: short(totals[key]) })),
    );
    put(place("misses"), ...lines);
  }

  hot(hot) {
    const lines = hot.map((one) => [
      el("button", { type: "button", class: "plain mono", text: one.head, onclick: () => this.onPrefix(one.namespace, one.head) }),
      one.model, `${short(one.lookups)}${one.error ? ` (± ${short(one.error)})` : ""}`, one.pages.toFixed(1),
    ]);
    rows(place("hot-rows"), [["Key starts with"], ["Model", "name"], ["Lookups", "n"], ["Pages found", "n"]], lines);
  }

  slow(calls) {
    place("slow").hidden = !calls;
    if (!calls) return;
    const boxes = calls.map((call) => {
      const head = el("p", {}, el("strong", { text: `${call.op} ${ms(call.took_ms)}` }), el("span", { class: "faint", text: ` over ${call.wire} at ${clock(call.unix_s)}` }));
      return el("div", { class: "call" }, head, timeline(call, ms));
    });
    put(place("slow-rows"), ...(boxes.length ? boxes : [el("p", { class: "faint", text: "None yet." })]));
  }
}

// By second. A namespace that was forgotten takes its counts away: no negative rates.
function change(before, now, seconds) {
  return Object.fromEntries(Object.keys(now).map((name) => [name, Math.max(0, now[name] - (before[name] || 0)) / seconds]));
}

function tier(name, told, style) {
  const line = `${name} ${percent(told.used_nbytes, told.capacity_nbytes)} of ${nbytes(told.capacity_nbytes)}, ${count(told.page_count)} pages`;
  return [el("p", { text: line }), bar([{ share: told.used_nbytes / told.capacity_nbytes, style }])];
}
