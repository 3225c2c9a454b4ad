"""Eviction: exact LRU within a page size, and whole extents between page sizes."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from sandbox import Sandbox

from kvstore.errors import Exhausted
from node.memory.lock_slices import run_in_slices
from node.memory.page import PutStatus, State
from node.memory.tier import KEYS_A_SLICE

PAGE = 4096
EXTENT = 16 * PAGE


class ReferenceLru:
    """A simple model of LRU in which a batch is touched from its tail to its head."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    def touch(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            if key in self.order:
                self.order.move_to_end(key)

    def put(self, chain: Sequence[bytes]) -> None:
        self.touch(chain)
        room = self.capacity - len(self.order)
        new = [key for key in chain if key not in self.order]
        evictable = [key for key in self.order if key not in chain]
        for key in evictable[: max(0, len(new) - room)]:
            del self.order[key]
        for key in new[: self.capacity - len(self.order)]:
            self.order[key] = None
        self.touch(chain)


def test_eviction_within_a_page_size_is_exact_lru(seed: int) -> None:
    rng = random.Random(seed)
    box = Sandbox(8 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    reference = ReferenceLru(128)
    universe = pages.keys(*range(400))
    for _ in range(600):
        box.now_ms += rng.randint(0, 3)
        start = rng.randrange(380)
        chain = universe[start : start + rng.randint(1, 20)]
        action = rng.random()
        if action < 0.5:
            box.put(pages, chain)
            reference.put(chain)
        elif action < 0.8:
            hits = box.get(pages, chain)
            assert hits == [key in reference.order for key in chain]
            reference.touch(chain)
        else:
            touch = action < 0.9
            present = box.tier.lookup(pages.namespace.digest, chain, touch)
            assert present == [key in reference.order for key in chain]
            if touch:
                reference.touch(chain)
        assert box.present(pages, universe) == set(reference.order)
    assert len(reference.order) == 128
    assert box.tier.check() == []


@pytest.mark.parametrize(
    "stored", [range(64, 128), range(70, 80), range(128)], ids=["a turn", "some", "all"]
)
def test_batch_in_several_slices_has_one_verdict_per_key(stored: range) -> None:
    box = Sandbox(16 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    keys = pages.keys(*range(192))
    box.put(pages, [keys[number] for number in stored])
    counters = box.tier.namespace(pages.namespace.digest).counters
    result = box.reserve(pages, keys)
    assert result.verdicts == [
        PutStatus.EXISTS if number in stored else PutStatus.WRITE for number in range(192)
    ]
    assert [page.prefix_hash for page in result.pages] == [
        key for n, key in enumerate(keys) if n not in stored
    ]
    assert counters.pages_put_exists == len(stored)
    box.tier.abort(result)
    assert box.tier.check() == []


@pytest.mark.parametrize("copies", [False, True], ids=["own", "copies"])
def test_counters_include_only_pages_with_a_slot(copies: bool) -> None:
    box = Sandbox(EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    keys, held, eviction = pages.keys(*range(20)), pages.keys(100, 101), box.tier.eviction
    box.put(pages, held)
    box.acquire(pages, held)
    before = eviction.placed_nbytes
    result = box.tier.reserve(pages.namespace.digest, keys, PAGE, keys if copies else ())
    assert [page.is_copy for page in result.pages] == [copies] * 14
    assert eviction.placed_nbytes - before == 14 * PAGE
    assert (eviction.copy_count, eviction.copy_nbytes) == ((14, 14 * PAGE) if copies else (0, 0))
    box.tier.abort(result)
    assert eviction.copy_count == 0
    assert box.present(pages, held) == set(held)


def test_eviction_frees_only_needed_pages() -> None:
    box = Sandbox(EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    box.put(pages, pages.keys(*range(16)))
    box.put(pages, pages.keys(16))
    assert len(box.present(pages, pages.keys(*range(17)))) == 16


def test_put_does_not_evict_its_own_chain() -> None:
    box = Sandbox(EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    box.put(pages, pages.keys(*range(16)))
    chain = pages.keys(*range(20))
    verdicts = box.put(pages, chain)
    assert verdicts == [PutStatus.EXISTS] * 16 + [PutStatus.FULL] * 4
    assert box.present(pages, chain) == set(chain[:16])


def test_reserved_slots_keep_key_order_after_self_eviction() -> None:
    """Regression: pages were stored under their neighbour's key, and no checksum noticed.

    A page of the batch that another writer had just stored was evicted for the pages behind it, and
    its new slot came last. The writer goes by the order of the verdicts.
    """
    box = Sandbox(128 * 4096, 128 * 4096)
    pages = box.open("order", 4096)
    keys = pages.keys(*range(KEYS_A_SLICE + 60))
    other = box.reserve(pages, [*pages.keys(*range(1000, 1030)), keys[KEYS_A_SLICE]])
    work = box.tier._reserve(pages.namespace.digest, keys, pages.nbytes)
    with box.tier.lock:
        assert next(work) is None
    box.commit(other)
    result = run_in_slices(box.tier.lock, box.tier.eviction.budget, work, box.tier._move)
    assert result.verdicts == [PutStatus.WRITE] * len(keys)
    assert [page.prefix_hash for page in result.pages] == keys
    box.commit(result)
    assert box.tier.check() == []


def test_pages_behind_a_page_without_room_are_not_stored() -> None:
    """Pages behind a hole in the chain are useless, and would take space from others."""
    box = Sandbox(EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    verdicts = box.put(pages, pages.keys(*range(20)))
    assert verdicts == [PutStatus.WRITE] * 16 + [PutStatus.FULL] * 4


@pytest.mark.parametrize(
    ("holder", "cause"),
    [("pin", "16 pinned, 16 being read"), ("hold", "32 being read"), ("write", "32 being written")],
)
def test_reserve_without_evictable_pages_names_the_cause(holder: str, cause: str) -> None:
    box = Sandbox(2 * EXTENT, EXTENT)
    pages, keys = (space := box.open("model", PAGE)), space.keys(*range(32))
    reservation = box.reserve(pages, keys)
    if holder != "write":
        box.commit(reservation)
    if holder == "pin":
        box.pin(pages, keys[:16])
        box.acquire(pages, keys[16:])
    elif holder == "hold":
        box.acquire(pages, keys)
    with pytest.raises(Exhausted, match=cause):
        box.reserve(pages, pages.keys(99))
    assert box.tier.check() == []


def test_space_moves_to_the_page_size_in_use() -> None:
    box = Sandbox(8 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 4 * PAGE)
    for space, per_extent in ((small, 16), (large, 4), (small, 16)):
        keys = space.keys(*range(8 * per_extent))
        for start in range(0, len(keys), 4):
            box.now_ms += 10
            box.put(space, keys[start : start + 4])
        assert box.present(space, keys) == set(keys), "the first page size kept its memory"
        assert box.tier.check() == []


def test_page_size_in_use_keeps_its_space() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 4 * PAGE)
    hot = small.keys(*range(16))
    box.put(small, hot)
    for number in range(100):
        box.now_ms += 10
        box.put(large, large.keys(number))
        assert all(box.get(small, hot))


def pin_one_page_of_each_extent(box: Any, space: Any, keys: Sequence[bytes]) -> list[bytes]:
    found = box.acquire(space, keys)
    by_extent = {page.offset // EXTENT: page.prefix_hash for page in found}
    box.tier.release(found)
    chosen = list(by_extent.values())
    assert all(box.pin(space, chosen))
    return chosen


@pytest.mark.parametrize("others", ["stay", "removed"])
def test_pinned_pages_in_all_extents_are_moved_together(others: str) -> None:
    """Pinned pages and their bytes move into one extent, so that the others become free."""
    box = Sandbox(8 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 4 * PAGE)
    keys = small.keys(*range(8 * 16))
    box.put(small, keys)
    pinned = pin_one_page_of_each_extent(box, small, keys)
    assert len(pinned) == 8
    if others == "removed":
        box.remove(small, [key for key in keys if key not in pinned])
    wanted = large.keys(*range(7 * 4))  # all extents but one for the eight pinned pages
    for key in wanted:
        box.now_ms += 10
        box.put(large, [key])
    assert box.present(large, wanted) == set(wanted)
    assert box.get(small, pinned) == [True] * 8
    assert all(box.get(large, wanted))
    assert box.tier.check() == []


def test_extent_being_read_or_written_is_not_cleared() -> None:
    box = Sandbox(3 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 16 * PAGE)
    box.put(small, small.keys(*range(32)))
    held = box.read(small, small.keys(0))  # in the first extent
    writing = box.reserve(small, small.keys(100))  # alone in the third
    offsets = [held[0].offset, writing.pages[0].offset]
    box.now_ms += 10
    for number in range(3):
        box.put(large, large.keys(number))
    assert len(box.present(large, large.keys(*range(3)))) == 1, "only one extent could be cleared"
    assert [held[0].offset, writing.pages[0].offset] == offsets
    assert box.intact(small, held[0])
    box.tier.release(held)
    box.write(small, writing)
    box.commit(writing)
    assert box.get(small, small.keys(100)) == [True]


def test_only_clearable_extent_is_found() -> None:
    box = Sandbox(64 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 16 * PAGE)
    keys = small.keys(*range(64 * 16))
    for start in range(0, len(keys), 16):
        box.now_ms += 1
        box.put(small, keys[start : start + 16])
    # Hold one page of each extent but the last, whose pages are the newest
    box.acquire(small, keys[0 : 63 * 16 : 16])
    box.now_ms += 1
    assert box.put(large, large.keys(0)) == [PutStatus.WRITE]
    assert box.present(small, keys) == set(keys[: 63 * 16])


def test_full_extents_of_pinned_pages_cause_no_eviction() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    small, large = box.open("small", PAGE), box.open("large", 16 * PAGE)
    keys = small.keys(*range(64))
    box.put(small, keys)
    box.pin(small, keys[:32])
    # All pages but one of the third extent
    held = [page for page in box.acquire(small, keys[33:48]) if page]
    box.acquire(small, keys[48:])
    with pytest.raises(Exhausted):
        box.reserve(large, large.keys(0))
    assert len(held) == 15
    assert box.present(small, keys) == set(keys), "pages were evicted without need"


def test_pin_ends_after_its_time_to_live() -> None:
    box = Sandbox(2 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    box.put(pages, pages.keys(*range(32)))
    box.pin(pages, pages.keys(*range(16)), ttl_ms=1000)
    box.acquire(pages, pages.keys(*range(16, 32)))
    box.now_ms += 999
    with pytest.raises(Exhausted):
        box.reserve(pages, pages.keys(32))
    box.now_ms += 1
    assert box.put(pages, pages.keys(32)) == [PutStatus.WRITE]


def test_renewed_pin_uses_constant_memory() -> None:
    box = Sandbox(2 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    box.put(pages, pages.keys(0))
    for step in range(1000):
        box.now_ms += step % 2
        box.pin(pages, pages.keys(0))
    assert box.tier.eviction.pins.entry_count < 200


def test_removed_page_keeps_its_bytes_until_the_last_reader_ends() -> None:
    box = Sandbox(EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    keys = pages.keys(*range(16))
    box.put(pages, keys)
    first, second = box.read(pages, keys[:1]), box.read(pages, keys[:1])
    assert box.remove(pages, keys[:1]) == [True]
    assert box.present(pages, keys[:1]) == set()
    assert box.put(pages, pages.keys(50)) == [PutStatus.WRITE]  # evicts another page, not this slot
    box.tier.release(first)
    assert box.intact(pages, second[0])
    used_nbytes = box.slots.used_nbytes
    box.tier.release(second)
    assert box.slots.used_nbytes == used_nbytes - PAGE
    assert box.tier.check() == []


DAMAGES = {
    "writing counted": lambda tier, page: setattr(tier, "writing_count", 1),
    "held counted": lambda tier, page: setattr(tier, "held_count", 1),
    "visible counted": lambda tier, page: setattr(tier, "visible_count", 5),
    "page without a slot": lambda tier, page: tier.slots.free(page.offset),
    "page moved": lambda tier, page: setattr(page, "offset", page.offset + PAGE),
    "use not recorded": lambda tier, page: setattr(page, "used_ms", 77),
    "page out of the list": lambda tier, page: page.order.pool.withdraw(page),
    "pinned and in the list": lambda tier, page: tier.eviction.pins.add(page, 5),
    "list counts wrongly": lambda tier, page: setattr(
        page.namespace.account.pool._lists[PAGE]._own, "count", 9
    ),
    "forgotten, keeps its slot": lambda tier, page: page.namespace.pages.pop(page.prefix_hash),
    "state": lambda tier, page: setattr(page, "state", State.DOOMED),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_reports_damage(damage: str) -> None:
    box = Sandbox(2 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    box.put(pages, pages.keys(0, 1, 2))
    (page,) = box.read(pages, pages.keys(1))
    box.tier.release([page])
    assert box.tier.check() == []
    DAMAGES[damage](box.tier, page)
    assert box.tier.check()


def test_lru_order_is_exact_with_held_pages(seed: int) -> None:
    """A held page that eviction skips as the oldest returns to its place, not as the newest."""
    rng = random.Random(seed)
    box = Sandbox(4 * EXTENT, EXTENT)
    pages = box.open("model", PAGE)
    order = pages.keys(*range(64))  # oldest first
    for key in order:
        box.put(pages, [key])
    held: dict[bytes, Any] = {}
    for number in range(64, 500):
        box.now_ms += rng.randint(0, 1)
        key = rng.choice(order)
        action = rng.random()
        if action < 0.3 and key not in held and len(held) < 40:
            (held[key],) = box.hold(pages, [key])
        elif action < 0.55 and held:
            box.tier.release([held.pop(rng.choice(list(held)))])
        elif action < 0.7:
            box.tier.lookup(pages.namespace.digest, [key], True)
            order.remove(key)
            order.append(key)
        else:
            box.put(pages, pages.keys(number))
            order.remove(next(key for key in order if key not in held))
            order += pages.keys(number)
        assert box.present(pages, order) == set(order)
        assert box.tier.check() == []
