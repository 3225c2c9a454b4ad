"""The socket between an engine's process and its agents' process: one end never waits, the other does.

EngineEnd    sends what the kernel takes and keeps the rest; hands out the frames that have come
AgentsEnd    waits for frames, or for the engine's end; sends from any thread
"""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

from gpu_agent.process.frames import HEADER, Kind, header
from kvstore.errors import Exhausted

# Of orders that the agents' process has not taken yet: it is starting, or stands still.
UNSENT_NBYTES_MAX = 32 << 20
_RECEIVED_NBYTES = 256 << 10
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class EngineEnd:
    """Not thread-safe, as little as an engine's worker. Errors of the socket are OSErrors: the peer is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._received = bytearray()

    def put(self, data: bytes) -> None:
        """To be sent with the next `flush`. Raises Exhausted if too much is unsent; then `data` is forgotten."""
        if len(self._unsent) + len(data) > UNSENT_NBYTES_MAX:
            raise Exhausted(f"{len(self._unsent)} bytes of orders wait for the agents' process")
        self._unsent += data

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Never waits. Raises as `put`."""
        self.put(data)
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent now."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent, _FLAGS)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def received(self) -> Iterator[tuple[Kind, bytes]]:
        """The frames that have come. Raises ProtocolError, and ConnectionError when the peer is gone and
        all that it said was handed out."""
        ended = False
        while not ended:
            try:
                data = self._sock.recv(_RECEIVED_NBYTES, _FLAGS)
            except BlockingIOError:
                break
            self._received += data
            ended = not data
        while (found := _first(self._received)) is not None:
            yield found
        if ended:
            raise ConnectionError("the agents' process has ended")

    def wait(self, timeout_s: float) -> None:
        """Until there is something to receive. An engine may have more descriptors than `select` can name."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(1000 * timeout_s)

    def close(self) -> None:
        self._sock.close()


class AgentsEnd:
    """`receive` belongs to one thread, `send` to all. `engine`: the process id of the other end, whose death
    counts as the end of the channel even while somebody else holds its socket open."""

    def __init__(self, sock: socket.socket, engine: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        try:
            self._pidfd = os.pidfd_open(engine)
        except ProcessLookupError as error:
            raise ConnectionError("the engine's process has ended") from error
        self._poll.register(self._pidfd, select.POLLIN)

    def receive(self) -> tuple[Kind, bytes]:
        """Waits for the next frame. Raises ProtocolError; ConnectionError when the engine is gone."""
        while (found := _first(self._received)) is None:
            ready = dict(self._poll.poll())
            if self._pidfd in ready:
                raise ConnectionError("the engine's process has ended")
            data = self._sock.recv(_RECEIVED_NBYTES)
            if not data:
                raise ConnectionError("the engine has hung up")
            self._received += data
        return found

    def send(self, data: bytes) -> None:
        """Waits for room. When the engine is gone there is nobody to tell: `receive` finds out."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(data)


def _first(data: bytearray) -> tuple[Kind, bytes] | None:
    """Takes the first frame out of `data`; None as long as it is not whole. Raises ProtocolError."""
    if len(data) < HEADER.size:
        return None
    nbytes, kind = header(data)
    end = HEADER.size + nbytes
    if len(data) < end:
        return None
    body = bytes(data[HEADER.size : end])
    del data[:end]
    return kind, body
