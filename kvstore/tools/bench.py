"""Load a live node: put, lookup, get, verify, remove, round after round.

Each thread has its own batch of pages, under random keys, with content derived from the key. It is
made once, because making it costs more than moving it. A round ends by removing its pages, so a
benchmark never occupies more than `threads x batch` pages of the node.
"""

import contextlib
import logging
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.client import Client
from kvstore.cluster.routing import Away
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import Namespace
from kvstore.layout import opaque_layout
from kvstore.results import PutOutcome
from kvstore.security.secrets import tenant_of
from kvstore.tools.trace import page_content

log = logging.getLogger(__name__)

PROGRESS_S = 0.2
# Bytes of all threads' pages and read buffers: limits what a typing error may cost.
MEMORY_NBYTES_MAX = 16 << 30
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark. Raises InvalidRequest for impossible ones."""

    page_nbytes: int = 1 << 20
    batch: int = 16
    threads: int = 1
    seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("page_nbytes", 1, 1 << 40),
            ("batch", 1, 4096),
            ("threads", 1, 256),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(f"{name}={getattr(self, name)} is outside {low}..{high}")
        if not 0 < self.seconds <= 86400:
            raise InvalidRequest(f"seconds={self.seconds:g} must be above 0 and at most 86400")
        nbytes = 2 * self.page_nbytes * self.batch * self.threads
        if nbytes > MEMORY_NBYTES_MAX:
            raise InvalidRequest(
                f"2 x page x batch x threads = {nbytes} bytes, at most {MEMORY_NBYTES_MAX}"
            )


@dataclass
class OpReport:
    """Results of one kind of call.

    GB/s: payload bytes by time spent in calls, summed over the threads.
    """

    calls: int = 0
    gb_per_s: float = 0.0
    latency_ms: dict[str, float] = field(default_factory=dict)


@dataclass
class BenchReport:
    """Results of a benchmark. `mismatches`: pages that differ from what was written.

    `pages_full`: pages refused for lack of space. `pages_lost`: evicted before they were read.
    `away`: members of a cluster that could not be reached to remove them.
    """

    wire: str
    page_nbytes: int
    batch: int
    threads: int
    seconds: float = 0.0
    verified_nbytes: int = 0
    mismatches: int = 0
    pages_full: int = 0
    pages_lost: int = 0
    put: OpReport = field(default_factory=OpReport)
    lookup: OpReport = field(default_factory=OpReport)
    get: OpReport = field(default_factory=OpReport)
    away: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = asdict(self)
        return {"duration_s": values.pop("seconds"), **values}


def bench(
    client: Client, options: BenchOptions, on_progress: Callable[[float], None] = lambda s: None
) -> BenchReport:
    """Run the load for `options.seconds`; `on_progress` receives the seconds passed.

    Raises the client's errors; Exhausted if the node can not store a single page.
    """
    namespace = Namespace(
        "kvstore-bench", opaque_layout(options.page_nbytes), tenant_of(client.config)
    )
    client.open(namespace)
    workers = [_Worker(client, namespace, options.batch) for _ in range(options.threads)]
    stop = threading.Event()
    start = time.perf_counter()
    with ThreadPoolExecutor(options.threads) as pool:
        futures = [pool.submit(worker.run, stop) for worker in workers]
        try:
            while (passed := time.perf_counter() - start) < options.seconds:
                on_progress(passed)
                done, _ = wait(futures, min(PROGRESS_S, options.seconds - passed), FIRST_EXCEPTION)
                if done:  # only an error ends a worker before it is told to stop
                    break
        finally:
            stop.set()
        for future in futures:
            future.result()
    report = BenchReport(client.wire_name, options.page_nbytes, options.batch, options.threads)
    report.seconds = round(time.perf_counter() - start, 3)
    _sum_up(report, workers)
    return report


def _sum_up(report: BenchReport, workers: list["_Worker"]) -> None:
    report.mismatches = sum(worker.mismatches for worker in workers)
    report.verified_nbytes = sum(worker.pages_verified for worker in workers) * report.page_nbytes
    report.pages_full = sum(worker.pages_full for worker in workers)
    report.pages_lost = sum(worker.pages_lost for worker in workers)
    report.away = sorted({member for worker in workers for member in worker.away})
    for name in ("put", "lookup", "get"):
        watches = [worker.watches[name] for worker in workers]
        seconds = [s for watch in watches for s in watch.seconds]
        gb_per_s = round(sum(watch.gb_per_s() for watch in watches), 3)
        setattr(report, name, OpReport(len(seconds), gb_per_s, latency_ms(seconds)))


class _Worker:
    """Pages and measurements of one thread."""

    def __init__(self, client: Client, namespace: Namespace, batch: int) -> None:
        nbytes = namespace.layout.page_nbytes
        self._client = client
        self._namespace = namespace
        self._hashes = [secrets.token_bytes(32) for _ in range(batch)]
        self._pages = [
            page_content(namespace.digest, prefix_hash, nbytes) for prefix_hash in self._hashes
        ]
        self._buffers = [bytearray(nbytes) for _ in range(batch)]
        self._blank = bytes(nbytes)
        self.watches = {"put": Stopwatch(), "lookup": Stopwatch(), "get": Stopwatch()}
        self.away: Away = {}
        self.pages_verified = self.mismatches = self.pages_full = self.pages_lost = 0

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._round()
        except KVStoreError:
            with contextlib.suppress(KVStoreError):  # the first error is the one to report
                self._client.remove(self._namespace, self._hashes)
            raise

    def _round(self) -> None:
        nbytes = self._namespace.layout.page_nbytes
        with self.watches["put"].timed():
            outcomes = self._client.put(self._namespace, self._hashes, self._pages)
        stored = outcomes.count(PutOutcome.STORED)
        self.watches["put"].nbytes += stored * nbytes
        self.pages_full += sum(not outcome.kept for outcome in outcomes)
        with self.watches["lookup"].timed():
            self._client.lookup(self._namespace, self._hashes)
        for buffer in self._buffers:
            buffer[:] = self._blank  # otherwise the last round's bytes would pass for this round's
        with self.watches["get"].timed():
            hits = self._client.get(self._namespace, self._hashes, self._buffers)
        self.watches["get"].nbytes += sum(hits) * nbytes
        self.pages_lost += stored - sum(hits)
        for hit, page, buffer in zip(hits, self._pages, self._buffers, strict=True):
            if hit:
                intact = buffer == page
                self.pages_verified += intact
                self.mismatches += not intact
        self._client.remove(self._namespace, self._hashes, away=self.away)


class Stopwatch:
    """Latencies of one kind of call, and its throughput.

    Costs 8 bytes per call; not thread-safe.
    """

    def __init__(self) -> None:
        self.seconds = array("d")
        self.nbytes = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block, also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append(time.perf_counter() - start)

    @property
    def busy_s(self) -> float:
        """Return the seconds spent in calls."""
        return sum(self.seconds)

    def gb_per_s(self) -> float:
        """Return payload GB (10^9 bytes) per second spent in calls; 0 before the first call."""
        busy_s = self.busy_s
        return self.nbytes / busy_s / 1e9 if busy_s else 0.0


def latency_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Return {"p50": ms, "p90": ms, "p99": ms}; empty without latencies."""
    ordered = sorted(seconds)
    count = len(ordered)
    return (
        {f"p{p}": round(ordered[-(-p * count // 100) - 1] * 1e3, 4) for p in PERCENTILES}
        if count
        else {}
    )
