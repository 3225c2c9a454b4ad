"""Measure gRPC through gateway processes, of two checkouts in turns.

    put, get      16 pages of 1 MiB over gRPC: one client, and --clients processes at a time; GB/s,
                  10^9 page bytes
    lookup        of 16 keys, all stored, one client: p50, p99, and the processor time that a lookup
                  costs the node and its gateways (user and system)
    beside        lookups over the bulk wire while all clients put and get over gRPC
    start         from the spawn of the node to its line "ready"
    memory        private memory (RssAnon) of the idle node and of its gateways

Each round starts new nodes of each checkout, in turn, with clients of the same checkout. A figure
is the median over the rounds, with minimum and maximum. With --repo, aims compare this checkout
("after") with that one ("before"): put and get of one client at least 0.85, of many at least 3
times; the lookup's p50 not higher; lookups over bulk beside the load at most 1.2 times alone; a
start at most 0.3 s longer.

    python benchmarks/gateway.py [--repo PATH] [--rounds 3] [--clients 8] [--grpc-processes 1]
        [--json]
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batch import Batches, ours
from measure import Report, median, parser, percentile, progress, shown, timed
from workplace import cpu_s, private_nbytes

import kvstore
from kvstore import Client, KVStoreError, Namespace, client_config, opaque_layout
from kvstore.tools.node_process import NodeProcess

HERE = Path(__file__).parent.parent
PAGES = 16
PAGE_NBYTES = 1 << 20
KEYS = 16
LOOKUPS = 4000
LOOKUPS_WARM = 200
STARTS = 3
# timed batches that one client puts and gets, after one warm-up batch for each of its batches
TRANSFERS = 12
MOVED_NBYTES = 32 << 20  # bytes of each client: two batches, which take turns
LOAD_S = 5.0
WAIT_S = 120.0
IDLE_S = 2.0
NODE_FLAGS = ("--ram-bytes", "1GiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
# Name of a figure: its unit, and its aim relative to the other checkout: "at least" or "at most" so
# many times.
AIMS: dict[str, tuple[str, float]] = {
    "put, 1 client, GB/s": (">=", 0.85),
    "get, 1 client, GB/s": (">=", 0.85),
    "put, all clients, GB/s": (">=", 3.0),
    "get, all clients, GB/s": (">=", 3.0),
    "lookup gRPC p50, µs": ("<=", 1.0),
}
BESIDE, ALONE, START = "lookup bulk beside, p50, µs", "lookup bulk alone, p50, µs", "start, s"
BESIDE_AIM, START_AIM_S = 1.2, 0.3


# ---- one checkout, in a process that imports it ----------------------------------------------


def gateways(pid: int) -> list[int]:
    """Return the pids of the node's child processes; without a disk all of them serve gRPC."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return children


@contextlib.contextmanager
def running(flags: Sequence[str]) -> Iterator[NodeProcess]:
    """Start a node; give it as long to stop as a busy machine takes."""
    node = NodeProcess(*flags)
    try:
        yield node
    except BaseException:
        print(node.log_text, file=sys.stderr)
        raise
    finally:
        node.stop(WAIT_S)


def transfers(client: Client, batches: Batches, count: int) -> dict[str, float]:
    """Return the seconds of all puts and of all gets."""
    cycle = batches.cycle()
    for _ in batches.all:
        ours(client, next(cycle))
    samples = [ours(client, next(cycle)) for _ in range(count)]
    return {way: sum(sample[way][0] for sample in samples) for way in ("put", "get")}


def work(address: str, order: Any, barrier: Any, said: Any) -> None:
    """Serve as one of many clients; report an early end."""
    try:
        _work(address, order, barrier, said)
    except (KVStoreError, threading.BrokenBarrierError) as error:
        barrier.abort()
        said.put(error)


def _work(address: str, order: Any, barrier: Any, said: Any) -> None:
    """Put and get in step with the others, or load for some time, until None."""
    batches = Batches(PAGE_NBYTES, PAGES, MOVED_NBYTES)
    with Client(client_config(address=address, wire="grpc", timeout_s=WAIT_S)) as client:
        while (seconds := order.get()) is not None:
            barrier.wait(WAIT_S)
            if not seconds:
                said.put(transfers(client, batches, TRANSFERS))
                continue
            end, cycle = time.monotonic() + seconds, batches.cycle()
            while time.monotonic() < end:
                ours(client, next(cycle))
            said.put(None)
        batches.forget(client)


class Crowd:
    """Client processes of a node."""

    def __init__(self, address: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept: the processes find it by name
        self._barrier, self._said = context.Barrier(count), context.Queue()
        self._orders = [context.Queue() for _ in range(count)]
        self._workers = [
            context.Process(target=work, args=(address, order, self._barrier, self._said))
            for order in self._orders
        ]

    def __enter__(self) -> "Crowd":
        for worker in self._workers:
            worker.start()
        return self

    def ask(self, seconds: float) -> None:
        """Ask all clients to run."""
        for order in self._orders:
            order.put(seconds)

    def answers(self) -> list[Any]:
        """Return all answers. Raises what ended a client early."""
        answers = [self._said.get(timeout=WAIT_S) for _ in self._orders]
        if errors := [answer for answer in answers if isinstance(answer, Exception)]:
            raise RuntimeError(f"{len(errors)} of {len(answers)} clients failed: {errors[0]}")
        return answers

    def __exit__(self, *_: object) -> None:
        for order in self._orders:
            order.put(None)
        for worker in self._workers:
            worker.join(WAIT_S)


class Lookups:
    """16 keys that are stored."""

    def __init__(self, client: Client) -> None:
        self._namespace = Namespace("lookups", opaque_layout(4096))
        self._keys = [os.urandom(32) for _ in range(KEYS)]
        client.put(self._namespace, self._keys, [bytes(4096)] * KEYS)

    def run(self, client: Client, count: int) -> list[float]:
        """Return the seconds of each lookup."""

        def lookup() -> None:
            assert client.lookup(self._namespace, self._keys).prefix_pages == KEYS

        return [timed(lookup) for _ in range(count)]

    def costs(self, client: Client, pid: int, wire: str) -> Iterator[tuple[str, float]]:
        """Yield latencies and the CPU time per lookup."""
        self.run(client, LOOKUPS_WARM)
        processes = {"node": [pid], "gateways": gateways(pid)}
        before = {name: sum(map(cpu_s, pids)) for name, pids in processes.items()}
        seconds = self.run(client, LOOKUPS)
        for percent in (50, 99):
            yield f"lookup {wire} p{percent}, µs", percentile(seconds, percent) * 1e6
        for name, pids in processes.items():
            yield (
                f"lookup {wire}, {name} CPU, µs",
                (sum(map(cpu_s, pids)) - before[name]) / LOOKUPS * 1e6,
            )


def measure_once(args: argparse.Namespace) -> dict[str, float]:
    """Return all figures of the checkout that this process imports."""
    assert Path(kvstore.__file__).is_relative_to(Path.cwd()), (
        f"{kvstore.__file__} is of another checkout"
    )
    flags = (*NODE_FLAGS, *args.node_flags.split())
    found: dict[str, float] = {}

    starts = []
    for _ in range(STARTS):
        began = time.perf_counter()
        with running(flags):
            starts.append(time.perf_counter() - began)
    found[START] = median(starts)
    with (
        running(flags) as node,
        Client(client_config(address=node.address, wire="grpc", timeout_s=WAIT_S)) as grpc,
        Client(client_config(address=node.address, wire="bulk", timeout_s=WAIT_S)) as bulk,
    ):
        time.sleep(IDLE_S)
        found["memory, node, MiB"] = private_nbytes(node.pid) / (1 << 20)
        found["memory, gateways, MiB"] = sum(map(private_nbytes, gateways(node.pid))) / (1 << 20)
        lookups = Lookups(bulk)
        found |= lookups.costs(grpc, node.pid, "gRPC")
        found |= lookups.costs(bulk, node.pid, "bulk")
        batches = Batches(PAGE_NBYTES, PAGES, MOVED_NBYTES)
        for way, seconds in transfers(grpc, batches, TRANSFERS).items():
            found[f"{way}, 1 client, GB/s"] = TRANSFERS * batches.nbytes / seconds / 1e9
        batches.forget(grpc)
        found |= beside(node, bulk, lookups, args.clients)
        assert node.running
    return found


def beside(
    node: NodeProcess, bulk: Client, lookups: Lookups, clients: int
) -> Iterator[tuple[str, float]]:
    """Yield what all clients move together, and the latency of lookups meanwhile."""
    with Crowd(node.address, clients) as crowd:
        crowd.ask(0)
        spans = crowd.answers()
        nbytes = TRANSFERS * PAGES * PAGE_NBYTES
        for way in ("put", "get"):
            yield f"{way}, all clients, GB/s", sum(nbytes / span[way] for span in spans) / 1e9
        alone = lookups.run(bulk, LOOKUPS)
        crowd.ask(LOAD_S)
        time.sleep(0.5)  # until all clients run
        loaded: list[float] = []
        end = time.monotonic() + LOAD_S - 1.0
        while time.monotonic() < end:
            loaded += lookups.run(bulk, 50)
        crowd.answers()
    for name, seconds in (("alone", alone), ("beside", loaded)):
        for percent in (50, 99):
            yield f"lookup bulk {name}, p{percent}, µs", percentile(seconds, percent) * 1e6


# ---- both checkouts --------------------------------------------------------------------------


def once(repo: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    flags = args.node_flags
    if "grpc_processes" in (repo / "node" / "config.py").read_text():
        flags += f" --grpc-processes {args.grpc_processes}"
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--once",
        "--clients",
        str(args.clients),
        f"--node-flags={flags}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    # In its directory: `python -m` searches it before all other paths.
    done = subprocess.run(
        command, env=environment, cwd=repo, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{repo}: {' '.join(command)} ended with {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def verdict(name: str, middle: dict[str, dict[str, float]]) -> str | None:
    """Return whether a figure's aim is met; None without an aim."""
    after = middle["after"]
    if name == BESIDE:
        return f"<= {BESIDE_AIM:g} × alone: {_met(after[BESIDE] <= BESIDE_AIM * after[ALONE])}"
    if "before" not in middle:
        return None
    before = middle["before"]
    if name == START:
        return f"<= + {START_AIM_S:g} s: {_met(after[START] <= before[START] + START_AIM_S)}"
    if name not in AIMS:
        return None
    way, times = AIMS[name]
    good = (
        after[name] >= times * before[name] if way == ">=" else after[name] <= times * before[name]
    )
    return f"{way} {times:g} ×: {_met(good)}"


def _met(good: bool) -> str:
    return "met" if good else "missed"


def row(
    name: str, runs: dict[str, list[dict[str, float]]], middle: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Return a row of the table."""
    found: dict[str, Any] = {"figure": name}
    for label, each in runs.items():
        values = [run[name] for run in each]
        found[label] = f"{shown(middle[label][name])} ({shown(min(values))}–{shown(max(values))})"
    if "before" in middle:
        base = middle["before"][name]
        found["after / before"] = round(middle["after"][name] / base, 2) if base else None
    return found | {"aim": verdict(name, middle)}


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--repo", type=Path, help="another checkout, whose node and client are measured in turn"
    )
    options.add_argument("--rounds", type=int, default=3, help="of each checkout (%(default)s)")
    options.add_argument("--clients", type=int, default=8, help="processes at a time (%(default)s)")
    options.add_argument(
        "--grpc-processes",
        type=int,
        default=1,
        help="gateways, where a node has them (%(default)s)",
    )
    options.add_argument(
        "--node-flags", default="", help="more flags of the nodes, in one argument"
    )
    options.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    if args.once:
        print(json.dumps(measure_once(args)))
        return
    title = f"gRPC of a node, {args.clients} clients, {args.grpc_processes} gateway processes"
    report = Report(title, " ".join(["python benchmarks/gateway.py", *argv]))
    repos = {"before": args.repo.resolve(), "after": HERE} if args.repo else {"after": HERE}
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in repos}
    with progress(args.rounds * len(repos)) as tick:
        for number in range(args.rounds):
            for label in list(repos) if number % 2 else reversed(list(repos)):
                runs[label].append(once(repos[label], args))
                tick()
    names = list(runs["after"][0])
    middle = {
        label: {name: median([run[name] for run in each]) for name in names}
        for label, each in runs.items()
    }
    report.rows = [row(name, runs, middle) for name in names]
    report.notes.append(f"median (least–greatest) of {args.rounds} rounds")
    if args.json:
        print(json.dumps({**vars(report), "runs": runs}, ensure_ascii=False))
    else:
        report.show(False)


if __name__ == "__main__":
    main(sys.argv[1:])
