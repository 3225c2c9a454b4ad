"""Measure a client with a near node, beside one of a single node and one that asks owners.

    alone        one node, shared memory: put, get, and get in place (`open_get`) of 16 pages
    near, held   two nodes, of which the first is near: the same of pages that it has, owned or
                 copies
    near, calm   the same, but after the puts were replicated
    owner, bulk  the second node asked directly over bulk TCP: get
    near, far    the first node asked for pages that only the second has: get, get in place. It
                 drops them before each call
    one page     the time of a get of one page, by each way

All move the same pages, 128 MiB of each size, batch after batch, which no cache holds; nodes are
processes on this host, so the network is the loopback interface. They take turns, and the bytes
that came back are compared in the first of each. GB/s: 10^9 page bytes in the median of all calls.
In place the client copies nothing: the cost is the node's work. Aims: near, held at least 0.97 of
alone; near, far at least 0.8 of owner, bulk.

    python benchmarks/near.py [--rounds 8] [--json]
"""

import contextlib
import functools
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from batch import TURN, Batch, Batches, Contender, get, put, turn
from measure import Report, Samples, median, parser, progress, rounds, timed
from ports import free_ports

from kvstore import Client, client_config
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (1024, 4096)
BATCH = 16
WARMUPS = 2
HELD_AIM, FAR_AIM = 0.97, 0.8
NODE_FLAGS = ("--ram-bytes", "1GiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
Call = Callable[[Client, Batch], None]


def owned(client: Client, batch: Batch, member: str) -> list[bytes]:
    """Return as many keys as the batch has, all owned by this member."""
    view = client.view()
    assert view is not None
    drawn = [secrets.token_bytes(32) for _ in range(16 * len(batch.hashes))]
    owners = view.owners.owners(batch.namespace.digest, drawn)
    return [key for key, some in zip(drawn, owners, strict=True) if some == (member,)][
        : len(batch.hashes)
    ]


def in_place(client: Client, batch: Batch) -> None:
    """Get a batch in place."""
    with client.open_get(batch.namespace, batch.hashes) as slots:
        assert all(slots.hits)


def one_page(client: Client, batch: Batch) -> None:
    """Get one page."""
    assert client.get(batch.namespace, batch.hashes[:1], batch.buffers[:1]) == [True]


def held(client: Client, nodes: Sequence[Client], batch: Batch, calm: bool = False) -> Samples:
    """Time calls for pages that the client's node has.

    `nodes`: clients of each node, its own first, which drop the pages before.
    """
    for node in nodes:
        node.remove(batch.namespace, batch.hashes)
    samples = {"put": [timed(lambda: put(client, batch))]}
    while calm and nodes[0].node_status().peers.queue_pages:
        time.sleep(0.001)
    calls: dict[str, Call] = {"get": get, "get in place": in_place, "one page": one_page}
    return samples | {
        op: [timed(functools.partial(call, client, batch))] for op, call in calls.items()
    }


def from_owner(client: Client, batch: Batch) -> Samples:
    """Time gets from the owner."""
    return {
        "get": [timed(lambda: get(client, batch))],
        "one page": [timed(lambda: one_page(client, batch))],
    }


def fetched(client: Client, near: Client, batch: Batch) -> Samples:
    """Time gets of pages that the near node must fetch."""

    def anew(call: Call) -> list[float]:
        near.remove(batch.namespace, batch.hashes)
        return [timed(lambda: call(client, batch))]

    in_slots = anew(in_place)
    one = anew(one_page)
    return {"get in place": in_slots, "one page": one, "get": anew(get)}


def rows(
    clients: dict[str, Client], page_nbytes: int, count: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the rows of one page size.

    What only the second node has is put there by its own client.
    """
    own, far = Batches(page_nbytes, BATCH), Batches(page_nbytes, BATCH)
    for batch in far.all:
        batch.hashes = owned(clients["near"], batch, "n1")
        clients["second"].put(batch.namespace, batch.hashes, batch.pages)
    ways: dict[str, tuple[Contender, Batches]] = {
        "alone": (functools.partial(held, clients["alone"], [clients["alone"]]), own),
        "near, held": (
            functools.partial(held, clients["near"], [clients["first"], clients["second"]]),
            own,
        ),
        "near, calm": (
            functools.partial(
                held, clients["near"], [clients["first"], clients["second"]], calm=True
            ),
            own,
        ),
        "owner, bulk": (functools.partial(from_owner, clients["second"]), far),
        "near, far": (functools.partial(fetched, clients["near"], clients["first"]), far),
    }
    turns = {
        name: functools.partial(turn, call, batches.cycle())
        for name, (call, batches) in ways.items()
    }
    samples = rounds(turns, count, WARMUPS, tick)
    for name in ("alone", "first", "second"):
        for batches in (own, far):
            batches.forget(clients[name])
    seconds = {
        name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()
    }
    made = []
    for name, found in seconds.items():
        limit = seconds["owner, bulk" if name in ("owner, bulk", "near, far") else "alone"]
        row: dict[str, Any] = {"page KiB": page_nbytes >> 10, "way": name}
        for op in ("put", "get", "get in place"):
            row[f"{op} GB/s"] = round(own.nbytes / found[op] / 1e9, 2) if op in found else None
            row[f"{op}, of limit"] = (
                round(limit.get(op, limit["get"]) / found[op], 2) if op in found else None
            )
        made.append(row | {"one page µs": round(found["one page"] * 1e6)})
    return made


@contextlib.contextmanager
def two_nodes() -> Iterator[list[NodeProcess]]:
    """Start a cluster of two nodes."""
    ports = free_ports(2)
    members = ",".join(f"n{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
    with contextlib.ExitStack() as nodes:
        flags = [
            (
                *NODE_FLAGS,
                "--port",
                str(port),
                "--member",
                f"n{number}",
                "--cluster",
                f"static:near/{members}",
            )
            for number, port in enumerate(ports)
        ]
        yield [nodes.enter_context(NodeProcess(*some)) for some in flags]


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=8, help="turns of each contender (%(default)s)"
    )
    options.add_argument(
        "--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)"
    )
    args = options.parse_args(argv)
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(NodeProcess(*NODE_FLAGS))
        first, second = stack.enter_context(two_nodes())
        ways: dict[str, dict[str, Any]] = {
            "alone": {"address": alone.address},
            "near": {"address": first.address, "near": "n0"},
            "first": {"address": first.address, "direct": True},
            "second": {"address": second.address, "direct": True, "wire": "bulk"},
        }
        clients = {
            name: stack.enter_context(Client(client_config(timeout_s=60.0, **settings)))
            for name, settings in ways.items()
        }
        report = Report(
            f"A near node: {BATCH} pages, medians of {args.rounds * (TURN - 1)} calls",
            " ".join(["python benchmarks/near.py", *argv]),
            notes=[f"aims: near, held {HELD_AIM} of alone; near, far {FAR_AIM} of owner, bulk"],
        )
        tick = stack.enter_context(progress(len(args.page_kib) * (args.rounds + WARMUPS)))
        for kib in args.page_kib:
            report.rows += rows(clients, kib << 10, args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
