"""In which order pages leave the disk: by last use within a slot size, by whole blocks between sizes.

Busy records (being read or written) stay; pinned ones are in no list, and the newest when their pin ends.
Pure; not thread-safe, the disk tier's lock guards it. No call takes longer the more records, sizes or pins
there are: a search that was cut short goes on with the next.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from kvstore.errors import Exhausted
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.ram.agenda import Agenda
from node.ram.ages import Ages
from node.ram.aside import Aside
from node.ram.pins import PINNED_SHARE
from node.slots import Block, SlotAllocator

LOOKED_AT = 256  # busy records that are stepped over, and pins that are ended, in one search
VICTIMS = 256  # of one search
SIZES_TRIED = 4
AREAS_TRIED = 4  # places of one size, the coldest first
PLACES_TRIED = 16  # of any size, when nothing else is left
AREA_LOOKED_AT = 4096  # records of an area
AREA_RECORDS = 16  # oldest records of a size, in search of them


@dataclass
class _Ends:
    """Both ends of the list of one slot size, and the busy records that were met at its old end."""

    oldest: int = 0
    newest: int = 0
    count: int = 0  # those aside included
    aside: Aside[int] = field(default_factory=Aside)


class RecordOrder:
    """Of published records. `offset` (x 4 KiB) and `used_s` are the records' own; `links` must grow with them."""

    def __init__(
        self, slots: SlotAllocator, offset: "array[int]", used_s: "array[int]", may_go: Callable[[int], bool]
    ) -> None:
        self._slots = slots
        self._offset = offset
        self._used_s = used_s
        self._may_go = may_go
        self._older = array("I", [0])
        self._newer = array("I", [0])
        self.links = (self._older, self._newer)
        self._ends: dict[int, _Ends] = {}
        self._pinned: Agenda[int] = Agenda()  # records by the end of their pin, s
        self._pinned_blocks: dict[int, int] = {}  # by start: how many pinned records are there
        self.pinned_nbytes = 0  # of those blocks, which serve no other size
        self.pinned_nbytes_max = int(slots.region_nbytes * PINNED_SHARE)
        self._ages = Ages(self._oldest_s, lambda: self._left <= 0)
        self._place = 0  # that was tried last
        self._left = 0  # records that may be looked at still
        self._area = range(0)  # whose records are leaving, but have not all gone

    @property
    def count(self) -> int:
        return len(self._pinned) + sum(ends.count for ends in self._ends.values())

    def block_of(self, record: int) -> Block:
        return self._slots.block_of(self._offset[record] * SLOT_ALIGN_NBYTES)

    def _size(self, record: int) -> int:
        return self.block_of(record).kind.slot_nbytes

    # ---- a record's life -----------------------------------------------------------------

    def begin(self, slot_nbytes: int, records: Sequence[int]) -> None:
        """All records of a size that has none yet, the oldest first."""
        oldest, newest = records[0], records[-1]
        self._ends[slot_nbytes] = _Ends(oldest, newest, len(records))
        self._ages.add(slot_nbytes, self._used_s[oldest])
        older, newer = self._older, self._newer
        older[oldest] = newer[newest] = 0
        for one, following in pairwise(records):
            newer[one] = following
            older[following] = one

    def push_newest(self, record: int) -> None:
        size = self._size(record)
        ends = self._ends.get(size)
        if ends is None:
            ends = self._ends[size] = _Ends()
        self._older[record], self._newer[record] = ends.newest, 0
        if ends.newest:
            self._newer[ends.newest] = record
        else:
            ends.oldest = record
        ends.newest = record
        ends.count += 1
        if size not in self._ages:
            self._ages.add(size, self._used_s[record])

    def touch(self, record: int, now_s: int) -> None:
        self.block_of(record).used_sum += now_s - self._used_s[record]
        self._used_s[record] = now_s
        if record not in self._pinned:
            self._unlink(record)
            self.push_newest(record)

    def withdraw(self, record: int) -> None:
        if self._pinned.discard(record):
            self._count_pin(record, -1)
        else:
            self._unlink(record)

    def give_back(self, record: int) -> None:
        """A published record is not busy any more."""
        size = self._size(record)
        if size in self._ends and self._ends[size].aside.give_back(record):
            self._ages.add(size, self._used_s[record])

    def pin(self, record: int, until_s: int) -> None:
        if until_s:
            if record not in self._pinned:
                self._unlink(record)
                self._count_pin(record, 1)
            self._pinned.put(record, until_s)
        elif self._pinned.discard(record):
            self._end_pin(record)

    def _end_pin(self, record: int) -> None:
        self._count_pin(record, -1)
        self.push_newest(record)

    def _count_pin(self, record: int, more: int) -> None:
        block = self.block_of(record)
        count = self._pinned_blocks.get(block.start, 0)
        if not count:
            self.pinned_nbytes += self._nbytes(block)
        if count + more:
            self._pinned_blocks[block.start] = count + more
        else:
            del self._pinned_blocks[block.start]
            self.pinned_nbytes -= self._nbytes(block)

    def _nbytes(self, block: Block) -> int:
        return self._slots.unit_nbytes << block.kind.level

    def check_pins(self, records: Iterable[int]) -> None:
        """Raises Exhausted if these can not be pinned too."""
        blocks = {block.start: block for block in map(self.block_of, records)}
        nbytes = self.pinned_nbytes
        nbytes += sum(self._nbytes(block) for start, block in blocks.items() if start not in self._pinned_blocks)
        if nbytes > max(self.pinned_nbytes, self.pinned_nbytes_max):
            raise Exhausted(
                f"with these, pinned pages would keep {nbytes} bytes of the disk from others, at most "
                f"{self.pinned_nbytes_max} may be kept (half of disk_nbytes); unpin some, or wait until their pins end"
            )

    def pinned_until_s(self, record: int) -> int:
        return self._pinned.key(record) or 0

    def _unlink(self, record: int) -> None:
        size = self._size(record)
        ends = self._ends[size]
        if not ends.aside.discard(record):
            self._take_out(ends, record)
        ends.count -= 1
        if not ends.count:
            del self._ends[size]
            self._ages.discard(size)

    def _take_out(self, ends: _Ends, record: int) -> None:
        older, newer = self._older[record], self._newer[record]
        if older:
            self._newer[older] = newer
        else:
            ends.oldest = newer
        if newer:
            self._older[newer] = older
        else:
            ends.newest = older

    # ---- who goes next -------------------------------------------------------------------

    def victims(self, slot_nbytes: int, now_s: int) -> list[int]:
        """The oldest of this size, or, if another size's oldest is older, what lies in the place of a block
        where the oldest pages of that size are; so many at a time."""
        self._left = LOOKED_AT
        for record in self._pinned.take(now_s, LOOKED_AT):
            self._end_pin(record)
        if found := self._leaving(self._area):
            return found
        ours = self._oldest(slot_nbytes)
        used_s = self._used_s[ours] if ours else None
        for size in self._ages.older(used_s, but=slot_nbytes, count=SIZES_TRIED):
            for area in self._areas(size, self._slots.level(slot_nbytes)):
                if found := self._leaving(area):
                    return found
        return [ours] if ours else self._any(self._slots.level(slot_nbytes))

    def _any(self, level: int) -> list[int]:
        """The last resort: what lies in any place of this level. A few are tried, the next call tries others."""
        count = self._slots.unit_count >> level
        for _ in range(min(PLACES_TRIED, count)):
            self._place = (self._place + 1) % count
            area = self._slots.area((self._place << level) * self._slots.unit_nbytes, level)
            if found := self._leaving(area):
                return found
        return []

    def _areas(self, size: int, level: int) -> list[range]:
        """Places for a block of this level where the oldest records of a slot size lie, the coldest first."""
        areas: dict[int, range] = {}
        record = self._oldest(size)
        for _ in range(AREA_RECORDS):
            if not record or len(areas) == AREAS_TRIED:
                break
            area = self._slots.area(self._offset[record] * SLOT_ALIGN_NBYTES, level)
            areas.setdefault(area.start, area)
            ends = self._ends[size]
            record = ends.oldest if record in ends.aside else self._newer[record]
        return sorted(areas.values(), key=self._slots.mean_use)

    def _leaving(self, area: range) -> list[int]:
        """Records there, if they may all go, as far as that is looked at; else none."""
        owners = (record for block in self._slots.blocks_in(area) for record in block.owners if record)
        records = list(islice(owners, AREA_LOOKED_AT))
        may_all_go = all(self._may_go(record) and record not in self._pinned for record in records)
        self._area = area if may_all_go and len(records) > VICTIMS else range(0)
        return records[:VICTIMS] if may_all_go else []

    def _oldest_s(self, slot_nbytes: int) -> int | None:
        record = self._oldest(slot_nbytes)
        return self._used_s[record] if record else None

    def _oldest(self, slot_nbytes: int) -> int:
        """0: none of this size may go, or enough were looked at."""
        ends = self._ends.get(slot_nbytes)
        if ends is None:
            return 0
        record = ends.aside.oldest(self._may_go, self._look)
        while record is None and ends.oldest and self._left > 0:
            first = ends.oldest
            if self._may_go(first):
                return first
            self._look()
            self._take_out(ends, first)
            ends.aside.put(first)
        return record or 0

    def _look(self) -> bool:
        self._left -= 1
        return self._left >= 0

    # ---- tell ----------------------------------------------------------------------------

    def records(self) -> Iterator[int]:
        """Pinned records and those aside, then those of every size, oldest first within a size."""
        yield from self._pinned
        for ends in self._ends.values():
            yield from ends.aside
            record = ends.oldest
            while record:
                following = self._newer[record]
                yield record
                record = following

    def check(self) -> list[str]:
        """Violations of what must always hold about pins; empty if all is well."""
        blocks = {block.start: block for block in map(self.block_of, self._pinned)}
        counts = Counter(self.block_of(record).start for record in self._pinned)
        nbytes = sum(map(self._nbytes, blocks.values()))
        if counts == self._pinned_blocks and nbytes == self.pinned_nbytes:
            return []
        return [f"{len(counts)} blocks of {nbytes} bytes have pinned records, counted {self.pinned_nbytes} bytes"]
