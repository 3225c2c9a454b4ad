"""Count durations, tiers of gets, bytes and errors by operation and transport.

    a transport's edge --> answered: how long; not answered: why      (connection.py, call.py)
    begin_get          --> how long until all pages are in RAM, and which tiers had them

Times are taken at these points only. No label names a caller or a page.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import add
from time import monotonic_ns
from typing import Any, NamedTuple

from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.status import status_code

# Slow calls, and what they waited for: the newest ones, without callers.

SLOW_NS = 100_000_000
KEPT = 32
STEPS_MAX = 8  # of one thread that are remembered
# Calls that may take long.
LONG = frozenset(
    (
        *("flush", "scrub", "recover", "drain", "sweep", "forget", "remove_namespace", "record"),
        "push_identities",
    )
)


class Span(NamedTuple):
    """A part of a call, from `at_ms` after its begin."""

    name: str
    at_ms: float
    took_ms: float


class Subject(NamedTuple):
    """Subject of a call.

    `key` is the first prefix hash. `nbytes` are those of the requested pages that a put or get
    moves at most.
    """

    namespace: bytes = b""
    tenant: str = ""
    model: str = ""
    key: bytes = b""
    page_count: int = 0
    nbytes: int = 0


class SlowCall(NamedTuple):
    """A slow call and its steps; `error` is the gRPC code of a failed one."""

    op: str
    wire: str
    unix_s: float
    took_ms: float
    spans: tuple[Span, ...]
    subject: Subject
    error: str


class SlowCalls:
    """The newest slow calls. Thread-safe.

    Steps belong to their own thread's current call. `describe` returns the subject of a session's
    request; only slow calls need it.
    """

    def __init__(self) -> None:
        self.describe: Callable[[Any, Any], Subject] = lambda session, request: Subject()
        self._calls: deque[SlowCall] = deque(maxlen=KEPT)
        self._of_thread = threading.local()

    def step(self, name: str, began_ns: int, end_ns: int = 0) -> None:
        """Add a step of this thread's current call that ended at `end_ns`, or just now."""
        steps = getattr(self._of_thread, "steps", None)
        if steps is None:
            steps = self._of_thread.steps = deque(maxlen=STEPS_MAX)
        steps.append((name, began_ns, end_ns or monotonic_ns()))

    def ended(
        self,
        op: str,
        wire: str,
        began_ns: int,
        ns: int,
        session: Any = None,
        request: Any = None,
        error: str = "",
    ) -> None:
        """Keep a slow call, unless its operation may take long."""
        if op in LONG:
            return
        steps = [step for step in getattr(self._of_thread, "steps", ()) if step[1] >= began_ns]
        spans = tuple(
            Span(name, (began - began_ns) / 1e6, (end - began) / 1e6) for name, began, end in steps
        )
        unix_s, subject = time.time() - ns / 1e9, self.describe(session, request)
        self._calls.appendleft(SlowCall(op, wire, unix_s, ns / 1e6, spans, subject, error))

    def newest(self) -> list[SlowCall]:
        """Return the newest slow calls."""
        return list(self._calls)


# Upper bounds of the buckets in seconds; longer durations are in a last one.
BOUNDS_S = (
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_BOUNDS_NS = tuple(round(1e9 * bound) for bound in BOUNDS_S)

# Requests of the schema that are timed. Views and the feed are followed for as long as clients
# wish; gateways send the others on their own account.
TIMED = frozenset(
    field.name for field in pb.BulkRequest.DESCRIPTOR.fields if field.message_type
) - {
    "follow",
    "feed",
    "admit",
    "on_behalf",
}

RAM, DISK, PEER = "ram", "disk", "peer"
# Other steps of slow calls. The rest of a call is work of the node itself.
QUEUE, RECEIVE, SEND, ACKS = "queue", "receive", "send", "acks"


class Histogram:
    """A histogram of durations, without a lock.

    A lock would cost more than everything else. CPython switches threads only at calls and backward
    jumps, and none lies between reading and writing a count.
    """

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Add a duration."""
        bucket = bisect_left(_BOUNDS_NS, ns)
        self.counts[bucket] += 1
        self.sum_ns += ns


class WireMetrics:
    """Metrics of one transport.

    A request costs one call here, which must be short: a node sleeps between requests, so its code
    is not in the CPU cache, and takes several times as long as in a loop.
    """

    __slots__ = ("_errors", "_lock", "_slow", "_times", "wire")

    def __init__(self, wire: str, slow: SlowCalls) -> None:
        self.wire = wire
        self._slow = slow
        self._lock = threading.Lock()
        self._times: dict[str, Histogram] = {}  # by operation
        self._errors: Counter[tuple[str, str]] = Counter()  # by operation and code

    def answered(self, op: str, began_ns: int, session: Any = None, request: Any = None) -> None:
        """Count an answered request; session and request are described if it was slow."""
        ns = monotonic_ns() - began_ns
        histogram = self._times.get(op)
        if histogram is None:
            histogram = self._times.setdefault(op, Histogram())
        histogram.counts[bisect_left(_BOUNDS_NS, ns)] += 1
        histogram.sum_ns += ns
        if ns > SLOW_NS:
            self._slow.ended(op, self.wire, began_ns, ns, session, request)

    def failed(
        self,
        op: str,
        error: BaseException,
        began_ns: int = 0,
        session: Any = None,
        request: Any = None,
    ) -> None:
        """Count a failed request; it may have been slow if `began_ns` is not 0."""
        code = _code(error)
        with self._lock:
            self._errors[op, code] += 1
        if began_ns and (ns := monotonic_ns() - began_ns) > SLOW_NS:
            self._slow.ended(op, self.wire, began_ns, ns, session, request, code)

    def times(self) -> dict[str, Histogram]:
        """Return the durations by operation."""
        return self._times.copy()

    def errors(self) -> dict[tuple[str, str], int]:
        """Return errors by operation and code; internal ones also when zero."""
        with self._lock:
            return {(op, "internal"): 0 for op in self.times()} | self._errors


class RequestMetrics:
    """Metrics of all requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the waiting gets
        self.slow = SlowCalls()
        self._by_wire: dict[str, WireMetrics] = {}
        self._gets = {tier: Histogram() for tier in (RAM, DISK, PEER)}
        self._waiting = dict.fromkeys((DISK, PEER), 0)
        self._received: defaultdict[str, int] = defaultdict(int)  # bytes by transport
        self._sent: defaultdict[str, int] = defaultdict(int)

    # ---- counting ------------------------------------------------------------------------------

    def of_wire(self, wire: str) -> WireMetrics:
        """Return the metrics of a transport."""
        return self._by_wire.setdefault(wire, WireMetrics(wire, self.slow))

    def count_get(self, tier: str, wire: str, nbytes: int, began_ns: int) -> None:
        """Count a get whose pages are in RAM now; `tier` is the farthest that had one."""
        self._sent[wire] += nbytes
        self._gets[tier].add(monotonic_ns() - began_ns)

    def count_put(self, wire: str, nbytes: int) -> None:
        """Count page bytes that a client wrote."""
        self._received[wire] += nbytes

    @contextmanager
    def waiting(self, tier: str) -> Iterator[None]:
        """Count a get as waiting within the block."""
        began_ns = monotonic_ns()
        with self._lock:
            self._waiting[tier] += 1
        try:
            yield
        finally:
            self.slow.step(tier, began_ns)
            with self._lock:
                self._waiting[tier] -= 1

    # ---- reporting -----------------------------------------------------------------------------

    def requests(self) -> dict[tuple[str, str], Histogram]:
        """Return answered requests by operation and transport."""
        edges = self._by_wire.copy()
        return {
            (op, wire): times for wire, edge in edges.items() for op, times in edge.times().items()
        }

    def times(self) -> pb.RequestTimes:
        """Return the durations by operation, over all transports."""
        sums: dict[str, list[int]] = {}
        for (op, _), times in self.requests().items():
            sums[op] = list(map(add, sums.get(op, [0] * len(times.counts)), times.counts))
        operations = [
            pb.OperationTimes(op=op, counts=counts) for op, counts in sorted(sums.items())
        ]
        return pb.RequestTimes(bounds_ns=_BOUNDS_NS, operations=operations)

    def gets(self) -> dict[str, Histogram]:
        """Return the durations of gets by tier."""
        return self._gets

    def errors(self) -> dict[tuple[str, str, str], int]:
        """Return failed requests by operation, transport and code."""
        edges = self._by_wire.copy()
        return {
            (op, wire, code): count
            for wire, edge in edges.items()
            for (op, code), count in edge.errors().items()
        }

    def moved(self) -> dict[tuple[str, str], int]:
        """Return page bytes by transport and direction."""
        ways = (("in", self._received), ("out", self._sent))
        return {(wire, way): nbytes for way, moved in ways for wire, nbytes in moved.copy().items()}

    def waiting_gets(self) -> dict[str, int]:
        """Return waiting gets by tier."""
        return self._waiting.copy()


def _code(error: BaseException) -> str:
    """Return the gRPC code of an error in lower case.

    It is `cancelled` if the client left or stalled, `unknown` for an invalid message.
    """
    if isinstance(error, KVStoreError):
        name: str = status_code(error).name
        return name.lower()
    return (
        "unknown"
        if isinstance(error, Exception) and not isinstance(error, OSError)
        else "cancelled"
    )
