"""Serve the connections of a gateway, which forwards the calls of gRPC clients (`node.gateway`).

    on_behalf   the caller of the next requests: address, token, certificate names; no reply
    request     of that caller, as over bulk TCP; page bytes follow

Each request is admitted by the caller's credential, and counts to that caller's limits. The node
verifies tokens itself; it trusts the gateway for addresses and certificate names (docs/SECURITY.md,
"Gateways").
"""

import contextlib
import ipaddress
import logging
import os
import select
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvstore.config import GRPC_CHUNK_NBYTES, MESSAGE_NBYTES_MAX
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, ProtocolError
from kvstore.messages import FRAME_NBYTES, chunk_head, field_of
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal
from kvstore.transports.frames import FrameSocket, runs
from node.auth.access import Access, Caller, refuse_anonymous
from node.serving.acceptor import DESCRIPTORS_LEFT_MIN, ConnectionServer
from node.serving.bulk import BulkConnection
from node.serving.connection import Request, Transfer, caller_at, few_left
from node.serving.limits import REQUEST_NBYTES_FREE, Budget, make_limit, peer_of
from node.serving.service import Service

log = logging.getLogger(__name__)

WIRE = "grpc"
ON_BEHALF = pb.BulkRequest.ON_BEHALF_FIELD_NUMBER
ADMITTED = ("follow", "reflection")  # calls that a gateway answers itself
CONNECTIONS_MAX = 1 << 12  # of one gateway, however many calls it may have
# beside those of calls: admissions of follow and reflection, and ending calls
CONNECTIONS_MORE = 256
# a gateway ends stalled calls; the node does so a little later, in case the gateway hangs
STALL_MORE_S = 2.0


def connections_max(threads: int) -> int:
    """Return the connections of one gateway: one per forwarded call, and as many for ending calls.

    `threads` is grpc_threads, each of which allows four calls. A connection costs the node a thread
    and a descriptor.
    """
    return min(CONNECTIONS_MAX, 8 * threads + CONNECTIONS_MORE)


class GatewayCalls:
    """Limits on calls over gRPC, shared by all gateways of the node."""

    def __init__(self, service: Service, threads: int) -> None:
        """Prepare limits: 3/4 as many transfers as grpc_threads, and four times as many calls."""
        self.connections_max = connections_max(threads)  # of each gateway
        remedy = "make fewer at a time"
        more = f"{remedy}, or raise grpc_threads"
        transfers = max(1, threads * 3 // 4)
        self.calls = Budget(
            make_limit("gRPC calls", 4 * threads, more),
            service.tenants.quoted("connections", "connections"),
        )
        self.transfers = Budget(make_limit("gRPC transfers", transfers, more))
        # Those of them that may wait for the disk or for other members: if these hang, other
        # transfers are still served from RAM.
        self.durable = Budget(make_limit("gRPC durable puts", max(1, transfers // 2), more))
        self.loads = Budget(make_limit("gRPC gets from disk", max(1, transfers * 3 // 4), remedy))


class GatewayDoor(ConnectionServer):
    """Accept one gateway's connections, which arrive as descriptors over its own socket."""

    def __init__(
        self, name: str, door: socket.socket, service: Service, calls: GatewayCalls, stall_s: float
    ) -> None:
        super().__init__(
            name,
            door,
            stall_s,
            make_limit("connections of a gateway", calls.connections_max, "make fewer calls"),
        )
        self._service = service
        self._calls = calls

    def connection(self, sock: socket.socket, address: Any) -> "GatewayConnection":
        """Make a gateway's connection."""
        return GatewayConnection(sock, self._service, self._calls, self._stall_s)

    def _accept(self) -> None:
        """Accept until the gateway is gone or the server stops."""
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
            for fd in fds:  # none was free, so the gateway finds its end closed
                self._take(fd)

    def _take(self, fd: int) -> None:
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            log.info("%s: a descriptor that is no connection: %s", self._name, error)
            return os.close(fd)
        try:
            if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
                raise Exhausted("a gateway's connections are Unix sockets")
            if few_left(sock.fileno(), DESCRIPTORS_LEFT_MIN):
                raise Exhausted(
                    f"this node has fewer than {DESCRIPTORS_LEFT_MIN} descriptors left; raise "
                    "ulimit -n"
                )
            if self.count >= self._calls.connections_max:
                raise Exhausted(f"this gateway has {self.count} connections, and may have no more")
            self._begin(self.connection(sock, ""))
        except Exhausted as error:
            self._refuse(sock, error)
        except Exception:  # a faulty gateway must not end the thread that accepts its connections
            log.exception("%s: a connection could not be served", self._name)
            sock.close()


class GatewayConnection(BulkConnection):
    """A connection of a gateway.

    `caller` is the one that its last `on_behalf` frame named.
    """

    of_gateway = True
    header_nbytes_max = MESSAGE_NBYTES_MAX + 64  # the largest message, and the frame's own fields

    def __init__(
        self, sock: socket.socket, service: Service, calls: GatewayCalls, stall_s: float
    ) -> None:
        unknown = caller_at(sock, "gateway", WIRE)
        super().__init__(FrameSocket(sock), "gateway", unknown, service, stall_s + STALL_MORE_S)
        self._calls = calls
        self._has_left = unknown.has_left
        self._access: Access = service.authorizer.access
        self._identities = self._access.identities  # those in force when the caller was set
        self._on_behalf: pb.OnBehalfRequest | None = None

    def serve(self, server: Any) -> bool:
        """Serve requests until the gateway closes.

        Each transfer has a session of its own.
        """
        try:
            while request := self._next():
                if not server.begin(self):
                    break
                self.serve_request(None, *request)
                if not server.done(self):
                    break
        except ConnectionResetError:
            pass  # the normal end, when the gateway does not need it or a caller has left
        finally:
            server.done(self)
        return False

    def _next(self) -> Request:
        """Return the next request; apply `on_behalf` frames on the way."""
        while True:
            request = self._wait_request()
            if request is None:
                continue
            if request[0] == "on_behalf":
                self._take_caller(request[1])
                continue
            if self._on_behalf is not None and self._access.identities is not self._identities:
                self._take_caller(self._on_behalf)  # its identity may have another tenant now
            return request

    def _take_caller(self, on_behalf: pb.OnBehalfRequest) -> None:
        """Set the caller of the next requests to the one that the gateway named."""
        self._on_behalf, self._identities = on_behalf, self._access.identities
        at = _peer_at(on_behalf.address)
        names = tuple(on_behalf.names)

        def principal() -> Principal:
            if on_behalf.authorization:
                return self._access.of_headers(on_behalf.authorization, ())
            return self._access.of_certificate(names) if names else refuse_anonymous()

        peer = at
        if not self._access.open:
            with contextlib.suppress(KVStoreError):  # each request repeats the error
                peer = self._access.share(principal()) or at
        self.caller = Caller(peer, self._has_left, principal=principal, address=at, wire=WIRE)
        self.peer = peer

    def _admit(self, header_nbytes: int) -> None:
        """Refuse large requests of clients without a valid credential before they are received."""
        if header_nbytes > REQUEST_NBYTES_FREE:
            gate, caller = self.service.authorizer, self.caller
            gate.authenticate(
                "large request", caller.address or caller.peer, lambda: gate.principal_of(caller)
            )
        super()._admit(header_nbytes)

    def parse(self, header: bytes, payload_nbytes: int) -> Request:
        """Parse a request; a caller's invalid one does not end the connection.

        An invalid frame of the gateway about a caller does, or the next request might be taken for
        another caller's.
        """
        try:
            return super().parse(header, payload_nbytes)
        except KVStoreError as error:
            if field_of(memoryview(header))[0] == ON_BEHALF:
                raise ProtocolError(f"the caller is not understood: {error}") from error
            if not isinstance(error, ProtocolError):
                raise
            if payload_nbytes:
                raise
            log.info(
                "grpc: a call of %s is refused: its request is no message of the schema", self.peer
            )
            raise InvalidRequest("a request that is no message of the schema") from error

    def transfer(self, op: str) -> Transfer:
        """Return the handler of a forwarded operation."""
        return partial(self._forwarded, op)

    def _forwarded(self, op: str, _: object, request: Any) -> None:
        """Serve a call that the gateway forwards, within the limits on such calls.

        Feeds have a limit of their own, and may wait for as long as nothing happens.
        """
        with self._calls.calls.lent(self.peer, int(op != "feed")):
            if op == "admit":
                self._admit_op(request.op)
            elif op == "put":
                self._serve_put(request)
            elif op == "get":
                self._serve_get(request)
            elif op in ("commit", "release", "follow"):
                raise ProtocolError(f"a {op} from a gateway without a request before it")
            else:
                self.send(op, self._answer(op, request))

    def _admit_op(self, op: str) -> None:
        if op not in ADMITTED:
            raise ProtocolError(f"a gateway asks about {op!r}, which it does not answer by itself")
        self.service.authorizer.admit(op, None, self.caller)
        self.send("admit", pb.AdmitReply())

    def _serve_put(self, request: pb.PutRequest) -> None:
        waits = self._calls.durable.lent(self.peer, int(request.durable or request.ack_all))
        with (
            waits,
            self._calls.transfers.lent(self.peer),
            self.service.sessions.open(self.caller) as session,
        ):
            self._put(session, request)

    def _serve_get(self, request: pb.GetRequest) -> None:
        with (
            self._calls.transfers.lent(self.peer),
            self.service.sessions.open(self.caller) as session,
        ):
            session.loading = lambda: self._calls.loads.lent(self.peer)
            self._get(session, request)

    def payload(
        self, nbytes: int, pieces: Iterator[memoryview]
    ) -> tuple[int, Iterator[memoryview]]:
        """Frame page bytes as gRPC messages, so that the gateway copies nothing."""
        whole, rest = divmod(nbytes, GRPC_CHUNK_NBYTES)
        framed = whole * FRAME_NBYTES + (len(chunk_head(rest)) + rest if rest else 0)
        return framed, _framed(pieces)


def _peer_at(address: str) -> str:
    """Return the key that limits count a caller at host:port by.

    Only addresses count: another string could be the key of a tenant, whose limits would be used
    up.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "gateway"
    return peer_of(host)


def _framed(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the pieces, with a GetFrame's header before each chunk."""
    for run in runs(pieces):
        yield memoryview(chunk_head(sum(piece.nbytes for piece in run)))
        yield from run
