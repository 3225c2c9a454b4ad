"""Run three nodes under mixed load and faults for half an hour; check bytes and growth.

    load      THREADS threads of two clients (bulk, gRPC) look up, put (some durable, some with a
              time to live), get, get ranges, pin and remove pages of three sizes; namespaces come
              and go. The bytes of all pages follow from their keys
    faults    n1 is killed and started again; n2 is stopped for some seconds; clients send half a
              frame to n3
    samples   every LOOK_S: private memory, descriptors and threads of each node; calls and errors

n2 and n3 run from the beginning to the end. Exit status 0 only if no byte was wrong, no call was
refused as invalid, no node found anything inconsistent when it stopped, and the medians of private
memory, descriptors and threads of n2 and n3 in the last quarter exceed those of the second by at
most GROWTH.

    python benchmarks/soak_cluster.py [--minutes 30] [--json]
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo import status_of
from measure import parser, progress
from node_fleet import HERE, Fleet
from trial import plot

from kvstore import ByteRange, Client, InvalidRequest, Keep, KVStoreError, Namespace, opaque_layout
from kvstore.tools.trace import page_content

THREADS = 4
SIZES = (4 << 10, 64 << 10, 200_000)
KEYS = 1500  # of each namespace: 1,500 pages of each size do not fit in the RAM of a node
CHAIN = 12  # pages of a call, at most
LOOK_S = 5.0
FAULT_S = 20.0  # from one to the next
FLAGS = (
    "--ram-bytes",
    "96MiB",
    "--extent-bytes",
    "4MiB",
    "--disk-bytes",
    "512MiB",
    "--log-level",
    "ERROR",
)
FLAT = ("private, MiB", "descriptors", "threads")
GROWTH = {"private, MiB": 16.0, "descriptors": 16.0, "threads": 16.0}
COLUMNS = 72


class Load:
    """Counts of the threads' calls and of errors by class, and the wrong bytes."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(THREADS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng, client = random.Random(number), self._clients[number % len(self._clients)]
        pause = threading.Event()
        does: list[tuple[Callable[..., None], int]] = [
            (self._get, 8),
            (self._put, 5),
            (self._ranges, 2),
            (self._pin, 1),
            (self._remove, 1),
            (self._comes_and_goes, 1),
        ]
        try:
            while not self.over.is_set():
                what = rng.choices([each for each, _ in does], [weight for _, weight in does])[0]
                with self._counting(what.__name__.strip("_")):
                    what(client, rng)
                pause.wait(0.005)
        finally:
            if not self.over.is_set():
                self.wrong.append(f"thread {number} of the load ended early")

    @contextlib.contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            self.wrong.append(f"{name} was refused: {error}")
        except KVStoreError as error:
            name = f"{name}: {type(error).__name__}"
        with self._lock:
            self.counts[name] += 1

    def _get(self, client: Client, rng: random.Random) -> None:
        space, keys = some(rng)
        found = client.lookup(space, keys).prefix_pages
        if not found:
            return
        buffers = [bytearray(space.layout.page_nbytes) for _ in keys[:found]]
        hits = client.get(space, keys[:found], buffers)
        self._compare(
            space,
            [
                (key, bytes(page))
                for key, page, hit in zip(keys, buffers, hits, strict=False)
                if hit
            ],
        )

    def _put(self, client: Client, rng: random.Random) -> None:
        space, keys = some(rng)
        pages = [page_content(space.digest, key, space.layout.page_nbytes) for key in keys]
        client.put(
            space, keys, pages, Keep(durable=rng.random() < 0.1, ttl_s=rng.choice([0.0, 0.0, 5.0]))
        )

    def _ranges(self, client: Client, rng: random.Random) -> None:
        space, keys = some(rng)
        start = rng.randrange(space.layout.page_nbytes - 100)
        buffers = [bytearray(100) for _ in keys]
        hits = client.get_ranges(space, keys, [ByteRange(start, 100)], buffers)
        for key, part, hit in zip(keys, buffers, hits, strict=True):
            whole = page_content(space.digest, key, space.layout.page_nbytes)
            if hit and part != whole[start : start + 100]:
                self.wrong.append(f"bytes {start} and on of {key.hex()[:8]}")

    def _pin(self, client: Client, rng: random.Random) -> None:
        space, keys = some(rng)
        client.pin(space, keys[:2], 2.0)

    def _remove(self, client: Client, rng: random.Random) -> None:
        space, keys = some(rng)
        client.remove(space, keys)

    def _comes_and_goes(self, client: Client, rng: random.Random) -> None:
        space = Namespace("soak", opaque_layout(SIZES[0]), salt=f"{rng.random()}")
        keys = [rng.randbytes(32) for _ in range(4)]
        client.put(space, keys, [page_content(space.digest, key, SIZES[0]) for key in keys])
        client.remove_namespace(space)

    def _compare(self, space: Namespace, pages: list[tuple[bytes, bytes]]) -> None:
        for key, page in pages:
            if page != page_content(space.digest, key, space.layout.page_nbytes):
                self.wrong.append(f"{key.hex()[:8]} of {space.layout.page_nbytes} bytes")


def some(rng: random.Random) -> tuple[Namespace, list[bytes]]:
    """Choose a namespace and a chain of it, by popularity."""
    nbytes = rng.choice(SIZES)
    first = min(rng.randrange(KEYS), rng.randrange(KEYS)) // CHAIN * CHAIN
    keys = [number.to_bytes(32, "big") for number in range(first, first + rng.randint(1, CHAIN))]
    return Namespace("soak", opaque_layout(nbytes)), keys


# ---- faults ------------------------------------------------------------------------------


def faults(fleet: Fleet) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield faults one after the other, without end."""

    def killed() -> None:
        fleet.nodes["n1"].kill()

    def back() -> None:
        fleet.start("n1")

    def stopped() -> None:
        fleet.nodes["n2"].pause()
        time.sleep(3.0)
        fleet.nodes["n2"].resume()

    def strangers() -> None:
        host, _, port = fleet.addresses["n3"].rpartition(":")
        with contextlib.ExitStack() as stack:
            for number in range(200):
                at = int(port) if number % 2 else fleet.nodes["n3"].bulk_port
                with contextlib.suppress(OSError):
                    sock = stack.enter_context(socket.create_connection((host, at), 2.0))
                    sock.sendall(b"half a frame"[: 1 + number % 12])

    while True:
        yield "n1 killed", killed
        yield "n1 back", back
        yield "n2 stopped", stopped
        yield "strangers at n3", strangers


# ---- samples -----------------------------------------------------------------------------------


def look(pid: int) -> dict[str, float]:
    """Read a process's figures from the kernel."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {
        "private, MiB": int(fields["RssAnon"].split()[0]) / 1024,
        "descriptors": float(descriptors),
        "threads": float(fields["Threads"]),
    }


def soak(args: argparse.Namespace) -> int:
    """Run the soak and return the exit status."""
    end = time.monotonic() + args.minutes * 60
    looks: dict[str, dict[str, list[float]]] = {
        node: {what: [] for what in FLAT} for node in ("n2", "n3")
    }
    calls: list[float] = []
    said: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir)))
        fleet = stack.enter_context(Fleet([HERE] * 3, *FLAGS, replicas=2, data=folder))
        clients = [
            stack.enter_context(fleet.client(wire=wire, timeout_s=5.0)) for wire in ("bulk", "grpc")
        ]
        tick = stack.enter_context(progress(int(args.minutes * 60 / LOOK_S)))
        with Load(clients) as load:
            next_fault, coming = time.monotonic() + FAULT_S, faults(fleet)
            before = 0
            while time.monotonic() < end:
                time.sleep(LOOK_S)
                for node, found in looks.items():
                    for what, value in look(fleet.nodes[node].pid).items():
                        found[what].append(value)
                now = load.counts.total()
                calls.append((now - before) / LOOK_S)
                before = now
                if time.monotonic() >= next_fault and end - time.monotonic() > 2 * FAULT_S:
                    _, happen = next(coming)
                    happen()
                    next_fault = time.monotonic() + FAULT_S
                tick()
        for name, process in fleet.nodes.items():
            process.stop(60.0)
            said[name] = process.log_text
    return told(args, load, looks, calls, said)


def told(
    args: argparse.Namespace,
    load: Load,
    looks: dict[str, dict[str, list[float]]],
    calls: list[float],
    said: dict[str, str],
) -> int:
    """Print picture and sums; return whether all checks passed."""
    grown = {
        f"{node}: {what}": growth(values)
        for node, found in looks.items()
        for what, values in found.items()
    }
    flat = all(grown[f"{node}: {what}"] <= GROWTH[what] for node in looks for what in FLAT)
    found = [
        f"{node}: {line}"
        for node, text in said.items()
        for line in text.splitlines()
        if "inconsistent" in line
    ]
    good = flat and not load.wrong and not found
    errors = {name: count for name, count in load.counts.items() if ":" in name}
    if args.json:
        values: dict[str, Any] = {
            "counts": dict(load.counts),
            "wrong": load.wrong,
            "inconsistent": found,
        }
        print(
            json.dumps(
                {**values, "grown": grown, "looks": looks, "calls_per_s": calls, "good": good}
            )
        )
        return 0 if good else 1
    print(
        f"\n  one column: {len(calls) * LOOK_S / min(COLUMNS, len(calls)):.0f} s, {args.minutes:g} "
        "minutes in all\n"
    )
    print(f"  {'calls a second':24} {picture(calls)} {min(calls):.0f} to {max(calls):.0f}")
    for node, what in ((node, what) for node in looks for what in FLAT):
        some_, name = looks[node][what], f"{node}: {what}"
        print(
            f"  {name:24} {picture(some_)} {min(some_):.0f} to {max(some_):.0f}, grown by "
            f"{grown[name]:+.1f}"
        )
    print(f"\n  calls    {load.counts.total():,}, of them errors {errors or 'none'}")
    print(f"  wrong    {len(load.wrong)} {load.wrong[:3] or ''}")
    print(f"  check    {len(found)} found inconsistent at the end {found[:3] or ''}")
    print(f"  {'all is well' if good else 'NOT WELL'}")
    return 0 if good else 1


def growth(values: list[float]) -> float:
    """Return the growth from the second quarter to the last."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def picture(values: list[float]) -> str:
    """Draw values as a line of text."""
    share = -(-len(values) // COLUMNS)
    columns = [
        statistics.mean(values[start : start + share]) for start in range(0, len(values), share)
    ]
    return plot(columns, max(columns))


def main(argv: list[str]) -> int:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30.0, help="%(default)s")
    options.add_argument(
        "--dir", help="where the nodes' data directories are made; default: a temporary directory"
    )
    args = options.parse_args(argv)
    return status_of(lambda: soak(args), "soak")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
