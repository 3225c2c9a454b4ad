"""Measure put and get of 32 pages through shared memory beside `memcpy`, and a lookup.

    memcpy     the pages copied into memory of the node's kind (a memfd, mapped and touched before),
               and from there into the buffers: no node, no keys, no checksum
    shm        this store: put reserves, copies, hashes and commits; get acquires, copies, hashes
               the copy and releases
    others     this store without the checksum, and over bulk TCP

All copy from the same pages, into as many places, and back into the same buffers: 128 MiB each,
batch after batch, which no cache holds. They take turns; a turn is five puts and gets, of which the
first does not count, and in which the bytes that came back are compared. GB/s: 10^9 page bytes in
the median of all calls. Aim: put and get each at least 0.8 of memcpy for pages of 1 MiB and above.

The second table is of 64 keys that are stored: `Lookup`, and `Acquire` (what a zero-copy reader
does: enter `open_get`, which returns checksums and places of all pages, and leave it).

With --threads the first two, by as many threads of this process at the same time, each with pages
of its own and 8 of them a batch; all share one client. GB/s: the bytes of all threads in the time
from the first one's start to the last one's end. Aim: 4 threads at least 3 times one, on as many
cores.

    python benchmarks/shm.py [--rounds 15] [--json]
    python benchmarks/shm.py --threads 1,4
"""

import contextlib
import functools
import itertools
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from batch import MOVED_NBYTES, TURN, Batch, Batches, Contender, NoChecksum, get, ours, put, turn
from measure import Report, Samples, median, parser, percentile, progress, rounds, timed

from kvstore import Client, client_config
from kvstore.buffers import copy
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (1024, 4096)
BATCH = 32
THREAD_BATCH = 8
WARMUPS = 2
AIM = 0.8
KEYS = 64
CALLS = 50  # lookups of one turn
NODE_FLAGS = ("--ram-bytes", "512MiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
Question = Callable[[], Samples]


class Memcpy:
    """The limit: memory of the node's kind, with a place for each page of some batches."""

    def __init__(self, batches: Batches) -> None:
        self._step = batches.page_nbytes
        nbytes = batches.nbytes * len(batches.all)
        fd = os.memfd_create("benchmark")
        os.ftruncate(fd, nbytes)
        self._memory = memoryview(mmap.mmap(fd, nbytes))
        os.close(fd)
        self._memory[:] = bytes(nbytes)

    def put(self, batch: Batch) -> None:
        """Put a batch."""
        for slot, page in zip(self._slots(batch), batch.pages, strict=True):
            copy(slot, memoryview(page))

    def get(self, batch: Batch) -> None:
        """Get a batch."""
        for buffer, slot in zip(batch.buffers, self._slots(batch), strict=True):
            copy(memoryview(buffer), slot)

    def _slots(self, batch: Batch) -> Iterator[memoryview]:
        first = batch.number * batch.nbytes
        for start in range(first, first + batch.nbytes, self._step):
            yield self._memory[start : start + self._step]

    def __call__(self, batch: Batch) -> Samples:
        """Time a copy in each direction."""
        return {"put": [timed(lambda: self.put(batch))], "get": [timed(lambda: self.get(batch))]}


def without_checksum(client: Client, batch: Batch) -> Samples:
    """Run our side without checksums."""
    with mock.patch("kvstore.transports.shm.Leaves", NoChecksum):
        return ours(client, batch)


def copy_rows(
    clients: dict[str, Client], batches: Batches, count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the rows of one page size."""
    contenders: dict[str, Contender] = {
        "memcpy": Memcpy(batches),
        "shm": functools.partial(ours, clients["shm"]),
        "shm without checksum": functools.partial(without_checksum, clients["shm"]),
        "bulk": functools.partial(ours, clients["bulk"]),
    }
    turns = {
        name: functools.partial(turn, call, batches.cycle()) for name, call in contenders.items()
    }
    samples = rounds(turns, count, WARMUPS, tick)
    batches.forget(clients["shm"])
    seconds = {
        name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()
    }
    rows = []
    for name, found in seconds.items():
        row: dict[str, Any] = {"page KiB": batches.page_nbytes >> 10, "contender": name}
        for op in ("put", "get"):
            row[f"{op} GB/s"] = round(batches.nbytes / found[op] / 1e9, 2)
            row[f"{op} of memcpy"] = round(seconds["memcpy"][op] / found[op], 2)
        met = min(row["put of memcpy"], row["get of memcpy"]) >= AIM
        rows.append(row | {f"aim {AIM}": ("met" if met else "missed") if name == "shm" else None})
    return rows


# ---- many threads ------------------------------------------------------------------------


def together(pool: ThreadPoolExecutor, work: Sequence[Callable[[], object]]) -> float:
    """Return the seconds from the first start to the last end of parallel work."""
    barrier = threading.Barrier(len(work))

    def run(call: Callable[[], object]) -> tuple[float, float]:
        barrier.wait()
        start = time.perf_counter()
        call()
        return start, time.perf_counter()

    starts, ends = zip(*pool.map(run, work), strict=True)
    return max(ends) - min(starts)


def each(call: Callable[[Batch], None], batches: Batches) -> Callable[[], None]:
    """Return the work of one thread."""

    def work() -> None:
        for batch in batches.all:
            call(batch)

    return work


def thread_rows(
    client: Client, threads: int, page_nbytes: int, count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the rows of one page size with several threads."""
    own = [Batches(page_nbytes, THREAD_BATCH, MOVED_NBYTES // threads) for _ in range(threads)]
    limits = [Memcpy(batches) for batches in own]
    work: dict[str, dict[str, list[Callable[[], None]]]] = {
        "memcpy": {
            "put": [each(limit.put, batches) for limit, batches in zip(limits, own, strict=True)],
            "get": [each(limit.get, batches) for limit, batches in zip(limits, own, strict=True)],
        },
        "shm": {
            "put": [each(functools.partial(put, client), batches) for batches in own],
            "get": [each(functools.partial(get, client), batches) for batches in own],
        },
    }

    def side(name: str, pool: ThreadPoolExecutor) -> Samples:
        for batches in own:
            batches.forget(client)
            for batch in batches.all:
                for buffer in batch.buffers:
                    buffer[:] = bytes(len(buffer))
        samples = {op: [together(pool, calls)] for op, calls in work[name].items()}
        assert all(batch.buffers == batch.pages for batches in own for batch in batches.all)
        return samples

    with ThreadPoolExecutor(threads) as pool:
        samples = rounds(
            {name: functools.partial(side, name, pool) for name in work}, count, WARMUPS, tick
        )
    for batches in own:
        batches.forget(client)
    nbytes = sum(batches.nbytes * len(batches.all) for batches in own)
    seconds = {
        name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()
    }
    rows = []
    for name, found in seconds.items():
        row: dict[str, Any] = {"page KiB": page_nbytes >> 10, "threads": threads, "contender": name}
        for op in ("put", "get"):
            row[f"{op} GB/s"] = round(nbytes / found[op] / 1e9, 2)
            row[f"{op} of memcpy"] = round(seconds["memcpy"][op] / found[op], 2)
        rows.append(row)
    return rows


# ---- lookups -----------------------------------------------------------------------------------


def question_rows(
    clients: dict[str, Client], count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the rows of lookups."""
    batch = Batches(4096, KEYS).all[0]
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

    def asking(question: Callable[[], None]) -> Question:
        return lambda: {"call": [timed(question) for _ in range(CALLS)]}

    samples = rounds(
        {name: asking(question) for name, question in asked.items()}, count, WARMUPS, tick
    )
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
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=15, help="turns of each contender (%(default)s)"
    )
    options.add_argument(
        "--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)"
    )
    options.add_argument(
        "--threads",
        type=counts,
        help="numbers of threads, such as 1,4: instead of the other tables",
    )
    args = options.parse_args(argv)
    command = " ".join(["python benchmarks/shm.py", *argv])
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        settings = {
            "address": node.address,
            "timeout_s": 60.0,
            "connections_max": max(args.threads or [8]),
        }
        clients = {
            wire: stack.enter_context(Client(client_config(wire=wire, **settings)))
            for wire in ("shm", "bulk")
        }
        tables = len(args.page_kib) * len(args.threads) if args.threads else len(args.page_kib) + 1
        tick = stack.enter_context(progress(tables * (args.rounds + WARMUPS)))
        if args.threads:
            report = Report(f"Put and get by threads, medians of {args.rounds} rounds", command)
            for kib, threads in itertools.product(args.page_kib, args.threads):
                report.rows += thread_rows(clients["shm"], threads, kib << 10, args.rounds, tick)
            report.show(args.json)
            return
        copies = Report(
            f"Put and get of {BATCH} pages, medians of {args.rounds * (TURN - 1)} calls", command
        )
        questions = Report(f"Questions about {KEYS} stored keys", command)
        for kib in args.page_kib:
            copies.rows += copy_rows(clients, Batches(kib << 10, BATCH), args.rounds, tick)
        questions.rows = question_rows(clients, args.rounds, tick)
    copies.show(args.json)
    if not args.json:
        print()
    questions.show(args.json)


def counts(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main(sys.argv[1:])
