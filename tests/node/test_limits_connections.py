"""Limits of connections, descriptors and slow transfers: one peer cannot keep others out."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from http2 import GREETING
from known_pages import Pages
from local_nodes import Connect, ConnectRaw, StartNode, settle
from waiting import PATIENT

from kvstore import Client, ClientConfig, Exhausted, PutOutcome
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from node.server import Node
from node.serving.bulk import BulkServer
from node.serving.limits import peer_of

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
PAGE = 1 << 20
GRPC_VERSION = tuple(map(int, grpc.__version__.split(".")[:2]))
GRPC_COUNTS = (1, 63)  # the first version that counts connections


@pytest.fixture
def dial() -> Iterator[Callable[..., socket.socket]]:
    """Return a function that connects to a port or a path, and sends some bytes."""
    sockets: list[socket.socket] = []

    def to(where: int | str, say: bytes = b"") -> socket.socket:
        if isinstance(where, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(where)
        else:
            sock = socket.create_connection(("127.0.0.1", where))
        sockets.append(sock)
        sock.settimeout(20.0)
        sock.sendall(say)
        return sock

    yield to
    for sock in sockets:
        sock.close()


def is_closed(sock: socket.socket, within_s: float) -> bool:
    """Return whether the other side closes the connection within the time."""
    end = time.monotonic() + within_s
    try:
        while (left_s := end - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv(4096):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def works(node: Node, pages: Pages, wire: str) -> None:
    with Client(
        ClientConfig(address=f"127.0.0.1:{node.grpc.port}", wire=wire, **PATIENT)
    ) as client:
        key = pages.keys(time.monotonic_ns())
        assert pages.put(client, key) == [PutOutcome.STORED]
        assert pages.get(client, key) == [True]


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("pid 7", "pid 7"),
    ],
)
def test_peer_grouping_of_addresses(host: str, peer: str) -> None:
    assert peer_of(host) == peer


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_silent_connections_do_not_block_other_clients(
    start_node: StartNode, dial: Callable[..., socket.socket], pages: Pages, wire: str
) -> None:
    node = start_node(sessions_max=8, stall_s=30.0)
    assert node.shm is not None
    for where in (node.bulk.port, node.shm.path, node.grpc.port):
        for _ in range(24):
            dial(where)
    works(node, pages, wire)


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_connections_idle_after_hello_do_not_block_other_clients(
    start_node: StartNode, dial: Callable[..., socket.socket], pages: Pages, wire: str
) -> None:
    node = start_node(sessions_max=8, stall_s=30.0)
    header = pb.BulkRequest(hello=pb.HelloRequest()).SerializeToString()
    for _ in range(24):
        dial(node.bulk.port, pack_fixed(len(header), 0) + header).recv(1)
    works(node, pages, wire)


def test_session_begins_at_the_first_valid_frame(start_node: StartNode, raw: ConnectRaw) -> None:
    node = start_node(stall_s=30.0)
    silent, nonsense, good = raw(node), raw(node), raw(node)
    nonsense.send(pack_fixed(4, 0) + b"\xff\xff\xff\xff")
    assert nonsense.ending().code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert node.sessions.count == 0
    assert good.ask(hello=pb.HelloRequest()).hello.bulk_port
    assert node.sessions.count == 1
    assert silent.ask(hello=pb.HelloRequest()).hello.bulk_port


def test_slow_first_frame_is_timed_out(
    start_node: StartNode, dial: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("serving.connection", "gateway.gateway", "gateway.call"):
        monkeypatch.setattr(f"node.{module}.REQUEST_S_MAX", 0.5)
    node = start_node(stall_s=30.0)
    assert node.shm is not None
    silent = [dial(where) for where in (node.bulk.port, node.shm.path, node.grpc.port)]
    assert [is_closed(sock, 10.0) for sock in silent] == [True] * 3
    slow = dial(node.bulk.port)
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in pack_fixed(300, 0) + bytes(300):  # would take 15 s
            slow.sendall(bytes([byte]))
            threading.Event().wait(0.05)
    assert time.monotonic() - began < 9.0


def test_longest_idle_connection_is_evicted_first(start_node: StartNode, raw: ConnectRaw) -> None:
    node = start_node(sessions_max=4, stall_s=30.0)  # two of them for one peer
    first, second = raw(node), raw(node)
    for connection in (first, second, first):
        assert connection.ask(hello=pb.HelloRequest()).hello.bulk_port
        while any(connection.busy for connection in node.bulk._connections):
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
    third = raw(node)
    assert third.ask(hello=pb.HelloRequest()).hello.bulk_port
    assert first.ask(hello=pb.HelloRequest()).hello.bulk_port
    with pytest.raises(ConnectionError):
        second.ask(hello=pb.HelloRequest())
    until = time.monotonic() + 60.0
    # The peer sees the end before the node's counter does
    while node.bulk.count > 2 and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert node.bulk.count == 2


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_oldest_silent_connections_are_evicted_at_the_peer_limit(
    start_node: StartNode, dial: Callable[..., socket.socket], wire: str
) -> None:
    node = start_node(sessions_max=4, stall_s=30.0)  # two of them for one peer
    assert node.shm is not None
    silent = [dial(node.shm.path if wire == "shm" else node.bulk.port) for _ in range(5)]
    assert [is_closed(sock, 10.0) for sock in silent[:3]] == [True] * 3
    assert [is_closed(sock, 0.2) for sock in silent[3:]] == [False] * 2


def test_connection_without_a_request_is_evicted_first(
    start_node: StartNode, raw: ConnectRaw, dial: Callable[..., socket.socket]
) -> None:
    node = start_node(sessions_max=4, stall_s=30.0)  # two of them for one peer
    asked = raw(node)
    assert asked.ask(hello=pb.HelloRequest()).hello.bulk_port
    while any(connection.busy for connection in node.bulk._connections):
        threading.Event().wait(0.01)
    silent = dial(node.bulk.port)
    while node.bulk.count < 2:
        threading.Event().wait(0.01)
    assert raw(node).ask(hello=pb.HelloRequest()).hello.bulk_port
    assert is_closed(silent, 10.0)
    assert asked.ask(hello=pb.HelloRequest()).hello.bulk_port


def test_busy_connections_stay_and_one_more_is_refused(
    start_node: StartNode, raw: ConnectRaw, connect: Connect
) -> None:
    node = start_node(sessions_max=2, stall_s=30.0)
    pages = Pages("busy")
    connect(node, "grpc").open(pages.namespace)
    writer = raw(node)
    put = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=pages.keys(1), page_nbytes=4096
    )
    assert list(writer.ask(put=put).put.verdicts) == [pb.WRITE]
    error = raw(node).ending()
    assert (error.code, node.bulk.count) == (EXHAUSTED, 1)
    assert (
        "bulk connections: 1 of 127.0.0.1 and 1 in all; allowed are 1 for one peer and 2 in all"
        in error.message
    )
    assert "sessions_max" in error.message
    client = connect(node, "bulk")
    with pytest.raises(Exhausted, match="bulk connections"):
        client.lookup(pages.namespace, pages.keys(1))
    writer.send(pack_fixed(0, 4096) + bytes(4096))
    assert writer.ask(commit=pb.CommitRequest(leaves=[b"c" * 8])).commit.stored == 1
    # No pause, because a refusal is no failure of the node
    assert client.lookup(pages.namespace, pages.keys(1)).prefix_pages == 1


@pytest.mark.skipif(GRPC_VERSION < GRPC_COUNTS, reason="gRPC does not count its connections")
def test_grpc_limits_its_connections(
    start_node: StartNode, dial: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.gateway.supervisor.CONNECTIONS_MAX", 3)
    node = start_node(sessions_max=1)
    many = [dial(node.grpc.port, GREETING) for _ in range(10)]
    deadline = time.monotonic() + 60.0
    while sum(there := [not is_closed(sock, 0.1) for sock in many]) > 3:
        assert time.monotonic() < deadline
    assert sum(there) == 3


def trickle(writer: Any, nbytes: int) -> None:
    """Send a page at 320 KiB/s, above 256 KiB/s but below 1 MiB/s, and commit it."""
    for _ in range(0, nbytes, 16 << 10):
        writer.send(bytes(16 << 10))
        threading.Event().wait(0.05)
    assert not writer.ask(commit=pb.CommitRequest(leaves=[b"c" * 8])).commit.stored


def test_steadily_trickling_put_is_timed_out(
    start_node: StartNode, raw: ConnectRaw, connect: Connect
) -> None:
    node, nbytes = start_node(stall_s=1.0, batch_nbytes_max=4 << 20), PAGE
    pages = Pages("trickle", nbytes)
    connect(node, "grpc").open(pages.namespace)
    writer = raw(node)
    put = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=pages.keys(1), page_nbytes=nbytes
    )
    assert list(writer.ask(put=put).put.verdicts) == [pb.WRITE]
    writer.send(pack_fixed(0, nbytes))
    with pytest.raises(ConnectionError):
        trickle(writer, nbytes)
    settle(node, sessions=0)
    assert node.tier.visible_count == 0


def test_uncommitted_puts_leave_room_for_others(
    start_node: StartNode, raw: ConnectRaw, connect: Connect
) -> None:
    """Five writers each try to reserve a quarter of the RAM."""
    node = start_node(
        ram_nbytes=16 << 20, batch_nbytes_max=4 << 20, batch_keys_max=16, stall_s=30.0
    )
    pages = Pages("reserved", PAGE)
    client = connect(node, "shm")  # counts as another peer
    pages.put(client, pages.keys(0, 1))

    def put(connection: Any, *numbers: int) -> pb.BulkReply:
        keys = pages.keys(*numbers)
        request = pb.PutRequest(
            namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=PAGE
        )
        reply: pb.BulkReply = connection.ask(put=request)
        return reply

    writers = [raw(node) for _ in range(5)]
    assert list(put(writers[0], 10, 11, 12, 13).put.verdicts) == [pb.WRITE] * 4
    for number, writer in enumerate(writers[1:], start=2):
        error = put(writer, *range(number * 10, number * 10 + 4)).error
        assert error.code == EXHAUSTED
        assert (
            "bytes reserved by puts that are not committed: 4194304 of 127.0.0.1" in error.message
        )
    assert list(put(writers[1], 0, 1).put.verdicts) == [pb.EXISTS] * 2, (
        "existing pages must reserve nothing"
    )
    assert pages.put(client, pages.keys(*range(50, 54))) == [PutOutcome.STORED] * 4
    assert all(pages.get(client, pages.keys(0, 1, 50, 51, 52, 53)))
    writers[0].close()
    while node.tier.writing_count:
        threading.Event().wait(0.01)
    assert list(put(writers[2], 30, 31, 32, 33).put.verdicts) == [pb.WRITE] * 4


def test_process_holding_half_of_the_ram_is_refused(
    start_node: StartNode, connect: Connect
) -> None:
    node = start_node(ram_nbytes=16 << 20, batch_nbytes_max=4 << 20, batch_keys_max=16)
    pages = Pages("held", PAGE)
    client = connect(node, "shm")
    for first in (0, 4, 8):
        pages.put(client, pages.keys(*range(first, first + 4)))
    with (
        client.open_get(pages.namespace, pages.keys(*range(4))),
        client.open_get(pages.namespace, pages.keys(*range(4, 8))),
    ):
        with pytest.raises(Exhausted, match="bytes held by reads in shared memory: 8388608 of pid"):
            client.open_get(pages.namespace, pages.keys(8)).__enter__()
        assert pages.get(connect(node, "bulk"), pages.keys(8)) == [True]
    assert pages.get(client, pages.keys(8)) == [True]


def test_large_requests_are_refused_before_they_are_received(
    start_node: StartNode, raw: ConnectRaw
) -> None:
    node = start_node(stall_s=30.0)
    writers = [raw(node) for _ in range(9)]
    for writer in writers[:8]:
        writer.send(pack_fixed(2 << 20, 0) + b"x")  # and no more bytes
    end = time.monotonic() + 60.0
    while node.service.requests.used < 128 << 20:
        assert time.monotonic() < end
        threading.Event().wait(0.01)
    writers[8].send(pack_fixed(2 << 20, 0) + b"x")
    reply, _ = writers[8].reply()
    assert reply.error.code == EXHAUSTED
    assert "bytes of large requests: 134217728 of 127.0.0.1" in reply.error.message
    small = raw(node)
    assert small.ask(hello=pb.HelloRequest()).hello.bulk_port
    for writer in (small, *writers):
        writer.close()
    settle(node)
    while node.service.requests.used:
        threading.Event().wait(0.01)


def test_connection_without_a_descriptor_is_closed(
    node: Node, dial: Callable[..., socket.socket]
) -> None:
    """If it stayed in the backlog, `accept` would fail for it again at once."""
    server = BulkServer("127.0.0.1", 0, node.service, 30.0, 4)
    waiting = dial(server.port)
    server._accept_failed(OSError(errno.EMFILE, "no descriptor left"))
    assert is_closed(waiting, 5.0)
    server.stop(0.0)
