"""Pages that move to another slot, and memory that an emptied namespace returns."""

import itertools
import sys
from typing import Any

import pytest
from sandbox import Sandbox

from kvstore.errors import Exhausted
from node.memory.removal import remove_namespace

PAGE = 4096
EXTENT = 16 * PAGE


class MovingSandbox:
    """A tier in which a pinned page must move; `meanwhile` runs while its bytes are copied."""

    def __init__(self, sandbox: type[Sandbox], meanwhile: Any) -> None:
        self.box = box = sandbox(2 * EXTENT, EXTENT)
        self.small, self.large = box.open("small", PAGE), box.open("large", 16 * PAGE)
        self.keys = self.small.keys(*range(32))
        box.put(self.small, self.keys)
        self.pinned = self.keys[20]
        box.pin(self.small, [self.pinned])
        # Hold all but one page of the first extent; the last one is evicted for the pinned one
        box.acquire(self.small, self.keys[:15])
        (self.page,) = box.read(self.small, [self.pinned])
        box.tier.release([self.page])
        self.offset = self.page.offset
        copy, self.copies = box.tier._copy, 0

        def copy_and(source: int, target: int, nbytes: int) -> None:
            assert not box.tier.lock.locked(), "bytes were copied under the lock"
            self.copies += 1
            copy(source, target, nbytes)
            meanwhile(self)

        box.tier._copy = copy_and
        box.now_ms += 1

    def put_large(self) -> bool:
        try:
            self.box.put(self.large, self.large.keys(0))
        except Exhausted:
            return False
        return True


def test_pinned_page_moves_without_the_lock() -> None:
    moving = MovingSandbox(Sandbox, lambda moving: None)
    assert moving.put_large()
    assert moving.copies == 1
    assert moving.page.offset != moving.offset
    assert moving.box.get(moving.small, [moving.pinned]) == [True]
    assert moving.box.tier.check() == []


def test_page_read_during_a_move_stays_in_its_slot() -> None:
    readers: list[Any] = []

    def read(moving: MovingSandbox) -> None:
        readers.extend(moving.box.acquire(moving.small, [moving.pinned]))

    moving = MovingSandbox(Sandbox, read)
    assert not moving.put_large()
    assert moving.page.offset == moving.offset
    assert moving.box.intact(moving.small, moving.page)
    assert moving.box.tier.check() == []
    moving.box.tier.release(readers)
    assert moving.box.get(moving.small, [moving.pinned]) == [True]


def test_page_removed_during_a_move_keeps_no_slot() -> None:
    moving = MovingSandbox(Sandbox, lambda moving: moving.box.remove(moving.small, [moving.pinned]))
    assert moving.put_large() in (True, False)
    assert moving.box.present(moving.small, [moving.pinned]) == set()
    assert moving.box.tier.check() == []


def test_page_erased_during_a_move_is_zeroed_in_both_slots() -> None:
    moving = MovingSandbox(
        Sandbox,
        lambda moving: remove_namespace(moving.box.tier, moving.small.namespace.digest, zero=True),
    )
    piece = moving.small.content(moving.pinned)[:64]
    assert piece in moving.box.arena
    moving.put_large()
    assert moving.copies == 1
    assert piece not in moving.box.arena
    assert moving.box.tier.check() == []


@pytest.mark.parametrize("another", [False, True])
def test_removal_of_a_namespace_includes_a_moving_page(
    monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """The page moves to a place that the walk has already passed.

    With `another`, another walk, such as a flush, begins and ends meanwhile.
    """
    moving = MovingSandbox(Sandbox, lambda moving: None)
    box, steps = moving.box, itertools.count(1)

    def interfere(_: float) -> None:
        if len(box.tier.eviction.watchers) > 1:
            return
        step = next(steps)
        if step == 1 and another:
            box.tier.scan(None, lambda pages: None)
        if step == 17:
            assert moving.put_large()

    monkeypatch.setattr("node.memory.scan.SLOTS", 1)
    monkeypatch.setattr("node.memory.scan.UNITS", 1)
    monkeypatch.setattr("node.memory.scan.time.sleep", interfere)
    remove_namespace(box.tier, moving.small.namespace.digest)
    assert moving.copies == 1
    assert moving.page.offset < moving.offset
    assert box.present(moving.small, moving.keys) == set()
    assert box.tier.eviction.watchers == []
    assert box.tier.check() == []


@pytest.mark.parametrize("oldest", [0, 4, 12])
def test_place_emptied_during_eviction_is_reused_once(
    monkeypatch: pytest.MonkeyPatch, oldest: int
) -> None:
    """Regression: the place, by then part of a larger free block, became free twice, or the rest of
    the block was lost.
    """
    box = Sandbox(EXTENT, EXTENT)
    small, middle = box.open("small", PAGE), box.open("middle", 4 * PAGE)
    keys = small.keys(*range(16))
    box.put(small, keys)
    box.now_ms += 1
    box.get(small, keys[:oldest] + keys[oldest + 4 :])
    monkeypatch.setattr("node.memory.lock_slices.STEPS", 1)
    once = iter([keys])  # removing releases the lock, too
    monkeypatch.setattr(
        "node.memory.lock_slices.time.sleep", lambda _: [box.remove(small, some) for some in once]
    )
    box.put(middle, middle.keys(0))
    assert box.tier.check() == []
    monkeypatch.undo()
    box.put(small, keys[:12])
    assert box.get(middle, middle.keys(0)) + box.get(small, keys[:12]) == [True] * 13
    assert box.tier.check() == []


@pytest.mark.parametrize("way", ["remove", "remove_namespace", "evict"])
def test_emptied_namespace_frees_its_table(way: str) -> None:
    box = Sandbox(256 * EXTENT, EXTENT)
    pages, other = box.open("model", PAGE), box.open("other", PAGE)
    keys = pages.keys(*range(4096))
    box.put(pages, keys)
    index = box.tier.namespace(pages.namespace.digest)
    full_nbytes = sys.getsizeof(index.pages)
    if way == "remove":
        box.remove(pages, keys)
    elif way == "remove_namespace":
        remove_namespace(box.tier, pages.namespace.digest)
    else:
        box.put(other, keys)
    assert not index.pages
    assert sys.getsizeof(index.pages) * 100 < full_nbytes
