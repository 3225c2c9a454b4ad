"""Measure put and get of 16 pages with TLS, without, and through Python's own TLS socket.

    limit      two Python processes, `sendall` and `recv_into` page by page, as in `bulk.py`: plain,
               and over `ssl`
    bulk       this store, plain and with TLS: encrypted in memory beside the socket
               (`kvstore.transports.tls`)
    gRPC       this store, plain and with TLS: gRPC's own library encrypts, in its threads

TLS 1.3 with certificates on P-256 on both sides, made for this run. The contenders take turns as in
`bulk.py`. GB/s: 10^9 page bytes in the median of all calls, and the speeds of the 5th and the 95th
percentile; the ratio is that to the same wire without TLS. `--busy` adds a thread to this process
that runs Python all the time, as an engine's may: each record of 16 KiB then waits for its turn at
the interpreter.

    python benchmarks/tls.py [--rounds 10] [--page-kib 1024 4096] [--busy] [--json]
"""

import contextlib
import functools
import multiprocessing
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batch import TURN, Batches, Contender, ours, turn
from bulk import BATCH, NODE_FLAGS, WARMUPS, limit, receive
from measure import Report, Samples, median, parser, percentile, progress, rounds, timed

from kvstore import Client, client_config
from kvstore.cli.authority import Authority
from kvstore.tools.node_process import NodeProcess

PAGE_KIB = (1024, 4096)
# The contender without TLS of each one
PLAIN = {
    "sockets, TLS": "sockets",
    "bulk, TLS": "bulk",
    "gRPC, TLS": "gRPC",
}


# ---- Python's own TLS --------------------------------------------------------------------


def serve(port: int, page_nbytes: int, batch_count: int, cert: str, key: str) -> None:
    """Serve as the other process, as in `bulk.py`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    places = [
        [memoryview(bytearray(page_nbytes)) for _ in range(BATCH)] for _ in range(batch_count)
    ]
    plain = socket.create_connection(("127.0.0.1", port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = 0
    with context.wrap_socket(plain, server_side=True) as sock, contextlib.suppress(ConnectionError):
        while True:
            pages = places[number % batch_count]
            receive(sock, pages, 0)
            sock.sendall(b"k")
            receive(sock, [memoryview(bytearray(1))], 0)
            for page in pages:
                sock.sendall(page)
            number += 1


@contextlib.contextmanager
def tls_sockets(batches: Batches, ca: str, pair: tuple[str, str]) -> Iterator[Contender]:
    """Yield a contender that uses TLS sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        args = (listener.getsockname()[1], batches.page_nbytes, len(batches.all), *pair)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=args, daemon=True)
        process.start()
        listener.settimeout(30.0)  # so that a dead child does not block this process
        plain = listener.accept()[0]
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.settimeout(None)
    with ssl.create_default_context(cafile=ca).wrap_socket(
        plain, server_hostname="localhost"
    ) as sock:

        def contender(batch: Any) -> Samples:
            buffers = [memoryview(buffer) for buffer in batch.buffers]

            def put() -> None:
                for page in batch.pages:
                    sock.sendall(page)
                receive(sock, [memoryview(bytearray(1))], 0)

            def get() -> None:
                sock.sendall(b"g")
                receive(sock, buffers, 0)

            return {"put": [timed(put)], "get": [timed(get)]}

        yield contender
    process.join()


# ---- the run -----------------------------------------------------------------------------


def page_rows(
    clients: dict[str, Client],
    batches: Batches,
    files: tuple[str, tuple[str, str]],
    count: int,
    tick: Callable[[], None],
) -> list[dict[str, Any]]:
    """Return the rows of one page size."""
    with limit() as plain, tls_sockets(batches, *files) as tls:
        contenders: dict[str, Contender] = {"sockets": plain, "sockets, TLS": tls}
        contenders |= {name: functools.partial(ours, client) for name, client in clients.items()}
        turns = {
            name: functools.partial(turn, call, batches.cycle())
            for name, call in contenders.items()
        }
        samples = rounds(turns, count, WARMUPS, tick)
    for client in clients.values():
        batches.forget(client)
    rows = []
    for name, ops in samples.items():
        row: dict[str, Any] = {"page KiB": batches.page_nbytes >> 10, "contender": name}
        for op, seconds in ops.items():
            slow, fast = (
                batches.nbytes / percentile(seconds, percent) / 1e9 for percent in (95, 5)
            )
            row[f"{op} GB/s"] = round(batches.nbytes / median(seconds) / 1e9, 2)
            row[f"{op} 90 %"] = f"{slow:.2f}-{fast:.2f}"
            beside = samples.get(PLAIN.get(name, ""))
            row[f"{op} of plain"] = (
                round(median(beside[op]) / median(seconds), 2) if beside else None
            )
        rows.append(row)
    return rows


@contextlib.contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Run a thread that executes Python all the time."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=run)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def clients_of(
    plain: NodeProcess, secured: NodeProcess, files: dict[str, str], stack: Any
) -> dict[str, Client]:
    """Return a client per transport, plain and with TLS."""
    clients = {}
    for name, wire in (("bulk", "bulk"), ("gRPC", "grpc")):
        for node, tls, suffix in ((plain, {}, ""), (secured, files, ", TLS")):
            config = client_config(
                address=node.address, wire=wire, timeout_s=60.0, connect_timeout_s=20.0, **tls
            )
            clients[name + suffix] = stack.enter_context(Client(config))
    return clients


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="rounds per page size, of 4 counted puts and gets each (%(default)s)",
    )
    options.add_argument(
        "--page-kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes (%(default)s)"
    )
    options.add_argument(
        "--busy", action="store_true", help="beside a thread of this process that runs Python"
    )
    args = options.parse_args(argv)
    title = f"Put and get of {BATCH} pages with TLS, medians of {args.rounds * (TURN - 1)} calls"
    report = Report(title, " ".join(["python benchmarks/tls.py", *argv]))
    report.notes.append(ssl.OPENSSL_VERSION)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority = Authority.found(folder, "benchmark", 1.0)
        ca, node = (
            str(authority.path),
            tuple(map(str, authority.node("node", ["localhost", "127.0.0.1"], 1.0))),
        )
        shown = tuple(map(str, authority.client("client", "reader", 1.0)))
        flags = ("--tls-cert", node[0], "--tls-key", node[1], "--tls-client-ca", ca)
        plain = stack.enter_context(NodeProcess(*NODE_FLAGS))
        secured = stack.enter_context(NodeProcess(*NODE_FLAGS, *flags))
        clients = clients_of(
            plain, secured, {"tls_ca": ca, "tls_cert": shown[0], "tls_key": shown[1]}, stack
        )
        tick = stack.enter_context(progress(len(args.page_kib) * (args.rounds + WARMUPS)))
        stack.enter_context(busy(args.busy))
        for kib in args.page_kib:
            batches = Batches(kib << 10, BATCH)
            report.rows += page_rows(clients, batches, (ca, (node[0], node[1])), args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
