"""What a seal costs: its MACs beside the leaves of a checksum and a copy, and put and get of a keyed namespace's pages
beside those of one that is not.

    python benchmarks/keyed.py hashes
    python benchmarks/keyed.py wires
    python benchmarks/repeat.py 5 benchmarks/keyed.py wires

`hashes`: MiB after MiB of memory that no cache holds, by one thread and by two at a time, in turns. `wires`: the same
pages by clients of one node, over shared memory and the bulk wire, in turns; ranges are the first 256 KiB of each page.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

from batch import MOVED_NBYTES, Batch, Batches, get, put
from measure import Report, Samples, median, parser, progress, rounds, timed

from kvstore import ByteRange, Client, ClientConfig
from kvstore.buffers import copy
from kvstore.checksum import leaves
from kvstore.measure.node_process import NodeProcess
from kvstore.seals import Seals

MB = 1 << 20
SECRET = secrets.token_hex(32)
RANGE = [ByteRange(0, 256 << 10)]


def together(work: Callable[[memoryview], object], shares: list[list[memoryview]]) -> float:
    """Seconds until so many threads have done all of their share."""

    def run(share: list[memoryview]) -> None:
        for page in share:
            work(page)

    threads = [threading.Thread(target=run, args=(share,)) for share in shares]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def hashes(report: Report, count: int) -> None:
    memory = memoryview(bytearray(os.urandom(MB) * (MOVED_NBYTES // MB)))
    target = memoryview(bytearray(MB))
    seals, prefix_hash = Seals(os.urandom(32), MB), os.urandom(32)
    works: dict[str, Callable[[memoryview], object]] = {
        "copy": lambda page: copy(target, page),
        "leaves (xxh3_64)": leaves,
        "seal (HMAC-SHA256)": lambda page: seals.made(prefix_hash, (page,)),
    }
    pages = [memory[start : start + MB] for start in range(0, memory.nbytes, MB)]
    contenders = {
        f"{name}/{threads}": (
            lambda work=work, threads=threads: {
                "s": [together(work, [pages[first::threads] for first in range(threads)])]
            }
        )
        for name, work in works.items()
        for threads in (1, 2)
    }
    with progress(count + 1) as tick:
        samples = rounds(contenders, count, 1, tick)
    for name in works:
        row: dict[str, object] = {"work on 1 MiB": name}
        for threads in (1, 2):
            row[f"GB/s of {threads}"] = memory.nbytes / median(samples[f"{name}/{threads}"]["s"]) / 1e9
        report.rows.append(row)


def ranged(client: Client, batch: Batch, buffers: list[bytearray]) -> None:
    assert all(client.get_ranges(batch.namespace, batch.hashes, RANGE, buffers))


def turn(client: Client, batch: Batch) -> Samples:
    client.remove(batch.namespace, batch.hashes)
    buffers = [bytearray(RANGE[0].nbytes) for _ in batch.pages]
    return {
        "put": [timed(partial(put, client, batch))],
        "get": [timed(partial(get, client, batch))],
        "ranges": [timed(partial(ranged, client, batch, buffers))],
    }


def keyed(batches: Batches, key_id: str) -> list[Batch]:
    """The same pages under names of a keyed namespace."""
    made = []
    for batch in batches.all:
        other = Batch.__new__(Batch)
        vars(other).update(vars(batch), namespace=replace(batch.namespace, key_id=key_id))
        made.append(other)
    return made


def wires(report: Report, count: int, page_count: int) -> None:
    with NodeProcess("--ram-bytes", "1GiB", "--extent-bytes", "64MiB") as node:
        for wire in ("shm", "bulk"):
            with Client(ClientConfig(address=node.address, wire=wire, timeout_s=30.0, page_key=SECRET)) as client:
                for page_nbytes in (MB, 4 * MB):
                    batches = Batches(page_nbytes, page_count, MOVED_NBYTES)
                    turns = {"no": cycle(batches.all), "yes": cycle(keyed(batches, client.key_id))}
                    contenders = {
                        name: (lambda batches=some: turn(client, next(batches))) for name, some in turns.items()
                    }
                    with progress(count + 2) as tick:
                        samples = rounds(contenders, count, 2, tick)
                    rows(report, wire, batches, page_count, samples)
                    batches.forget(client)
                    for batch in keyed(batches, client.key_id):
                        client.remove(batch.namespace, batch.hashes)


def rows(report: Report, wire: str, batches: Batches, page_count: int, samples: dict[str, Samples]) -> None:
    for name, found in samples.items():
        put_s, get_s, ranges_s = (median(found[op]) for op in ("put", "get", "ranges"))
        report.rows.append(
            {
                "wire": wire,
                "page KiB": batches.page_nbytes >> 10,
                "keyed": name,
                "put GB/s": batches.nbytes / put_s / 1e9,
                "put of unkeyed": median(samples["no"]["put"]) / put_s,
                "get GB/s": batches.nbytes / get_s / 1e9,
                "get of unkeyed": median(samples["no"]["get"]) / get_s,
                "256 KiB of each ms": 1e3 * ranges_s / page_count,
            }
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("what", choices=("hashes", "wires"))
    options.add_argument("--rounds", type=int, default=20, help="turns of each contender")
    options.add_argument("--pages", type=int, default=16, help="pages of one put or get")
    chosen = options.parse_args()
    command = f"python benchmarks/keyed.py {chosen.what}"
    if chosen.what == "hashes":
        report = Report(f"A seal beside a checksum, medians of {chosen.rounds} turns", command)
        hashes(report, chosen.rounds)
    else:
        title = f"Put and get of {chosen.pages} pages with seals and without, medians of {chosen.rounds} turns"
        report = Report(title, command)
        wires(report, chosen.rounds, chosen.pages)
    report.show(chosen.json)


if __name__ == "__main__":
    main()
