"""Read pages from disk into arena slots, whole or in part, and verify them.

    begin -> read -> (bytes, checksum)       from `begin` on the record is in use: its slot is kept
    borrow -> verify

For any thread; bytes are read and hashed without a lock. Corrupt pages are dropped, counted and
never returned. For a part, its leaf is computed from the bytes read; the other leaves are in the
page's row, and all of them together must give the checksum, so neither a damaged part nor another
page's row passes.

A read that hangs can not be ended, and its caller waits for it. Other callers are spared: while one
hangs, pages that are only on disk count as misses and are computed again, which is faster. A large
page is read in pieces, each timed separately, so that hashing is not counted as time of the disk.
"""

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.checksum import (
    LEAF_SUM_NBYTES,
    Leaves,
    cuts,
    key_seed,
    leaf,
    leaves,
    root,
    stored_leaves,
)
from kvstore.errors import Exhausted
from kvstore.keys import short
from kvstore.layout import slot_nbytes
from node.disk.directory import Directory, PageFiles
from node.disk.encryption import DiskLocation
from node.disk.index import Borrowed, DiskIndex
from node.disk.rows import PageRow, page_key
from node.memory.page import Page
from node.memory.promotion import PartialPage

log = logging.getLogger(__name__)

HANGS_S = 2.0  # a piece takes milliseconds, and tenths of a second on a busy disk
PIECE_NBYTES = 4 << 20  # read into a slot at once: larger ones are hardly faster
# keys looked up under one lock, for which threads with the RAM tier's lock may wait
FOUND_AT_ONCE = 256
VERIFIED_NBYTES = 1 << 20  # read at once outside the arena: the memory of a verify


class Read:
    """A use of a record, whose page is read piece by piece."""

    def __init__(self, begin: Callable[["Read"], None], end: Callable[["Read"], None]) -> None:
        self._begin = begin
        self._end = end

    def page(
        self, files: PageFiles, location: DiskLocation, slot: memoryview, page_nbytes: int
    ) -> bytes:
        """Fill the slot and return the page's leaves; empty if the file is too short.

        Raises OSError.
        """
        return leaves(slot[:page_nbytes]) if self._pieces(files, location, 0, slot) else b""

    def parts(
        self,
        files: PageFiles,
        location: DiskLocation,
        slot: memoryview,
        parts: PartialPage,
        known: bytes,
    ) -> bytes:
        """Fill the slot with parts of a page.

        Return its leaves; those of other parts are taken from `known`.
        """
        at, found = 0, bytearray(known)
        for start, end in parts.runs:
            if not self._pieces(files, location, start, slot[at : at + end - start]):
                return b""
            at += end - start
        for number in parts.numbers:
            start, end = cuts(parts.page_nbytes)[number]
            at = parts.slot_offset(start)
            part = slot[at : at + end - start]
            found[LEAF_SUM_NBYTES * number : LEAF_SUM_NBYTES * (number + 1)] = leaf(part)
        return bytes(found)

    def leaves(self, files: PageFiles, location: DiskLocation, page_nbytes: int) -> bytes:
        """Return the leaves of a page that is only verified."""
        end, found = slot_nbytes(page_nbytes), Leaves(page_nbytes)
        # Page-aligned, as O_DIRECT needs it
        memory = memoryview(mmap.mmap(-1, min(end, VERIFIED_NBYTES)))
        for start in range(0, end, VERIFIED_NBYTES):
            view = memory[: end - start]
            if not self._piece(files, location, start, view):
                return b""
            found.update(view[: page_nbytes - start])
        return found.digest()

    def _pieces(
        self, files: PageFiles, location: DiskLocation, first: int, slot: memoryview
    ) -> bool:
        return all(
            self._piece(files, location, first + start, slot[start : start + PIECE_NBYTES])
            for start in range(0, slot.nbytes, PIECE_NBYTES)
        )

    def _piece(
        self, files: PageFiles, location: DiskLocation, start: int, view: memoryview
    ) -> bool:
        """Read bytes from `start` on in the page's slot, and decrypt them."""
        self._begin(self)
        found = files.read(location.offset + start, view)
        self._end(self)
        if found and location.encryption is not None:
            location.encryption.decrypt(start, view)
        return found


class Reads:
    """Running reads, and whether one of them hangs.

    Thread-safe. `ended(record)` is called after each read.
    """

    def __init__(
        self, ended: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ended = ended
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[Read, float] = {}  # oldest first
        self._reported: Read | None = None

    @contextlib.contextmanager
    def of(self, record: int) -> Iterator[Read]:
        """Count a read of a record within the block."""
        this = Read(self._begin, self._end)
        self._begin(this)
        try:
            yield this
        finally:
            self._end(this)
            self._ended(record)

    def _begin(self, this: Read) -> None:
        self._end(this)
        with self._lock:
            self._begun[this] = self._clock()

    def _end(self, this: Read) -> None:
        with self._lock:
            self._begun.pop(this, None)
            if self._reported is this:
                self._reported = None

    @property
    def hang(self) -> bool:
        """Return whether the oldest running read takes so long that the disk seems to hang."""
        with self._lock:
            oldest = next(iter(self._begun), None)
            if oldest is None or self._clock() - self._begun[oldest] < HANGS_S:
                return False
            first, self._reported = oldest is not self._reported, oldest
        if first:
            log.error(
                "a read from disk has taken %g s: until it ends, pages on disk are misses", HANGS_S
            )
        return True


class Reading:
    """The reading part of the disk tier, under its `lock`.

    `find` returns the record of a key, with the lock held; `on_error` receives errors of the disk.
    """

    def __init__(
        self,
        lock: threading.Lock,
        index: DiskIndex,
        directory: Directory,
        view: Callable[[int, int], memoryview],
        find: Callable[[bytes, bytes], int],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._lock = lock
        self._index = index
        self._records = index.records
        self._counters = index.counters
        self._rows, self._files = directory.rows, directory.files
        self._view = view
        self._find = find
        self._on_error = on_error
        self._reads = Reads(self.end)
        # Of records from `begin` on: their namespace may be removed before they are read
        self._locations: dict[int, DiskLocation] = {}

    @property
    def hang(self) -> bool:
        """Return whether the disk seems to hang."""
        return self._reads.hang

    def begin(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Return records of the pages that are on disk.

        Their slots are kept until `read` or `end`.
        """
        if self.hang:
            return {}
        found: dict[bytes, int] = {}
        try:
            for start in range(0, len(prefix_hashes), FOUND_AT_ONCE):
                with self._lock:
                    for prefix_hash in prefix_hashes[start : start + FOUND_AT_ONCE]:
                        if record := self._find(digest, prefix_hash):
                            self._records.begin_use(record)
                            found[prefix_hash] = record
                            self._locations[record] = self._index.location(record)
        except BaseException:  # a caller that gets no result can not release them
            for record in found.values():
                self.end(record)
            raise
        return found

    def is_there(self, record: int) -> bool:
        """Return whether a record in use still holds its page."""
        with self._lock:
            return self._records.can_be_found(record)

    def end(self, record: int) -> None:
        """Release a record from `begin` or `borrow`."""
        with self._lock:
            self._records.end_use(record)
            if not self._records.busy(record):
                self._locations.pop(record, None)

    def read(self, record: int, page: Page) -> bool:
        """Read a record into the page's slot and end the use of the record.

        Return False for a miss. A corrupt page is removed from the disk.
        """
        space = page.namespace
        with self._reads.of(record) as read:
            with self._lock:
                location, expected = self._locations[record], self._records.checksum(record)
                expiry_s, key = self._records.expiry_s(record), page_key(*self._records.key(record))
            try:
                found = self._fill(read, page, location, key)
            except (OSError, MemoryError) as error:
                self._on_error("reading", error)
                return False
            if found is None:
                return False
            intact = root(found, space.seed(page.prefix_hash)) == expected
            with self._lock:
                if intact:
                    page.checksum, page.leaves, page.expiry_s = (
                        expected,
                        stored_leaves(found),
                        expiry_s,
                    )
                    self._count(page)
                else:
                    self._quarantine(record, space.digest, page.prefix_hash)
            return intact

    def _fill(self, read: Read, page: Page, location: DiskLocation, key: bytes) -> bytes | None:
        """Fill a slot and return the page's leaves; empty if the file is too short.

        None means that its row was removed meanwhile, or cannot be read now.
        """
        space = page.namespace
        slot = self._view(page.offset, space.slot_nbytes)
        if not isinstance(space, PartialPage):
            return read.page(self._files, location, slot, space.page_nbytes)
        try:
            row = self._rows.page(key)
        except Exhausted as error:
            log.warning("a page could not be read: %s", error)
            return None
        if row is None or row.offset != location.offset:
            return None
        return read.parts(self._files, location, slot, space, row.leaves)

    def _count(self, page: Page) -> None:
        if isinstance(page.namespace, PartialPage):
            self._counters.pages_read_in_part += 1
            self._counters.nbytes_read += page.namespace.slot_nbytes
        else:
            self._counters.pages_read += 1
            self._counters.nbytes_read += page.namespace.page_nbytes

    def _quarantine(self, record: int, digest: bytes, prefix_hash: bytes) -> None:
        """Count, log and forget a corrupt page."""
        self._counters.pages_corrupt += 1
        log.error(
            "page %s of namespace %s is damaged on disk; dropped", short(prefix_hash), digest.hex()
        )
        if self._records.can_be_found(record):
            self._index.forget(record)

    # ---- verify --------------------------------------------------------------------------

    def borrow(self, row: PageRow) -> Borrowed | None:
        """Return a row's page, in use until `verify`; None for an earlier page's row."""
        with self._lock:
            space = self._index.namespace_ids.values.get(row.namespace)
            record = self._find(space.digest, row.prefix_hash) if space is not None else 0
            if not record or self._records.offset(record) != row.offset:
                return None
            return self._index.borrow(record, row.namespace, row.prefix_hash)

    def borrow_page(self, digest: bytes, prefix_hash: bytes) -> Borrowed | None:
        """Return the page of a key, in use until `verify`; None if it is not on disk."""
        with self._lock:
            record = self._find(digest, prefix_hash)
            return (
                self._index.borrow(record, self._index.namespace_ids.known(digest), prefix_hash)
                if record
                else None
            )

    def verify(self, borrowed: Borrowed) -> bool:
        """Read a page, and drop it if it is damaged.

        End the use of the record. Raises OSError.
        """
        record, space, prefix_hash, location, expected = borrowed
        with self._reads.of(record) as read:
            try:
                found = read.leaves(self._files, location, space.stored_nbytes)
            except OSError as error:
                self._on_error("reading", error)
                raise
            good = root(found, key_seed(space.digest, prefix_hash)) == expected
            with self._lock:
                self._counters.pages_scrubbed += 1
                if not good:
                    self._quarantine(record, space.digest, prefix_hash)
            return good
