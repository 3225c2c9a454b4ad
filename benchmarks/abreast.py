"""One call for 64 pages of 4 MiB over the bulk wire, which sends it over several connections where there are cores for
them, beside as many bare sockets.

    bare       each socket between a thread of this process and a process of its own: `sendall` and `recv_into` of its
               share of the pages, all at the same time; no node, no keys, no checksum
    bulk       one `put` and one `get`; checksums made by the writer and verified by the reader

They take turns, and the first does not count; the bytes that came back are compared. GB/s: 10^9 page bytes in the
median time. Aim: 0.85 of the bare sockets, and 10 GB/s on 16 cores.

    python benchmarks/abreast.py [--lanes 4] [--rounds 12] [--json]
"""

import contextlib
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batch import Batch, Batches
from bulk import BATCH, Contender, limit
from measure import Report, median, parser

from kvstore import Client, Namespace, PutOutcome, client_config
from kvstore.layout import opaque_layout
from kvstore.measure.node_process import NodeProcess
from kvstore.wires import abreast

PAGE_NBYTES, PAGES = 4 << 20, 64
AIM = 0.85


def bare(contenders: list[Contender], batches: list[Batch], threads: ThreadPoolExecutor) -> dict[str, float]:
    """Seconds of all of them together, each way: what the slowest took."""
    samples = list(threads.map(lambda pair: pair[0](pair[1]), zip(contenders, batches, strict=True)))
    return {way: max(sample[way][0] for sample in samples) for way in ("put", "get")}


def ours(client: Client, namespace: Namespace, pages: list[bytes], buffers: list[bytearray]) -> dict[str, float]:
    hashes = [secrets.token_bytes(32) for _ in pages]
    for buffer in buffers:
        buffer[:8] = bytes(8)
    begun = time.perf_counter()
    assert set(client.put(namespace, hashes, pages)) == {PutOutcome.STORED}
    put = time.perf_counter()
    assert all(client.get(namespace, hashes, buffers))
    got = time.perf_counter()
    assert buffers == pages
    client.remove(namespace, hashes)
    return {"put": put - begun, "get": got - put}


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--lanes", type=int, default=0, help="connections; 0: what the wire chooses here")
    options.add_argument("--rounds", type=int, default=12)
    args = options.parse_args(argv)
    lanes = args.lanes or abreast.lane_count(PAGES, PAGE_NBYTES)
    abreast.CORES_EACH = 1 if args.lanes else abreast.CORES_EACH
    abreast.LANES_MAX = lanes
    namespace = Namespace(model="benchmark", layout=opaque_layout(PAGE_NBYTES))
    pages = [os.urandom(PAGE_NBYTES) for _ in range(PAGES)]
    buffers = [bytearray(PAGE_NBYTES) for _ in range(PAGES)]
    flags = ("--ram-bytes", "1GiB", "--extent-bytes", "64MiB", "--batch-bytes-max", "512MiB", "--log-level", "WARNING")
    samples: dict[str, list[dict[str, float]]] = {"bare": [], "bulk": []}
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*flags))
        client = stack.enter_context(Client(client_config(address=node.address, wire="bulk", timeout_s=60.0)))
        each = [Batches(PAGE_NBYTES, BATCH, PAGE_NBYTES * BATCH) for _ in range(lanes)]
        contenders = [stack.enter_context(limit(batches)) for batches in each]
        threads = stack.enter_context(ThreadPoolExecutor(lanes))
        for _ in range(args.rounds + 1):
            samples["bare"].append(bare(contenders, [batches.all[0] for batches in each], threads))
            samples["bulk"].append(ours(client, namespace, pages, buffers))
    moved = {"bare": lanes * BATCH * PAGE_NBYTES, "bulk": PAGES * PAGE_NBYTES}
    report = Report(f"One call over {lanes} connections", " ".join(["python benchmarks/abreast.py", *argv]))
    speeds = {
        name: {way: moved[name] / median([one[way] for one in found[1:]]) / 1e9 for way in ("put", "get")}
        for name, found in samples.items()
    }
    for name, speed in speeds.items():
        row: dict[str, Any] = {"contender": name}
        for way in ("put", "get"):
            row[f"{way} GB/s"] = round(speed[way], 2)
            row[f"{way} of bare"] = round(speed[way] / speeds["bare"][way], 2)
        met = min(row["put of bare"], row["get of bare"]) >= AIM
        report.rows.append(row | {f"aim {AIM}": ("met" if met else "missed") if name == "bulk" else None})
    report.notes.append(f"medians of {args.rounds} rounds")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
