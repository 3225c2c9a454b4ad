"""Replay a trace against a node, to measure the hit rate of a store of its size.

For each request, in order and one at a time (the order decides the hit rate):

    lookup all its pages -> get the leading run, verify every byte -> put the whole chain

The put names the existing pages, too: so the node ages the whole chain, tail first. Requests that a
recorded trace marks as `stored` are only put. With `hints` each request's session then tells what
its client knows (`kvstore.tools.sessions`). Content is derived from the key, so hits are verified
without remembering what was stored.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.client import Client
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import opaque_layout, slot_nbytes
from kvstore.results import PutOutcome
from kvstore.results.hints import PRIORITY_HIGH, Hint, HintAction
from kvstore.security.secrets import DEFAULT_TENANT
from kvstore.tools.bench import Stopwatch, latency_ms
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.sessions import SessionClients
from kvstore.tools.trace import TraceRequest, page_content, trace_prefix_hash

PRIORITY_OVER = 0
OVER_S = 86_400.0
LEAST_S = 0.001
FIRST_S = 0.05  # at most, from a session's first request to its first hint
PAUSE_S = 0.2  # seconds between two reports of progress


@dataclass
class ReplayReport:
    """Results of a replay; counts are pages unless named otherwise.

    A page is a hit if it is in the leading run of stored pages of its request; `pages_lost` were
    found by the lookup but not by the get.
    """

    requests: int = 0
    pages_asked: int = 0
    pages_hit: int = 0
    prefix_hit_rate: float = 0.0
    pages_stored: int = 0
    pages_full: int = 0
    pages_lost: int = 0
    verified_nbytes: int = 0
    mismatches: int = 0
    hinted_pages: int = 0
    page_nbytes: int = 0
    seconds: float = 0.0
    put_gb_per_s: float = 0.0
    get_gb_per_s: float = 0.0
    wire: str = ""
    latency_ms: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = asdict(self)
        return {"duration_s": values.pop("seconds"), **values}


def replay_namespace(page_nbytes: int, tenant: str = DEFAULT_TENANT) -> Namespace:
    """Return a fresh namespace, so that no replay hits the pages of another."""
    if page_nbytes < 1:
        raise InvalidRequest(f"page size {page_nbytes} must be at least 1 byte")
    return Namespace(
        "kvstore-replay", opaque_layout(page_nbytes), tenant, salt=secrets.token_hex(8)
    )


def throwaway_node(capacity_pages: int, page_nbytes: int) -> NodeProcess:
    """Start a node in a child process that holds exactly `capacity_pages` pages."""
    if capacity_pages < 1:
        raise InvalidRequest(f"capacity {capacity_pages} must be at least 1 page")
    nbytes = capacity_pages * slot_nbytes(page_nbytes)
    return NodeProcess(
        "--ram-bytes", str(nbytes), "--extent-bytes", str(nbytes), "--log-level", "WARNING"
    )


def replay(
    store: Client,
    requests: Iterable[TraceRequest],
    namespace: Namespace,
    speed: float | None = None,
    on_progress: Callable[[ReplayReport], None] = lambda report: None,
    hints: bool = False,
) -> ReplayReport:
    """Replay requests against a store; return the report.

    `speed` is relative to the trace's clock; None is as fast as possible, and not possible with
    `hints`, whose times are real. `on_progress` sees the
    unfinished report after each request and while waiting; what it raises ends the replay. Raises
    the client's errors; a page that differs from what was stored is counted instead.
    """
    if hints and speed is None:
        raise InvalidRequest("hints have times to live: give the speed of the replay, too")
    return _Replay(store, namespace, speed, on_progress, hints).run(requests)


class _Replay:
    def __init__(
        self,
        store: Client,
        namespace: Namespace,
        speed: float | None,
        on_progress: Callable[[ReplayReport], None],
        hints: bool,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._speed = speed
        self._on_progress = on_progress
        self._sessions = SessionClients() if hints else None
        self._began_s: dict[str, float] = {}
        self._page_nbytes = namespace.layout.page_nbytes
        self._blank = bytes(self._page_nbytes)
        self._report = ReplayReport(page_nbytes=self._page_nbytes)
        self._watches = {"lookup": Stopwatch(), "get": Stopwatch(), "put": Stopwatch()}
        self._buffers: list[bytearray] = []  # as many as the longest leading run so far, reused

    def run(self, requests: Iterable[TraceRequest]) -> ReplayReport:
        report, start = self._report, time.perf_counter()
        for request in requests:
            if self._speed is not None:
                due = start + request.timestamp_ms / 1000 / self._speed
                while (wait_s := due - time.perf_counter()) > 0:
                    time.sleep(min(wait_s, PAUSE_S))
                    self._on_progress(report)
            report.requests += not request.stored
            if request.hash_ids:
                hashes = [trace_prefix_hash(hash_id) for hash_id in request.hash_ids]
                (self._store_all if request.stored else self._serve)(hashes)
                if self._sessions is not None:
                    self._tell(request, hashes)
            self._on_progress(report)
        report.seconds = round(time.perf_counter() - start, 3)
        report.prefix_hit_rate = (
            report.pages_hit / report.pages_asked if report.pages_asked else 0.0
        )
        report.put_gb_per_s = round(self._watches["put"].gb_per_s(), 3)
        report.get_gb_per_s = round(self._watches["get"].gb_per_s(), 3)
        report.latency_ms = {
            name: latency_ms(watch.seconds) for name, watch in self._watches.items()
        }
        report.wire = self._store.wire_name
        return report

    def _tell(self, request: TraceRequest, hashes: list[bytes]) -> None:
        told = self._sessions.after(request) if self._sessions is not None else None
        if told is None or self._speed is None:
            return
        now_s, name = time.perf_counter(), request.session
        # The session began before the put of its first request, whose pages are its own
        age_s = now_s - self._began_s.setdefault(name, now_s) + FIRST_S
        hint = Hint(
            HintAction.RETAIN,
            PRIORITY_OVER if told.over else PRIORITY_HIGH,
            max(LEAST_S, OVER_S if told.over else told.ttl_ms / 1000 / self._speed),
            session=name,
            session_age_s=age_s,
        )
        result = self._store.hint(self._namespace, hashes, hint)
        self._report.hinted_pages += result.accepted
        if told.over:
            del self._began_s[name]

    def _serve(self, hashes: list[bytes]) -> None:
        self._report.pages_asked += len(hashes)
        with self._watches["lookup"].timed():
            found = self._store.lookup(self._namespace, hashes).prefix_pages
        pages: list[Any] = self._load(hashes[:found])
        pages += [self._content(prefix_hash) for prefix_hash in hashes[len(pages) :]]
        self._save(hashes, pages)

    def _store_all(self, hashes: list[bytes]) -> None:
        self._save(hashes, [self._content(prefix_hash) for prefix_hash in hashes])

    def _load(self, hashes: list[bytes]) -> list[bytearray]:
        """Get and verify pages; return the leading run of hits."""
        if not hashes:
            return []
        while len(self._buffers) < len(hashes):
            self._buffers.append(bytearray(self._page_nbytes))
        for buffer in self._buffers[: len(hashes)]:
            buffer[:] = self._blank  # otherwise an earlier round's bytes could pass for this one's
        with self._watches["get"].timed():
            hits = self._store.get(
                self._namespace, hashes, self._buffers[: len(hashes)], prefix=True
            )
        count = (*hits, False).index(False)
        self._watches["get"].nbytes += count * self._page_nbytes
        report = self._report
        report.pages_hit += count
        report.pages_lost += len(hashes) - count
        for i in range(count):
            content = self._content(hashes[i])
            if self._buffers[i] == content:
                report.verified_nbytes += self._page_nbytes
            else:
                report.mismatches += 1
                self._buffers[i][:] = content  # what is put below must be right in any case
        return self._buffers[:count]

    def _save(self, hashes: list[bytes], pages: list[Any]) -> None:
        watch, report = self._watches["put"], self._report
        try:
            with watch.timed():
                outcomes = self._store.put(self._namespace, hashes, pages)
        except Exhausted:
            report.pages_full += len(hashes)
            return
        stored = outcomes.count(PutOutcome.STORED)
        watch.nbytes += stored * self._page_nbytes
        report.pages_stored += stored
        report.pages_full += sum(not outcome.kept for outcome in outcomes)

    def _content(self, prefix_hash: bytes) -> bytes:
        return page_content(self._namespace.digest, prefix_hash, self._page_nbytes)
