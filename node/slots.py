"""Slot allocator: cuts a region into slots of several sizes. Pure: offsets only, no bytes, no clock.

    region  | extent 0        | extent 1        | extent 2 (free) | extent 3        |
             A A A A A A A A   B   B   B   .                       A A . A . . A A

A region is cut into extents of one size. An extent that holds slots serves one slot size; an empty
one serves any, so capacity follows when the mix of page sizes changes. (Slabs that never give an
extent back calcify: the size that came first keeps the memory.)
"""

from array import array
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

from kvstore.layout import SLOT_ALIGN_NBYTES


class Extent:
    """One extent in use. `owners[i]` is what lives in slot i, falsy if it is free.

    `used_sum` is the sum of its owners' last uses, kept by the tier in the tier's unit of time; the
    mean tells how cold the extent is.
    """

    __slots__ = ("free", "number", "owners", "slot_nbytes", "used_sum")

    def __init__(self, number: int, slot_nbytes: int, owners: MutableSequence[Any]) -> None:
        self.number = number
        self.slot_nbytes = slot_nbytes
        self.owners = owners
        self.free = array("I", range(len(owners) - 1, -1, -1))  # a stack: lowest slot first
        self.used_sum = 0

    @property
    def used_count(self) -> int:
        return len(self.owners) - len(self.free)


class SlotAllocator:
    """Not thread-safe; the tier's lock guards it.

    `owners(n)` makes the vacant owners of n slots: a list of None for objects, an array of zeros for
    record numbers, where 8 bytes a slot would be too many.
    """

    def __init__(
        self,
        region_nbytes: int,
        extent_nbytes: int,
        owners: Callable[[int], MutableSequence[Any]] = lambda count: [None] * count,
    ) -> None:
        assert extent_nbytes % SLOT_ALIGN_NBYTES == 0
        assert region_nbytes % extent_nbytes == 0
        self.region_nbytes = region_nbytes
        self.extent_nbytes = extent_nbytes
        self._owners = owners
        self._vacant = owners(1)[0]
        self._extents: list[Extent | None] = [None] * (region_nbytes // extent_nbytes)
        self._empty = list(range(len(self._extents) - 1, -1, -1))  # numbers of unused extents
        # Extents of a slot size that have a free slot; a dict is an ordered set here. New slots
        # come from the oldest of them, so that the others may run empty.
        self._partial: dict[int, dict[int, Extent]] = {}
        self.used_nbytes = 0

    @property
    def extent_count(self) -> int:
        return len(self._extents)

    @property
    def extent_free_count(self) -> int:
        return len(self._empty)

    def allocate(self, slot_nbytes: int, owner: Any, avoid: Extent | None = None) -> int | None:
        """Offset of a free slot, or None if there is none. `avoid` is an extent to stay out of."""
        extent = self._extent_with_room(slot_nbytes, avoid)
        if extent is None:
            return None
        slot = extent.free.pop()
        extent.owners[slot] = owner
        if not extent.free:
            del self._partial[slot_nbytes][extent.number]
            extent.free = array("I")  # popping gave no memory back: 4 bytes a slot
        self.used_nbytes += slot_nbytes
        return extent.number * self.extent_nbytes + slot * slot_nbytes

    def has_room(self, slot_nbytes: int) -> bool:
        """Whether `allocate` would find a slot."""
        return bool(self._empty or self._partial.get(slot_nbytes))

    def _extent_with_room(self, slot_nbytes: int, avoid: Extent | None) -> Extent | None:
        partial = self._partial.setdefault(slot_nbytes, {})
        for extent in partial.values():
            if extent is not avoid:
                return extent
        if not self._empty or slot_nbytes > self.extent_nbytes:
            return None
        number = self._empty.pop()
        extent = Extent(number, slot_nbytes, self._owners(self.extent_nbytes // slot_nbytes))
        self._extents[number] = partial[number] = extent
        return extent

    def free(self, offset: int) -> None:
        """Gives a slot back; an extent whose last slot is freed serves any size again."""
        extent = self.extent_of(offset)
        slot = offset % self.extent_nbytes // extent.slot_nbytes
        assert extent.owners[slot], f"slot at {offset} is free already"
        extent.owners[slot] = self._vacant
        extent.free.append(slot)
        self.used_nbytes -= extent.slot_nbytes
        partial = self._partial[extent.slot_nbytes]
        if extent.used_count == 0:
            partial.pop(extent.number, None)
            self._extents[extent.number] = None
            self._empty.append(extent.number)
        else:
            partial[extent.number] = extent

    def claim(self, slot_nbytes: int, offset: int, owner: Any) -> bool:
        """Takes the slot at `offset`, as a record of an earlier run says; False if that can not be.
        For a new allocator; `claimed` must follow the last of them."""
        number, within = divmod(offset, self.extent_nbytes)
        if slot_nbytes < SLOT_ALIGN_NBYTES or within % slot_nbytes or within + slot_nbytes > self.extent_nbytes:
            return False
        if number >= len(self._extents):
            return False
        extent = self._extents[number]
        if extent is None:
            extent = Extent(number, slot_nbytes, self._owners(self.extent_nbytes // slot_nbytes))
            self._extents[number] = extent
        slot = within // slot_nbytes
        if extent.slot_nbytes != slot_nbytes or extent.owners[slot]:
            return False
        extent.owners[slot] = owner
        return True

    def claimed(self) -> None:
        """Lists what all claims left free: once, because taking a slot out of a list takes its length."""
        self._empty = [number for number in range(len(self._extents) - 1, -1, -1) if self._extents[number] is None]
        for extent in self.extents():
            free = (slot for slot in range(len(extent.owners) - 1, -1, -1) if not extent.owners[slot])
            extent.free = array("I", free)
            self.used_nbytes += extent.used_count * extent.slot_nbytes
            if extent.free:
                self._partial.setdefault(extent.slot_nbytes, {})[extent.number] = extent
            else:
                self._partial.setdefault(extent.slot_nbytes, {})

    def extent_of(self, offset: int) -> Extent:
        extent = self._extents[offset // self.extent_nbytes]
        assert extent is not None, f"no extent at {offset}"
        return extent

    def extents(self) -> Iterator[Extent]:
        """Extents in use."""
        return (extent for extent in self._extents if extent is not None)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        wrong = []
        used_nbytes = 0
        for number, extent in enumerate(self._extents):
            if extent is None:
                if self._empty.count(number) != 1:
                    wrong.append(f"extent {number} is unused but not in the list of empty ones once")
                continue
            used_nbytes += extent.used_count * extent.slot_nbytes
            occupied = {i for i, owner in enumerate(extent.owners) if owner}
            if extent.used_count == 0:
                wrong.append(f"extent {number} is empty but still serves {extent.slot_nbytes}-byte slots")
            if occupied & set(extent.free) or len(occupied) + len(set(extent.free)) != len(extent.owners):
                wrong.append(f"extent {number}: free and occupied slots do not add up")
            if bool(extent.free) != (number in self._partial.get(extent.slot_nbytes, {})):
                wrong.append(f"extent {number}: {len(extent.free)} free slots, but listed wrongly as partial")
        if used_nbytes != self.used_nbytes:
            wrong.append(f"{used_nbytes} bytes are in slots, the counter says {self.used_nbytes}")
        return wrong
