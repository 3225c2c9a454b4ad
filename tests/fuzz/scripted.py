"""A fake socket that replays a script as its peer's bytes and records what is sent to the peer.

An input is a script. If its first byte is even, the rest are the raw bytes of the stream. If it is
odd, the rest are frames, so that a changed byte does not break the framing of all that follow:

    1 request u16 header      2 payload u16 fill u8      3 fixed u32 u64 rest       else  bytes u8
"""

import array
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from node.serving.http_server import HttpConnection, HttpServer

REQUEST, PAYLOAD, FIXED = 1, 2, 3
PAYLOAD_NBYTES_MAX = 3 * 4096
_SCRATCH: list["tempfile.TemporaryDirectory[str]"] = []


class Bites:
    """A reader of an input; one that is too short is continued with zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes, or fewer at the end of the input."""
        part = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return part

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes).ljust(nbytes, b"\0"), "little")

    def sized(self, nbytes: int) -> bytes:
        """Return bytes that follow their length, a number of `nbytes` bytes."""
        return self.take(self.number(nbytes))


def scratch() -> Path:
    """Create a directory for input files, in /dev/shm if possible; it is removed at exit."""
    found = tempfile.TemporaryDirectory(
        prefix="kvstore-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )
    _SCRATCH.append(found)
    return Path(found.name)


def stream(data: bytes) -> bytes:
    """Return the bytes that the peer sends according to the script `data`."""
    bites = Bites(data)
    if bites.number(1) % 2 == 0:
        return bites.take(bites.left)
    sent = []
    while bites.left:
        kind = bites.number(1)
        if kind == REQUEST:
            header = bites.sized(2)
            sent.append(pack_fixed(len(header), 0) + header)
        elif kind == PAYLOAD:
            nbytes = bites.number(2) % (PAYLOAD_NBYTES_MAX + 1)
            sent.append(pack_fixed(0, nbytes) + bites.take(1).ljust(1, b"\0") * nbytes)
        elif kind == FIXED:
            sent.append(pack_fixed(bites.number(4), bites.number(8)))
        else:
            sent.append(bites.sized(1))
    return b"".join(sent)


def request(**op: Any) -> bytes:
    """Return the step of a script that sends one request."""
    header = pb.BulkRequest(**op).SerializeToString()
    return bytes((REQUEST,)) + struct.pack("<H", len(header)) + header


def reply(**op: Any) -> bytes:
    header = pb.BulkReply(**op).SerializeToString()
    return bytes((REQUEST,)) + struct.pack("<H", len(header)) + header


def payload(nbytes: int, fill: int = 7) -> bytes:
    return bytes((PAYLOAD,)) + struct.pack("<HB", nbytes, fill)


class ScriptedSocket:
    """The part of `socket.socket` that connections use.

    The descriptors `fds` come with the first byte; `peer` is the value of SO_PEERCRED.
    """

    family = socket.AF_UNIX

    def __init__(self, data: bytes, fds: Sequence[int] = (), peer: bytes = b"") -> None:
        self._left = memoryview(data)
        self._fds = list(fds)
        self._peer = peer
        self.sent = bytearray()

    def setblocking(self, blocking: bool) -> None: ...

    def settimeout(self, seconds: float) -> None: ...

    def setsockopt(self, *_: object) -> None: ...

    def getsockopt(self, *_: object) -> bytes:
        return self._peer

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        part = self._left[: nbytes or view.nbytes]
        view[: part.nbytes] = part
        self._left = self._left[part.nbytes :]
        return part.nbytes

    def recvmsg_into(
        self, views: Sequence[memoryview], *_: object
    ) -> tuple[int, list[Any], int, None]:
        return sum(self.recv_into(view) for view in views if self._left.nbytes), [], 0, None

    def recvmsg(
        self, nbytes: int, *_: object
    ) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        part, self._left = bytes(self._left[:nbytes]), self._left[nbytes:]
        fds, self._fds = (self._fds, []) if part else ([], self._fds)
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        )
        return part, rights, 0, None

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        if not self._left.nbytes and flags & socket.MSG_DONTWAIT:
            raise BlockingIOError
        part = bytes(self._left[:nbytes])
        if not flags & socket.MSG_PEEK:
            self._left = self._left[nbytes:]
        return part

    def send(self, view: memoryview, flags: int = 0) -> int:
        self.sent += view
        return memoryview(view).nbytes

    def sendmsg(self, views: Sequence[memoryview], *_: object) -> int:
        return sum(self.send(view) for view in views)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class _ScriptedConnection(HttpConnection):
    """An HTTP connection whose client reads whole replies and leaves after the first event."""

    def wait(self, seconds: float) -> bool:
        return seconds == 0.0

    def drain(self) -> None: ...


def http_reply(server: HttpServer, sock: Any) -> bytes:
    server._serve(_ScriptedConnection(sock, "127.0.0.1", 30.0))
    return bytes(sock.sent)
