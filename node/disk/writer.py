"""Write pages to disk behind the puts: a bounded queue of pages in RAM, and one thread.

    offer -> [ page page page | barrier | page ... ] -> store(batch) -> release -> sync
       +---> deferred, while the disk is full --^

A queued page is held in RAM by the tier that offered it, so the queue's bytes are bounded; pages
that do not fit stay in RAM only and are counted. If tenants have quotas, a tenant may not have more
of it than is free: however many of them flood it, another finds space.

While the disk has free slots, a page is written at once. On a full disk each new page evicts an old
one, so it waits until RAM has turned over by LATER_SHARE of its size since it came: RAM and disk
then hold different pages, and the node keeps more. Flush, durable puts and the stop of a node do
not wait.

There are fewer barriers than pages: a caller joins a barrier at the end of the queue, and a barrier
whose waiters have all given up is skipped without a sync.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from node.disk.page_table import DiskCounters
from node.memory.page import Page, PageNamespace, State
from node.memory.tier import RamTier

log = logging.getLogger(__name__)

BATCH_PAGES_MAX = 256  # pages of a batch, whose rows appear together
BATCH_NBYTES_MAX = 16 << 20  # their bytes, which are held in RAM until then
LATER_SHARE = 0.5  # of the RAM; in the time of the rest a page is written before RAM evicts it
IDLE_S = 0.2  # after this time without work, it deletes rows of forgotten pages and syncs
LATER_PAGES = 1024  # deferred pages that RAM has evicted already
GONE_S = 0.2  # between two checks whether a caller still waits for a flush
PRUNED_PER_ADD = 4  # deferred pages that are checked with each new one


class DeferredWrites:
    """Hold pages back until the RAM has turned over before a full disk takes them.

    Each has a due time. Pages that the RAM has evicted meanwhile are removed, a few with each new
    page, so that no call gets slower with their number. Not thread-safe.

        _checked: oldest ... | _pages: not checked in this round ... newest
    """

    def __init__(self) -> None:
        self._checked: deque[tuple[int, Page]] = deque()
        self._pages: deque[tuple[int, Page]] = deque()

    def __len__(self) -> int:
        return len(self._checked) + len(self._pages)

    def add(self, due: int, page: Page, count_max: int) -> None:
        """Add a page, due no sooner than the previous one.

        From `count_max` pages on, look for evicted ones.
        """
        self._pages.append((due, page))
        if len(self) > count_max:
            for _ in range(PRUNED_PER_ADD):
                self._prune()

    def _prune(self) -> None:
        if not self._pages:
            self._checked, self._pages = self._pages, self._checked
        if self._pages:
            entry = self._pages.popleft()
            if entry[1].state is State.VISIBLE:
                self._checked.append(entry)

    def first(self) -> tuple[int, Page]:
        """Return the due time of the first page, and the page.

        Raises IndexError if there is none.
        """
        return (self._checked or self._pages)[0]

    def pop(self) -> Page:
        """Take the oldest page."""
        return (self._checked or self._pages).popleft()[1]


class _Barrier:
    """A mark in the queue.

    It is `done` when the thread has reached it, and `safe` if everything before is durable. It
    carries its own result, because the tier may fail or recover before a waiter looks.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.safe = False
        self.waiters = 0  # guarded by the writer's lock


class DiskWriter:
    """The write-behind queue and its thread. Thread-safe.

    Its lock is taken under the RAM tier's, never the other way round.

    `has_room`: whether a page of a namespace can be stored without evicting another. `write(pages,
    is_barrier)` stores pages, and returns whether everything before is durable. `on_error` receives
    errors. `is_stopped`: the disk takes nothing any more.
    """

    def __init__(
        self,
        counters: DiskCounters,
        has_room: Callable[[PageNamespace], bool],
        write: Callable[[Sequence[Page], bool], bool],
        on_error: Callable[[str, BaseException], None],
        is_stopped: Callable[[], bool],
        queue_nbytes_max: int,
    ) -> None:
        self._counters = counters
        self._has_room = has_room
        self._write = write
        self._on_error = on_error
        self._is_stopped = is_stopped
        self._later = DeferredWrites()  # due times are values of RAM's placed_nbytes
        self._queue_nbytes_max = queue_nbytes_max
        self._changed = threading.Condition()
        self._queue: deque[Page | _Barrier] = deque()
        self.queue_nbytes = 0
        self._queued: Counter[str] = Counter()  # bytes of them by tenant
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)

    def start(self, tier: RamTier) -> None:
        """Start the thread.

        `tier` is the one that offers pages.
        """
        self._tier = tier
        self._later_nbytes = int(tier.slots.region_nbytes * LATER_SHARE)
        self._thread.start()

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        """Return how many of the pages, from the first on, were taken into the queue.

        Never waits. It may request the others later, unless they are `urgent`.
        """
        if self._is_stopped() or self._stopping:
            self._counters.pages_refused += 0 if urgent else len(pages)
            return 0
        taken = 0
        with self._changed:
            if pages and not urgent and not self._has_room(pages[0].namespace):
                due = self._tier.eviction.placed_nbytes + self._later_nbytes
                # Limited in proportion to RAM, even if the disk hangs and no page becomes due
                limit = 2 * self._tier.visible_count + LATER_PAGES
                for page in pages:
                    self._later.add(due, page, limit)
                if self._is_due():
                    self._changed.notify_all()
                return 0
            for page in pages:
                if not self._fits(page.namespace):
                    break
                self._queue.append(page)
                self._count(page, 1)
                taken += 1
            self._changed.notify_all()
        self._counters.pages_refused += 0 if urgent else len(pages) - taken
        return taken

    def _fits(self, space: PageNamespace) -> bool:
        """Return whether a page fits.

        An empty queue takes any page, or a large one would never be stored.
        """
        nbytes, theirs = space.slot_nbytes, self._queued[space.value.tenant]
        left = self._queue_nbytes_max - self.queue_nbytes - nbytes
        if self._tier.eviction.order.accounts.any_limited:
            return not theirs or left >= theirs
        return not self.queue_nbytes or left >= 0

    def _count(self, page: Page, more: int) -> None:
        nbytes, tenant = more * page.namespace.slot_nbytes, page.namespace.value.tenant
        self.queue_nbytes += nbytes
        self._queued[tenant] += nbytes
        if not self._queued[tenant]:
            del self._queued[tenant]

    def wait_room(self, space: PageNamespace, timeout_s: float) -> bool:
        """Wait until the queue takes a page of this namespace."""
        with self._changed:
            return self._changed.wait_for(lambda: self._fits(space), timeout_s)

    def flush(self, timeout_s: float, has_left: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all pages offered before are on the medium.

        Return False if it took longer, failed, or `has_left` says that the caller has left.
        """
        end = time.monotonic() + timeout_s
        barrier = self._join()
        try:
            while not barrier.done.wait(max(0.0, min(GONE_S, end - time.monotonic()))):
                if time.monotonic() >= end or has_left():
                    return False
            return barrier.safe
        finally:
            with self._changed:
                barrier.waiters -= 1

    def _join(self) -> _Barrier:
        """Return the barrier behind all offered pages.

        While it is in the queue, its sync has not begun.
        """
        with self._changed:
            last = self._queue[-1] if self._queue else None
            barrier = last if isinstance(last, _Barrier) else _Barrier()
            if barrier is not last:
                self._queue.append(barrier)
                self._changed.notify_all()
            barrier.waiters += 1
            return barrier

    def stop(self, timeout_s: float) -> bool:
        """Write and sync the queued pages, then end the thread: all of it in `timeout_s`."""
        end = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(max(0.0, end - time.monotonic()))
        return flushed

    def _run(self) -> None:
        while True:
            pages, barrier = self._next()
            if not pages and barrier is None and self._stopping:
                return
            try:
                is_safe = self._write(pages, barrier is not None)
                if barrier is not None:
                    barrier.safe = is_safe
            except Exception as error:  # the thread must go on, or holds would never end
                log.debug("disk writer", exc_info=True)
                self._counters.pages_refused += len(pages)
                self._on_error("writing", error)
            finally:
                self._done(pages, barrier)

    def _next(self) -> tuple[list[Page], _Barrier | None]:
        """Return the next pages, up to an awaited barrier; nothing after IDLE_S without work."""
        pages = self._due()
        if pages:
            return pages, None
        nbytes = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping or self._is_due(), IDLE_S)
            while self._queue and len(pages) < BATCH_PAGES_MAX and nbytes < BATCH_NBYTES_MAX:
                item = self._queue.popleft()
                if isinstance(item, Page):
                    pages.append(item)
                    nbytes += item.namespace.slot_nbytes
                elif item.waiters:
                    return pages, item
        return pages, None

    def _due(self) -> list[Page]:
        """Return due pages, held and counted as queued; removed ones are left out."""
        pages: list[Page] = []
        with self._changed:
            room_nbytes = self._queue_nbytes_max - self.queue_nbytes
            while self._is_due() and len(pages) < BATCH_PAGES_MAX:
                room_nbytes -= self._later.first()[1].namespace.slot_nbytes
                if room_nbytes < 0 and (pages or self._queue):
                    break
                pages.append(self._later.pop())
        held = self._tier.hold_visible(pages) if pages else []
        with self._changed:
            for page in held:
                self._count(page, 1)
        return held

    def _is_due(self) -> bool:
        return bool(self._later) and self._later.first()[0] <= self._tier.eviction.placed_nbytes

    def _done(self, pages: list[Page], barrier: _Barrier | None) -> None:
        self._tier.release(pages)
        with self._changed:
            for page in pages:
                self._count(page, -1)
            self._changed.notify_all()
        if barrier:
            barrier.done.set()
