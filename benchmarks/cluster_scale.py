"""Measure lookups of 256 keys and gets of 64 pages on a cluster, beside one node.

    1        a single node
    2, 4, 8  members of a cluster with one owner for each key, so that a call is divided among all

All are up at once and take turns; clients are processes, all in step; a turn's first call does not
count. Every page that comes back is compared once, before the rounds. Speeds are sums over the
clients, each in the time of its own calls; CPU seconds are those of all nodes and clients. Aim: not
below one node on 2 cores, growing with the nodes on 16.

    python benchmarks/cluster_scale.py [--nodes 1,2,4,8] [--clients N] [--rounds 5] [--json]
"""

import contextlib
import multiprocessing
import os
import resource
import sys
import time
from typing import Any

from measure import Report, median, parser, progress
from node_fleet import HERE, Fleet
from workplace import cpu_s

from kvstore import Client, client_config
from kvstore.keys import Namespace
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.replay import replay_namespace
from kvstore.tools.trace import page_content, trace_prefix_hash

LOOKUP_KEYS = 256
GET_PAGES = 64
SMALL_NBYTES = 4096  # of the pages that are looked up
PAGE_NBYTES = 1 << 20  # of those that are moved
CALLS = {"lookup": 200, "get": 6}  # of a turn
WAIT_S = 120.0
TIMEOUT_S = 60.0


class Caller:
    """One client of one contender, and its pages there."""

    def __init__(self, address: str) -> None:
        self._client = Client(client_config(address=address, wire="bulk", timeout_s=TIMEOUT_S))
        self._keys = [trace_prefix_hash(number) for number in range(LOOKUP_KEYS)]
        self._small, self._large = replay_namespace(SMALL_NBYTES), replay_namespace(PAGE_NBYTES)
        self._buffers = [bytearray(PAGE_NBYTES) for _ in range(GET_PAGES)]
        self._put(self._small, self._keys)
        pages = self._put(self._large, self._keys[:GET_PAGES])
        self.get()
        assert self._buffers == pages, "the bytes that came back are not those that were put"

    def _put(self, namespace: Namespace, keys: list[bytes]) -> list[bytes]:
        pages = [page_content(namespace.digest, key, namespace.layout.page_nbytes) for key in keys]
        assert all(outcome.kept for outcome in self._client.put(namespace, keys, pages))
        return pages

    def lookup(self) -> None:
        """Look up keys."""
        assert self._client.lookup(self._small, self._keys).prefix_pages == LOOKUP_KEYS

    def get(self) -> None:
        """Get pages."""
        assert all(self._client.get(self._large, self._keys[:GET_PAGES], self._buffers))


def work(addresses: dict[int, str], order: Any, barrier: Any, said: Any) -> None:
    """Serve turns of (contender, operation, calls) until None; report seconds and CPU seconds."""
    callers = {count: Caller(address) for count, address in addresses.items()}
    while (asked := order.get()) is not None:
        count, op, calls = asked
        call = getattr(callers[count], op)
        barrier.wait(WAIT_S)
        start, cpu = time.perf_counter(), own_cpu_s()
        for _ in range(calls):
            call()
        said.put((time.perf_counter() - start, own_cpu_s() - cpu))


def own_cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Clients:
    """Client processes in step."""

    def __init__(self, count: int, addresses: dict[int, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier, self._said = context.Barrier(count), context.Queue()
        self._orders = [context.Queue() for _ in range(count)]
        self._processes = [
            context.Process(target=work, args=(addresses, order, self._barrier, self._said))
            for order in self._orders
        ]
        for process in self._processes:
            process.start()

    def turn(self, count: int, op: str, calls: int) -> list[tuple[float, float]]:
        """Run one turn in all processes."""
        for order in self._orders:
            order.put((count, op, calls))
        return [self._said.get(timeout=WAIT_S) for _ in self._orders]

    def close(self) -> None:
        """Stop everything that was started."""
        for order in self._orders:
            order.put(None)
        for process in self._processes:
            process.join(WAIT_S)


def measured(clients: Clients, count: int, pids: list[int]) -> dict[str, float]:
    """Return one turn's keys per second, GB/s and GB per CPU second."""
    found = {}
    for op, calls in CALLS.items():
        clients.turn(count, op, 1)
        before = sum(map(cpu_s, pids))
        turns = clients.turn(count, op, calls)
        cpu = sum(map(cpu_s, pids)) - before + sum(used for _, used in turns)
        amount = LOOKUP_KEYS / 1e3 if op == "lookup" else GET_PAGES * PAGE_NBYTES / 1e9
        found[op] = sum(calls * amount / span for span, _ in turns)
        found[f"{op} cpu"] = len(turns) * calls * amount / cpu
    return found


def row(count: int, turns: list[dict[str, float]], one: list[dict[str, float]]) -> dict[str, Any]:
    """Return a row of the table."""
    found: dict[str, Any] = {"nodes": count}
    names = {"lookup": "lookup, 1000 keys/s", "get": "get GB/s", "get cpu": "GB per CPU s"}
    for op, name in names.items():
        found[name] = round(median([turn[op] for turn in turns]), 2)
        found["of one" + (f", {op}" if op != "get cpu" else ", CPU")] = round(
            found[name] / median([turn[op] for turn in one]), 2
        )
    return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--nodes", default="1,2,4,8", help="contenders (%(default)s)")
    options.add_argument(
        "--clients", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="%(default)s"
    )
    options.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    args = options.parse_args(argv)
    counts = [int(count) for count in args.nodes.split(",")]
    title = f"Nodes, {args.clients} clients: Lookup of 256 keys, get of 64 pages of 1 MiB"
    report = Report(title, " ".join(["python benchmarks/cluster_scale.py", *argv]))
    pages_nbytes = args.clients * (GET_PAGES * PAGE_NBYTES + LOOKUP_KEYS * SMALL_NBYTES)
    with contextlib.ExitStack() as stack:
        addresses, pids = {}, {}
        for count in counts:
            flags = (
                "--ram-bytes",
                str(2 * pages_nbytes // count + (64 << 20)),
                "--log-level",
                "ERROR",
            )
            if count == 1:
                node = stack.enter_context(NodeProcess(*flags))
                addresses[1], pids[1] = node.address, [node.pid]
                continue
            fleet = stack.enter_context(Fleet([HERE] * count, *flags))
            addresses[count] = ",".join(fleet.addresses.values())
            pids[count] = [node.pid for node in fleet.nodes.values()]
        clients = Clients(args.clients, addresses)
        stack.callback(clients.close)
        tick = stack.enter_context(progress(args.rounds))
        turns: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for number in range(args.rounds):
            for count in counts if number % 2 else reversed(counts):
                turns[count].append(measured(clients, count, pids[count]))
            tick()
    report.rows = [row(count, turns[count], turns[counts[0]]) for count in counts]
    report.notes.append(
        f"medians of {args.rounds} rounds; nodes and clients share the machine's cores"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
