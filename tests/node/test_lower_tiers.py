"""Pages missing in RAM come from lower tiers, asked in order; a failed read goes to the next
tier.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from sandbox import Sandbox

from kvstore.deadline import Deadline
from node.memory.lower_tier import Load, LocalTier, Query, Source
from node.memory.page import Page, State

PAGE, COUNT = 4096, 16


class Shelf(LocalTier):
    """A tier that has the pages of `keys`.

    It finds the pages of `broken` too, but fails to read them.
    """

    def __init__(
        self, box: Any, pages: Any, keys: Iterable[bytes] = (), broken: Iterable[bytes] = ()
    ) -> None:
        self._box, self._pages = box, pages
        self.keys, self.broken = set(keys), set(broken)
        self.asked: list[list[bytes]] = []
        self.open: list[bytes] = []  # found, but not yet read or released
        self.found: Callable[[], object] = lambda: (
            None
        )  # called after finding, before slots are reserved

    def is_asked(self, near: bool) -> bool:
        return True

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [prefix_hash in self.keys for prefix_hash in prefix_hashes]

    def find(self, query: Query) -> dict[bytes, Source]:
        assert not self._box.tier.lock.locked(), "a tier was asked under the lock, and may block"
        self.asked.append(list(query.prefix_hashes))
        found = {key: Source(self, key) for key in query.prefix_hashes if key in self.keys}
        self.open += found
        self.found()
        return found

    def is_there(self, source: Source) -> bool:
        return source.locator in self.keys

    def release(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self.open.remove(source.locator)

    def read(
        self,
        loads: Sequence[Load],
        arrived: Callable[[Page], None],
        has_left: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        assert not self._box.tier.lock.locked(), "bytes were read under the lock"
        for page, source in loads:
            self.open.remove(source.locator)
            if source.locator not in self.broken:
                self._box.arena[page.offset : page.offset + PAGE] = self._pages.content(
                    source.locator
                )
                page.checksum = b"checksum"
                arrived(page)


class Far(Shelf):
    """A remote tier, behind the network."""

    name = "peer"

    def is_asked(self, near: bool) -> bool:
        return near


@pytest.fixture
def shelves() -> Any:
    """Return (box, pages, ten keys, local tier, remote tier); both tiers are empty."""
    box = Sandbox(COUNT * PAGE, COUNT * PAGE)
    pages = box.open("lower", PAGE)
    box.tier.below = below = Shelf(box, pages)
    far = Far(box, pages)
    box.tier.remote = (far,)
    return box, pages, pages.keys(*range(10)), below, far


def get(
    box: Any, pages: Any, keys: Sequence[bytes], near: bool, prefix_only: bool = False
) -> list[bool]:
    """Get, verify and release the pages; return the hits.

    Nothing may be left open afterwards.
    """
    deadline = Deadline(5.0) if near else None
    acquired = box.tier.acquire(pages.namespace.digest, keys, prefix_only, PAGE, None, deadline)
    found = box.tier.promotion.read(acquired, lambda: False)
    assert all(box.intact(pages, page) for page in found if page is not None)
    box.tier.release([page for page in acquired.pages if page is not None])
    assert (box.tier.held_count, box.tier.writing_count) == (0, 0)
    assert box.tier.below.open == [] == box.tier.remote[0].open
    assert box.tier.check() == []
    return [page is not None for page in found]


def test_each_tier_is_asked_for_pages_missing_above_it(shelves: Any) -> None:
    box, pages, keys, below, far = shelves
    box.put(pages, keys[:2])
    below.keys, far.keys = set(keys[2:4]), set(keys[3:6])
    assert get(box, pages, keys, near=True) == [True] * 6 + [False] * 4
    assert (below.asked, far.asked) == ([keys[2:]], [keys[4:]])
    assert get(box, pages, keys[:6], near=True) == [True] * 6
    assert len(below.asked) == 1, "a hit in RAM must not ask a lower tier"


def test_remote_tier_is_not_asked_by_a_far_get(shelves: Any) -> None:
    box, pages, keys, below, far = shelves
    far.keys = set(keys)
    assert get(box, pages, keys, near=False) == [False] * 10
    assert (below.asked, far.asked) == ([keys], [])


def test_failed_read_of_a_tier_falls_through_to_the_next(shelves: Any) -> None:
    box, pages, keys, below, far = shelves
    below.keys, below.broken, far.keys = set(keys[:6]), set(keys[1:4]), set(keys[2:8])
    assert get(box, pages, keys, near=True) == [
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert far.asked == [keys[6:], keys[1:4]]


def test_failed_read_of_a_far_get_is_a_miss(shelves: Any) -> None:
    box, pages, keys, below, far = shelves
    below.keys, below.broken, far.keys = set(keys), set(keys[:3]), set(keys)
    assert get(box, pages, keys, near=False) == [False] * 3 + [True] * 7
    assert far.asked == []


def test_page_removed_between_finding_and_slots_is_a_miss(shelves: Any) -> None:
    box, pages, keys, below, _ = shelves
    below.keys = set(keys)
    below.found = lambda: below.keys.difference_update(keys[:5])
    assert get(box, pages, keys, near=False) == [False] * 5 + [True] * 5
    assert box.present(pages, keys) == set(keys[5:])


def test_page_put_between_finding_and_slots_is_used(shelves: Any) -> None:
    box, pages, keys, below, _ = shelves
    below.keys = set(keys[:5])
    below.found = lambda: (setattr(below, "keys", set()), box.put(pages, keys))
    assert get(box, pages, keys, near=False) == [True] * 10


def test_pages_behind_the_first_miss_are_not_held_or_read(shelves: Any) -> None:
    box, pages, keys, below, _ = shelves
    box.put(pages, keys[8:])
    below.keys = {*keys[:3], *keys[5:8]}
    assert get(box, pages, keys, near=False, prefix_only=True) == [True] * 3 + [False] * 7
    assert box.present(pages, keys) >= {*keys[:3], *keys[8:]}
    assert box.tier.visible_count == 5


def left_between_pages(far: "Far", monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tier ask before each page whether it is still wanted."""

    def read(loads: Any, arrived: Any, has_left: Callable[[], bool], deadline: Deadline) -> None:
        for load in loads:
            if has_left():
                far.open.remove(load.source.locator)
            else:
                Far.read(far, [load], arrived, has_left, deadline)

    monkeypatch.setattr(far, "read", read)


def test_reader_that_left_reads_on_for_those_who_wait(
    shelves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the others got misses for pages that the reader would have fetched."""
    box, pages, keys, _, far = shelves
    far.keys = set(keys)
    left_between_pages(far, monkeypatch)
    digest, deadline = pages.namespace.digest, Deadline(5.0)
    left = box.tier.acquire(digest, keys, False, PAGE, None, deadline)
    waits = box.tier.acquire(digest, keys[2:4], False, PAGE, None, deadline)
    came = box.tier.promotion.read(left, lambda: True)
    assert [page is not None for page in came] == [True] * 4 + [False] * 6
    assert all(box.tier.promotion.read(waits, lambda: False))
    for acquired in (left, waits):
        box.tier.release([page for page in acquired.pages if page is not None])
    assert box.tier.check() == []


def test_reader_that_left_does_not_read_on_for_itself(
    shelves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: who asked for a page twice held it twice, and so seemed to wait for it."""
    box, pages, keys, _, far = shelves
    far.keys = set(keys)
    left_between_pages(far, monkeypatch)
    twice = [*keys, *keys]
    left = box.tier.acquire(pages.namespace.digest, twice, False, PAGE, None, Deadline(5.0))
    assert box.tier.promotion.read(left, lambda: True) == [None] * len(twice)
    box.tier.release([page for page in left.pages if page is not None])
    assert (far.open, box.tier.check()) == ([], [])


def test_namespace_is_kept_while_a_tier_is_asked(shelves: Any) -> None:
    box, pages, keys, below, _ = shelves
    below.keys, closed = set(keys), []
    below.found = lambda: closed.append(box.tier.namespaces.close(pages.namespace.digest))
    assert get(box, pages, keys, near=False) == [True] * 10
    assert closed == [False]


def test_failing_tier_leaves_no_page_behind(shelves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    box, pages, keys, below, far = shelves
    below.keys, far.keys = set(keys[:5]), set(keys[5:])

    def fail(*_: Any) -> None:
        raise MemoryError("this node is in trouble")

    with monkeypatch.context() as patch:
        patch.setattr(far, "find", fail)
        with pytest.raises(MemoryError):
            get(box, pages, keys, near=True)
    assert (below.open, box.tier.held_count, box.tier.slots.used_nbytes) == ([], 0, 0)
    acquired = box.tier.acquire(pages.namespace.digest, keys, False, PAGE, None, Deadline(5.0))
    assert {page.state for page in acquired.pages} == {State.LOADING}
    with monkeypatch.context() as patch:
        patch.setattr(below, "read", fail)
        with pytest.raises(MemoryError):
            box.tier.promotion.read(acquired, lambda: False)
    box.tier.release(acquired.pages)
    assert (far.open, box.tier.held_count, box.tier.writing_count, box.tier.slots.used_nbytes) == (
        [],
        0,
        0,
        0,
    )
    assert box.tier.check() == []


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("written", [0, 8])  # then the read's slot is for one caller
def test_page_whose_read_could_not_be_noted_is_no_longer_loading(
    shelves: Any, monkeypatch: pytest.MonkeyPatch, near: bool, written: int
) -> None:
    """Regression: each later get of the page waited ten seconds for a read that nobody made."""
    box, pages, keys, below, far = shelves
    puts = [box.reserve(pages, keys[:written])] if written else []
    (far if near else below).keys, made = set(keys), list[Load]()

    def failing(page: Page, source: Source) -> Load:
        if len(made) == 3:
            raise MemoryError("this node is in trouble")
        made.append(Load(page, source))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr("node.memory.promotion.Load", failing)
        with pytest.raises(MemoryError):
            get(box, pages, keys, near)
    tier = box.tier
    for put in puts:
        tier.abort(put)
    assert (tier.held_count, tier.writing_count, tier.slots.used_nbytes) == (0, 0, 0)
    assert tier.check() == []
    assert get(box, pages, keys, near) == [True] * len(keys)


def test_lookup_asks_each_remote_tier_for_missing_pages(shelves: Any) -> None:
    box, pages, keys, _, far = shelves
    farther = Far(box, pages, keys[4:8])
    box.tier.remote = (far, farther)
    far.keys = set(keys[2:5])
    found = box.tier.promotion.lookup(pages.namespace, keys, False, Deadline(5.0))
    assert found == set(keys[2:8])
    assert (far.asked, farther.asked) == ([keys], [[*keys[:2], *keys[5:]]])
    assert far.open == [] == farther.open
