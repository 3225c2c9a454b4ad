"""Serve small requests of all connections in one thread.

    a connection's thread --> add --> epoll --> small request: served here
                                           --> any other: back to a thread

Threads hand the interpreter to each other, which costs more than a small request itself: with
16 clients a lookup took 212 µs of a node's CPU, with one 54 (docs/decisions/0052).
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from kvstore.errors import KVStoreError
from node.serving.connection import Acceptor, Connection, Ready

log = logging.getLogger(__name__)

EVENTS_MAX = 1024  # connections of one round
REQUESTS_MAX = 32  # of one peer, before other peers are looked for


class RequestLoop:
    """Wait for the next requests of connections, and serve the small ones.

    `to_thread` takes a connection whose next request needs a thread; `end` takes one that has
    ended. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        server: Acceptor,
        to_thread: Callable[[Connection], None],
        end: Callable[[Connection], None],
        look_s: float,
    ) -> None:
        """Prepare the loop. `look_s`: how often it looks for abandoned connections."""
        self._name = f"{name}-loop"
        self._server = server
        self._to_thread = to_thread
        self._end = end
        self._look_s = look_s
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None  # made when the first connection comes
        self._wakeup = -1
        self._waiting: dict[int, Connection] = {}  # by descriptor
        self._stopping = False

    def add(self, connection: Connection) -> bool:
        """Serve the next requests of a connection, which the caller must not use any more.

        Return False, and leave the connection to the caller, if the loop has stopped or can not
        start.
        """
        with self._lock:
            if self._stopping:
                return False
            fd = connection.socket.fileno()
            self._waiting[fd] = connection
            try:
                self._epoll = self._epoll or self._start()
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
            except (OSError, RuntimeError) as error:  # no more descriptors, memory or threads
                log.warning("a connection can not wait in the request loop: %s", error)
                del self._waiting[fd]
                return False
            return True

    def _start(self) -> select.epoll:
        """Make the epoll object and start the thread. Raises OSError or RuntimeError."""
        epoll = select.epoll()
        try:
            self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)
            epoll.register(self._wakeup, select.EPOLLIN)
            threading.Thread(target=self._run, args=(epoll,), name=self._name, daemon=True).start()
        except BaseException:
            self._close(epoll)
            raise
        return epoll

    def _close(self, epoll: select.epoll) -> None:
        epoll.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def stop(self) -> None:
        """Stop. Connections that are still there stay as they are."""
        with self._lock:
            self._stopping = True
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self, epoll: select.epoll) -> None:
        look_at = time.monotonic() + self._look_s
        while not self._stopping:
            ready = epoll.poll(self._look_s, EVENTS_MAX)
            self._serve_round([(fd, self._waiting[fd]) for fd, _ in ready if fd in self._waiting])
            if time.monotonic() >= look_at:
                self._look_after()
                look_at = time.monotonic() + self._look_s
        with self._lock:
            self._close(epoll)

    def _serve_round(self, ready: list[tuple[int, Connection]]) -> None:
        """Serve a request of each peer, or many if there is one peer; the rest stays ready.

        So a peer with many connections gets no more than others.
        """
        if len({connection.peer for _, connection in ready}) < 2:
            ready = ready[:REQUESTS_MAX]
        else:
            ready = list({at[1].peer: at for at in reversed(ready)}.values())
        for fd, connection in ready:
            self._serve(fd, connection)

    def _serve(self, fd: int, connection: Connection) -> None:
        try:
            what = connection.serve_ready(self._server)
        except (OSError, KVStoreError) as error:
            log.info("connection of %s ended: %s", connection.name, error)
            what = Ready.ENDED
        except Exception:
            log.exception("connection of %s failed", connection.name)
            what = Ready.ENDED
        if what is not Ready.SERVED:
            self._leave(fd, connection, what)

    def _leave(self, fd: int, connection: Connection, what: Ready) -> None:
        """Give a connection to a thread, or end it. One connection's fault ends no other."""
        del self._waiting[fd]
        try:
            assert self._epoll is not None
            self._epoll.unregister(fd)
            if what is Ready.NEEDS_THREAD:
                self._to_thread(connection)
            else:
                self._end(connection)
        except Exception:
            log.exception("connection of %s could not leave the loop", connection.name)

    def _look_after(self) -> None:
        """Give abandoned connections to threads, which end them."""
        for fd, connection in list(self._waiting.items()):
            try:
                gone = connection.abandoned()
            except Exception:  # of one connection: it must not end the loop of all
                log.exception("connection of %s can not be checked", connection.name)
                gone = True
            if gone:
                self._leave(fd, connection, Ready.NEEDS_THREAD)
