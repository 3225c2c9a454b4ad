"""Connections of clients that send frames, node side: accepted, served by a thread each, drained.

    accept --> session --> [ request --> reply ]... --> the client hangs up, stalls or breaks the rules

`node.serve.bulk` and `node.serve.shm` say what a connection does with the requests that move pages.
"""

import abc
import logging
import socket
import threading
from typing import Any, ClassVar

from google.protobuf.message import DecodeError

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import KVStoreError, ProtocolError, status_code
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.frames import FrameSocket
from node.serve.service import Service
from node.serve.session import Session

log = logging.getLogger(__name__)

BACKLOG = 128


class Connection(abc.ABC):
    """One client connection; all methods but `socket.shutdown` run in its own thread.

    A connection is a session: when it ends, in whatever way, `end` gives back what the session has.
    """

    maps_arena: ClassVar[bool] = False

    def __init__(self, sock: FrameSocket, peer: str, service: Service, stall_s: float) -> None:
        self.socket = sock
        self.peer = peer
        self.busy = False
        self.service = service
        self.stall_s = stall_s

    # ---- what differs --------------------------------------------------------------------

    @abc.abstractmethod
    def transfer(self, session: Session, op: str, request: Any) -> bool:
        """Serves a request that moves pages; False if `op` is none."""

    def greet(self) -> tuple[bytes, int] | None:
        """Whatever comes before the session; the first request, if that was part of it."""
        return None

    def unfinished(self, session: Session) -> bool:
        """Whether the client is between two requests that belong together."""
        return False

    def abandoned(self) -> bool:
        """Asked now and then while the client says nothing."""
        return False

    def end(self, session: Session) -> None:
        session.close()

    def close(self) -> None:
        self.socket.close()

    # ---- the loop ------------------------------------------------------------------------

    def serve(self, server: "ConnectionServer") -> None:
        """Until the client closes (ConnectionError), stalls (TimeoutError) or breaks the protocol."""
        try:
            first = self.greet()
            session = self.service.sessions.open(self.maps_arena)
        except KVStoreError as error:
            self.send_error(error)
            return
        try:
            self._serve_session(server, session, first)
        finally:
            server.done(self)
            self.end(session)

    def _serve_session(self, server: "ConnectionServer", session: Session, frame: tuple[bytes, int] | None) -> None:
        while True:
            frame = frame or self._wait_request()
            if frame is not None:
                if not server.begin(self):
                    return
                self._serve_request(session, *frame)
                if not self.unfinished(session) and not server.done(self):
                    return
                frame = None
            elif self.abandoned():
                return

    def _wait_request(self) -> tuple[bytes, int] | None:
        self.socket.arm(self.stall_s)  # a slow reply before may have left less, and waiting would spin
        try:
            return self.socket.wait_frame(MESSAGE_NBYTES_MAX, self.stall_s)
        except ProtocolError as error:
            self.send_error(error)
            raise

    def _serve_request(self, session: Session, header: bytes, payload_nbytes: int) -> None:
        try:
            op, request = self.parse(header, payload_nbytes)
        except ProtocolError as error:
            self.send_error(error)
            raise
        try:
            if not self.transfer(session, op, request):
                self.send(op, self.service.call(op, request))
        except KVStoreError as error:
            self.send_error(error)
            if isinstance(error, ProtocolError):
                raise

    def parse(self, header: bytes, payload_nbytes: int) -> tuple[str, Any]:
        if payload_nbytes:
            raise ProtocolError(f"a payload of {payload_nbytes} bytes where a request was expected")
        try:
            message = pb.BulkRequest.FromString(header)
        except DecodeError as error:
            raise ProtocolError("a request that is not a BulkRequest message") from error
        op = message.WhichOneof("op")
        if op is None:
            raise ProtocolError("a request without an operation")
        return op, getattr(message, op)

    def send(self, op: str, reply: Any, payload_nbytes: int = 0) -> None:
        self.socket.arm(self.stall_s)
        self.socket.send_frame(pb.BulkReply(**{op: reply}).SerializeToString(), payload_nbytes)

    def send_error(self, error: KVStoreError) -> None:
        self.send("error", pb.Error(code=status_code(error).value[0], message=str(error)))


class ConnectionServer(abc.ABC):
    """Accepts on a listening socket from `start` on, a thread per connection."""

    def __init__(self, name: str, listener: socket.socket, stall_s: float) -> None:
        self._name = name
        self._listener = listener
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._stopping = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    @property
    def count(self) -> int:
        return len(self._connections)

    @abc.abstractmethod
    def connection(self, sock: socket.socket, address: Any) -> Connection:
        """Makes the connection of an accepted socket."""

    def start(self) -> None:
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.warning("%s: accept failed: %s", self._name, error)  # such as: too many open files
                threading.Event().wait(0.1)
                continue
            try:
                self._begin(self.connection(sock, address))
            except (OSError, RuntimeError) as error:  # it hung up already; no more threads can be had
                log.warning("%s: a connection could not be served: %s", self._name, error)
                sock.close()

    def _begin(self, connection: Connection) -> None:
        name = f"{self._name}-{connection.peer}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        with self._changed:
            self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError:
            with self._changed:
                self._connections.discard(connection)
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve(self)
        except (OSError, ProtocolError) as error:
            log.info("%s: connection of %s ended: %s", self._name, connection.peer, error)
        except Exception:
            log.exception("%s: connection of %s failed", self._name, connection.peer)
        finally:
            connection.close()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def begin(self, connection: Connection) -> bool:
        """A request was received. False: the server stops, and this one belongs to nothing that was
        begun before."""
        with self._changed:
            going = connection.busy or not self._stopping
            connection.busy = True
            return going

    def done(self, connection: Connection) -> bool:
        """What was begun is finished. False: the server stops, wait for nothing more."""
        with self._changed:
            connection.busy = False
            self._changed.notify_all()
            return not self._stopping

    def stop(self, drain_s: float) -> None:
        """Takes no more requests, lets running ones end within `drain_s`, then closes everything."""
        with self._changed:
            self._stopping = True
            for connection in self._connections:
                if not connection.busy:
                    connection.socket.shutdown()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            self._changed.wait_for(lambda: not any(c.busy for c in self._connections), drain_s)
            for connection in self._connections:
                connection.socket.shutdown()
            self._changed.wait_for(lambda: not self._connections, self._stall_s)
