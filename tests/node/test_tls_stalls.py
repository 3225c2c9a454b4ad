"""Stalling and trickling clients over TLS lose their connections, as without TLS."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from authorities import client_context, of_client, of_node, pair, server_context
from known_pages import Pages
from local_nodes import Connect, StartNode, settle
from waiting import wait_until

from kvstore import ClientConfig
from kvstore.checksum import leaves
from kvstore.cli.authority import Authority
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.tls import TlsFrameSocket
from node.server import Node

PAGE_NBYTES = 1 << 20
STALL_S = 2.0


@pytest.fixture(scope="module")
def node(start_node: StartNode, ours: Authority) -> Node:
    return start_node(**of_node(ours), ram_nbytes=16 << 20, stall_s=STALL_S)


class Greeted(TlsFrameSocket):
    """A connection to the bulk port after its TLS handshake, which sends anything."""

    def __init__(self, node: Node, authority: Authority) -> None:
        context = client_context(authority, **pair(authority, "client"))
        super().__init__(
            socket.create_connection(("127.0.0.1", node.bulk.port)), context, "localhost"
        )
        self.arm(60.0)
        self.handshake()

    def ask(self, **op: Any) -> pb.BulkReply:
        self.send_frame(pb.BulkRequest(**op).SerializeToString())
        return pb.BulkReply.FromString(self.recv_frame(1 << 22)[0])


@pytest.fixture
def greeted(node: Node, ours: Authority) -> Iterator[Greeted]:
    made = Greeted(node, ours)
    yield made
    made.close()


@pytest.fixture
def space(request: pytest.FixtureRequest, node: Node, connect: Connect, ours: Authority) -> Pages:
    """Return a namespace with pages 0 to 3 stored."""
    pages = Pages(request.node.name, PAGE_NBYTES)
    pages.put(connect(node, **of_client(ours)), pages.keys(*range(4)))
    return pages


def put_of(space: Pages, *numbers: int) -> pb.PutRequest:
    keys = space.keys(*numbers)
    return pb.PutRequest(
        namespace=space.namespace.digest, prefix_hashes=keys, page_nbytes=PAGE_NBYTES
    )


@pytest.mark.parametrize("crumb_nbytes", [0, 1])
def test_stalled_or_trickling_put_is_aborted_over_tls(
    node: Node, greeted: Greeted, space: Pages, crumb_nbytes: int
) -> None:
    assert list(greeted.ask(put=put_of(space, 10, 11)).put.verdicts) == [pb.WRITE] * 2
    greeted.send_frame(b"", 2 * PAGE_NBYTES)
    greeted.send(space.content(space.key(10))[: PAGE_NBYTES // 2])
    ended = threading.Event()

    def trickle() -> None:
        while crumb_nbytes and not ended.wait(0.05):
            try:
                greeted.send(bytes(crumb_nbytes))
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    error = pb.BulkReply.FromString(greeted.recv_frame(1 << 20)[0]).error
    assert "took too long and is aborted" in error.message
    ended.set()
    thread.join()
    wait_until(lambda: not node.tier.writing_count)
    settle(node, sessions=None)


def test_reader_that_does_not_read_is_disconnected_over_tls(
    node: Node, greeted: Greeted, space: Pages
) -> None:
    request = pb.GetRequest(namespace=space.namespace.digest, prefix_hashes=space.keys(0, 1, 2, 3))
    greeted._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(8):  # more than the kernel buffers
        greeted.send_frame(pb.BulkRequest(get=request).SerializeToString())
    wait_until(lambda: node.tier.held_count)
    wait_until(lambda: not node.tier.held_count)
    settle(node, sessions=None)


def test_put_in_records_of_any_size_is_stored_intact(
    node: Node, greeted: Greeted, space: Pages, connect: Connect, ours: Authority, seed: int
) -> None:
    assert list(greeted.ask(put=put_of(space, 20)).put.verdicts) == [pb.WRITE]
    page, rng, at = space.content(space.key(20)), random.Random(seed), 0
    greeted.send_frame(b"", PAGE_NBYTES)
    while at < len(page):
        step = rng.choice((1, 100, 4096, 16 << 10, 70_000, 300_000))
        greeted.send(page[at : at + step])
        at += step
    greeted.ask(commit=pb.CommitRequest(leaves=[leaves(memoryview(page))]))
    assert space.get(connect(node, **of_client(ours)), space.keys(20)) == [True]


@pytest.mark.parametrize("greets", [False, True])
def test_connect_to_a_hanging_tls_node_keeps_its_deadline(
    ours: Authority, by_deadline: Callable[..., None], greets: bool
) -> None:
    """The node hangs before its handshake, or after it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    kept: list[Any] = []

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            kept.append(sock)
            if greets:
                made = TlsFrameSocket(sock, server_context(ours))
                made.arm(20.0)
                made.handshake()

    thread = threading.Thread(target=accept)
    thread.start()
    config = ClientConfig(tls_ca=str(ours.path), timeout_s=60.0, connect_timeout_s=30.0)
    wires = []

    def prepare(name: str) -> Callable[[], object]:
        wires.append(BulkWire("127.0.0.1", listener.getsockname()[1], config))
        return lambda wire=wires[-1]: wire.connect(Deadline(0.3))

    try:
        by_deadline(["bulk"], 0.3, prepare)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for sock in kept:
            sock.close()
        for wire in wires:
            wire.close()
