"""Keeps one peer from having all gRPC connections. gRPC accepts by itself and has no cap for a peer, so this
looks at the sockets that it has open and shuts down those that are too many, who never asked
for anything first, then who has been idle for longest; a client's channel connects again at its next call.
"""

import contextlib
import logging
import os
import resource
import socket
import stat
import struct
import threading
from collections import Counter
from typing import NamedTuple

from node.serve.bans import Bans
from node.serve.descriptors import SpareDescriptor
from node.serve.limits import Cap, peer_of

log = logging.getLogger(__name__)

LOOK_S = 0.25
DESCRIPTORS_LEFT_MIN = 16  # with fewer, idle connections leave although there is room
_ASKED_NBYTES = 200  # received of who has sent more than HTTP/2's greeting,
_ASKED_TLS_NBYTES = 1500  # and more than that of TLS, with a small certificate
# Of Linux's tcp_info: milliseconds since the last data sent and received, all bytes received.
_TCP_INFO = struct.Struct("=44xI4xI72xQ")


class _Connection(NamedTuple):
    fd: int
    peer: str
    port: int  # the client's


class GrpcConnections:
    """A thread of its own. The sockets stay gRPC's: each is looked at and shut down through a duplicate, which
    is asked again whether it is the one that was meant."""

    def __init__(self, port: int, cap: Cap, tls: bool = False) -> None:
        self._port = port
        self._cap = cap
        self._asked_nbytes = _ASKED_TLS_NBYTES if tls else _ASKED_NBYTES
        self._known: dict[int, _Connection | None] = {}  # by inode; None for what is no connection of gRPC
        self.bans = Bans(self._listeners)
        self._spare = SpareDescriptor()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grpc-connections", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._spare.close()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
            except OSError as error:
                log.warning("grpc: can not look at the open connections: %s", error)

    def look(self) -> None:
        with self._spare.lent():
            self.bans.look()
            fds = [int(name) for name in os.listdir("/proc/self/fd")]
            self._learn(fds)
            for connection in self._leaving(len(fds)):
                log.info("grpc: a connection of %s is one too many", connection.peer)
                self._shut_down(connection)

    def hang_up(self, host: str, port: int) -> None:
        """On a client that has been connected for some time. Thread-safe."""
        for connection in list(self._known.values()):
            if connection is not None and (connection.peer, connection.port) == (peer_of(host), port):
                self._shut_down(connection)

    def _shut_down(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError), _duplicate(connection.fd) as sock:
            if self._identified(connection.fd, sock) == connection:
                sock.shutdown(socket.SHUT_RDWR)

    def _listeners(self) -> list[socket.socket]:
        """Duplicates, of IPv4 and of IPv6."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                sock = _duplicate(int(name))
                if _listens(sock) and sock.getsockname()[1] == self._port:
                    found.append(sock)
                else:
                    sock.close()
        return found

    def _learn(self, fds: list[int]) -> None:
        known: dict[int, _Connection | None] = {}
        for fd in fds:
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(fd)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                there = self._known.get(status.st_ino)
                if status.st_ino not in self._known or (there is not None and there.fd != fd):
                    with _duplicate(fd) as sock:
                        there = self._identified(fd, sock)
                known[status.st_ino] = there
        self._known = known

    def _identified(self, fd: int, sock: socket.socket) -> _Connection | None:
        """Whether this is a connection that gRPC has accepted."""
        if not _is_tcp(sock) or sock.getsockname()[1] != self._port or _listens(sock):
            return None
        host, port, *_ = sock.getpeername()
        return _Connection(fd, peer_of(host), port)

    def _leaving(self, open_count: int) -> list[_Connection]:
        there = [connection for connection in self._known.values() if connection is not None]
        counts = Counter(connection.peer for connection in there)
        short = DESCRIPTORS_LEFT_MIN - (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - open_count)
        excess = max(len(there) - self._cap.total, short, 0)
        if not excess and max(counts.values(), default=0) <= self._cap.per_peer:
            return []
        leaving = []
        for connection in sorted(there, key=lambda connection: _importance(connection.fd, self._asked_nbytes)):
            greediest = counts[connection.peer] == max(counts.values())
            if counts[connection.peer] > self._cap.per_peer or (excess > 0 and greediest):
                counts[connection.peer] -= 1
                excess -= 1
                leaving.append(connection)
        return leaving


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _listens(sock: socket.socket) -> bool:
    return _is_tcp(sock) and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicate(fd: int) -> socket.socket:
    """Raises OSError if it is no socket any more."""
    mine = os.dup(fd)
    try:
        return socket.socket(fileno=mine)
    except OSError:
        os.close(mine)
        raise


def _importance(fd: int, asked_nbytes: int) -> tuple[bool, int]:
    """Who never asked for anything comes before who did, who has been idle for longer before who has not."""
    try:
        with _duplicate(fd) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return True, 0  # it is none any more
    sent_ms, received_ms, received_nbytes = _TCP_INFO.unpack(info)
    return received_nbytes > asked_nbytes, -min(sent_ms, received_ms)
