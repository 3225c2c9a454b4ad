"""What the console costs a node: when nobody looks, and when somebody does.

    python benchmarks/console.py [--namespaces 1000] [--seconds 5]

A node in a process of its own, a client that looks up and gets over the bulk wire, with and without a watcher, in
turns; and in this process what one sample, one status and one lookup's count take.
"""

import argparse
import http.client
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from kvstore import Client, ClientConfig, Namespace, opaque_layout, prefix_hashes
from kvstore.measure.node_process import NodeProcess
from node.access.caller import THE_NODE
from node.config import NodeConfig
from node.console.history import EVERY_S
from node.console.snapshot import COST_FACTOR
from node.serve.heat import Heat
from node.server import Node

TURNS = 5
PAGES = 64
PAGE_NBYTES = 16 << 10


def us(call: Callable[[], Any], count: int) -> float:
    """Median of nine runs."""
    found = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(found)


def parts(namespaces: int) -> None:
    heat, digest, hashes, present = Heat(), b"n" * 16, [b"h" * 32] * PAGES, [True] * PAGES
    took = us(lambda: heat.asked(digest, hashes, present), 100_000) - us(lambda: None, 100_000)
    print(f"a lookup's count, of which one in 64 is looked at: {took:.3f} us")
    settings: dict[str, Any] = {"ram_nbytes": 64 << 20, "shm_socket": "none", "namespaces_max": 2048}
    node = Node(NodeConfig(port=0, bulk_port=0, metrics_port=0, **settings))
    node.start()
    try:
        with Client(ClientConfig(f"127.0.0.1:{node.grpc.port}")) as client:
            for number in range(namespaces):
                client.lookup(Namespace(f"model-{number}", opaque_layout(4096), f"team-{number % 20}"), [b"k" * 32])
        assert node.console is not None
        snapshots = node.console._snapshots
        history = snapshots._history
        took = us(lambda: history._take(time.monotonic()), 3)
        share = took / EVERY_S / 1e4
        print(f"a sample of {namespaces} namespaces: {took / 1000:.2f} ms, each {EVERY_S:g} s: {share:.3f} % of a core")
        who = node.service.gate.who(THE_NODE)
        took = us(lambda: snapshots._make(who, THE_NODE), 3)
        share = 100 * min(1 / COST_FACTOR, took / 1e6 / 2)
        print(f"a status of {namespaces} namespaces: {took / 1000:.1f} ms, {share:.2f} % of a core for all who watch")
    finally:
        node.stop()


@contextmanager
def watcher(port: int, watches: bool) -> Any:
    if not watches:
        yield
        return
    there = http.client.HTTPConnection("127.0.0.1", port)
    there.request("POST", "/console/events", b"{}", {"X-KVStore-Console": "1"})
    reply, over = there.getresponse(), threading.Event()

    def read() -> None:
        while not over.is_set() and reply.readline():
            pass

    thread = threading.Thread(target=read)
    thread.start()
    yield
    over.set()
    thread.join()
    there.close()


def request_us(client: Client, space: Namespace, hashes: list[bytes], seconds: float) -> float:
    """A lookup of all pages, and a get of them: median of both together."""
    buffers = [bytearray(PAGE_NBYTES) for _ in hashes]
    took, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        client.lookup(space, hashes)
        client.get(space, hashes, buffers)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def beside(seconds: float) -> None:
    found: dict[str, list[float]] = {name: [] for name in ("--console off", "nobody watches", "one watches")}
    space = Namespace("m", opaque_layout(PAGE_NBYTES))
    hashes = prefix_hashes(range(PAGES), 1)
    with NodeProcess("--ram-bytes", "64MiB", "--console", "off") as off, NodeProcess("--ram-bytes", "64MiB") as on:
        for turn in range(TURNS + 1):  # the first warms up
            for name, process in zip(found, (off, on, on), strict=True):
                with Client(ClientConfig(address=process.address, wire="bulk")) as client:
                    client.put(space, hashes, [bytes(PAGE_NBYTES)] * PAGES)
                    port = client.node_status().metrics_port
                    with watcher(port, name == "one watches"):
                        took = request_us(client, space, hashes, seconds)
                if turn:
                    found[name].append(took)
    for name, times in found.items():
        told = f"{statistics.median(times):.0f} us ({min(times):.0f}-{max(times):.0f})"
        print(f"lookup and get of {PAGES} pages of 16 KiB, {name}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    arguments = parser.parse_args()
    parts(arguments.namespaces)
    beside(arguments.seconds)


if __name__ == "__main__":
    main()
