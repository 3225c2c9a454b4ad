"""Measure what readers of a node's feed cost those who put and get pages.

Client processes put batches of 16 new pages over bulk TCP and get each back. The node's RAM is soon
full, so every batch evicts one: the feed tells two changes for each page. Turns with no reader and
with eight, each a process with a feed of its own, alternate.

    GB/s       page bytes that all clients put and got in the time of the turn
    node µs    CPU of the node for each page that was put and got
    told       pages that the slowest reader was told, of those that were put

`of none`: median of the ratios to the turn without readers in the same round. Aim: at least 0.98.

    python benchmarks/feed.py [--clients 1 4] [--page-kib 256 1024] [--readers 8] [--rounds 8]
        [--seconds 2] [--json]
"""

import argparse
import contextlib
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from budget import spread
from bulk import BATCH
from measure import Report, median, parser, progress
from workplace import cpu_s

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (256, 1024)
WARMUPS = 1
AIM = 0.98
IDLE_S = 0.3  # a reader looks for orders so long after the last news
NODE_FLAGS = ("--ram-bytes", "1GiB", "--log-level", "WARNING")
Work = Callable[[Client, Connection], None]
Turn = tuple[float, float, float]  # GB/s, node µs a page, told


# ---- the processes -----------------------------------------------------------------------


def put_and_get(client: Client, orders: Connection) -> None:
    """For each order, page bytes and seconds, answer with the pages that were put and got."""
    for page_nbytes, seconds in iter(orders.recv, None):
        space = Namespace("feed-benchmark", opaque_layout(page_nbytes))
        pages = [os.urandom(page_nbytes) for _ in range(BATCH)]
        buffers = [bytearray(page_nbytes) for _ in range(BATCH)]
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            hashes = [secrets.token_bytes(32) for _ in range(BATCH)]
            client.put(space, hashes, pages)
            assert all(client.get(space, hashes, buffers))
            count += BATCH
        assert buffers == pages, "the bytes that came back are not those that were sent"
        orders.send(count)


def read_feed(client: Client, orders: Connection) -> None:
    """For each order, read until the next one comes; answer when ready, and then the pages told."""
    while orders.recv() is not None:
        told, ready = 0, False
        for event in client.feed(idle_s=IDLE_S):
            if event.kind == "ready" and not ready:
                ready = True
                orders.send(None)
            elif event.kind == "stored" and ready:
                told += len(event.prefix_hashes)
            elif event.kind == "idle" and orders.poll():
                break
        orders.recv()
        orders.send(told)


def run(work: Work, address: str, orders: Connection) -> None:
    """Do a process's work with a client of its own."""
    with (
        contextlib.suppress(EOFError),
        Client(client_config(address=address, wire="bulk")) as client,
    ):
        work(client, orders)


@contextlib.contextmanager
def processes(work: Work, address: str, count: int) -> Iterator[list[Connection]]:
    """Start processes; yield the pipes by which they are given orders."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        context.Process(target=run, args=(work, address, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()


# ---- turns -------------------------------------------------------------------------------


def turn(
    node: NodeProcess,
    clients: list[Connection],
    readers: list[Connection],
    order: tuple[int, float],
) -> Turn:
    """Run the clients for their time beside the readers."""
    for pipe in readers:
        pipe.send(True)
    for pipe in readers:
        pipe.recv()
    began, used = time.monotonic(), cpu_s(node.pid)
    for pipe in clients:
        pipe.send(order)
    count = sum(pipe.recv() for pipe in clients)
    used, seconds = cpu_s(node.pid) - used, time.monotonic() - began
    for pipe in readers:
        pipe.send(True)
    told = [pipe.recv() for pipe in readers]
    return 2 * count * order[0] / seconds / 1e9, used / count * 1e6, min(told, default=0) / count


def rows(
    node: NodeProcess,
    clients: list[Connection],
    readers: list[Connection],
    args: argparse.Namespace,
    page_nbytes: int,
) -> list[dict[str, Any]]:
    """Return the rows without readers and with them."""
    ways: dict[str, list[Connection]] = {"0": [], str(len(readers)): readers}
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    with progress(args.rounds + WARMUPS) as tick:
        for number in range(-WARMUPS, args.rounds):
            for name in ways if number % 2 else reversed(ways):
                figures = turn(node, clients, ways[name], (page_nbytes, args.seconds))
                if number >= 0:
                    found[name].append(figures)
            tick()
    ratios = [some[0] / none[0] for none, some in zip(*found.values(), strict=True)]
    return [
        {
            "clients": len(clients),
            "page KiB": page_nbytes >> 10,
            "readers": name,
            "GB/s": spread([rate for rate, _, _ in turns]),
            "of none": f"{median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})"
            if ways[name]
            else None,
            "node µs": spread([used for _, used, _ in turns]),
            "told": round(min(told for _, _, told in turns), 3) if ways[name] else None,
        }
        for name, turns in found.items()
    ]


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=(1, 4), help="(%(default)s)")
    options.add_argument("--page-kib", type=int, nargs="+", default=PAGE_KIB, help="(%(default)s)")
    options.add_argument("--readers", type=int, default=8, help="(%(default)s)")
    options.add_argument("--rounds", type=int, default=8, help="turns of each (%(default)s)")
    options.add_argument("--seconds", type=float, default=2, help="of a turn (%(default)s)")
    args = options.parse_args(argv)
    report = Report(
        "Clients beside readers of the feed", " ".join(["python benchmarks/feed.py", *argv])
    )
    report.notes.append(f"aim: {AIM} of the throughput without readers")
    with (
        NodeProcess(*NODE_FLAGS) as node,
        processes(read_feed, node.address, args.readers) as readers,
    ):
        for count in args.clients:
            with processes(put_and_get, node.address, count) as clients:
                for kib in args.page_kib:
                    report.rows += rows(node, clients, readers, args, kib << 10)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
