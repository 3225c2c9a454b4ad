"""The disk tier: what is on disk, read straight into arena slots and checked on the way.

    find, begin_read -> read (bytes, checksum) -> end_read      any thread; a short lock, no rows
    store                                                       the writer thread: slot, bytes, row

A page is found only after its row is written; a row is deleted no later than its slot is given
to another page, in the same batch. An error of the disk poisons the tier: nothing is found or
written any more, RAM serves on, and the node says why, until `recover` or a restart.
"""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.checksum import checksum, key_seed
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import Namespace
from kvstore.messages import parse_namespace
from node.below import BelowInfo
from node.counters import DiskCounters
from node.disk_writer import DiskWriter
from node.extent_files import ExtentFiles
from node.numbers import NumberedSpaces
from node.page import Page, State
from node.records import Records
from node.rows import PageRow, Rows, page_key, parse_page_row

log = logging.getLogger(__name__)


class DiskTier:
    """Thread-safe. `view(offset, nbytes)` is the arena's memory; `clock_s` gives whole seconds since
    the epoch."""

    def __init__(
        self,
        rows: Rows,
        files: ExtentFiles,
        records: Records,
        view: Callable[[int, int], memoryview],
        queue_nbytes_max: int,
        clock_s: Callable[[], int] = lambda: int(time.time()),
    ) -> None:
        self.rows = rows
        self.files = files
        self.records = records
        self.counters = DiskCounters()
        self.poisoned = ""
        self.on_health: Callable[[bool], None] = lambda healthy: None
        self._restored = False
        self._view = view
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._spaces = NumberedSpaces()
        self._gone: list[bytes] = []  # row keys to delete with the next batch
        self.writer = DiskWriter(self, queue_nbytes_max)

    # ---- start ---------------------------------------------------------------------------

    def restore(self, open_namespace: Callable[[Namespace, bytes], object]) -> None:
        """Records and namespaces from the rows; page bytes are not read. Rows that can not be are
        deleted: their space is free."""
        for number, message in self.rows.namespaces():
            self._restore_namespace(number, message, open_namespace)
        now_s = self._clock_s()
        for key, value_bytes in self.rows.pages():
            row = parse_page_row(key, value_bytes)
            if row is not None and self._restore_page(row, now_s):
                continue
            self._gone.append(key)
            self.counters.rows_damaged += row is None
        self.records.restored()
        self._restored = True

    def _restore_page(self, row: PageRow, now_s: int) -> bool:
        """False: unknown namespace, time to live over, impossible slot."""
        if row.namespace not in self._spaces.values or 0 < row.expiry_s <= now_s or not self.records.restore(row):
            return False
        self._spaces.counts[row.namespace] += 1
        return True

    def _restore_namespace(
        self, number: int, message: bytes, open_namespace: Callable[[Namespace, bytes], object]
    ) -> None:
        try:
            value = parse_namespace(message)
        except InvalidRequest as error:
            self.counters.rows_damaged += 1
            log.error("the row of namespace %d is damaged, its pages are dropped: %s", number, error)
            return
        self._spaces.restore(value, number)
        try:
            open_namespace(value, value.digest)
        except KVStoreError as error:  # its pages are larger than this node's extents, or there are too many
            log.warning("namespace %s is on disk but can not be opened: %s", value.digest.hex(), error)

    # ---- find ----------------------------------------------------------------------------

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._find(digest, prefix_hash) > 0 for prefix_hash in prefix_hashes]

    def _find(self, digest: bytes, prefix_hash: bytes) -> int:
        return 0 if self.poisoned else self._find_poisoned(digest, prefix_hash)

    def _find_poisoned(self, digest: bytes, prefix_hash: bytes) -> int:
        """The record, even if the tier is poisoned and nobody may read it."""
        record = self.records.find(self._spaces.known(digest), prefix_hash)
        if record and 0 < self.records.expiry_s(record) <= self._clock_s():
            self._forget(record)
            return 0
        return record

    def touch(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> None:
        """Tail first, as the RAM tier does."""
        now_s = self._clock_s()
        with self._lock:
            for prefix_hash in reversed(prefix_hashes):
                record = self._find(digest, prefix_hash)
                if record:
                    self.records.touch(record, now_s)

    def info(self, digest: bytes, prefix_hash: bytes) -> BelowInfo | None:
        with self._lock:
            record = self._find(digest, prefix_hash)
            if not record:
                return None
            records, now_s = self.records, self._clock_s()
            expiry_s = records.expiry_s(record)
            return BelowInfo(
                records.checksum(record),
                now_s - records.used_s(record),
                max(0, records.pinned_until_s(record) - now_s),
                expiry_s - now_s if expiry_s else 0,
            )

    def list_hashes(self, digest: bytes, key_prefix: bytes, after: bytes) -> Iterator[bytes]:
        """Prefix hashes in order, from the rows. A row whose page was forgotten meanwhile is left out."""
        number = self._spaces.known(digest)
        if not number or self.poisoned:
            return
        first = max(key_prefix, after)[:8]
        for key, value in self.rows.pages(page_key(number, first)):
            row = parse_page_row(key, value)
            if row is None:
                continue
            if row.namespace != number or not row.prefix_hash[: len(key_prefix)] <= key_prefix:
                return
            if row.prefix_hash > after and row.prefix_hash.startswith(key_prefix):
                with self._lock:
                    known = self._find(digest, row.prefix_hash) > 0
                if known:
                    yield row.prefix_hash

    # ---- read ----------------------------------------------------------------------------

    def begin_read(self, digest: bytes, prefix_hash: bytes) -> int:
        """A record whose slot stays as it is until `read` is done; 0 for a miss."""
        with self._lock:
            record = self._find(digest, prefix_hash)
            if record:
                self.records.begin_use(record)
            return record

    def end_read(self, record: int) -> None:
        """Gives a record back that was not read."""
        with self._lock:
            self.records.end_use(record)

    def read(self, record: int, page: Page) -> bool:
        """Reads a record into the page's slot and ends the use of the record. False: not readable or
        not what was written; then the page is a miss, and gone."""
        index = page.namespace
        slot = self._view(page.offset, index.slot_nbytes)
        with self._lock:
            offset, expected = self.records.offset(record), self.records.checksum(record)
            expiry_s = self.records.expiry_s(record)
        intact = self._read_intact(offset, slot, index.page_nbytes, expected, index.seed(page.prefix_hash))
        with self._lock:
            if intact:
                page.checksum, page.expiry_s = expected, expiry_s
                self.counters.pages_read += 1
                self.counters.nbytes_read += index.page_nbytes
            elif not self.poisoned:
                self._quarantine(record, index.digest, page.prefix_hash)
            self.records.end_use(record)
        return intact

    def _read_intact(self, offset: int, slot: memoryview, page_nbytes: int, expected: bytes, seed: int) -> bool:
        try:
            self.files.read(offset, slot)
        except OSError as error:
            self.poison(f"reading failed: {error}")
            return False
        return checksum(slot[:page_nbytes], seed) == expected

    def _quarantine(self, record: int, digest: bytes, prefix_hash: bytes) -> None:
        """A page whose bytes are not what was written: counted, logged, forgotten; never returned."""
        self.counters.pages_corrupt += 1
        log.error("page %s of namespace %s is damaged on disk; dropped", prefix_hash.hex(), digest.hex())
        if self.records.find(self._spaces.known(digest), prefix_hash) == record:
            self._forget(record)

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """True for each that was there. The rows go with the writer's next batch. A poisoned tier forgets
        too, or the pages would be back when it recovers."""
        with self._lock:
            records = [self._find_poisoned(digest, prefix_hash) for prefix_hash in prefix_hashes]
            for record in records:
                if record:
                    self._forget(record)
            return [record > 0 for record in records]

    def _forget(self, record: int) -> None:
        number, start = self.records.key(record)
        self._gone.append(page_key(number, start.to_bytes(8, "big")))
        self._spaces.counts[number] -= 1
        self.records.remove(record)

    def remove_namespace(self, digest: bytes) -> int:
        """Forgets every page of a namespace; how many."""
        with self._lock:
            number = self._spaces.known(digest)
            records = [record for record in self.records.records() if self.records.key(record)[0] == number]
            for record in records:
                self._forget(record)
            return len(records)

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int) -> list[bool]:
        """Keeps pages on disk for `ttl_s`; True for each that is there. 0 ends pins; True for each pinned."""
        now_s = self._clock_s()
        with self._lock:
            records = [self._find(digest, prefix_hash) for prefix_hash in prefix_hashes]
            pinned = [record > 0 and self.records.pinned_until_s(record) > now_s for record in records]
            for record in records:
                if record:
                    self.records.pin(record, now_s + ttl_s if ttl_s else 0)
            return [record > 0 for record in records] if ttl_s else pinned

    def has_room(self, slot_nbytes: int) -> bool:
        """Whether a page of this size can be stored without evicting another."""
        with self._lock:
            return self.records.slots.has_room(slot_nbytes)

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        return self.writer.offer(pages, urgent)

    # ---- write: the writer thread only ---------------------------------------------------

    def store(self, pages: Sequence[Page]) -> None:
        """Writes pages and their rows, and deletes the rows of what is gone. Raises OSError."""
        now_s = self._clock_s()
        reserved: list[tuple[Page, int]] = []
        with self._lock:
            self._spaces.drop_empty()
        try:
            # One may have been offered twice, and of hashes that start alike only one can be on disk.
            visible = {(p.namespace.digest, p.prefix_hash[:8]): p for p in pages if p.state is State.VISIBLE}
            for page in visible.values():
                with self._lock:
                    record = self._reserve(page, now_s)
                if record:
                    reserved.append((page, record))
            slots = [(self.records.offset(r), self._view(p.offset, p.namespace.slot_nbytes)) for p, r in reserved]
            self.files.write_all(slots)
            with self._lock:
                namespaces = self._spaces.take_new()
                gone, self._gone = self._gone, []
                rows = [self._row(page, record, now_s) for page, record in reserved]
            try:
                self.rows.write(namespaces, rows, gone)
            except BaseException:
                with self._lock:
                    self._spaces.new.update(namespaces)
                    # They may have reached the log all the same, and must not outlive their slots.
                    self._gone = gone + [row.key for row in rows] + self._gone
                raise
        except BaseException:
            with self._lock:
                for _, record in reserved:
                    self.records.cancel(record)
            raise
        with self._lock:
            self._publish(reserved, now_s)

    def _publish(self, reserved: list[tuple[Page, int]], now_s: int) -> None:
        """The rows are written: the pages can be found, but for those that were removed meanwhile."""
        removed = []
        for page, record in reserved:
            if page.state is State.VISIBLE:
                self.records.publish(record, page.checksum, now_s, page.expiry_s)
                self._spaces.counts[self.records.key(record)[0]] += 1
                self.counters.pages_written += 1
                self.counters.nbytes_written += page.namespace.page_nbytes
            else:
                removed.append(self.records.key(record))
                self.records.cancel(record)
        for number, start in removed:
            prefix = start.to_bytes(8, "big")
            if not self.records.find(number, prefix):  # else the key was stored anew in this batch
                self._gone.append(page_key(number, prefix))

    def _reserve(self, page: Page, now_s: int) -> int:
        """A slot for the page, evicting what must go; 0 if the page is on disk or nothing may go."""
        number = self._spaces.number(page.namespace.value)
        if page.state is not State.VISIBLE or self.records.find(number, page.prefix_hash):
            return 0
        size = page.namespace.slot_nbytes
        record = self.records.reserve(number, page.prefix_hash, size)
        while not record:
            victims = self.records.victims(size, now_s)
            if not victims:
                self.counters.pages_refused += 1
                return 0
            for victim in victims:
                self._forget(victim)
                self.counters.pages_evicted += 1
            record = self.records.reserve(number, page.prefix_hash, size)
        return record

    def _row(self, page: Page, record: int, now_s: int) -> PageRow:
        number = self._spaces.known(page.namespace.digest)
        size, offset = page.namespace.slot_nbytes, self.records.offset(record)
        return PageRow(number, page.prefix_hash, offset, size, now_s, now_s, page.expiry_s, page.checksum)

    @property
    def has_gone(self) -> bool:
        return bool(self._gone)

    def sync(self) -> None:
        """All that `store` did survives power loss when this returns: bytes first, then rows."""
        self.files.sync()
        self.rows.sync()

    # ---- trouble -------------------------------------------------------------------------

    def poison(self, reason: str) -> None:
        with self._lock:
            if self.poisoned:
                return
            self.poisoned = reason
        log.error("disk tier stopped, RAM serves on: %s", reason)
        self.on_health(False)

    def recover(self) -> None:
        """Believes in the disk again, after a trial. Raises OSError, and stays poisoned, if it fails."""
        if not self._restored:  # a page might be put where one lies that is not known
            raise OSError("the rows could not be read at the start; restart the node")
        self.files.trial()
        self.sync()
        with self._lock:
            self.poisoned = ""
        log.warning("disk tier works again")
        self.on_health(True)

    # ---- verify --------------------------------------------------------------------------

    def borrow(self, row: PageRow) -> int:
        """The record of a row, in use until `verify`; 0 if the row is of a page that was there before."""
        with self._lock:
            record = 0 if self.poisoned else self.records.find(row.namespace, row.prefix_hash)
            if not record or self.records.offset(record) != row.offset:
                return 0
            self.records.begin_use(record)
            return record

    def verify(self, row: PageRow, record: int) -> bool:
        """Reads a page and compares it with its record's checksum; drops it if it is damaged. Ends the
        use of the record."""
        with self._lock:
            value, expected = self._spaces.values[row.namespace], self.records.checksum(record)
        good = True
        try:
            with mmap.mmap(-1, row.slot_nbytes) as memory, memoryview(memory) as slot:
                seed = key_seed(value.digest, row.prefix_hash)
                good = self._read_intact(row.offset, slot, value.layout.page_nbytes, expected, seed)
        finally:
            with self._lock:
                self.counters.pages_scrubbed += 1
                if not good and not self.poisoned:
                    self._quarantine(record, value.digest, row.prefix_hash)
                self.records.end_use(record)
        return good

    # ---- tell ----------------------------------------------------------------------------

    def page_count(self, digest: bytes) -> int:
        return self._spaces.counts[self._spaces.known(digest)]

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        with self._lock:
            return self.records.check()

    def close(self) -> None:
        self.files.close()
        self.rows.close()
