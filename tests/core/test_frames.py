"""Bulk frames over a real socket pair: deadlines, closed peers, and invalid bytes."""

import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from authorities import client_context, server_context

from kvstore.checksum import CHUNK_NBYTES
from kvstore.cli.authority import Authority
from kvstore.errors import ProtocolError
from kvstore.transports.frames import FIXED_NBYTES, FrameSocket, pack_fixed, unpack_fixed
from kvstore.transports.tls import TlsFrameSocket


class TlsPeer(TlsFrameSocket):
    """A TLS connection with the `sendall` of a socket."""

    def sendall(self, data: bytes | memoryview) -> None:
        self.arm(5.0)
        self.send(data)


@pytest.fixture(params=["plain", "tls"])
def pair(
    request: pytest.FixtureRequest, ours: Authority
) -> Iterator[tuple[FrameSocket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    peer: Any = socket.create_connection(listener.getsockname())
    sock, _ = listener.accept()
    plain = request.param == "plain"
    server = FrameSocket(sock) if plain else TlsFrameSocket(sock, server_context(ours))
    server.arm(5.0)
    if not plain:
        peer = TlsPeer(peer, client_context(ours), "localhost")
        peer.arm(5.0)
        greeting = threading.Thread(target=peer.handshake)
        greeting.start()
        server.handshake()
        greeting.join()
    yield server, peer
    server.close()
    peer.close()
    listener.close()


def frames(peer: socket.socket | TlsPeer) -> FrameSocket:
    return peer if isinstance(peer, TlsPeer) else FrameSocket(peer)


def test_frame_arrives_intact(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, peer = pair
    theirs = frames(peer)
    theirs.arm(5.0)
    payload = random.Random(4).randbytes(3 << 20)

    def send() -> None:
        theirs.send_frame(b"header", len(payload))
        theirs.send(payload)
        theirs.send_frame(b"")

    thread = threading.Thread(target=send)
    thread.start()
    header, payload_nbytes = ours.recv_frame(100)
    assert (header, payload_nbytes) == (b"header", len(payload))
    buffer = bytearray(payload_nbytes)
    ours.recv_into(memoryview(buffer))
    assert buffer == payload
    assert ours.recv_frame(100) == (b"", 0)
    thread.join()


def test_frame_sent_byte_by_byte_is_joined(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, peer = pair
    frame = pack_fixed(3, 7) + b"abc"

    def send() -> None:
        for position in range(len(frame)):
            peer.sendall(frame[position : position + 1])

    thread = threading.Thread(target=send)
    thread.start()
    while (got := ours.wait_frame(100, 5.0)) is None:
        pass
    assert got == (b"abc", 7)
    thread.join()


def test_wait_for_a_frame_times_out(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, peer = pair
    ours.arm(0.01)
    assert ours.wait_frame(100, 0.01) is None
    peer.sendall(pack_fixed(0, 0))
    ours.arm(5.0)
    assert ours.wait_frame(100, 5.0) == (b"", 0)


def test_partial_frame_times_out(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, peer = pair
    peer.sendall(pack_fixed(3, 0)[:-1])
    with pytest.raises(TimeoutError):
        ours.wait_frame(100, 0.02)


def test_trickle_does_not_extend_the_deadline(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, peer = pair
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.005):
            try:
                peer.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    ours.arm(0.05)
    with pytest.raises(TimeoutError):
        ours.recv_into(memoryview(bytearray(1 << 20)))
    stop.set()
    thread.join()


def test_send_to_a_peer_that_never_reads_times_out(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, _ = pair
    ours.arm(0.05)
    with pytest.raises(TimeoutError):
        ours.send(bytes(64 << 20))


@pytest.mark.parametrize("sent", [b"", pack_fixed(5, 0), pack_fixed(5, 0) + b"abc", b"K"])
def test_closed_peer_is_a_connection_error(
    pair: tuple[FrameSocket, socket.socket], sent: bytes
) -> None:
    ours, peer = pair
    peer.sendall(sent)
    peer.close()
    with pytest.raises(ConnectionError):
        ours.wait_frame(100, 5.0)


def test_shutdown_wakes_a_waiting_thread(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, _ = pair
    errors: list[Exception] = []

    def wait() -> None:
        try:
            ours.recv_frame(100)
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ours.shutdown()
    thread.join(60.0)
    assert errors


def test_rearmed_timeout_is_complete(pair: tuple[FrameSocket, socket.socket]) -> None:
    """The next transfer must not inherit the little time that a slow one left."""
    ours, peer = pair
    ours.arm(0.001)
    with pytest.raises(TimeoutError):
        ours.recv_into(memoryview(bytearray(1)))
    ours.arm(5.0)
    timer = threading.Timer(0.05, peer.sendall, [b"x"])
    timer.start()
    buffer = bytearray(1)
    ours.recv_into(memoryview(buffer))
    assert buffer == b"x"
    timer.join()


def test_zero_timeout_does_not_block(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, _ = pair
    ours.arm(0.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ours.recv_into(memoryview(bytearray(1)))
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    ("fixed", "named"),
    [
        (b"\0" * FIXED_NBYTES, "not a kvstore bulk frame: it starts with 00000000"),
        (b"GET / HTTP/1.1\r\n", "not a kvstore bulk frame"),
        (struct.pack("<2sBBIQ", b"KV", 1, 0, 0, 0), "peer speaks protocol 1, this side 4"),
        (struct.pack("<2sBBIQ", b"KV", 4, 1, 0, 0), "not a kvstore bulk frame"),
        (struct.pack("<2sBBIQ", b"KV", 4, 0, 101, 0), "header has 101 bytes, at most 100"),
        (struct.pack("<2sBBIQ", b"KV", 4, 0, 2**32 - 1, 0), "at most 100"),
    ],
)
def test_invalid_frame_is_refused_before_its_length_is_used(fixed: bytes, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        unpack_fixed(fixed, 100)


def test_random_bytes_without_the_magic_are_no_frame() -> None:
    rng = random.Random(5)
    for _ in range(5000):
        fixed = rng.randbytes(FIXED_NBYTES)
        try:
            header_nbytes, _ = unpack_fixed(fixed, 1 << 20)
        except ProtocolError:
            continue
        assert fixed[:4] == b"KV\x03\x00"
        assert header_nbytes <= 1 << 20


# ---- many views at a time --------------------------------------------------------------------


def in_views(data: bytearray, sizes: list[int]) -> list[memoryview]:
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(data)
    return [memoryview(data)[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize(
    "sizes",
    [
        [1 << 20] * 5,
        [1, 100, 7, 4000, 1, 5 << 20, 3, 300_000],  # the first ones arrive with the header
        [999] * 5000,  # more than one system call takes
        [64] * 30,  # all of them arrive with the header
    ],
)
def test_views_arrive_intact(pair: tuple[FrameSocket, socket.socket], sizes: list[int]) -> None:
    ours, peer = pair
    theirs = frames(peer)
    theirs.arm(5.0)
    sent = bytearray(random.Random(6).randbytes(sum(sizes)))

    def send() -> None:
        theirs.send_frame(b"header", len(sent))
        theirs.send_all(in_views(sent, sizes), lambda: 5.0)
        theirs.send_frame(b"next")

    thread = threading.Thread(target=send)
    thread.start()
    assert ours.recv_frame(100) == (b"header", len(sent))
    came = bytearray(len(sent))
    ours.recv_all(in_views(came, sizes), lambda: 5.0)
    assert came == sent
    assert ours.recv_frame(100) == (b"next", 0)
    thread.join()


def test_empty_views_receive_nothing(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, peer = pair
    peer.sendall(b"page")
    came = bytearray(4)
    ours.recv_all(in_views(came, [0] * 1500 + [4, 0]))  # more than one system call takes
    assert came == b"page"
    ours.recv_all([memoryview(b"")])


def test_views_received_in_pieces_are_joined(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    """The kernel's timeout ends a call with the bytes received so far; each part renews the
    time.
    """
    ours, peer = pair
    sent = bytearray(random.Random(7).randbytes(2 * CHUNK_NBYTES + 10))
    came, armed = bytearray(len(sent)), []

    def send() -> None:
        for start in range(0, len(sent), CHUNK_NBYTES // 4):
            peer.sendall(sent[start : start + CHUNK_NBYTES // 4])
            time.sleep(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    ours.recv_all(
        in_views(came, [CHUNK_NBYTES // 3, len(sent) - CHUNK_NBYTES // 3]),
        lambda: armed.append(1) or 5.0,
    )
    thread.join()
    assert came == sent
    assert 1 <= len(armed) <= 3


def test_trickling_part_times_out(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, peer = pair
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.01):
            peer.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            ours.recv_all([memoryview(bytearray(1 << 20))], lambda: 0.2)
    finally:
        ended.set()
        thread.join()


def test_sent_views_that_are_not_read_time_out(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        ours.send_all([memoryview(bytes(1 << 20))] * 64, lambda: 0.1)
    assert ours.torn


def test_peer_closing_amid_views_is_a_connection_error(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, peer = pair
    peer.sendall(bytes(1000))
    peer.close()
    with pytest.raises(ConnectionError):
        ours.recv_all([memoryview(bytearray(600))] * 2, lambda: 5.0)
