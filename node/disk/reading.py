"""Pages read from disk: into arena slots, whole or in part, and beside them to be verified.

    begin -> read -> (bytes, checksum)       the record is in use from `begin` on: its place on disk stays as it is
    borrow -> verify

Any thread; bytes are read and hashed without a lock. What is not what was written is dropped, counted and never
returned. Of a part the leaf is made of what was read; the other leaves are in the page's row, and all of them
together must give the checksum, so neither a damaged part nor another page's row passes.
"""

import logging
import threading
from collections.abc import Callable

from kvstore.checksum import kept, key_seed, root
from kvstore.errors import Exhausted
from kvstore.keys import short
from node.disk.directory import Directory
from node.disk.index import Borrowed, DiskIndex
from node.disk.reads import Read, Reads
from node.disk.rows import PageRow, page_key
from node.disk.seal import Place
from node.ram.page import Page
from node.ram.parts import Parts

log = logging.getLogger(__name__)


class Reading:
    """Part of the disk tier, under its `lock`. `find` gives the record of a key, with the lock held; `blame` is told
    of errors of the disk."""

    def __init__(
        self,
        lock: threading.Lock,
        index: DiskIndex,
        directory: Directory,
        view: Callable[[int, int], memoryview],
        find: Callable[[bytes, bytes], int],
        blame: Callable[[str, BaseException], None],
    ) -> None:
        self._lock = lock
        self._index = index
        self._records = index.records
        self._counters = index.counters
        self._rows, self._files = directory.rows, directory.files
        self._view = view
        self._find = find
        self._blame = blame
        self._reads = Reads(self.end)
        self._places: dict[int, Place] = {}  # of records from `begin` on: their namespace may go before they are read

    @property
    def hang(self) -> bool:
        return self._reads.hang

    def begin(self, digest: bytes, prefix_hash: bytes) -> int:
        """A record whose slot stays as it is until `read` is done; 0 for a miss."""
        if self.hang:
            return 0
        with self._lock:
            record = self._find(digest, prefix_hash)
            if record:
                self._records.begin_use(record)
                self._places[record] = self._index.place(record)
            return record

    def end(self, record: int) -> None:
        """Gives a record back that `begin` or `borrow` gave."""
        with self._lock:
            self._records.end_use(record)
            if not self._records.busy(record):
                self._places.pop(record, None)

    def read(self, record: int, page: Page) -> bool:
        """Reads a record into the page's slot and ends the use of the record. False: a miss; if the bytes
        are not what was written, the page is gone."""
        space = page.namespace
        with self._reads.of(record) as read:
            with self._lock:
                place, expected = self._places[record], self._records.checksum(record)
                expiry_s, key = self._records.expiry_s(record), page_key(*self._records.key(record))
            try:
                found = self._fill(read, page, place, key)
            except (OSError, MemoryError) as error:
                self._blame("reading", error)
                return False
            if found is None:
                return False
            intact = root(found, space.seed(page.prefix_hash)) == expected
            with self._lock:
                if intact:
                    page.checksum, page.leaves, page.expiry_s = expected, kept(found), expiry_s
                    self._count(page)
                else:
                    self._quarantine(record, space.digest, page.prefix_hash)
            return intact

    def _fill(self, read: Read, page: Page, place: Place, key: bytes) -> bytes | None:
        """Fills the slot; the leaves of the page that is there, none if it can not be there. None: its row has gone
        meanwhile, or can not be had now."""
        space = page.namespace
        slot = self._view(page.offset, space.slot_nbytes)
        if not isinstance(space, Parts):
            return read.page(self._files, place, slot, space.page_nbytes)
        try:
            row = self._rows.page(key)
        except Exhausted as error:
            log.warning("a page is not read: %s", error)
            return None
        if row is None or row.offset != place.offset:
            return None
        return read.parts(self._files, place, slot, space, row.leaves)

    def _count(self, page: Page) -> None:
        if isinstance(page.namespace, Parts):
            self._counters.pages_read_in_part += 1
            self._counters.nbytes_read += page.namespace.slot_nbytes
        else:
            self._counters.pages_read += 1
            self._counters.nbytes_read += page.namespace.page_nbytes

    def _quarantine(self, record: int, digest: bytes, prefix_hash: bytes) -> None:
        """A page whose bytes are not what was written: counted, logged, forgotten; never returned."""
        self._counters.pages_corrupt += 1
        log.error("page %s of namespace %s is damaged on disk; dropped", short(prefix_hash), digest.hex())
        if self._records.can_be_found(record):
            self._index.forget(record)

    # ---- verify --------------------------------------------------------------------------

    def borrow(self, row: PageRow) -> Borrowed | None:
        """The page of a row, in use until `verify`; None if the row is of a page that was there before."""
        with self._lock:
            space = self._index.spaces.values.get(row.namespace)
            record = self._find(space.digest, row.prefix_hash) if space is not None else 0
            if not record or self._records.offset(record) != row.offset:
                return None
            return self._index.borrow(record, row.namespace, row.prefix_hash)

    def borrow_page(self, digest: bytes, prefix_hash: bytes) -> Borrowed | None:
        """The same of a key; None if it is not on disk."""
        with self._lock:
            record = self._find(digest, prefix_hash)
            return self._index.borrow(record, self._index.spaces.known(digest), prefix_hash) if record else None

    def verify(self, borrowed: Borrowed) -> bool:
        """Reads a page; drops it if it is damaged. Ends the use of the record. Raises OSError if it can not be read."""
        record, space, prefix_hash, place, expected = borrowed
        with self._reads.of(record) as read:
            try:
                found = read.leaves(self._files, place, space.stored_nbytes)
            except OSError as error:
                self._blame("reading", error)
                raise
            good = root(found, key_seed(space.digest, prefix_hash)) == expected
            with self._lock:
                self._counters.pages_scrubbed += 1
                if not good:
                    self._quarantine(record, space.digest, prefix_hash)
            return good
