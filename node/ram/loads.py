"""Pages on their way from the tier below into RAM: one thread reads, any number wait for it."""

import threading
from collections.abc import Callable

from node.ram.below import Below
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State


class Loads:
    """Part of the RAM tier, under its `lock`. `begin` and `forget` are called with it held.

    `place` gives a page a slot, if there is one; `settle` takes a page that came to be visible, or that
    is not coming, out of those being written.
    """

    def __init__(
        self,
        lock: threading.Lock,
        place: Callable[[NamespaceIndex, bytes], Page | None],
        settle: Callable[[Page, bool], None],
    ) -> None:
        self._lock = lock
        self._over = threading.Condition(lock)
        self._place = place
        self._settle = settle

    def begin(
        self, below: Below, index: NamespaceIndex, prefix_hash: bytes, loads: list[tuple[Page, int]]
    ) -> tuple[Page | None, bool]:
        """A slot for a page of the tier below, added to `loads`; the caller reads it and calls `end`.
        (None, True) if RAM has no room for it, (None, False) if it is not there."""
        record = below.begin_read(index.digest, prefix_hash)
        if not record:
            return None, False
        page = self._place(index, prefix_hash)
        if page is None:
            below.end_read(record)
            return None, True
        page.state = State.LOADING
        loads.append((page, record))
        return page, False

    def forget(self, page: Page) -> None:
        """The page was removed meanwhile: its bytes go only to those who wait for it already."""
        self._settle(page, False)
        self._over.notify_all()

    def give_up(self, below: Below, loads: list[tuple[Page, int]]) -> None:
        """Nobody is going to read them; whoever waits for them has a miss. Called with the lock held."""
        for page, record in loads:
            if page.state is State.LOADING:
                self.forget(page)
            below.end_read(record)

    def end(self, page: Page, intact: bool) -> None:
        """A load is over: the page is visible, or a miss for all who wait for it."""
        with self._lock:
            if page.state is State.LOADING:
                self._settle(page, intact)
            if not intact:
                page.checksum = b""
            self._over.notify_all()

    def wait(self, page: Page, timeout_s: float) -> bool:
        """Until another thread's load of a held page is over; whether its bytes may be used."""
        with self._lock:
            self._over.wait_for(lambda: page.state is not State.LOADING, timeout_s)
            return bool(page.checksum) and page.state is not State.LOADING
