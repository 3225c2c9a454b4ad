"""Connections of a gateway, which asks for those who call the node over gRPC (`node.gateway`).

    on_behalf   whose requests follow: from where the call came, its token or certificate; not answered
    request     of that caller, as on the bulk wire; page bytes travel behind it

What the gateway says of a caller is believed. It can not make callers more than they are: each request is admitted by
the credential that it forwards, and counts to that caller's share of everything.
"""

import contextlib
import logging
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

from kvstore.config import GRPC_CHUNK_NBYTES, MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, ProtocolError
from kvstore.identities import Principal
from kvstore.messages import FRAME_NBYTES, chunk_head
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.chunks import runs
from kvstore.wires.frames import FrameSocket
from node.access.access import Access
from node.access.caller import Caller, nobody
from node.serve.bulk import BulkConnection
from node.serve.connections import Request, caller_at
from node.serve.descriptors import few_left
from node.serve.doors import DESCRIPTORS_LEFT_MIN, ConnectionServer
from node.serve.limits import REQUEST_NBYTES_FREE, Budget, cap, peer_of
from node.serve.service import Service
from node.serve.session import Session

log = logging.getLogger(__name__)

WIRE = "grpc"
ADMITTED = ("follow", "reflection")  # calls that a gateway answers by itself
CONNECTIONS_MAX = 1 << 12  # of one gateway, which has a connection for each call that it forwards at a time
STALL_MORE_S = 2.0  # a gateway ends calls that stall; the node does so a little later, should the gateway hang


class GatewayCalls:
    """What calls over gRPC may have of the node, all gateways' together."""

    def __init__(self, service: Service, threads: int) -> None:
        """`threads`: of four, three transfers at a time and four times as many calls (grpc_threads)."""
        remedy = "make fewer at a time"
        more = f"{remedy}, or raise grpc_threads"
        transfers = max(1, threads * 3 // 4)
        self.calls = Budget(cap("gRPC calls", 4 * threads, more), service.tenants.quoted("connections", "connections"))
        self.transfers = Budget(cap("gRPC transfers", transfers, more))
        # Of them, those that may wait for the disk or for other members: however long these hang, the others are left
        # for pages in RAM.
        self.durable = Budget(cap("gRPC durable puts", max(1, transfers // 2), more))
        self.loads = Budget(cap("gRPC gets from disk", max(1, transfers * 3 // 4), remedy))


class GatewayDoor(ConnectionServer):
    """Takes the connections that one gateway makes, which come over a socket that only it has."""

    def __init__(self, name: str, door: socket.socket, service: Service, calls: GatewayCalls, stall_s: float) -> None:
        super().__init__(name, door, stall_s, cap("connections of a gateway", CONNECTIONS_MAX, "make fewer calls"))
        self._service = service
        self._calls = calls

    def connection(self, sock: socket.socket, address: Any) -> "GatewayConnection":
        return GatewayConnection(sock, self._service, self._calls, self._stall_s)

    def _accept(self) -> None:
        """Until the gateway is gone, or this stops."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        while not self._stopping:
            waiting.poll()
            try:
                data, fds, _, _ = socket.recv_fds(self._listener, 1, 1)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not data:
                return
            for fd in fds:  # none: there was no descriptor left for it, and the gateway finds it closed
                self._take(fd)

    def _take(self, fd: int) -> None:
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            log.warning("%s: a descriptor that is no connection: %s", self._name, error)
            return os.close(fd)
        try:
            if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
                raise Exhausted("a gateway's connections are Unix sockets")
            if few_left(sock.fileno(), DESCRIPTORS_LEFT_MIN):
                raise Exhausted(f"this node has fewer than {DESCRIPTORS_LEFT_MIN} descriptors left; raise ulimit -n")
            if self.count >= CONNECTIONS_MAX:
                raise Exhausted(f"this gateway has {CONNECTIONS_MAX} connections, and may have no more")
            self._begin(self.connection(sock, ""))
        except Exhausted as error:
            self._refuse(sock, error)


class GatewayConnection(BulkConnection):
    """`caller` is the one on whose behalf the gateway asked last."""

    of_gateway = True
    header_nbytes_max = MESSAGE_NBYTES_MAX + 64  # the largest message, and the frame's own fields

    def __init__(self, sock: socket.socket, service: Service, calls: GatewayCalls, stall_s: float) -> None:
        unknown = caller_at(sock, "gateway", WIRE)
        super().__init__(FrameSocket(sock), "gateway", unknown, service, stall_s + STALL_MORE_S)
        self._calls = calls
        self._gone = unknown.gone
        self._access: Access = service.gate.access
        self._identities = self._access.identities  # those in force when the caller was taken
        self._told: pb.OnBehalfRequest | None = None

    def serve(self, server: Any) -> None:
        """Until the gateway closes it. A transfer has a session of its own."""
        try:
            while request := self._next():
                if not server.begin(self):
                    return
                self.serve_request(None, *request)
                if not server.done(self):
                    return
        except ConnectionResetError:
            pass  # as it ends whenever the gateway has no use for it, or a caller has left
        finally:
            server.done(self)

    def _next(self) -> Request:
        """The next request; callers are taken in between."""
        while True:
            request = self._wait_request()
            if request is None:
                continue
            if request[0] == "on_behalf":
                self._take_caller(request[1])
                continue
            if self._told is not None and self._access.identities is not self._identities:
                self._take_caller(self._told)  # who it is may have another tenant now
            return request

    def _take_caller(self, told: pb.OnBehalfRequest) -> None:
        self._told, self._identities = told, self._access.identities
        at = peer_of(told.address.rpartition(":")[0].strip("[]"))
        names = tuple(told.names)

        def who() -> Principal:
            if told.authorization:
                return self._access.of_headers(told.authorization, ())
            return self._access.of_certificate(names) if names else nobody()

        peer = at
        if not self._access.open:
            with contextlib.suppress(KVStoreError):  # each request says so
                peer = self._access.share(who()) or at
        self.caller = Caller(peer, self._gone, who=who, at=at, wire=WIRE)
        self.peer = peer

    def _admit(self, header_nbytes: int) -> None:
        """Strangers send no large requests."""
        if header_nbytes > REQUEST_NBYTES_FREE:
            gate, caller = self.service.gate, self.caller
            gate.known("large request", caller.at or caller.peer, lambda: gate.who(caller))
        super()._admit(header_nbytes)

    def parse(self, header: bytes, payload_nbytes: int) -> Request:
        """What callers send is inside: it may be anything, and costs nobody else the connection."""
        try:
            return super().parse(header, payload_nbytes)
        except ProtocolError as error:
            if payload_nbytes:
                raise
            log.info("grpc: a call of %s is refused: its request is no message of the schema", self.peer)
            raise InvalidRequest("a request that is no message of the schema") from error

    def transfer(self, session: Session | None, op: str, request: Any) -> bool:
        with self._calls.calls.lent(self.peer):
            if op == "admit":
                self._admit_op(request.op)
            elif op == "put":
                self._serve_put(request)
            elif op == "get":
                self._serve_get(request)
            elif op in ("commit", "release"):
                raise ProtocolError(f"a {op} from a gateway that belongs to nothing")
            else:
                self.send(op, self._answer(op, request))
        return True

    def _admit_op(self, op: str) -> None:
        if op not in ADMITTED:
            raise ProtocolError(f"a gateway asks about {op!r}, which it does not answer by itself")
        self.service.gate.admit(op, None, self.caller)
        self.send("admit", pb.AdmitReply())

    def _serve_put(self, request: pb.PutRequest) -> None:
        waits = self._calls.durable.lent(self.peer, int(request.durable or request.ack_all))
        with waits, self._calls.transfers.lent(self.peer), self.service.sessions.open(self.caller) as session:
            self._put(session, request)

    def _serve_get(self, request: pb.GetRequest) -> None:
        with self._calls.transfers.lent(self.peer), self.service.sessions.open(self.caller) as session:
            session.loading = self._loading
            self._get(session, request)

    def payload(self, nbytes: int, pieces: Iterator[memoryview]) -> tuple[int, Iterator[memoryview]]:
        """Framed for gRPC, so that the gateway copies nothing."""
        whole, rest = divmod(nbytes, GRPC_CHUNK_NBYTES)
        framed = whole * FRAME_NBYTES + (len(chunk_head(rest)) + rest if rest else 0)
        return framed, _framed(pieces)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        with self._calls.loads.lent(self.peer):
            yield


def _framed(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The pieces, with what a GetFrame has before each chunk."""
    for run in runs(pieces):
        yield memoryview(chunk_head(sum(piece.nbytes for piece in run)))
        yield from run
