"""Measure what one request costs: CPU, waits and system calls of client, node and gateways.

Per wire and operation, a turn is `CALLS` calls in a loop by one client. The columns are per call:

    client, node   microseconds of CPU, user and system, of all threads of the process
    gateways       the same, of the node's gateway processes
    waits          voluntary context switches: how often a thread of the process slept for another
                   thread, a socket or a lock
    syscalls       of client and of node, counted by `perf stat` in a turn of their own; a dash
                   where perf or the permission is missing
    p50            microseconds of wall time

CPU time is steadier than wall time, but not independent of the machine: compare within a table.

rivals.py has lookups of several clients in closed loops.

    python benchmarks/budget.py [--rounds 20] [--wires bulk,shm,grpc] [--json]
"""

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Report, median, parser, percentile, progress, timed
from workplace import cpu_s

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

CALLS = 300
CALLS_OF_PAGES = 40
WARMUPS = 2
WIRES = ("bulk", "shm", "grpc")
NODE_FLAGS = ("--ram-bytes", "4GiB", "--log-level", "WARNING")
SYSCALLS = "raw_syscalls:sys_enter"


@dataclass(frozen=True)
class Operation:
    """`calls` calls of `call` are a turn. `prepare`, which is not measured, comes before it."""

    name: str
    calls: int
    call: Callable[[], object]
    prepare: Callable[[], object]


class Subject:
    """Keys and pages of one client, and the operations on them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.keys = [secrets.token_bytes(32) for _ in range(16)]
        self.namespace = self._namespace(4096)

    def operations(self) -> Iterator[Operation]:
        """Yield the operations of the table."""
        for count in (16, 2):
            lookup = functools.partial(self.client.lookup, self.namespace, self.keys[:count])
            yield Operation(f"lookup of {count} keys", CALLS, lookup, self._store)
        if self.client.maps_arena:
            yield Operation("acquire of 16 keys", CALLS, self._acquire, self._store)
        for kib, pages in ((64, 1), (256, 16), (1024, 16)):
            yield from self._of_pages(kib << 10, pages)

    def _store(self) -> None:
        self.client.put(self.namespace, self.keys, [bytes(4096)] * len(self.keys))
        assert self.client.lookup(self.namespace, self.keys).prefix_pages == len(self.keys)

    def _acquire(self) -> None:
        with self.client.open_get(self.namespace, self.keys):
            pass

    def _of_pages(self, nbytes: int, count: int) -> Iterator[Operation]:
        namespace = self._namespace(nbytes)
        pages = [secrets.token_bytes(nbytes) for _ in range(count)]
        buffers = [bytearray(nbytes) for _ in range(count)]
        keys = [secrets.token_bytes(32) for _ in range(count)]

        def store() -> None:
            self.client.put(namespace, keys, pages)

        def put() -> None:
            self.client.put(namespace, [secrets.token_bytes(32) for _ in range(count)], pages)

        def get() -> None:
            assert all(self.client.get(namespace, keys, buffers))

        store()
        get()
        assert buffers == pages
        size = f"{count} × {nbytes >> 10} KiB"
        yield Operation(f"put of {size}", CALLS_OF_PAGES, put, store)
        yield Operation(f"get of {size}", CALLS_OF_PAGES, get, store)

    @staticmethod
    def _namespace(nbytes: int) -> Namespace:
        return Namespace(model=f"budget-{nbytes}", layout=opaque_layout(nbytes))


# ---- what a process used -----------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def waits(pid: int) -> int:
    """Return the voluntary context switches of all living threads of a process."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (task / "status").read_text()
            found += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return found


@contextlib.contextmanager
def syscalls(pid: int) -> Iterator[list[int]]:
    """Count the system calls of a process; the list stays empty where `perf` cannot."""
    found: list[int] = []
    if shutil.which("perf") is None:
        yield found
        return
    command = ["perf", "stat", "-x", ",", "-e", SYSCALLS, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)  # it ends at once if it may not count
            yield found
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for line in process.communicate()[1].splitlines():
            count = line.split(",")[0]
            if SYSCALLS in line and count.isdigit():
                found.append(int(count))


# ---- the table ---------------------------------------------------------------------------


class Turns:
    """Measure operations of one client against one node."""

    def __init__(self, node: NodeProcess) -> None:
        gateways = children(node.pid)
        self.pids = {"client": [os.getpid()], "node": [node.pid], "gateways": gateways}
        self.samples: dict[str, dict[str, list[float]]] = {}

    def run(self, row: str, operation: Operation) -> None:
        """Run one turn and record its figures."""
        calls, call = operation.calls, operation.call
        operation.prepare()
        before = self._used()
        seconds = [timed(call) for _ in range(calls)]
        used = {name: value - before[name] for name, value in self._used().items()}
        figures = self.samples.setdefault(row, {})
        for name, value in used.items():
            figures.setdefault(name, []).append(value / calls)
        figures.setdefault("p50 µs", []).append(percentile(seconds, 50) * 1e6)

    def count_syscalls(self, row: str, operation: Operation) -> None:
        """Run one turn for each process while its system calls are counted."""
        operation.prepare()
        for name in ("client", "node"):
            with syscalls(self.pids[name][0]) as found:
                for _ in range(operation.calls):
                    operation.call()
            if found:
                self.samples[row][f"{name} syscalls"] = [sum(found) / operation.calls]

    def _used(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, pids in self.pids.items():
            found[f"{name} µs"] = sum(map(cpu_s, pids)) * 1e6
        for name in ("client", "node"):
            found[f"{name} waits"] = sum(map(waits, self.pids[name]))
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the table's rows."""
        columns = ("client µs", "node µs", "gateways µs", "client waits", "node waits")
        for row, figures in self.samples.items():
            wire, _, operation = row.partition(" ")
            found: dict[str, Any] = {"wire": wire, "operation": operation}
            for column in (*columns, "client syscalls", "node syscalls", "p50 µs"):
                values = figures.get(column)
                found[column] = spread(values) if values else None
            if not self.pids["gateways"] or wire != "grpc":
                found["gateways µs"] = None
            yield found


def spread(values: list[float]) -> str:
    """Format a median with its range."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    digits = 1 if median(values) < 100 else 0
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low}–{high})"


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20, help="turns (%(default)s)")
    options.add_argument("--wires", default=",".join(WIRES), help="wires (%(default)s)")
    args = options.parse_args(argv)
    report = Report("Cost of one request", " ".join(["python benchmarks/budget.py", *argv]))
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        turns = Turns(node)
        operations = []
        for wire in args.wires.split(","):
            client = stack.enter_context(Client(client_config(address=node.address, wire=wire)))
            operations += [(f"{wire} {op.name}", op) for op in Subject(client).operations()]
        tick = stack.enter_context(progress(args.rounds + WARMUPS))
        for number in range(-WARMUPS, args.rounds):
            if number == 0:
                turns.samples.clear()
            for row, operation in operations if number % 2 else reversed(operations):
                turns.run(row, operation)
            tick()
        for row, operation in operations:
            turns.count_syscalls(row, operation)
        order = [row for row, _ in operations]
        report.rows = sorted(
            turns.rows(), key=lambda row: order.index(f"{row['wire']} {row['operation']}")
        )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
