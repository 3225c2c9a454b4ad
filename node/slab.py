"""Allocate slots of several sizes in a region: offsets only, no bytes, no clock.

    region  | extent 0                        | extent 1                        | extent 2
    blocks  | A A A A A A A . | B   | C C . . | D                               | (free)

A region is cut into extents of one size, that of the largest page. An extent is halved repeatedly,
down to 1/64 of it: these are blocks. A block with slots serves one slot size; an empty one joins
its buddy and can serve any, so capacity follows when the mix of page sizes changes. (Slabs that
never free memory calcify: the first size keeps it.) The block size of a slot size follows from that
size alone: the smallest that leaves at most 1/16 of itself unused, and has `slots_min` slots if an
extent has. So a page keeps about 16 slots of its size from others, and never a whole extent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import mul
from typing import Any

from kvstore.layout import SLOT_ALIGN_NBYTES

NO_SLOTS = array("I")  # the free slots of a full block: one array for them all
HALVINGS_MAX = 6  # 64 blocks in an extent: a block of 4 KiB slots costs little memory
UNUSED_SHARE = 16  # a block may leave 1/16 of itself unused at its end
LOOKED_AT = 8  # blocks checked to find an emptier one
NO_OWNERS: Callable[[int], MutableSequence[Any]] = partial(mul, [None])  # of so many slots


class SizeClass:
    """A slot size in use: its blocks, in sums, and those of them that have a free slot."""

    __slots__ = (
        "all_free",
        "block_count",
        "level",
        "partial",
        "per_block",
        "slot_nbytes",
        "used_count",
    )

    def __init__(self, slot_nbytes: int, level: int, per_block: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.level = level
        self.per_block = per_block
        self.all_free = array("I", range(per_block - 1, -1, -1))
        self.block_count = 0
        self.used_count = 0
        # New slots come from the oldest of them, so that the others may run empty. (A plain dict
        # would search for its first entry once earlier ones are deleted.)
        self.partial: OrderedDict[int, Block] = OrderedDict()

    @property
    def slot_count(self) -> int:
        """Return the slots of all blocks."""
        return self.block_count * self.per_block


@dataclass(slots=True, eq=False)
class Block:
    """A block in use.

    `owners[i]` owns slot i; falsy if it is free. `start` counts the smallest blocks, from the start
    of the region. `used_sum` is the sum of its owners' last uses, kept by the tier in its unit of
    time. A `closed` one allocates no slots.
    """

    start: int
    offset: int
    kind: SizeClass
    owners: MutableSequence[Any]
    free: array[int]  # a stack: lowest slot first
    used_sum: int = 0
    closed: bool = False

    @property
    def used_count(self) -> int:
        """Return the slots in use."""
        return len(self.owners) - len(self.free)


class SlotAllocator:
    """The allocator. Not thread-safe; the tier's lock guards it.

    Except `claimed` and `check`, no call takes longer the more slots, blocks or sizes there are;
    those with an area visit its 64 blocks.

    `owners(n)` makes the empty owners of n slots: a list of None for objects, an array of zeros for
    record numbers, where 8 bytes a slot would be too many. `slots_min`: a block is some 300 bytes
    of objects.
    """

    def __init__(
        self,
        region_nbytes: int,
        extent_nbytes: int,
        owners: Callable[[int], MutableSequence[Any]] = NO_OWNERS,
        slots_min: int = 1,
    ) -> None:
        assert extent_nbytes % SLOT_ALIGN_NBYTES == 0
        assert region_nbytes % extent_nbytes == 0
        self.region_nbytes = region_nbytes
        self.extent_nbytes = extent_nbytes
        self._owners = owners
        self._slots_min = slots_min
        self._vacant = owners(1)[0]
        self.level_max = 0  # blocks of level n have 2^n units; an extent is one of level_max
        while (
            self.level_max < HALVINGS_MAX
            and extent_nbytes % (SLOT_ALIGN_NBYTES << self.level_max + 1) == 0
        ):
            self.level_max += 1
        self.unit_nbytes = extent_nbytes >> self.level_max
        # By unit, each of them
        self._blocks: list[Block | None] = [None] * (region_nbytes // self.unit_nbytes)
        # Starts of free blocks, by level
        self._free: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(self.level_max + 1)
        ]
        for start in range(len(self._blocks) - (1 << self.level_max), -1, -(1 << self.level_max)):
            self._free[-1][start] = None
        self._closed: set[int] = set()  # units
        self.withheld: set[int] = set()  # numbers of free extents that may not be used
        self._kinds: dict[int, SizeClass] = {}  # of the sizes that have blocks
        self.used_nbytes = 0

    # ---- slots ---------------------------------------------------------------------------

    def allocate(self, slot_nbytes: int, owner: Any) -> int | None:
        """Return the offset of a free slot, or None if there is none."""
        offsets = self._allocate_some(slot_nbytes, (owner,))
        return offsets[0] if offsets else None

    def allocate_all(self, slot_nbytes: int, owners: Sequence[Any]) -> list[int]:
        """Allocate a slot for each owner, as far as there are free ones."""
        offsets: list[int] = []
        try:
            while len(offsets) < len(owners):
                more = self._allocate_some(slot_nbytes, owners[len(offsets) :])
                if not more:
                    break
                offsets += more
        except BaseException:  # a caller that gets no result can not free them
            for offset in offsets:
                self.free(offset)
            raise
        return offsets

    def _allocate_some(self, slot_nbytes: int, owners: Sequence[Any]) -> list[int]:
        """Allocate slots from one block."""
        kind = self._kinds.get(slot_nbytes)
        block = next(iter(kind.partial.values()), None) if kind is not None else None
        if block is None:
            block = self._open(slot_nbytes, kind)
        if block is None:
            return []
        kind, free, start, there = block.kind, block.free, block.offset, block.owners
        offsets = []
        for owner in owners[: len(free)]:
            slot = free.pop()
            there[slot] = owner
            offsets.append(start + slot * slot_nbytes)
        kind.used_count += len(offsets)
        self.used_nbytes += slot_nbytes * len(offsets)
        if free:
            kind.partial[block.start] = block
        else:
            kind.partial.pop(block.start, None)
            block.free = NO_SLOTS
        return offsets

    def free_count(self, slot_nbytes: int) -> int:
        """Return how many slots `allocate` would find if nothing is draining."""
        kind = self._kind(slot_nbytes)
        if kind is None:
            return 0
        blocks = sum(len(free) << above for above, free in enumerate(self._free[kind.level :]))
        return kind.slot_count - kind.used_count + blocks * kind.per_block

    def free(self, offset: int) -> Block:
        """Free a slot and return its block; an empty block can serve any size again."""
        block = self.block_of(offset)
        kind = block.kind
        slot = (offset - block.offset) // kind.slot_nbytes
        assert block.owners[slot], f"slot at {offset} is free already"
        block.owners[slot] = self._vacant
        kind.used_count -= 1
        self.used_nbytes -= kind.slot_nbytes
        if block.free is NO_SLOTS:
            block.free = array("I", (slot,))
        else:
            block.free.append(slot)
        if len(block.free) == kind.per_block:
            self._retire(block)
        elif not block.closed:
            kind.partial[block.start] = block
        return block

    def hand_over(self, offset: int, owner: Any) -> Block:
        """Give a used slot to another owner and return its block."""
        block = self.block_of(offset)
        slot = (offset - block.offset) // block.kind.slot_nbytes
        assert block.owners[slot], f"slot at {offset} is free"
        block.owners[slot] = owner
        return block

    def block_of(self, offset: int) -> Block:
        """Return the block at an offset."""
        block = self._blocks[offset // self.unit_nbytes]
        assert block is not None, f"no block at {offset}"
        return block

    # ---- blocks --------------------------------------------------------------------------

    def level(self, slot_nbytes: int) -> int:
        """Return the level of this slot size's blocks; an extent's if it fits none."""
        for level in range(self.level_max):
            block_nbytes = self.unit_nbytes << level
            fits = self._slots_min * slot_nbytes <= block_nbytes
            if fits and block_nbytes % slot_nbytes * UNUSED_SHARE <= block_nbytes:
                return level
        return self.level_max

    def _kind(self, slot_nbytes: int) -> SizeClass | None:
        kind = self._kinds.get(slot_nbytes)
        if kind is None and SLOT_ALIGN_NBYTES <= slot_nbytes <= self.extent_nbytes:
            level = self.level(slot_nbytes)
            kind = SizeClass(slot_nbytes, level, (self.unit_nbytes << level) // slot_nbytes)
        return kind

    def _open(self, slot_nbytes: int, kind: SizeClass | None) -> Block | None:
        """Open the smallest free block that is large enough, cut down to the needed size."""
        kind = kind or (self._kind(slot_nbytes) if any(self._free) else None)
        if kind is None:
            return None
        for level in range(kind.level, self.level_max + 1):
            if self._free[level]:
                start, _ = self._free[level].popitem()
                for half in range(level - 1, kind.level - 1, -1):
                    self._free[half][start + (1 << half)] = None
                block = self._put(start, kind)
                block.free = kind.all_free[:]
                return block
        return None

    def _put(self, start: int, kind: SizeClass) -> Block:
        """Register a block that gives no slots yet."""
        block = Block(start, start * self.unit_nbytes, kind, self._owners(kind.per_block), NO_SLOTS)
        self._blocks[start : start + (1 << kind.level)] = [block] * (1 << kind.level)
        self._kinds[kind.slot_nbytes] = kind
        kind.block_count += 1
        return block

    def _retire(self, block: Block) -> None:
        kind, units = block.kind, 1 << block.kind.level
        self._blocks[block.start : block.start + units] = [None] * units
        kind.partial.pop(block.start, None)
        kind.block_count -= 1
        if not kind.block_count:
            del self._kinds[kind.slot_nbytes]
        if not block.closed:
            self._give(block.start, kind.level)

    def _give(self, start: int, level: int) -> None:
        """Free a block and merge it with its free buddies."""
        while level < self.level_max and start ^ (1 << level) in self._free[level]:
            del self._free[level][start ^ (1 << level)]
            start &= ~(1 << level)
            level += 1
        self._free[level][start] = None

    # ---- areas: the range of a block, whatever it holds now ------------------------------------

    def area(self, offset: int, level: int) -> range:
        """Return the units of the block of this level at an offset, or of the larger used one."""
        unit = offset // self.unit_nbytes
        block = self._blocks[unit]
        if block is not None:
            level = max(level, block.kind.level)
        return range(unit >> level << level, (unit >> level) + 1 << level)

    def blocks_in(self, area: range) -> list[Block]:
        """Return the used blocks in an area."""
        return [b for unit in area if (b := self._blocks[unit]) is not None and b.start == unit]

    def is_free(self, area: range) -> bool:
        """Return whether nothing in the area is used or draining."""
        return self._closed.isdisjoint(area) and not self.blocks_in(area)

    def areas(self, level: int) -> Iterator[range]:
        """Yield all areas of this level that are not within larger blocks."""
        for start in range(0, len(self._blocks), 1 << level):
            block = self._blocks[start]
            if block is None or block.kind.level <= level:
                yield range(start, start + (1 << level))

    def mean_use(self, area: range) -> float:
        """Return the mean last use of an area's used slots; it must have one."""
        blocks = self.blocks_in(area)
        return sum(block.used_sum for block in blocks) / sum(block.used_count for block in blocks)

    def sparse_areas(self, level: int, count: int) -> list[range]:
        """Return partly free areas of this level, those with the largest free part first."""
        found: dict[int, range] = {}
        for free in reversed(self._free[:level]):
            for start in islice(free, count - len(found)):
                area = self.area(start * self.unit_nbytes, level)
                found.setdefault(area.start, area)
        return list(found.values())

    def sparse(self, slot_nbytes: int) -> int | None:
        """Return the emptiest of a few blocks whose slots fit into others, or None."""
        kind = self._kinds.get(slot_nbytes)
        if kind is None or not kind.partial or kind.slot_count - kind.used_count < kind.per_block:
            return None
        return min(
            islice(kind.partial.values(), LOOKED_AT), key=lambda block: block.used_count
        ).offset

    def close(self, area: range) -> bool:
        """Stop allocating slots in an area until `reopen`; return False if that is impossible.

        It is impossible if part of it is closed already, if it is no area any more, or if it is
        unused, because it may then belong to a larger free block.
        """
        is_area = self.area(area.start * self.unit_nbytes, len(area).bit_length() - 1) == area
        if not is_area or not self._closed.isdisjoint(area) or not self.blocks_in(area):
            return False
        self._closed.update(area)
        for unit in area:
            for free in self._free:
                free.pop(unit, None)
        for block in self.blocks_in(area):
            block.closed = True
            block.kind.partial.pop(block.start, None)
        return True

    def reopen(self, area: range) -> None:
        """Allocate slots in an area again."""
        self._closed.difference_update(area)
        for block in self.blocks_in(area):
            block.closed = False
            if block.free:
                block.kind.partial[block.start] = block
        for unit in area:
            if self._blocks[unit] is None:
                self._give(unit, 0)

    # ---- extents that may not be used ----------------------------------------------------------

    def extent(self, number: int) -> range:
        """Return the units of an extent."""
        return range(number << self.level_max, (number + 1) << self.level_max)

    def free_extents(self) -> list[int]:
        """Return the numbers of wholly free extents, the next one to be used last."""
        return [start >> self.level_max for start in self._free[-1]]

    def withhold(self, number: int) -> bool:
        """Stop using an extent until `supply`; return False if it is not wholly free."""
        if number << self.level_max not in self._free[-1]:
            return False
        del self._free[-1][number << self.level_max]
        self.withheld.add(number)
        return True

    def supply(self, number: int) -> None:
        """Use a withheld extent again."""
        self.withheld.remove(number)
        self._free[-1][number << self.level_max] = None

    @property
    def usable_nbytes(self) -> int:
        """Return the size of the region without withheld extents."""
        return self.region_nbytes - len(self.withheld) * self.extent_nbytes

    # ---- start ---------------------------------------------------------------------------

    def claim(self, slots: Iterable[tuple[int, int]], owners: Iterable[Any]) -> list[int]:
        """Take slots (offset, bytes) that an earlier run recorded, each for an owner.

        Return the positions of those that do not fit. Use it on a new allocator, and call `claimed`
        after the last one.
        """
        refused, blocks, unit_nbytes = list[int](), self._blocks, self.unit_nbytes
        kind, nbytes, level = None, 0, 0
        for position, ((offset, slot_nbytes), owner) in enumerate(zip(slots, owners, strict=True)):
            if slot_nbytes != nbytes or kind is None or not kind.block_count:
                kind, nbytes = self._kind(slot_nbytes), slot_nbytes
                level = kind.level if kind else 0
            if kind is None or not 0 <= offset < self.region_nbytes:
                refused.append(position)
                continue
            start = offset // unit_nbytes >> level << level
            slot, rest = divmod(offset - start * unit_nbytes, slot_nbytes)
            block = blocks[start]
            fits = not rest and slot < kind.per_block
            if block is None and fits and not any(blocks[start : start + (1 << level)]):
                block = self._put(start, kind)
            if (
                not fits
                or block is None
                or block.start != start
                or block.kind is not kind
                or block.owners[slot]
            ):
                refused.append(position)
            else:
                block.owners[slot] = owner
        return refused

    def claimed(self) -> None:
        """List the space that all claims left free, once, because claiming does not keep lists."""
        for free in self._free:
            free.clear()
        extent_units = 1 << self.level_max
        for start in range(len(self._blocks) - extent_units, -1, -extent_units):
            if any(self._blocks[start : start + extent_units]):
                for unit in range(start + extent_units - 1, start - 1, -1):
                    if self._blocks[unit] is None:
                        self._give(unit, 0)
            else:
                self._free[-1][start] = None
        for block in self.blocks():
            kind, owners = block.kind, block.owners
            if not all(owners):
                block.free = array(
                    "I", (slot for slot in range(len(owners) - 1, -1, -1) if not owners[slot])
                )
                kind.partial[block.start] = block
            kind.used_count += block.used_count
            self.used_nbytes += block.used_count * kind.slot_nbytes

    # ---- status --------------------------------------------------------------------------------

    @property
    def extent_count(self) -> int:
        """Return the number of extents."""
        return self.region_nbytes // self.extent_nbytes

    @property
    def extent_free_count(self) -> int:
        """Return the number of free extents."""
        return len(self._free[-1])

    @property
    def unit_count(self) -> int:
        """Return the number of units."""
        return len(self._blocks)

    def kinds(self) -> list[SizeClass]:
        """Return the slot sizes that have blocks."""
        return list(self._kinds.values())

    def block_at(self, unit: int) -> Block | None:
        """Return the block that starts at a unit; None if none does."""
        block = self._blocks[unit]
        return block if block is not None and block.start == unit else None

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in use."""
        return (
            block for unit in range(len(self._blocks)) if (block := self.block_at(unit)) is not None
        )

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        wrong = []
        covered = [0] * len(self._blocks)
        for level, free in enumerate(self._free):
            for start in free:
                if start % (1 << level):
                    wrong.append(f"a free block of level {level} starts at unit {start}")
                for unit in range(start, start + (1 << level)):
                    covered[unit] += 1
                if level < self.level_max and start ^ (1 << level) in free:
                    wrong.append(f"free blocks at unit {start} and its other half are not one")
        for number in self.withheld:
            for unit in self.extent(number):
                covered[unit] += 1
        found: dict[int, list[int]] = {}
        for block in self.blocks():
            kind = block.kind
            sums = found.setdefault(kind.slot_nbytes, [0, 0])
            sums[0] += 1
            sums[1] += block.used_count
            for unit in range(block.start, block.start + (1 << kind.level)):
                covered[unit] += 1
            occupied = {i for i, owner in enumerate(block.owners) if owner}
            if block.used_count == 0:
                wrong.append(
                    f"block {block.start} is empty but still serves {kind.slot_nbytes}-byte slots"
                )
            if occupied & set(block.free) or len(occupied) + len(set(block.free)) != len(
                block.owners
            ):
                wrong.append(f"block {block.start}: free and occupied slots do not add up")
            if (bool(block.free) and not block.closed) != (block.start in kind.partial):
                wrong.append(
                    f"block {block.start}: {len(block.free)} free slots, but listed wrongly as "
                    "partial"
                )
        if covered.count(1) != len(covered):
            wrong.append(
                f"{len(covered) - covered.count(1)} units are neither in one block nor free once"
            )
        counted = {kind.slot_nbytes: [kind.block_count, kind.used_count] for kind in self.kinds()}
        if found != counted:
            wrong.append(f"blocks and slots in use by size are {found}, counted {counted}")
        used_nbytes = sum(size * used for size, (_, used) in found.items())
        if used_nbytes != self.used_nbytes:
            wrong.append(f"{used_nbytes} bytes are in slots, the counter says {self.used_nbytes}")
        return wrong
