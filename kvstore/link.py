"""The link to a node: negotiated at connect, dropped when it fails, made again by the next call."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.breaker import CircuitBreaker
from kvstore.config import PROTOCOL_VERSION, ClientConfig, split_address
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable, UnknownNamespace
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.bulk import BulkWire
from kvstore.wires.grpc_wire import GrpcWire
from kvstore.wires.shm import ShmWire
from kvstore.wires.wire import Wire

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# After falling back to a slower wire, how long until the better one is tried again.
BETTER_RETRY_S = 30.0
# A call that had less time than this and got no answer says little about the node: it must not
# make the breaker refuse the calls of other threads.
EVIDENCE_S = 0.1


@dataclass
class Link:
    """A way to one node and what is known of that node: limits, and the namespaces opened on it."""

    wire: Wire
    control: GrpcWire
    limits: pb.Limits
    good_until: float
    opened: set[bytes] = field(default_factory=set)

    def close(self) -> None:
        self.wire.close()
        self.control.close()


class NodeLink:
    """Keeps at most one `Link` to one node and runs calls on it. Thread-safe."""

    def __init__(self, address: str, config: ClientConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._config = config
        self._clock = clock
        self._breaker = CircuitBreaker(address, config.backoff_s_max, clock)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self.connect_count = 0
        self.failure_count = 0

    @property
    def wire_name(self) -> str:
        """'shm', 'bulk' or 'grpc'; 'none' before the first call and while the node is unreachable."""
        link = self._link
        return link.wire.name if link else "none"

    def run(self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline) -> Result:
        """Runs one call under breaker and deadline."""
        deadline.remaining()  # a caller who comes too late says nothing about the node
        self._breaker.enter()
        try:
            result = self._run(call, namespace, deadline)
        except (Unavailable, DeadlineExceeded) as error:
            self.failure_count += 1
            if isinstance(error, Unavailable) or deadline.seconds >= EVIDENCE_S:
                self._breaker.failure(error)
            raise
        except KVStoreError:
            self._breaker.success()  # a refusal is an answer
            raise
        self._breaker.success()
        return result

    def _run(self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline) -> Result:
        """Once more if a link that had worked is dead (the node was restarted) or the node does not
        know the namespace (any more). A link that fails when new is not tried again."""
        link, fresh = self._connected(deadline)
        try:
            return self._attempt(link, call, namespace, deadline)
        except UnknownNamespace:
            link.opened.clear()
        except Unavailable as error:
            if fresh:
                raise
            log.info("%s: connecting again: %s", self._address, error)
        link, _ = self._connected(deadline)
        return self._attempt(link, call, namespace, deadline)

    def _attempt(
        self, link: Link, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, deadline: Deadline
    ) -> Result:
        try:
            if namespace is not None and namespace.digest not in link.opened:
                request = pb.OpenNamespaceRequest(namespace=namespace_message(namespace), digest=namespace.digest)
                link.wire.call("open_namespace", request, deadline)
                link.opened.add(namespace.digest)
            return call(link, deadline)
        except (Unavailable, ProtocolError):
            self._drop(link)
            raise

    def _connected(self, deadline: Deadline) -> tuple[Link, bool]:
        """(the link, whether it was made just now)."""
        link = self._link  # read without the lock: a link that is good stays good
        if link is not None and self._clock() < link.good_until:
            return link, False
        with self._locked(deadline):
            link = self._link
            if link is not None and self._clock() < link.good_until:
                return link, False
            if self._closed:
                raise Unavailable("this client is closed")
            if link is not None:
                link.close()
            self._link = link = self._negotiate(deadline)
            return link, True

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        """The lock is held while one thread connects; the others wait no longer than they may."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded(f"{self._address} was still being connected to after {deadline.seconds:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _drop(self, link: Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def _negotiate(self, deadline: Deadline) -> Link:
        """Asks the node over gRPC what it is, then takes the best wire that works."""
        control = GrpcWire(self._address)
        try:
            limit = Deadline(min(self._config.connect_timeout_s, deadline.remaining()))
            try:
                hello = control.call("hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), limit)
            except DeadlineExceeded as error:
                raise Unavailable(f"{self._address} did not answer within {limit.seconds:g} s") from error
            wire, good_until = self._best(control, hello, deadline)
        except BaseException:
            control.close()
            raise
        self.connect_count += 1
        return Link(wire, control, hello.limits, good_until)

    def _best(self, control: GrpcWire, hello: pb.HelloReply, deadline: Deadline) -> tuple[Wire, float]:
        """(the best wire that works, the time until which it is the best). With a wire configured, that
        one or Unavailable."""
        wanted = self._config.wire
        good_until = float("inf")
        for name, without, connect in (("shm", "no shared memory", self._shm), ("bulk", "using gRPC", self._bulk)):
            if wanted not in ("auto", name):
                continue
            try:
                wire = connect(hello, deadline)
            except Unavailable as error:
                if wanted == name:
                    raise
                log.warning("%s, which is slower: %s", without, error)
                good_until = self._clock() + BETTER_RETRY_S
            else:
                if wire is not None:
                    return wire, good_until
        return control, good_until

    def _shm(self, hello: pb.HelloReply, deadline: Deadline) -> Wire | None:
        """None where nobody expects it to work: with a node on another host."""
        if not hello.shm_socket:
            if self._config.wire == "shm":
                raise Unavailable(f"{self._address} serves no shared memory")
            return None
        wire = ShmWire(hello.shm_socket, hello.instance_id, self._config)
        try:
            return _tried(wire, deadline)
        except ProtocolError as error:  # whoever listens there: the node itself was asked and is all right
            raise Unavailable(f"{hello.shm_socket}: {error}") from error
        except Unavailable:
            if wire.elsewhere and self._config.wire == "auto":
                return None
            raise

    def _bulk(self, hello: pb.HelloReply, deadline: Deadline) -> Wire:
        if not hello.bulk_port:
            raise Unavailable(f"{self._address} serves no bulk wire")
        return _tried(BulkWire(split_address(self._address)[0], hello.bulk_port, self._config), deadline)

    def close(self) -> None:
        """Closes idle connections now and those in use when their call ends."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link:
            link.close()


def _tried(wire: BulkWire | ShmWire, deadline: Deadline) -> Wire:
    """The wire with a first connection."""
    try:
        wire.connect(deadline)
    except BaseException:
        wire.close()
        raise
    return wire
