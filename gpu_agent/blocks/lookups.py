"""Look up the pages of each request once, in the background, and answer a scheduler that polls.

    ask --- LookupBackend, one lookup per namespace --> answer
    polls:  None, None, the answer, the answer, ...
     |                                                    ^
     +--- deadline, or too many pending: nothing stored --+

An engine's scheduler may poll a hundred times for one waiting request, and must never wait. Lookups
are sent at once, to threads of its process or to another process (`gpu_agent.worker`).
"""

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from gpu_agent.hint_sender import HintedPages, HintQueue
from gpu_agent.outage_log import OutageLog
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.results import Tier
from kvstore.sync import Future
from kvstore.threads import ThreadPool
from kvstore.tracing import NamesRequest, carried, request

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())
Result = TypeVar("Result")

# For each group of layers: the namespaces of all shards, and the keys of the blocks.
Question: TypeAlias = Sequence[tuple[Sequence[Namespace], Sequence[bytes]]]
# For each group of layers a byte per key: 0 unless every shard has the block. What lookups answer
# are the farthest tiers of blocks (`kvstore.results.Tier`); `presence` has 1 for each.
Answer: TypeAlias = tuple[bytes, ...]

_PRESENT = bytes(tier > 0 for tier in range(256))
_DISK, _PEER = int(Tier.DISK), int(Tier.PEER)
THREADS = 4
_PAUSE_S = 0.0002
PENDING_MAX = 1024  # requests that wait for an answer; further ones get "nothing stored"
TOUCHED_TOGETHER = 16  # requests touched in one call
# Keys of a touch, unless one request has more: 2 MiB of a frame's 16 MiB
TOUCHED_KEYS_MAX = 1 << 16
# how long a request waits after a failed call: enough for a store that is back
OUTAGE_WAIT_S = 0.05
HINT_TIMEOUT_S = 1.0  # no request waits for a hint


class LookupBackend(Protocol):
    """Makes lookups. Calls never wait, except `pause` and `close`.

    Exceptions of futures are KVStoreErrors.
    """

    def look_up(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[Answer]":
        """Begin a lookup."""

    def touch(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[None]":
        """Begin to mark pages as used, heads last."""

    def hint(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Take what a request says, as `gpu_agent.hint_sender.Send` says; it may be lost."""

    def open(
        self, namespaces: Sequence[Namespace], timeout_s: float
    ) -> "concurrent.futures.Future[None]":
        """Begin to connect and to register the namespaces."""

    def poll(self) -> None:
        """Complete futures of answered lookups; those of touches may need some more steps."""

    def pause(self, timeout_s: float) -> None:
        """Wait until a lookup may have been answered, at most that long."""

    def close(self) -> None:
        """Stop waiting for answers."""


class ThreadLookups:
    """Lookups on threads of this process.

    `client` is closed with them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lookups = ThreadPool(THREADS, "kvstore-lookup")
        # separate, because requests wait for lookups only
        self._touches = ThreadPool(1, "kvstore-touch")
        self.hints = HintQueue(client, HINT_TIMEOUT_S)

    def look_up(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[Answer]":
        """Begin a lookup on a thread."""
        deadline = Deadline(timeout_s)
        return _submitted(
            self._lookups, lambda: look_up_all_shards(self._client, question, deadline)
        )

    def touch(self, question: Question, timeout_s: float) -> "concurrent.futures.Future[None]":
        """Begin a touch on a thread."""
        deadline = Deadline(timeout_s)
        return _submitted(self._touches, lambda: touch_all_shards(self._client, question, deadline))

    def hint(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Give what a request says to the thread that sends it."""
        self.hints.send(hinted, after_s)

    def open(
        self, namespaces: Sequence[Namespace], timeout_s: float
    ) -> "concurrent.futures.Future[None]":
        """Begin to connect on a thread."""
        deadline = Deadline(timeout_s)
        return _submitted(
            self._lookups, lambda: open_namespaces(self._client, namespaces, deadline)
        )

    def poll(self) -> None:
        """Do nothing: the threads complete the futures."""

    def pause(self, timeout_s: float) -> None:
        """Sleep for a moment."""
        time.sleep(min(timeout_s, _PAUSE_S))

    def close(self) -> None:
        """End the threads and close the client."""
        self.hints.close()
        for executor in (self._touches, self._lookups):
            executor.shutdown(wait=True, cancel_futures=True)
        self._client.close()


def look_up_all_shards(client: Client, question: Question, deadline: Deadline) -> Answer:
    """Return the farthest tiers of pages that all shards have.

    Raises Exhausted if it began too late, which says nothing about the node.
    """
    if deadline.passed:
        raise Exhausted(f"too many lookups at a time: one had no thread in {deadline.seconds:g} s")
    answer = []
    for namespaces, keys in question:
        there = bytes((Tier.RAM,)) * len(keys)
        for namespace in namespaces:
            left = list(itertools.compress(keys, there))  # what all shards before it have
            if not left:
                break
            result = client.lookup(namespace, left, timeout_s=deadline.remaining())
            found = iter(result.tiers or result.present)
            if result.tiers or beyond_ram(there):
                there = bytes(has and _farther(has, next(found)) for has in there)
            else:
                there = bytes(has and next(found) for has in there)
        answer.append(there)
    return tuple(answer)


def _farther(tier: int, other: int) -> int:
    return max(tier, other) if other else 0


def beyond_ram(tiers: bytes) -> bool:
    """Return whether any of these is farther than RAM; prompts have thousands of blocks."""
    return _DISK in tiers or _PEER in tiers


def presence(answer: Answer) -> Answer:
    """Return 1 for each block in any tier."""
    return tuple(tiers.translate(_PRESENT) if beyond_ram(tiers) else tiers for tiers in answer)


def touch_all_shards(client: Client, question: Question, deadline: Deadline) -> None:
    """Touch pages in all shards, unless it began too late."""
    if deadline.passed:
        return
    for namespaces, keys in question:
        for namespace in namespaces if keys else ():
            client.lookup(namespace, keys, touch=True, timeout_s=deadline.remaining())


def open_namespaces(client: Client, namespaces: Sequence[Namespace], deadline: Deadline) -> None:
    """Register namespaces."""
    for namespace in namespaces:
        client.open(namespace, deadline.remaining())


def _submitted(
    executor: concurrent.futures.Executor, call: Callable[[], Result]
) -> "concurrent.futures.Future[Result]":
    def run() -> Result:
        try:
            return call()
        except KVStoreError:
            raise
        except (
            Exception
        ) as error:  # end of a thread's work: the request needs an answer after any error
            log.exception("a lookup failed")
            raise KVStoreError(repr(error)) from error

    try:
        return executor.submit(carried(run))
    except RuntimeError as error:  # no thread can be started, or the interpreter ends
        failed: concurrent.futures.Future[Result] = Future()
        failed.set_exception(Unavailable(str(error)))
        return failed


@dataclass
class LookupCounts:
    """Counters of lookups. `lookups_failed`: calls that the store did not answer in time."""

    lookups: int = 0
    lookups_failed: int = 0


@dataclass
class _Pending:
    done: concurrent.futures.Future[Answer]
    nothing: Answer
    overdue_at: float
    earlier: Answer | None
    answered_at: float | None = None


class Lookups:
    """Lookups of a scheduler, for its thread only; futures may end on others.

    `backend` is closed here.
    """

    def __init__(self, backend: LookupBackend, timeout_s: float) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._used: list[tuple[str, Question]] = []  # requests that have ended since the last poll
        self._counts = LookupCounts()
        self._running = 0
        self._outage = OutageLog()

    def ask(self, request_id: str, question: Question, earlier: Answer | None = None) -> None:
        """Start a lookup, which replaces an earlier one of this request. Returns at once.

        `earlier`: its answer, which is valid until there is another.
        """
        nothing = tuple(bytes(len(keys)) for _, keys in question)
        done: concurrent.futures.Future[Answer] = Future()
        with self._lock:
            full = self._running >= PENDING_MAX
            wanted = any(len(keys) for _, keys in question) and not full
            self._running += wanted
            self._counts.lookups += wanted
            wait_s = min(OUTAGE_WAIT_S, self._timeout_s) if self._outage.error else self._timeout_s
        if wanted:
            with request(request_id):
                done = self._backend.look_up(question, self._timeout_s)
                # It may end while another lookup begins
                done.add_done_callback(carried(self._ended))
        else:
            done.set_result(nothing)
        self._pending[request_id] = _Pending(done, nothing, time.monotonic() + wait_s, earlier)

    def answer(self, request_id: str) -> Answer | None:
        """Return the answer; None while it is unknown.

        After the deadline, and for a request without a lookup, the answer is that nothing is
        stored.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            return ()
        if not pending.done.done():
            self._backend.poll()
        now, done = time.monotonic(), pending.done.done()
        if not done and now < pending.overdue_at:
            return pending.earlier
        pending.answered_at = pending.answered_at or now
        return pending.done.result() if done and not pending.done.exception() else pending.nothing

    def failed(self, request_id: str) -> bool:
        """Return whether the store did not answer a request's lookup, as far as known."""
        pending = self._pending.get(request_id)
        if pending is None:
            return False
        if pending.done.done():
            return pending.done.exception() is not None
        return time.monotonic() >= pending.overdue_at

    def awaited(self, request_id: str, timeout_s: float) -> Answer | None:
        """Wait for a lookup's answer; None if there is none in time."""
        end = time.monotonic() + timeout_s
        while (answer := self.answer(request_id)) is None and (
            left_s := end - time.monotonic()
        ) > 0:
            self._backend.pause(left_s)
        return answer

    def age_s(self, request_id: str) -> float | None:
        """Return how long the request has had its answer; 0 if it has none yet.

        None: it has no lookup, or needs no answer any more.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            return None
        return time.monotonic() - pending.answered_at if pending.answered_at else 0.0

    def drop(self, request_id: str) -> None:
        """Forget a request's lookup."""
        self._pending.pop(request_id, None)

    def drop_all(self) -> None:
        """Forget all lookups."""
        self._pending.clear()

    def touch(self, request_id: str, question: Question) -> None:
        """Count these pages as used, heads last.

        A chain that is saved in parts, or that an engine keeps in its own cache, would otherwise
        lose its head first. The next `poll` does it, together for requests that end in one step.
        Dropped if too many are pending.
        """
        if len(self._used) < PENDING_MAX // 2:
            self._used.append((request_id, question))

    def hint(self, hinted: HintedPages, after_s: Sequence[float]) -> None:
        """Send what a request says in the background, as `gpu_agent.hint_sender.Send` says."""
        self._backend.hint(hinted, after_s)

    def open(self, namespaces: Sequence[Namespace]) -> None:
        """Connect and register in the background: the first request need not wait for it."""
        with self._lock:
            self._running += 1
        self._backend.open(namespaces, self._timeout_s).add_done_callback(self._ended)

    def poll(self) -> None:
        """Touch pages of ended requests, and collect answers.

        Answers that arrived since the last call are known afterwards.
        """
        while self._used:
            count = _together(self._used)
            used, self._used = self._used[:count], self._used[count:]
            self._touch(used)
        self._backend.poll()

    def _touch(self, used: Sequence[tuple[str, Question]]) -> None:
        with self._lock:
            if self._running >= PENDING_MAX // 2:
                return
            self._running += 1
        with request(*(request_id for request_id, _ in used)):
            done = self._backend.touch(
                [group for _, question in used for group in question], self._timeout_s
            )
        done.add_done_callback(self._ended)

    @property
    def counted(self) -> bool:
        """Return whether `take_counts` would return anything."""
        return bool(self._counts.lookups or self._counts.lookups_failed)

    def take_counts(self) -> LookupCounts:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, LookupCounts()
            return counts

    def close(self) -> None:
        """Stop waiting for answers; running calls end by their deadline."""
        self._backend.close()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        with self._lock:
            return [] if 0 <= self._running <= PENDING_MAX + 1 else [f"{self._running} lookups run"]

    def _ended(self, done: "concurrent.futures.Future[Any]") -> None:
        error = None if done.cancelled() else done.exception()
        assert error is None or isinstance(error, KVStoreError)
        with self._lock:
            self._running -= 1
            self._counts.lookups_failed += error is not None
        if not done.cancelled():
            self._outage.report(error)


def _together(used: Sequence[tuple[str, Question]]) -> int:
    """Return how many of these, from the first on, are touched together."""
    keys = itertools.accumulate(
        sum(len(keys) for _, keys in question) for _, question in used[:TOUCHED_TOGETHER]
    )
    return max(1, sum(count <= TOUCHED_KEYS_MAX for count in keys))
