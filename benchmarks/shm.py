"""Put and get of 32 pages over the shared-memory wire, beside `memcpy`; and what a question costs on it.

    memcpy     the pages copied into memory of the node's kind (a memfd, mapped and touched before), and
               from there into the buffers: no node, no keys, no checksum
    shm        ours as it is: put reserves, copies, hashes and commits; get acquires, copies, hashes the
               copy and releases
    others     ours without the checksum, ours over bulk TCP

All copy from the same pages and into the same buffers. They take turns; a turn is five puts and gets, of
which the first does not count, and in which the bytes that came back are compared. GB/s: 10^9 page bytes
in the median of all calls. Aim: put and get each at least 0.8 of memcpy for pages of 1 MiB and above.

The second table is of 64 keys that are stored: `Lookup`, and `Acquire` (what a zero-copy reader does:
enter `open_get`, which returns checksums and places of all pages, and leave it).

    python benchmarks/shm.py [--rounds 15] [--json]
"""

import contextlib
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from batch import Batch, NoChecksum, ours
from measure import Report, Samples, median, parser, percentile, progress, rounds, timed

from kvstore import Client, client_config
from kvstore.measure.node_process import NodeProcess

PAGE_KIB = (1024, 4096)
BATCH = 32
TURN = 5
WARMUPS = 2
AIM = 0.8
KEYS = 64
CALLS = 50  # questions of one turn
NODE_FLAGS = ("--ram-bytes", "512MiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
Contender = Callable[[], Samples]


@contextlib.contextmanager
def memcpy(batch: Batch) -> Iterator[Contender]:
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, batch.nbytes)
    memory = memoryview(mmap.mmap(fd, batch.nbytes))
    os.close(fd)
    memory[:] = bytes(batch.nbytes)
    slots = [memory[start : start + batch.page_nbytes] for start in range(0, batch.nbytes, batch.page_nbytes)]

    def put() -> None:
        for slot, page in zip(slots, batch.pages, strict=True):
            slot[:] = page

    buffers = [memoryview(buffer) for buffer in batch.buffers]  # a bytearray's own slices are copied twice

    def get() -> None:
        for buffer, slot in zip(buffers, slots, strict=True):
            buffer[:] = slot

    yield lambda: {"put": [timed(put)], "get": [timed(get)]}


def without_checksum(client: Client, batch: Batch) -> Samples:
    with mock.patch("kvstore.wires.shm.running_checksum", NoChecksum):
        return ours(client, batch)


def turn(contender: Contender, batch: Batch) -> Samples:
    """Runs a contender a few times; the first time does not count."""
    for buffer in batch.buffers:
        buffer[:] = bytes(len(buffer))  # what an earlier turn left could pass for this one's
    contender()
    assert batch.buffers == batch.pages, "the bytes that came back are not those that were stored"
    samples = [contender() for _ in range(TURN - 1)]
    return {op: [seconds for sample in samples for seconds in sample[op]] for op in samples[0]}


def copy_rows(clients: dict[str, Client], batch: Batch, count: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows of one page size."""
    with memcpy(batch) as limit:
        contenders: dict[str, Contender] = {
            "memcpy": limit,
            "shm": functools.partial(ours, clients["shm"], batch),
            "shm without checksum": functools.partial(without_checksum, clients["shm"], batch),
            "bulk": functools.partial(ours, clients["bulk"], batch),
        }
        turns = {name: functools.partial(turn, contender, batch) for name, contender in contenders.items()}
        samples = rounds(turns, count, WARMUPS, tick)
    seconds = {name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()}
    rows = []
    for name, found in seconds.items():
        row: dict[str, Any] = {"page KiB": batch.page_nbytes >> 10, "contender": name}
        for op in ("put", "get"):
            row[f"{op} GB/s"] = round(batch.nbytes / found[op] / 1e9, 2)
            row[f"{op} of memcpy"] = round(seconds["memcpy"][op] / found[op], 2)
        met = min(row["put of memcpy"], row["get of memcpy"]) >= AIM
        rows.append(row | {f"aim {AIM}": ("met" if met else "missed") if name == "shm" else None})
    return rows


def question_rows(clients: dict[str, Client], count: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    batch = Batch(4096, KEYS)
    clients["shm"].put(batch.namespace, batch.hashes, batch.pages)

    def lookup(client: Client) -> None:
        assert client.lookup(batch.namespace, batch.hashes).prefix_pages == KEYS

    def acquire(client: Client) -> None:
        with client.open_get(batch.namespace, batch.hashes) as slots:
            assert len(slots.pages) == KEYS

    def both(client: Client) -> None:
        lookup(client)
        acquire(client)

    asked = {
        "Lookup, shm": functools.partial(lookup, clients["shm"]),
        "Acquire, shm": functools.partial(acquire, clients["shm"]),
        "Lookup + Acquire, shm": functools.partial(both, clients["shm"]),
        "Lookup, bulk": functools.partial(lookup, clients["bulk"]),
    }

    def asking(question: Callable[[], None]) -> Contender:
        return lambda: {"call": [timed(question) for _ in range(CALLS)]}

    samples = rounds({name: asking(question) for name, question in asked.items()}, count, WARMUPS, tick)
    return [
        {
            "question": name,
            "calls": len(ops["call"]),
            "p50 µs": round(percentile(ops["call"], 50) * 1e6, 1),
            "p99 µs": round(percentile(ops["call"], 99) * 1e6, 1),
        }
        for name, ops in samples.items()
    ]


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15, help="turns of each contender (%(default)s)")
    options.add_argument("--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)")
    args = options.parse_args(argv)
    command = " ".join(["python benchmarks/shm.py", *argv])
    copies = Report(f"Put and get of {BATCH} pages, medians of {args.rounds * (TURN - 1)} calls", command)
    questions = Report(f"Questions about {KEYS} stored keys", command)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        clients = {
            wire: stack.enter_context(Client(client_config(address=node.address, wire=wire, timeout_s=60.0)))
            for wire in ("shm", "bulk")
        }
        tick = stack.enter_context(progress((len(args.page_kib) + 1) * (args.rounds + WARMUPS)))
        for kib in args.page_kib:
            copies.rows += copy_rows(clients, Batch(kib << 10, BATCH), args.rounds, tick)
        questions.rows = question_rows(clients, args.rounds, tick)
    copies.show(args.json)
    print()
    questions.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
