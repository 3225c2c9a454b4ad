// What the page shows is kept in its address behind the #, which is never sent to the node: the range of the graphs, the
// namespace and key that are looked up, and the section that a link leads to.

export const RANGES = { "10m": 600, "1h": 3600, "24h": 86400 };
const FIELDS = ["range", "ns", "key", "at"];

export function shown() {
  const values = new URLSearchParams(location.hash.slice(1));
  const found = Object.fromEntries(FIELDS.map((name) => [name, values.get(name) || ""]));
  if (!Object.hasOwn(RANGES, found.range)) found.range = "1h";
  return found;
}

// The address of another state. The range stays unless it is given.
export function address(values) {
  const wanted = { range: shown().range, ...values };
  return `#${new URLSearchParams(FIELDS.filter((name) => wanted[name]).map((name) => [name, wanted[name]]))}`;
}

// The console of another member; null if its address is not known. Its scheme is this page's: nodes of a cluster share it.
export function consoleOf(member, port, values = {}) {
  const host = member.address.replace(/:\d+$/, "");
  if (!port || !/^([\w.-]+|\[[\da-fA-F:.]+\])$/.test(host)) return null;
  return `${location.protocol}//${host}:${port}/console/${address(values)}`;
}
