"""Find where each page is on disk: the node's index in RAM.

    records       by key, by slot, by last use
    namespace_ids short numbers of namespaces
    tombstones    keys of rows to delete no later than with the next pages
    syncs         which of the records survive power loss

No I/O and no clock. Not thread-safe: the disk tier's lock guards it.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import Namespace
from kvstore.messages import namespace_message, parse_namespace
from node.disk.disk_lru import DiskPool
from node.disk.encryption import PLAIN, DiskLocation, Vault, disk_location
from node.disk.extents import Slot
from node.disk.page_table import DiskCounters, PageTable
from node.disk.rows import PageRow, PageRun, is_expired, is_page_key, namespace_key, page_key
from node.memory.changes import ChangeRing
from node.memory.lower_tier import LowerTierInfo
from node.memory.page import Page, State
from node.memory.tenant_usage import TenantAccount

# Numbers of namespaces have 16 bits, and a salt per request makes many namespaces: beyond this
# count, the numbers of namespaces without pages are reused.
KEPT = 1 << 12
BLOCK_KEYS = 1 << 14  # tombstones in a block: as many as one order to the I/O process has
AGAIN = -1  # no record number
# Records of a removed namespace visited under one lock: a millisecond or two.
FORGET_LOOKED_AT = 4096
FORGOTTEN = 256


class RowBatch(NamedTuple):
    """One batch of rows: new namespaces, new pages, keys to delete.

    A `partial` one has only keys to delete, and more follow: pages come with the last, because
    their slots and keys may be those of deleted ones.
    """

    namespaces: dict[int, bytes]
    pages: list[PageRow]
    deleted: list[bytes]
    partial: bool

    def deleted_pages(self) -> list[bytes]:
        """Return the page keys to delete again if a sync fails.

        Namespace keys are left out: another namespace may have the number by then.
        """
        return [key for key in self.deleted if is_page_key(key)]


class Borrowed(NamedTuple):
    """A page that is being verified.

    Its number may belong to another namespace before that is done.
    """

    record: int
    space: Namespace
    prefix_hash: bytes
    location: DiskLocation
    checksum: bytes


class NamespaceIds:
    """Give namespaces on disk short numbers: rows and records have 2 bytes instead of 16.

    A namespace has one number and one row; 0 is no number. `keys` holds the page key by number,
    empty without encryption, `counts` the pages on disk, `new` the namespaces without a row yet.
    """

    def __init__(
        self, account_of: Callable[[str], TenantAccount[DiskPool]], vault: Vault = PLAIN
    ) -> None:
        self._account_of = account_of
        self.accounts: dict[int, TenantAccount[DiskPool]] = {}  # of their tenants
        self._vault = vault
        self.values: dict[int, Namespace] = {}
        self.keys: dict[int, bytes] = {}
        self.counts: Counter[int] = Counter()
        self.new: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    @property
    def encrypted(self) -> bool:
        """Return whether pages are encrypted."""
        return bool(self._vault.mark)

    def known(self, digest: bytes) -> int:
        """Return a namespace's number; 0 if it has none."""
        return self._numbers.get(digest, 0)

    def restore(self, number: int, row: bytes) -> str:
        """Restore a namespace from its row; return why that is impossible, or an empty text."""
        try:
            key, description = self._vault.unwrap(namespace_key(number), row)
            value = parse_namespace(description)
        except InvalidRequest as error:
            return str(error)
        if value.digest in self._numbers:
            return f"it is the second one of namespace {value.digest.hex()}"
        self._add(value, number, key)
        return ""

    def _add(self, value: Namespace, number: int, key: bytes) -> None:
        self._numbers[value.digest], self.values[number], self.keys[number] = number, value, key
        self.accounts[number] = self._account_of(value.tenant)

    def number(self, value: Namespace) -> int:
        """Return the namespace's number; a new one is written with the next rows."""
        number = self.known(value.digest)
        if not number:
            number = next(free for free in itertools.count(1) if free not in self.values)
            key = self._vault.new_key()
            self._add(value, number, key)
            description = namespace_message(value).SerializeToString()
            self.new[number] = self._vault.wrap(namespace_key(number), key, description)
        return number

    def take_new(self) -> dict[int, bytes]:
        """Return the new namespaces and forget that they are new."""
        new, self.new = self.new, {}
        return new

    @property
    def crowded(self) -> bool:
        """Return whether too many namespaces are kept."""
        return len(self.values) >= KEPT

    def drop(self, number: int) -> None:
        """Forget a namespace without pages; its row must be deleted, see `drop_empty`."""
        del self._numbers[self.values.pop(number).digest]
        del self.counts[number], self.keys[number], self.accounts[number]
        self.new.pop(number, None)

    def drop_empty(self) -> list[int]:
        """Forget namespaces without pages and return their numbers.

        Their rows must be deleted before a namespace gets another number, or its pages would be
        found under the wrong number.
        """
        empty = [number for number in self.values if not self.counts[number]]
        for number in empty:
            self.drop(number)
        return empty


class SyncTracker:
    """Track which pages on disk are on the medium, and so survive power loss.

    Records are named by number.

    The rule: a sync covers the writes before its begin. Each batch of rows gets the next number; a
    sync takes the last number when it begins, and batches up to that number are safe when it ends.
    Pages of an earlier run have number 0 and are unsafe until the first sync: that run may have
    been killed, and its last writes may be in the memory of the host or of the device.

    After a failed sync it is unknown what is on the medium, and a second one may succeed without
    it. So from then on nothing becomes safe until all pages written since the last successful sync
    are forgotten. (Pages of an earlier run stay: a restart would trust them as much.)
    """

    def __init__(self) -> None:
        self._written = 0  # number of the last batch
        self._synced = -1  # batches up to this one are safe; -1: not even pages of an earlier run
        self._unsafe: dict[int, int] = {}  # record -> its batch, in the order of batches
        # A batch, and the keys of pages' rows that were deleted with it, never visited one by one.
        self._deleted: deque[tuple[int, list[bytes]]] = deque()
        self.failed = False

    @property
    def unsafe_count(self) -> int:
        """Return how many records of this run are not durable, or were not when forgotten."""
        return len(self._unsafe)

    @property
    def pending(self) -> bool:
        """Return whether a sync would make anything durable, even a deletion."""
        return self._synced < self._written

    def wrote(self, records: Iterable[int], deleted: list[bytes]) -> None:
        """Note that these records were written and the rows with these keys deleted."""
        self._written += 1
        if deleted:
            self._deleted.append((self._written, deleted))
        for record in records:
            self._unsafe.pop(record, None)
            self._unsafe[record] = self._written

    def is_safe(self, record: int) -> bool:
        """Return whether a record is durable."""
        return self._synced >= 0 and record not in self._unsafe

    def begin_sync(self) -> int:
        """Return a mark for `end_sync`."""
        return self._written

    def end_sync(self, mark: int) -> list[list[bytes]]:
        """Note that the sync that took `mark` has worked; return keys that need not be kept.

        They may be millions, so the caller frees them without the lock.
        """
        if self.failed:
            return []
        self._synced = mark
        self._unsafe = {record: batch for record, batch in self._unsafe.items() if batch > mark}
        safe = []
        while self._deleted and self._deleted[0][0] <= mark:
            safe.append(self._deleted.popleft()[1])
        return safe

    def fail_sync(self) -> None:
        """Note that a sync failed."""
        self.failed = True

    def begin_anew(self) -> tuple[list[int], list[list[bytes]]]:
        """Return, after failed syncs, the records to forget and the keys to delete again."""
        if not self.failed:
            return [], []
        doubtful, self._unsafe, self.failed = list(self._unsafe), {}, False
        deleted = [keys for _, keys in self._deleted]
        self._deleted.clear()
        return doubtful, deleted


class Tombstones:
    """Keys of rows that are to be deleted, in blocks.

    Millions may come at once, after a start or with a namespace. No call takes longer the more
    there are.
    """

    def __init__(self) -> None:
        self._full: list[list[bytes]] = []
        self._last: list[bytes] = []
        self.count = 0

    def add(self, key: bytes) -> None:
        """Add the key of a row to delete."""
        self._last.append(key)
        self.count += 1
        if len(self._last) >= BLOCK_KEYS:
            self._full.append(self._last)
            self._last = []

    def take(self) -> list[bytes]:
        """Take some BLOCK_KEYS keys in any order; empty if none are left."""
        if self._full:
            block = self._full.pop()
        else:
            block, self._last = self._last, []
        self.count -= len(block)
        return block

    def put_back(self, blocks: Iterable[list[bytes]]) -> None:
        """Return keys that were taken."""
        for block in blocks:
            self._full.append(block)
            self.count += len(block)


class DiskIndex:
    """Find pages on disk and decide which rows to write and delete.

    A page can be found from `publish` until it is forgotten. Its row is deleted no later than in
    the batch that reuses its slot.
    """

    def __init__(self, records: PageTable, vault: Vault = PLAIN) -> None:
        self.records = records
        self.namespace_ids = NamespaceIds(records.accounts.of, vault)
        records.account_of = self.namespace_ids.accounts.__getitem__
        self.counters = DiskCounters()
        self.tombstones = Tombstones()
        self._dropped: Counter[str] = Counter()  # rows at the start, by cause
        self.syncs = SyncTracker()
        self.empty_extents: frozenset[int] = frozenset()  # at the start
        self.changes: ChangeRing | None = None  # with readers of the feed

    # ---- start ---------------------------------------------------------------------------

    def restore_pages(self, run: PageRun, now_s: int) -> None:
        """Restore pages' rows, and schedule the deletion of those that cannot be used.

        Reasons are an unknown namespace, an expired page, an impossible slot and a wrong checksum.
        """
        self.counters.rows_damaged += len(run.damaged)
        self._drop("damaged", len(run.damaged))
        if run.namespace in self.namespace_ids.values:
            rows = list(run.rows())
            if self.empty_extents or any(expiry_s for _, (*_, expiry_s, _, _) in rows):
                rows = [row for row in rows if self._is_usable(row[1], now_s)]
            refused = self.records.restore(run.namespace, rows, now_s)
            self.namespace_ids.counts[run.namespace] += len(rows) - len(refused)
            self._drop(
                "with an impossible slot (disk_nbytes was reduced, or it overlaps another page's)",
                len(refused),
            )
        else:
            rows, refused = [], set()
            self._drop("of an unknown namespace", len(run.hashes))
        for key in run.damaged:
            self.tombstones.add(key)
        if refused or len(rows) < len(run.hashes):
            there = {prefix_hash for prefix_hash, _ in rows} - refused
            for prefix_hash in run.hashes:
                if prefix_hash not in there:
                    self.tombstones.add(page_key(run.namespace, prefix_hash))

    def _is_usable(self, head: tuple[int, ...], now_s: int) -> bool:
        """Return whether a page's extent is there and its time to live is not over."""
        offset, _, stored_s, _, expiry_s, *_ = head
        if offset // self.records.slots.extent_nbytes in self.empty_extents:
            self._drop("in an extent without blocks (the file system was full, or it is gone)")
            return False
        return not expiry_s or not is_expired(stored_s, expiry_s, now_s)

    def _drop(self, why: str, count: int = 1) -> None:
        if count:
            self._dropped[why] += count

    def dropped_rows(self) -> str:
        """Return how many page rows could not be used, and why; expired ones are left out."""
        return ", ".join(f"{count} {cause}" for cause, count in self._dropped.items())

    def restore_namespace(self, number: int, row: bytes) -> str:
        """Restore a namespace's row; return what is wrong with it, or an empty text."""
        problem = self.namespace_ids.restore(number, row)
        if not problem:
            return ""
        self.counters.rows_damaged += 1
        self.tombstones.add(namespace_key(number))
        return f"row {number} of namespaces is damaged, its pages are dropped: {problem}"

    def restored(self, open_namespace: Callable[[Namespace, bytes], object]) -> list[str]:
        """Finish the restore: open namespaces that have pages and forget the others.

        Return which could not be opened and why; their pages stay but cannot be requested.
        """
        self.records.restored()
        self.drop_empty_spaces()
        problems = []
        for value in self.namespace_ids.values.values():
            try:
                open_namespace(value, value.digest)
            except KVStoreError as error:  # its pages are larger than this node's extents
                problems.append(
                    f"namespace {value.digest.hex()} is on disk but can not be opened: {error}"
                )
        return problems

    # ---- find ----------------------------------------------------------------------------

    def find(self, digest: bytes, prefix_hash: bytes, now_s: int) -> int:
        """Return the record of a page, 0 for none; an expired one is forgotten."""
        record = self.records.find(self.namespace_ids.known(digest), prefix_hash)
        if record and 0 < self.records.expiry_s(record) <= now_s:
            self.forget(record)
            return 0
        return record

    def location(self, record: int) -> DiskLocation:
        """Return the location of a published record that is in use, with its checksum."""
        number, _ = self.records.key(record)
        return disk_location(
            self.records.offset(record),
            self.namespace_ids.keys[number],
            self.records.checksum(record),
        )

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes], now_s: int) -> list[bool]:
        """Return which pages are on disk."""
        number = self.namespace_ids.known(digest)
        if not number:
            return [False] * len(prefix_hashes)
        records, find, expiry_s = self.records, self.records.find, self.records.expiry_s
        found = [find(number, prefix_hash) for prefix_hash in prefix_hashes]
        for position, record in enumerate(found):
            if record and 0 < expiry_s(record) <= now_s:
                if records.is_published(record, number):  # the key may occur twice
                    self.forget(record)
                found[position] = 0
        return [record > 0 for record in found]

    def info(self, record: int, now_s: int) -> LowerTierInfo:
        """Describe a page on disk."""
        records, expiry_s = self.records, self.records.expiry_s(record)
        return LowerTierInfo(
            records.checksum(record),
            now_s - records.used_s(record),
            max(0, records.pinned_until_s(record) - now_s),
            expiry_s - now_s if expiry_s else 0,
        )

    def borrow(self, record: int, number: int, prefix_hash: bytes) -> Borrowed:
        """Mark a published record as used and return its location."""
        self.records.begin_use(record)
        return Borrowed(
            record,
            self.namespace_ids.values[number],
            prefix_hash,
            self.location(record),
            self.records.checksum(record),
        )

    def pin(
        self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int, now_s: int
    ) -> list[bool]:
        """Pin pages; see `DiskTier.pin`."""
        records = [self.find(digest, prefix_hash, now_s) for prefix_hash in prefix_hashes]
        pinned = [record > 0 and self.records.pinned_until_s(record) > now_s for record in records]
        if ttl_s:
            self.records.check_pins(filter(None, records))
        for record in filter(None, records):
            self.records.pin(record, now_s + ttl_s if ttl_s else 0)
        return [record > 0 for record in records] if ttl_s else pinned

    # ---- forget --------------------------------------------------------------------------

    def forget(self, record: int) -> None:
        """Forget a record and schedule the deletion of its row."""
        number, prefix_hash = self.records.key(record)
        self.tombstones.add(page_key(number, prefix_hash))
        self.namespace_ids.counts[number] -= 1
        self.records.remove(record)
        if self.changes is not None:
            self.changes.went(self.namespace_ids.values[number].digest, prefix_hash)

    def make_room_for_spaces(self) -> None:
        """Drop empty namespaces if there are too many."""
        if self.namespace_ids.crowded:
            self.drop_empty_spaces()

    def drop_empty_spaces(self) -> None:
        """Forget namespaces without pages and schedule the deletion of their rows."""
        for number in self.namespace_ids.drop_empty():
            self.tombstones.add(namespace_key(number))

    def forget_some(self, digest: bytes, first: int) -> tuple[int, int]:
        """Forget some pages from record `first` on; return the count and the next record."""
        space, found = self.namespace_ids.known(digest), 0
        if not self.namespace_ids.counts[space]:
            return 0, self.records.number_end
        end = min(first + FORGET_LOOKED_AT, self.records.number_end)
        while first < end and found < FORGOTTEN:
            if self.records.is_published(first, space):
                self.forget(first)
                found += 1
            first += 1
        return found, first

    def drop_space(self, digest: bytes) -> bool:
        """Forget a namespace and its last pages; return False if it is unknown."""
        number, first = self.namespace_ids.known(digest), 1
        while number and self.namespace_ids.counts[number]:
            _, first = self.forget_some(digest, first)
        if number:
            self.namespace_ids.drop(number)
            self.tombstones.add(namespace_key(number))
        return number > 0

    def forget_doubtful(self) -> int:
        """Forget pages that may not be durable after a failed sync; return how many.

        Deletions are repeated, because they may not be durable either.
        """
        doubtful, deleted = self.syncs.begin_anew()
        found = [record for record in doubtful if self.records.can_be_found(record)]
        for record in found:
            self.forget(record)
        self.tombstones.put_back(deleted)
        return len(found)

    # ---- write ---------------------------------------------------------------------------

    def reserve(self, page: Page, now_s: int) -> int:
        """Reserve a record with a slot for a page.

        It is 0 if the page is on disk, is larger than an extent, or nothing may be evicted. AGAIN
        means that some records were evicted, perhaps not enough.
        """
        number = self.namespace_ids.number(page.namespace.value)
        if page.state is not State.VISIBLE or self.records.find(number, page.prefix_hash):
            return 0
        size = page.namespace.slot_nbytes
        # Of a directory older than this RAM size: evicting for it would be useless
        if size > self.records.slots.extent_nbytes:
            self.counters.pages_refused += 1
            return 0
        record = self.records.reserve(number, page.prefix_hash, size)
        if record:
            return record
        victims = self.records.victims(number, size, now_s)
        for victim in victims:
            self.forget(victim)
        self.counters.pages_evicted += len(victims)
        self.counters.pages_refused += not victims
        return AGAIN if victims else 0

    def slots(self, reserved: Sequence[tuple[Page, int]]) -> list[Slot]:
        """Return the slots to write for reserved pages."""
        keys = self.namespace_ids.keys
        return [
            Slot(
                page.offset,
                page.namespace.slot_nbytes,
                disk_location(self.records.offset(record), keys[number], page.checksum),
            )
            for page, record in reserved
            for number, _ in [self.records.key(record)]
        ]

    def take_batch(self, reserved: Sequence[tuple[Page, int]], now_s: int) -> RowBatch:
        """Return the next batch of rows; while it is `partial`, write it and call again."""
        deleted = self.tombstones.take()
        if self.tombstones.count:
            return RowBatch({}, [], deleted, partial=True)
        pages = [self._row(page, record, now_s) for page, record in reserved]
        return RowBatch(self.namespace_ids.take_new(), pages, deleted, partial=False)

    def put_back(self, batch: RowBatch) -> None:
        """Take back a failed batch.

        Its rows may have reached the log and must not outlive their slots.
        """
        self.namespace_ids.new.update(batch.namespaces)
        self.tombstones.put_back([batch.deleted + [row.key for row in batch.pages]])

    def publish(
        self, reserved: Sequence[tuple[Page, int]], deleted: list[bytes], now_s: int
    ) -> None:
        """Make written pages available, except those that were removed meanwhile."""
        removed, written = [], []
        for page, record in reserved:
            number, prefix_hash = self.records.key(record)
            if page.state is State.VISIBLE:
                self.records.publish(record, page.checksum, now_s, page.expiry_s)
                written.append(record)
                self.namespace_ids.counts[number] += 1
                self.counters.pages_written += 1
                self.counters.nbytes_written += page.namespace.page_nbytes
            else:
                removed.append((number, prefix_hash))
                self.records.cancel(record)
        for number, prefix_hash in removed:
            # Otherwise the key was stored again in this batch
            if not self.records.find(number, prefix_hash):
                self.tombstones.add(page_key(number, prefix_hash))
        self.syncs.wrote(written, deleted)

    def _row(self, page: Page, record: int, now_s: int) -> PageRow:
        number = self.namespace_ids.known(page.namespace.digest)
        size, offset = page.namespace.slot_nbytes, self.records.offset(record)
        return PageRow(
            number,
            page.prefix_hash,
            offset,
            size,
            now_s,
            now_s,
            page.expiry_s,
            page.checksum,
            page.leaves,
        )
