"""The bulk TCP wire, node side: one thread per connection, page bytes straight between socket and
arena.

    put   request -> verdicts -> page bytes -> commit -> reply       (reserved until commit)
    get   request -> reply + page bytes                              (held until sent)

A connection is a session: when it ends, in whatever way, its reservation and holds end too.
"""

import logging
import socket
import threading
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.checksum import CHUNK_NBYTES
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import KVStoreError, ProtocolError, status_code
from kvstore.frames import FrameSocket
from kvstore.pb import kvstore_pb2 as pb
from node.service import Service
from node.session import Session

log = logging.getLogger(__name__)

BACKLOG = 128


class BulkServer:
    """Listens from the constructor on; `start` begins to serve."""

    def __init__(self, host: str, port: int, service: Service, stall_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._service = service
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._stopping = False
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.warning("bulk: accept failed: %s", error)  # such as: too many open files
                threading.Event().wait(0.1)
                continue
            try:
                self._begin(sock, f"{peer[0]}:{peer[1]}")
            except (OSError, RuntimeError) as error:  # it hung up already; no more threads can be had
                log.warning("bulk: connection of %s could not be served: %s", peer[0], error)
                sock.close()

    def _begin(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(self, FrameSocket(sock), peer)
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"bulk-{peer}", daemon=True)
        with self._changed:
            self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError:
            with self._changed:
                self._connections.discard(connection)
            raise

    def _serve(self, connection: "Connection") -> None:
        try:
            connection.serve(self._service, self._stall_s)
        except (OSError, ProtocolError) as error:
            log.info("bulk: connection of %s ended: %s", connection.peer, error)
        except Exception:
            log.exception("bulk: connection of %s failed", connection.peer)
        finally:
            connection.socket.close()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def set_busy(self, connection: "Connection", busy: bool) -> bool:
        """Marks a connection as working on a request. False: the server stops, do not begin one."""
        with self._changed:
            connection.busy = busy
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


class Connection:
    """One client connection; all methods but `socket.shutdown` run in its own thread."""

    def __init__(self, server: BulkServer, sock: FrameSocket, peer: str) -> None:
        self.socket = sock
        self.peer = peer
        self.busy = False
        self._server = server

    def serve(self, service: Service, stall_s: float) -> None:
        """Until the client closes (ConnectionError), stalls (TimeoutError) or breaks the protocol."""
        self._service = service
        self._stall_s = stall_s
        try:
            session = service.sessions.open()
        except KVStoreError as error:
            self._send_error(error)
            return
        with session:
            while True:
                frame = self._wait_request()
                if frame is None:
                    continue
                if not self._server.set_busy(self, True):
                    return
                self._serve_request(session, *frame)
                if not self._server.set_busy(self, False):
                    return

    def _wait_request(self) -> tuple[bytes, int] | None:
        self.socket.arm(self._stall_s)  # a slow reply before may have left less, and waiting would spin
        try:
            return self.socket.wait_frame(MESSAGE_NBYTES_MAX, self._stall_s)
        except ProtocolError as error:
            self._send_error(error)
            raise

    def _serve_request(self, session: Session, header: bytes, payload_nbytes: int) -> None:
        try:
            op, request = self._parse(header, payload_nbytes)
        except ProtocolError as error:
            self._send_error(error)
            raise
        try:
            if op == "put":
                self._put(session, request)
            elif op == "get":
                self._get(session, request)
            elif op == "commit":
                raise ProtocolError("a commit without a put before it")
            else:
                self._send(op, self._service.call(op, request))
        except KVStoreError as error:
            self._send_error(error)
            if isinstance(error, ProtocolError):
                raise

    def _parse(self, header: bytes, payload_nbytes: int) -> tuple[str, Any]:
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

    def _put(self, session: Session, request: pb.PutRequest) -> None:
        reply, slots = self._service.begin_put(session, request)
        self._send("put", reply)
        if not slots:
            return
        try:
            header, payload_nbytes = self._recv()
            wanted = sum(slot.nbytes for slot in slots)
            if header or payload_nbytes != wanted:
                raise ProtocolError(f"expected {wanted} page bytes, got a frame of {len(header)}+{payload_nbytes}")
            moved = CHUNK_NBYTES
            for slot in slots:
                for start in range(0, slot.nbytes, CHUNK_NBYTES):
                    if moved >= CHUNK_NBYTES:  # each 256 KiB has its time, small pages share it
                        self.socket.arm(self._stall_s)
                        moved = 0
                    self.socket.recv_into(slot[start : start + CHUNK_NBYTES])
                    moved += min(CHUNK_NBYTES, slot.nbytes - start)
            op, commit = self._parse(*self._recv())
            if op != "commit":
                raise ProtocolError(f"expected a commit after the page bytes, got {op}")
            self._send("commit", self._service.commit_put(session, commit))
        finally:
            session.abort()  # of what was not committed

    def _recv(self) -> tuple[bytes, int]:
        self.socket.arm(self._stall_s)
        return self.socket.recv_frame(MESSAGE_NBYTES_MAX)

    def _get(self, session: Session, request: pb.GetRequest) -> None:
        reply, pieces = self._service.begin_get(session, request)
        try:
            self._send("get", reply, sum(piece.nbytes for piece in pieces))
            for piece in pieces:
                for start in range(0, piece.nbytes, CHUNK_NBYTES):
                    self.socket.arm(self._stall_s)
                    self.socket.send(piece[start : start + CHUNK_NBYTES])
        finally:
            session.release()

    def _send(self, op: str, reply: Any, payload_nbytes: int = 0) -> None:
        self.socket.arm(self._stall_s)
        self.socket.send_frame(pb.BulkReply(**{op: reply}).SerializeToString(), payload_nbytes)

    def _send_error(self, error: KVStoreError) -> None:
        message = pb.Error(code=status_code(error).value[0], message=str(error))
        self._send("error", message)
