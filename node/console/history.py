"""Keep figures of the last hour and day in rings of fixed size, for the node and for some tenants.

A sample has the rates of counters since the previous one, and the current levels.

    recent  a sample each 10 s, one hour    some 33 KiB for the node, 25 KiB for each tenant
    day     a sample each 5 min, 24 hours   some 27 KiB for the node, 20 KiB for each tenant

A node with a data directory saves its own samples there, without those of tenants.
"""

import hashlib
import json
import logging
import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add, attrgetter
from typing import Any, NamedTuple

from kvstore.security.identities import ALL, Principal
from node.disk.small_file import SmallFile
from node.memory.inventory import Inventory
from node.memory.page import Counters
from node.serving.request_metrics import BOUNDS_S, RequestMetrics

log = logging.getLogger(__name__)

EVERY_S = 10.0
KEPT = 360
DAY_EVERY_S = 300.0
DAY_KEPT = 288
TENANTS_MAX = 64  # the first tenants seen
MINUTE = 6  # samples
FILE_NAME = "history"  # in the data directory
VERSION = 1

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

    def __init__(self, columns: Sequence[str], kept: int, every_s: float) -> None:
        self.columns = columns
        self.count = 0  # samples since the start
        self._kept = kept
        self._every_s = every_s
        self._values = array("f", [math.nan]) * (kept * len(columns))
        self._times = array("d", [0.0]) * kept  # Unix

    def add(self, unix_s: float, values: Mapping[str, float]) -> None:
        at = self.count % self._kept
        self._times[at] = unix_s
        for number, column in enumerate(self.columns):
            self._values[number * self._kept + at] = values.get(column, math.nan)
        self.count += 1

    def as_columns(self, most: int) -> dict[str, Any]:
        """Return the last samples by column, oldest first."""
        kept = self._kept
        places = [
            number % kept for number in range(max(0, self.count - min(most, kept)), self.count)
        ]
        columns = {
            column: [_short(self._values[number * kept + at]) for at in places]
            for number, column in enumerate(self.columns)
        }
        return {
            "count": self.count,
            "every_s": self._every_s,
            "times": [self._times[at] for at in places],
            **columns,
        }

    # ---- saved -----------------------------------------------------------------------------

    def head(self) -> dict[str, Any]:
        """Return what describes the saved bytes."""
        return {"columns": list(self.columns), "kept": self._kept, "count": self.count}

    def saved(self) -> bytes:
        """Return the bytes to save."""
        return self._times.tobytes() + self._values.tobytes()

    def restore(self, head: Mapping[str, Any], data: bytes, unix_s: float) -> bytes:
        """Take saved samples of this ring's form that are not of the future; return the rest."""
        times_nbytes = self._times.itemsize * head["kept"]
        nbytes = times_nbytes + self._values.itemsize * head["kept"] * len(head["columns"])
        mine, rest = data[:nbytes], data[nbytes:]
        times = array("d", mine[:times_nbytes])
        fits = self.head() | {"count": 0} == {**head, "count": 0} and len(mine) == nbytes
        if fits and max(times) < unix_s + self._every_s:  # the clock may have been set back
            self._times = times
            self._values = array("f", mine[times_nbytes:])
            self.count = head["count"]
        return rest


class _Series:
    """Samples at one interval, of the node and of tenants. Not thread-safe."""

    def __init__(self, every_s: float, kept: int) -> None:
        self.every_s, self.kept = every_s, kept
        self.rings: dict[str, _Ring] = {}  # by tenant
        self.before: dict[str, tuple[int, ...]] = {}
        self.counted: Mapping[str, Sequence[int]] = {}  # latencies
        self.taken_s = 0.0

    def due(self, now_s: float) -> bool:
        return now_s - self.taken_s >= self.every_s or not self.before

    def take(
        self,
        now_s: float,
        unix_s: float,
        sums: Mapping[str, _Sums],
        latency: Latency | None,
        counted: Mapping[str, Sequence[int]],
    ) -> None:
        seconds = max(1e-3, now_s - self.taken_s)
        times = {} if latency is None else _times(latency.bounds_s, self.counted, counted)
        for tenant, found in sums.items():
            if (before := self.before.get(tenant)) is not None:
                rates = _rates(before, found.counts, seconds)
                levels = {name: getattr(found, name) for name in LEVELS}
                ring = self.ring(tenant, latency is not None)
                ring.add(unix_s, rates | levels | (times if tenant == ALL else {}))
        for tenant in self.rings.keys() - sums.keys():
            del self.rings[tenant]
        self.before = {tenant: found.counts for tenant, found in sums.items()}
        self.counted, self.taken_s = counted, now_s

    def ring(self, tenant: str, timed: bool) -> _Ring:
        ring = self.rings.get(tenant)
        if ring is None:
            columns = (*RATES, *LEVELS, *(TIMES if timed and tenant == ALL else ()))
            ring = self.rings[tenant] = _Ring(columns, self.kept, self.every_s)
        return ring


class History:
    """The last hour and the last day. Thread-safe.

    `disk_count`: pages of a namespace on disk, if there is a disk. `file` keeps the node's own
    samples over a restart.
    """

    def __init__(
        self,
        inventory: Inventory,
        disk_count: Callable[[bytes], int] | None,
        latency: Latency | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        file: SmallFile | None = None,
    ) -> None:
        self._inventory = inventory
        self._disk_count = disk_count
        self._latency = latency
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._recent, self._day = _Series(EVERY_S, KEPT), _Series(DAY_EVERY_S, DAY_KEPT)
        self._recent.taken_s = self._day.taken_s = clock()
        # the latencies of the last minute, oldest first
        self._minute: deque[tuple[float, Mapping[str, Sequence[int]]]] = deque(maxlen=MINUTE + 1)
        self._file = file
        if file is not None and (content := file.read()):
            self._restore(content, wall())

    def poll(self) -> None:
        """Take a sample if it is time."""
        now_s = self._clock()
        if self._recent.due(now_s):
            self._take(now_s)

    def stop(self) -> None:
        """Save the samples."""
        if self._file is not None:
            self._save(self._file)
            self._file.close()

    def _take(self, now_s: float) -> None:
        sums, unix_s = self._sums(), self._wall()
        counted: Mapping[str, Sequence[int]] = {}
        if self._latency is not None:
            counted = {op: list(counts) for op, counts in self._latency.counts().items()}
        with self._lock:
            self._minute.append((now_s, counted))
            self._recent.take(now_s, unix_s, sums, self._latency, counted)
            if not self._day.due(now_s):
                return
            self._day.take(now_s, unix_s, sums, self._latency, counted)
        if self._file is not None:
            self._save(self._file)

    def _sums(self) -> dict[str, _Sums]:
        forgotten, each = self._inventory.counted(_read)
        found, known = {ALL: _Sums()}, self._recent.before.keys()
        found[ALL].counts = forgotten
        room = TENANTS_MAX + 1 - len(known | {ALL})
        for index, counts, page_count in each:
            tenant, on_disk = (
                index.value.tenant,
                self._disk_count(index.digest) if self._disk_count else 0,
            )
            held = counts, page_count * index.page_nbytes, on_disk * index.page_nbytes
            found[ALL].add(*held)
            if tenant not in found:
                if tenant not in known:
                    if room <= 0:
                        continue
                    room -= 1
                found[tenant] = _Sums()
            found[tenant].add(*held)
        return found

    # ---- kept over a restart -------------------------------------------------------------------

    def _save(self, file: SmallFile) -> None:
        """Save the node's own samples, if there are any."""
        if ALL in self._recent.rings:
            file.save(self._saved)

    def _saved(self) -> bytes:
        """Return the node's own samples as a file's content."""
        with self._lock:
            rings = [series.rings.get(ALL) for series in (self._recent, self._day)]
            some = [ring for ring in rings if ring is not None]
            heads, data = [ring.head() for ring in some], b"".join(ring.saved() for ring in some)
        body = json.dumps({"version": VERSION, "rings": heads}).encode() + b"\n" + data
        return _digest(body) + body

    def _restore(self, content: bytes, unix_s: float) -> None:
        """Take the samples of a saved file; one that is damaged, or of another version, is not."""
        try:
            line, _, data = content[len(_digest(b"")) :].partition(b"\n")
            if content[: len(_digest(b""))] != _digest(line + b"\n" + data):
                raise ValueError("its checksum does not match")
            head = json.loads(line)
            if head["version"] != VERSION:
                raise ValueError(f"its version is {head['version']}")
            for series, of_ring in zip((self._recent, self._day), head["rings"], strict=False):
                ring = series.ring(ALL, self._latency is not None)
                data = ring.restore(of_ring, data, unix_s)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the console's history begins anew, the file can not be used: %s", error)

    # ---- for users -----------------------------------------------------------------------------

    def count(self, principal: Principal) -> int:
        """Return the number of recent samples that a principal may see."""
        ring = self._of(self._recent, principal)
        return ring.count if ring else 0

    def visible_to(
        self, principal: Principal, most: int = KEPT, most_of_day: int = DAY_KEPT
    ) -> dict[str, Any] | None:
        """Return the newest samples of the node, or of the principal's tenant; None without any.

        They are `recent` and `day`. An identity restricted to models does not see the rest of its
        tenant.
        """
        with self._lock:
            recent, day = self._of(self._recent, principal), self._of(self._day, principal)
            if recent is None or not recent.count:
                return None
            return {
                "recent": recent.as_columns(most),
                "day": day.as_columns(most_of_day) if day is not None and day.count else None,
            }

    def latencies(self) -> list[dict[str, Any]]:
        """Return each operation's calls and latencies, in the last minute and since the start."""
        if self._latency is None:
            return []
        bounds, now_s = self._latency.bounds_s, self._clock()
        counts = {op: list(found) for op, found in self._latency.counts().items()}
        with self._lock:
            then_s, then = self._minute[0] if self._minute else (now_s, counts)
        found = []
        for op, since in sorted(counts.items(), key=lambda item: -sum(item[1])):
            recent = _change(then.get(op, ()), since)
            per_s = sum(recent) / (now_s - then_s) if now_s > then_s else 0.0
            found.append(
                {
                    "op": op,
                    "count": sum(since),
                    "per_s": round(per_s, 2),
                    "recent": _quantiles_ms(bounds, recent),
                    "since": _quantiles_ms(bounds, since),
                }
            )
        return found

    def _of(self, series: _Series, principal: Principal) -> _Ring | None:
        return None if principal.models else series.rings.get(principal.tenant)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _rates(before: Sequence[int], now: Sequence[int], seconds: float) -> dict[str, float]:
    """Return the rates between two samples; a forgotten namespace never makes them negative."""
    changes = zip(RATES, before, now, strict=True)
    return {column: max(0, count - earlier) / seconds for column, earlier, count in changes}


def _times(
    bounds_s: Sequence[float], before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return latency quantiles between two samples, in milliseconds."""
    found = {}
    for op in TIMED:
        new = _change(before.get(op, ()), now.get(op, ()))
        for name, share in QUANTILES.items():
            found[f"{op}_{name}_ms"] = 1000 * quantile(bounds_s, new, share)
    return found


def _change(before: Sequence[int], now: Sequence[int]) -> list[int]:
    earlier = before or [0] * len(now)
    return [max(0, count - then) for count, then in zip(now, earlier, strict=True)]


def _quantiles_ms(bounds_s: Sequence[float], counts: Sequence[int]) -> dict[str, float | None]:
    return {
        name: _short(1000 * quantile(bounds_s, counts, share)) for name, share in QUANTILES.items()
    }


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
