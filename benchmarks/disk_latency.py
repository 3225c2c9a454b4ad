"""Measure gets from RAM while the disk tier writes at full rate, beside an idle node.

    idle             no other client uses the node with the disk
    bare writes      another process writes as many bytes to the same file system with `O_DIRECT`,
                     1 MiB a call: what the disk's traffic costs a get on this machine
    disk writes      another process has put pages to the full disk, which wait in RAM until they
                     are due; now it flushes the node, which writes them as fast as the disk can,
                     each in the place of an older one, without puts
    puts and disk    that process keeps putting new pages, and the disk writes as many
    same puts, RAM   the same puts at the same rate to a node without a disk: what serving them
                     costs on this machine's cores

A get asks for one page over the bulk wire; the pages are pinned in RAM, and the run fails if one
comes from the disk. Puts are batches of 1 MiB pages on a schedule; a batch that is late by more
than 50 ms is skipped. The conditions take turns. Aim: p99 while the disk writes at most 2 times
that of the idle node. Where bare writes cost more than that, compare with them.

    python benchmarks/disk_latency.py [--dir DIR] [--rounds 10] [--put-gb-s 0.5] [--json]
"""

import contextlib
import functools
import itertools
import mmap
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from measure import Report, Samples, median, parser, percentile, progress, rounds, timed
from workplace import add_dir, direct_works, file_system, workplace

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (4, 64, 256, 1024)
HOT_PAGES = 16  # of each size
LOAD_PAGE_NBYTES = 1 << 20
BATCH = 8
TURN_S = 1.0
RAMP_S = 0.2  # from the first paced put of a turn to the first get that counts
LATE_S = 0.05
PIN_S = 3600.0
AIM = 2.0
NODE_FLAGS = ("--extent-bytes", "64MiB", "--log-level", "WARNING")
# On a full disk a page is due when half of the RAM has been replaced. With this much, a flush finds
# nearly all pages still waiting, and steady puts make as many pages due as they add.
FLUSHED_NBYTES = 15 << 26
PRIMED_NBYTES = 18 << 26
WITH_DISK = ("--ram-bytes", "2GiB", "--disk-queue-bytes", "2GiB", "--scrub-bytes-per-s", "0")
DISK_NBYTES = 9 << 28  # full after the first turns, but a flush finds room for the whole RAM
RAM_ONLY_FLAGS = ("--ram-bytes", "1GiB")
IDLE, BARE, WRITING, BOTH, RAM_ONLY = (
    "idle",
    "bare writes",
    "disk writes",
    "puts and disk",
    "same puts, RAM",
)


class Load(NamedTuple):
    """Rates of the loading process in a turn."""

    put_nbytes: float
    written_nbytes: float


class Order(NamedTuple):
    """Order the loading process to put bytes fast, report, then put at a rate or flush."""

    address: str
    first_nbytes: int
    put_nbytes_per_s: float = 0.0


# ---- the process that puts ---------------------------------------------------------------


def put_pages(pipe: Connection) -> None:
    """Serve orders until None; answer each with a Load."""
    loaders: dict[str, Putter] = {}
    while (order := pipe.recv()) is not None:
        putter = loaders.setdefault(order.address, Putter(order.address))
        putter.put(order.first_nbytes)
        pipe.send("ready")
        pipe.send(
            putter.steady(order.put_nbytes_per_s, pipe)
            if order.put_nbytes_per_s
            else putter.flush()
        )


class Putter:
    """Puts pages with new keys and always the same bytes."""

    def __init__(self, address: str) -> None:
        self._client = Client(client_config(address=address, wire="bulk", timeout_s=60.0))
        self._namespace = Namespace(model="load", layout=opaque_layout(LOAD_PAGE_NBYTES))
        self._pages = [os.urandom(LOAD_PAGE_NBYTES) for _ in range(BATCH)]

    def put(self, nbytes: int) -> None:
        """Put so many bytes."""
        for _ in range(nbytes // (BATCH * LOAD_PAGE_NBYTES)):
            self._client.put(
                self._namespace, [secrets.token_bytes(32) for _ in self._pages], self._pages
            )

    def _written(self) -> int:
        return self._client.node_status().disk.nbytes_written

    def steady(self, put_nbytes_per_s: float, pipe: Connection) -> Load:
        """Put at a rate until something is received."""
        before, nbytes, step = self._written(), 0, BATCH * LOAD_PAGE_NBYTES
        begun = due = time.perf_counter()
        while not pipe.poll():
            self.put(step)
            nbytes += step
            due = max(due + step / put_nbytes_per_s, time.perf_counter() - LATE_S)
            time.sleep(max(0.0, due - time.perf_counter()))
        pipe.recv()
        seconds = time.perf_counter() - begun
        return Load(nbytes / seconds, (self._written() - before) / seconds)

    def flush(self) -> Load:
        """Flush the node."""
        before, begun = self._written(), time.perf_counter()
        self._client.flush()
        return Load(0.0, (self._written() - before) / (time.perf_counter() - begun))


def write_bare(pipe: Connection, path: str) -> None:
    """Write to a file for each order until None."""
    fd = os.open(
        path,
        os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct_works(Path(path).parent) else 0),
        0o600,
    )
    os.posix_fallocate(fd, 0, FLUSHED_NBYTES)
    memory = mmap.mmap(-1, LOAD_PAGE_NBYTES)
    memory[:] = os.urandom(LOAD_PAGE_NBYTES)
    while pipe.recv() is not None:
        pipe.send("ready")
        begun = time.perf_counter()
        for offset in range(0, FLUSHED_NBYTES, LOAD_PAGE_NBYTES):
            assert os.pwritev(fd, [memory], offset) == LOAD_PAGE_NBYTES
        os.fdatasync(fd)
        pipe.send(Load(0.0, FLUSHED_NBYTES / (time.perf_counter() - begun)))
    os.close(fd)


@contextlib.contextmanager
def process_of(work: Callable[..., None], *args: object) -> Iterator[Connection]:
    """Run a function in a process; yield the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        process.join()
    finally:
        process.terminate()


# ---- the process that gets ---------------------------------------------------------------


class Probe:
    """Gets of single pages that stay in the RAM of one node."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = Client(client_config(address=address, wire="bulk", timeout_s=60.0))
        self._calls: dict[str, list[Callable[[], object]]] = {}
        for kib in PAGE_KIB:
            namespace = Namespace(model="hot", layout=opaque_layout(kib << 10))
            hashes = [secrets.token_bytes(32) for _ in range(HOT_PAGES)]
            buffer = bytearray(kib << 10)
            self.client.put(namespace, hashes, [os.urandom(kib << 10) for _ in hashes])
            assert all(self.client.pin(namespace, hashes, PIN_S))
            self._calls[f"{kib}"] = [
                functools.partial(self._get, namespace, h, buffer) for h in hashes
            ]

    def _get(self, namespace: Namespace, prefix_hash: bytes, buffer: bytearray) -> None:
        assert self.client.get(namespace, [prefix_hash], [buffer]) == [True]

    def turn(self, is_over: Callable[[], bool]) -> Samples:
        """Run gets until it is over."""
        samples: Samples = {size: [] for size in self._calls}
        for size in itertools.cycle(self._calls):
            if is_over():
                break
            samples[size].append(timed(random.choice(self._calls[size])))
        return samples


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether the time has passed."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def quiet(probe: Probe) -> Samples:
    """Run gets on an idle node."""
    return probe.turn(after(TURN_S))


def flushing(probe: Probe, pipe: Connection, loads: list[Load]) -> Samples:
    """Run gets while the disk tier writes, without puts."""
    pipe.send(Order(probe.address, FLUSHED_NBYTES))
    assert pipe.recv() == "ready"
    samples = probe.turn(pipe.poll)
    loads.append(pipe.recv())
    return samples


def beside(probe: Probe, pipe: Connection, loads: list[Load]) -> Samples:
    """Run gets while another process writes to the disk."""
    pipe.send("write")
    assert pipe.recv() == "ready"
    samples = probe.turn(pipe.poll)
    loads.append(pipe.recv())
    return samples


def loaded(probe: Probe, pipe: Connection, put_nbytes_per_s: float, loads: list[Load]) -> Samples:
    """Run gets while the loader puts to the same node."""
    pipe.send(Order(probe.address, PRIMED_NBYTES, put_nbytes_per_s))
    assert pipe.recv() == "ready"
    time.sleep(RAMP_S)
    samples = quiet(probe)
    pipe.send("stop")
    loads.append(pipe.recv())
    return samples


def rows(samples: dict[str, Samples], loads: dict[str, list[Load]]) -> list[dict[str, Any]]:
    """Return the table's rows."""
    found = []
    for size in samples[IDLE]:
        idle, bare = (percentile(samples[name][size], 99) for name in (IDLE, BARE))
        for name, sizes in samples.items():
            p50, p99 = (percentile(sizes[size], percent) for percent in (50, 99))
            done = loads[name]
            found.append(
                {
                    "page KiB": size,
                    "condition": name,
                    "put GB/s": round(median([load.put_nbytes for load in done]) / 1e9, 2)
                    if done
                    else None,
                    "disk GB/s": round(median([load.written_nbytes for load in done]) / 1e9, 2)
                    if done
                    else None,
                    "calls": len(sizes[size]),
                    "p50 µs": round(p50 * 1e6),
                    "p99 µs": round(p99 * 1e6),
                    "p99 to idle": round(p99 / idle, 2),
                    "p99 to bare": round(p99 / bare, 2),
                    f"aim {AIM:g}": ("met" if p99 <= AIM * idle else "missed")
                    if name in (WRITING, BOTH)
                    else None,
                }
            )
    return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    add_dir(options)
    options.add_argument(
        "--rounds", type=int, default=10, help="turns of each condition (%(default)s)"
    )
    options.add_argument(
        "--put-gb-s", type=float, default=0.5, help="page bytes put per second, 10^9 (%(default)s)"
    )
    args = options.parse_args(argv)
    report = Report(
        "Get of one page from RAM while the disk tier writes", "python benchmarks/disk_latency.py"
    )
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(workplace(args.dir, DISK_NBYTES + (2 << 30)))
        data = ("--data-dir", str(directory / "data"), "--disk-bytes", str(DISK_NBYTES))
        with_disk = stack.enter_context(NodeProcess(*NODE_FLAGS, *WITH_DISK, *data))
        ram_only = stack.enter_context(NodeProcess(*NODE_FLAGS, *RAM_ONLY_FLAGS))
        pipe = stack.enter_context(process_of(put_pages))
        bare = stack.enter_context(process_of(write_bare, str(directory / "bare")))
        probe, ram_probe = Probe(with_disk.address), Probe(ram_only.address)
        rate = args.put_gb_s * 1e9
        loads: dict[str, list[Load]] = {name: [] for name in (IDLE, BARE, WRITING, BOTH, RAM_ONLY)}
        contenders = {
            IDLE: functools.partial(quiet, probe),
            BARE: functools.partial(beside, probe, bare, loads[BARE]),
            WRITING: functools.partial(flushing, probe, pipe, loads[WRITING]),
            BOTH: functools.partial(loaded, probe, pipe, rate, loads[BOTH]),
            RAM_ONLY: functools.partial(loaded, ram_probe, pipe, rate, loads[RAM_ONLY]),
        }
        tick = stack.enter_context(progress(args.rounds + 1))
        report.rows = rows(rounds(contenders, args.rounds, 1, tick), loads)
        status = probe.client.node_status().disk
        assert status.pages_read == 0, "a page came from the disk"
        report.notes.append(f"{file_system(directory)}; puts in batches of {BATCH} pages of 1 MiB")
        report.notes.append(
            f"{status.pages_refused} of the pages put were refused by the write queue"
        )
        for found in (probe, ram_probe):
            found.client.close()
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
