"""Measure put and get of 16 pages over gRPC, beside a bare gRPC stream in Python.

    limit      a stream each way between this process and a server: messages of the size of ours,
               whose only field is `bytes`, by generated code. They are made before the clock
               starts, and the receiver counts their bytes: no node, no keys, no checksum, no copy
    no codec   the same with the bytes themselves as messages, which generated code would copy twice
               at either end
    gRPC       this store: put reserves, sends and commits, get looks up, holds and sends; the
               writer makes the page's checksum, the reader verifies it; the bytes end in the
               node's slots or the caller's buffers

The server is the threaded one, which moves more than the asyncio one, and accepts frames of HTTP/2
as large as our node does. The contenders take turns as in `bulk.py`. GB/s: 10^9 page bytes in the
median of all calls. Aim: put and get each at least 0.8 of the limit.

    python benchmarks/grpc_stream.py [--rounds 15] [--page-kib 4096] [--json]
"""

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from batch import TURN, Batch, Batches, Contender, ours, turn
from bulk import BATCH, NODE_FLAGS, PAGE_KIB, WARMUPS, speed_rows
from measure import Report, Samples, parser, progress, rounds, timed

from kvstore import Client, client_config
from kvstore.config import GRPC_CHUNK_NBYTES, MESSAGE_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from kvstore.tools.node_process import NodeProcess

AIM = 0.8
LIMIT, NO_CODEC, OURS = "limit: bare stream", "the same, no codec", "gRPC"
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.http2.max_frame_size", MESSAGE_NBYTES_MAX),
]
# Functions to and from the wire, the message of some bytes, and the bytes of a message.
CODEC = (
    pb.PageChunk.SerializeToString,
    pb.PageChunk.FromString,
    lambda data: pb.PageChunk(data=data),
    lambda m: m.data,
)
BARE = (None, None, lambda data: data, lambda m: m)


def serve(pipe: Any, nbytes: int, batch_count: int, codec: bool) -> None:
    """Serve as the other process.

    Each batch comes from a place of its own, as in a node.
    """
    to_wire, from_wire, message, data_of = CODEC if codec else BARE
    sizes = [
        min(GRPC_CHUNK_NBYTES, nbytes - start) for start in range(0, nbytes, GRPC_CHUNK_NBYTES)
    ]
    places = [[os.urandom(size) for size in sizes] for _ in range(batch_count)]

    def put(messages: Iterator[Any], context: Any) -> Any:
        return message(b"%d" % sum(len(data_of(one)) for one in messages))

    def get(request: Any, context: Any) -> Iterator[Any]:
        yield from map(message, places[int(data_of(request))])

    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    handlers = {
        "Put": grpc.stream_unary_rpc_method_handler(put, from_wire, to_wire),
        "Get": grpc.unary_stream_rpc_method_handler(get, from_wire, to_wire),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


@contextlib.contextmanager
def stream(batches: Batches, codec: bool) -> Iterator[Contender]:
    """Yield a contender that uses a bare gRPC stream."""
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    process = spawned.Process(
        target=serve, args=(there, batches.nbytes, len(batches.all), codec), daemon=True
    )
    process.start()
    to_wire, from_wire, message, data_of = CODEC if codec else BARE
    whole = [b"".join(batch.pages) for batch in batches.all]
    starts = range(0, batches.nbytes, GRPC_CHUNK_NBYTES)
    ready = [[pages[start : start + GRPC_CHUNK_NBYTES] for start in starts] for pages in whole]
    del whole
    assert here.poll(30.0), "the other process has died"
    with grpc.insecure_channel(f"127.0.0.1:{here.recv()}", OPTIONS) as channel:
        send = channel.stream_unary("/bare/Put", to_wire, from_wire)
        receive = channel.unary_stream("/bare/Get", to_wire, from_wire)

        def contender(batch: Batch) -> Samples:
            def put() -> None:
                assert int(data_of(send(map(message, ready[batch.number])))) == batch.nbytes

            def get() -> None:
                replies = receive(message(b"%d" % batch.number))
                assert sum(len(data_of(one)) for one in replies) == batch.nbytes

            return {"put": [timed(put)], "get": [timed(get)]}

        yield contender
    process.terminate()
    process.join()


def page_rows(client: Client, batches: Batches, count: int, tick: Callable[[], None]) -> list[Any]:
    """Return the rows of one page size."""
    with stream(batches, codec=True) as bare, stream(batches, codec=False) as no_codec:
        turns = {
            LIMIT: functools.partial(turn, bare, batches.cycle(), into_buffers=False),
            NO_CODEC: functools.partial(turn, no_codec, batches.cycle(), into_buffers=False),
            OURS: functools.partial(turn, functools.partial(ours, client), batches.cycle()),
        }
        samples = rounds(turns, count, WARMUPS, tick)
    batches.forget(client)
    return speed_rows(batches, samples, LIMIT, OURS, AIM)


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
    title = f"Put and get of {BATCH} pages over gRPC, medians of {args.rounds * (TURN - 1)} calls"
    report = Report(title, " ".join(["python benchmarks/grpc_stream.py", *argv]))
    with (
        NodeProcess(*NODE_FLAGS) as node,
        Client(client_config(address=node.address, wire="grpc", timeout_s=60.0)) as client,
        progress(len(args.page_kib) * (args.rounds + WARMUPS)) as tick,
    ):
        for kib in args.page_kib:
            report.rows += page_rows(client, Batches(kib << 10, BATCH), args.rounds, tick)
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
