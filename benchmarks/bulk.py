"""Measure put and get of 16 pages over bulk TCP, beside plain sockets.

    limit      two Python processes, `sendall` and `recv_into` page by page between warm buffers,
               one byte of acknowledgement a batch, TCP_NODELAY: no node, no keys, no checksum
    bulk       this store: put reserves, sends and commits, get looks up, holds and sends; the
               writer makes the page's checksum, the reader verifies it
    others     this store without the checksum and over gRPC; Redis with pipelined SET and MGET

All contenders send the same pages and store them in equally many places. All but Redis, whose
client returns new objects, receive into the same buffers. Each of these is 128 MiB, which no cache
holds. They take turns of five puts and gets, of which the first does not count: in it the scheduler
moves two processes that begin to talk to two cores, and the bytes are compared. GB/s: 10^9 page
bytes in the median of all calls. Aim: put and get each at least 0.85 of the limit for pages of 1
MiB and above.

    python benchmarks/bulk.py [--rounds 15] [--json]
"""

import contextlib
import functools
import itertools
import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from batch import TURN, Batch, Batches, Contender, NoChecksum, ours, turn
from measure import Report, Samples, median, parser, progress, redis_client, rounds, timed

from kvstore import Client, client_config
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (256, 1024, 4096)
BATCH = 16
WARMUPS = 2
AIM = 0.85
AIM_NBYTES_MIN = 1 << 20
NODE_FLAGS = ("--ram-bytes", "512MiB", "--extent-bytes", "64MiB", "--log-level", "WARNING")
LIMIT = "limit: sendall/recv_into"


# ---- the limit ---------------------------------------------------------------------------


def serve_limit(port: int, page_nbytes: int, batch_count: int, flags: int) -> None:
    """Receive batches and send them back, as the other process, until closed.

    Each batch has a place of its own, as it has in a node.
    """
    places = [
        [memoryview(bytearray(page_nbytes)) for _ in range(BATCH)] for _ in range(batch_count)
    ]
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        contextlib.suppress(ConnectionError),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pages in itertools.cycle(places):
            receive(sock, pages, flags)
            sock.sendall(b"k")
            receive(sock, [memoryview(bytearray(1))], 0)
            for page in pages:
                sock.sendall(page)


def receive(sock: socket.socket, views: Sequence[memoryview], flags: int) -> None:
    """Fill the views from a socket."""
    for view in views:
        while view:
            got = sock.recv_into(view, len(view), flags)
            if not got:
                raise ConnectionResetError
            view = view[got:]


@contextlib.contextmanager
def limit(batches: Batches, flags: int = 0) -> Iterator[Contender]:
    """Yield a contender that uses plain sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        args = (listener.getsockname()[1], batches.page_nbytes, len(batches.all), flags)
        process = multiprocessing.get_context("spawn").Process(
            target=serve_limit, args=args, daemon=True
        )
        process.start()
        listener.settimeout(30.0)  # so that a dead child does not block this process
        sock = listener.accept()[0]
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        byte = [memoryview(bytearray(1))]

        def contender(batch: Batch) -> Samples:
            buffers = [memoryview(buffer) for buffer in batch.buffers]

            def put() -> None:
                for page in batch.pages:
                    sock.sendall(page)
                receive(sock, byte, 0)

            def get() -> None:
                sock.sendall(b"g")
                receive(sock, buffers, flags)

            return {"put": [timed(put)], "get": [timed(get)]}

        yield contender
    process.join()


# ---- the contenders ----------------------------------------------------------------------------


def without_checksum(client: Client, batch: Batch) -> Samples:
    """Run this store without checksums."""
    with mock.patch("kvstore.transports.bulk.Leaves", NoChecksum):
        return ours(client, batch)


def rival(client: Any, batch: Batch) -> Samples:
    """Run Redis."""
    keys = [batch.namespace.digest + prefix_hash for prefix_hash in batch.hashes]
    client.delete(*keys)

    def put() -> None:
        pipeline = client.pipeline(transaction=False)
        for key, page in zip(keys, batch.pages, strict=True):
            pipeline.set(key, page)
        assert all(pipeline.execute())

    def get() -> None:
        assert None not in client.mget(keys)

    return {"put": [timed(put)], "get": [timed(get)]}


# ---- the run -----------------------------------------------------------------------------


def page_rows(
    clients: dict[str, Client], redis: Any, batches: Batches, count: int, tick: Callable[[], None]
) -> list[Any]:
    """Return the rows of one page size."""
    with limit(batches) as plain, limit(batches, socket.MSG_WAITALL) as waitall:
        contenders: dict[str, Contender] = {
            LIMIT: plain,
            "the same with MSG_WAITALL": waitall,
            "bulk": functools.partial(ours, clients["bulk"]),
            "bulk without checksum": functools.partial(without_checksum, clients["bulk"]),
            "gRPC": functools.partial(ours, clients["grpc"]),
        }
        turns = {
            name: functools.partial(turn, call, batches.cycle())
            for name, call in contenders.items()
        }
        if redis is not None:
            call = functools.partial(rival, redis)
            turns["Redis"] = functools.partial(turn, call, batches.cycle(), into_buffers=False)
        samples = rounds(turns, count, WARMUPS, tick)
    batches.forget(clients["bulk"])
    if redis is not None:
        redis.flushall()
    return speed_rows(
        batches, samples, LIMIT, "bulk" if batches.page_nbytes >= AIM_NBYTES_MIN else "", AIM
    )


def speed_rows(
    batches: Batches, samples: dict[str, Samples], limit: str, aimed: str, aim: float
) -> list[Any]:
    """Return a row per contender, beside `limit`; the one named `aimed` is held against the aim."""
    seconds = {
        name: {op: median(values) for op, values in ops.items()} for name, ops in samples.items()
    }
    rows = []
    for name, found in seconds.items():
        row: dict[str, Any] = {"page KiB": batches.page_nbytes >> 10, "contender": name}
        for op in ("put", "get"):
            row[f"{op} GB/s"] = round(batches.nbytes / found[op] / 1e9, 2)
            row[f"{op} of limit"] = round(seconds[limit][op] / found[op], 2)
        met = min(row["put of limit"], row["get of limit"]) >= aim
        rows.append(row | {f"aim {aim}": ("met" if met else "missed") if name == aimed else None})
    return rows


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="rounds per page size, of 4 counted puts and gets each (%(default)s)",
    )
    options.add_argument(
        "--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)"
    )
    args = options.parse_args(argv)
    title = f"Put and get of {BATCH} pages, medians of {args.rounds * (TURN - 1)} calls"
    report = Report(title, " ".join(["python benchmarks/bulk.py", *argv]))
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        clients = {
            wire: stack.enter_context(
                Client(client_config(address=node.address, wire=wire, timeout_s=60.0))
            )
            for wire in ("bulk", "grpc")
        }
        redis = stack.enter_context(redis_client(report.notes))
        tick = stack.enter_context(progress(len(args.page_kib) * (args.rounds + WARMUPS)))
        for kib in args.page_kib:
            report.rows += page_rows(clients, redis, Batches(kib << 10, BATCH), args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
