"""Pages on their way from the tier below into RAM: one thread reads, any number wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State

if TYPE_CHECKING:
    from node.ram.tier import RamTier


class Loads:
    """Part of the RAM tier, under its lock. `begin` and `forget` are called with the lock held."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._over = threading.Condition(tier.lock)

    def begin(self, index: NamespaceIndex, prefix_hash: bytes, loads: list[tuple[Page, int]]) -> Page | None:
        """A slot for a page of the tier below, added to `loads`; the caller reads it and calls `end`.
        None if it is not there or RAM has no room for it."""
        tier = self._tier
        record = tier.below.begin_read(index.digest, prefix_hash)
        if not record:
            return None
        page = tier.place(index, prefix_hash, tier.clock_ms())
        if page is None:
            tier.below.end_read(record)
            return None
        page.state = State.LOADING
        loads.append((page, record))
        return page

    def forget(self, page: Page) -> None:
        """The page was removed meanwhile: its bytes go only to those who wait for it already."""
        page.state = State.DOOMED
        del page.namespace.pages[page.prefix_hash]
        self._tier.writing_count -= 1
        self._over.notify_all()

    def end(self, page: Page, intact: bool) -> None:
        """A load is over: the page is visible, or a miss for all who wait for it."""
        tier = self._tier
        with tier.lock:
            if page.state is State.LOADING and intact:
                tier.writing_count -= 1
                page.state = State.VISIBLE
                tier.visible_count += 1
                tier.eviction.admit(page)
            elif page.state is State.LOADING:
                self.forget(page)
            if not intact:
                page.checksum = b""
            self._over.notify_all()

    def wait(self, page: Page, timeout_s: float) -> bool:
        """Until another thread's load of a held page is over; whether its bytes may be used."""
        with self._tier.lock:
            self._over.wait_for(lambda: page.state is not State.LOADING, timeout_s)
            return bool(page.checksum) and page.state is not State.LOADING
