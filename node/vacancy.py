"""Who has which byte of a region. Pure; whoever asks has the lock of the region's tier."""

from typing import Any, NamedTuple

from node.slots import SlotAllocator


class Stretch(NamedTuple):
    """Bytes from `start` to `end`: a slot and its owner, or what no page has: then `owner` is falsy."""

    start: int
    end: int
    owner: Any


def stretch_at(slots: SlotAllocator, at: int) -> Stretch:
    """That in which the byte `at` lies; of one that nobody has, from `at` on."""
    area = slots.area(at, 0)
    block, end = slots.block_at(area.start), area.stop * slots.unit_nbytes
    if block is None:
        return Stretch(at, end, None)
    size = block.kind.slot_nbytes
    number = (at - block.offset) // size
    if number >= block.kind.per_block:  # left over at the block's end
        return Stretch(at, end, None)
    start = block.offset + number * size
    owner = block.owners[number]
    return Stretch(start if owner else at, start + size, owner)
