"""Goes through all pages in RAM, some slots at a time: never longer under the lock, however many there are."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from node.ram.eviction import Eviction
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, Space, State
from node.slots import SlotAllocator

SLOTS = 256  # looked at under one lock
UNITS = 4096  # places without such slots, passed over under one lock


class Pages(Protocol):
    """What is needed of the RAM tier (`node.ram.tier.RamTier`)."""

    lock: threading.Lock
    slots: SlotAllocator
    eviction: Eviction

    def remove_some(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[bool]: ...


def remove_all(tier: Pages, index: NamespaceIndex) -> int:
    """Forgets the pages of a namespace; how many there were."""
    counts: list[int] = []

    def remove(pages: list[Page]) -> None:
        counts.append(sum(tier.remove_some(index, [page.prefix_hash for page in pages])))

    walk(tier, index, remove)
    return sum(counts)


def walk(tier: Pages, space: Space | None, visit: Callable[[list[Page]], None]) -> None:
    """Calls `visit`, under the lock, with the pages that can be found: of this namespace, or of all. Each page
    that is there from the first call to the last is visited, one that comes or goes meanwhile perhaps."""
    slots, moved = tier.slots, []  # type: ignore[var-annotated]
    unit = slot = 0
    with tier.lock:
        if space is not None and len(space.pages) <= SLOTS:
            visit(list(space.pages.values()))
            return
        tier.eviction.watchers.append(moved)
    try:
        while unit < slots.unit_count:
            with tier.lock:
                unit, slot, pages = _some(slots, unit, slot, space)
                visit(pages)
            time.sleep(0)  # else this thread would have the lock again
    finally:
        with tier.lock:  # not by `remove`: that of another walk may be equal to it
            tier.eviction.watchers[:] = [others for others in tier.eviction.watchers if others is not moved]
    for start in range(0, len(moved), SLOTS):  # pages that may have moved to where we had been
        with tier.lock:
            visit(_found(moved[start : start + SLOTS], space))


def _some(slots: SlotAllocator, unit: int, slot: int, space: Space | None) -> tuple[int, int, list[Page]]:
    """(unit and slot to go on from, pages from here to there)."""
    pages: list[Page] = []
    slots_left, units_left = SLOTS, UNITS
    while unit < slots.unit_count and slots_left > 0 and units_left > 0:
        block = slots.block_at(unit)
        units_left -= 1
        if block is not None and (space is None or block.kind.slot_nbytes == space.slot_nbytes):
            owners = block.owners[slot : slot + slots_left]
            pages += _found(owners, space)
            slots_left -= len(owners)
            slot += len(owners)
            if slot < len(block.owners):
                break
        unit, slot = unit + 1, 0
    return unit, slot, pages


def _found(owners: Sequence[Page | None], space: Space | None) -> list[Page]:
    """Those that can be found by their keys: not forgotten, not aborted, no place for a page that moves."""
    return [
        page
        for page in owners
        if page is not None
        and (space is None or page.namespace is space)
        and page.state is not State.DOOMED
        and page.offset >= 0
    ]
