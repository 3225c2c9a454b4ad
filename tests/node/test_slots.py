"""The slot allocator against a naive model: a list of taken byte ranges."""

import random
from dataclasses import dataclass, field

import pytest

from kvstore.layout import SLOT_ALIGN_NBYTES, slot_nbytes
from node.slots import SlotAllocator

EXTENT = 16 * SLOT_ALIGN_NBYTES
SIZES = [SLOT_ALIGN_NBYTES * n for n in (1, 2, 3, 5, 16)]


@dataclass
class Model:
    """Taken ranges only; whatever is not taken is free."""

    region_nbytes: int
    taken: dict[int, int] = field(default_factory=dict)  # offset -> nbytes

    def take(self, offset: int, nbytes: int) -> None:
        assert 0 <= offset <= self.region_nbytes - nbytes
        assert offset // EXTENT == (offset + nbytes - 1) // EXTENT, "a slot lies across two extents"
        assert offset % EXTENT % nbytes == 0
        for other, size in self.taken.items():
            assert offset + nbytes <= other or other + size <= offset, "two slots overlap"
            assert size == nbytes or other // EXTENT != offset // EXTENT, "two sizes in one extent"
        self.taken[offset] = nbytes

    def has_room(self, nbytes: int) -> bool:
        used = {offset // EXTENT for offset in self.taken}
        if len(used) < self.region_nbytes // EXTENT:
            return True
        per_extent = EXTENT // nbytes
        of_size = [offset // EXTENT for offset, size in self.taken.items() if size == nbytes]
        return any(of_size.count(extent) < per_extent for extent in set(of_size))


def test_random_use_equals_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    region = 8 * EXTENT
    slots, model = SlotAllocator(region, EXTENT), Model(region)
    for step in range(2500):
        if model.taken and rng.random() < (0.35 if step // 250 % 2 else 0.55):
            offset = rng.choice(list(model.taken))
            slots.free(offset)
            del model.taken[offset]
        else:
            size = rng.choice(SIZES)
            offset_or_none = slots.allocate(size, object())
            assert (offset_or_none is not None) == model.has_room(size)
            if offset_or_none is not None:
                model.take(offset_or_none, size)
        assert slots.used_nbytes == sum(model.taken.values())
        assert slots.extent_free_count == 8 - len({offset // EXTENT for offset in model.taken})
        assert slots.check() == []
    for offset in list(model.taken):
        slots.free(offset)
    assert (slots.used_nbytes, slots.extent_free_count, slots.check()) == (0, 8, [])


def test_an_extent_whose_last_slot_is_freed_serves_another_size() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    small = [slots.allocate(SIZES[0], object()) for _ in range(16)]
    assert None not in small
    assert slots.allocate(SIZES[1], object()) is None
    for offset in small[1:]:
        assert offset is not None
        slots.free(offset)
    assert slots.allocate(SIZES[1], object()) is None
    assert small[0] is not None
    slots.free(small[0])
    assert slots.allocate(SIZES[1], object()) == 0


def test_new_slots_fill_the_oldest_partial_extent_so_that_others_run_empty() -> None:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    offsets = [slots.allocate(SIZES[4] // 2, object()) for _ in range(4)]
    for offset in (offsets[0], offsets[2]):  # a hole in each extent
        assert offset is not None
        slots.free(offset)
    assert slots.allocate(SIZES[4] // 2, object()) == offsets[0]


def test_a_slot_in_an_extent_to_avoid_is_not_given() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    offset = slots.allocate(SIZES[0], object())
    assert offset is not None
    assert slots.allocate(SIZES[0], object(), avoid=slots.extent_of(offset)) is None


def test_a_page_larger_than_an_extent_gets_no_slot() -> None:
    assert SlotAllocator(4 * EXTENT, EXTENT).allocate(2 * EXTENT, object()) is None


def test_freeing_twice_is_an_error() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    first, second = slots.allocate(SIZES[0], object()), slots.allocate(SIZES[0], object())
    assert first is not None
    assert second is not None
    slots.free(first)
    with pytest.raises(AssertionError):
        slots.free(first)
    slots.free(second)
    with pytest.raises(AssertionError):  # its extent is gone
        slots.free(second)


@pytest.mark.parametrize(("page", "slot"), [(1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)])
def test_slots_are_aligned(page: int, slot: int) -> None:
    assert slot_nbytes(page) == slot


def broken(damage: str) -> list[str]:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    for _ in range(3):
        slots.allocate(SIZES[0], object())
    extent = next(slots.extents())
    if damage == "owner forgotten":
        extent.owners[0] = None
    elif damage == "free slot owned":
        extent.free.append(0)
    elif damage == "not listed as partial":
        slots._partial[SIZES[0]].clear()
    elif damage == "counter":
        slots.used_nbytes += 1
    elif damage == "empty extent lost":
        slots._empty.clear()
    elif damage == "empty extent twice":
        slots._empty.append(slots._empty[0])
    return slots.check()


@pytest.mark.parametrize(
    "damage",
    [
        "owner forgotten",
        "free slot owned",
        "not listed as partial",
        "counter",
        "empty extent lost",
        "empty extent twice",
    ],
)
def test_check_reports_damage(damage: str) -> None:
    assert broken("none") == []
    assert broken(damage)
