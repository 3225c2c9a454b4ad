"""Time under the RAM tier's lock does not grow with pages, sizes, holds or pins.

It is counted in bytecodes, so that the result does not depend on the machine.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from counted_lock import CountedLock
from known_pages import Pages
from replayed import Caller
from sandbox import Sandbox

from kvstore.errors import Exhausted
from kvstore.pb import kvstore_pb2 as pb
from node.feed.feed import Feed
from node.memory.inventory import Inventory
from node.memory.removal import remove_namespace

PAGE = 4096
EXTENT = 1 << 18
FEW, MANY = 200, 3200
LONGEST = 400_000  # bytecodes under one lock: a few hundred steps of a few hundred each


def longest(box: Any, work: Callable[[], object]) -> int:
    """Return the number of bytecodes of the longest time that `work` held the lock."""
    lock = box.tier.lock = CountedLock()
    work()
    return lock.longest


def full(
    sandbox: type[Sandbox], count: int, spare: int = 0, extent: int = EXTENT
) -> tuple[Any, Any, list[bytes]]:
    """Return a tier full of pages, their namespace, and their keys, oldest first."""
    box = sandbox(-(-(count + spare) * PAGE // extent) * extent, extent)
    pages = box.open("full", PAGE)
    room = box.slots.region_nbytes // PAGE - spare
    keys = pages.keys(*range(room))
    for start in range(0, room, 100):
        box.now_ms += 1
        box.commit(box.reserve(pages, keys[start : start + 100]))
    return box, pages, keys


def reserve_some(box: Any, pages: Pages) -> Callable[[], object]:
    return lambda: [box.reserve(pages, pages.keys(number)) for number in range(10_000, 10_008)]


def make_held(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure eviction while the oldest pages are held."""
    box, pages, keys = full(sandbox, count, spare=100)
    box.hold(pages, keys)
    box.put(pages, pages.keys(*range(20_000, 20_100)))
    return lambda: longest(box, reserve_some(box, pages))


def make_copies_held(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure new near copies at their limit, with all but the newest copies held."""
    box, pages, _ = full(sandbox, 0, spare=2 * count)
    box.tier.eviction.copy_nbytes_max = count * PAGE
    keys = pages.keys(*range(10_000, 10_000 + count))
    for start in range(0, count, 100):
        box.now_ms += 1
        some = keys[start : start + 100]
        box.commit(box.tier.reserve(pages.namespace.digest, some, PAGE, some))
    box.hold(pages, keys[:-20])
    more = pages.keys(*range(20_000, 20_030))

    def reserve() -> None:
        for key in more:
            with contextlib.suppress(Exhausted):
                box.tier.reserve(pages.namespace.digest, [key], PAGE, [key])

    def work() -> int:
        found = longest(box, reserve)
        assert box.tier.eviction.copy_count == count
        return found

    return work


def make_pins_ending(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure the first request after many pins have expired."""
    box, pages, keys = full(sandbox, count, spare=count)
    for start in range(0, count, 50):
        box.pin(pages, keys[start : start + 50], 1000)
    box.now_ms += 1000
    return lambda: longest(box, lambda: box.stat(pages, keys[:1]))


def make_pins_renewed(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, pages, keys = full(sandbox, count, spare=count)
    for start in range(0, 3 * count, 50):
        box.pin(pages, keys[start % count : start % count + 50], 1000 + start)
    return lambda: longest(box, lambda: [box.pin(pages, [key], 9000) for key in keys[:200]])


def make_remove_namespace(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, pages, keys = full(sandbox, count)

    def work() -> None:
        assert remove_namespace(box.tier, pages.namespace.digest) == len(keys)

    return lambda: longest(box, work)


def make_list(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, pages, keys = full(sandbox, count)

    def work() -> None:
        found, rest = Inventory(box.tier).list_pages(pages.namespace.digest, b"", b"", 5)
        assert [info.prefix_hash for info in found] == keys[:5]
        assert rest == keys[4]

    return lambda: longest(box, work)


def make_unsaved(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, pages, keys = full(sandbox, count)

    def work() -> None:
        ((digest, hashes),) = Inventory(box.tier).unsaved()
        assert (digest, sorted(hashes)) == (pages.namespace.digest, keys)

    return lambda: longest(box, work)


def make_size_classes(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, _, _ = full(sandbox, count, extent=2 * PAGE)
    return lambda: longest(box, Inventory(box.tier).size_classes)


def make_batch(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure one put of as many pages as fit."""
    box = sandbox(-(-count * PAGE // EXTENT) * EXTENT, EXTENT)
    pages = box.open("empty", PAGE)
    return lambda: longest(box, lambda: box.reserve(pages, pages.keys(*range(count))))


def make_touched(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure a lookup that touches a chain of `count` pages."""
    box, pages, keys = full(sandbox, count)
    return lambda: longest(box, lambda: box.tier.lookup(pages.namespace.digest, keys, touch=True))


def make_stat(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    box, pages, keys = full(sandbox, count)
    return lambda: longest(box, lambda: Inventory(box.tier).stat(pages.namespace.digest, keys))


def make_batch_over_pins(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure a large put in a full tier where the pins of a third of the pages have just
    expired.
    """
    box, pages, keys = full(sandbox, count)
    for start in range(0, count // 3, 50):
        box.pin(pages, keys[start : start + 50], 1000)
    box.now_ms += 1000
    return lambda: longest(
        box, lambda: box.reserve(pages, pages.keys(*range(50_000, 50_000 + count // 2)))
    )


def make_other_size(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure the put of a page as large as an extent, which replaces many small ones."""
    box, _, _ = full(sandbox, 4 * count, extent=count * PAGE)
    large = box.open("large", count * PAGE)
    box.now_ms += 1
    return lambda: longest(box, lambda: box.reserve(large, large.keys(1)))


def make_quotas_come(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure new quotas, which move all pages to other pools."""
    box, pages, keys = full(sandbox, count)

    def work() -> None:
        box.limit(**{pages.namespace.tenant: len(keys) * PAGE})

    return lambda: longest(box, work)


def make_crowded(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure a large put with quotas above the RAM, and pages of many sizes."""
    box, pages, keys = full(sandbox, count, spare=count)
    for number in range(1, 60):
        other = box.open(str(number), PAGE * (1 + number % 40), tenant="other")
        box.commit(box.reserve(other, other.keys(0)))
    box.limit(**{pages.namespace.tenant: 2 * len(keys) * PAGE, "other": 4 * len(keys) * PAGE})
    third = box.open("third", 3 * PAGE, tenant="other")

    def work() -> None:
        with contextlib.suppress(Exhausted):
            box.reserve(third, third.keys(*range(count // 2)))

    return lambda: longest(box, work)


def make_feed(sandbox: type[Sandbox], count: int) -> Callable[[], int]:
    """Measure the feed's look at pages that are gone."""
    box, pages, keys = full(sandbox, count)
    feed = Feed(box.tier)

    def poll() -> None:
        feed.poll(pb.FeedRequest(), Caller(), lambda model: True)

    poll()
    box.tier.remove(pages.namespace.digest, keys)
    return lambda: longest(box, poll)


@pytest.mark.parametrize(
    "make",
    [
        make_held,
        make_copies_held,
        make_pins_ending,
        make_pins_renewed,
        make_remove_namespace,
        make_list,
        make_unsaved,
        make_size_classes,
        make_batch,
        make_touched,
        make_stat,
        make_batch_over_pins,
        make_other_size,
        make_quotas_come,
        make_feed,
        pytest.param(make_crowded, marks=pytest.mark.long),
    ],
)
def test_time_under_the_lock_does_not_grow_with_pages(make: Any) -> None:
    few, many = make(Sandbox, FEW)(), make(Sandbox, MANY)()
    assert many < LONGEST
    assert many < 4 * few + 60_000, f"{few} bytecodes with {FEW} pages, {many} with {MANY}"


def test_chain_touched_in_slices_is_evicted_from_its_tail() -> None:
    box, pages, keys = full(Sandbox, 1000)
    chain = keys[100:900]
    box.now_ms += 1
    assert box.tier.lookup(pages.namespace.digest, [*chain, *pages.keys(10_000)], touch=True) == [
        True
    ] * 800 + [False]
    box.put(pages, pages.keys(*range(20_000, 20_000 + len(keys) - 10)))
    assert [
        key for key in keys if box.tier.lookup(pages.namespace.digest, [key], touch=False) == [True]
    ] == chain[:10]


def test_slots_of_an_erased_namespace_are_zeroed_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = Sandbox(1 << 22, 1 << 22)
    pages, locked = box.open("gone", PAGE), []
    box.put(pages, pages.keys(*range(600)))
    monkeypatch.setattr(
        box.tier.eviction, "_zero", lambda offset, nbytes: locked.append(box.tier.lock.locked())
    )
    assert remove_namespace(box.tier, pages.namespace.digest, zero=True) == 600
    assert locked == [False] * 600
    assert box.tier.check() == []


def placement(sandbox: type[Sandbox], sizes: int, removed: bool) -> int:
    """Return the bytecodes of a few placements in a full tier, after pages of many sizes were
    stored.
    """
    box = sandbox(1 << 25, 1 << 22)
    for number in range(1, sizes + 1):
        pages = box.open(str(number), PAGE * (1 + number % 1000))
        box.commit(box.reserve(pages, pages.keys(0)))
        if removed:
            box.remove(pages, pages.keys(0))
    filler = box.open("filler", 64 * PAGE)
    for number in range(600):
        box.now_ms += 1
        box.commit(box.reserve(filler, filler.keys(number)))
    return longest(box, reserve_some(box, filler))


@pytest.mark.parametrize(("sizes", "removed"), [(60, False), (1000, True)])
def test_placement_time_does_not_grow_with_page_sizes(sizes: int, removed: bool) -> None:
    """Regression: after 4,095 page sizes each placement was 4,000 times slower until a restart,
    even after the pages were removed.
    """
    few, many = placement(Sandbox, 4, removed), placement(Sandbox, sizes, removed)
    assert many < 3 * few + 10_000, f"{few} bytecodes after 4 sizes, {many} after {sizes}"


def test_owners_of_listed_pages_are_computed_without_the_lock() -> None:
    """In a view of 1,024 members each page takes half a millisecond."""
    box, pages, keys = full(Sandbox, FEW)
    held: list[bool] = []

    def owned(hashes: list[bytes]) -> list[bytes]:
        held.append(box.tier.lock.locked())
        return hashes[::2]

    infos, _ = Inventory(box.tier).list_pages(pages.namespace.digest, b"", b"", 1000, owned)
    assert held
    assert not any(held)
    assert len(infos) == pytest.approx(len(keys) / 2, abs=10)


def test_pinned_pages_of_many_sizes_share_extents() -> None:
    """Regression: each pinned page owned an extent: 8 MiB took 900 MiB, and all later puts
    failed.
    """
    box = Sandbox(64 << 20, 1 << 20)
    rest = box.open("rest", 64 << 10)
    keys = rest.keys(*range(1000))
    box.commit(box.reserve(rest, keys))
    for number in range(63):
        pages = box.open(f"model {number}", PAGE * (1 + number % 16))
        box.now_ms += 1
        box.put(pages, pages.keys(0))
        assert box.pin(pages, pages.keys(0)) == [True]
    assert len(box.present(rest, keys)) * (64 << 10) > 48 << 20, "much more than needed was evicted"
    for number in range(2000, 2400):
        box.now_ms += 1
        box.commit(box.reserve(rest, rest.keys(number)))
    assert len(box.present(rest, rest.keys(*range(2000, 2400)))) == 400
    assert box.tier.check() == []


def test_twenty_page_sizes_share_the_memory() -> None:
    """Pages of all 20 models are stored in turns, and kept at the same time."""
    box = Sandbox(64 << 20, 1 << 20)
    models = [box.open(f"model {number}", (80 << 10) + number * PAGE) for number in range(20)]
    for turn in range(6):
        for pages in models:
            box.now_ms += 1
            box.put(pages, pages.keys(turn, turn + 1))
    for pages in models:
        assert box.get(pages, pages.keys(*range(2))) == [True, True]
    assert box.tier.check() == []


def test_pins_are_limited_to_half_of_the_memory() -> None:
    box = Sandbox(4 * EXTENT, EXTENT)
    pages, other = box.open("model", PAGE), box.open("other", 2 * PAGE)
    keys = pages.keys(*range(160))
    box.put(pages, keys)
    assert all(box.pin(pages, keys[:100]))
    with pytest.raises(Exhausted, match=r"29 more.*half of ram_nbytes.*unpin"):
        box.pin(pages, keys[100:129])
    assert len(box.tier.eviction.pins) == 100, "a refused pin must pin none of its pages"
    assert all(box.pin(pages, keys[:128])), "pages that are already pinned must count once"
    assert all(box.pin(pages, keys[:128], 5000)), "a renewed pin must not count again"
    box.put(other, other.keys(0))
    with pytest.raises(Exhausted):
        box.pin(other, other.keys(0))
    assert box.unpin(pages, keys[:2]) == [True, True]
    assert box.pin(other, other.keys(0)) == [True]
    box.put(other, other.keys(*range(1, 60)))
    assert len(box.present(other, other.keys(*range(60)))) == 60
    assert box.tier.check() == []
