"""What requests took, where gets found their pages, and how many bytes moved: in numbers, by operation, wire and tier.

    the edge of a wire --> Timer --> answered: how long      (connections.py, calls.py)
                                 --> not answered: why
    begin_get          --> how long until all of its pages are in RAM, and where they were

Times are taken at these edges and nowhere else. A request costs about a microsecond; no label names who asked, or
for what.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from types import TracebackType

from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.status import status_code

# Upper bounds of the buckets in seconds; what takes longer is in a last one of its own.
BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BOUNDS_NS = tuple(round(1e9 * bound) for bound in BOUNDS_S)

# Requests of the schema. Health, reflection and views last as long as somebody listens.
TIMED = frozenset(field.name for field in pb.BulkRequest.DESCRIPTOR.fields)

RAM, DISK, PEER = "ram", "disk", "peer"


class Histogram:
    """Added to without a lock, which would cost more than all the rest: CPython changes threads at calls and at jumps
    back only, and none stands between the reading and the writing of a count."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        place = bisect_left(_BOUNDS_NS, ns)
        self.counts[place] += 1
        self.sum_ns += ns


class Timer:
    """One request: a context around all that is done until its answer is sent."""

    __slots__ = ("_began_ns", "_key", "_traffic")

    def __init__(self, traffic: "Traffic", key: tuple[str, str]) -> None:
        self._traffic = traffic
        self._key = key

    def __enter__(self) -> "Timer":
        self._began_ns = monotonic_ns()
        return self

    def begin(self) -> None:
        """It counts from now on: what was waited for was the client."""
        self._began_ns = monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._traffic.of(self._key).add(monotonic_ns() - self._began_ns)
        else:
            self._traffic.failed(self._key, error)


class Traffic:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what is seldom
        self._requests: dict[tuple[str, str], Histogram] = {}  # by operation and wire
        self._errors: Counter[tuple[str, str, str]] = Counter()  # and code
        self._gets = {tier: Histogram() for tier in (RAM, DISK, PEER)}
        self._waiting = dict.fromkeys((DISK, PEER), 0)
        self._taken: defaultdict[str, int] = defaultdict(int)  # bytes by wire
        self._given: defaultdict[str, int] = defaultdict(int)

    # ---- what happens --------------------------------------------------------------------

    def request(self, op: str, wire: str) -> Timer:
        return Timer(self, (op, wire))

    def of(self, key: tuple[str, str]) -> Histogram:
        return self._requests.get(key) or self._requests.setdefault(key, Histogram())

    def failed(self, key: tuple[str, str], error: BaseException) -> None:
        op, wire = key
        with self._lock:
            self._errors[op, wire, _code(error)] += 1

    def found(self, tier: str, began_ns: int) -> None:
        """The pages of a get that began then are in RAM. `tier`: the farthest in which one of them was."""
        self._gets[tier].add(monotonic_ns() - began_ns)

    @contextmanager
    def waiting(self, tier: str) -> Iterator[None]:
        """Around what a get waits for."""
        with self._lock:
            self._waiting[tier] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[tier] -= 1

    def took(self, wire: str, nbytes: int) -> None:
        """Page bytes that clients wrote."""
        self._taken[wire] += nbytes

    def gave(self, wire: str, nbytes: int) -> None:
        """Page bytes that clients get, or may read where they are."""
        self._given[wire] += nbytes

    # ---- what is told --------------------------------------------------------------------

    def requests(self) -> dict[tuple[str, str], Histogram]:
        """By operation and wire: those that were answered."""
        return self._requests.copy()

    def gets(self) -> dict[str, Histogram]:
        return self._gets

    def errors(self) -> dict[tuple[str, str, str], int]:
        """By operation, wire and code: those that were not answered. None of our faults is a number, too: the first one
        would be no rise otherwise."""
        none = {(op, wire, "internal"): 0 for op, wire in self.requests()}
        with self._lock:
            return none | self._errors

    def moved(self) -> dict[tuple[str, str], int]:
        """Page bytes by wire and direction."""
        ways = (("in", self._taken), ("out", self._given))
        return {(wire, way): nbytes for way, moved in ways for wire, nbytes in moved.copy().items()}

    def waiting_gets(self) -> dict[str, int]:
        """By what they wait for."""
        return self._waiting.copy()


def _code(error: BaseException) -> str:
    """What the client is told, a code of gRPC in lower case; `cancelled` if it left or stalled, `unknown` for what was
    no message of the schema."""
    if isinstance(error, KVStoreError):
        name: str = status_code(error).name
        return name.lower()
    return "unknown" if isinstance(error, Exception) and not isinstance(error, OSError) else "cancelled"
