"""Negotiate the transport to a node: say hello, then connect by the best one that works.

    host:port           gRPC: hello   --> shared memory, or else bulk TCP, or else gRPC itself
    with a known port   frames: hello --> shared memory, or else bulk TCP;  if that fails, as above
    bulk://host:port    frames: hello --> shared memory, or else bulk TCP
    unix:/path          frames: hello --> shared memory

gRPC is imported when the first address needs it: a process without such an address needs no gRPC.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from kvstore.config import (
    BULK_PORT,
    BULK_SCHEME,
    GRPC_PORT,
    LOCAL,
    PROTOCOL_VERSION,
    ClientConfig,
    parse_address,
    speaks,
)
from kvstore.deadline import Deadline
from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    KVStoreError,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.secrets import check_stays_private, token_of
from kvstore.sync import Event, start_thread
from kvstore.transports.bulk import BulkWire
from kvstore.transports.connections import common_version
from kvstore.transports.grpc_process import check_headroom
from kvstore.transports.shm import ShmWire
from kvstore.transports.tls import PROBE_S, client_tls, explain_unreachable
from kvstore.transports.view_stream import Views
from kvstore.transports.wire import Wire

if TYPE_CHECKING:
    from kvstore.transports.grpc_wire import GrpcWire


log = logging.getLogger(__name__)

Tried = TypeVar("Tried", BulkWire, ShmWire)

# If an earlier answer of the resolver is known, wait this long for a new one; then use the old.
FRESH_S = 0.1
# The transports tried before gRPC, the best one first, and what a warning says without them.
BETTER = (("shm", "no shared memory"), ("bulk", "using gRPC"))
GRPC = "grpc"
RANK = {ShmWire.name: 0, BulkWire.name: 1, GRPC: 2}
# Share of the time to connect for frames at the known port; gRPC has the rest
FRAMES_SHARE = 0.5


class Addresses:
    """Resolve one host's name under a deadline. Thread-safe.

    The system's resolver has no deadline and may take half a minute, so it runs in a thread, for
    which many callers may wait. A hanging query costs its callers their deadline and the process
    one thread. The name is resolved again for each connection, so that it may change.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._numeric = _is_numeric(host)
        self._lock = threading.Lock()
        self._question: _Question | None = None
        self._known: tuple[str, ...] = (host,) if self._numeric else ()

    def resolve(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the addresses in the order in which to try them.

        Raises Unavailable or DeadlineExceeded.
        """
        if self._numeric:
            return self._known
        with self._lock:
            if self._question is None or self._question.answered.is_set():
                self._question = _Question(self._host)
            question = self._question
        question.answered.wait(
            min(FRESH_S, deadline.remaining()) if self._known else deadline.remaining()
        )
        if question.found:
            self._known = question.found
        elif not self._known:
            if question.error:
                raise Unavailable(
                    f"{self._host} can not be resolved: {question.error}"
                ) from question.error
            raise DeadlineExceeded(
                f"{self._host} was not resolved in {deadline.seconds:.3g} s: the resolver hangs"
            )
        else:
            why = question.error or f"no answer in {FRESH_S:g} s"
            log.info("%s: %s; trying the addresses known from before", self._host, why)
        return self._known


def grpc_target(found: Sequence[str], port: int) -> str:
    """Return resolved addresses in gRPC's form, so that its own resolver is not needed.

    One list holds one family: IPv4 beside IPv6 is written as IPv6.
    """
    if not any(":" in address for address in found):
        return "ipv4:" + ",".join(f"{address}:{port}" for address in found)
    six = [address if ":" in address else f"::ffff:{address}" for address in found]
    return "ipv6:" + ",".join(f"[{address.replace('%', '%25')}]:{port}" for address in six)


class _Question:
    """Call the resolver once, in a daemon thread: the process may end while it hangs."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.answered = Event()
        self.found: tuple[str, ...] = ()
        self.error: Exception | None = None
        try:
            start_thread(self._ask, f"kvstore-resolve-{host}")
        except RuntimeError as error:  # no more threads can be started
            self.error = error
            self.answered.set()

    def _ask(self) -> None:
        try:
            answers = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            self.found = tuple(dict.fromkeys(str(address[0]) for *_, address in answers))
        except (OSError, UnicodeError) as error:  # such as a name that is too long
            self.error = error
        finally:
            self.answered.set()


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


@dataclass
class Negotiated:
    """Result of a negotiation: an open transport to one run of a node, and its hello.

    `better`: a better transport should have worked and did not, so negotiating again may find it.
    `grpc` opens another channel to the node; None: the address names no gRPC port. `tells_views`:
    the node answers `follow` by frames, as far as known.
    """

    wire: Wire
    hello: pb.HelloReply
    better: bool
    grpc: "Callable[[Deadline], GrpcWire] | None" = None
    tells_views: bool = True

    @property
    def rank(self) -> int:
        """Return the rank of the transport; 0 is the best."""
        return RANK[self.wire.name]

    def follow(self, number: int, seconds: float, deadline: Deadline) -> Views:
        """Return the cluster's views for so many seconds, by frames or else over gRPC.

        `number`: of the view that is known.
        """
        if isinstance(self.wire, (BulkWire, ShmWire)) and self.tells_views:
            try:
                return self.wire.follow(number, seconds, deadline)
            except ProtocolError:
                if self.grpc is None:
                    raise
                self.tells_views = False  # an older node, which sends them over gRPC only
        if self.grpc is None:
            raise ProtocolError("this node does not send views by frames; update it")
        channel = self.grpc(deadline)
        return channel.follow(number, seconds, channel.close)

    def close(self) -> None:
        """Close the transport."""
        self.wire.close()


class First(NamedTuple):
    """The transport on which the node answered hello first, and its answer."""

    wire: Wire
    hello: pb.HelloReply


class Known(NamedTuple):
    """The frame port of the node at a gRPC address, and how to recognize the node there.

    It is recognized by its run (`instance_id`) or by its cluster and member name: another node may
    have taken over its ports.
    """

    bulk_port: int
    instance_id: bytes = b""
    member: str = ""

    def is_said_by(self, hello: pb.HelloReply) -> bool:
        """Return whether this hello comes from the known node."""
        same_run = bool(self.instance_id) and hello.instance_id == self.instance_id
        return same_run or (
            bool(self.member) and member_name(hello.view.cluster, hello.member_id) == self.member
        )


def member_name(cluster: str, member: str) -> str:
    """Return a name that is unique among the members of all clusters; empty for no member."""
    return f"{cluster}/{member}" if cluster and member else ""


def import_grpc_for(addresses: Iterable[str]) -> None:
    """Import gRPC now if an address needs it; importing takes longer than some deadlines."""
    if any(parse_address(address).scheme == GRPC for address in addresses):
        import kvstore.transports.grpc_wire  # noqa: F401


class Negotiation:
    """Negotiate with one node.

    Thread-safe. Opened transports belong to the caller.
    """

    def __init__(self, address: str, config: ClientConfig) -> None:
        self._address = address
        self._config = config
        self._at = parse_address(address)
        self._host, self._port = self._at.host, self._at.port
        self._addresses = Addresses(self._host)
        self._tls = client_tls(config, self._host)
        self._known: Known | None = None

    def expect(self, bulk_port: int, member: str) -> None:
        """Note that a view names this member's frame port: `open` tries hello there before gRPC."""
        known = self._known
        if bulk_port and (known is None or known.bulk_port != bulk_port):
            self._known = Known(bulk_port, member=member)

    def open(self, deadline: Deadline) -> Negotiated:
        """Open the best transport.

        Raises Unavailable, DeadlineExceeded, ProtocolError or the node's own error.
        """
        limit = deadline.sooner(self._config.connect_timeout_s)
        if self._at.scheme == "unix":
            wire = self._hello_by_unix_socket(limit)
            return Negotiated(wire, self._checked(wire, wire.hello), False)
        try:
            found = self._addresses.resolve(limit)
            check_stays_private(token_of(self._config), self._config, found)
        except DeadlineExceeded as error:
            raise Unavailable(str(error)) from error
        if self._at.scheme == "bulk":
            return self._best(self._hello_by_frames(self._port, found, limit), found, deadline)
        known, silent = self._known, False
        if known is not None and self._config.wire != GRPC:
            first, silent = self._hello_at_known_port(known, found, limit)
            if first is not None:
                return self._best(first, found, deadline)
        return self._best(self._hello_by_grpc(found, limit), found, deadline, silent)

    # ---- hello ---------------------------------------------------------------------------

    def _hello_at_known_port(
        self, known: Known, found: tuple[str, ...], limit: Deadline
    ) -> tuple[First | None, bool]:
        """Say hello by frames at the known port, so that clients survive an outage of gRPC.

        Return the reply, or None, and whether the connection failed. Without a reply, use gRPC:
        another node may have the port now.
        """
        try:
            first = self._hello_by_frames(
                known.bulk_port, found, limit.sooner(limit.remaining() * FRAMES_SHARE)
            )
        except KVStoreError as error:
            log.info("%s: no hello by frames: %s", self._address, error)
            return None, True
        if known.is_said_by(first.hello):
            return first, False
        first.wire.close()
        return None, False

    def _hello_by_frames(self, port: int, found: tuple[str, ...], limit: Deadline) -> First:
        """Say hello by frames over TCP."""
        wire = BulkWire(self._host, port, self._config, found, tls=self._tls)
        try:
            return First(wire, wire.greet(limit))
        except BaseException as error:
            wire.close()
            if self._tls is None and isinstance(error, (Unavailable, ProtocolError)):
                raise self._explain_by_tls(error, port, found, limit) from error
            raise

    def _hello_by_unix_socket(self, limit: Deadline) -> ShmWire:
        """Say hello by frames over the node's Unix socket."""
        config = self._config
        if self._address == LOCAL:  # shm_dir lets other users serve a socket, but not this one
            config = replace(config, shm_dir="")
        wire = ShmWire(self._at.path, b"", config, is_here=True)
        try:
            wire.greet(limit)
        except (Unauthenticated, Forbidden) as error:
            wire.close()
            refused = type(error)(
                f"{self._address}: {error}; name the node's address of TCP instead, "
                f"{BULK_SCHEME}HOST:{BULK_PORT} or HOST:{GRPC_PORT}, where no memory is mapped"
            )
            refused.answered = error.answered
            raise refused from error
        except BaseException as error:
            wire.close()
            if isinstance(error, ProtocolError) and self._address == LOCAL:
                said = ProtocolError(
                    f"{error}; `pkill -U $UID -f node.local` ends it, and engines start theirs"
                )
                said.answered = error.answered
                raise said from error
            raise
        return wire

    def _hello_by_grpc(self, found: tuple[str, ...], limit: Deadline) -> First:
        """Say hello over gRPC."""
        control = self._grpc_wire(found)
        try:
            try:
                return First(control, _hello(control, limit))
            except DeadlineExceeded as error:
                raise Unavailable(
                    f"{self._address} did not answer within {limit.seconds:.3g} s"
                ) from error
            except Unavailable as error:
                if "SETTINGS frame" in str(error):  # the peer speaks no HTTP/2
                    said = (
                        f"{self._address} answers, but not over gRPC; if this is the node's "
                        "bulk port"
                    )
                    raise Unavailable(f"{said}, write {BULK_SCHEME}{self._address}") from error
                raise self._explain_by_tls(error, self._port, found, limit) from error
        except BaseException:
            control.close()
            raise

    def grpc(self, deadline: Deadline) -> "GrpcWire":
        """Open another gRPC channel to the node, for requests that it does not answer by frames."""
        return self._grpc_wire(
            self._addresses.resolve(deadline.sooner(self._config.connect_timeout_s))
        )

    def _grpc_wire(self, found: tuple[str, ...]) -> "GrpcWire":
        from kvstore.transports.grpc_wire import GrpcWire

        check_headroom()
        return GrpcWire(
            grpc_target(found, self._port), self._address, self._tls, token_of(self._config)
        )

    def _explain_by_tls(
        self, error: KVStoreError, port: int, found: tuple[str, ...], limit: Deadline
    ) -> KVStoreError:
        """Return an error that names TLS if TLS is why the node cannot be reached.

        Neither gRPC nor frames report that by themselves.
        """
        try:
            said = explain_unreachable(found, port, self._tls, min(PROBE_S, limit.remaining()))
        except DeadlineExceeded:
            return error
        return Unavailable(f"{self._address}: {said}") if said else error

    def _checked(self, wire: Wire, hello: pb.HelloReply) -> pb.HelloReply:
        """Return the hello.

        Raises ProtocolError, and closes the transport, if its limits are impossible.
        """
        if not hello.limits.batch_keys_max:
            wire.close()
            raise ProtocolError(f"{self._address} accepts no keys at all")
        return hello

    # ---- the best wire -------------------------------------------------------------------

    def _best(
        self, first: First, found: tuple[str, ...], deadline: Deadline, silent: bool = False
    ) -> Negotiated:
        """Connect by the best transport that works, or by the configured one, or raise Unavailable.

        `silent`: nothing answered at the port where the node served frames before.
        """
        hello = self._checked(first.wire, first.hello)
        try:
            wire, missed = self._better(first, found, deadline)
        except BaseException:
            first.wire.close()
            raise
        if wire is not first.wire:
            first.wire.close()
        if self._at.scheme == GRPC:
            self._remember(wire, hello, silent)
        return Negotiated(wire, hello, missed, self.grpc if self._at.scheme == GRPC else None)

    def _remember(self, wire: Wire, hello: pb.HelloReply, silent: bool) -> None:
        """Remember where the node serves frames, unless frames do not get through."""
        port = wire.port if isinstance(wire, BulkWire) else hello.bulk_port
        if not port or wire.name == GRPC or (silent and not isinstance(wire, BulkWire)):
            self._known = None
        else:
            self._known = Known(
                port, hello.instance_id, member_name(hello.view.cluster, hello.member_id)
            )

    def _better(
        self, first: First, found: tuple[str, ...], deadline: Deadline
    ) -> tuple[Wire, bool]:
        """Return (best working transport, whether a better one should have worked and did not).

        Each try has half of the remaining time, so that one that hangs leaves time for the next.
        """
        wanted, hello = self._config.wire, first.hello
        connect: dict[str, Callable[[Deadline], Wire | None]] = {
            "shm": lambda limit: self._shm(hello, limit),
            "bulk": lambda limit: (
                first.wire if first.wire.name == "bulk" else self._bulk(hello, found, limit)
            ),
        }
        missed = False
        for name, without in BETTER:
            if wanted not in ("auto", name):
                continue
            try:
                wire = connect[name](
                    deadline if wanted == name else deadline.sooner(deadline.remaining() / 2)
                )
            except (Unavailable, DeadlineExceeded, Exhausted) as error:
                if wanted == name:
                    raise
                log.warning("%s, which is slower: %s", without, error)
                missed = True
            else:
                if wire is not None:
                    return wire, missed
        return first.wire, missed

    def _shm(self, hello: pb.HelloReply, deadline: Deadline) -> Wire | None:
        """Connect by shared memory.

        Return None if it can not be expected to work, as with a node on another host.
        """
        if not hello.shm_socket:
            if self._config.wire == "shm":
                raise Unavailable(
                    f"{self._address} serves no shared "
                    f"memory{': ' * bool(hello.shm_refused)}{hello.shm_refused}"
                )
            if hello.shm_refused:
                log.info("%s: no shared memory: %s", self._address, hello.shm_refused)
            return None
        wire = ShmWire(hello.shm_socket, hello.instance_id, self._config, common_version(hello))
        try:
            return _tried(wire, deadline)
        except (
            Unauthenticated,
            Forbidden,
        ) as error:  # the node requires a token, even with a certificate
            if self._config.wire == "shm":
                raise Unavailable(
                    f"{self._address} serves no shared memory to this client: {error}"
                ) from error
            log.info("%s: no shared memory: %s", self._address, error)
            return None
        except ProtocolError as error:  # another process listens there: the node itself is healthy
            raise Unavailable(f"{hello.shm_socket}: {error}") from error
        except Unavailable:
            if wire.elsewhere and self._config.wire == "auto":
                return None
            raise

    def _bulk(self, hello: pb.HelloReply, found: tuple[str, ...], deadline: Deadline) -> Wire:
        """Connect by bulk TCP."""
        if not hello.bulk_port:
            raise Unavailable(f"{self._address} serves no bulk wire")
        version = common_version(hello)
        wire = BulkWire(
            self._host, hello.bulk_port, self._config, found, hello.instance_id, version, self._tls
        )
        return _tried(wire, deadline)


def _hello(control: Wire, limit: Deadline) -> pb.HelloReply:
    """Say hello; again without a version to an older node that refuses ours.

    Raises ProtocolError if it is too old.
    """
    try:
        return cast(
            pb.HelloReply,
            control.call("hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), limit),
        )
    except ProtocolError:
        hello = control.call("hello", pb.HelloRequest(), limit)
        if not speaks(hello.protocol_version):
            raise
        return cast(pb.HelloReply, hello)


def _tried(wire: Tried, deadline: Deadline) -> Tried:
    """Open a first connection and return the wire; close it if that fails."""
    try:
        wire.connect(deadline)
    except BaseException:
        wire.close()
        raise
    return wire
