"""Choose which pages are evicted from the disk.

Tenants are chosen as in `node/memory/tenant_usage.py`. Among the pages of one tenant, or of all
tenants without a quota, the order is LRU within a slot size, and by whole blocks between sizes.

Busy records (being read or written) stay. Pinned ones are in no pool, and are the newest when their
pin ends. Pages on disk do not move: a block can serve another size when all of its pages can be
evicted at once. No I/O; not thread-safe, the disk tier's lock guards it. Every call does a bounded
amount of work: a search that was cut short continues in the next call.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from kvstore.errors import Exhausted
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.memory.lazy_heap import LazyHeap, OldestBySize
from node.memory.lru import HeldEntries
from node.memory.pins import PINNED_SHARE
from node.memory.tenant_usage import TenantAccount, TenantUsage
from node.slab import Block, SlotAllocator

LOOKED_AT = 256  # busy records skipped, and pins ended, in one search
VICTIMS = 256  # of one search
SIZES_TRIED = 4
AREAS_TRIED = 4  # areas of one size, the coldest first
BLOCKS_TRIED = 16  # blocks of any size, as the last resort
AREA_LOOKED_AT = 4096  # records of an area
AREA_RECORDS = 16  # oldest records of a size, to find its coldest areas


@dataclass
class _Ends:
    """Both ends of the list of one slot size, and the busy records found at its old end."""

    oldest: int = 0
    newest: int = 0
    count: int = 0  # including set-aside records
    aside: HeldEntries[int] = field(default_factory=HeldEntries)


class Links:
    """Link the records of each pool by use; the arrays grow with the records.

    Each record has its pool and its older and newer neighbour. `used_s` belongs to the records.
    """

    def __init__(self, used_s: "array[int]", is_evictable: Callable[[int], bool]) -> None:
        self.used_s = used_s
        self.is_evictable = is_evictable
        self.older = array("I", [0])
        self.newer = array("I", [0])
        self.pool = array("H", [0])
        self.left = 0  # records that the current search may still visit

    @property
    def arrays(self) -> tuple["array[int]", ...]:
        """Return the arrays."""
        return self.older, self.newer, self.pool

    def spend(self) -> bool:
        """Use one step of the search's budget; return whether there was one."""
        self.left -= 1
        return self.left >= 0


class DiskPool:
    """Records of one tenant with a quota, or of all without, in LRU order.

    Records are ordered by use within each slot size. `number` names the pool in `links`.
    """

    def __init__(self, number: int, links: Links) -> None:
        self.number = number
        self._links = links
        self._ends: dict[int, _Ends] = {}
        self._ages = OldestBySize(self._oldest_s, lambda: links.left <= 0)

    @property
    def count(self) -> int:
        """Return the number of records."""
        return sum(ends.count for ends in self._ends.values())

    # ---- life of a record ----------------------------------------------------------------------

    def begin(self, size: int, records: Sequence[int]) -> None:
        """Add all records of a slot size that has none yet, the oldest first."""
        oldest, newest = records[0], records[-1]
        self._ends[size] = _Ends(oldest, newest, len(records))
        self._ages.add(size, self._links.used_s[oldest])
        older, newer, pool = self._links.older, self._links.newer, self._links.pool
        older[oldest] = newer[newest] = 0
        pool[newest] = self.number
        for one, following in pairwise(records):
            newer[one] = following
            older[following] = one
            pool[one] = self.number

    def push_newest(self, record: int, size: int) -> None:
        """Add a record as the newest of its size."""
        ends, links = self._ends_of(size), self._links
        links.pool[record] = self.number
        links.older[record], links.newer[record] = ends.newest, 0
        if ends.newest:
            links.newer[ends.newest] = record
        else:
            ends.oldest = record
        ends.newest = record
        ends.count += 1
        if size not in self._ages:
            self._ages.add(size, links.used_s[record])

    def push_oldest(self, record: int, size: int) -> None:
        """Add a record as the oldest of its size."""
        ends, links = self._ends_of(size), self._links
        links.pool[record] = self.number
        links.older[record], links.newer[record] = 0, ends.oldest
        if ends.oldest:
            links.older[ends.oldest] = record
        else:
            ends.newest = record
        ends.oldest = record
        ends.count += 1
        self._ages.add(size, links.used_s[record])

    def _ends_of(self, size: int) -> _Ends:
        ends = self._ends.get(size)
        if ends is None:
            ends = self._ends[size] = _Ends()
        return ends

    def withdraw(self, record: int, size: int) -> None:
        """Remove a record."""
        ends = self._ends[size]
        if not ends.aside.discard(record):
            self._take_out(ends, record)
        ends.count -= 1
        if not ends.count:
            del self._ends[size]
            self._ages.discard(size)

    def _take_out(self, ends: _Ends, record: int) -> None:
        older, newer = self._links.older[record], self._links.newer[record]
        if older:
            self._links.newer[older] = newer
        else:
            ends.oldest = newer
        if newer:
            self._links.older[newer] = older
        else:
            ends.newest = older

    def give_back(self, record: int, size: int) -> None:
        """Make a record that is not busy any more available for eviction again."""
        if size in self._ends and self._ends[size].aside.give_back(record):
            self._ages.add(size, self._links.used_s[record])

    # ---- oldest records ------------------------------------------------------------------------

    def oldest(self, size: int) -> int:
        """Return the oldest evictable record of a size; 0 for none within the budget."""
        ends, links = self._ends.get(size), self._links
        if ends is None:
            return 0
        record = ends.aside.oldest(links.is_evictable, links.spend)
        while record is None and ends.oldest and links.left > 0:
            first = ends.oldest
            if links.is_evictable(first):
                return first
            links.spend()
            self._take_out(ends, first)
            ends.aside.put(first)
        return record or 0

    def _oldest_s(self, size: int) -> int | None:
        record = self.oldest(size)
        return self._links.used_s[record] if record else None

    def older_sizes(self, than_s: int | None, but: int, count: int) -> list[int]:
        """Return other sizes with an older oldest record (None: any), oldest first."""
        return self._ages.older(than_s, but, count)

    def eldest(self, size: int, count: int) -> Iterator[int]:
        """Yield some of the oldest records of a size."""
        record = self.oldest(size)
        for _ in range(count):
            if not record:
                return
            yield record
            ends = self._ends[size]
            record = ends.oldest if record in ends.aside else self._links.newer[record]

    # ---- status --------------------------------------------------------------------------------

    def records(self) -> Iterator[int]:
        """Yield all records: set-aside ones, then each size's from the oldest on."""
        for ends in self._ends.values():
            yield from ends.aside
            record = ends.oldest
            while record:
                following = self._links.newer[record]
                yield record
                record = following


Owner = TenantAccount[DiskPool]


class DiskLru:
    """The LRU order of published records.

    `offset` (x 4 KiB) and `used_s` belong to the records; `links` must grow with them.
    `owner(record)` is the account of its tenant.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        offset: "array[int]",
        used_s: "array[int]",
        is_evictable: Callable[[int], bool],
        owner: Callable[[int], Owner],
    ) -> None:
        self._slots = slots
        self._offset = offset
        self._used_s = used_s
        self._is_evictable = is_evictable
        self._owner = owner
        self._links = Links(used_s, is_evictable)
        self.links = self._links.arrays
        self._pools: dict[int, DiskPool] = {}
        self._area = range(0)  # area whose records are being evicted
        self.accounts: TenantUsage[DiskPool] = TenantUsage(slots, self._new_pool)
        self._pinned: LazyHeap[int] = LazyHeap()  # records by the end of their pin, s
        self._pinned_blocks: dict[int, int] = {}  # by start: number of pinned records
        self.pinned_nbytes = 0  # bytes of those blocks, which serve no other size
        self._place = 0  # the block that was tried last
        self._area_pool = self.accounts.shared

    def _new_pool(self) -> DiskPool:
        """Make a pool. The first one is for all tenants without a quota.

        Pools without records and account are forgotten.
        """
        if self._pools:
            used = {account.pool.number for account in self.accounts.all()} | {
                self.accounts.shared.number
            }
            self._pools = {
                number: pool for number, pool in self._pools.items() if pool.count or number in used
            }
            self._area = range(0)
        number = min(set(range(len(self._pools) + 1)) - set(self._pools))
        pool = self._pools[number] = DiskPool(number, self._links)
        return pool

    @property
    def count(self) -> int:
        """Return the number of records."""
        return len(self._pinned) + sum(pool.count for pool in self._pools.values())

    def block_of(self, record: int) -> Block:
        """Return the block of a record's slot."""
        return self._slots.block_of(self._offset[record] * SLOT_ALIGN_NBYTES)

    def _size(self, record: int) -> int:
        return self.block_of(record).kind.slot_nbytes

    # ---- life of a record ----------------------------------------------------------------------

    def begin(self, slot_nbytes: int, records: Sequence[int]) -> None:
        """Add all records of a size that has none yet, the oldest first."""
        by_pool: dict[int, array[int]] = {}
        for record in records:
            owner = self._owner(record)
            owner.take(slot_nbytes)
            by_pool.setdefault(owner.pool.number, array("I")).append(record)
        for number, some in by_pool.items():
            self._pools[number].begin(slot_nbytes, some)

    def push_newest(self, record: int) -> None:
        """Add a record as the newest of its size."""
        self._owner(record).pool.push_newest(record, self._size(record))

    def touch(self, record: int, now_s: int) -> None:
        """Mark a record as used now."""
        block = self.block_of(record)
        block.used_sum += now_s - self._used_s[record]
        self._used_s[record] = now_s
        if record not in self._pinned:
            pool = self._pools[self._links.pool[record]]
            pool.withdraw(record, block.kind.slot_nbytes)
            pool.push_newest(record, block.kind.slot_nbytes)

    def withdraw(self, record: int) -> None:
        """Remove a record."""
        if self._pinned.discard(record):
            self._count_pin(record, -1)
        else:
            self._leave_pool(record)

    def _leave_pool(self, record: int) -> None:
        self._pools[self._links.pool[record]].withdraw(record, self._size(record))

    def give_back(self, record: int) -> None:
        """Make a published record that is not busy any more available for eviction again."""
        if record not in self._pinned:
            self._pools[self._links.pool[record]].give_back(record, self._size(record))

    def pin(self, record: int, until_s: int) -> None:
        """Pin a record until a time; 0 ends the pin."""
        if until_s:
            if record not in self._pinned:
                self._leave_pool(record)
                self._count_pin(record, 1)
            self._pinned.put(record, until_s)
        elif self._pinned.discard(record):
            self._end_pin(record)

    def _end_pin(self, record: int) -> None:
        self._count_pin(record, -1)
        self.push_newest(record)

    def _count_pin(self, record: int, more: int) -> None:
        self._owner(record).pins += more
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

    @property
    def pinned_nbytes_max(self) -> int:
        """Return how many bytes pinned pages may occupy: a share of what is usable."""
        return int(self._slots.usable_nbytes * PINNED_SHARE)

    def check_pins(self, records: Iterable[int]) -> None:
        """Raise Exhausted if these records of one tenant cannot be pinned, too."""
        some = set(records)
        blocks = {block.start: block for block in map(self.block_of, some)}
        nbytes = self.pinned_nbytes
        nbytes += sum(
            self._nbytes(block)
            for start, block in blocks.items()
            if start not in self._pinned_blocks
        )
        if nbytes > max(self.pinned_nbytes, self.pinned_nbytes_max):
            raise Exhausted(
                f"with these, pinned pages would occupy more than {self.pinned_nbytes_max} bytes "
                "of the disk (half of disk_nbytes, or of what its file system has space for); "
                "unpin some, or wait until their pins end"
            )
        if new := [record for record in some if record not in self._pinned]:
            self._owner(new[0]).check_pins(len(new))

    def pinned_until_s(self, record: int) -> int:
        """Return when a record's pin ends; 0 if it has none."""
        return self._pinned.key(record) or 0

    # ---- victims -------------------------------------------------------------------------------

    def victims(self, owner: Owner, slot_nbytes: int, now_s: int) -> list[int]:
        """Return records to evict for a page of this tenant and size.

        They are the tenant's own oldest if it is at its quota. Otherwise they are the oldest of
        this size among tenants over their share; or, if another size's oldest is older, all of a
        block with the oldest pages of that size.
        """
        self._links.left = LOOKED_AT
        for record in self._pinned.take(now_s, LOOKED_AT):
            self._end_pin(record)
        if owner.full_for(slot_nbytes):
            return (
                []
                if owner.too_small_for(slot_nbytes)
                else self._own_oldest(owner.pool, slot_nbytes)
            )
        if found := self._area_victims(self._area, self._area_pool):
            return found
        level = self._slots.level(slot_nbytes)
        for pool in self.accounts.victims(owner):
            if found := self._of_pool(pool, slot_nbytes, level):
                return found
        for pool in dict.fromkeys((self.accounts.shared, owner.pool)):
            if found := self._any(level, pool):
                return found
        return []

    def _own_oldest(self, pool: DiskPool, slot_nbytes: int) -> list[int]:
        ours = pool.oldest(slot_nbytes)
        for size in pool.older_sizes(
            self._used_s[ours] if ours else None, but=slot_nbytes, count=1
        ):
            ours = pool.oldest(size)
        return [ours] if ours else []

    def _of_pool(self, pool: DiskPool, slot_nbytes: int, level: int) -> list[int]:
        ours = pool.oldest(slot_nbytes)
        used_s = self._used_s[ours] if ours else None
        for size in pool.older_sizes(used_s, but=slot_nbytes, count=SIZES_TRIED):
            for area in self._areas(pool, size, level):
                if found := self._area_victims(area, pool):
                    return found
        return [ours] if ours else []

    def _any(self, level: int, pool: DiskPool) -> list[int]:
        """Return the records of any block of this level, as a last resort.

        A few blocks are tried; the next call tries others.
        """
        count = self._slots.unit_count >> level
        for _ in range(min(BLOCKS_TRIED, count)):
            self._place = (self._place + 1) % count
            area = self._slots.area((self._place << level) * self._slots.unit_nbytes, level)
            if found := self._area_victims(area, pool):
                return found
        return []

    def _areas(self, pool: DiskPool, size: int, level: int) -> list[range]:
        """Return areas of this level with the oldest records of a slot size, coldest first."""
        areas: dict[int, range] = {}
        for record in pool.eldest(size, AREA_RECORDS):
            area = self._slots.area(self._offset[record] * SLOT_ALIGN_NBYTES, level)
            areas.setdefault(area.start, area)
            if len(areas) == AREAS_TRIED:
                break
        return sorted(areas.values(), key=self._slots.mean_use)

    def _area_victims(self, area: range, pool: DiskPool) -> list[int]:
        """Return the records of an area if all may be evicted; otherwise none."""
        owners = (
            record for block in self._slots.blocks_in(area) for record in block.owners if record
        )
        records = list(islice(owners, AREA_LOOKED_AT))
        pools, number = self._links.pool, pool.number
        may_all_go = all(
            self._is_evictable(r) and r not in self._pinned and pools[r] == number for r in records
        )
        self._area = area if may_all_go and len(records) > VICTIMS else range(0)
        self._area_pool = pool
        return records[:VICTIMS] if may_all_go else []

    def coldest_extent(self) -> range | None:
        """Return the units of an extent with some of the oldest pages and no pinned ones.

        None if the search, which is bounded, finds none.
        """
        self._links.left = LOOKED_AT
        level = self._slots.level_max
        found: dict[int, range] = {}
        for pool in self._pools.values():
            for size in pool.older_sizes(None, but=0, count=SIZES_TRIED):
                found.update((area.start, area) for area in self._areas(pool, size, level))
        return min(
            (area for area in found.values() if not self._has_pins(area)),
            key=self._slots.mean_use,
            default=None,
        )

    def _has_pins(self, area: range) -> bool:
        return any(block.start in self._pinned_blocks for block in self._slots.blocks_in(area))

    # ---- quotas --------------------------------------------------------------------------

    def is_stray(self, record: int) -> bool:
        """Return whether a record's tenant has changed its pool since the record was added."""
        return (
            record not in self._pinned
            and self._links.pool[record] != self._owner(record).pool.number
        )

    def regroup(self, record: int, used_s: int) -> None:
        """Move a stray record to its pool: as the oldest, or the newest if used since `used_s`."""
        pool, size = self._owner(record).pool, self._size(record)
        self._leave_pool(record)
        if self._used_s[record] == used_s:
            pool.push_oldest(record, size)
        else:
            pool.push_newest(record, size)

    # ---- status --------------------------------------------------------------------------------

    def records(self) -> Iterator[int]:
        """Yield pinned and set-aside records, then those of every pool and size, oldest first."""
        yield from self._pinned
        for pool in self._pools.values():
            yield from pool.records()

    def check(self) -> list[str]:
        """Return violated invariants of pins and pools; empty if all is well."""
        wrong = []
        blocks = {block.start: block for block in map(self.block_of, self._pinned)}
        counts = Counter(self.block_of(record).start for record in self._pinned)
        nbytes = sum(map(self._nbytes, blocks.values()))
        if counts != self._pinned_blocks or nbytes != self.pinned_nbytes:
            wrong.append(
                f"{len(counts)} blocks of {nbytes} bytes have pinned records, counted "
                f"{self.pinned_nbytes} bytes"
            )
        pins = Counter(self._owner(record).tenant for record in self._pinned)
        wrong += [
            f"tenant {account.tenant} has {pins[account.tenant]} pins on disk, counted "
            f"{account.pins}"
            for account in self.accounts.all()
            if account.pins != pins[account.tenant]
        ]
        for number, pool in self._pools.items():
            strange = sum(self._links.pool[record] != number for record in pool.records())
            if strange:
                wrong.append(f"{strange} records are in pool {number} and say they are elsewhere")
        return wrong
