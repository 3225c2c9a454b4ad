// A client of kvstore for Node.js over gRPC: what docs/FORMAT.md says, and nothing else.
//
//   const client = new Client("localhost:7440");          // or with { token, tlsCa }: text, and the PEM of an authority
//   const namespace = await client.open({ model: "my-model", layout: opaqueLayout(65536) });
//   await client.put(namespace, hashes, pages);           // "WRITE", "EXISTS", "BUSY" or "FULL" for each key
//   const found = await client.get(namespace, hashes);    // a Buffer or null for each key, verified
//
// A miss is null, never an error. Errors of the node are gRPC status codes: see docs/FORMAT.md, "gRPC wire".

import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { createXXHash128, createXXHash3 } from "hash-wasm";

const PROTO = fileURLToPath(new URL("../../proto/kvstore/pb/kvstore.proto", import.meta.url));
const PROTOCOL_VERSION = 3;
const CHUNK_NBYTES = 1 << 20;
const LEAF_NBYTES = 1 << 20;
const MESSAGE_NBYTES_MAX = 2 << 20;
const ITEM_NBYTES = {
  uint8: 1, int8: 1, float8_e4m3fn: 1, float8_e5m2: 1, float16: 2, bfloat16: 2, int16: 2,
  float32: 4, int32: 4, float64: 8, int64: 8,
};

const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash("sha256")).digest();
const u32 = (...numbers) => {
  const bytes = Buffer.alloc(4 * numbers.length);
  numbers.forEach((number, i) => bytes.writeUInt32LE(number, 4 * i));
  return bytes;
};

// ---- layouts and keys ----------------------------------------------------------------------

// Pages that are just bytes.
export const opaqueLayout = (nbytes) => ({
  page_tokens: 1,
  groups: [{ name: "opaque", layers: [0], planes: [{ name: "bytes", dtype: "uint8", unit_tokens: 1, unit_shape: [nbytes] }] }],
});

export function pageNbytes(layout) {
  const unit = (plane) => ITEM_NBYTES[plane.dtype] * plane.unit_shape.reduce((product, size) => product * size, 1);
  const layer = (group) =>
    group.planes.reduce((sum, plane) => sum + (layout.page_tokens / plane.unit_tokens) * unit(plane), 0);
  return layout.groups.reduce((sum, group) => sum + group.layers.length * layer(group), 0);
}

export function layoutFingerprint(layout) {
  const lines = ["kvstore-layout-1", `page_tokens=${layout.page_tokens}`];
  for (const group of layout.groups) {
    lines.push(`group ${group.name} layers=${group.layers}`);
    for (const plane of group.planes)
      lines.push(`plane ${plane.name} dtype=${plane.dtype} unit_tokens=${plane.unit_tokens} unit_shape=${plane.unit_shape}`);
  }
  return sha256(lines.map((line) => line + "\n").join(""));
}

// All twelve fields count, given or not.
const NAMESPACE = {
  cp_rank: 0, cp_size: 1, epoch: 0, model: "", pp_rank: 0, pp_size: 1, revision: "", salt: "", tenant: "default",
  tp_rank: 0, tp_size: 1,
};

export function namespaceDigest({ layout, ...given }) {
  const values = { ...NAMESPACE, ...given, layout: layoutFingerprint(layout) };
  const parts = ["kvstore-namespace-1\0"];
  for (const name of Object.keys(values).sort()) {
    const value = Buffer.isBuffer(values[name]) ? values[name] : Buffer.from(String(values[name]));
    parts.push(u32(name.length), name, u32(value.length), value);
  }
  return sha256(...parts).subarray(0, 16);
}

// One for each full page of the tokens.
export function prefixHashes(tokens, pageTokens) {
  const hashes = [];
  for (let end = pageTokens; end <= tokens.length; end += pageTokens)
    hashes.push(sha256(hashes.at(-1) ?? "", u32(...tokens.slice(end - pageTokens, end))));
  return hashes;
}

const xxh3 = async (bytes) => Buffer.from((await createXXHash3()).init().update(bytes).digest("binary"));

// Of the parts of a page: 8 bytes each, one after the other.
export async function leaves(page) {
  const step = LEAF_NBYTES * Math.max(1, Math.ceil(page.length / (64 * LEAF_NBYTES)));
  const count = Math.max(1, Math.floor(page.length / step));
  const made = [];
  for (let i = 0; i < count; i++) made.push(await xxh3(page.subarray(i * step, i < count - 1 ? (i + 1) * step : page.length)));
  return Buffer.concat(made);
}

// Of a page: 16 bytes, bound to the key.
export async function checksum(digest, prefixHash, page) {
  const seed = await xxh3(Buffer.concat([digest, prefixHash]));
  const hasher = await createXXHash128(seed.readUInt32BE(4), seed.readUInt32BE(0));
  return Buffer.from(hasher.init().update(await leaves(page)).digest("binary"));
}

// Says who asks, with each call.
const bearer = (token) => (options, next) =>
  new grpc.InterceptingCall(next(options), {
    start(metadata, listener, go) {
      metadata.set("authorization", `Bearer ${token}`);
      go(metadata, listener);
    },
  });

// ---- the client ----------------------------------------------------------------------------

export class Client {
  // A node with identities asks for a `token` or a certificate (`tlsCert`, `tlsKey`), one with TLS is called with `tlsCa`.
  constructor(address, { timeoutMs = 10_000, token, tlsCa, tlsCert, tlsKey } = {}) {
    const definition = loadSync(PROTO, { keepCase: true, longs: Number, enums: String, defaults: true });
    const { KVStore } = grpc.loadPackageDefinition(definition).kvstore;
    this.timeoutMs = timeoutMs;
    const credentials = tlsCa ? grpc.credentials.createSsl(tlsCa, tlsKey, tlsCert) : grpc.credentials.createInsecure();
    this.stub = new KVStore(address, credentials, {
      interceptors: token ? [bearer(token)] : [],
      "grpc.max_receive_message_length": MESSAGE_NBYTES_MAX,
      "grpc.max_send_message_length": MESSAGE_NBYTES_MAX,
    });
  }

  close() {
    this.stub.close();
  }

  // Any method with one request and one reply: Hello, Lookup, Remove, Pin, Stat, NodeStatus, ...
  call(method, request) {
    return new Promise((resolve, reject) =>
      this.stub[method](request, this.#options(), (error, reply) => (error ? reject(error) : resolve(reply))));
  }

  #options() {
    return { deadline: Date.now() + this.timeoutMs };
  }

  // Says hello and opens the namespace, which a node must know before anything is put or got.
  async open(fields) {
    const { limits } = await this.call("Hello", { protocol_version: PROTOCOL_VERSION });
    const digest = namespaceDigest(fields);
    const namespace = { ...NAMESPACE, ...fields };
    await this.call("OpenNamespace", { namespace, digest });
    return { digest, pageNbytes: pageNbytes(fields.layout), limits };
  }

  // How many leading keys are stored, and which.
  lookup(namespace, prefixHashes) {
    return this.call("Lookup", { namespace: namespace.digest, prefix_hashes: prefixHashes });
  }

  // Stores what is not there yet. At most limits.batch_keys_max keys and limits.batch_nbytes_max bytes at a time.
  async put(namespace, hashes, pages, { durable = false, ttlMs = 0 } = {}) {
    const stream = this.stub.Put(this.#options());
    const replies = stream[Symbol.asyncIterator]();
    const answer = async (kind) => {
      const { value, done } = await replies.next();
      if (done || !value[kind]) throw new Error(`the node ended a put without ${kind}`);
      return value[kind];
    };
    const begin = {
      namespace: namespace.digest, prefix_hashes: hashes, page_nbytes: namespace.pageNbytes, durable, ttl_ms: ttlMs,
    };
    stream.write({ begin });
    const { verdicts } = await answer("begin");
    const chosen = verdicts.flatMap((verdict, i) => (verdict === "WRITE" ? [i] : []));
    if (chosen.length) {
      const made = [];
      for (const i of chosen) {
        made.push(await leaves(pages[i]));
        for (let start = 0; start < pages[i].length; start += CHUNK_NBYTES)
          await written(stream, { chunk: { data: pages[i].subarray(start, start + CHUNK_NBYTES) } });
      }
      stream.write({ commit: { leaves: made } });
      await answer("commit");
    }
    stream.end();
    return verdicts;
  }

  // A page, or null, for each key; a page whose bytes are not those of its key is null too.
  async get(namespace, hashes, { prefixOnly = false } = {}) {
    const request = { namespace: namespace.digest, prefix_hashes: hashes, prefix_only: prefixOnly };
    let head = null;
    const chunks = [];
    for await (const { begin, chunk } of this.stub.Get(request, this.#options())) {
      if (begin) head = begin;
      else chunks.push(chunk.data);
    }
    const bytes = Buffer.concat(chunks);
    const count = head.hits.filter(Boolean).length;
    if (bytes.length !== count * namespace.pageNbytes) throw new Error("the node sent another number of bytes than it said");
    let number = 0;
    const pages = [];
    for (let i = 0; i < hashes.length; i++) {
      if (!head.hits[i]) {
        pages.push(null);
        continue;
      }
      const page = bytes.subarray(number * namespace.pageNbytes, (number + 1) * namespace.pageNbytes);
      const intact = head.checksums[number++].equals(await checksum(namespace.digest, hashes[i], page));
      pages.push(intact ? page : null);
    }
    return pages;
  }
}

// One message, and as long as the peer needs before it takes more. Rejects if the stream ends meanwhile.
function written(stream, message) {
  return new Promise((resolve, reject) => stream.write(message, (error) => (error ? reject(error) : resolve())));
}
