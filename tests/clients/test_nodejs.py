"""The client of examples/nodejs, written from docs/FORMAT.md, with a node and with our own client.

`make test-clients` installs its packages; without them, these tests are skipped.
"""

import json
import pathlib
import secrets
import shutil
import subprocess
from typing import Any

import pytest
from authorities import of_client, of_node, pair
from waiting import PATIENT

from kvstore import Client, ClientConfig, Namespace, PutOutcome, opaque_layout
from kvstore.security.identities import add, certificate_line, new_token, token_line
from kvstore.tools.node_process import NodeProcess

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "nodejs"
GOLDEN = ROOT / "tests" / "golden" / "format.json"
NBYTES = 70_000

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").exists(),
    reason="make test-clients installs it",
)


def node_js(script: str, *arguments: str) -> Any:
    """Run a script that can use `kvstore.mjs` as `kv`; return the JSON that it prints."""
    code = f"import * as kv from './kvstore.mjs';\nconst args = process.argv.slice(1);\n{script}"
    command = ["node", "--input-type=module", "-e", code, "--", *arguments]
    done = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_example_runs(shared_node: NodeProcess) -> None:
    command = ["node", "example.mjs", shared_node.address]
    done = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result == {
        "first": ["WRITE"] * 4,
        "again": ["EXISTS"] * 4,
        "prefix_pages": 4,
        "equal": [True] * 4,
        "missed": True,
        "intact": 4,
    }


def test_digests_of_the_nodejs_client_equal_the_golden_ones() -> None:
    golden = json.loads(GOLDEN.read_text())
    found = node_js(
        """
import { readFileSync } from "node:fs";
const golden = JSON.parse(readFileSync(args[0]));
const plane = ([name, dtype, unit_shape, unit_tokens]) =>
  ({ name, dtype, unit_shape, unit_tokens });
const group = ([name, layers, planes]) => ({ name, layers, planes: planes.map(plane) });
const layouts = golden.layouts.map(({ page_tokens, groups }) =>
  ({ page_tokens, groups: groups.map(group) }));
const { first_token, token_count, page_tokens } = golden.prefix_hashes;
const tokens = Array.from({ length: token_count }, (_, i) => first_token + i);
const page = Buffer.from(Array.from({ length: 256 * golden.checksum.times }, (_, i) => i % 256));
const digest = kv.namespaceDigest({ ...golden.namespace.fields, layout: layouts[0] });
const sum = await kv.checksum(digest, Buffer.from(golden.checksum.prefix_hash, "hex"), page);
console.log(JSON.stringify({
  nbytes: layouts.map(kv.pageNbytes),
  fingerprints: layouts.map((layout) => kv.layoutFingerprint(layout).toString("hex")),
  digest: digest.toString("hex"),
  hashes: kv.prefixHashes(tokens, page_tokens).map((hash) => hash.toString("hex")),
  leaves: (await kv.leaves(page)).toString("hex"), checksum: sum.toString("hex") }));
""",
        str(GOLDEN),
    )
    assert found["nbytes"] == [layout["page_nbytes"] for layout in golden["layouts"]]
    assert found["fingerprints"] == [layout["fingerprint"] for layout in golden["layouts"]]
    assert found["digest"] == golden["namespace"]["digest"]
    assert found["hashes"] == golden["prefix_hashes"]["hashes"]
    assert found["leaves"] == golden["checksum"]["leaves"]
    assert found["checksum"] == golden["checksum"]["checksum"]


def test_pages_stored_by_one_language_are_read_by_the_other(shared_node: NodeProcess) -> None:
    namespace = Namespace(model="shared", layout=opaque_layout(NBYTES), salt=secrets.token_hex(4))
    ours, theirs = secrets.token_bytes(32), secrets.token_bytes(32)
    page = secrets.token_bytes(NBYTES)
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        assert client.put(namespace, [ours], [page]) == [PutOutcome.STORED]
        found = node_js(
            """
const client = new kv.Client(args[0]);
const namespace = await client.open(
  { model: "shared", salt: args[1], layout: kv.opaqueLayout(Number(args[2])) });
const [page] = await client.get(namespace, [Buffer.from(args[3], "hex")]);
const verdicts = await client.put(
  namespace, [Buffer.from(args[4], "hex")], [Buffer.from(page).reverse()]);
console.log(JSON.stringify({ verdicts, page: page.toString("hex") }));
client.close();
""",
            shared_node.address,
            namespace.salt,
            str(NBYTES),
            ours.hex(),
            theirs.hex(),
        )
        assert (found["verdicts"], bytes.fromhex(found["page"])) == (["WRITE"], page)
        buffer = bytearray(NBYTES)
        assert client.get(namespace, [theirs], [buffer]) == [True]
        assert buffer == page[::-1]


def test_page_of_another_key_is_a_miss(shared_node: NodeProcess) -> None:
    """A page of another key is a miss, as the checksum depends on the key."""
    found = node_js(
        """
const client = new kv.Client(args[0]);
const namespace = await client.open(
  { model: "mixed up", salt: args[1], layout: kv.opaqueLayout(1000) });
const [one, two] = [Buffer.alloc(32, 1), Buffer.alloc(32, 2)];
await client.put(namespace, [one, two], [Buffer.alloc(1000, 1), Buffer.alloc(1000, 2)]);
const stub = client.stub;
client.stub = { Get: (request, options) =>
  stub.Get({ ...request, prefix_hashes: [two] }, options) };
const [page] = await client.get(namespace, [one]);
console.log(JSON.stringify(page));
stub.close();
""",
        shared_node.address,
        secrets.token_hex(4),
    )
    assert found is None


@pytest.mark.parametrize("who", ["token", "certificate"])
def test_nodejs_client_uses_tls_and_identities(ours: Any, tmp_path: pathlib.Path, who: str) -> None:
    """The client is accepted over TLS with a token or a certificate, and refused without."""
    identities, token = tmp_path / "identities", new_token("team-a")
    add(identities, token_line("engine", token, tenant="team-a", role="write"))
    add(identities, certificate_line("team-a", tenant="team-a", role="write"))
    settings = of_node(ours) if who == "certificate" else pair(ours, "node")
    flags = [
        text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)
    ]
    shown = of_client(ours) if who == "certificate" else {"tls_ca": str(ours.path)}
    with NodeProcess("--identities", str(identities), "--ram-bytes", "64MiB", *flags) as node:
        found = node_js(
            """
import { readFileSync } from "node:fs";
const read = (path) => (path ? readFileSync(path) : undefined);
const tls = { tlsCa: read(args[1]), tlsCert: read(args[2]), tlsKey: read(args[3]) };
const space = { model: "m", tenant: "team-a", layout: kv.opaqueLayout(5000) };
const hash = Buffer.alloc(32, 7);
const attempt = async (options, about = space) => {
  const client = new kv.Client(args[0], { timeoutMs: 5000, ...options });
  try {
    const namespace = await client.open(about);
    const verdicts = await client.put(namespace, [hash], [Buffer.alloc(5000, 9)]);
    const [page] = await client.get(namespace, [hash]);
    return { verdicts, equal: page.equals(Buffer.alloc(5000, 9)) };
  } catch (error) {
    return error.code;
  } finally {
    client.close();
  }
};
console.log(JSON.stringify([
  await attempt({ ...tls, token: args[4] }),
  await attempt({ ...tls, token: args[4] }, { ...space, tenant: "team-b" }),
  await attempt({ ...tls, token: "wrong" }),
  await attempt({ token: args[4] }),
]));
""",
            node.address.replace("127.0.0.1", "localhost"),
            shown["tls_ca"],
            shown.get("tls_cert", ""),
            shown.get("tls_key", ""),
            token if who == "token" else "",
        )
    denied, unavailable, unauthenticated = 7, 14, 16
    assert found == [{"verdicts": ["WRITE"], "equal": True}, denied, unauthenticated, unavailable]
