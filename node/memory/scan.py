"""Goes through all pages in RAM, some slots at a time: never longer under the lock, however many there are."""

import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvstore.keys import short
from node.memory.eviction import Eviction
from node.memory.page import NamespaceIndex, Page, Space, State
from node.slab import SlotAllocator

# Whether the RAM tier's books agree: what its counters say, its namespaces name and its slots hold.


class Counted(NamedTuple):
    """Pages, as the tier's counters have them."""

    writing: int
    visible: int
    held: int


def violations(namespaces: Sequence[NamespaceIndex], slots: SlotAllocator, counted: Counted) -> list[str]:
    """What disagrees; empty if all is well. The caller has the tier's lock."""
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
        f"page {short(page.prefix_hash)} is forgotten, unread, but keeps its slot" for page in doomed if not page.holds
    ]
    if len({id(page) for page in owned}) != len(owned):
        wrong.append("a page owns two slots")
    return wrong


SLOTS = 256  # looked at under one lock
UNITS = 4096  # places without such slots, passed over under one lock


class Pages(Protocol):
    """What is needed of the RAM tier (`node.memory.tier.RamTier`)."""

    lock: threading.Lock
    slots: SlotAllocator
    eviction: Eviction

    def remove_some(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[bool]: ...

    def hold_all(self, pages: Sequence[Page]) -> None: ...

    def zero_when_free(self, pages: Iterable[Page]) -> None: ...

    def zero_removed(self, pages: Sequence[Page]) -> None: ...


def remove_all(tier: Pages, index: NamespaceIndex, zero: bool = False) -> int:
    """Forgets the pages of a namespace; how many there were.

    `zero`: their slots are zeroed when they become free.
    """
    counts: list[int] = []
    held: list[Page] = []  # or their slots would be free, and zeroed under the lock

    def remove(pages: list[Page]) -> None:
        if zero:
            visible = [page for page in pages if page.state is State.VISIBLE]
            tier.zero_when_free(pages)
            tier.hold_all(visible)
            held.extend(visible)
        counts.append(sum(tier.remove_some(index, [page.prefix_hash for page in pages])))

    def release() -> None:
        tier.zero_removed(held)
        held.clear()
        time.sleep(0)  # else this thread would have the lock again

    walk(tier, index, remove, release if zero else None)
    return sum(counts)


def zero_leftovers(tier: Pages, digests: Container[bytes]) -> None:
    """Zeroes slots of pages that left before, as soon as their readers release them."""
    unit = slot = 0
    while unit < tier.slots.unit_count:
        with tier.lock:
            unit, slot, owners = _some(tier.slots, unit, slot, None)
            tier.zero_when_free(
                page
                for page in owners
                if page is not None and page.state is State.DOOMED and page.namespace.digest in digests
            )
        time.sleep(0)  # else this thread would have the lock again


def walk(
    tier: Pages,
    space: Space | None,
    visit: Callable[[list[Page]], None],
    between: Callable[[], None] | None = None,
) -> None:
    """Calls `visit`, under the lock, with the pages that can be found: of this namespace, or of all. Each page
    that is there from the first call to the last is visited, one that comes or goes meanwhile perhaps.
    `between` is called after each visit, without the lock."""
    rest = between or (lambda: time.sleep(0))  # else this thread would have the lock again
    slots, moved = tier.slots, []  # type: ignore[var-annotated]
    unit = slot = 0
    with tier.lock:
        is_small = space is not None and len(space.pages) <= SLOTS
        if space is not None and is_small:
            visit(list(space.pages.values()))
        else:
            tier.eviction.watchers.append(moved)
    if is_small:
        rest()
        return
    try:
        while unit < slots.unit_count:
            with tier.lock:
                unit, slot, owners = _some(slots, unit, slot, space)
                visit(_found(owners, space))
            rest()
    finally:
        with tier.lock:  # not by `remove`: that of another walk may be equal to it
            tier.eviction.watchers[:] = [others for others in tier.eviction.watchers if others is not moved]
    for start in range(0, len(moved), SLOTS):  # pages that may have moved to where we had been
        with tier.lock:
            visit(_found(moved[start : start + SLOTS], space))
        rest()


def _some(slots: SlotAllocator, unit: int, slot: int, space: Space | None) -> tuple[int, int, list[Page | None]]:
    """(unit and slot to go on from, owners of the slots from here to there)."""
    owners: list[Page | None] = []
    slots_left, units_left = SLOTS, UNITS
    while unit < slots.unit_count and slots_left > 0 and units_left > 0:
        block = slots.block_at(unit)
        units_left -= 1
        if block is not None and (space is None or block.kind.slot_nbytes == space.slot_nbytes):
            some = block.owners[slot : slot + slots_left]
            owners += some
            slots_left -= len(some)
            slot += len(some)
            if slot < len(block.owners):
                break
        unit, slot = unit + 1, 0
    return unit, slot, owners


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
