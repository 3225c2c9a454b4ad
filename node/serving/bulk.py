"""Serve bulk TCP: page bytes move directly between socket and arena.

put   request -> statuses -> page bytes -> commit -> reply       (reserved until commit)
get   request -> reply + page bytes                              (held until sent)
"""

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.errors import Exhausted, KVStoreError, ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from kvstore.transports.tls import NO_PLACE, TlsFrameSocket
from node.serving.acceptor import BACKLOG, ConnectionServer
from node.serving.connection import Connection, Transfer, caller_at
from node.serving.limits import TRANSFER_NBYTES_PER_S_MIN, make_limit, peer_of
from node.serving.request_metrics import RECEIVE, SEND
from node.serving.service import Service
from node.serving.session import Session
from node.tls import Certificates, Shown, describe_certificate

SOCKET_STEP_S = 0.005  # shorter transfers are no step of a slow call


class Pace:
    """Two time limits of a transfer.

    Every CHUNK_NBYTES must arrive within `stall_s`, so that a dead client is noticed. The whole
    transfer must keep a minimum rate, beside `stall_s`, so that a trickling client can not keep
    slots; this limit does not renew.
    """

    def __init__(self, nbytes: int, stall_s: float) -> None:
        self._stall_s = stall_s
        self.nbytes = nbytes
        self.limit_s = nbytes / TRANSFER_NBYTES_PER_S_MIN + stall_s
        self.began_s = time.monotonic()
        self._end = self.began_s + self.limit_s

    def next_s(self) -> float:
        """Return how many seconds the next CHUNK_NBYTES, or the rest, has.

        Raises TimeoutError.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the transfer was not over after {self.limit_s:.1f} s")
        return min(self._stall_s, left_s)


class BulkServer(ConnectionServer):
    """The server of the bulk port: it listens from the constructor on; `start` begins to serve."""

    def __init__(
        self,
        host: str,
        port: int,
        service: Service,
        stall_s: float,
        connections_max: int,
        certificates: Certificates | None = None,
    ) -> None:
        """Listen on a port; without `certificates`, without TLS."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        what = make_limit(
            "bulk connections", connections_max, "use fewer per client, or raise sessions_max"
        )
        super().__init__(
            "bulk", listener, stall_s, what, service.tenants.quoted("connections", "connections")
        )
        self.port: int = listener.getsockname()[1]
        self._service = service
        self._certificates = certificates

    def connection(self, sock: socket.socket, address: Any) -> Connection:
        """Make a connection, with TLS if the node has a certificate."""
        name, caller = f"{address[0]}:{address[1]}", caller_at(sock, peer_of(address[0]), "bulk")
        frames = (
            FrameSocket(sock)
            if self._certificates is None
            else TlsFrameSocket(sock, self._certificates.context)
        )
        return BulkConnection(frames, name, caller, self._service, self._stall_s)

    def refusal(self, error: KVStoreError) -> bytes:
        """Return the bytes to send; before a TLS handshake, an alert."""
        return super().refusal(error) if self._certificates is None else NO_PLACE


class BulkConnection(Connection):
    """A connection over TCP. A transfer that stalls or trickles (`Pace`) ends it."""

    @property
    def may_loop(self) -> bool:
        """Return whether the request loop may serve it: TLS may have to wait."""
        return self.socket.is_plain

    @property
    def client_certificate(self) -> Shown | None:
        """Return the client's certificate after its greeting; None without one."""
        return describe_certificate(self.socket.certificate)

    def greet(self) -> tuple[bytes, int]:
        """Perform the TLS handshake and receive the first frame."""
        self.socket.handshake()
        return super().greet()

    def transfer(self, op: str) -> Transfer | None:
        """Return the handler of a put or get; None for other operations. Raises ProtocolError."""
        if op == "put":
            return self._put
        if op == "get":
            return self._get
        if op == "commit":
            raise ProtocolError("a commit without a put before it")
        if op == "release":
            raise ProtocolError("a release on the bulk wire, where a get ends with its last byte")
        return None

    def _put(self, session: Session, request: pb.PutRequest) -> None:
        reply, slots = self.service.begin_put(session, request)
        self.send("put", reply)
        if not slots:
            return
        try:
            pace = Pace(sum(map(len, slots)), self.stall_s)
            commit = self._received(slots, pace)
            if time.monotonic() - pace.began_s > SOCKET_STEP_S:
                self._note_step(RECEIVE, pace)
            self.send("commit", self.service.commit_put(session, commit))
        finally:
            session.abort()  # releases uncommitted slots

    def _note_step(self, name: str, pace: Pace) -> None:
        """Remember how long a transfer took, in case that its call is a slow one."""
        self.service.traffic.slow.step(name, int(1e9 * pace.began_s))

    def _received(self, slots: Sequence[memoryview], pace: Pace) -> Any:
        try:
            return self._receive(slots, pace)
        except TimeoutError as error:
            self.send_last_error(
                Exhausted(f"a put of {len(slots)} pages took too long and is aborted: {error}")
            )
            raise
        except (KVStoreError, OSError) as error:
            raise self.report_error(error) from error

    def _receive(self, slots: Sequence[memoryview], pace: Pace) -> Any:
        """Receive the page bytes into the slots, and the commit."""
        wanted = pace.nbytes
        header, payload_nbytes = self._recv(pace)
        if header or payload_nbytes != wanted:
            raise ProtocolError(
                f"expected {wanted} page bytes, got a frame of {len(header)}+{payload_nbytes}"
            )
        self.socket.recv_all(slots, pace.next_s)
        op, commit = self.parse(*self._recv(pace))
        if op != "commit":
            raise ProtocolError(f"expected a commit after the page bytes, got {op}")
        return commit

    def _recv(self, pace: Pace) -> tuple[bytes, int]:
        self.socket.arm(pace.next_s())
        return self.socket.recv_frame(self.header_nbytes_max)

    def payload(
        self, nbytes: int, pieces: Iterator[memoryview]
    ) -> tuple[int, Iterator[memoryview]]:
        """Return how many bytes of a get are sent, and which."""
        return nbytes, pieces

    def _get(self, session: Session, request: pb.GetRequest) -> None:
        nbytes, reply, pieces = self.service.begin_get(session, request)
        pace = Pace(nbytes, self.stall_s)
        nbytes, pieces = self.payload(nbytes, pieces)
        try:
            head = self.socket.begun(pb.BulkReply(get=reply).SerializeToString(), nbytes)
            self.socket.send_all(itertools.chain((memoryview(head),), pieces), pace.next_s)
            if time.monotonic() - pace.began_s > SOCKET_STEP_S:
                self._note_step(SEND, pace)
        finally:
            session.release()
