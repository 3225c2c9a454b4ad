"""Keep the last hour's figures in rings of fixed size, for the node and for some tenants.

A sample has the rates of counters since the previous one, and the current levels.
"""

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add, attrgetter
from typing import Any, NamedTuple

from kvstore.security.identities import ALL, Principal
from node.memory.inventory import Inventory
from node.memory.page import Counters
from node.serving.request_metrics import BOUNDS_S, RequestMetrics

EVERY_S = 10.0
KEPT = 360
TENANTS_MAX = 64  # the first tenants seen; some 25 KiB each

# Columns, and the counters whose rates they are.
RATES = {
    "asked": "pages_asked",
    "hits": "prefix_hits",
    "absent": "miss_absent",
    "evicted_before": "miss_evicted",
    "writing": "miss_writing",
    "removed": "miss_removed",
    "expired": "miss_expired",
    "corrupt": "miss_corrupt",
    "put": "pages_put",
    "got": "pages_got",
    "evicted": "pages_evicted",
    "put_nbytes": "nbytes_put",
    "got_nbytes": "nbytes_got",
}
LEVELS = ("ram_nbytes", "disk_nbytes")  # page bytes in each tier
TIMED = ("lookup", "get", "put")
QUANTILES = {"p50": 0.5, "p99": 0.99}
TIMES = tuple(f"{op}_{name}_ms" for op in TIMED for name in QUANTILES)


class Latency(NamedTuple):
    """Request latencies since the start.

    `counts` has, by operation, a count for each of `bounds_s` and one for longer requests.
    """

    bounds_s: Sequence[float]
    counts: Callable[[], Mapping[str, Sequence[int]]]


# All of RATES at once, which takes a microsecond.
_read: Callable[[Counters], tuple[int, ...]] = attrgetter(*RATES.values())


def latency_of(traffic: RequestMetrics) -> Latency:
    """Return the latencies over all transports."""

    def counts() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for (op, _), times in traffic.requests().items():
            found[op] = (
                list(map(add, found[op], times.counts)) if op in found else list(times.counts)
            )
        return found

    return Latency(BOUNDS_S, counts)


class _Sums:
    """Counters of a tenant, or of all, in the order of RATES, and its LEVELS."""

    __slots__ = ("counts", "disk_nbytes", "ram_nbytes")

    def __init__(self) -> None:
        self.counts: tuple[int, ...] = (0,) * len(RATES)
        self.ram_nbytes = self.disk_nbytes = 0

    def add(self, counts: tuple[int, ...], ram_nbytes: int, disk_nbytes: int) -> None:
        self.counts = tuple(map(add, self.counts, counts))
        self.ram_nbytes += ram_nbytes
        self.disk_nbytes += disk_nbytes


class _Ring:
    """A ring of samples. Not thread-safe.

    Columns are stored one after the other; NaN means no value.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.count = 0  # samples since the start
        self._values = array("f", [math.nan]) * (KEPT * len(columns))
        self._times = array("d", [0.0]) * KEPT  # Unix

    def add(self, unix_s: float, values: Mapping[str, float]) -> None:
        at = self.count % KEPT
        self._times[at] = unix_s
        for number, column in enumerate(self.columns):
            self._values[number * KEPT + at] = values.get(column, math.nan)
        self.count += 1

    def as_columns(self, most: int = KEPT) -> dict[str, Any]:
        """Return the last samples by column, oldest first."""
        places = [
            number % KEPT for number in range(max(0, self.count - min(most, KEPT)), self.count)
        ]
        columns = {
            column: [_short(self._values[number * KEPT + at]) for at in places]
            for number, column in enumerate(self.columns)
        }
        return {
            "count": self.count,
            "every_s": EVERY_S,
            "times": [self._times[at] for at in places],
            **columns,
        }


class History:
    """The last hour. Thread-safe.

    `disk_count`: pages of a namespace on disk, if there is a disk.
    """

    def __init__(
        self,
        inventory: Inventory,
        disk_count: Callable[[bytes], int] | None,
        latency: Latency | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._inventory = inventory
        self._disk_count = disk_count
        self._latency = latency
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._rings: dict[str, _Ring] = {}  # by tenant
        self._before: dict[str, tuple[int, ...]] = {}
        self._taken_s = clock()
        self._counted: Mapping[str, Sequence[int]] = {}

    def poll(self) -> None:
        """Take a sample if it is time."""
        now_s = self._clock()
        if now_s - self._taken_s >= EVERY_S or not self._before:
            self._take(now_s)

    def _take(self, now_s: float) -> None:
        sums, times = self._sums(), self._times()
        seconds = max(1e-3, now_s - self._taken_s)
        with self._lock:
            for tenant, found in sums.items():
                if (before := self._before.get(tenant)) is not None:
                    rates = _rates(before, found.counts, seconds)
                    levels = {name: getattr(found, name) for name in LEVELS}
                    ring = self._rings.get(tenant) or self._rings.setdefault(
                        tenant, _Ring(self._columns(tenant))
                    )
                    ring.add(self._wall(), rates | levels | (times if tenant == ALL else {}))
            for tenant in self._rings.keys() - sums.keys():
                del self._rings[tenant]
            self._before = {tenant: found.counts for tenant, found in sums.items()}
        self._taken_s = now_s

    def _columns(self, tenant: str) -> tuple[str, ...]:
        times = TIMES if self._latency is not None and tenant == ALL else ()
        return (*RATES, *LEVELS, *times)

    def _sums(self) -> dict[str, _Sums]:
        forgotten, each = self._inventory.counted(_read)
        found = {ALL: _Sums()}
        found[ALL].counts = forgotten
        room = TENANTS_MAX + 1 - len(self._before.keys() | {ALL})
        for index, counts, page_count in each:
            tenant, on_disk = (
                index.value.tenant,
                self._disk_count(index.digest) if self._disk_count else 0,
            )
            held = counts, page_count * index.page_nbytes, on_disk * index.page_nbytes
            found[ALL].add(*held)
            if tenant not in found:
                if tenant not in self._before:
                    if room <= 0:
                        continue
                    room -= 1
                found[tenant] = _Sums()
            found[tenant].add(*held)
        return found

    def _times(self) -> dict[str, float]:
        """Return latency quantiles since the last sample, in milliseconds."""
        if self._latency is None:
            return {}
        before, self._counted = (
            self._counted,
            {op: list(counts) for op, counts in self._latency.counts().items()},
        )
        found = {}
        for op in TIMED:
            now = self._counted.get(op, ())
            then = before.get(op, [0] * len(now))
            new = [max(0, count - earlier) for count, earlier in zip(now, then, strict=True)]
            for name, share in QUANTILES.items():
                found[f"{op}_{name}_ms"] = 1000 * quantile(self._latency.bounds_s, new, share)
        return found

    # ---- for users -----------------------------------------------------------------------------

    def count(self, principal: Principal) -> int:
        """Return the number of samples that a principal may see."""
        ring = self._of(principal)
        return ring.count if ring else 0

    def visible_to(self, principal: Principal, most: int = KEPT) -> dict[str, Any] | None:
        """Return the node's history, or the principal's tenant's; None if there is none.

        An identity restricted to models does not see the rest of its tenant.
        """
        with self._lock:
            ring = self._of(principal)
            return ring.as_columns(most) if ring else None

    def _of(self, principal: Principal) -> _Ring | None:
        return None if principal.models else self._rings.get(principal.tenant)


def _rates(before: Sequence[int], now: Sequence[int], seconds: float) -> dict[str, float]:
    """Return the rates between two samples; a forgotten namespace never makes them negative."""
    changes = zip(RATES, before, now, strict=True)
    return {column: max(0, count - earlier) / seconds for column, earlier, count in changes}


def quantile(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return a quantile of bucketed latencies, interpolated; NaN without any.

    Values beyond the last bound count as that bound.
    """
    total = sum(counts)
    if not total:
        return math.nan
    sums, wanted = list(accumulate(counts)), share * total
    place = min(bisect_left(sums, wanted), len(bounds_s))
    if place == len(bounds_s):
        return bounds_s[-1]
    low = bounds_s[place - 1] if place else 0.0
    below = sums[place] - counts[place]
    return low + (bounds_s[place] - low) * (wanted - below) / counts[place]


def _short(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")
