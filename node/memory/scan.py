"""Visit all slots of the arena in slices, and check the RAM tier's invariants. No I/O."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.keys import short
from node.memory.page import NamespaceIndex, Page, PageNamespace, State
from node.slab import SlotAllocator

SLOTS = 256  # visited under one lock
UNITS = 4096  # areas without such slots, skipped under one lock


class SlotScan:
    """Visit slots: all of them, or those of the size of a namespace's pages.

    The tier's lock guards `next`.
    """

    def __init__(self, slots: SlotAllocator, space: PageNamespace | None) -> None:
        self._slots = slots
        self._space = space
        self._unit = self._slot = 0

    def is_over(self) -> bool:
        """Return whether everything was scanned."""
        return self._unit >= self._slots.unit_count

    def next(self) -> list[Page]:
        """Return the owners of the next slots, whatever their state."""
        owners: list[Page] = []
        slots_left, units_left = SLOTS, UNITS
        while not self.is_over() and slots_left > 0 and units_left > 0:
            block = self._slots.block_at(self._unit)
            units_left -= 1
            if block is not None and (
                self._space is None or block.kind.slot_nbytes == self._space.slot_nbytes
            ):
                some = block.owners[self._slot : self._slot + slots_left]
                owners += [page for page in some if page is not None]
                slots_left -= len(some)
                self._slot += len(some)
                if self._slot < len(block.owners):
                    break
            self._unit, self._slot = self._unit + 1, 0
        return owners


class PageScan:
    """Visit the pages that can be found by their keys: of a namespace, or of all.

    Each page that exists from the first `next` to the last is visited; if it moves behind the scan
    meanwhile, it is in a list of `watchers`. The tier's lock guards `next` and `close`.
    """

    def __init__(
        self, slots: SlotAllocator, watchers: list[list[Page]], index: NamespaceIndex | None
    ) -> None:
        self._slots = SlotScan(slots, index)
        self._watchers = watchers
        self._index = index
        self._begun = self._all_seen = False
        self._moved: list[Page] = []
        self._moved_seen = 0

    @property
    def is_over(self) -> bool:
        """Return whether everything was scanned."""
        return self._all_seen or (self._slots.is_over() and self._moved_seen >= len(self._moved))

    def next(self) -> list[Page]:
        """Return the next pages."""
        if not self._begun:
            self._begun = True
            if self._index is not None and len(self._index.pages) <= SLOTS:
                self._all_seen = True
                return list(self._index.pages.values())
            self._watchers.append(self._moved)
        if self._slots.is_over():
            some = self._moved[self._moved_seen : self._moved_seen + SLOTS]
            self._moved_seen += len(some)
            return self._findable(some)
        found = self._findable(self._slots.next())
        if self._slots.is_over():
            self.close()
        return found

    def run(
        self,
        lock: threading.Lock,
        visit: Callable[[list[Page]], None],
        then: Callable[[], None],
    ) -> None:
        """Call `visit` with the pages under the tier's lock, and `then` after each without it."""
        try:
            while not self.is_over:
                with lock:
                    visit(self.next())
                then()
                time.sleep(0)  # otherwise this thread would have the lock again
        finally:
            with lock:
                self.close()

    def close(self) -> None:
        """Receive no more moves.

        Not by `remove`: the list of another scan may be equal to this one's.
        """
        self._watchers[:] = [others for others in self._watchers if others is not self._moved]

    def _findable(self, owners: Sequence[Page]) -> list[Page]:
        """Return those that are not forgotten, not aborted, and not the target of a move."""
        return [
            page
            for page in owners
            if (self._index is None or page.namespace is self._index)
            and page.state is not State.DOOMED
            and page.offset >= 0
        ]


class Counted(NamedTuple):
    """Counters of pages in the tier."""

    writing: int
    visible: int
    held: int


def violations(
    namespaces: Sequence[NamespaceIndex], slots: SlotAllocator, counted: Counted
) -> list[str]:
    """Return where counters, namespaces and slots disagree; empty if all is well.

    The caller has the tier's lock.
    """
    pages = [page for index in namespaces for page in index.pages.values()]
    owned = [page for block in slots.blocks() for page in block.owners if page is not None]
    doomed = [page for page in owned if page.state is State.DOOMED]
    writing = sum(page.state in (State.WRITING, State.LOADING) for page in pages)
    found = Counted(writing, len(pages) - writing, sum(page.holds > 0 for page in owned))
    wrong = [
        f"{name}: {said} counted, {is_} found"
        for name, said, is_ in (
            *zip(Counted._fields, counted, found, strict=True),
            ("slots", len(owned), len(pages) + len(doomed)),
        )
        if said != is_
    ]
    wrong += [
        f"page {short(page.prefix_hash)} is forgotten, unread, but keeps its slot"
        for page in doomed
        if not page.holds
    ]
    if len({id(page) for page in owned}) != len(owned):
        wrong.append("a page owns two slots")
    return wrong
