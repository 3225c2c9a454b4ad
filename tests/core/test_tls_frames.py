"""Frames over TLS, compared with Python's TLS socket, and ends of TLS connections."""

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from authorities import client_context, pair, server_context
from waiting import wait_until

from kvstore.cli.authority import Authority
from kvstore.transports.frames import FIXED_NBYTES, pack_fixed
from kvstore.transports.tls import RECORD_NBYTES, STEP_NBYTES, TlsFrameSocket

Connected = tuple[socket.socket, socket.socket]


@pytest.fixture
def connected() -> Iterator[Connected]:
    """Yield two connected sockets: (accepted, connecting)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def greeted(connected: Connected, ours: Authority) -> tuple[TlsFrameSocket, ssl.SSLSocket]:
    """Return our server and Python's client after their handshake."""
    server = TlsFrameSocket(connected[0], server_context(ours))
    server.arm(20.0)
    made: list[ssl.SSLSocket] = []
    context = client_context(ours)
    thread = beside(
        lambda: made.append(context.wrap_socket(connected[1], server_hostname="127.0.0.1"))
    )
    server.handshake()
    thread.join()
    return server, made[0]


def test_tls_frames_work_with_pythons_tls(connected: Connected, ours: Authority) -> None:
    server, peer = greeted(connected, ours)
    with peer:
        assert peer.version() == "TLSv1.3"
        sent = random.Random(1).randbytes((3 << 20) + 17)
        thread = beside(lambda: peer.sendall(pack_fixed(2, len(sent)) + b"ab" + sent))
        assert server.recv_frame(100) == (b"ab", len(sent))
        came = bytearray(len(sent))
        parts = [
            memoryview(came)[:5],
            memoryview(came)[5 : 5 + STEP_NBYTES],
            memoryview(came)[5 + STEP_NBYTES :],
        ]
        server.recv_all(parts, lambda: 20.0)
        thread.join()
        assert came == sent

        thread = beside(
            lambda: (server.send_frame(b"h", len(sent)), server.send_all(parts, lambda: 20.0))
        )
        back = bytearray()
        while len(back) < FIXED_NBYTES + 1 + len(sent):
            back += peer.recv(1 << 20)
        thread.join()
        assert back[FIXED_NBYTES + 1 :] == sent


def test_byte_changed_on_the_network_is_an_error(ours: Authority) -> None:
    (near, far), (other, near_other) = socket.socketpair(), socket.socketpair()
    client = TlsFrameSocket(near, client_context(ours), "localhost")
    server = TlsFrameSocket(near_other, server_context(ours))

    def forward(source: socket.socket, target: socket.socket, flips: list[bool]) -> None:
        with contextlib.suppress(OSError):  # when the sockets close
            while data := bytearray(source.recv(1 << 20)):
                if flips and flips[0]:
                    data[-1] ^= 1
                target.sendall(data)

    flips = [False]
    ways = [beside(lambda: forward(far, other, flips)), beside(lambda: forward(other, far, []))]
    for one in (client, server):
        one.arm(20.0)
    thread = beside(client.handshake)
    server.handshake()
    thread.join()
    client.send(b"right")
    buffer = bytearray(5)
    server.recv_into(memoryview(buffer))
    assert buffer == b"right"
    flips[0] = True
    client.send(b"wrong")
    with pytest.raises(ssl.SSLError, match=r"(?i)bad.record.mac|decryption"):
        server.recv_into(memoryview(buffer))
    assert buffer == b"right"
    for sock in (near, near_other, far, other):
        sock.shutdown(socket.SHUT_RDWR)
    for way in ways:
        way.join()
    for sock in (near, near_other, far, other):
        sock.close()


def test_idle_connection_is_quiet_until_bytes_arrive(connected: Connected, ours: Authority) -> None:
    server, peer = greeted(connected, ours)
    with peer:
        assert server.quiet
        peer.sendall(pack_fixed(1, 0) + b"a" + b"more")
        wait_until(lambda: not server.quiet)
        assert server.recv_frame(10) == (b"a", 0)
        assert not server.quiet  # the rest is already decrypted
        rest = bytearray(4)
        server.recv_into(memoryview(rest))
        assert rest == b"more"
        assert server.quiet
        peer.sendall(bytes(RECORD_NBYTES))
        server.recv_into(memoryview(bytearray(1)))
        assert not server.quiet
    server.recv_into(memoryview(bytearray(RECORD_NBYTES - 1)))
    wait_until(lambda: not server.quiet)  # the peer has closed


def test_server_sends_nothing_unasked(connected: Connected, ours: Authority) -> None:
    """Session tickets would look like an answer to no request."""
    client = TlsFrameSocket(connected[0], client_context(ours), "localhost")
    server = TlsFrameSocket(connected[1], server_context(ours))
    for one in (client, server):
        one.arm(20.0)
    thread = beside(server.handshake)
    client.handshake()
    thread.join()
    assert client.quiet
    assert server.quiet


def test_tls_shut_down_by_another_thread_reads_no_cipher_text(
    connected: Connected, ours: Authority
) -> None:
    server, peer = greeted(connected, ours)
    buffer, failed = bytearray(1 << 20), []

    def receive() -> None:
        try:
            server.recv_into(memoryview(buffer))
        except OSError as error:
            failed.append(error)

    thread = beside(receive)
    peer.sendall(bytes(1000))
    server.shutdown()
    thread.join(60.0)
    peer.close()
    assert isinstance(failed[0], ConnectionError)
    assert buffer == bytes(1 << 20)


def test_handshake_without_end_times_out(connected: Connected, ours: Authority) -> None:
    server = TlsFrameSocket(connected[0], server_context(ours))
    for sent in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"):
        connected[1].sendall(sent)
        server.arm(0.05)
        with pytest.raises(TimeoutError):
            server.handshake()


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 64,
        pack_fixed(5, 0) + b"hello",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\0\4\xff\0\0\0",
    ],
)
def test_peer_without_tls_is_an_error(connected: Connected, ours: Authority, sent: bytes) -> None:
    server = TlsFrameSocket(connected[0], server_context(ours))
    server.arm(20.0)
    connected[1].sendall(sent)
    with pytest.raises(ssl.SSLError):
        server.handshake()


def test_peer_closing_amid_a_handshake_is_a_connection_error(
    connected: Connected, ours: Authority
) -> None:
    server = TlsFrameSocket(connected[0], server_context(ours))
    server.arm(20.0)
    connected[1].close()
    with pytest.raises(ConnectionError):
        server.handshake()


@pytest.mark.parametrize("wrong", ["name", "authority", "version"])
def test_untrusted_server_gets_an_alert(
    connected: Connected, ours: Authority, strangers: Authority, wrong: str
) -> None:
    context = server_context(strangers if wrong == "authority" else ours)
    trusting = client_context(ours)
    if wrong == "version":
        trusting.minimum_version = ssl.TLSVersion.TLSv1_3
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    server = TlsFrameSocket(connected[0], context)
    client = TlsFrameSocket(connected[1], trusting, "elsewhere" if wrong == "name" else "localhost")
    failed: list[Exception] = []

    def serve() -> None:
        try:
            server.arm(20.0)
            server.handshake()
            server.recv_into(memoryview(bytearray(1)))
        except OSError as error:
            failed.append(error)

    thread = beside(serve)
    client.arm(20.0)
    with pytest.raises(ssl.SSLError):
        client.handshake()
    thread.join()
    assert "alert" in str(failed[0]) or wrong == "version"


def test_server_knows_the_client_certificate(connected: Connected, ours: Authority) -> None:
    context = server_context(ours)
    context.load_verify_locations(str(ours.path))
    context.verify_mode = ssl.CERT_REQUIRED
    server = TlsFrameSocket(connected[0], context)
    client = TlsFrameSocket(connected[1], client_context(ours, **pair(ours, "client")), "localhost")
    for one in (client, server):
        one.arm(20.0)
    thread = beside(client.handshake)
    server.handshake()
    thread.join()
    certificate: Any = server.certificate
    assert certificate["subject"] == ((("commonName", "team-a"),),)
