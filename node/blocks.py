"""Blocks of slots of one size, into which a region is cut (`node.slots`): what is where in each, and what of a size is
in use in all of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence
from typing import Any

NO_SLOTS = array("I")  # the free slots of a full block: one array for them all


class SizeClass:
    """A slot size in use: its blocks, in sums, and those of them that have a free slot."""

    __slots__ = ("all_free", "block_count", "level", "partial", "per_block", "slot_nbytes", "used_count")

    def __init__(self, slot_nbytes: int, level: int, per_block: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.level = level
        self.per_block = per_block
        self.all_free = array("I", range(per_block - 1, -1, -1))
        self.block_count = 0
        self.used_count = 0
        # New slots come from the oldest of them, so that the others may run empty. (A plain dict would
        # search for its first entry, once others before it are gone.)
        self.partial: OrderedDict[int, Block] = OrderedDict()

    @property
    def slot_count(self) -> int:
        return self.block_count * self.per_block


class Block:
    """One block in use. `owners[i]` is what lives in slot i, falsy if it is free. `start` counts the smallest blocks,
    from the start of the region. `used_sum` is the sum of its owners' last uses, kept by the tier in the tier's
    unit of time. A `closed` one gives no slots."""

    __slots__ = ("closed", "free", "kind", "offset", "owners", "start", "used_sum")

    def __init__(self, start: int, offset: int, kind: SizeClass, owners: MutableSequence[Any]) -> None:
        self.start = start
        self.offset = offset
        self.kind = kind
        self.owners = owners
        self.free = NO_SLOTS  # a stack: lowest slot first
        self.used_sum = 0
        self.closed = False

    @property
    def used_count(self) -> int:
        return len(self.owners) - len(self.free)
