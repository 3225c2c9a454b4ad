"""Bulk connections that break the rules get one error or are closed.

Other clients are not disturbed, and no slot, hold or session leaks.
"""

import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Bystander, Connect, ConnectRaw, StartNode, settle

from kvstore.checksum import leaves
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from node.auth.access import Caller
from node.memory.inventory import Inventory
from node.server import Node
from node.serving.bulk import BulkConnection
from node.serving.limits import REQUEST_S_MAX

CODE = grpc.StatusCode.UNIMPLEMENTED.value[0]
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
PAGE = 64 << 10


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node that soon ends transfers that stall."""
    return start_node(ram_nbytes=16 << 20, stall_s=2.0)


@pytest.fixture
def space(request: pytest.FixtureRequest, node: Node, connect: Connect) -> Pages:
    """Return a namespace whose pages 0 to 15, of 64 KiB each, are stored."""
    pages = Pages(request.node.name, PAGE)
    pages.put(connect(node), pages.keys(*range(16)))
    return pages


def put_of(space: Pages, *numbers: int) -> pb.PutRequest:
    keys = space.keys(*numbers)
    return pb.PutRequest(namespace=space.namespace.digest, prefix_hashes=keys, page_nbytes=PAGE)


def get_of(space: Pages, *numbers: int) -> pb.GetRequest:
    return pb.GetRequest(namespace=space.namespace.digest, prefix_hashes=space.keys(*numbers))


def frame(**op: Any) -> bytes:
    header = pb.BulkRequest(**op).SerializeToString()
    return pack_fixed(len(header), 0) + header


NO_FRAMES = {
    "zeros": bytes(64),
    "another protocol": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "another version": struct.pack("<2sBBIQ", b"KV", 9, 0, 0, 0),
    "header too long": struct.pack("<2sBBIQ", b"KV", 2, 0, (2 << 20) + 1, 0),
    "header longest": struct.pack("<2sBBIQ", b"KV", 2, 0, 2**32 - 1, 0),
    "no protobuf": pack_fixed(4, 0) + b"\xff\xff\xff\xff",
    "text that is no UTF-8": pack_fixed(8, 0) + b"\x12\x06\x0a\x04\x0a\x02\xff\xff",
    "no operation": pack_fixed(0, 0),
    "unknown operation": pack_fixed(3, 0) + b"\xc2\x0c\x00",
    "payload with a request": pack_fixed(0, 1),
    "payload of 2^64 bytes": pack_fixed(0, 2**64 - 1),
    "commit without a put": frame(commit=pb.CommitRequest(leaves=[b"c" * 8])),
    "empty commit without a put": frame(commit=pb.CommitRequest()),
}


@pytest.mark.parametrize("what", NO_FRAMES)
def test_invalid_request_gets_one_error_and_the_connection_ends(
    node: Node, raw: ConnectRaw, what: str
) -> None:
    with Bystander(node):
        connection = raw(node)
        connection.send(NO_FRAMES[what])
        error = connection.ending()
        assert error is not None
        assert error.code == CODE
        assert error.message
    settle(node)


def test_frame_without_end_is_timed_out(node: Node, raw: ConnectRaw, space: Pages) -> None:
    """A partial frame after the hello times out; test_limits_connections covers the first frame."""
    whole = frame(lookup=pb.LookupRequest(namespace=b"n" * 16, prefix_hashes=[b"k" * 32]))
    idle, *endless = [raw(node) for _ in range(4)]
    for connection in (idle, *endless):
        assert connection.ask(hello=pb.HelloRequest()).hello.bulk_port
    for connection, part in zip(endless, (whole[:3], whole[:16], whole[:40]), strict=True):
        connection.send(part)
    for connection in endless:
        assert connection.ending() is None
    assert idle.ask(hello=pb.HelloRequest()).hello.bulk_port, "an idle connection must stay open"
    settle(node, sessions=2)


BREAKING_A_PUT: dict[str, Callable[[Any], bytes]] = {
    "another request": lambda space: frame(hello=pb.HelloRequest()),
    "another put": lambda space: frame(put=put_of(space, 200)),
    "commit before the data": lambda space: frame(commit=pb.CommitRequest(leaves=[b"c" * 8] * 2)),
    "data one byte short": lambda space: pack_fixed(0, 2 * PAGE - 1) + bytes(2 * PAGE - 1),
    "data one byte long": lambda space: pack_fixed(0, 2 * PAGE + 1) + bytes(2 * PAGE + 1),
    "data with a header": lambda space: pack_fixed(3, 2 * PAGE) + b"abc" + bytes(2 * PAGE),
    "data without end": lambda space: pack_fixed(0, 2**64 - 1),
    "no frame": lambda space: b"nonsense, not a frame",
    "data, then no frame": lambda space: (
        pack_fixed(0, 2 * PAGE) + bytes(2 * PAGE) + b"nonsense, not a frame"
    ),
    "data, then more data": lambda space: (pack_fixed(0, 2 * PAGE) + bytes(2 * PAGE)) * 2,
    "data, then a get": lambda space: (
        pack_fixed(0, 2 * PAGE) + bytes(2 * PAGE) + frame(get=get_of(space, 0))
    ),
}


@pytest.mark.parametrize("what", BREAKING_A_PUT)
def test_put_out_of_order_ends_and_stores_nothing(
    node: Node, raw: ConnectRaw, space: Pages, what: str
) -> None:
    with Bystander(node):
        connection = raw(node)
        assert list(connection.ask(put=put_of(space, 100, 101)).put.verdicts) == [
            pb.WRITE,
            pb.WRITE,
        ]
        try:
            connection.send(BREAKING_A_PUT[what](space))  # the node may close amid it
            error = connection.ending()
        except ConnectionError:
            error = None
        assert error is None or error.code == CODE
    assert stored(node, space) == set(space.keys(*range(16)))
    settle(node, sessions=1)


def stored(node: Node, space: Pages) -> set[bytes]:
    infos, rest_after = Inventory(node.tier).list_pages(space.namespace.digest, b"", b"", 1000)
    assert not rest_after
    return {info.prefix_hash for info in infos}


@pytest.mark.parametrize(
    "sent",
    [[], [b"c" * 8], [b"c" * 8] * 3, [b"c" * 8, b"c" * 7], [b"", b""], [b"c" * 16] * 2],
    ids=lambda c: f"{len(c)}",
)
def test_commit_with_wrong_leaves_is_refused_and_the_connection_stays(
    node: Node, raw: ConnectRaw, space: Pages, sent: list[bytes]
) -> None:
    connection = raw(node)
    connection.request(put=put_of(space, 100, 101))
    connection.reply()
    connection.send(pack_fixed(0, 2 * PAGE) + bytes(2 * PAGE))
    error = connection.ask(commit=pb.CommitRequest(leaves=sent)).error
    assert error.code == INVALID
    assert "send 8 bytes for each" in error.message
    assert stored(node, space) == set(space.keys(*range(16)))
    # The same connection then stores the same pages.
    assert list(connection.ask(put=put_of(space, 100, 101)).put.verdicts) == [pb.WRITE, pb.WRITE]
    keys = space.keys(100, 101)
    connection.send(pack_fixed(0, 2 * PAGE) + b"".join(space.content(key) for key in keys))
    good = [leaves(space.content(key)) for key in keys]
    assert connection.ask(commit=pb.CommitRequest(leaves=good)).commit.stored == 2
    settle(node, sessions=2)


PUT_STAGES = [
    "after the request",
    "after the verdicts",
    "within the data",
    "after the data",
    "within the commit",
]


def begin_put(connection: Any, space: Pages, stage: str, *numbers: int) -> None:
    """Start a put and stop at `stage`."""
    connection.request(put=put_of(space, *numbers))
    if stage != "after the request":
        assert list(connection.reply()[0].put.verdicts) == [pb.WRITE] * 2
        data = pack_fixed(0, 2 * PAGE) + bytes(2 * PAGE)
        connection.send(
            {"after the verdicts": b"", "within the data": data[: PAGE + 100]}.get(stage, data)
        )
    if stage == "within the commit":
        connection.send(frame(commit=pb.CommitRequest(leaves=[b"c" * 8] * 2))[:-1])


@pytest.mark.parametrize("how", ["closes", "resets"])
@pytest.mark.parametrize("stage", PUT_STAGES)
def test_client_closing_amid_a_put_leaves_nothing(
    node: Node, raw: ConnectRaw, space: Pages, stage: str, how: str
) -> None:
    with Bystander(node):
        connection = raw(node)
        begin_put(connection, space, stage, 100, 101)
        if how == "resets":
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        settle(node, sessions=None)
        assert stored(node, space) == set(space.keys(*range(16)))
    settle(node, sessions=1)


def test_clients_stalling_amid_a_put_leave_nothing(
    node: Node, raw: ConnectRaw, space: Pages
) -> None:
    with Bystander(node):
        for number, stage in enumerate(PUT_STAGES):
            begin_put(raw(node), space, stage, 100 + 2 * number, 101 + 2 * number)
        settle(node, sessions=None)
        assert stored(node, space) == set(space.keys(*range(16)))
    settle(node, sessions=1)


def test_page_reserved_by_a_closed_client_can_be_written(
    node: Node, raw: ConnectRaw, connect: Connect, space: Pages
) -> None:
    connection = raw(node)
    connection.ask(put=put_of(space, 100))
    client = connect(node)
    assert [outcome.name for outcome in space.put(client, space.keys(100))] == ["BUSY"]
    connection.close()
    settle(node, sessions=2)
    assert [outcome.name for outcome in space.put(client, space.keys(100))] == ["STORED"]
    assert all(space.get(client, space.keys(100)))


@pytest.mark.parametrize("how", ["closes", "resets", "never reads"])
def test_client_closing_amid_a_get_leaves_nothing(
    start_node: StartNode,
    raw: ConnectRaw,
    connect: Connect,
    how: str,
) -> None:
    """The reply of 16 MiB exceeds the socket buffers, so that the node is still sending it."""
    node = start_node(ram_nbytes=32 << 20, batch_nbytes_max=16 << 20, stall_s=2.0)
    space = Pages(how, 1 << 20)
    space.put(connect(node), space.keys(*range(16)))
    with Bystander(node):
        connection = raw(node)
        connection.request(get=get_of(space, *range(16)))
        reply, payload_nbytes = connection.reply()
        assert (sum(reply.get.hits), payload_nbytes) == (16, 16 << 20)
        assert node.tier.held_count >= 16  # the bystander also holds pages
        if how == "resets":
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how != "never reads":
            connection.close()
        settle(node, sessions=None)
    settle(node, sessions=1)


class QuietSocket:
    """Act as a client that asks once, reads slowly, waits for a while and closes."""

    def __init__(self) -> None:
        header = pb.BulkRequest(hello=pb.HelloRequest()).SerializeToString()
        self.frames = [(header, 0), None, None]
        self.timeout_s = 0.0
        self.waits: list[float] = []

    def handshake(self) -> None:
        pass

    def arm(self, seconds: float) -> None:
        self.timeout_s = seconds

    def begun(self, header: bytes, payload_nbytes: int) -> bytes:
        return header

    def send(self, frame: bytes) -> None:
        self.timeout_s = 0.001  # as after a partial send near its deadline

    def recv_frame(self, header_nbytes_max: int) -> Any:
        return self.wait_frame(header_nbytes_max, 0.0)

    def wait_frame(self, header_nbytes_max: int, frame_s: float) -> Any:
        self.waits.append(self.timeout_s)
        if not self.frames:
            raise ConnectionResetError
        return self.frames.pop(0)


def test_after_a_slow_reply_an_idle_connection_waits_without_spinning(node: Node) -> None:
    quiet: Any = QuietSocket()
    assert node.bulk is not None
    with pytest.raises(ConnectionResetError):
        BulkConnection(quiet, "nobody", Caller("nobody"), node.service, 5.0).serve(node.bulk)
    assert quiet.waits == [REQUEST_S_MAX, 5.0, 5.0, 5.0]


def test_random_bytes_on_many_connections(node: Node, raw: ConnectRaw, seed: int) -> None:
    rng = random.Random(seed)
    with Bystander(node):
        for _ in range(100):
            connection = raw(node)
            noise = rng.randbytes(rng.randint(1, 4000))
            if rng.random() < 0.5:  # well framed, so that the noise is parsed
                noise = pack_fixed(len(noise), 0) + noise
            try:
                connection.send(noise)
            except ConnectionError:
                pass
            connection.close()
    settle(node)
