// node example.mjs [ADDRESS]: puts four pages, gets them back, lets the node verify them. Exit status 0 if all is well.

import { randomBytes } from "node:crypto";
import { Client, opaqueLayout, prefixHashes } from "./kvstore.mjs";

const PAGE_NBYTES = 1_500_000; // more than one chunk
const client = new Client(process.argv[2] ?? "localhost:7440");
const namespace = await client.open({ model: "node-example", salt: randomBytes(4).toString("hex"), layout: opaqueLayout(PAGE_NBYTES) });

const tokens = Array.from({ length: 256 + 20 }, (_, i) => i); // the last 20 fill no page
const hashes = prefixHashes(tokens, 64);
const pages = hashes.map(() => randomBytes(PAGE_NBYTES));

const first = await client.put(namespace, hashes, pages);
const again = await client.put(namespace, hashes, pages);
const { prefix_pages } = await client.lookup(namespace, hashes);
const found = await client.get(namespace, [...hashes, randomBytes(32)]);
const verified = await client.call("Verify", { namespace: namespace.digest, prefix_hashes: hashes });
await client.call("RemoveNamespace", { namespace: namespace.digest });

const result = {
  first, again, prefix_pages,
  equal: pages.map((page, i) => page.equals(found[i])), missed: found.at(-1) === null, intact: verified.intact,
};
console.log(JSON.stringify(result));
client.close();
process.exit(result.equal.every(Boolean) && result.missed && verified.intact === pages.length ? 0 : 1);
