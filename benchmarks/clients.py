"""Measure several client processes over bulk TCP, beside as many pairs of bare sockets.

    bare       each process sends its pages to another process and gets them back: `sendall` and
               `recv_into`, no node, no keys, no checksum
    bulk       each puts its pages into the one node and gets them back, as in bulk.py

They take turns, all processes in step; a turn is some puts and gets of 16 pages, of which the first
does not count. The bytes that came back are compared. GB/s: the sum over the processes of each
one's page bytes in the time of its own calls, which run side by side. Aim: 0.9 of the bare sockets;
0.7 with pages of 256 KiB.

    python benchmarks/clients.py [--processes 8] [--rounds 5] [--json]
"""

import contextlib
import multiprocessing
import sys
from typing import Any

from batch import TURN, Batches, ours
from bulk import BATCH, NODE_FLAGS, PAGE_KIB, limit
from measure import Report, median, parser

from kvstore import Client, client_config
from kvstore.tools.node_process import NodeProcess

AIMS = {256: 0.7, 1024: 0.9, 4096: 0.9}
MOVED_NBYTES = 64 << 20  # of each process: all of them exceed the machine's caches
WAIT_S = 120.0


def work(address: str, page_nbytes: int, order: Any, barrier: Any, said: Any) -> None:
    """Serve as one client process until None is asked for."""
    batches = Batches(page_nbytes, BATCH, MOVED_NBYTES)
    with (
        limit(batches) as bare,
        Client(client_config(address=address, wire="bulk", timeout_s=WAIT_S)) as client,
    ):
        contenders = {"bare": bare, "bulk": lambda batch: ours(client, batch)}
        while (name := order.get()) is not None:
            cycle, contender, spans = batches.cycle(), contenders[name], []
            # Both directions run each time; only one of them is timed
            for way in (
                "put",
                "get",
            ):
                batch = next(cycle)
                for buffer in batch.buffers:
                    buffer[:] = bytes(page_nbytes)
                contender(batch)
                assert batch.buffers == batch.pages, (
                    "the bytes that came back are not those that were sent"
                )
                barrier.wait(WAIT_S)
                spans.append(sum(contender(next(cycle))[way][0] for _ in range(TURN - 1)))
            said.put(dict(zip(("put", "get"), spans, strict=True)))
        batches.forget(client)


def speeds(name: str, orders: list[Any], said: Any, nbytes: int) -> dict[str, float]:
    """Return the GB/s of all processes together, each by the time of its own calls."""
    for order in orders:
        order.put(name)
    spans = [said.get(timeout=WAIT_S) for _ in orders]
    return {way: sum(nbytes / span[way] for span in spans) / 1e9 for way in ("put", "get")}


def rows(address: str, kib: int, processes: int, rounds: int) -> list[dict[str, Any]]:
    """Return the table's rows."""
    context = multiprocessing.get_context("spawn")
    barrier, said = context.Barrier(processes), context.Queue()
    orders = [context.Queue() for _ in range(processes)]
    workers = [
        context.Process(target=work, args=(address, kib << 10, order, barrier, said))
        for order in orders
    ]
    with contextlib.ExitStack() as stack:
        for worker in workers:
            worker.start()
            stack.callback(worker.join, WAIT_S)
        found: dict[str, list[dict[str, float]]] = {"bare": [], "bulk": []}
        nbytes = (TURN - 1) * BATCH * (kib << 10)
        for _ in range(rounds + 1):
            for name in found:
                found[name].append(speeds(name, orders, said, nbytes))
        for order in orders:
            order.put(None)
    middle = {
        name: {way: median([one[way] for one in all_[1:]]) for way in ("put", "get")}
        for name, all_ in found.items()
    }
    shown = []
    for name, speed in middle.items():
        row: dict[str, Any] = {"page KiB": kib, "contender": name}
        for way in ("put", "get"):
            row[f"{way} GB/s"] = round(speed[way], 2)
            row[f"{way} of bare"] = round(speed[way] / middle["bare"][way], 2)
        met = min(row["put of bare"], row["get of bare"]) >= AIMS[kib]
        shown.append(
            row | {"aim": f"{AIMS[kib]} {'met' if met else 'missed'}" if name == "bulk" else None}
        )
    return shown


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--processes", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args(argv)
    report = Report(
        f"{args.processes} clients at a time", " ".join(["python benchmarks/clients.py", *argv])
    )
    flags = ("--ram-bytes", f"{4 * args.processes * MOVED_NBYTES >> 20}MiB", *NODE_FLAGS[2:])
    for kib in PAGE_KIB:
        with NodeProcess(*flags) as node:
            report.rows += rows(node.address, kib, args.processes, args.rounds)
    report.notes.append(
        f"medians of {args.rounds} rounds; a speed is the sum over processes of each one's own"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
