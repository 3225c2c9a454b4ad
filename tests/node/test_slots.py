"""The slot allocator, compared with a simple model: a list of taken byte ranges."""

import random
from dataclasses import dataclass, field

import pytest

from kvstore.layout import SLOT_ALIGN_NBYTES, slot_nbytes
from node.slab import SlotAllocator

EXTENT = 64 * SLOT_ALIGN_NBYTES
SIZES = [SLOT_ALIGN_NBYTES * n for n in (1, 2, 3, 5, 16, 33, 64)]
BLOCKS = {
    size: SLOT_ALIGN_NBYTES * n for size, n in zip(SIZES, (1, 2, 16, 16, 16, 64, 64), strict=True)
}


@dataclass
class Model:
    """A model of taken ranges; all other bytes are free."""

    region_nbytes: int
    taken: dict[int, int] = field(default_factory=dict)  # offset -> nbytes

    def blocks(self) -> dict[int, int]:
        """Return the slot sizes of blocks with taken ranges, by the start of the block."""
        return {offset // BLOCKS[size] * BLOCKS[size]: size for offset, size in self.taken.items()}

    def take(self, offset: int, nbytes: int) -> None:
        assert 0 <= offset <= self.region_nbytes - nbytes
        start = offset // BLOCKS[nbytes] * BLOCKS[nbytes]
        assert (offset - start) % nbytes == 0
        assert offset + nbytes <= start + BLOCKS[nbytes], "a slot lies across two blocks"
        for other, size in self.taken.items():
            assert offset + nbytes <= other or other + size <= offset, "two slots overlap"
        for other, size in self.blocks().items():
            apart = start + BLOCKS[nbytes] <= other or other + BLOCKS[size] <= start
            assert apart or (other, size) == (start, nbytes), "slots of two sizes share a block"
        self.taken[offset] = nbytes

    def free_count(self, nbytes: int) -> int:
        count, blocks = 0, self.blocks()
        for start in range(0, self.region_nbytes, BLOCKS[nbytes]):
            inside = [offset for offset in self.taken if start <= offset < start + BLOCKS[nbytes]]
            empty = all(
                start + BLOCKS[nbytes] <= b or b + BLOCKS[size] <= start
                for b, size in blocks.items()
            )
            if empty or blocks.get(start) == nbytes:
                count += BLOCKS[nbytes] // nbytes - len(inside)
        return count


def claims(slots: SlotAllocator, size: int, offset: int, owner: object) -> bool:
    """Return whether a slot of an earlier run fits."""
    return slots.claim([(offset, size)], [owner]) == []


def test_random_use_agrees_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    region = 8 * EXTENT
    slots, model = SlotAllocator(region, EXTENT), Model(region)
    for step in range(1000):
        if model.taken and rng.random() < (0.35 if step // 250 % 2 else 0.55):
            offset = rng.choice(list(model.taken))
            slots.free(offset)
            del model.taken[offset]
        else:
            size = rng.choice(SIZES)
            free_count = model.free_count(size)
            assert slots.free_count(size) == free_count
            offset_or_none = slots.allocate(size, object())
            assert (offset_or_none is not None) == (free_count > 0)
            if offset_or_none is not None:
                model.take(offset_or_none, size)
        assert slots.used_nbytes == sum(model.taken.values())
        assert slots.extent_free_count == 8 - len({offset // EXTENT for offset in model.taken})
        assert slots.check() == []
    for offset in list(model.taken):
        slots.free(offset)
    assert (slots.used_nbytes, slots.extent_free_count, slots.check(), slots.kinds()) == (
        0,
        8,
        [],
        [],
    )


def test_claimed_slots_equal_allocated_ones(seed: int) -> None:
    """After a restart slots are claimed in any order, and all others are free."""
    rng = random.Random(seed)
    before, model = SlotAllocator(4 * EXTENT, EXTENT), Model(4 * EXTENT)
    for _ in range(60):
        size = rng.choice(SIZES)
        if (offset := before.allocate(size, object())) is not None:
            model.take(offset, size)
    for offset in rng.sample(list(model.taken), len(model.taken) // 2):
        before.free(offset)
        del model.taken[offset]
    slots = SlotAllocator(4 * EXTENT, EXTENT)
    for offset, size in rng.sample(list(model.taken.items()), len(model.taken)):
        assert claims(slots, size, offset, object())
        assert not claims(slots, size, offset, object()), "the slot is already taken"
    slots.claimed()
    assert slots.check() == []
    assert (slots.used_nbytes, slots.extent_free_count) == (
        before.used_nbytes,
        before.extent_free_count,
    )
    for size in SIZES:
        assert slots.free_count(size) == model.free_count(size)


def test_claim_that_conflicts_with_blocks_is_refused() -> None:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    assert claims(slots, SIZES[2], SIZES[2], object())  # in the first 16 units
    assert not claims(slots, SIZES[0], 0, object()), "the unit is part of that block"
    assert not claims(slots, SIZES[5], 0, object()), "that block is part of the extent"
    assert not claims(slots, SIZES[2], SIZES[0], object()), "no slot starts there"
    assert not claims(slots, SIZES[2], 5 * SIZES[2], object()), "the slot would leave its block"
    assert not claims(slots, SIZES[0], 2 * EXTENT, object()), "the slot is outside the region"
    assert not claims(slots, SLOT_ALIGN_NBYTES // 2, 0, object()), "no slot is that small"
    assert claims(slots, SIZES[0], BLOCKS[SIZES[2]], object())
    slots.claimed()
    assert slots.check() == []


def test_emptied_block_serves_another_size() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    small = [slots.allocate(SIZES[0], object()) for _ in range(64)]
    assert slots.allocate(SIZES[1], object()) is None
    for offset in small[1:]:
        assert offset is not None
        slots.free(offset)
    assert slots.allocate(SIZES[6], object()) is None
    assert slots.allocate(SIZES[1], object()) is not None
    assert small[0] is not None
    slots.free(small[0])
    assert slots.allocate(SIZES[4], object()) is not None


def test_one_page_of_each_of_many_sizes_wastes_little_memory() -> None:
    slots = SlotAllocator(1 << 30, 16 << 20)
    sizes = [128 * 1024 + 4096 * n for n in range(64)]
    assert None not in [slots.allocate(size, object()) for size in sizes]
    assert slots.used_nbytes < 16 << 20
    taken = sum(slots.unit_nbytes << kind.level for kind in slots.kinds())
    assert taken <= 16 * slots.used_nbytes


@pytest.mark.parametrize(
    ("slot_nbytes", "per_block"), [(4096, 256), (1 << 20, 4), (4 << 20, 4), (32 << 20, 2)]
)
def test_block_has_the_minimum_of_slots_if_an_extent_allows(
    slot_nbytes: int, per_block: int
) -> None:
    slots = SlotAllocator(1 << 30, 64 << 20, slots_min=4)
    assert slots.allocate(slot_nbytes, object()) is not None
    (kind,) = slots.kinds()
    assert kind.per_block == per_block
    assert slots.check() == []


@pytest.mark.parametrize(
    "page_nbytes", [(1 << 20) - 4096, 562_176, 1_124_352, 2_097_152, 2_256_512, 40_016, 4096]
)
def test_block_wastes_a_sixteenth_at_most(page_nbytes: int) -> None:
    slots = SlotAllocator(1 << 30, 64 << 20)
    size = slot_nbytes(page_nbytes)
    block_nbytes = slots.unit_nbytes << slots.level(size)
    assert block_nbytes % size * 16 <= block_nbytes


def test_freed_page_sizes_leave_nothing_behind() -> None:
    """Regression: every size once used made placements slower, until a restart."""
    slots = SlotAllocator(1 << 26, 1 << 25)
    for n in range(1, 4096):
        offset = slots.allocate(SLOT_ALIGN_NBYTES * n, object())
        assert offset is not None
        slots.free(offset)
    assert not slots.kinds()
    assert slots.check() == []


def test_new_slots_fill_the_oldest_partial_block() -> None:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    offsets = [slots.allocate(SIZES[2], object()) for _ in range(10)]
    for offset in (offsets[0], offsets[5]):  # a hole in each block
        assert offset is not None
        slots.free(offset)
    assert slots.allocate(SIZES[2], object()) == offsets[0]


def test_closed_area_gets_no_new_slot() -> None:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    offset = slots.allocate(SIZES[2], object())
    assert offset is not None
    area = slots.area(offset, slots.level_max)
    assert slots.close(area)
    assert not slots.close(slots.area(offset, 0)), "the area is already closed"
    others = [slots.allocate(SIZES[2], object()) for _ in range(20)]
    assert None not in others
    assert not {o // EXTENT for o in others if o is not None} & {offset // EXTENT}
    assert slots.allocate(SIZES[0], object()) is None
    slots.free(offset)
    assert slots.allocate(SIZES[0], object()) is None
    slots.reopen(area)
    assert slots.check() == []
    assert slots.allocate(SIZES[6], object()) == area.start * slots.unit_nbytes


def test_free_area_is_not_closed() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    for unit in (0, 4):
        assert slots.is_free(area := slots.area(unit * SIZES[0], 2))
        assert not slots.close(area), "the area is part of a larger free block"
    assert slots.check() == []


def test_size_with_only_closed_blocks_has_no_sparse_block() -> None:
    slots = SlotAllocator(EXTENT, EXTENT)
    offsets = [
        offset for _ in range(3 * 5) if (offset := slots.allocate(SIZES[2], object())) is not None
    ]
    for offset in offsets[1:5] + offsets[6:10] + offsets[11:]:
        slots.free(offset)
    assert slots.sparse(SIZES[2]) is not None
    assert slots.close(range(64))
    assert slots.sparse(SIZES[2]) is None


def test_page_larger_than_an_extent_gets_no_slot() -> None:
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
    with pytest.raises(AssertionError):  # its extent is free again
        slots.free(second)


@pytest.mark.parametrize(
    ("page", "slot"), [(1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)]
)
def test_slots_are_aligned(page: int, slot: int) -> None:
    assert slot_nbytes(page) == slot


def broken(damage: str) -> list[str]:
    slots = SlotAllocator(2 * EXTENT, EXTENT)
    for _ in range(3):
        slots.allocate(SIZES[2], object())
    block = next(slots.blocks())
    if damage == "owner forgotten":
        block.owners[0] = None
    elif damage == "free slot owned":
        block.free.append(0)
    elif damage == "not listed as partial":
        block.kind.partial.clear()
    elif damage == "counter":
        slots.used_nbytes += 1
    elif damage == "counter of a size":
        block.kind.used_count += 1
    elif damage == "free block lost":
        slots._free[-1].clear()
    elif damage == "free block in use":
        slots._free[0][0] = None
    elif damage == "halves apart":
        start, _ = slots._free[-1].popitem()
        slots._free[-2][start] = slots._free[-2][start + 32] = None
    return slots.check()


@pytest.mark.parametrize(
    "damage",
    [
        "owner forgotten",
        "free slot owned",
        "not listed as partial",
        "counter",
        "counter of a size",
        "free block lost",
        "free block in use",
        "halves apart",
    ],
)
def test_check_reports_damage(damage: str) -> None:
    assert broken("none") == []
    assert broken(damage)
