"""Bring pages into RAM from lower tiers: one caller reads, any number wait for it.

    find    which tier has it              without the lock
    begin   a slot, state LOADING          under the lock (`RamTier.acquire`)
    read    bytes into the slot            without the lock; if one tier fails, the next is asked
    end     VISIBLE, or a miss for all     under the lock

If only parts of a page are wanted, a tier that supports it reads these into a smaller slot, for
that one caller.
"""

import bisect
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.checksum import cuts, hashed_nbytes, parts_of
from kvstore.deadline import Deadline
from kvstore.keys import Namespace
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.memory.eviction import Eviction
from node.memory.lower_tier import Load, LocalTier, LowerTier, Query, Source
from node.memory.page import Counters, NamespaceIndex, Page, PageNamespace, State

# Parts of a page, in a slot of their size.
#
#     page    | 0 | 1 | 2 | 3 | 4 |       ranges lie in 1, 3 and 4
#     slot    | 1 | 3 | 4 |               of one read, which can not be found; freed at its end
#
# A leaf of the checksum covers the smallest part that can be verified (`kvstore.checksum`), and
# reads begin and end at multiples of SLOT_ALIGN_NBYTES.

# Share of a page beyond which all of it is read: that costs little more, and then it is in RAM.
SHARE_MAX = 0.75

Range = tuple[int, int]


class PartialPage:
    """A `PageNamespace` for pages of which only the parts with certain ranges are read.

    `ranges` are (offset, nbytes).
    """

    def __init__(self, space: PageNamespace, ranges: Sequence[Range]) -> None:
        self.value = space.value
        self.digest = space.digest
        self.account = space.account
        self.page_nbytes = space.page_nbytes
        self.counters: Counters = space.counters
        self.pages: dict[bytes, Page] = {}
        self.seed = space.seed
        self.numbers = sorted(parts_of(self.page_nbytes, ranges))
        # (start, end) in the page; they lie one after the other in the slot
        self.runs: list[tuple[int, int]] = []
        for number in self.numbers:
            start, end = cuts(self.page_nbytes)[number]
            self._add(
                start // SLOT_ALIGN_NBYTES * SLOT_ALIGN_NBYTES,
                -(-end // SLOT_ALIGN_NBYTES) * SLOT_ALIGN_NBYTES,
            )
        ends = [*itertools.accumulate(end - start for start, end in self.runs)]
        self._starts = [start for start, _ in self.runs]
        self._places = [0, *ends[:-1]]  # of the runs in the slot
        self.slot_nbytes = ends[-1]

    def _add(self, start: int, end: int) -> None:
        if self.runs and start <= self.runs[-1][1]:
            start = self.runs.pop()[0]
        self.runs.append((start, end))

    def slot_offset(self, offset: int) -> int:
        """Return the position of a byte of these parts in the slot."""
        run = bisect.bisect_right(self._starts, offset) - 1
        assert offset < self.runs[run][1], f"byte {offset} of the page is not in these parts"
        return self._places[run] + offset - self._starts[run]

    def drop(self, page: Page) -> None:
        """Do nothing: such a page is in no index."""


def parts_wanted(space: PageNamespace, ranges: Sequence[Range]) -> PartialPage | None:
    """Return the parts to read for these ranges; None to read all of a page."""
    if not ranges or hashed_nbytes(space.page_nbytes, ranges) > SHARE_MAX * space.page_nbytes:
        return None
    return PartialPage(space, ranges)


# of a request's time to find out which tier has which page; the rest is for reading
FIND_SHARE = 0.5
# How long a reader waits for all pages that others load, and how often it checks whether to go on.
LOAD_S_MAX = 10.0
LOOK_S = 0.2


SomeReady = Callable[[list[Page | None]], None]


@dataclass(slots=True)
class Acquired:
    """Requested keys, and the pages that the caller holds.

    `pages`: one or None per key. `loads`: those that the caller must read before any thread may use
    them. `private`: those of them that no other caller can find, because only parts are read, or
    because the key is being written here. `sources`: of keys that have no slot yet.
    """

    digest: bytes
    prefix_hashes: Sequence[bytes]
    prefix_only: bool
    parts: PartialPage | None = None
    near: Deadline | None = None
    index: NamespaceIndex = field(init=False)
    pages: list[Page | None] = field(init=False)
    loads: list[Load] = field(default_factory=list)
    private: dict[bytes, Page] = field(default_factory=dict)
    sources: dict[bytes, Source] = field(default_factory=dict)


class Promotion:
    """The promoting part of the RAM tier.

    `lower` returns the tiers below it, in order. Takes the RAM tier's `lock` where documented.
    `place` makes pages with slots, as far as possible; `eviction` gives pages temporary slots.
    `finish_load` makes a page visible if it has arrived, and removes it if not. `offer` offers
    pages to the lower tiers.
    """

    def __init__(
        self,
        lock: threading.Lock,
        lower: Callable[[], Sequence[LowerTier]],
        place: Callable[[NamespaceIndex, Sequence[bytes], int, bool], list[Page]],
        eviction: Eviction,
        finish_load: Callable[[Page, bool], None],
        offer: Callable[[list[Page]], object],
        clock_ms: Callable[[], int],
    ) -> None:
        self._lock = lock
        self._over = threading.Condition(lock)
        self._lower = lower
        self._place = place
        self._eviction = eviction
        self._clock_ms = clock_ms
        self._finish_load = finish_load
        self._offer = offer
        self._tiers: dict[Page, LowerTier] = {}  # of each page in state LOADING, its source

    # ---- without the lock ----------------------------------------------------------------

    def find(
        self,
        namespace: Namespace,
        prefix_hashes: Collection[bytes],
        near: Deadline | None,
        after: LowerTier | None = None,
    ) -> dict[bytes, Source]:
        """Return a source for each key that a lower tier has; only tiers behind `after` are asked.

        `near`: the deadline of a request that wants pages of other members, too.
        """
        deadline = Deadline(FIND_SHARE * (_left_s(near) if near else LOAD_S_MAX))
        tiers = self._lower()
        found: dict[bytes, Source] = {}
        try:
            for tier in tiers[tiers.index(after) + 1 :] if after else tiers:
                left = [prefix_hash for prefix_hash in prefix_hashes if prefix_hash not in found]
                if left and tier.is_asked(near is not None):
                    found |= tier.find(Query(namespace, left, deadline))
        except BaseException:
            release(found.values())
            raise
        return found

    def lookup(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], touch: bool, deadline: Deadline
    ) -> set[bytes]:
        """Return which of these keys other tiers have; the RAM and the local tier lack them."""
        left = dict.fromkeys(prefix_hashes)
        for tier in self._lower()[1:]:
            if left and tier.is_asked(near=True):
                found = tier.find(Query(namespace, list(left), deadline, touch, is_lookup=True))
                tier.release(found.values())
                for prefix_hash in found:
                    del left[prefix_hash]
        return set(prefix_hashes) - left.keys()

    def read(
        self,
        acquired: Acquired,
        has_left: Callable[[], bool],
        some_ready: SomeReady | None = None,
    ) -> list[Page | None]:
        """Read the pages that this caller must read, and wait for those that others read.

        Return the pages whose bytes may be used. `some_ready` is called, by any thread, with
        `acquired.pages` whenever one more of them has a checksum: its bytes may be used already.
        """
        unread = {load.page: load for load in acquired.loads}
        missing = set(unread)

        def unwanted() -> bool:
            """Return whether the caller has left, and nobody else waits for a page."""
            if not has_left():
                return False
            own = Counter(acquired.pages)  # more than one hold if a key was asked for twice
            return not any(
                page.holds > own[page] and page.state is State.LOADING
                for page in (load.page for load in acquired.loads)
            )

        def arrived(page: Page) -> None:
            missing.discard(page)
            self.end(page, intact=True)
            if some_ready:
                some_ready(acquired.pages)

        near = acquired.near
        deadline = near or Deadline(LOAD_S_MAX)
        try:
            for tier in self._lower():
                loads = [load for load in unread.values() if load.source.tier is tier]
                for load in loads:
                    del unread[load.page]
                if loads:
                    tier.read(loads, arrived, unwanted, deadline)
                if (
                    near
                    and (failed := [load.page for load in loads if load.page in missing])
                    and not unwanted()
                ):
                    unread |= self._next_sources(failed, near, tier)
        finally:  # if one read raised, the others must not stay pending
            release(load.source for load in unread.values())
            for page in missing.copy():
                self.end(page, intact=False)
        end = time.monotonic() + min(LOAD_S_MAX, _left_s(near) if near else LOAD_S_MAX)
        return [
            page if page is not None and self._ready(page, end, has_left) else None
            for page in acquired.pages
        ]

    def _next_sources(
        self, pages: Sequence[Page], near: Deadline, after: LowerTier
    ) -> dict[Page, Load]:
        """Return other sources of pages that one tier had, but could not read."""
        whole = {
            page.prefix_hash: page for page in pages if not isinstance(page.namespace, PartialPage)
        }
        if not whole:
            return {}
        found = self.find(pages[0].namespace.value, whole, near, after)
        loads = {
            whole[prefix_hash]: Load(whole[prefix_hash], source)
            for prefix_hash, source in found.items()
        }
        with self._lock:
            self._tiers |= {
                page: load.source.tier for page, load in loads.items() if page in self._tiers
            }
        return loads

    def _ready(self, page: Page, end: float, has_left: Callable[[], bool]) -> bool:
        """Wait for a page until `end`, unless the caller left or the tier stalls.

        Only a page that is being loaded, or whose load failed, has no checksum.
        """
        wait_s = 0.0
        while not page.checksum and not self._wait(page, wait_s):
            wait_s = min(LOOK_S, end - time.monotonic())
            tier = self._tiers.get(page)
            if (
                page.state is not State.LOADING
                or wait_s <= 0
                or has_left()
                or (tier is not None and tier.stalled)
            ):
                return bool(page.checksum) and page.state is not State.LOADING
        return True

    def _wait(self, page: Page, timeout_s: float) -> bool:
        with self._lock:
            self._over.wait_for(lambda: page.state is not State.LOADING, timeout_s)
            return bool(page.checksum) and page.state is not State.LOADING

    def cancel(self, acquired: Acquired) -> None:
        """Read nothing: callers that wait for these pages get a miss."""
        release(load.source for load in acquired.loads)
        for load in acquired.loads:
            self.end(load.page, intact=False)

    def end(self, page: Page, intact: bool) -> None:
        """Make a page that was read visible, or a miss for all waiting callers."""
        with self._lock:
            if page.state is State.LOADING:
                self._finish_load(page, intact)
                if intact and not page.is_copy and not isinstance(self._tiers[page], LocalTier):
                    self._offer([page])
            self._tiers.pop(page, None)
            if not intact:
                page.checksum = b""
            self._over.notify_all()

    # ---- with the lock held --------------------------------------------------------------

    def begin(
        self, acquired: Acquired, space: PageNamespace, prefix_hash: bytes, is_private: bool
    ) -> Page | None:
        """Give a found page a slot and queue it for the caller's read; None without a slot.

        A private page belongs to this caller only: its slot has that one reader.
        """
        source, now_ms = acquired.sources[prefix_hash], self._clock_ms()
        if is_private:
            page = Page(space, prefix_hash, now_ms)
            page.state = State.DOOMED
            if not self._eviction.allocate([page], temporary=True):
                return None
        else:
            placed = self._place(acquired.index, [prefix_hash], now_ms, source.is_copy)
            if not placed:
                return None
            page = placed[0]
            page.state = State.LOADING
            page.is_fetched = True
        try:
            if is_private:
                acquired.private[prefix_hash] = page
            else:
                self._tiers[page] = source.tier
            acquired.loads.append(Load(page, source))
        except BaseException:  # otherwise all who want it would wait for a read that nobody makes
            (self._eviction.release if is_private else self.forget)(page)
            raise
        del acquired.sources[prefix_hash]
        return page

    def forget(self, page: Page) -> None:
        """Drop a page that was removed meanwhile: only callers that wait already get its bytes."""
        self._tiers.pop(page, None)
        self._finish_load(page, False)
        self._over.notify_all()

    def is_asked(self, near: Deadline | None) -> bool:
        """Return whether any lower tier may have what RAM lacks."""
        return any(tier.is_asked(near is not None) for tier in self._lower())

    def give_up(self, loads: Sequence[Load]) -> None:
        """Forget pages that will not be read."""
        release(load.source for load in loads)
        for load in loads:
            if load.page.state is State.LOADING:
                self.forget(load.page)

    def tiers_of(self, acquired: Acquired) -> set[str]:
        """Return the names of the tiers that the caller waits for.

        Needs no lock.
        """
        tiers = {load.source.tier for load in acquired.loads}
        tiers.update(
            tier for page in acquired.pages if page is not None and (tier := self._tiers.get(page))
        )
        return {tier.name for tier in tiers}


def release(sources: Iterable[Source]) -> None:
    """Give sources back to their tiers."""
    by_tier: dict[LowerTier, list[Source]] = {}
    for source in sources:
        by_tier.setdefault(source.tier, []).append(source)
    for tier, some in by_tier.items():
        tier.release(some)


def _left_s(deadline: Deadline) -> float:
    return 0.0 if deadline.passed else deadline.remaining()
