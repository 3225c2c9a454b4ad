// The tables of the board. Whatever has a page of its own is a link: members, namespaces, keys.

import { address, consoleOf, shown } from "./address.js";
import { bar, el, fill, link, place, put, timeline } from "./dom.js";
import { count, moment, ms, nbytes, nbytesPerS, percent, short } from "./words.js";

// [label, counter, column of the history, style, meaning]
export const MISSES = [
  ["absent", "miss_absent", "absent", "s1", "never stored here, or removed too long ago to remember"],
  ["evicted", "miss_evicted", "evicted_before", "s2", "evicted to make space"],
  ["writing", "miss_writing", "writing", "s3", "a writer is storing it"],
  ["removed", "miss_removed", "removed", "s4", "removed by a caller"],
  ["expired", "miss_expired", "expired", "s7", "its time to live has ended"],
  ["corrupt", "miss_corrupt", "corrupt", "s5", "did not match its checksum, and was dropped"],
];

const code = (href, text) => el("code", {}, link(href, text));
const space = (digest) => code(address({ ns: digest, at: "look" }), digest.slice(0, 12));

// ---- cluster -------------------------------------------------------------------------------

export function members(cluster, known) {
  place("members").hidden = !cluster;
  if (!cluster) return;
  const columns = [
    ["Member", "name first"], ["State"], ["Zone"], ["RAM", "wide"], ["Disk", "wide"], ["Hit", "n"], ["Requested/s", "n"], ["Read", "n"], ["Written", "n"],
    ["To replicate", "n"], ["Copies", "n"], ["Up", "n"],
  ];
  const lines = [...cluster.members].sort((one, other) => one.zone.localeCompare(other.zone) || one.id.localeCompare(other.id)).map((member) => row(member, cluster.own, known));
  const lost = cluster.lost.map((member) => lostRow(member, columns.length));
  const { sums } = cluster;
  const rates = [...known.values()].map((member) => member.rates).filter(Boolean);
  const whole = (name, format) => (rates.length ? format(rates.reduce((sum, one) => sum + one[name], 0)) : "–");
  const all = [
    `All, ${sums.answered} of ${cluster.members.length} answer`, "", "", used(sums.ram, "s1"), used(sums.disk, "s3"), percent(sums.totals.prefix_hits, sums.totals.pages_asked),
    whole("pages_asked", short), whole("nbytes_got", nbytesPerS), whole("nbytes_put", nbytesPerS), nbytes(sums.peers.queue_nbytes), nbytes(sums.peers.copy_nbytes), "",
  ];
  fill(place("member-rows"), columns, [...lines, ...lost], [all]);
  place("cluster-line").textContent = `View ${cluster.number}, replicas ${cluster.replicas}. Figures of other members are some seconds old. Hit rates are since the start.`;
}

function row(member, own, known) {
  const { status } = member;
  const states = { DEGRADED: "degraded", DRAINING: "stopping" };
  const state = status ? states[status.state] || member.state : member.error ? "no answer" : "not queried yet";
  const style = state === "serving" ? "good" : state === "no answer" || state === "degraded" ? "bad" : "warn";
  const isOwn = member.id === own;
  const name = isOwn ? el("strong", { text: `${member.id} (this one)` }) : link(consoleOf(member, status?.metrics_port), member.id);
  const weight = member.weight === 1 ? "" : `, weight ${member.weight}`;
  const first = el("div", {}, name, el("small", { text: `${member.address}${weight}` }));
  const head = [first, el("span", { class: style, text: state }), member.zone || "–"];
  if (!status) return [...head, { span: 9, text: member.error || "It is queried within seconds.", style: member.error ? "bad" : "faint" }];
  const { peers, totals } = status;
  const rates = known.get(member.id)?.rates;
  const per = (name, format) => (rates ? format(rates[name]) : "–");
  const dropped = peers.pages_dropped ? `, ${count(peers.pages_dropped)} pages dropped` : "";
  const rebalance = peers.sweeping ? el("small", { text: `rebalance: ${count(peers.sweep_pages_fetched)} of ${count(peers.sweep_pages_missing)} pages` }) : null;
  return [
    ...head, used(status.ram, "s1"), status.disk ? used(status.disk, "s3") : "none", percent(totals.prefix_hits, totals.pages_asked),
    per("pages_asked", short), per("nbytes_got", nbytesPerS), per("nbytes_put", nbytesPerS),
    el("div", {}, `${nbytes(peers.queue_nbytes)}${dropped}`, rebalance), nbytes(peers.copy_nbytes), ms(status.uptime_ms),
  ];
}

function lostRow(member, columns) {
  const since = member.since_unix_s ? `Since ${moment(member.since_unix_s)}` : "Just now";
  const first = el("div", {}, el("span", { text: member.id }), el("small", { text: member.address }));
  const left = member.owners_left === 1 ? "1 other owner" : `${member.owners_left} other owners`;
  const alone = member.share_alone ? `; ${percent(member.share_alone)} of all keys have no owner left` : "";
  const text = `${since}: it left without a drain. It was the first owner of ${percent(member.share)} of the keys, which have ${left}${alone}. Restart it, or: kvstore cluster forget-member ${member.id}`;
  return [first, el("span", { class: "bad", text: "lost" }), "–", { span: columns - 3, text }];
}

function used(tier, style) {
  if (!tier.capacity_nbytes) return el("span", { text: "none" });
  const share = tier.used_nbytes / tier.capacity_nbytes;
  return el("div", {}, `${percent(share)} of ${nbytes(tier.capacity_nbytes)}`, bar([{ share, style }]));
}

export function events(newest, cluster) {
  place("events").hidden = !newest;
  if (!newest) return;
  const bad = new Set(["lost", "disk-stopped", "under-replicated"]);
  const lines = newest.map((event) => {
    const member = cluster?.members.find((one) => one.id === event.member);
    const there = member && member.id !== cluster.own ? consoleOf(member, member.status?.metrics_port) : null;
    return [moment(event.unix_ms / 1000), el("span", { class: bad.has(event.kind) ? "bad" : null, text: event.kind }), link(there, event.member || "–"), event.text];
  });
  const columns = [["Time"], ["Event"], ["Member"], ["What", "name"]];
  fill(place("event-rows"), columns, lines.length ? lines : [[{ span: columns.length, text: "None yet.", style: "faint" }]]);
}

// ---- node ----------------------------------------------------------------------------------

export function operations(latencies) {
  place("operations").hidden = !latencies;
  if (!latencies) return;
  const time = (value) => (value === null ? "–" : ms(value));
  const lines = latencies.map((one) => [
    one.op, one.per_s ? one.per_s.toFixed(1) : "0", time(one.recent.p50), time(one.recent.p99), short(one.count), time(one.since.p50), time(one.since.p99),
  ]);
  const columns = [["Call", "first"], ["Per second", "n"], ["p50, last minute", "n"], ["p99, last minute", "n"], ["Since start", "n"], ["p50", "n"], ["p99", "n"]];
  fill(place("operation-rows"), columns, lines.length ? lines : [[{ span: columns.length, text: "No calls yet.", style: "faint" }]]);
}

export function tenants(uses) {
  place("tenants").hidden = !uses.length;
  const beside = (used, quota) => {
    const said = quota ? `${nbytes(used)} of ${nbytes(quota)}` : nbytes(used);
    return el("div", {}, said, quota ? bar([{ share: used / quota, style: "s1" }]) : null);
  };
  const kinds = ["puts", "pins", "holds", "connections", "requests", "bytes"];
  const lines = uses.map((use) => [
    use.tenant, beside(use.ram_nbytes, use.ram_quota_nbytes), beside(use.disk_nbytes, use.disk_quota_nbytes), count(use.pin_count),
    kinds.filter((kind) => use[`refused_${kind}`]).map((kind) => `${count(use[`refused_${kind}`])} ${kind}`).join(", ") || "–",
  ]);
  fill(place("tenant-rows"), [["Tenant", "name first"], ["RAM"], ["Disk"], ["Pins", "n"], ["Refused"]], lines);
}

export function namespaces(now, rates) {
  const lines = now.namespaces.map((one) => {
    const { counters } = one;
    const speeds = rates?.spaces.get(one.digest);
    const per = (name, format) => (speeds ? format(speeds[name]) : "–");
    const worst = MISSES.map(([label, key]) => [counters[key], label]).sort((here, other) => other[0] - here[0])[0];
    return [
      one.model, one.tenant, space(one.digest), nbytes(one.page_nbytes), count(one.page_count), nbytes(one.page_count * one.page_nbytes),
      count(one.disk_page_count), percent(counters.prefix_hits, counters.pages_asked), per("pages_asked", short), per("nbytes_got", nbytesPerS), per("nbytes_put", nbytesPerS),
      worst[0] ? `${worst[1]} ${short(worst[0])}` : "–",
    ];
  });
  const columns = [
    ["Model", "name first"], ["Tenant"], ["Namespace"], ["Page size", "n"], ["Pages in RAM", "n"], ["Bytes", "n"], ["Pages on disk", "n"], ["Hit", "n"],
    ["Requested/s", "n"], ["Read", "n"], ["Written", "n"], ["Most misses"],
  ];
  fill(place("space-rows"), columns, lines.length ? lines : [[{ span: columns.length, text: "No namespace yet: a client opens one with its first put.", style: "faint" }]]);
  const left = now.namespace_count - now.namespaces.length;
  place("space-note").hidden = !left;
  place("space-note").textContent = `and ${count(left)} more namespaces, with fewer bytes: kvstore ls`;
  choices(now.namespaces);
}

// The namespaces of the look-up form. One that is looked up stays a choice.
function choices(spaces) {
  const select = place("look-space");
  const listed = spaces.map((one) => [one.digest, `${one.model} (${one.tenant}) ${one.digest.slice(0, 12)}`]);
  const { ns } = shown();
  if (ns && !spaces.some((one) => one.digest === ns)) listed.push([ns, ns]);
  const chosen = select.value;
  put(select, ...listed.map(([value, text]) => el("option", { value, text })));
  if (listed.some(([value]) => value === chosen)) select.value = chosen;
}

export function hotPrefixes(hot) {
  const lines = hot.map((one) => [
    code(address({ ns: one.namespace, key: one.head, at: "look" }), one.head), one.model, space(one.namespace),
    `${short(one.lookups)}${one.error ? ` (± ${short(one.error)})` : ""}`, one.pages.toFixed(1),
  ]);
  const columns = [["Key starts with", "first"], ["Model", "name"], ["Namespace"], ["Lookups", "n"], ["Pages found", "n"]];
  fill(place("hot-rows"), columns, lines.length ? lines : [[{ span: columns.length, text: "No prefix was found often yet.", style: "faint" }]]);
}

// ---- slow calls ----------------------------------------------------------------------------

// Where the time of a call went. What no step covers is the node's own work: locks, RAM, checksums.
const STEPS = {
  queue: ["s8", "queue", "waited for other calls of the same client"],
  disk: ["s3", "disk", "waited for pages from the disk"],
  peer: ["s4", "member", "waited for pages from another member"],
  receive: ["s2", "receive", "received page bytes from the client"],
  send: ["s1", "send", "sent page bytes to the client"],
  acks: ["s7", "acknowledge", "waited until pages were durable or replicated"],
  node: ["s6", "node", "the node's own work: locks, memory, checksums"],
};

export function slowCalls(calls) {
  const lines = calls.map((call) => {
    const { subject } = call;
    const parts = [...call.spans].sort((one, other) => one.at_ms - other.at_ms).map((span) => ({ name: span.name, at: span.at_ms, took: span.took_ms }));
    const sums = new Map();
    for (const part of parts) sums.set(part.name, (sums.get(part.name) || 0) + part.took);
    const rest = call.took_ms - [...sums.values()].reduce((sum, one) => sum + one, 0);
    if (rest > 0.01 * call.took_ms) sums.set("node", rest);
    const words = [...sums].sort((one, other) => other[1] - one[1]).map(([name, took]) => `${STEPS[name]?.[1] || name} ${ms(took)}`);
    const picture = timeline(call.took_ms, [
      { at: 0, took: call.took_ms, style: "s6" }, ...parts.map(({ name, at, took }) => ({ at, took, style: STEPS[name]?.[0] || "s6" })),
    ]);
    const key = subject.key ? code(address({ ns: subject.namespace, key: subject.key, at: "look" }), subject.key) : "–";
    return [
      moment(call.unix_s), call.op, call.error ? el("span", { class: "bad", text: call.error }) : "ok", subject.tenant || "–",
      subject.namespace ? link(address({ ns: subject.namespace, at: "look" }), subject.model || subject.namespace.slice(0, 12)) : "–", key,
      subject.page_count ? count(subject.page_count) : "–", subject.nbytes ? nbytes(subject.nbytes) : "–", call.wire, ms(call.took_ms),
      el("div", {}, picture, el("small", { text: words.join(", ") })),
    ];
  });
  const columns = [
    ["Time", "first"], ["Call"], ["Result"], ["Tenant"], ["Model", "name"], ["First key"], ["Pages", "n"], ["Bytes", "n"], ["Wire"], ["Total", "n"],
    ["Where the time went", "wide"],
  ];
  fill(place("slow-rows"), columns, lines.length ? lines : [[{ span: columns.length, text: "None: no call took more than 100 ms.", style: "faint" }]]);
  place("slow-keys").hidden = !lines.length;
  put(place("slow-keys"), ...Object.values(STEPS).map(([style, name, why]) => el("span", { class: style, title: why }, el("b", { text: name }))));
}
