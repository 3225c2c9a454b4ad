"""Remove the pages of a namespace from all tiers of the node, and zero their slots in RAM."""

import time
from collections.abc import Container

from node.memory.page import NamespaceIndex, Page, State
from node.memory.scan import SlotScan
from node.memory.tier import RamTier


def remove_namespace(tier: RamTier, digest: bytes, zero: bool = False) -> int:
    """Remove all pages of a namespace, in RAM and below; return how many there were.

    Pages that are put meanwhile may stay. `zero` zeroes slots in RAM when they become free.
    """
    index = tier.namespace(digest)
    removed = _remove_all(tier, index, zero) + tier.below.remove_namespace(digest)
    # Again, for pages loaded from below meanwhile; they are counted already.
    _remove_all(tier, index, zero)
    return removed


def _remove_all(tier: RamTier, index: NamespaceIndex, zero: bool) -> int:
    counts: list[int] = []
    # Held: otherwise their slots would be free at once, and zeroed under the lock.
    held: list[Page] = []

    def remove(pages: list[Page]) -> None:
        if zero:
            visible = [page for page in pages if page.state is State.VISIBLE]
            tier.eviction.to_zero.update(pages)
            tier.hold_all(visible)
            held.extend(visible)
        counts.append(sum(tier.remove_locked(index, [page.prefix_hash for page in pages])))

    tier.scan(index, remove, lambda: _zero_removed(tier, held))
    return sum(counts)


def _zero_removed(tier: RamTier, pages: list[Page]) -> None:
    """Zero and release removed pages that the caller holds, and empty the list.

    A removed page can not be found, so one that only the caller holds stays so, and its slot is
    zeroed without the lock. The slot of another one is zeroed when its last reader releases it.
    """
    if not pages:
        return
    alone = [page for page in pages if page.holds == 1 and page.state is State.DOOMED]
    for page in alone:
        tier.eviction.zero_slot(page)
    with tier.lock:
        tier.eviction.to_zero.difference_update(alone)
        tier.release_locked(pages)
    pages.clear()


def zero_leftovers(tier: RamTier, digests: Container[bytes]) -> None:
    """Zero slots of removed pages of these namespaces when their readers release them."""
    scan = SlotScan(tier.slots, None)
    while not scan.is_over():
        with tier.lock:
            gone = [page for page in scan.next() if page.state is State.DOOMED]
            tier.eviction.to_zero.update(p for p in gone if p.namespace.digest in digests)
        time.sleep(0)  # otherwise this thread would have the lock again


def to_zero_count(tier: RamTier, digests: Container[bytes]) -> int:
    """Return how many removed pages of these namespaces are in use, so not zeroed yet."""
    with tier.lock:
        return sum(page.namespace.digest in digests for page in tier.eviction.to_zero)
