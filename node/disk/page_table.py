"""Keep the index of pages on disk in RAM: 56 to 63 bytes a page and its hash, in arrays.

    record r:  mark u32 | namespace u16 | offset u32 (x 4 KiB) | checksum 16
               older u32, newer u32 (LRU) | pool u16 | last use u32 s | expiry u32 s
    hashes:    the whole prefix hash, and a byte for its length (`Hashes`)
    table:     record numbers by mark (`RecordTable`), at most 3/4 full
    slots:     the owner of each, u32

A page is found by its namespace and its whole prefix hash. The mark, 32 bits of Python's own hash
of both, is the position in the table and avoids most comparisons. It has another key in each
process, so similar hashes (counters, say) do not crowd one part of the table. Record 0 is no
record. No I/O, no clock; not thread-safe, the disk tier's lock guards it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from kvstore.checksum import CHECKSUM_NBYTES
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.disk.disk_lru import DiskLru, DiskPool
from node.memory.tenant_usage import TenantAccount
from node.slab import SlotAllocator

BLOCK_SLOTS_MIN = 4  # smaller blocks would cost more than the rest of a page's record
_MIX = 0x9E3779B1  # 2^32 / golden ratio: spreads namespaces over the table
_MARK_MASK = (1 << 32) - 1

RunRow = tuple[bytes, tuple[int, ...]]  # prefix hash, numbers of `node.disk.rows.RUN_HEAD`

BUCKETS = 1024  # of a segment of the table
FULL = BUCKETS * 3 // 4
BUCKET_MASK = BUCKETS - 1
BUCKET_SHIFT = 22  # of a mark's 32 bits
_DEPTH_MAX = 22  # of a mark: its other bits choose the position within a segment

BLOCK_COUNT = 4096  # hashes in a block
_WIDTH_STEP = 8


class Segment:
    """A segment of the table. `buckets`: record numbers, 0 is none.

    `depth`: how many bits its records' marks have in common.
    """

    __slots__ = ("buckets", "count", "depth")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count = 0
        self.buckets = array("I", bytes(4 * BUCKETS))


class RecordTable:
    """Find record numbers by a 32-bit mark with extendible hashing (Fagin et al. 1979).

    Segments have 1,024 positions with open addressing. A full one is split and no other is touched,
    so no insertion gets slower with the number of records.

        mark:  | position in the segment, 10 bits | ... | segment: log2 of their number |

    `mark_of(record)` returns 32 evenly spread bits. Searches read `segments` and `mask`: from `mark
    >> BUCKET_SHIFT` in `segments[mark & mask].buckets` on, up to a 0.
    """

    def __init__(self, mark_of: Callable[[int], int]) -> None:
        self._mark_of = mark_of
        self.segments = [Segment(0)]
        self.mask = 0

    def expect(self, count: int) -> None:
        """Make an empty table that splits little until it has so many records."""
        depth = 0
        while FULL << depth < count:
            depth += 1
        self.segments = [Segment(depth) for _ in range(1 << depth)]
        self.mask = len(self.segments) - 1

    def fill(self, records: Iterable[int]) -> None:
        """Insert many records."""
        mark_of, put = self._mark_of, self._put
        for record in records:
            mark = mark_of(record)
            segment = self.segments[mark & self.mask]
            if segment.count < FULL:
                put(segment, mark, record)
            else:
                self.insert(record)

    def insert(self, record: int) -> None:
        """Insert a record that is not in the table."""
        mark = self._mark_of(record)
        segment = self.segments[mark & self.mask]
        while segment.count >= FULL and segment.depth < _DEPTH_MAX:
            self._split(segment, mark)
            segment = self.segments[mark & self.mask]
        self._put(segment, mark, record)

    def _put(self, segment: Segment, mark: int, record: int) -> None:
        buckets, bucket = segment.buckets, mark >> BUCKET_SHIFT
        while buckets[bucket]:
            bucket = (bucket + 1) & BUCKET_MASK
        buckets[bucket] = record
        segment.count += 1

    def _split(self, full: Segment, mark: int) -> None:
        """Split a segment by the next bit of its records' marks."""
        bit = 1 << full.depth
        if bit > self.mask:
            self.segments += self.segments  # every segment is found under twice as many numbers
            self.mask = len(self.segments) - 1
        halves = Segment(full.depth + 1), Segment(full.depth + 1)
        for record in full.buckets:
            if record:
                moved = self._mark_of(record)
                self._put(halves[moved & bit != 0], moved, record)
        for number in range(mark & (bit - 1), len(self.segments), bit):
            self.segments[number] = halves[number & bit != 0]

    def delete(self, record: int) -> None:
        """Delete a record by backward shift: without tombstones the table never degrades."""
        mark = self._mark_of(record)
        segment = self.segments[mark & self.mask]
        buckets, hole = segment.buckets, mark >> BUCKET_SHIFT
        while buckets[hole] != record:
            hole = (hole + 1) & BUCKET_MASK
        bucket = (hole + 1) & BUCKET_MASK
        while moved := buckets[bucket]:
            if (bucket - (self._mark_of(moved) >> BUCKET_SHIFT)) & BUCKET_MASK >= (
                bucket - hole
            ) & BUCKET_MASK:
                buckets[hole] = moved
                hole = bucket
            bucket = (bucket + 1) & BUCKET_MASK
        buckets[hole] = 0
        segment.count -= 1

    def __contains__(self, record: int) -> bool:
        mark = self._mark_of(record)
        buckets, bucket = self.segments[mark & self.mask].buckets, mark >> BUCKET_SHIFT
        while (found := buckets[bucket]) and found != record:
            bucket = (bucket + 1) & BUCKET_MASK
        return found == record

    def check(self, count: int) -> list[str]:
        """Return violated invariants; empty if all is well."""
        distinct = {id(segment): segment for segment in self.segments}.values()
        wrong = [
            f"a segment has {used} records, counted {segment.count}"
            for segment in distinct
            if (used := sum(1 for record in segment.buckets if record)) != segment.count
        ]
        if (held := sum(segment.count for segment in distinct)) != count:
            wrong.append(f"{held} records in the table, {count} counted")
        return wrong


class Hashes:
    """The whole prefix hash of every record: 16 to 64 bytes each, in blocks of one width.

        block b    BLOCK_COUNT slots of `width` bytes: the hashes of records b x BLOCK_COUNT ...
        lengths    one byte a record: length of its hash

    Engines choose the length of their hashes, and one engine has one length, so a block is as wide
    as its longest hash. Whole hashes, because hashes with an equal part are different pages.
    """

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self._lengths = array("B")

    @property
    def nbytes(self) -> int:
        """Return the memory of all hashes."""
        return len(self._lengths) + sum(map(len, self._blocks))

    def __getitem__(self, record: int) -> bytes:
        block = self._blocks[record // BLOCK_COUNT]
        start = record % BLOCK_COUNT * (len(block) // BLOCK_COUNT)
        return bytes(block[start : start + self._lengths[record]])

    def matches(self, record: int, prefix_hash: bytes) -> bool:
        """Return whether a record has this hash."""
        block = self._blocks[record // BLOCK_COUNT]
        start = record % BLOCK_COUNT * (len(block) // BLOCK_COUNT)
        return block[start : start + self._lengths[record]] == prefix_hash

    def __setitem__(self, record: int, prefix_hash: bytes) -> None:
        number, index = divmod(record, BLOCK_COUNT)
        while number >= len(self._blocks):
            self._blocks.append(bytearray())
            self._lengths.frombytes(bytes(BLOCK_COUNT))
        width, length = len(self._blocks[number]) // BLOCK_COUNT, len(prefix_hash)
        if width < length:
            width = -(-length // _WIDTH_STEP) * _WIDTH_STEP
            self._blocks[number] = _widened(self._blocks[number], width)
        self._blocks[number][index * width : index * width + length] = prefix_hash
        self._lengths[record] = length

    def fill(self, first: int, hashes: Sequence[bytes]) -> None:
        """Set the hashes of consecutive records, whole columns where the widths allow it."""
        done = 0
        while done < len(hashes):
            number, index = divmod(first + done, BLOCK_COUNT)
            some = hashes[done : done + BLOCK_COUNT - index]
            self[first + done] = some[0]  # makes room
            block, length = self._blocks[number], len(some[0])
            joined = b"".join(some)
            if len(block) == BLOCK_COUNT * length and set(map(len, some)) == {length}:
                block[index * length : index * length + len(joined)] = joined
                lengths = array("B", [length]) * len(some)
                self._lengths[first + done : first + done + len(some)] = lengths
            else:
                for position, prefix_hash in enumerate(some, first + done):
                    self[position] = prefix_hash
            done += len(some)


def _widened(block: bytearray, width: int) -> bytearray:
    """Copy hashes into wider slots, column by column: at most 64 copies per block."""
    wider = bytearray(BLOCK_COUNT * width)
    was = len(block) // BLOCK_COUNT
    for column in range(was):
        wider[column::width] = block[column::was]
    return wider


@dataclass
class DiskCounters:
    """Counters since the start; pages unless the name says otherwise."""

    pages_written: int = 0
    pages_read: int = 0
    pages_read_in_part: int = 0  # ranges were read; their bytes are in nbytes_read, too
    pages_evicted: int = 0
    pages_corrupt: int = 0
    # stayed in RAM only: the queue was full, the tier stopped or full of pins
    pages_refused: int = 0
    pages_scrubbed: int = 0
    rows_damaged: int = 0
    no_space_errors: int = 0  # writes that found the file system full
    nbytes_written: int = 0
    nbytes_read: int = 0


class PageTable:
    """Records by key, by slot and by last use.

    `slots` is the region of the disk in which they lie.
    """

    def __init__(self, region_nbytes: int, extent_nbytes: int) -> None:
        self.slots = SlotAllocator(region_nbytes, extent_nbytes, _no_records, BLOCK_SLOTS_MIN)
        self._hashes = Hashes()
        self._mark = array("I", [0])
        self._namespace = array("H", [0])
        self._offset = array("I", [0])
        self._used_s = array("I", [0])
        self._expiry_s = array("I", [0])
        self._checksum = array("Q", bytes(CHECKSUM_NBYTES))
        self._free = array("I")
        self._refused = array("I")  # records that a start left free
        self._table = RecordTable(self._mark.__getitem__)
        self._busy: dict[int, int] = {}  # records that are being read or written -> number of uses
        self._doomed: set[int] = set()  # removed, but their slot waits for a use to end
        self._order = DiskLru(
            self.slots,
            self._offset,
            self._used_s,
            lambda record: record not in self._busy,
            lambda record: self.account_of(self._namespace[record]),
        )
        self.accounts = self._order.accounts
        self._nobody = self.accounts.of("")
        self.account_of: Callable[[int], TenantAccount[DiskPool]] = lambda namespace: self._nobody
        self.count = 0

    # ---- find ----------------------------------------------------------------------------

    def find(self, namespace: int, prefix_hash: bytes) -> int:
        """Number of the record, 0 if there is none."""
        table, marks, matches = self._table, self._mark, self._hashes.matches
        mark = (hash(prefix_hash) ^ namespace * _MIX) & _MARK_MASK  # _mark, without the call
        buckets, bucket = table.segments[mark & table.mask].buckets, mark >> BUCKET_SHIFT
        while record := buckets[bucket]:
            if (
                marks[record] == mark
                and self._namespace[record] == namespace
                and matches(record, prefix_hash)
            ):
                return record
            bucket = (bucket + 1) & BUCKET_MASK
        return 0

    # ---- life of a record ----------------------------------------------------------------------

    def reserve(self, namespace: int, prefix_hash: bytes, slot_nbytes: int) -> int:
        """Return a busy record with a slot, not yet found; 0 without a slot or at the quota."""
        account = self.account_of(namespace)
        if account.full_for(slot_nbytes):
            return 0
        record = self._new(namespace, prefix_hash)
        offset = self.slots.allocate(slot_nbytes, record)
        if offset is None:
            self._free.append(record)
            return 0
        account.take(slot_nbytes)
        self._offset[record] = offset // SLOT_ALIGN_NBYTES
        self._busy[record] = 1
        return record

    def restore(self, namespace: int, rows: Sequence[RunRow], now_s: int) -> set[bytes]:
        """Restore pages of an earlier run; return hashes whose slots are taken or impossible.

        Keys of rows are distinct, so no search for the key is made. The pages can be found after
        `restored`. A start waits for a million of these: columns are copied as a whole.
        """
        end = self.slots.region_nbytes
        # Most rows of a disk that was made smaller: records of refused pages would stay unused
        if beyond := {prefix_hash for prefix_hash, (offset, *_) in rows if offset >= end}:
            rows = [row for row in rows if row[0] not in beyond]
        if not rows:
            return beyond
        count, first = len(rows), self._consecutive(len(rows))
        new = slice(first, first + count)
        hashes, heads = zip(*rows, strict=True)
        offsets, sizes, _, used, expiry, low, high = zip(*heads, strict=True)
        refused = self.slots.claim(zip(offsets, sizes, strict=True), range(first, first + count))
        self._refused.extend(first + position for position in refused)
        self._hashes.fill(first, hashes)
        self._mark[new] = array("I", [_mark(namespace, prefix_hash) for prefix_hash in hashes])
        self._namespace[new] = array("H", [namespace]) * count
        self._offset[new] = array("I", [offset // SLOT_ALIGN_NBYTES for offset in offsets])
        self._used_s[new] = array("I", [min(used_s, now_s) for used_s in used])
        self._expiry_s[new] = array("I", expiry)
        sums = slice(2 * first, 2 * (first + count))
        self._checksum[sums] = array("Q", chain.from_iterable(zip(low, high, strict=True)))
        self.count += count - len(refused)
        return beyond.union(hashes[position] for position in refused)

    def restored(self) -> None:
        """Sort all restored records by last use, and make them available.

        Until here rows are kept in arrays only: a million small objects would fragment the heap.
        """
        self.slots.claimed()
        self._free.extend(self._refused)
        del self._refused[:]
        self._table.expect(self.count)
        by_size: dict[int, array[int]] = {}
        for block in self.slots.blocks():
            records = [record for record in block.owners if record]
            by_size.setdefault(block.kind.slot_nbytes, array("I")).extend(records)
            block.used_sum = sum(map(self._used_s.__getitem__, records))
        for slot_nbytes, numbers in by_size.items():
            self._order.begin(slot_nbytes, sorted(numbers, key=self._used_s.__getitem__))
            self._table.fill(numbers)

    def _new(self, namespace: int, prefix_hash: bytes) -> int:
        if not self._free:
            self._grow()
        record = self._free.pop()
        self._hashes[record] = prefix_hash
        self._mark[record] = _mark(namespace, prefix_hash)
        self._namespace[record] = namespace
        return record

    def _consecutive(self, count: int) -> int:
        """Take so many records of a new table and return the first."""
        while len(self._free) < count:
            self._grow()
        first = self._free[-1]
        del self._free[-count:]
        return first

    def _grow(self) -> None:
        """Add records below the free ones, so that numbers are taken in ascending order."""
        first = len(self._mark)
        for numbers in (
            self._mark,
            self._namespace,
            self._offset,
            *self._order.links,
            self._used_s,
            self._expiry_s,
        ):
            numbers.frombytes(bytes(numbers.itemsize * BLOCK_COUNT))
        self._checksum.frombytes(bytes(CHECKSUM_NBYTES * BLOCK_COUNT))
        self._free = array("I", range(first + BLOCK_COUNT - 1, first - 1, -1)) + self._free

    def publish(self, record: int, checksum: bytes, used_s: int, expiry_s: int = 0) -> None:
        """Make a written page available as the newest of its size."""
        self._checksum[2 * record : 2 * record + 2] = array("Q", checksum)
        self._expiry_s[record] = expiry_s
        self._used_s[record] = used_s
        self._order.block_of(record).used_sum += used_s
        self._table.insert(record)
        self._order.push_newest(record)
        self.count += 1
        self.end_use(record)

    def cancel(self, record: int) -> None:
        """Give a reserved record back."""
        del self._busy[record]
        self._give(record)
        self._release(record)

    def remove(self, record: int) -> None:
        """Forget a published record; its slot is freed when its last use ends."""
        self._order.block_of(record).used_sum -= self._used_s[record]
        self._order.withdraw(record)
        self._give(record)
        self._table.delete(record)
        self.count -= 1
        if record in self._busy:
            self._doomed.add(record)
        else:
            self._release(record)

    def _give(self, record: int) -> None:
        """Credit a record's bytes to its tenant.

        A page that is still being read counts to no tenant, because its number may belong to
        another namespace.
        """
        self.account_of(self._namespace[record]).give(self._order.block_of(record).kind.slot_nbytes)

    def _release(self, record: int) -> None:
        self.slots.free(self.offset(record))
        self._free.append(record)

    # ---- use -----------------------------------------------------------------------------

    def begin_use(self, record: int) -> None:
        """Keep a record's slot unchanged until `end_use`."""
        self._busy[record] = self._busy.get(record, 0) + 1

    def end_use(self, record: int) -> None:
        """End a use; free a removed record's slot after the last one."""
        left = self._busy[record] - 1
        if left:
            self._busy[record] = left
            return
        del self._busy[record]
        if record in self._doomed:
            self._doomed.discard(record)
            self._release(record)
            return
        self._order.give_back(record)

    def is_published(self, record: int, namespace: int) -> bool:
        """Return whether a record is an available page of this namespace."""
        return (
            record < self.number_end
            and self._namespace[record] == namespace
            and self.can_be_found(record)
        )

    def can_be_found(self, record: int) -> bool:
        """Return whether a record is published and not removed."""
        return record in self._table

    @property
    def number_end(self) -> int:
        """Record numbers are below this."""
        return len(self._namespace)

    def busy(self, record: int) -> bool:
        """Return whether a record is in use."""
        return record in self._busy

    def touch(self, record: int, now_s: int) -> None:
        """Mark a record as used now."""
        self._order.touch(record, now_s)

    def pin(self, record: int, until_s: int) -> None:
        """Pin a record until a time, after which it is the newest; 0 ends the pin."""
        self._order.pin(record, until_s)

    def check_pins(self, records: Iterable[int]) -> None:
        """Raise Exhausted if these published records cannot be pinned, too."""
        self._order.check_pins(records)

    def victims(self, namespace: int, slot_nbytes: int, now_s: int) -> list[int]:
        """Return records to evict for a slot of this size; empty if none may be evicted.

        If no slot is free afterwards, call it again.
        """
        return self._order.victims(self.account_of(namespace), slot_nbytes, now_s)

    def coldest_extent(self) -> range | None:
        """Return the units of an extent whose pages are old and unpinned; None without one."""
        return self._order.coldest_extent()

    def published_in(self, area: range, count_max: int) -> list[int]:
        """Return some records that can be found, with slots in an area."""
        owners = (
            record for block in self.slots.blocks_in(area) for record in block.owners if record
        )
        return list(islice(filter(self.can_be_found, owners), count_max))

    # ---- quotas --------------------------------------------------------------------------

    def strays(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (last use, record) of records whose tenant changed its pool, newest first."""
        found = (
            record
            for record in range(first, end)
            if record in self._table and self._order.is_stray(record)
        )
        return sorted(((self._used_s[record], record) for record in found), reverse=True)

    def regroup(self, record: int, used_s: int) -> None:
        """Move a stray record to its pool; from newest to oldest they keep their order."""
        if record in self._table and self._order.is_stray(record):
            self._order.regroup(record, used_s)

    # ---- status --------------------------------------------------------------------------------

    def offset(self, record: int) -> int:
        """Return the offset of a record's slot."""
        return self._offset[record] * SLOT_ALIGN_NBYTES

    def key(self, record: int) -> tuple[int, bytes]:
        """Return (namespace number, prefix hash)."""
        return self._namespace[record], self._hashes[record]

    def checksum(self, record: int) -> bytes:
        """Return a record's checksum."""
        return self._checksum[2 * record : 2 * record + 2].tobytes()

    def used_s(self, record: int) -> int:
        """Return a record's last use."""
        return self._used_s[record]

    def expiry_s(self, record: int) -> int:
        """Return when a page expires; 0 if never."""
        return self._expiry_s[record]

    def pinned_until_s(self, record: int) -> int:
        """Return when a record's pin ends; 0 if it has none."""
        return self._order.pinned_until_s(record)

    def records(self) -> Iterator[int]:
        """Yield published records: unevictable ones, then each size's, oldest first."""
        return self._order.records()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        wrong = self.slots.check() + self._order.check()
        published = list(self.records())
        if len(published) != self.count or self._order.count != self.count:
            wrong.append(f"{len(published)} records are linked, {self.count} counted")
        wrong += self._table.check(self.count)
        wrong += [
            f"record {record} is linked but can not be found"
            for record in published
            if record not in self._table
        ]
        reserved = set(self._busy) - set(published)
        owned = [record for block in self.slots.blocks() for record in block.owners if record]
        if sorted(owned) != sorted([*published, *reserved]):
            wrong.append(
                f"{len(owned)} slots are owned, {len(published)} records published, "
                f"{len(reserved)} reserved"
            )
        for block in self.slots.blocks():
            total = sum(
                self._used_s[record] for record in block.owners if record and record not in reserved
            )
            if total != block.used_sum:
                wrong.append(
                    f"disk block {block.start}: last uses sum to {total}, recorded {block.used_sum}"
                )
        found: dict[str, dict[int, int]] = {}
        for record in owned:
            if record not in self._doomed:
                counts = found.setdefault(self.account_of(self._namespace[record]).tenant, {})
                size = self._order.block_of(record).kind.slot_nbytes
                counts[size] = counts.get(size, 0) + 1
        return wrong + self.accounts.check(found)


def _mark(namespace: int, prefix_hash: bytes) -> int:
    return (hash(prefix_hash) ^ namespace * _MIX) & _MARK_MASK


def _no_records(count: int) -> array[int]:
    return array("I", bytes(4 * count))
