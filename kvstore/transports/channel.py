"""Run calls on one node: connect when a call needs it, retry once, and stop at a circuit breaker.

A connection is negotiated, dropped when it fails, and made again by the next call. One that fell
back to a slower transport keeps working while a better one is tried beside it; it closes after its
last call.

The breaker stops calls to a failed node for a while, so that callers lose at most one deadline, not
one per call.

    closed --failure--> open for `pause` --time--> half open: one call may try
      ^                                               |            |
      +------------------- success -------------------+   failure: open again, pause doubled
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import kvstore.tracing as tracing
from kvstore.config import MEMBERS_VERSION, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    KVStoreError,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from kvstore.keys import Namespace
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.steps import Steps, run
from kvstore.sync import LeaseTable, NoThread, run_in_helper_thread, start_thread
from kvstore.transports.connections import check_process
from kvstore.transports.negotiation import Negotiated, Negotiation
from kvstore.transports.wire import Wire

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# First pause of the circuit breaker
PAUSE_S_MIN = 0.1
PAUSE_PER_COST = 4
PAUSE_JITTER = 0.25
# After falling back to a slower transport: seconds until the better one is tried again
BETTER_RETRY_S = 30.0
# A call that had less time than this and got no answer says little about the node: it must not make
# the breaker refuse the calls of other threads.
EVIDENCE_S = 0.1
REFUSED = (Unauthenticated, Forbidden, ConfigError)
REOPENS_MAX = 8  # of a namespace in one call: others may remove it all the time
LIVES_S = 1.0  # seconds within which a healthy node answers hello


class CircuitBreaker:
    """Refuse calls to a node that failed, until a pause is over.

    Thread-safe.

    The clock is an argument so that tests need not wait.
    """

    def __init__(
        self,
        name: str,
        pause_s_max: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start closed; `chance` (0 to 1) shortens pauses, so that clients spread out."""
        self._name = name
        self._pause_s_max = pause_s_max
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until = 0.0
        self._trying = False
        self._cause = ""
        self._cost_s = 0.0

    @property
    def failing(self) -> bool:
        """Return whether the last result was a failure."""
        return self._failures > 0

    def enter(self) -> None:
        """Begin a call.

        Raises Unavailable at once while the breaker is open.
        """
        with self._lock:
            if self._failures == 0:
                return
            wait_s = self._open_until - self._clock()
            if wait_s > 0:
                raise Unavailable(
                    f"{self._name} failed {self._failures} times, next try in {wait_s:.1f} s; "
                    f"last: {self._cause}"
                )
            # This caller tries; the others are refused until it reports or another pause is over.
            self._open_until = self._clock() + self._pause_s()
            self._trying = True

    def success(self) -> None:
        """Reset the count of failures after a successful call."""
        if self._failures:  # unlocked on purpose: only a call that saw a failure pays for the lock
            with self._lock:
                self._failures = 0
                self._trying = False

    def failure(self, cause: Exception, cost_s: float = 0.0) -> None:
        """Count a failure, for which the caller had waited `cost_s`."""
        with self._lock:
            # Calls that were running when it opened report the same outage: it counts once.
            if self._failures and not self._trying and self._clock() < self._open_until:
                return
            self._trying = False
            self._failures += 1
            self._cause = str(cause)
            self._cost_s = cost_s
            self._open_until = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        doubled = PAUSE_S_MIN * (1 << min(self._failures - 1, 16))
        longest = min(self._pause_s_max, max(doubled, PAUSE_PER_COST * self._cost_s))
        return longest * (1 - PAUSE_JITTER * self._chance())


class NodeConnection:
    """The transport to one node, the namespaces opened on it and its running calls.

    Thread-safe.
    """

    def __init__(self, negotiated: Negotiated, retry_at: float) -> None:
        """Wrap a transport; `retry_at` is when to try a better one, in the clock's time."""
        self.negotiated = negotiated
        self.wire: Wire = negotiated.wire
        self.limits: pb.Limits = negotiated.hello.limits
        self.retry_at = retry_at
        self.opened: set[bytes] = set()
        self._lock = threading.Lock()
        self._leases: LeaseTable[None] = LeaseTable()
        self._retired = False
        self._closed = False

    @property
    def knows_members(self) -> bool:
        """Return whether the node understands requests that involve other members."""
        return self.negotiated.hello.protocol_version >= MEMBERS_VERSION

    def check_knows_members(self) -> None:
        """Raise Exhausted for a node too old for requests that involve other members."""
        if not self.knows_members:
            error = Exhausted(
                f"a member speaks protocol {self.negotiated.hello.protocol_version}, which has no "
                "requests to other members (a near node, ack=all); update it to "
                f"{MEMBERS_VERSION} or later"
            )
            error.answered = True  # the node did answer hello
            raise error

    def check_asks_others(self) -> None:
        """Raise Exhausted for a near node that cannot ask other members.

        It is an older version, or is reached by gRPC only, where it may not wait.
        """
        if self.wire.name == "grpc":
            raise Exhausted("the near node is reached by gRPC only")
        self.check_knows_members()

    def open(self, namespace: Namespace, deadline: Deadline) -> None:
        """Register the namespace at the node, once for this connection."""
        request = pb.OpenNamespaceRequest(
            namespace=namespace_message(namespace), digest=namespace.digest
        )
        self.wire.call("open_namespace", request, deadline)
        self.opened.add(namespace.digest)

    def enter(self) -> "ConnectionLease | None":
        """Begin a call, which ends with `ConnectionLease.leave`.

        Return None if this connection takes no more calls.
        """
        lease = ConnectionLease(self)
        with self._lock:
            if self._retired:
                return None
            self._leases.acquire(lease, None)
        return lease

    def leave(self, lease: "ConnectionLease") -> None:
        """Return a lease and close if this was the last of a retired connection."""
        self._leases.release(lease)
        if self._retired:
            self.close_when_left()

    def retire(self) -> None:
        """Accept no more calls, and close when the running ones have ended."""
        with self._lock:
            self._retired = True
        self.close_when_left()

    def close_when_left(self) -> bool:
        """Close it if no call uses it; return whether it is closed.

        May be called twice: an interrupt may have come in between.
        """
        if not self._closed and not self._leases.count:
            self.negotiated.close()
            self._closed = True
        return self._closed


class ConnectionLease:
    """Keep a connection open during a call.

    If an interrupt skips `leave`, the lease ends when it is collected.
    """

    __slots__ = ("__weakref__", "connection", "fresh")

    def __init__(self, connection: NodeConnection) -> None:
        self.connection = connection
        self.fresh = False  # whether the connection was made for this lease

    def leave(self) -> None:
        """Return the lease."""
        self.connection.leave(self)


class NodeChannel:
    """Keep at most one `NodeConnection` to one node and run calls on it.

    Thread-safe.
    """

    def __init__(
        self,
        address: str,
        config: ClientConfig,
        clock: Callable[[], float] = time.monotonic,
        learn: Callable[[pb.HelloReply], None] = lambda hello: None,
    ) -> None:
        """Prepare calls to one node. `learn` receives the node's hello at each connect.

        An error of `learn` ends the call.
        """
        self.address = address
        self._learn = learn
        self._config = config
        self._clock = clock
        self._breaker = CircuitBreaker(address, config.backoff_s_max, clock)
        self._negotiation = Negotiation(address, config)
        self._connect_lock = threading.Lock()  # held while one thread connects
        self._lock = threading.Lock()  # held for microseconds
        self._connection: NodeConnection | None = None
        self._closed = False
        self._running: set[str] = set()  # names of running background jobs
        self._retired: list[NodeConnection] = []  # connections that still have calls
        self._pid = os.getpid()
        self.connect_count = 0
        self.failure_count = 0

    def expect(self, bulk_port: int, member: str) -> None:
        """Note where a view says that this member serves frames (`Negotiation.expect`)."""
        self._negotiation.expect(bulk_port, member)

    @property
    def wire_name(self) -> str:
        """Return 'shm', 'bulk' or 'grpc'; 'none' without a connection."""
        connection = self._connection
        return connection.wire.name if connection else "none"

    @property
    def limits(self) -> pb.Limits | None:
        """Return the node's limits; None while it is not connected."""
        connection = self._connection
        return connection.limits if connection else None

    @property
    def failing(self) -> bool:
        """Return whether the last calls failed."""
        return self._breaker.failing

    @property
    def is_older(self) -> bool:
        """Return whether the node is connected and too old to know of other members."""
        connection = self._connection
        return connection is not None and not connection.knows_members

    def open(self, namespace: Namespace | None, deadline: Deadline) -> None:
        """Connect to the node, and register the namespace there."""
        self.run(lambda connection, limit: None, namespace, deadline)

    def run(
        self,
        work: Callable[[NodeConnection, Deadline], Result],
        namespace: Namespace | None,
        deadline: Deadline,
    ) -> Result:
        """Run `work` on the connection, with the namespace open there, under breaker and deadline.

        `work` is repeated once if a connection that had worked is dead, as after a restart of the
        node, and up to REOPENS_MAX times while the node does not know the namespace any more. A new
        connection that fails is not retried.
        """
        steps = self.steps(self._connected, NodeConnection.open, work, namespace, deadline)
        result: Result = run(steps)
        return result

    def steps(
        self,
        connect: Callable[[Deadline], Any],
        open_namespace: Callable[[NodeConnection, Namespace, Deadline], Any],
        work: Callable[[NodeConnection, Deadline], Any],
        namespace: Namespace | None,
        deadline: Deadline,
    ) -> Steps[Any]:
        """Yield the steps of `run`; asyncio passes coroutine functions (`kvstore.steps`)."""
        with tracing.span("kvstore.call", "client", address=self.address):
            deadline.remaining()  # a caller that comes too late says nothing about the node
            # First: in a child of a fork, a thread of the parent may hold the lock
            check_process(self._pid)
            if self._retired:
                self._close_retired()
            self._breaker.enter()
            began, repeats = self._clock(), 0
            while True:
                lease: ConnectionLease | None = None
                try:
                    lease = yield connect(deadline)
                    connection = lease.connection
                    if namespace is not None and namespace.digest not in connection.opened:
                        yield open_namespace(connection, namespace, deadline)
                    result = yield work(connection, deadline)
                    self._breaker.success()
                    return result
                except KVStoreError as error:
                    if lease is not None:
                        self._drop_broken(lease.connection, error, deadline)
                    repeats_max = REOPENS_MAX if isinstance(error, UnknownNamespace) else 1
                    if (
                        repeats >= repeats_max
                        or lease is None
                        or not self._worth_repeating(lease, error)
                    ):
                        self._count_failure(error, self._clock() - began, deadline)
                        raise
                    repeats += 1
                finally:
                    if lease is not None:
                        lease.leave()

    @property
    def connection(self) -> NodeConnection | None:
        """Return the connection; None without one."""
        return self._connection

    def lease_now(self) -> ConnectionLease | None:
        """Return a lease on the connection; None if one must be made."""
        # read without the lock: a connection that was retired meanwhile refuses the call
        connection = self._connection
        if connection is None or not (lease := connection.enter()):
            return None
        if self._clock() >= connection.retry_at:
            self._try_better(connection)
        return lease

    def connect(self, deadline: Deadline) -> ConnectionLease:
        """Return a lease on the connection, which may be new; `ConnectionLease.leave` ends it."""
        return self._connected(deadline)

    def _drop_broken(
        self, connection: NodeConnection, error: KVStoreError, deadline: Deadline
    ) -> None:
        """Drop the connection if the error shows that it is dead or out of step."""
        if isinstance(error, ProtocolError) or (
            isinstance(error, Unavailable) and not _hurried(deadline)
        ):
            self._drop(connection)

    def _worth_repeating(self, lease: ConnectionLease, error: KVStoreError) -> bool:
        """Return whether a retry may succeed, on a new connection or a reopened namespace."""
        if isinstance(error, UnknownNamespace):
            lease.connection.opened.clear()
            return True
        if isinstance(error, Unauthenticated):  # the token's file may have changed meanwhile
            self._drop(lease.connection)
            return not lease.fresh
        if isinstance(error, Unavailable) and not lease.fresh:
            log.info("%s: connecting again: %s", self.address, error)
            return True
        return False

    def _count_failure(self, error: KVStoreError, cost_s: float, deadline: Deadline) -> None:
        """Tell the breaker what an error says about the node; `cost_s`: how long the call took."""
        if isinstance(error, (Unavailable, DeadlineExceeded)):
            self.failure_count += 1
            if isinstance(error, Unavailable) or deadline.seconds >= EVIDENCE_S:
                self._breaker.failure(error, cost_s)
                if _hurried(deadline):
                    self._in_background("kvstore-connects", self._connect)
            if isinstance(error, DeadlineExceeded):
                self._in_background("kvstore-lives", self._check_liveness)
        elif self._connection is None and isinstance(
            error, REFUSED
        ):  # refused at the connection: without the breaker each call would connect again
            self._breaker.failure(error, cost_s)
        elif (
            error.answered
        ):  # a refusal of the node; one of ours, such as a full pool, says nothing about it
            self._breaker.success()

    def _connected(self, deadline: Deadline) -> ConnectionLease:
        """Return a lease on the connection, which may be new."""
        if lease := self.lease_now():
            return lease
        try:
            return run_in_helper_thread(partial(self._connect_uninterrupted, deadline))
        except NoThread as error:
            raise Unavailable(f"no thread to connect to {self.address} in: {error}") from error

    def _connect_uninterrupted(self, deadline: Deadline) -> ConnectionLease:
        """Connect on a thread that no signal interrupts, even if the caller is interrupted."""
        with self._connecting(deadline):
            connection = self._connection
            if connection is not None and (lease := connection.enter()):
                return lease
            if self._closed:
                raise Unavailable("this client is closed")
            negotiated = self._negotiation.open(deadline)
            try:
                self._learn(negotiated.hello)
            except BaseException:
                negotiated.close()
                raise
            connection = self._wrap(negotiated)
            lease = connection.enter()
            assert lease is not None, "it is new"
            lease.fresh = True
            if not self._replace(None, connection):
                lease.leave()
                raise Unavailable("this client is closed")
            return lease

    def _connect(self) -> None:
        """Connect on behalf of a caller that ran out of time, and of all others.

        If only callers with short deadlines tried, none would ever connect.
        """
        try:
            self._connected(Deadline(self._config.timeout_s)).leave()
            self._breaker.success()
        except KVStoreError as error:
            log.info("%s: no connection: %s", self.address, error)

    @contextlib.contextmanager
    def _connecting(self, deadline: Deadline) -> Iterator[None]:
        """Let one thread connect; the others wait until their deadline."""
        if not self._connect_lock.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded(
                f"{self.address} could not be connected to within {deadline.seconds:g} s"
            )
        try:
            yield
        finally:
            self._connect_lock.release()

    def _wrap(self, negotiated: Negotiated) -> NodeConnection:
        return NodeConnection(
            negotiated, self._clock() + BETTER_RETRY_S if negotiated.better else float("inf")
        )

    def _replace(self, old: NodeConnection | None, connection: NodeConnection) -> bool:
        """Replace `old` by a new connection.

        Return False, and retire the new one, if `old` is gone or the channel is closed.
        """
        with self._lock:
            taken = self._connection is old and not self._closed
            if taken:
                self._connection = connection
                self.connect_count += 1
        loser = old if taken else connection
        if loser:
            self._retire(loser)
        return taken

    def _drop(self, connection: NodeConnection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        self._retire(connection)

    def _retire(self, connection: NodeConnection) -> None:
        self._retired.append(connection)
        connection.retire()
        self._close_retired()

    def _close_retired(self) -> None:
        """Close connections whose last call was interrupted, on behalf of the next caller."""
        for connection in tuple(self._retired):
            if connection.close_when_left():
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._retired.remove(connection)

    # ---- a better wire -------------------------------------------------------------------

    def _try_better(self, connection: NodeConnection) -> None:
        """Try a better transport in a separate thread: no call waits for one that may hang."""
        connection.retry_at = self._clock() + BETTER_RETRY_S
        self._in_background("kvstore-better-wire", lambda: self._better(connection))

    def _in_background(self, name: str, work: Callable[[], None]) -> None:
        """Run work in a separate thread, one at a time for each name."""

        def run() -> None:
            try:
                work()
            finally:
                self._running.discard(name)

        with self._lock:
            if name in self._running or self._closed:
                return
            self._running.add(name)
        try:
            start_thread(run, name)
        except RuntimeError as error:  # no more threads can be started
            self._running.discard(name)
            log.warning("%s: no thread for %s: %s", self.address, name, error)

    def _check_liveness(self) -> None:
        """Say hello after a late call: a node with a hanging disk still answers from RAM."""
        connection = self._connection
        if connection is None or not (lease := connection.enter()):
            return
        try:
            connection.wire.call("hello", pb.HelloRequest(), Deadline(LIVES_S))
            self._breaker.success()
        except KVStoreError as error:
            log.info("%s: no sign of life: %s", self.address, error)
            if not self._breaker.failing:  # calls with short deadlines say nothing
                self._breaker.failure(error, LIVES_S)
        finally:
            lease.leave()

    def _better(self, connection: NodeConnection) -> None:
        try:
            negotiated = self._negotiation.open(Deadline(self._config.timeout_s))
            if negotiated.rank < connection.negotiated.rank:
                self._replace(connection, self._wrap(negotiated))
            else:
                negotiated.close()
        except (
            KVStoreError
        ) as error:  # calls continue on the existing connection, and notice if that fails too
            log.info("%s: no better wire: %s", self.address, error)
        finally:
            connection.retry_at = self._clock() + BETTER_RETRY_S

    def close(self) -> None:
        """Close idle connections now, and those in use when their call ends."""
        # In a child of a fork, a thread of the parent may hold the lock
        if os.getpid() != self._pid:
            if self._connection:
                self._connection.negotiated.close()
            return
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection:
            self._retire(connection)
        self._close_retired()


def _hurried(deadline: Deadline) -> bool:
    """Return whether a call failed only because its deadline was very short.

    Then the shared connection is not to blame.
    """
    return deadline.seconds < EVIDENCE_S and deadline.passed
