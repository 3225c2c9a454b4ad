"""gRPC clients that never read replies, as HTTP/2 lets them announce a window of zero."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import http2
import pytest
from gateways import servicer_of
from http2 import ACK, DATA, END_HEADERS, FRAME_NBYTES, HEADERS, INITIAL_WINDOW, PING, SETTINGS
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from node.gateway.call import Call
from node.gateway.gateway import STREAM_NBYTES_MAX
from node.server import Node

CALLS = 12


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node that soon ends transfers that stall."""
    return start_node(ram_nbytes=16 << 20, stall_s=2.0)


class Deaf:
    """An HTTP/2 connection that gives its peer no window to answer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._send(http2.PREFACE + http2.settings({INITIAL_WINDOW: 0}) + http2.ACKNOWLEDGED)
        self._stream = 1

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def call(self, path: str, message: bytes, end: bool = True) -> None:
        block = http2.block(http2.call_fields(path))
        self._send(http2.frame(HEADERS, END_HEADERS, self._stream, block))
        self._send(http2.frame(DATA, int(end), self._stream, http2.message(message)))
        self._stream += 2

    def frames(self, last: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (kind, flags, body) of each received frame, up to one of kind `last`."""
        self._socket.settimeout(20.0)
        with self._socket.makefile("rb") as file:
            kind = -1
            while kind != last:
                head = file.read(9)
                kind = head[3]
                yield kind, head[4], file.read(int.from_bytes(head[:3], "big"))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def deaf(node: Node) -> Iterator[Callable[[], Deaf]]:
    made: list[Deaf] = []

    def one() -> Deaf:
        made.append(Deaf(node.grpc.port))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_put_with_an_unread_reply_returns_its_slots(
    node: Node,
    deaf: Callable[[], Deaf],
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it kept its slots, and its peer's share of gRPC transfers, for ever."""
    client = connect(node)
    client.open(pages.namespace)
    reserved, reserve = list[Any](), node.tier.reserve
    monkeypatch.setattr(
        node.tier, "reserve", lambda *given: reserved.append(reserve(*given)) or reserved[-1]
    )
    rude = deaf()
    for key in pages.keys(*range(CALLS)):
        request = pb.PutRequest(
            namespace=pages.namespace.digest, prefix_hashes=[key], page_nbytes=pages.nbytes
        )
        rude.call("/kvstore.KVStore/Put", pb.PutFrame(begin=request).SerializeToString(), end=False)
    wait_until(lambda: len(reserved) == CALLS)
    assert all(reservation.pages for reservation in reserved)
    wait_until(lambda: not node.tier.writing_count)
    wait_until(lambda: not servicer_of(node).call_count)


def test_calls_with_unread_replies_end(
    node: Node, deaf: Callable[[], Deaf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a call counted as over when its reply was made, so that one peer could leave
    thousands of them behind.

    What gRPC still holds for them, and unary replies, count as the gateway's memory
    (`tests/gateway/test_ends.py`).
    """
    seen, give_up = threading.Event(), Call._give_up

    def late(call: Call, reason: str) -> None:
        """Give the call up as soon as all are seen."""
        if seen.is_set():
            give_up(call, reason)
        else:
            call._loop.call_later(0.01, late, call, reason)

    monkeypatch.setattr(Call, "_give_up", late)
    rude = deaf()
    for _ in range(CALLS):
        rude.call("/grpc.health.v1.Health/Check", b"")
    wait_until(lambda: servicer_of(node).call_count == CALLS)
    seen.set()
    wait_until(lambda: not servicer_of(node).call_count)


def setting_values(frames: list[tuple[int, int, bytes]], setting: int) -> list[int]:
    """Return the values of an HTTP/2 setting in the frames that the node sent."""
    settings = b"".join(
        body for kind, flags, body in frames if kind == SETTINGS and not flags & ACK
    )
    return [value for number, value in struct.iter_unpack(">HI", settings) if number == setting]


def test_grpc_stream_window_does_not_grow(deaf: Callable[[], Deaf]) -> None:
    """With gRPC's pings the window would grow: a client that answers them late could send 512 MiB
    into each stream.
    """
    connection = deaf()
    connection.call("/kvstore.KVStore/Stat", bytes(60_000))
    frames = list(connection.frames(last=HEADERS))
    assert setting_values(frames, INITIAL_WINDOW)
    assert max(setting_values(frames, INITIAL_WINDOW)) <= STREAM_NBYTES_MAX
    assert PING not in [kind for kind, _, _ in frames]


def test_grpc_message_may_arrive_in_one_frame(deaf: Callable[[], Deaf]) -> None:
    connection = deaf()
    connection.call("/kvstore.KVStore/Hello", b"")
    assert setting_values(list(connection.frames(last=HEADERS)), FRAME_NBYTES) == [
        MESSAGE_NBYTES_MAX
    ]
