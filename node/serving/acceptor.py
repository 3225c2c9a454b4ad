"""Accept connections that carry frames, limit them, serve and drain them.

accept --> slot --> thread: `Connection.serve` <--> `RequestLoop`
           full: the longest idle one is closed
"""

import abc
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from kvstore.errors import Exhausted, KVStoreError, ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from node.serving.connection import (
    OUT_OF_DESCRIPTORS,
    Acceptor,
    Connection,
    SpareDescriptor,
    few_left,
    message_of,
)
from node.serving.limits import NO_QUOTAS, ConnectionLimiter, Limit, QuotaLimits
from node.serving.request_loop import RequestLoop

log = logging.getLogger(__name__)

BACKLOG = 128
DESCRIPTORS_LEFT_MIN = 32  # left for other uses: gRPC's connections, scrapes, files
# at a stop, for threads whose sockets were shut down; one that waits for a disk is left behind
LEAVE_S = 1.0
# With fewer connections threads have less to hand over, and answer a little sooner than the loop
LOOP_CONNECTIONS_MIN = 3
LEAVING_MAX = 16  # evicted connections whose threads have not ended yet


class ConnectionServer(abc.ABC):
    """Accept on a listening socket from `start` on.

    A connection has a thread, or waits in the request loop.

    If it is full, the longest idle connection is closed; if the new client's peer has its share,
    that peer's longest idle one.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        stall_s: float,
        cap: Limit,
        quoted: QuotaLimits = NO_QUOTAS,
    ) -> None:
        self._name = name
        self._listener = listener
        self._listener.setblocking(False)
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._limiter = ConnectionLimiter(cap, quoted)
        self._spare = SpareDescriptor()
        self._stopping = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._loop = RequestLoop(name, self, self._to_thread, self._end, stall_s)

    @property
    def count(self) -> int:
        """Return the number of connections."""
        return len(self._connections)

    @property
    def has_loop(self) -> bool:
        """Return whether there are so many connections that a loop serves their small requests."""
        return len(self._connections) >= LOOP_CONNECTIONS_MIN

    @property
    def accepts(self) -> bool:
        """Return whether the thread that accepts connections runs."""
        return self._acceptor.is_alive()

    @abc.abstractmethod
    def connection(self, sock: socket.socket, address: Any) -> Connection:
        """Make the connection of an accepted socket."""

    def start(self) -> None:
        """Start to accept."""
        self._acceptor.start()

    # ---- accept --------------------------------------------------------------------------

    def _accept(self) -> None:
        # `accept` alone would not wait when descriptors are short, but fail in a loop
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        while not self._stopping:
            waiting.poll()
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                continue  # the client has left again
            except OSError as error:
                if not self._stopping:
                    self._accept_failed(error)
                continue
            try:
                self._admit(sock, address)
            except Exhausted as error:
                log.info("%s: a connection is refused: %s", self._name, error)
                self._refuse(sock, error)
            except OSError as error:  # it hung up already
                log.info("%s: a connection could not be served: %s", self._name, error)
                sock.close()
            except Exception:
                log.exception("%s: a connection could not be served", self._name)
                sock.close()

    def _refuse(self, sock: socket.socket, error: KVStoreError) -> None:
        """Tell a client why it is refused, if that needs no wait, and hang up."""
        with contextlib.suppress(OSError), sock:
            sock.setblocking(False)
            sock.send(self.refusal(error))
            sock.shutdown(socket.SHUT_WR)

    def refusal(self, error: KVStoreError) -> bytes:
        """Return the bytes that tell a client why it is refused."""
        header = pb.BulkReply(error=message_of(error, last=True)).SerializeToString()
        return pack_fixed(len(header), 0) + header

    def _accept_failed(self, error: OSError) -> None:
        log.warning("%s: accept failed: %s", self._name, error)
        if error.errno in OUT_OF_DESCRIPTORS:
            self._limiter.drop_idle()
            self._spare.shed(self._listener)
        threading.Event().wait(0.05)  # an evicted connection needs a moment

    def _admit(self, sock: socket.socket, address: Any) -> None:
        if few_left(sock.fileno(), DESCRIPTORS_LEFT_MIN) and not self._limiter.drop_idle():
            raise Exhausted(
                f"this node has fewer than {DESCRIPTORS_LEFT_MIN} descriptors left; raise ulimit -n"
            )
        connection = self.connection(sock, address)
        connection.slot = slot = self._limiter.enter(connection.peer, connection.socket.shutdown)
        slot.idle()  # it has sent nothing yet
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Start a connection's thread. Raises Exhausted."""
        with self._changed:
            # New connections wait for evicted ones to end, or threads would accumulate.
            self._changed.wait_for(
                lambda: len(self._connections) < self._limiter.cap.total + LEAVING_MAX, 1.0
            )
            self._connections.add(connection)
        try:
            self._start_thread(connection, connection.serve)
        except RuntimeError as error:
            self._forget(connection)
            raise Exhausted(
                "this node can start no more threads; raise its limit of processes"
            ) from error

    def _start_thread(self, connection: Connection, serve: Callable[[Acceptor], bool]) -> None:
        """Serve a connection on a new thread. Raises RuntimeError."""
        threading.Thread(
            target=self._serve,
            args=(connection, serve),
            name=f"{self._name}-{connection.name}",
            daemon=True,
        ).start()

    def change_share(self, connection: Connection) -> None:
        """Count an authenticated connection to another share. Raises Exhausted."""
        if connection.slot is not None:
            connection.slot.change(connection.peer)

    def _forget(self, connection: Connection) -> None:
        if connection.slot is not None:
            connection.slot.close()
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    # ---- serve ---------------------------------------------------------------------------

    def _serve(self, connection: Connection, serve: Callable[[Acceptor], bool]) -> None:
        loop_goes_on = False
        try:
            loop_goes_on = serve(self)
        except (OSError, ProtocolError) as error:
            log.info("%s: connection of %s ended: %s", self._name, connection.name, error)
        except Exception:
            log.exception("%s: connection of %s failed", self._name, connection.name)
        if loop_goes_on:
            if not self._loop.add(connection):
                self._end(connection)
            return
        self._close(connection)

    def _to_thread(self, connection: Connection) -> None:
        """Serve a connection of the loop on a thread."""
        try:
            self._start_thread(connection, connection.proceed)
        except RuntimeError:
            log.warning("%s: no thread for %s, which is closed", self._name, connection.name)
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        """End the session of a connection that no thread serves, and close it."""
        try:
            connection.finish(self)
        finally:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.close()
        self._forget(connection)

    def begin(self, connection: Connection) -> bool:
        """Note that a request was received.

        Return False if the server stops or the connection was evicted: the request must not be
        served then.
        """
        if connection.busy:
            return True
        # without the lock: a stop sets its flag first, then checks which are busy
        connection.busy = True
        return not self._stopping and (connection.slot is None or connection.slot.busy())

    def done(self, connection: Connection) -> bool:
        """Note that a request has ended; return False if the server stops."""
        connection.busy = False
        stopping = self._stopping
        if stopping:
            with self._changed:
                self._changed.notify_all()
        if connection.slot is not None:
            connection.slot.idle()
        return not stopping

    def stop(self, drain_s: float) -> None:
        """Accept no more requests, let running ones end within `drain_s`, then close everything."""
        with self._changed:
            self._stopping = True
            for connection in self._connections:
                if not connection.busy:
                    connection.socket.shutdown()
        with contextlib.suppress(OSError):  # the gateway is gone
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.is_alive():
            self._acceptor.join(2.0)
        self._listener.close()
        self._spare.close()
        with self._changed:
            self._changed.wait_for(lambda: not any(c.busy for c in self._connections), drain_s)
            for connection in self._connections:
                connection.socket.shutdown()
            self._changed.wait_for(lambda: not self._connections, LEAVE_S)
        self._loop.stop()
