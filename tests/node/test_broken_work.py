"""Work under the RAM tier's lock that breaks in the middle, out of memory say, leaves nothing behind."""

from collections.abc import Sequence
from typing import Any

import pytest
from sandbox import Sandbox

from node.memory.lower_tier import NoLowerTier

PAGE, COUNT = 4096, 16


class Below(NoLowerTier):
    """All pages with a first byte of 1 are there. `broken_at`: the reading that is begun and fails."""

    def __init__(self) -> None:
        self.reading: list[int] = []
        self.begun, self.broken_at = 0, -1

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [prefix_hash[0] == 1 for prefix_hash in prefix_hashes]

    def begin_read(self, digest: bytes, prefix_hash: bytes) -> int:
        if prefix_hash[0] != 1:
            return 0
        self.begun += 1
        if self.begun == self.broken_at:
            raise MemoryError("this node is in trouble")
        self.reading.append(self.begun)
        return self.begun

    def end_read(self, record: int) -> None:
        self.reading.remove(record)


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
def test_a_put_that_breaks_keeps_no_slot(box: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
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
def test_a_put_that_breaks_while_others_go_for_it_keeps_no_slot(
    box: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pages = box.open("broken", PAGE)
    old, new = pages.keys(*range(COUNT)), pages.keys(*range(COUNT, COUNT + 12))
    box.put(pages, old)
    with monkeypatch.context() as patch:
        fails_at(patch, box.tier.eviction, "_succeed_oldest", number)
        with pytest.raises(MemoryError):
            box.reserve(pages, new)
    tier = box.tier
    assert (tier.writing_count, tier.held_count, tier.slots.used_nbytes) == (0, 0, (COUNT + 1 - number) * PAGE)
    assert tier.check() == []
    assert box.put(pages, new) == [1] * 12
    assert box.get(pages, new) == [True] * 12


@pytest.mark.parametrize("broken_at", [1, 3, 5])
def test_a_get_that_breaks_holds_no_page_and_reads_nothing(box: Any, broken_at: int) -> None:
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
