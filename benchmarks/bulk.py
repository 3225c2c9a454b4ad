"""Measure put and get of 16 pages over bulk TCP, beside plain sockets.

    limit      two Python processes, `sendall` and `recv_into` page by page between warm buffers,
               one byte of acknowledgement a batch, TCP_NODELAY: no node, no keys, no checksum.
               Where bulk splits a batch over several connections, as many sockets are the limit
    bulk       this store: put reserves, sends and commits, get looks up, holds and sends; the
               writer makes the page's checksum, the reader verifies it
    others     this store without the checksum and over gRPC

All contenders send the same pages, store them in equally many places and receive into the same
buffers. Each of these is 128 MiB, which no cache holds. They take turns of five puts and gets, of
which the first does not count: in it the scheduler moves two processes that begin to talk to two
cores, and the bytes are compared. GB/s: 10^9 page bytes in the median of all calls. Aim: put and
get each at least 0.85 of the limit for pages of 1 MiB and above. rivals.py has other stores and
more clients.

    python benchmarks/bulk.py [--rounds 15] [--page-kib 4096 --pages 64] [--json]
"""

import contextlib
import functools
import multiprocessing
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from batch import TURN, Batch, Batches, Contender, NoChecksum, ours, turn
from measure import Report, Samples, median, parser, progress, rounds, timed

from kvstore import Client, client_config
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.parallel import split, stream_count

PAGE_KIB = (256, 1024, 4096)
BATCH = 16
WARMUPS = 2
AIM = 0.85
AIM_NBYTES_MIN = 1 << 20
RAM_NBYTES_MIN = 512 << 20
NODE_FLAGS = (
    *("--ram-bytes", str(RAM_NBYTES_MIN), "--extent-bytes", "64MiB"),
    *("--log-level", "WARNING"),
)
ONE_SOCKET = "sendall/recv_into"
LIMIT = f"limit: {ONE_SOCKET}"
Bytes = bytes | bytearray | memoryview


# ---- the limit ---------------------------------------------------------------------------

# What is asked, the batch's place, and the bytes of each of its pages or of the whole message.
HEADER = struct.Struct("!cII")
PUT, GET, ECHO = b"p", b"g", b"e"
ANSWER_NBYTES = 16  # to an echo


class BareClient:
    """Send pages to `serve_bare` and get them back."""

    def __init__(self, sock: socket.socket, flags: int = 0) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._flags = flags
        self._answer = memoryview(bytearray(ANSWER_NBYTES))

    def put(self, place: int, pages: Sequence[Bytes]) -> None:
        """Send a batch and wait until all of it was received."""
        self._sock.send(HEADER.pack(PUT, place, len(pages[0])), socket.MSG_MORE)
        for page in pages:
            self._sock.sendall(page)
        receive(self._sock, [self._answer[:1]], 0)

    def get(self, place: int, buffers: Sequence[Bytes]) -> None:
        """Receive a batch that was sent before."""
        self._sock.sendall(HEADER.pack(GET, place, len(buffers[0])))
        receive(self._sock, [memoryview(buffer) for buffer in buffers], self._flags)

    def echo(self, message: bytes) -> None:
        """Send a message and wait for a short answer."""
        self._sock.sendall(HEADER.pack(ECHO, 0, len(message)) + message)
        receive(self._sock, [self._answer], 0)


def serve_bare(sock: socket.socket, flags: int = 0, count: int = BATCH) -> None:
    """Receive batches of `count` pages and send them back until closed.

    Each batch has a place of its own, as it has in a node.
    """
    places: dict[int, list[memoryview]] = {}
    header, message = memoryview(bytearray(HEADER.size)), memoryview(bytearray(1 << 20))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):
        while True:
            receive(sock, [header], 0)
            asked, place, nbytes = HEADER.unpack(header)
            if asked == PUT:
                pages = places.get(place)
                if pages is None or len(pages[0]) != nbytes:
                    pages = [memoryview(bytearray(nbytes)) for _ in range(count)]
                    places[place] = pages
                receive(sock, pages, flags)
                sock.sendall(b"k")
            elif asked == GET:
                for page in places[place]:
                    sock.sendall(page)
            else:
                receive(sock, [message[:nbytes]], 0)
                sock.sendall(message[:ANSWER_NBYTES])


def receive(sock: socket.socket, views: Sequence[memoryview], flags: int) -> None:
    """Fill the views from a socket."""
    for view in views:
        while view:
            got = sock.recv_into(view, len(view), flags)
            if not got:
                raise ConnectionResetError
            view = view[got:]


def serve_limit(port: int, flags: int, count: int) -> None:
    """Serve one client, as the other process."""
    serve_bare(socket.create_connection(("127.0.0.1", port)), flags, count)


@contextlib.contextmanager
def bare_client(flags: int, count: int) -> Iterator[BareClient]:
    """Yield a client of batches of `count` pages with a process of its own at the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=serve_limit, args=(listener.getsockname()[1], flags, count), daemon=True
        )
        process.start()
        listener.settimeout(30.0)  # so that a dead child does not block this process
        sock = listener.accept()[0]
    with sock:
        yield BareClient(sock, flags)
    process.join()


@contextlib.contextmanager
def limit(flags: int = 0, pages: int = BATCH, streams: int = 1) -> Iterator[Contender]:
    """Yield a contender that uses plain sockets: so many, each with a thread here, for a batch."""
    parts = split(pages, streams)
    with contextlib.ExitStack() as stack:
        counts = [part.stop - part.start for part in parts]
        clients = [stack.enter_context(bare_client(flags, count)) for count in counts]
        threads = stack.enter_context(ThreadPoolExecutor(streams))

        def each(call: Callable[[BareClient, slice], None]) -> None:
            if streams == 1:
                call(clients[0], parts[0])
            else:
                list(threads.map(call, clients, parts))

        def contender(batch: Batch) -> Samples:
            def put_part(client: BareClient, part: slice) -> None:
                client.put(batch.number, batch.pages[part])

            def get_part(client: BareClient, part: slice) -> None:
                client.get(batch.number, batch.buffers[part])

            return {
                "put": [timed(lambda: each(put_part))],
                "get": [timed(lambda: each(get_part))],
            }

        yield contender


# ---- the contenders ----------------------------------------------------------------------------


def without_checksum(client: Client, batch: Batch) -> Samples:
    """Run this store without checksums."""
    with mock.patch("kvstore.transports.bulk.Leaves", NoChecksum):
        return ours(client, batch)


# ---- the run -----------------------------------------------------------------------------


def page_rows(
    clients: dict[str, Client], batches: Batches, count: int, tick: Callable[[], None]
) -> list[Any]:
    """Return the rows of one page size."""
    pages = len(batches.all[0].pages)
    streams = stream_count(pages, batches.page_nbytes)
    with (
        limit(pages=pages) as plain,
        limit(socket.MSG_WAITALL, pages) as waitall,
        limit(pages=pages, streams=streams) as several,
    ):
        several_name = f"limit: {streams} such sockets"
        contenders: dict[str, Contender] = {
            (LIMIT if streams == 1 else ONE_SOCKET): plain,
            "the same with MSG_WAITALL": waitall,
            **({several_name: several} if streams > 1 else {}),
            "bulk": functools.partial(ours, clients["bulk"]),
            "bulk without checksum": functools.partial(without_checksum, clients["bulk"]),
            "gRPC": functools.partial(ours, clients["grpc"]),
        }
        turns = {
            name: functools.partial(turn, call, batches.cycle())
            for name, call in contenders.items()
        }
        samples = rounds(turns, count, WARMUPS, tick)
    batches.forget(clients["bulk"])
    aimed = "bulk" if batches.page_nbytes >= AIM_NBYTES_MIN else ""
    return speed_rows(batches, samples, LIMIT if streams == 1 else several_name, aimed, AIM)


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
    options.add_argument("--pages", type=int, default=BATCH, help="of a batch (%(default)s)")
    args = options.parse_args(argv)
    title = f"Put and get of {args.pages} pages, medians of {args.rounds * (TURN - 1)} calls"
    report = Report(title, " ".join(["python benchmarks/bulk.py", *argv]))
    with contextlib.ExitStack() as stack:
        # One address may reserve a quarter of a node's RAM.
        ram_nbytes = max(RAM_NBYTES_MIN, 5 * args.pages * max(args.page_kib) << 10)
        node = stack.enter_context(NodeProcess(*NODE_FLAGS, "--ram-bytes", str(ram_nbytes)))
        clients = {
            wire: stack.enter_context(
                Client(client_config(address=node.address, wire=wire, timeout_s=60.0))
            )
            for wire in ("bulk", "grpc")
        }
        tick = stack.enter_context(progress(len(args.page_kib) * (args.rounds + WARMUPS)))
        for kib in args.page_kib:
            report.rows += page_rows(clients, Batches(kib << 10, args.pages), args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
