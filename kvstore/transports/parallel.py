"""Move one batch over several connections, because one connection uses only one core.

On 16 cores a connection moves 3.5 GB/s and eight 14 to 19. On two cores nothing is gained: the node
has the other one.
"""

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import KVStoreError
from kvstore.sync import Future, LeaseTable
from kvstore.threads import ThreadPool, begin, end, wait_for

T = TypeVar("T")

STREAM_NBYTES_MIN = 16 << 20  # page bytes for each: less is moved before another thread has started
STREAMS_MAX = 4
THREADS_MAX = 8  # threads of one transport, beside its callers' own
# cores of this machine per stream: one here, one for a local node, one for the engine
CORES_EACH = 3


def stream_count(pages: int, page_nbytes: int) -> int:
    """Return over how many connections so many pages are best sent."""
    wanted = min(STREAMS_MAX, pages * page_nbytes // STREAM_NBYTES_MIN, pages)
    return max(1, min(wanted, len(os.sched_getaffinity(0)) // CORES_EACH)) if wanted > 1 else 1


def split(count: int, streams: int) -> list[slice]:
    """Split `count` pages into so many runs of about the same length."""
    ends = [count * (stream + 1) // streams for stream in range(streams)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class _Ending:
    """Let no thread work on after a call that was interrupted or broke.

    `left`: calls that no thread has taken yet; `others`: the work of other threads.
    """

    def __init__(self, left: "collections.deque[int]", others: "Sequence[Future[None]]") -> None:
        self._left = left
        self._others = others

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if not issubclass(kind, Exception):  # after an error the other calls are still made
                self._left.clear()
            end(self._others)


class ThreadLease:
    """Reserve one of the threads.

    Released with its work, or when it is collected.
    """


class ParallelTransfer:
    """Threads of a transport or a client, started when needed.

    A call never waits for a thread: behind other calls it would miss its deadline.
    """

    def __init__(self, threads_max: int = THREADS_MAX, name: str = "kvstore-streams") -> None:
        self._threads_max = threads_max
        self._name = name
        self._lock = threading.Lock()
        self._threads: ThreadPool | None = None
        self._leases: LeaseTable[None] = LeaseTable(threads_max)  # running or starting jobs
        self._pid = os.getpid()

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | KVStoreError]:
        """Run the calls in parallel and return what each returned or raised, after all have ended.

        No thread touches a caller's buffer afterwards, even if this is interrupted. The calling
        thread and the free ones each take the next call, so a call that hangs blocks only its own
        thread.
        """
        if len(calls) == 1:
            try:
                return [calls[0]()]
            except KVStoreError as error:
                return [error]
        left, made = collections.deque(range(len(calls))), dict[int, T | KVStoreError]()

        def take() -> None:
            while left:
                try:
                    number = left.popleft()
                except IndexError:  # another thread took the last call
                    return
                try:
                    made[number] = calls[number]()
                except KVStoreError as error:
                    made[number] = error

        others: list[Future[None]] = []
        ending = _Ending(left, others)
        # Interrupts in a row may each come before the first line of an `__exit__`
        with ending, ending, ending, ending:
            for _ in calls[1:]:
                others.append(Future())
                if not self._begin(others[-1], take):
                    others.pop()
                    break
            take()
            wait_for(others)
        for other in others:
            other.result()
        return [made[number] for number in range(len(calls))]

    @property
    def _busy(self) -> int:
        return self._leases.count

    def _begin(self, done: "Future[None]", work: Callable[[], None]) -> bool:
        """Return whether a thread does the work.

        False: no thread is free, the transport is closed, or this is a child of a fork; in the last
        two cases the call itself raises.
        """
        if os.getpid() != self._pid:
            return False
        lease = ThreadLease()
        if not self._leases.acquire(lease, None):
            return False
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPool(self._threads_max, self._name)
        own = [lease]  # the lease ends with the work, or when an interrupt drops it
        del lease

        def ended(_: object) -> None:
            if own:
                self._leases.release(own.pop())

        done.add_done_callback(ended)
        return begin(done, self._threads, work)

    def close(self) -> None:
        """Accept no more calls; running calls end by their deadlines."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
