"""RAM tier operations that fail half-way, such as out of memory, leak no slot, hold or read."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from sandbox import Sandbox

from node.memory.lower_tier import LocalTier, Query, Source

PAGE, COUNT = 4096, 16


class Below(LocalTier):
    """A lower tier that has every page whose hash begins with 1.

    Call number `broken_at` of `is_there` raises.
    """

    def __init__(self) -> None:
        self.reading: list[int] = []
        self.begun, self.looks, self.broken_at = 0, 0, -1

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [prefix_hash[0] == 1 for prefix_hash in prefix_hashes]

    def is_asked(self, near: bool) -> bool:
        return True

    def find(self, query: Query) -> dict[bytes, Source]:
        found = {}
        for prefix_hash in query.prefix_hashes:
            if prefix_hash[0] == 1:
                self.begun += 1
                self.reading.append(self.begun)
                found[prefix_hash] = Source(self, self.begun)
        return found

    def is_there(self, source: Source) -> bool:
        self.looks += 1
        if self.looks == self.broken_at:
            raise MemoryError("this node is in trouble")
        return True

    def release(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self.reading.remove(source.locator)


@pytest.fixture
def box() -> Any:
    made = Sandbox(COUNT * PAGE, COUNT * PAGE)
    made.tier.below = Below()
    return made


def fails_at(monkeypatch: pytest.MonkeyPatch, part: Any, name: str, number: int) -> None:
    works, calls = getattr(part, name), 0

    def work(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise MemoryError("this node is in trouble")
        return works(*arguments)

    monkeypatch.setattr(part, name, work)


@pytest.mark.parametrize("number", [1, 4, 12])
def test_failed_put_keeps_no_slot(box: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    pages = box.open("broken", PAGE)
    old, new = pages.keys(*range(3)), pages.keys(*range(3, 15))
    box.put(pages, old)
    with monkeypatch.context() as patch:
        fails_at(patch, box.tier.slots, "_open", number)  # a block for each page
        with pytest.raises(MemoryError):
            box.reserve(pages, [*old, *new])
    tier = box.tier
    assert (tier.writing_count, tier.held_count, tier.slots.used_nbytes) == (0, 0, 3 * PAGE)
    assert tier.check() == []
    assert box.put(pages, new) == [1] * 12
    assert box.get(pages, [*old, *new]) == [True] * 15


@pytest.mark.parametrize("number", [1, 4, 12])
def test_failed_put_while_evicting_keeps_no_slot(
    box: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pages = box.open("broken", PAGE)
    old, new = pages.keys(*range(COUNT)), pages.keys(*range(COUNT, COUNT + 12))
    box.put(pages, old)
    with monkeypatch.context() as patch:
        fails_at(patch, box.tier.eviction, "_forget", number)
        with pytest.raises(MemoryError):
            box.reserve(pages, new)
    tier = box.tier
    assert (tier.writing_count, tier.held_count, tier.slots.used_nbytes) == (
        0,
        0,
        (COUNT + 1 - number) * PAGE,
    )
    assert tier.check() == []
    assert box.put(pages, new) == [1] * 12
    assert box.get(pages, new) == [True] * 12


@pytest.mark.parametrize("broken_at", [1, 3, 5])
def test_failed_get_holds_no_page_and_no_read(box: Any, broken_at: int) -> None:
    pages, below = box.open("broken", PAGE), box.tier.below
    here = pages.keys(*range(3))
    on_disk = [b"\1" + key[1:] for key in pages.keys(*range(10, 15))]
    box.put(pages, here)
    below.broken_at = broken_at
    with pytest.raises(MemoryError):
        box.acquire(pages, [*here, *on_disk])
    tier = box.tier
    assert (tier.writing_count, tier.held_count, tier.slots.used_nbytes) == (0, 0, 3 * PAGE)
    assert below.reading == []
    assert tier.check() == []
    assert box.get(pages, here) == [True] * 3
