"""Which page is where on disk, as the node knows it in RAM.

    records       by key, by slot, by last use
    spaces        short numbers of namespaces
    gone          row keys to delete no later than with the next pages
    medium        which of the records survive power loss

Pure: no I/O and no clock. Not thread-safe: the disk tier's lock guards it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from node.disk.counters import DiskCounters
from node.disk.extent_files import Slot
from node.disk.gone import Gone
from node.disk.medium import Medium
from node.disk.numbers import NumberedSpaces
from node.disk.records import Records
from node.disk.rows import PageRow, is_page_key, namespace_key, page_key, parse_page_row
from node.disk.seal import Place, place
from node.disk.vault import PLAIN, Vault
from node.ram.below import BelowInfo
from node.ram.page import Page, State

AGAIN = -1  # no record number
# Of a namespace that goes, under one lock: a millisecond or two.
FORGET_LOOKED_AT = 4096
FORGOTTEN = 256


class RowBatch(NamedTuple):
    """What one batch of rows is made of: new namespaces, new pages, keys to delete. A `partial` one has only keys, and
    others are left: pages come with the last, because their slots and keys may be those of what is gone."""

    namespaces: dict[int, bytes]
    pages: list[PageRow]
    gone: list[bytes]
    partial: bool

    def gone_pages(self) -> list[bytes]:
        """Keys to delete once more, should a sync fail. Of no number: another namespace may have it by then."""
        return [key for key in self.gone if is_page_key(key)]


class Borrowed(NamedTuple):
    """A page that is being verified: its number may be another namespace's before that is done."""

    record: int
    space: Namespace
    prefix_hash: bytes
    place: Place
    checksum: bytes


class DiskIndex:
    """A page is found from `publish` on, until it is forgotten; its row is deleted no later than its
    slot is given to another page, in the same batch or before."""

    def __init__(self, records: Records, vault: Vault = PLAIN) -> None:
        self.records = records
        self.spaces = NumberedSpaces(records.accounts.of, vault)
        records.account_of = self.spaces.accounts.__getitem__
        self.counters = DiskCounters()
        self.gone = Gone()
        self._dropped: Counter[str] = Counter()  # rows at the start, by cause
        self.medium = Medium()

    # ---- start ---------------------------------------------------------------------------

    def restore_page(self, key: bytes, value: bytes, now_s: int) -> None:
        """A row that can not be used is deleted: its space is free. Unknown namespace, time to live
        over, impossible slot, wrong checksum."""
        row = parse_page_row(key, value)
        if row is None:
            self.counters.rows_damaged += 1
            self._dropped["damaged"] += 1
        elif row.namespace not in self.spaces.values:
            self._dropped["of an unknown namespace"] += 1
        elif not row.is_expired(now_s):
            if self.records.restore(row if row.used_s <= now_s else row._replace(used_s=now_s)):
                self.spaces.counts[row.namespace] += 1
                return
            self._dropped["whose slot can not be (disk_nbytes is less than it was, or it overlaps another's)"] += 1
        self.gone.add(key)

    def dropped_rows(self) -> str:
        """How many rows of pages could not be used, and why; those whose time to live is over are not told."""
        return ", ".join(f"{count} {cause}" for cause, count in self._dropped.items())

    def restore_namespace(self, number: int, row: bytes) -> str:
        """What is wrong with it, if anything is; then its pages are dropped."""
        problem = self.spaces.restore(number, row)
        if not problem:
            return ""
        self.counters.rows_damaged += 1
        self.gone.add(namespace_key(number))
        return f"row {number} of namespaces is damaged, its pages are dropped: {problem}"

    def restored(self, open_namespace: Callable[[Namespace, bytes], object]) -> list[str]:
        """All rows are taken in: opens the namespaces that have pages, and only those, and forgets the
        others. Returns what could not be opened, and why; its pages stay, but can not be asked for."""
        self.records.restored()
        self.drop_empty_spaces()
        problems = []
        for value in self.spaces.values.values():
            try:
                open_namespace(value, value.digest)
            except KVStoreError as error:  # its pages are larger than this node's extents
                problems.append(f"namespace {value.digest.hex()} is on disk but can not be opened: {error}")
        return problems

    # ---- find ----------------------------------------------------------------------------

    def find(self, digest: bytes, prefix_hash: bytes, now_s: int) -> int:
        """The record of a page, 0 if there is none; one whose time to live is over is forgotten."""
        record = self.records.find(self.spaces.known(digest), prefix_hash)
        if record and 0 < self.records.expiry_s(record) <= now_s:
            self.forget(record)
            return 0
        return record

    def place(self, record: int) -> Place:
        """Of a record that is published and in use, with its checksum."""
        number, _ = self.records.key(record)
        return place(self.records.offset(record), self.spaces.keys[number], self.records.checksum(record))

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes], now_s: int) -> list[bool]:
        number = self.spaces.known(digest)
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

    def info(self, record: int, now_s: int) -> BelowInfo:
        records, expiry_s = self.records, self.records.expiry_s(record)
        return BelowInfo(
            records.checksum(record),
            now_s - records.used_s(record),
            max(0, records.pinned_until_s(record) - now_s),
            expiry_s - now_s if expiry_s else 0,
        )

    def borrow(self, record: int, number: int, prefix_hash: bytes) -> Borrowed:
        """A published record, in use from here on."""
        self.records.begin_use(record)
        return Borrowed(
            record, self.spaces.values[number], prefix_hash, self.place(record), self.records.checksum(record)
        )

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int, now_s: int) -> list[bool]:
        """As `DiskTier.pin`."""
        records = [self.find(digest, prefix_hash, now_s) for prefix_hash in prefix_hashes]
        pinned = [record > 0 and self.records.pinned_until_s(record) > now_s for record in records]
        if ttl_s:
            self.records.check_pins(filter(None, records))
        for record in filter(None, records):
            self.records.pin(record, now_s + ttl_s if ttl_s else 0)
        return [record > 0 for record in records] if ttl_s else pinned

    # ---- forget --------------------------------------------------------------------------

    def forget(self, record: int) -> None:
        number, prefix_hash = self.records.key(record)
        self.gone.add(page_key(number, prefix_hash))
        self.spaces.counts[number] -= 1
        self.records.remove(record)

    def make_room_for_spaces(self) -> None:
        if self.spaces.crowded:
            self.drop_empty_spaces()

    def drop_empty_spaces(self) -> None:
        for number in self.spaces.drop_empty():
            self.gone.add(namespace_key(number))

    def forget_some(self, digest: bytes, first: int) -> tuple[int, int]:
        """Forgets some of the pages of a namespace, from record `first` on: how many, and which is to be next."""
        space, found = self.spaces.known(digest), 0
        if not self.spaces.counts[space]:
            return 0, self.records.number_end
        end = min(first + FORGET_LOOKED_AT, self.records.number_end)
        while first < end and found < FORGOTTEN:
            if self.records.is_published(first, space):
                self.forget(first)
                found += 1
            first += 1
        return found, first

    def drop_space(self, digest: bytes) -> bool:
        """Forgets a namespace with the few pages that it may have got meanwhile; False: it is not known."""
        number, first = self.spaces.known(digest), 1
        while number and self.spaces.counts[number]:
            _, first = self.forget_some(digest, first)
        if number:
            self.spaces.drop(number)
            self.gone.add(namespace_key(number))
        return number > 0

    def forget_doubtful(self) -> int:
        """After a failed sync: forgets what may not be on the medium; how many pages. What was deleted is deleted once
        more: its deletion may not be there either."""
        doubtful, gone = self.medium.begin_anew()
        found = [record for record in doubtful if self.records.can_be_found(record)]
        for record in found:
            self.forget(record)
        self.gone.give_back(gone)
        return len(found)

    # ---- write ---------------------------------------------------------------------------

    def reserve(self, page: Page, now_s: int) -> int:
        """A slot for the page; 0 if the page is on disk, is larger than an extent, or nothing may go. AGAIN: some
        others went for it, perhaps not all that must."""
        number = self.spaces.number(page.namespace.value)
        if page.state is not State.VISIBLE or self.records.find(number, page.prefix_hash):
            return 0
        size = page.namespace.slot_nbytes
        if size > self.records.slots.extent_nbytes:  # of a directory older than the RAM: all would go for it in vain
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
        """What is to be written for these."""
        keys = self.spaces.keys
        return [
            Slot(
                page.offset, page.namespace.slot_nbytes, place(self.records.offset(record), keys[number], page.checksum)
            )
            for page, record in reserved
            for number, _ in [self.records.key(record)]
        ]

    def take_batch(self, reserved: Sequence[tuple[Page, int]], now_s: int) -> RowBatch:
        """To be called again while it is `partial`, each time when that one is written."""
        gone = self.gone.take()
        if self.gone.count:
            return RowBatch({}, [], gone, partial=True)
        pages = [self._row(page, record, now_s) for page, record in reserved]
        return RowBatch(self.spaces.take_new(), pages, gone, partial=False)

    def give_back(self, batch: RowBatch) -> None:
        """The batch failed. Its rows may have reached the log all the same, and must not outlive their
        slots."""
        self.spaces.new.update(batch.namespaces)
        self.gone.give_back([batch.gone + [row.key for row in batch.pages]])

    def publish(self, reserved: Sequence[tuple[Page, int]], gone: list[bytes], now_s: int) -> None:
        """The rows are written, those of the pages `gone` deleted: the pages can be found, but for those that were
        removed meanwhile."""
        removed, written = [], []
        for page, record in reserved:
            number, prefix_hash = self.records.key(record)
            if page.state is State.VISIBLE:
                self.records.publish(record, page.checksum, now_s, page.expiry_s)
                written.append(record)
                self.spaces.counts[number] += 1
                self.counters.pages_written += 1
                self.counters.nbytes_written += page.namespace.page_nbytes
            else:
                removed.append((number, prefix_hash))
                self.records.cancel(record)
        for number, prefix_hash in removed:
            if not self.records.find(number, prefix_hash):  # else the key was stored anew in this batch
                self.gone.add(page_key(number, prefix_hash))
        self.medium.wrote(written, gone)

    def _row(self, page: Page, record: int, now_s: int) -> PageRow:
        number = self.spaces.known(page.namespace.digest)
        size, offset = page.namespace.slot_nbytes, self.records.offset(record)
        return PageRow(number, page.prefix_hash, offset, size, now_s, now_s, page.expiry_s, page.checksum, page.leaves)
