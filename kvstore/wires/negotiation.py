"""Which way to a node: it is asked over gRPC what it is, then the best wire that works is taken.

name --addresses--> gRPC: hello --> shared memory, or else bulk TCP, or else gRPC itself
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from kvstore.config import PROTOCOL_VERSION, ClientConfig, speaks, split_address
from kvstore.credentials import check_stays_private, token_of
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Forbidden, ProtocolError, Unauthenticated, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.addresses import Addresses, grpc_target
from kvstore.wires.bulk import BulkWire
from kvstore.wires.grpc_wire import GrpcWire
from kvstore.wires.headroom import check_headroom
from kvstore.wires.shm import ShmWire
from kvstore.wires.tls import PROBE_S, client_tls, why_not
from kvstore.wires.wire import Wire

log = logging.getLogger(__name__)
Tried = TypeVar("Tried", BulkWire, ShmWire)

# The wires that are tried before gRPC, the best one first, and what a warning says without them.
BETTER = (("shm", "no shared memory"), ("bulk", "using gRPC"))
RANK = {ShmWire.name: 0, BulkWire.name: 1, GrpcWire.name: 2}


@dataclass
class Way:
    """An open way to one run of a node, which said `hello`. `better`: a wire that should have worked did not, so asking
    again may find a better one."""

    wire: Wire
    control: GrpcWire
    hello: pb.HelloReply
    better: bool

    @property
    def rank(self) -> int:
        """Of its wire; 0 is the best."""
        return RANK[self.wire.name]

    def close(self) -> None:
        self.wire.close()
        self.control.close()


class Negotiation:
    """With one node. Thread-safe; what it opened before is left alone."""

    def __init__(self, address: str, config: ClientConfig) -> None:
        self._address = address
        self._config = config
        self._host, self._port = split_address(address)
        self._addresses = Addresses(self._host)
        self._tls = client_tls(config, self._host)

    def open(self, deadline: Deadline) -> Way:
        """Raises Unavailable, DeadlineExceeded, ProtocolError or what else the node answers."""
        limit = deadline.sooner(self._config.connect_timeout_s)
        try:
            found = self._addresses.resolve(limit)
            check_headroom()
            token = token_of(self._config)
            check_stays_private(token, self._config, found)
            control = GrpcWire(grpc_target(found, self._port), self._address, self._tls, token)
        except DeadlineExceeded as error:
            raise Unavailable(str(error)) from error
        try:
            try:
                hello = _hello(control, limit)
            except DeadlineExceeded as error:
                raise Unavailable(f"{self._address} did not answer within {limit.seconds:.3g} s") from error
            except Unavailable as error:
                raise self._better_said(error, found, limit) from error
            if not hello.limits.batch_keys_max:
                raise ProtocolError(f"{self._address} says that it takes no keys at all")
            wire, better = self._best(control, hello, found, deadline)
        except BaseException:
            control.close()
            raise
        return Way(wire, control, hello, better)

    def _better_said(self, error: Unavailable, found: tuple[str, ...], limit: Deadline) -> Unavailable:
        """Where a node can not be reached because of TLS, gRPC hardly says so."""
        try:
            said = why_not(found, self._port, self._tls, min(PROBE_S, limit.remaining()))
        except DeadlineExceeded:
            return error
        return Unavailable(f"{self._address}: {said}") if said else error

    def _best(
        self, control: GrpcWire, hello: pb.HelloReply, found: tuple[str, ...], deadline: Deadline
    ) -> tuple[Wire, bool]:
        """(the best wire that works, whether one that should have did not). With a wire configured, that one or
        Unavailable.

        A try gets half of the time that is left, so that one that hangs leaves the call the time to go another way.
        """
        wanted = self._config.wire
        connect: dict[str, Callable[[Deadline], Wire | None]] = {
            "shm": lambda limit: self._shm(hello, limit),
            "bulk": lambda limit: self._bulk(hello, found, limit),
        }
        missed = False
        for name, without in BETTER:
            if wanted not in ("auto", name):
                continue
            try:
                wire = connect[name](deadline if wanted == name else deadline.sooner(deadline.remaining() / 2))
            except (Unavailable, DeadlineExceeded) as error:
                if wanted == name:
                    raise
                log.warning("%s, which is slower: %s", without, error)
                missed = True
            else:
                if wire is not None:
                    return wire, missed
        return control, missed

    def _shm(self, hello: pb.HelloReply, deadline: Deadline) -> Wire | None:
        """None where nobody expects it to work: with a node on another host."""
        if not hello.shm_socket:
            if self._config.wire == "shm":
                raise Unavailable(
                    f"{self._address} serves no shared memory{': ' * bool(hello.shm_refused)}{hello.shm_refused}"
                )
            if hello.shm_refused:
                log.info("%s: no shared memory: %s", self._address, hello.shm_refused)
            return None
        wire = ShmWire(hello.shm_socket, hello.instance_id, self._config, _common(hello))
        try:
            return _tried(wire, deadline)
        except (Unauthenticated, Forbidden) as error:  # it asks for a token, also of who has a certificate
            if self._config.wire == "shm":
                raise Unavailable(f"{self._address} serves no shared memory to this client: {error}") from error
            log.info("%s: no shared memory: %s", self._address, error)
            return None
        except ProtocolError as error:  # whoever listens there: the node itself was asked and is all right
            raise Unavailable(f"{hello.shm_socket}: {error}") from error
        except Unavailable:
            if wire.elsewhere and self._config.wire == "auto":
                return None
            raise

    def _bulk(self, hello: pb.HelloReply, found: tuple[str, ...], deadline: Deadline) -> Wire:
        if not hello.bulk_port:
            raise Unavailable(f"{self._address} serves no bulk wire")
        wire = BulkWire(self._host, hello.bulk_port, self._config, found, hello.instance_id, _common(hello), self._tls)
        return _tried(wire, deadline)


def _hello(control: GrpcWire, limit: Deadline) -> pb.HelloReply:
    """An older node refuses our version, and then is asked for its own. Raises ProtocolError if that is too old."""
    try:
        return cast(pb.HelloReply, control.call("hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), limit))
    except ProtocolError:
        hello = control.call("hello", pb.HelloRequest(), limit)
        if not speaks(hello.protocol_version):
            raise
        return cast(pb.HelloReply, hello)


def _common(hello: pb.HelloReply) -> int:
    """The version in which to speak with a node: the older of both."""
    return min(hello.protocol_version or PROTOCOL_VERSION, PROTOCOL_VERSION)


def _tried(wire: Tried, deadline: Deadline) -> Tried:
    """The wire with a first connection."""
    try:
        wire.connect(deadline)
    except BaseException:
        wire.close()
        raise
    return wire
