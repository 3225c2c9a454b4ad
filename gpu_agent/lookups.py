"""Which pages are stored: asked once per request in the background, answered at every poll.

    ask --- thread: one lookup per namespace ---> answer    polls: None, None, the answer, the answer, ...
     |                                              ^
     +--- the deadline, or no room --- nothing -----+

An engine's scheduler may ask a hundred times for one waiting request, and must never wait.
"""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace

log = logging.getLogger(__name__)

THREADS = 4
PENDING_MAX = 1024  # requests that wait for an answer; more are told that nothing is stored
OUTAGE_WAIT_S = 0.05  # how long a request waits when the last call failed: enough for a store that is back

# For each group of layers: the namespaces of all shards, and the keys of the blocks.
Question: TypeAlias = Sequence[tuple[Sequence[Namespace], Sequence[bytes]]]
# For each group of layers: which blocks every shard has.
Answer: TypeAlias = tuple[tuple[bool, ...], ...]


@dataclass
class LookupCounts:
    """`lookups_failed`: calls that the store did not answer in time."""

    lookups: int = 0
    lookups_failed: int = 0


@dataclass
class _Pending:
    done: concurrent.futures.Future[Answer]
    nothing: Answer
    overdue_at: float
    answered_at: float | None = None


class Lookups:
    """Thread-safe. `client` is shared and not closed here."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._counts = LookupCounts()
        self._running = 0
        self._outage = False
        self._executor = concurrent.futures.ThreadPoolExecutor(THREADS, "kvstore-lookup")

    def ask(self, request_id: str, question: Question) -> None:
        """Starts a lookup; a former one of this request is forgotten. Returns at once."""
        nothing = tuple((False,) * len(keys) for _, keys in question)
        done: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        with self._lock:
            full = self._running >= PENDING_MAX
            wanted = any(len(keys) for _, keys in question) and not full
            self._running += wanted
            self._counts.lookups += wanted
            wait_s = min(OUTAGE_WAIT_S, self._timeout_s) if self._outage else self._timeout_s
            self._pending[request_id] = _Pending(done, nothing, time.monotonic() + wait_s)
        if wanted:
            self._executor.submit(self._look_up, question, nothing, Deadline(self._timeout_s), done)
        else:
            done.set_result(nothing)

    def answer(self, request_id: str) -> Answer | None:
        """None as long as it is not known. After the deadline, and for a request that never asked,
        nothing is stored."""
        with self._lock:
            pending = self._pending.get(request_id)
            if pending is None:
                return ()
            now = time.monotonic()
            if not pending.done.done() and now < pending.overdue_at:
                return None
            pending.answered_at = pending.answered_at or now
            return pending.done.result() if pending.done.done() else pending.nothing

    def age_s(self, request_id: str) -> float | None:
        """For how long the request has had its answer, 0 if it has none yet; None if it did not ask, or
        needs no answer any more."""
        with self._lock:
            pending = self._pending.get(request_id)
            if pending is None:
                return None
            return time.monotonic() - pending.answered_at if pending.answered_at else 0.0

    def drop(self, request_id: str) -> None:
        """The request needs no answer any more."""
        with self._lock:
            self._pending.pop(request_id, None)

    def drop_all(self) -> None:
        """No request gets an answer to what it asked so far."""
        with self._lock:
            self._pending.clear()

    def touch(self, question: Question) -> None:
        """Counts these pages as used, heads last: a chain that is saved piece by piece, or that an engine
        keeps in its own cache, would otherwise lose its head first. Not done if there is no room."""
        with self._lock:
            if self._running >= PENDING_MAX // 2:
                return
            self._running += 1
        self._executor.submit(self._touch, question, Deadline(self._timeout_s))

    def open(self, namespaces: Sequence[Namespace]) -> None:
        """Connects and registers in the background, so that the first request need not wait for it."""
        with self._lock:
            self._running += 1
        self._executor.submit(self._open, namespaces, Deadline(self._timeout_s))

    def take_counts(self) -> LookupCounts:
        """Counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, LookupCounts()
            return counts

    def close(self) -> None:
        """Answers are not awaited any more; running calls end by their deadline."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        with self._lock:
            return [] if 0 <= self._running <= PENDING_MAX + 1 else [f"{self._running} lookups run"]

    # ---- threads ---------------------------------------------------------------------------

    def _look_up(
        self, question: Question, nothing: Answer, deadline: Deadline, done: concurrent.futures.Future[Answer]
    ) -> None:
        answer, error = nothing, None
        try:
            answer = tuple(self._everywhere(namespaces, keys, deadline) for namespaces, keys in question)
        except KVStoreError as failure:
            error = failure
        except Exception as failure:  # the edge of a thread: whatever broke, the request gets its answer
            log.exception("a lookup broke")
            error = KVStoreError(repr(failure))
        self._ended(error)
        done.set_result(answer)

    def _everywhere(
        self, namespaces: Sequence[Namespace], keys: Sequence[bytes], deadline: Deadline
    ) -> tuple[bool, ...]:
        """Which pages all shards have."""
        there = (True,) * len(keys)
        for namespace in namespaces if keys else ():
            found = self._client.lookup(namespace, keys, timeout_s=deadline.remaining()).present
            there = tuple(a and b for a, b in zip(there, found, strict=True))
        return there

    def _touch(self, question: Question, deadline: Deadline) -> None:
        error = None
        try:
            for namespaces, keys in question:
                for namespace in namespaces if keys else ():
                    self._client.lookup(namespace, keys, touch=True, timeout_s=deadline.remaining())
        except KVStoreError as failure:
            error = failure
        self._ended(error)

    def _open(self, namespaces: Sequence[Namespace], deadline: Deadline) -> None:
        error = None
        try:
            for namespace in namespaces:
                self._client.open(namespace, deadline.remaining())
        except KVStoreError as failure:
            error = failure
        self._ended(error)

    def _ended(self, error: KVStoreError | None) -> None:
        """Logs an outage when it begins and when it ends, not at every request within it."""
        with self._lock:
            self._running -= 1
            self._counts.lookups_failed += error is not None
            changed, self._outage = self._outage != (error is not None), error is not None
        if changed and error is not None:
            log.warning("the store can not be asked, the engine computes everything until it is back: %s", error)
        elif changed:
            log.warning("the store answers again")
