"""Queue pages for other members, and track each page at each target, without any I/O.

    offer(page, targets) --> waiting, per target, oldest first --next--> one batch per target
                               ^                                              |
                               +-- the target is unreachable, full or busy ---+--> done, or given up

The clock is an argument. A queued page is held, so the bound of the queue is a bound on RAM: when
it is full, the oldest page is dropped and counted. A removed page is not sent.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvstore.keys import short

P = TypeVar("P")

BATCH_PAGES_MAX = 64
BATCH_NBYTES_MAX = 16 << 20
PAGES_MAX = 1 << 16  # in the queue
PATIENCE_S = 60.0  # for a target that is unreachable, full or refuses
# Pause between two tries of a failed target, doubled each time
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 2.0
# failed targets served at a time: they may hang, and others must not wait behind them
FAILING_MAX = 2
REFUSALS_MAX = 4  # refusals of a page by its targets: a new member is unknown to some for a moment


class Group(NamedTuple):
    """Common properties of the pages of one batch."""

    digest: bytes  # of their namespace
    expiry_s: int  # since the epoch; 0: no time to live
    durable: bool


class AckWaiter:
    """Counts of copies that are still to be sent for a put, and that were lost.

    `failed`: whether a target was unreachable or refused, which is retried.
    """

    def __init__(self) -> None:
        self.open_count = 0
        self.lost_count = 0
        self.failed = False

    def settle(self, arrived: bool) -> None:
        """Count an acknowledged or lost copy."""
        self.open_count -= 1
        self.lost_count += not arrived


@dataclass(eq=False)
class QueuedPage(Generic[P]):
    """A page and the targets that do not have it yet.

    `busy`: targets to which it is being sent.
    """

    page: P
    prefix_hash: bytes
    nbytes: int  # of RAM
    group: Group
    left: set[str]
    waiter: AckWaiter | None
    end: float
    busy: set[str] = field(default_factory=set)
    arrived: bool = False  # at one of the targets
    refusals: int = 0


@dataclass(frozen=True, eq=False)
class Batch(Generic[P]):
    """A batch that is being sent to one target: pages of one group."""

    target: str
    queued_pages: list[QueuedPage[P]]

    @property
    def group(self) -> Group:
        """Return the namespace and options that all pages of the batch share."""
        return self.queued_pages[0].group


@dataclass
class Counts:
    """Counters of copies sent to targets."""

    pages_handed: int = 0
    nbytes_handed: int = 0
    pages_dropped: int = 0


class _Target(Generic[P]):
    def __init__(self) -> None:
        self.waiting: dict[QueuedPage[P], None] = {}
        self.under_way: Batch[P] | None = None
        self.pause_s = 0.0
        self.paused_until = 0.0

    def ready(self, now: float) -> bool:
        return bool(self.under_way is None and self.paused_until <= now and self.waiting)


class ReplicationQueue(Generic[P]):
    """Queue of pages. Not thread-safe.

    Times are seconds of any monotonic clock. Finished pages are in `freed`, for the caller to
    release; those that no target took are in `unsent`, too.
    """

    def __init__(self, nbytes_max: int, gone: Callable[[P], bool], nbytes_per_s: int = 0) -> None:
        """Create an empty queue. `gone` tells whether a page was removed.

        `nbytes_per_s`: rate limit; 0 means none.
        """
        self.nbytes_max = nbytes_max
        self.nbytes = 0
        self.counts = Counts()
        # Dropped pages by target, until the target knows of them and fetches them
        self.missed: Counter[str] = Counter()
        # By member: pages of targets that left the view, of which it may be an owner now. It has
        # compared all pages perhaps before this node put the newest of them.
        self.suspected: Counter[str] = Counter()
        self.freed: list[P] = []
        self.unsent: list[P] = []  # those of them that no target has
        self._gone = gone
        self._nbytes_per_s = nbytes_per_s
        self._next_at = 0.0  # when the rate limit allows another batch
        self._queued_pages: dict[QueuedPage[P], None] = {}  # oldest first
        self._targets: dict[str, _Target[P]] = {}  # the target that was served longest ago first

    @property
    def page_count(self) -> int:
        """Return the number of queued pages."""
        return len(self._queued_pages)

    @property
    def queued_pages(self) -> Collection[QueuedPage[P]]:
        """Return the queued pages, the oldest first."""
        return self._queued_pages.keys()

    @property
    def under_way(self) -> bool:
        """Return whether a batch is being sent."""
        return any(target.under_way for target in self._targets.values())

    @property
    def _can_retry_failed_target(self) -> bool:
        """Return whether one more failing target may be tried."""
        return (
            sum(bool(some.under_way and some.pause_s) for some in self._targets.values())
            < FAILING_MAX
        )

    def has_room(self, nbytes: int = 0) -> bool:
        """Return whether so many bytes fit without dropping a page."""
        return self.nbytes + nbytes <= self.nbytes_max and len(self._queued_pages) <= PAGES_MAX

    def offer(
        self,
        page: P,
        prefix_hash: bytes,
        nbytes: int,
        group: Group,
        targets: Collection[str],
        now: float,
        waiter: AckWaiter | None = None,
    ) -> None:
        """Queue a page that the caller holds; `nbytes` is the RAM that it keeps."""
        queued = QueuedPage(
            page, prefix_hash, nbytes, group, set(targets), waiter, now + PATIENCE_S
        )
        if waiter:
            waiter.open_count += len(queued.left)
        self._queued_pages[queued] = None
        self.nbytes += nbytes
        for name in sorted(queued.left):
            self._targets.setdefault(name, _Target()).waiting[queued] = None
        self._free_if_done(queued)
        while queued in self._queued_pages and len(self._queued_pages) > 1 and not self.has_room():
            self._drop(next(some for some in self._queued_pages if not some.busy))

    def follow(self, members: Collection[str]) -> None:
        """Take the members of a new view, without this one; former members get nothing any more."""
        for name in [name for name in self._targets if name not in members]:
            target = self._targets[name]
            under_way = target.under_way.queued_pages if target.under_way else []
            for queued in [*target.waiting, *under_way]:
                self._lose(queued, name)
            self.suspected.pop(name, None)
            if missed := self.missed.pop(name, 0):
                self.suspected.update(dict.fromkeys(members, missed))
            if target.under_way is None:
                del self._targets[name]

    def next(self, now: float) -> Batch[P] | None:
        """Return a batch to send, to be reported by `done` or `failed`."""
        if now < self._next_at:
            return None
        can_retry = self._can_retry_failed_target
        for name in [name for name, target in self._targets.items() if target.ready(now)]:
            target = self._targets[name]
            if target.pause_s and not can_retry:
                continue
            target.under_way = batch = self._batch(name, now)
            if batch is not None:
                self._targets[name] = self._targets.pop(name)
                if self._nbytes_per_s:
                    nbytes = sum(queued.nbytes for queued in batch.queued_pages)
                    self._next_at = max(now, self._next_at) + nbytes / self._nbytes_per_s
                return batch
        return None

    def due(self, now: float) -> float | None:
        """Return when `next` may have a batch, unless something changes before."""
        can_retry = self._can_retry_failed_target
        idle = [
            target.paused_until
            for target in self._targets.values()
            if target.waiting and not target.under_way and (can_retry or not target.pause_s)
        ]
        return max(min(idle), self._next_at) if idle else None

    def done(self, batch: Batch[P], taken: Collection[bytes], now: float) -> None:
        """Report an answered batch. The target has the keys in `taken`; others are sent later."""
        target = self._ended(batch)
        for queued in batch.queued_pages:
            queued.busy.discard(batch.target)
            arrived = queued.prefix_hash in taken
            queued.arrived |= arrived
            if arrived:
                self.counts.pages_handed += 1
                self.counts.nbytes_handed += queued.nbytes
            gone = self._gone(queued.page)
            if arrived or gone:
                self._settle(queued, batch.target, arrived and not gone)
            else:
                self._again(queued, batch.target, now)
        self._pause(target, now, failed=not taken)
        if taken and len(taken) < len(batch.queued_pages):
            target.paused_until = now + PAUSE_S_MIN

    def failed(self, batch: Batch[P], now: float, refused: bool = False) -> None:
        """Report a failed batch; `refused`: the target rejected all of it."""
        target = self._ended(batch)
        for queued in batch.queued_pages:
            queued.busy.discard(batch.target)
            queued.refusals += refused
            if queued.waiter:
                queued.waiter.failed = True
            if self._gone(queued.page):
                self._settle(queued, batch.target, False)
            else:
                self._again(queued, batch.target, now)
        self._pause(target, now, failed=True)

    def drop_gone(self) -> None:
        """Drop removed pages at once."""
        for queued in [queued for queued in self._queued_pages if self._gone(queued.page)]:
            for name in queued.left - queued.busy:
                self._settle(queued, name, False)

    def hurry(self) -> None:
        """Ignore the rate limit from now on."""
        self._nbytes_per_s, self._next_at = 0, 0.0

    @property
    def under_replicated(self) -> int:
        """Return how many pages may have too few copies, of which no owner knows yet."""
        return sum(self.missed.values()) + max(self.suspected.values(), default=0)

    def missed_by(self, name: str) -> int:
        """Return how many pages a member may lack, so that it compares its pages."""
        return self.missed[name] + self.suspected[name]

    def settle_missed(self, name: str) -> None:
        """Note that a member knows that it may lack pages, or compares them now."""
        self.missed.pop(name, None)
        self.suspected.pop(name, None)

    def clear(self) -> None:
        """Drop everything; batches under way end by `done` or `failed`."""
        self.follow(())

    # ---- parts -----------------------------------------------------------------------------

    def _batch(self, name: str, now: float) -> Batch[P] | None:
        waiting = self._targets[name].waiting
        queued_pages: list[QueuedPage[P]] = []
        nbytes = 0
        for queued in list(_some(waiting, 4 * BATCH_PAGES_MAX)):
            if self._gone(queued.page):
                self._settle(queued, name, False)
            elif queued.end <= now:
                self._lose(queued, name)
            elif not queued_pages or (
                queued.group == queued_pages[0].group and nbytes + queued.nbytes <= BATCH_NBYTES_MAX
            ):
                queued_pages.append(queued)
                nbytes += queued.nbytes
                if len(queued_pages) == BATCH_PAGES_MAX:
                    break
        for queued in queued_pages:
            del waiting[queued]
            queued.busy.add(name)
        return Batch(name, queued_pages) if queued_pages else None

    def _ended(self, batch: Batch[P]) -> _Target[P]:
        target = self._targets[batch.target]
        assert target.under_way is batch
        target.under_way = None
        return target

    def _pause(self, target: _Target[P], now: float, failed: bool) -> None:
        target.pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * target.pause_s)) if failed else 0.0
        target.paused_until = now + target.pause_s

    def _again(self, queued: QueuedPage[P], name: str, now: float) -> None:
        """Queue a page for a target again, unless it was dropped or has failed for too long."""
        if name in queued.left and queued.end > now and queued.refusals < REFUSALS_MAX:
            self._targets[name].waiting[queued] = None
        else:
            self._lose(queued, name)

    def _drop(self, queued: QueuedPage[P]) -> None:
        for name in list(queued.left):
            self._lose(queued, name)
        self._free_if_done(queued)

    def _lose(self, queued: QueuedPage[P], name: str) -> None:
        if name in queued.left:
            self.counts.pages_dropped += 1
            self.missed[name] += 1
        self._settle(queued, name, False)

    def _settle(self, queued: QueuedPage[P], name: str, arrived: bool) -> None:
        if name in queued.left:
            queued.left.discard(name)
            self._targets[name].waiting.pop(queued, None)
            if queued.waiter:
                queued.waiter.settle(arrived)
        self._free_if_done(queued)

    def _free_if_done(self, queued: QueuedPage[P]) -> None:
        if not queued.left and not queued.busy and queued in self._queued_pages:
            del self._queued_pages[queued]
            self.nbytes -= queued.nbytes
            self.freed.append(queued.page)
            if not queued.arrived:
                self.unsent.append(queued.page)

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        found = []
        if self.nbytes != sum(queued.nbytes for queued in self._queued_pages):
            found.append(
                f"{self.nbytes} bytes are counted in the queue, but its pages have another sum"
            )
        for queued in self._queued_pages:
            places = {name for name, target in self._targets.items() if queued in target.waiting}
            if places | (queued.busy & queued.left) != queued.left or places & queued.busy:
                found.append(
                    f"{short(queued.prefix_hash)} waits for {places}, is under way to {queued.busy}"
                )
        return found


def _some(waiting: Iterable[QueuedPage[P]], count: int) -> list[QueuedPage[P]]:
    return [queued for _, queued in zip(range(count), waiting, strict=False)]
