"""Pages on their way into RAM, from the tier below or from another node: one thread reads, any number wait for it. Of a
page of which only parts are wanted these are read from below for that one caller, into a slot that is free when it
releases them."""

import bisect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.checksum import cuts, hashed_nbytes, parts_of
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.memory.eviction import Eviction
from node.memory.lock_slices import Work
from node.memory.lower_tier import LowerTier
from node.memory.page import Acquired, Counters, NamespaceIndex, Page, Space, State

# Parts of a page that is in the tier below, in a slot that has room for no more.
#
#     page    | 0 | 1 | 2 | 3 | 4 |       ranges lie in 1, 3 and 4
#     slot    | 1 | 3 | 4 |               of one read, which nobody else can find; free when that ends
#
# What a checksum's leaf covers is the least that can be verified (`kvstore.checksum`), and what
# is read from there begins and ends at multiples of SLOT_ALIGN_NBYTES.

# Of a page, beyond which all of it is read: that costs little more, and then it is in RAM.
SHARE_MAX = 0.75

Range = tuple[int, int]


class PartialPage:
    """A `Space` for pages of which only those parts are wanted in which `ranges` (offset, nbytes) lie."""

    def __init__(self, space: Space, ranges: Sequence[Range]) -> None:
        self.value = space.value
        self.digest = space.digest
        self.account = space.account
        self.page_nbytes = space.page_nbytes
        self.counters: Counters = space.counters
        self.pages: dict[bytes, Page] = {}
        self.seed = space.seed
        self.numbers = sorted(parts_of(self.page_nbytes, ranges))
        self.runs: list[tuple[int, int]] = []  # of the page, (start, end): one after the other in the slot
        for number in self.numbers:
            start, end = cuts(self.page_nbytes)[number]
            self._add(start // SLOT_ALIGN_NBYTES * SLOT_ALIGN_NBYTES, -(-end // SLOT_ALIGN_NBYTES) * SLOT_ALIGN_NBYTES)
        ends = [*itertools.accumulate(end - start for start, end in self.runs)]
        self._starts = [start for start, _ in self.runs]
        self._places = [0, *ends[:-1]]  # of the runs in the slot
        self.slot_nbytes = ends[-1]

    def _add(self, start: int, end: int) -> None:
        if self.runs and start <= self.runs[-1][1]:
            start = self.runs.pop()[0]
        self.runs.append((start, end))

    def place(self, offset: int) -> int:
        """Where a byte of these parts is in the slot."""
        run = bisect.bisect_right(self._starts, offset) - 1
        assert offset < self.runs[run][1], f"byte {offset} of the page is not in these parts"
        return self._places[run] + offset - self._starts[run]

    def drop(self, page: Page) -> None:
        """Nobody can find it."""


def parts_wanted(space: Space, ranges: Sequence[Range]) -> PartialPage | None:
    """None if all of a page is to be read for these ranges."""
    if not ranges or hashed_nbytes(space.page_nbytes, ranges) > SHARE_MAX * space.page_nbytes:
        return None
    return PartialPage(space, ranges)


class Promotion:
    """Part of the RAM tier, under its `lock`. `begin` and `forget` are called with it held.

    `place` makes pages with slots, as far as there are any, and `lend` gives them slots; `settle` takes a page that
    came to be visible, or that is not coming, out of those being written; `offer` shows pages to the tier below.
    """

    def __init__(
        self,
        lock: threading.Lock,
        place: Callable[[NamespaceIndex, Sequence[bytes], int, bool], list[Page]],
        lend: Callable[[Sequence[Page]], int],
        settle: Callable[[Page, bool], None],
        offer: Callable[[list[Page], bool], int],
        clock_ms: Callable[[], int],
    ) -> None:
        self._lock = lock
        self._over = threading.Condition(lock)
        self._place = place
        self._lend = lend
        self._settle = settle
        self._offer = offer
        self._clock_ms = clock_ms
        self._fetched: set[Page] = set()  # on their way from another node

    def begin(
        self, below: LowerTier, space: NamespaceIndex | PartialPage, prefix_hash: bytes, acquired: Acquired
    ) -> tuple[Page | None, bool]:
        """A slot for a page of the tier below, or for its parts, added to what is `acquired`; the caller holds and
        reads it and calls `end`. (None, True) if RAM has no room for it, (None, False) if it is not there."""
        record = below.begin_read(space.digest, prefix_hash)
        if not record:
            return None, False
        page = self._begun(space, prefix_hash, acquired)
        if page is None:
            below.end_read(record)
            return None, True
        acquired.loads.append((page, record))
        return page, False

    def begin_fetch(
        self, index: NamespaceIndex, prefix_hash: bytes, is_copy: bool, acquired: Acquired, aside: bool
    ) -> tuple[Page | None, bool]:
        """The same for a page that another node has: the caller has it filled and calls `end`. `aside`: for this caller
        alone, because it is being written here, which may take long."""
        page = self._lent(index, prefix_hash) if aside else self._placed(index, prefix_hash, is_copy)
        if page is None:
            return None, True
        if not aside:
            page.state = State.LOADING
            self._fetched.add(page)
        acquired.fetched.append(page)
        return page, False

    def _begun(self, space: NamespaceIndex | PartialPage, prefix_hash: bytes, acquired: Acquired) -> Page | None:
        if isinstance(space, PartialPage):
            part = self._lent(space, prefix_hash)
            if part is not None:
                acquired.in_part[prefix_hash] = part
            return part
        page = self._placed(space, prefix_hash, False)
        if page is not None:
            page.state = State.LOADING
        return page

    def _placed(self, index: NamespaceIndex, prefix_hash: bytes, is_copy: bool) -> Page | None:
        return next(iter(self._place(index, [prefix_hash], self._clock_ms(), is_copy)), None)

    def _lent(self, space: NamespaceIndex | PartialPage, prefix_hash: bytes) -> Page | None:
        page = Page(space, prefix_hash, self._clock_ms())
        page.state = State.DOOMED  # its slot waits for its readers, and for nobody else
        return page if self._lend([page]) else None

    def forget(self, page: Page) -> None:
        """The page was removed meanwhile: its bytes go only to those who wait for it already."""
        self._fetched.discard(page)
        self._settle(page, False)
        self._over.notify_all()

    def give_up(self, below: LowerTier, acquired: Acquired) -> None:
        """Nobody is going to read them; whoever waits for them has a miss. Called with the lock held."""
        for page in [*acquired.fetched, *(page for page, _ in acquired.loads)]:
            if page.state is State.LOADING:
                self.forget(page)
        for _, record in acquired.loads:
            below.end_read(record)

    def end(self, page: Page, intact: bool) -> None:
        """A load is over: the page is visible, or a miss for all who wait for it."""
        with self._lock:
            if page.state is State.LOADING:
                self._settle(page, intact)
                if intact and page in self._fetched and not page.is_copy:
                    self._offer([page], False)
            self._fetched.discard(page)
            if not intact:
                page.checksum = b""
            self._over.notify_all()

    def is_fetched(self, page: Page) -> bool:
        """Whether it is on its way from another node."""
        return page in self._fetched

    def wait(self, page: Page, timeout_s: float) -> bool:
        """Until another thread's load of a held page is over; whether its bytes may be used."""
        with self._lock:
            self._over.wait_for(lambda: page.state is not State.LOADING, timeout_s)
            return bool(page.checksum) and page.state is not State.LOADING


# Pages for a reader: held where they are, or with a slot that he has to fill first.

NOWHERE: Mapping[bytes, bool] = {}


class Pages(Protocol):
    """What is needed of the RAM tier (`node.memory.tier.RamTier`)."""

    loads: Promotion
    below: LowerTier
    eviction: Eviction
    clock_ms: Callable[[], int]

    def live(self, index: NamespaceIndex, prefix_hash: bytes) -> Page | None: ...

    def live_all(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[Page | None]: ...

    def hold_all(self, pages: Sequence[Page]) -> None: ...

    def let_go(self, pages: Sequence[Page]) -> None: ...


def hold_all(
    tier: Pages,
    index: NamespaceIndex,
    prefix_hashes: Sequence[bytes],
    prefix_only: bool,
    parts: PartialPage | None = None,
    elsewhere: Mapping[bytes, bool] = NOWHERE,
) -> Work[Acquired]:
    """See `RamTier.acquire`."""
    visible = [page for page in tier.live_all(index, prefix_hashes) if page is not None]
    if len(visible) == len(prefix_hashes):
        tier.hold_all(visible)
        return Acquired([*visible], [], {}, [])
    acquired = Acquired([None] * len(prefix_hashes), [], {}, [])
    index.busy += 1
    try:
        for position, prefix_hash in enumerate(prefix_hashes):
            page = acquired.in_part.get(prefix_hash) or tier.live(index, prefix_hash)
            while page is None:
                page = index.pages.get(prefix_hash)
                is_written = page is not None and page.state is State.WRITING
                if page is not None and not (is_written and prefix_hash in elsewhere):
                    page = None if is_written else page
                    break
                space, is_copy = parts or index, False
                page, is_full = tier.loads.begin(tier.below, space, prefix_hash, acquired)
                if page is None and not is_full and prefix_hash in elsewhere:
                    space, is_copy = index, elsewhere[prefix_hash] and not is_written
                    page, is_full = tier.loads.begin_fetch(index, prefix_hash, is_copy, acquired, aside=is_written)
                if not is_full:
                    break
                if not (yield from tier.eviction.make_room(space, tier.clock_ms(), is_copy)):
                    break
            if page is not None:
                tier.hold_all([page])
                acquired.pages[position] = page
            elif prefix_only:
                break
    except BaseException:  # a caller who is never told of them can not release them
        tier.loads.give_up(tier.below, acquired)
        tier.let_go([page for page in acquired.pages if page is not None])
        raise
    finally:
        index.busy -= 1
    return acquired
