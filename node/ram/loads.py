"""Pages on their way into RAM, from the tier below or from another node: one thread reads, any number wait for it. Of a
page of which only parts are wanted these are read from below for that one caller, into a slot that is free when it
releases them."""

import threading
from collections.abc import Callable, Sequence

from node.ram.below import Below
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State
from node.ram.parts import Parts
from node.ram.reservation import Acquired


class Loads:
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
        self, below: Below, space: NamespaceIndex | Parts, prefix_hash: bytes, acquired: Acquired
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

    def _begun(self, space: NamespaceIndex | Parts, prefix_hash: bytes, acquired: Acquired) -> Page | None:
        if isinstance(space, Parts):
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

    def _lent(self, space: NamespaceIndex | Parts, prefix_hash: bytes) -> Page | None:
        page = Page(space, prefix_hash, self._clock_ms())
        page.state = State.DOOMED  # its slot waits for its readers, and for nobody else
        return page if self._lend([page]) else None

    def forget(self, page: Page) -> None:
        """The page was removed meanwhile: its bytes go only to those who wait for it already."""
        self._fetched.discard(page)
        self._settle(page, False)
        self._over.notify_all()

    def give_up(self, below: Below, acquired: Acquired) -> None:
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
