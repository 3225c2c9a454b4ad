"""The bulk wire against a misbehaving node: a kvstore error each time, and never wrong bytes.

The connection is not used again.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fake_node import ServeBulk, scripted

from kvstore import (
    ClientConfig,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    ProtocolError,
    Unavailable,
)
from kvstore.checksum import checksum, leaves
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports import bulk
from kvstore.transports.bulk import BulkWire
from kvstore.transports.frames import FrameSocket, pack_fixed

KEYS = [b"a" * 32, b"b" * 32]
PUT = pb.PutRequest(namespace=b"n" * 16, prefix_hashes=KEYS, page_nbytes=8)
GET = pb.GetRequest(namespace=b"n" * 16, prefix_hashes=KEYS)
LOOKUP = pb.LookupRequest(namespace=b"n" * 16, prefix_hashes=KEYS)
PAGE = b"12345678"


def frame(payload: bytes = b"", payload_nbytes: int | None = None, **op: Any) -> bytes:
    header = pb.BulkReply(**op).SerializeToString()
    return (
        pack_fixed(len(header), len(payload) if payload_nbytes is None else payload_nbytes)
        + header
        + payload
    )


def error(code: grpc.StatusCode) -> bytes:
    return frame(error=pb.Error(code=code.value[0], message="refused by the test"))


def call(wire: BulkWire, op: str, timeout_s: float = 2.0) -> Any:
    deadline = Deadline(timeout_s)
    if op == "put":
        return wire.put(PUT, [(memoryview(PAGE),)] * 2, deadline)
    if op == "get":
        return wire.get(GET, [(memoryview(bytearray(8)),) for _ in KEYS], [0, 1], deadline)
    return wire.call("lookup", LOOKUP, deadline)


GOOD_LOOKUP = frame(lookup=pb.LookupReply(present=[True, False]))
BOTH = [checksum(PAGE, 0), checksum(PAGE, 1)]
WRONG: dict[str, tuple[str, bytes, type[Exception]]] = {
    "no frame": ("lookup", b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
    "no protobuf": ("lookup", pack_fixed(3, 0) + b"\xff\xff\xff", ProtocolError),
    "nothing in it": ("lookup", pack_fixed(0, 0), ProtocolError),
    "reply to something else": ("lookup", frame(put=pb.PutReply()), ProtocolError),
    "header too long": ("lookup", pack_fixed(1 << 30, 0), ProtocolError),
    "one verdict for two": ("put", frame(put=pb.PutReply(verdicts=[pb.WRITE])), ProtocolError),
    "one hit for two": ("get", frame(get=pb.GetReply(hits=[False])), ProtocolError),
    "no checksum": ("get", frame(get=pb.GetReply(hits=[True, False]), payload=PAGE), ProtocolError),
    "payload too short": (
        "get",
        frame(get=pb.GetReply(hits=[True, True], checksums=BOTH), payload=PAGE),
        ProtocolError,
    ),
    "payload too long": (
        "get",
        frame(get=pb.GetReply(hits=[True, False], checksums=BOTH[:1]), payload=PAGE * 2),
        ProtocolError,
    ),
    "payload of 2^63": (
        "get",
        frame(get=pb.GetReply(hits=[True, False], checksums=BOTH[:1]), payload_nbytes=1 << 63),
        ProtocolError,
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_answer_ends_the_connection(bulk_port: ServeBulk, what: str) -> None:
    op, answer, expected = WRONG[what]
    port = bulk_port(scripted(answer))
    wire = BulkWire("127.0.0.1", port.port, ClientConfig(timeout_s=2.0))
    with pytest.raises(expected):
        call(wire, op)
    with pytest.raises((ProtocolError, Unavailable)):
        call(wire, op)
    assert len(port.accepted) == 2, "a connection was reused after an invalid answer"
    wire.close()


@pytest.mark.parametrize("cut", [1, 16, 20, -1])
@pytest.mark.parametrize("op", ["lookup", "get"])
def test_truncated_answer_is_unavailable(bulk_port: ServeBulk, op: str, cut: int) -> None:
    whole = (
        GOOD_LOOKUP
        if op == "lookup"
        else frame(get=pb.GetReply(hits=[True, True], checksums=BOTH), payload=PAGE * 2)
    )

    def talk(connection: FrameSocket) -> None:
        scripted(whole[:cut])(connection)
        connection.shutdown()

    wire = BulkWire("127.0.0.1", bulk_port(talk).port, ClientConfig(timeout_s=2.0))
    with pytest.raises(Unavailable):
        call(wire, op)
    wire.close()


def test_pages_with_a_wrong_checksum_are_misses(bulk_port: ServeBulk) -> None:
    answer = frame(
        get=pb.GetReply(hits=[True, True], checksums=[BOTH[0], BOTH[0]]), payload=PAGE * 2
    )
    wire = BulkWire("127.0.0.1", bulk_port(scripted(answer)).port, ClientConfig())
    assert call(wire, "get") == ([True, False], [1])
    wire.close()


def test_refused_request_keeps_the_connection(bulk_port: ServeBulk) -> None:
    port = bulk_port(scripted(error(grpc.StatusCode.INVALID_ARGUMENT), GOOD_LOOKUP))
    wire = BulkWire("127.0.0.1", port.port, ClientConfig())
    with pytest.raises(InvalidRequest, match="refused by the test"):
        call(wire, "lookup")
    assert list(call(wire, "lookup").present) == [True, False]
    assert len(port.accepted) == 1
    wire.close()


def test_refused_commit_fails_the_put(bulk_port: ServeBulk) -> None:
    def talk(connection: FrameSocket) -> None:
        scripted(frame(put=pb.PutReply(verdicts=[pb.WRITE, pb.EXISTS])))(connection)
        assert connection.recv_frame(0) == (b"", 8)
        connection.recv_into(memoryview(bytearray(8)))
        header, _ = connection.recv_frame(1 << 20)
        assert list(pb.BulkRequest.FromString(header).commit.leaves) == [leaves(PAGE)]
        connection.send(error(grpc.StatusCode.INVALID_ARGUMENT))

    wire = BulkWire("127.0.0.1", bulk_port(talk).port, ClientConfig())
    with pytest.raises(InvalidRequest):
        call(wire, "put")
    wire.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Exhausted),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolError),
    ],
)
def test_refused_connection_raises_the_nodes_error(
    bulk_port: ServeBulk, code: grpc.StatusCode, expected: type[Exception]
) -> None:
    """A node whose sessions are all taken answers so."""

    def talk(connection: FrameSocket) -> None:
        connection.recv_frame(1 << 20)
        connection.send(error(code))

    wire = BulkWire("127.0.0.1", bulk_port(talk).port, ClientConfig())
    for _ in range(3):
        with pytest.raises(expected, match="refused by the test"):
            call(wire, "lookup")
    wire.close()


@pytest.mark.parametrize("op", ["lookup", "put", "get"])
def test_missing_answer_exceeds_the_deadline(bulk_port: ServeBulk, op: str) -> None:
    def silent(connection: FrameSocket) -> None:
        scripted()(connection)
        connection.recv_frame(1 << 20)
        connection.recv_frame(1 << 20)  # keeps the connection open until the client leaves

    wire = BulkWire("127.0.0.1", bulk_port(silent).port, ClientConfig())
    wire.connect(Deadline(5))
    with pytest.raises(DeadlineExceeded):
        call(wire, op, timeout_s=0.05)
    wire.close()


def test_more_threads_than_connections_take_turns_and_give_up_in_time(bulk_port: ServeBulk) -> None:
    port = bulk_port(scripted(GOOD_LOOKUP, GOOD_LOOKUP))
    wire = BulkWire("127.0.0.1", port.port, ClientConfig(connections_max=1))
    busy = pytest.raises(Exhausted, match=r"all 1 connections \(connections_max\) stayed busy")
    with wire._pool.connection(Deadline(5)), busy:
        wire.call("lookup", LOOKUP, Deadline(0.05))
    assert list(call(wire, "lookup").present) == [True, False]
    assert len(port.accepted) == 1
    wire.close()


# ---- reused connections and repeated requests ---------------------------------------------------


def hello(instance_id: bytes = b"") -> bytes:
    return frame(hello=pb.HelloReply(protocol_version=PROTOCOL_VERSION, instance_id=instance_id))


def test_connection_to_another_instance_is_not_used(bulk_port: ServeBulk) -> None:
    """The port now belongs to another node, or the node restarted and gRPC has not noticed."""

    def talk(connection: FrameSocket) -> None:
        for answer in (hello(b"another!"), GOOD_LOOKUP):
            connection.recv_frame(1 << 20)
            connection.send(answer)

    wire = BulkWire("127.0.0.1", bulk_port(talk).port, ClientConfig(), (), b"this one")
    with pytest.raises(Unavailable, match="belongs to another node, or the node was restarted"):
        call(wire, "lookup")
    wire.close()


def ending_after(answer: bytes) -> Callable[[FrameSocket], None]:
    """Return a server whose first connection sends `answer` to its second request and closes.

    Later connections answer normally.
    """
    first = itertools.count(1)

    def talk(connection: FrameSocket) -> None:
        ends = next(first) == 1
        for answer_bytes in (hello(), GOOD_LOOKUP, answer if ends else GOOD_LOOKUP):
            connection.recv_frame(1 << 20)
            connection.send(answer_bytes)
        if ends:
            connection.shutdown()

    return talk


def test_half_answered_request_is_not_repeated(bulk_port: ServeBulk) -> None:
    """The node received the request, and may have run it."""
    port = bulk_port(ending_after(GOOD_LOOKUP[:7]))
    wire = BulkWire("127.0.0.1", port.port, ClientConfig())
    call(wire, "lookup")
    with pytest.raises(Unavailable):
        call(wire, "lookup")
    assert len(port.accepted) == 1
    wire.close()


def test_connection_closed_during_a_request_is_no_failure(bulk_port: ServeBulk) -> None:
    """The node may evict an idle connection after the client has checked it."""
    port = bulk_port(ending_after(b""))
    wire = BulkWire("127.0.0.1", port.port, ClientConfig())
    for _ in range(2):
        assert list(call(wire, "lookup").present) == [True, False]
    assert len(port.accepted) == 2
    wire.close()


def test_connection_with_unexpected_bytes_is_not_reused(
    bulk_port: ServeBulk,
) -> None:
    """Regression: of two answers to one request the second was taken for that of the next
    request.
    """

    def talk(connection: FrameSocket) -> None:
        for answer_bytes in (
            hello(),
            GOOD_LOOKUP + frame(lookup=pb.LookupReply(present=[False, False])),
            GOOD_LOOKUP,
        ):
            connection.recv_frame(1 << 20)
            connection.send(answer_bytes)

    port = bulk_port(talk)
    wire = BulkWire("127.0.0.1", port.port, ClientConfig())
    for _ in range(2):
        assert list(call(wire, "lookup").present) == [True, False]
    assert len(port.accepted) == 2
    wire.close()


@pytest.mark.parametrize("nbytes", [1, 1000, 100_000])  # 16, 16 and 2 pages a call
def test_small_pages_that_arrive_together_are_verified_one_by_one(
    bulk_port: ServeBulk, nbytes: int
) -> None:
    stored = [os.urandom(nbytes) for _ in range(37)]
    sums = [checksum(page, seed) for seed, page in enumerate(stored)]
    sums[21] = sums[22]
    there = [number for number in range(37) if number % 5]
    reply: Any = pb.GetReply(
        hits=[number in there for number in range(37)], checksums=[sums[n] for n in there]
    )
    answer = frame(get=reply, payload=b"".join(stored[number] for number in there))
    wire = BulkWire("127.0.0.1", bulk_port(scripted(answer)).port, ClientConfig())
    buffers = [bytearray(nbytes) for _ in stored]
    halves = [(memoryview(b)[: nbytes // 2], memoryview(b)[nbytes // 2 :]) for b in buffers]
    hits, wrong = wire.get(GET, halves, range(37), Deadline(60.0))
    assert (hits, wrong) == ([number in there and number != 21 for number in range(37)], [21])
    assert all(buffers[number] == stored[number] for number in there)
    wire.close()


@pytest.mark.parametrize("cuts", [(), (1,), (999, 1000, 1001), (4000,)])
def test_large_page_is_sent_by_several_calls(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(bulk, "SEND_NBYTES", 1000)
    page, (one, other) = os.urandom(5001), socket.socketpair()
    pieces = [memoryview(page)[a:b] for a, b in itertools.pairwise((0, *cuts, len(page)))]
    with contextlib.closing(FrameSocket(one)) as sender, other:
        sender.arm(60.0)
        assert bulk._send_page(sender, tuple(pieces)) == leaves(page)
        assert other.recv(len(page), socket.MSG_WAITALL) == page


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([400] * 5, 3),  # two pages a call
        ([10] * 40, 3),  # sixteen
        ([400, 5001, 400, 600, 1000, 7], 10),  # a large page is alone, in six
        ([1000], 1),
        ([1001], 3),
    ],
)
def test_small_pages_are_sent_together(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], calls: int
) -> None:
    monkeypatch.setattr(bulk, "SEND_NBYTES", 1000)
    monkeypatch.setattr(bulk, "CHUNK_NBYTES", 1000)
    pages, sent = [os.urandom(size) for size in sizes], list[bytes]()
    sender, other = sending_to(sent)
    with contextlib.closing(sender), other:
        halves = [(memoryview(page)[:3], memoryview(page)[3:]) for page in pages]
        assert bulk._send_pages(sender, sum(sizes), halves) == [leaves(page) for page in pages]
        told = pack_fixed(0, sum(sizes)) + b"".join(pages)
        assert b"".join(sent) == told == other.recv(len(told) + 1, socket.MSG_DONTWAIT)
    assert len(sent) == calls


def sending_to(sent: list[bytes]) -> tuple[FrameSocket, socket.socket]:
    """Return a connection that notes what each call sends, and its other end."""
    one, other = socket.socketpair()

    class Noting(FrameSocket):
        def send(self, data: bytes | memoryview, at_once: bool = False) -> None:
            sent.append(bytes(data))
            super().send(data, at_once)

        def _send_some(self, views: list[memoryview]) -> int:
            sent.append(b"".join(views))
            return super()._send_some(views)

    sender = Noting(one)
    sender.arm(60.0)
    return sender, other
