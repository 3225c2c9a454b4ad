"""Measure one server of several stores on this host, with 1, 8 and 32 client processes.

    bare       a process for each client, which receives its pages and sends them back: no keys, no
               checksum; its lookup is an echo of as many bytes
    bulk, shm, grpc   one of our nodes over each wire, RAM only, with its checksums
    mooncake   Mooncake Store over TCP: a master and a process with one segment
    redis      redis-server without persistence, with I/O threads: 8, less where cores are few

1. Put and get of 16 random pages a call, each client through its own 128 MiB or its part of 1 GiB,
   but at least one batch: no cache holds all. GB/s: 10^9 page bytes of all clients in the time from
   their common start to the last one's end. `of bare`: medians of the ratio to bare sockets in the
   same round.
2. Lookup of 16 stored keys in closed loops of a second.

`CPU`: seconds that all processes of the server spent meanwhile, for each GB, and microseconds for
each lookup. Cells are `median (least–greatest)` of the rounds.

A turn starts the server and the client processes of one store, and stops them, so no store waits
busily beside another. In each round every store has a turn with each number of clients, in an order
that changes. The first pass of a turn does not count, and the bytes of one batch of each client are
compared in each turn, outside of the measured time. What redis-py returns is not copied into the
client's buffers, as all others' bytes are. A store that is late or fails has a dash there, and its
turns with as many clients are over.

    make rivals [ARGS='--rounds 3 --clients 1,8,32 --pages 256,1024,4096 --minutes 9 --json']

The client libraries come with it, redis-server and libibverbs do not. A rival that is not installed
is left out. 32 clients need 8 GiB of memory.
"""

import argparse
import collections
import contextlib
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from budget import spread
from bulk import BATCH
from measure import Report, median, parser, percentile, progress, timed
from rival_stores import (
    BarePages,
    BareServer,
    MooncakeClient,
    MooncakeServers,
    OurServer,
    RedisClient,
    RedisServer,
    our_client,
    redis_client,
    rivals_missing,
)
from workplace import cpu_s

# Of each client, but for many clients no more than this of all; caches hold neither
MOVED_NBYTES, ALL_NBYTES = 128 << 20, 1 << 30
SMALL_NBYTES = 4096  # of the pages that are looked up
WAYS = ("put", "get")
WAY_S = 0.5  # puts or gets of a turn, at least
PASSES_MAX = 24
LOOKUP_S = 1.0
SETTLE_S = 0.3  # from the order to look up to the start
SETUP_S = 60.0
# Redis's wait busily, so a core is left to others
IO_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) - 1))

# What the server needs beside the number of its bytes, and what its clients are made of
SERVERS: dict[str, Callable[[int], Any]] = {
    "bare": lambda _: BareServer(),
    "bulk": OurServer,
    "shm": OurServer,
    "grpc": OurServer,
    "mooncake": MooncakeServers,
    "redis": lambda nbytes: RedisServer(nbytes, IO_THREADS),
}
CLIENTS: dict[str, Callable[[str], Any]] = {
    "bare": BarePages,
    "bulk": partial(our_client, wire="bulk"),
    "shm": partial(our_client, wire="shm"),
    "grpc": partial(our_client, wire="grpc"),
    "mooncake": MooncakeClient,
    "redis": redis_client,
}
PACKAGES = {"mooncake": "Mooncake", "redis": "Redis"}


# ---- a client process --------------------------------------------------------------------


@dataclass
class Batch:
    """Pages, the buffers they are read into, and their keys of this pass."""

    pages: list[memoryview]
    buffers: list[memoryview]
    keys: list[bytes] = field(default_factory=list)


class Worker:
    """One client process: it does what the parent asks, and answers."""

    def __init__(self, store: str, address: str, nbytes: int) -> None:
        self._sent, self._back = bytearray(os.urandom(nbytes)), bytearray(nbytes)
        self._client = CLIENTS[store](address)
        if isinstance(self._client, MooncakeClient):
            self._client.register(self._sent)
            self._client.register(self._back)
        self._batches: list[Batch] = []

    def cut(self, page_nbytes: int, count: int) -> int:
        """Cut the memory into at most `count` batches; return the bytes of all."""
        batch_nbytes = BATCH * page_nbytes
        count = min(count, len(self._sent) // batch_nbytes)

        def pages(memory: bytearray, number: int) -> list[memoryview]:
            start = number * batch_nbytes
            starts = range(start, start + batch_nbytes, page_nbytes)
            return [memoryview(memory)[at : at + page_nbytes] for at in starts]

        self._batches = [Batch(pages(self._sent, n), pages(self._back, n)) for n in range(count)]
        self._client.page_nbytes = page_nbytes
        return count * batch_nbytes

    def put(self, start: float) -> float:
        """Put all batches under new keys from `start` on; return the time of the end."""
        for batch in self._batches:
            batch.keys = [secrets.token_bytes(32) for _ in range(BATCH)]
        sleep_until(start)
        stored = [self._client.put(batch.keys, batch.pages) for batch in self._batches]
        end = time.monotonic()
        refused = sum(flags.count(False) for flags in stored)
        assert not refused, f"{refused} of {BATCH * len(stored)} pages were not stored"
        return end

    def get(self, start: float) -> float:
        """Get all batches from `start` on; return the time of the end."""
        sleep_until(start)
        found = [self._client.get(batch.keys, batch.buffers) for batch in self._batches]
        end = time.monotonic()
        lost = sum(flags.count(False) for flags in found)
        assert not lost, f"{lost} of {BATCH * len(found)} pages did not come back"
        return end

    def verify(self) -> None:
        """Get one batch into buffers of zeros and compare its bytes."""
        batch = random.choice(self._batches)
        for buffer in batch.buffers:
            buffer[:] = bytes(len(buffer))
        if isinstance(self._client, RedisClient):
            self._client.copies = True
        assert all(self._client.get(batch.keys, batch.buffers)), "a page did not come back"
        assert batch.buffers == batch.pages, "the bytes are not those that were put"
        if isinstance(self._client, RedisClient):
            self._client.copies = False

    def forget(self) -> None:
        """Remove all batches."""
        for batch in self._batches:
            self._client.forget(batch.keys)

    def lookup(self, start: float) -> tuple[list[float], float]:
        """Look up the first batch for a while; return the seconds of each call and the end."""
        keys = self._batches[0].keys
        call, seconds = partial(self._client.lookup, keys), []
        assert call() == BATCH, "stored keys were not found"
        sleep_until(start)
        while time.monotonic() < start + LOOKUP_S:
            seconds.append(timed(call))
        assert call() == BATCH, "stored keys were lost"
        return seconds, time.monotonic()


def sleep_until(start: float) -> None:
    """Return at a time of the monotonic clock, which all processes share."""
    time.sleep(max(0.0, start - time.monotonic()))


def work(store: str, address: str, nbytes: int, pipe: Connection) -> None:
    """Be a client process until the parent closes the pipe."""
    try:
        if store == "mooncake":  # its library tells much, whatever the level of its log
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        worker = Worker(store, address, nbytes)
        pipe.send(None)
        while True:
            name, *args = pipe.recv()
            pipe.send(getattr(worker, name)(*args))
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException as error:  # noqa: BLE001 -- the parent tells of it
        pipe.send(Failed(f"{type(error).__name__}: {error}"[:300]))
    finally:
        os._exit(0)  # Mooncake's client may hang at its end


# ---- a turn ------------------------------------------------------------------------------


class Failed(Exception):
    """A store was late, or did not do what was asked."""


class Crew:
    """Client processes that do the same at the same time."""

    def __init__(self, store: str, address: str, count: int, nbytes: int, end: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.end = end
        self._pipes, self._processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(store, address, nbytes, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def answers(self, what: str) -> list[Any]:
        """Return every process's next answer."""
        found: dict[Connection, Any] = {}
        while len(found) < len(self._pipes):
            left = [pipe for pipe in self._pipes if pipe not in found]
            ready = wait(left, self.end - time.monotonic())
            if not ready:
                raise Failed(f"{what}: {len(left)} of {len(self._pipes)} clients did not finish")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[pipe] = pipe.recv()
                except EOFError:
                    raise Failed(f"{what}: a client process ended") from None
                if isinstance(found[pipe], Failed):
                    raise found[pipe]
        return [found[pipe] for pipe in self._pipes]

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Let every process call a method of its worker."""
        for pipe in self._pipes:
            pipe.send((name, *args))
        return self.answers(name)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


class Turn:
    """Measurements of one store with some clients; `figures` has what was measured so far."""

    def __init__(self, server: Any, crew: Crew, clients: int, share: int) -> None:
        self._server, self._crew, self._clients, self._share = server, crew, clients, share
        self.figures: dict[str, float] = {}

    def _used_s(self) -> float:
        return sum(map(cpu_s, self._server.pids))

    def move(self, kib: int) -> None:
        """Measure puts and gets of pages of one size."""
        ask = self._crew.ask
        nbytes = sum(ask("cut", kib << 10, max(1, self._share // (BATCH * kib << 10))))
        wall, used, passes = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0.0), 0
        for number in range(PASSES_MAX + 1):
            for way in WAYS:
                before = self._used_s()
                start = time.monotonic() + 0.005 + 0.001 * self._clients
                ends = ask(way, start)
                if number:  # the first pass does not count
                    wall[way] += max(ends) - start
                    used[way] += self._used_s() - before
            passes += bool(number)
            if number == 1:
                ask("verify")
            ask("forget")
            if min(wall.values()) > WAY_S:
                break
        gb = passes * nbytes / 1e9
        for way in WAYS:
            self.figures[f"{way} {kib} GB/s"] = gb / wall[way]
            self.figures[f"{way} {kib} CPU"] = used[way] / gb

    def look_up(self) -> None:
        """Measure lookups."""
        self._crew.ask("cut", SMALL_NBYTES, 1)
        self._crew.ask("put", time.monotonic())
        self._crew.ask("verify")
        before = self._used_s()
        start = time.monotonic() + SETTLE_S
        answers = self._crew.ask("lookup", start)
        used = self._used_s() - before
        seconds = sorted(s for some, _ in answers for s in some)
        took = max(end for _, end in answers) - start
        self.figures |= {
            "lookups/s": len(seconds) / took,
            "p50 µs": percentile(seconds, 50) * 1e6,
            "p99 µs": percentile(seconds, 99) * 1e6,
            "CPU µs a lookup": used / (len(seconds) + 2 * self._clients) * 1e6,
        }


def run_turn(store: str, clients: int, sizes: Sequence[int], limit_s: float) -> dict[str, float]:
    """Return the figures of one turn; raise Failed if the store is late or fails."""
    share = min(MOVED_NBYTES, ALL_NBYTES // clients)
    nbytes = max(share, BATCH * max(sizes) << 10)
    with contextlib.ExitStack() as stack:
        try:
            server = SERVERS[store]((5 * clients * nbytes) + (512 << 20))
            stack.callback(server.close)
            crew = Crew(store, server.address, clients, nbytes, time.monotonic() + SETUP_S)
            stack.callback(crew.close)
            crew.answers("start")
            crew.end = time.monotonic() + limit_s
            turn = Turn(server, crew, clients, share)
            for kib in sizes:
                turn.move(kib)
            turn.look_up()
        except (RuntimeError, BrokenPipeError) as error:
            raise Failed(str(error)) from error
        return turn.figures


# ---- the tables --------------------------------------------------------------------------

Found = dict[tuple[str, int], list[dict[str, float]]]


def cells(found: Found, store: str, clients: int, figure: str) -> list[float]:
    """Return the values of a figure of all rounds."""
    return [figures[figure] for figures in found.get((store, clients), []) if figure in figures]


def moved_rows(
    found: Found, stores: Sequence[str], counts: Sequence[int], sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of clients, way and store."""
    for clients, way, store in ((c, w, s) for c in counts for w in WAYS for s in stores):
        row: dict[str, Any] = {"clients": clients, "": way, "store": store}
        for kib in sizes:
            speeds = cells(found, store, clients, f"{way} {kib} GB/s")
            bare = cells(found, "bare", clients, f"{way} {kib} GB/s")
            ratios = [one / other for one, other in zip(speeds, bare, strict=False)]
            used = cells(found, store, clients, f"{way} {kib} CPU")
            row[f"{kib} KiB, GB/s"] = ranged(speeds)
            row[f"{kib}, of bare"] = round(median(ratios), 2) if ratios else None
            row[f"{kib}, CPU s/GB"] = ranged(used)
        yield row


def lookup_rows(
    found: Found, stores: Sequence[str], counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of clients and store."""
    for clients, store in ((c, s) for c in counts for s in stores):
        row: dict[str, Any] = {"clients": clients, "store": store}
        for figure in ("lookups/s", "p50 µs", "p99 µs", "CPU µs a lookup"):
            values = cells(found, store, clients, figure)
            row[figure] = spread(values) if values else None
        yield row


def ranged(values: Sequence[float]) -> str | None:
    """Format a median with its range, three digits each."""
    if not values:
        return None
    low, middle, high = (
        f"{v:.{2 if v < 9.995 else 1}f}" for v in (min(values), median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}–{high})"


def numbers(text: str) -> list[int]:
    """Parse an option with numbers and commas."""
    return [int(word) for word in text.split(",")]


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = parser(__doc__)
    found.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    found.add_argument("--clients", type=numbers, default=[1, 8, 32], help="processes (1,8,32)")
    found.add_argument(
        "--pages", type=numbers, default=[256, 1024, 4096], help="KiB (256,1024,4096)"
    )
    found.add_argument("--stores", default=",".join(SERVERS), help="(%(default)s)")
    found.add_argument("--limit-s", type=float, default=60.0, help="of a turn (%(default)s)")
    found.add_argument(
        "--minutes", type=float, help="begin no turn after so long, and show what there is"
    )
    return found


def measured(args: argparse.Namespace, stores: Sequence[str], notes: list[str]) -> Found:
    """Run all turns."""
    found: Found = {}
    failed: set[tuple[str, int]] = set()
    left: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    with progress(args.rounds * len(args.clients) * len(stores)) as tick:
        for number in range(args.rounds):
            for clients in args.clients:
                first = number % len(stores)
                for store in [*stores[first:], *stores[:first]]:
                    tick()
                    if (store, clients) in failed:
                        continue
                    if args.minutes and time.monotonic() - start > 60 * args.minutes:
                        left[f"{store} with {clients}"] += 1
                        continue
                    try:
                        figures = run_turn(store, clients, args.pages, args.limit_s)
                        found.setdefault((store, clients), []).append(figures)
                    except Failed as error:
                        failed.add((store, clients))
                        found.pop((store, clients), None)
                        notes.append(f"{store} with {clients} clients: {error}")
    if left:
        turns = ", ".join(f"{count} of {name} clients" for name, count in left.items())
        notes.append(f"turns left out for lack of time: {turns}")
    return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = options().parse_args(argv)
    command = " ".join(["python benchmarks/rivals.py", *argv])
    lacking = rivals_missing()
    notes = [f"{name} is left out; missing here: {what}" for name, what in lacking.items()]
    stores = [name for name in args.stores.split(",") if PACKAGES.get(name) not in lacking]
    if "redis" in stores:
        notes.append(f"{RedisServer.version()}, {IO_THREADS} I/O threads")
    moved = Report(f"Put and get of {BATCH} pages, {args.rounds} rounds", command, notes)
    looked = Report(f"Lookup of {BATCH} keys, {args.rounds} rounds", command)
    found = measured(args, stores, notes)
    moved.rows = list(moved_rows(found, stores, args.clients, args.pages))
    looked.rows = list(lookup_rows(found, stores, args.clients))
    moved.show(args.json)
    print()
    looked.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
