"""Store pages on disk, find them there, and read them back (`reads`).

    find    any thread; a short lock, no rows
    store   the writer thread: slot, bytes, row

A page can be found only after its row is written; a row is deleted no later than in the batch that
reuses its slot. An error of the disk stops the tier: nothing is found or written any
more, RAM still serves, and the status has the reason, until `recover` or a restart. A full file
system stops nothing: the tier goes on with the space that it has (`space`).
"""

import errno
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.deadline import Deadline
from kvstore.errors import Exhausted
from kvstore.keys import Namespace
from node.clock import unix_s
from node.disk.directory import Directory
from node.disk.encryption import PLAIN, Vault
from node.disk.index import AGAIN, DiskIndex
from node.disk.page_table import PageTable
from node.disk.reads import Reading
from node.disk.rows import Shortages, hashes_of, is_full, is_shortage, page_key
from node.disk.space import SpaceLimit
from node.disk.writer import DiskWriter
from node.memory.changes import ChangeRing
from node.memory.lower_tier import Load, LocalTier, LowerTierInfo, Query, Source
from node.memory.page import Page, PageNamespace, State
from node.memory.promotion import PartialPage
from node.memory.tenant_usage import Limits, Use

log = logging.getLogger(__name__)

SPACE_TRIES = 3  # attempts to make room on a full file system for one batch
SYNC_PAGES = 4096  # stored between two syncs at most, however busy the writer is
RECOVER_WAIT_S = 10.0  # for the writer's current disk call
REGROUP_LOOKED_AT = 1024  # records, under one lock: a millisecond or two
REGROUPED = 256


class Dropped(NamedTuple):
    """Namespaces that were on disk, and how many row files still contain parts of them."""

    spaces: int
    left: int


class DiskTier(LocalTier):
    """The disk tier. Thread-safe.

    `view(offset, nbytes)` is the arena's memory; `clock_s` gives whole seconds since the epoch;
    `vault` has the keys. The `locator` of a source is a record that is in use.
    """

    reads_parts = True

    def __init__(
        self,
        directory: Directory,
        view: Callable[[int, int], memoryview],
        queue_nbytes_max: int,
        clock_s: Callable[[], int] = unix_s,
        vault: Vault = PLAIN,
    ) -> None:
        self.directory = directory
        self._view = view
        self.rows, self.files = directory.rows, directory.files
        self.records = records = PageTable(
            directory.extent_count * directory.extent_nbytes, directory.extent_nbytes
        )
        self.stop_reason = ""
        self.on_health: Callable[[bool], None] = lambda healthy: None
        self._restored = False
        self._shortages = Shortages()
        self._clock_s = clock_s
        self._lock = threading.Lock()
        # Only one thread stores, syncs or recovers: the result of a sync must be unambiguous.
        self._io = threading.Lock()
        self._index = DiskIndex(records, vault)
        self.counters = self._index.counters
        self.space = SpaceLimit(directory, self._index, self._lock)
        self.reading = Reading(self._lock, self._index, directory, view, self._find, self.on_error)
        self.writer = DiskWriter(
            self.counters,
            self.has_room,
            self._write,
            self.on_error,
            lambda: bool(self.stop_reason),
            queue_nbytes_max,
        )

    def restore(
        self,
        open_namespace: Callable[[Namespace, bytes], object],
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        """Restore the rows of an earlier run; page bytes are not read.

        `pulse` is called now and then and may raise to end it. Raises OSError.
        """
        problems = [
            self._index.restore_namespace(number, message)
            for number, message in self.rows.namespaces()
        ]
        now_s = self._clock_s()
        file_system = self.directory.space()
        self._index.empty_extents = file_system.empty
        for run in self.rows.all_pages():
            pulse()
            self._index.restore_pages(run, now_s)
        for problem in filter(None, [*problems, *self._index.restored(open_namespace)]):
            log.error("%s", problem)
        if dropped := self._index.dropped_rows():
            log.warning("rows of pages were dropped at the start: %s", dropped)
        self.space.restored(file_system)
        self._restored = True

    # ---- find ----------------------------------------------------------------------------

    def present(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return which of the pages can be read: none while a read hangs."""
        return (
            [False] * len(prefix_hashes)
            if self.reading.hang
            else self._on_disk(digest, prefix_hashes)
        )

    def _on_disk(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        with self._lock:
            if self.stop_reason:
                return [False] * len(prefix_hashes)
            return self._index.present(digest, prefix_hashes, self._clock_s())

    def _find(self, digest: bytes, prefix_hash: bytes) -> int:
        return 0 if self.stop_reason else self._index.find(digest, prefix_hash, self._clock_s())

    def safe(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return which of the pages are on disk and survive power loss."""
        with self._lock:
            records = [self._find(digest, prefix_hash) for prefix_hash in prefix_hashes]
            return [record > 0 and self._index.syncs.is_safe(record) for record in records]

    def touch(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> None:
        """Note a use of the pages, tail first, as the RAM tier does."""
        now_s = self._clock_s()
        with self._lock:
            for prefix_hash in reversed(prefix_hashes):
                if record := self._find(digest, prefix_hash):
                    self.records.touch(record, now_s)

    def info(self, digest: bytes, prefix_hash: bytes) -> LowerTierInfo | None:
        """Describe a page on disk; None if it is not there."""
        now_s = self._clock_s()  # once: one that was found has time left
        with self._lock:
            record = 0 if self.stop_reason else self._index.find(digest, prefix_hash, now_s)
            return self._index.info(record, now_s) if record else None

    def watch(self, changes: ChangeRing | None) -> None:
        """Note in this ring which pages go; None: no longer."""
        with self._lock:
            self._index.changes = changes

    def list_hashes(self, digest: bytes, key_prefix: bytes, after: bytes) -> Iterator[bytes]:
        """Yield prefix hashes in order; pages that were just forgotten are left out."""
        number = self._index.namespace_ids.known(digest)
        if not number or self.stop_reason:
            return
        for prefix_hash in hashes_of(
            self._pages(page_key(number, max(key_prefix, after))), number, key_prefix, after
        ):
            if self._on_disk(digest, [prefix_hash])[0]:
                yield prefix_hash

    def _pages(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows until they can not be read.

        Raises Exhausted if the disk hangs.
        """
        try:
            yield from self.rows.pages(start)
        except OSError as error:
            self.on_error("reading rows", error)
            if not self.stop_reason:  # otherwise half a list would look like a whole one
                raise Exhausted(f"not all rows could be read, ask again later: {error}") from error

    # ---- read ----------------------------------------------------------------------------

    def is_asked(self, near: bool) -> bool:
        """Return True: the disk is always asked."""
        return True

    def find(self, query: Query) -> dict[bytes, Source]:
        """Find pages on disk and keep their slots until they are released."""
        records = self.reading.begin(query.namespace.digest, query.prefix_hashes)
        return {prefix_hash: Source(self, record) for prefix_hash, record in records.items()}

    def is_there(self, source: Source) -> bool:
        """Return whether the page is still there."""
        return self.reading.is_there(source.locator)

    def release(self, sources: Iterable[Source]) -> None:
        """Release slots."""
        for source in sources:
            self.reading.end(source.locator)

    @property
    def stalled(self) -> bool:
        """Return whether reads may hang."""
        return bool(self.stop_reason) or self.reading.hang

    def read(
        self,
        loads: Sequence[Load],
        arrived: Callable[[Page], None],
        has_left: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        """Read one page after the other, a chain's tail first, so that its head ends up newest.

        The deadline is not checked: a hanging read is known (`reads`), and other reads finish pages
        for which other callers may wait.
        """
        left = list(loads)
        try:
            while left and not (isinstance(left[-1].page.namespace, PartialPage) and has_left()):
                page, source = left.pop()
                if self.reading.read(source.locator, page):
                    arrived(page)
        finally:
            self.release(load.source for load in left)

    # ---- forget --------------------------------------------------------------------------

    def remove(self, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Remove pages; return True for each that existed.

        The rows are deleted with the writer's next batch. A stopped tier forgets pages, too, or
        they would return when it recovers.
        """
        now_s = self._clock_s()
        with self._lock:
            records = [
                self._index.find(digest, prefix_hash, now_s) for prefix_hash in prefix_hashes
            ]
            for record in filter(None, records):
                self._index.forget(record)
            return [record > 0 for record in records]

    def remove_namespace(self, digest: bytes) -> int:
        """Forget every page of a namespace, and return how many.

        Other requests are served meanwhile.
        """
        removed, first = 0, 1
        while first < self.records.number_end:
            with self._lock:
                count, first = self._index.forget_some(digest, first)
            removed += count
            time.sleep(0)  # otherwise this thread would have the lock again
        return removed

    @property
    def encrypted(self) -> bool:
        """Return whether pages are encrypted."""
        return self._index.namespace_ids.encrypted

    def drop_spaces(self, digests: Sequence[bytes]) -> Dropped:
        """Forget namespaces and make sure that no row file contains them. Raises OSError."""
        with self._io:
            with self._lock:
                numbers = set(map(self._index.namespace_ids.known, digests))
                there = [digest for digest in digests if self._index.drop_space(digest)]
            rows = [row for number, row in self.rows.namespaces() if number in numbers]
            self._store([])
            self._sync()
            return Dropped(len(there), self.rows.purge(rows))

    def spaces_of(self, tenant: str) -> list[bytes]:
        """Return the digests of the namespaces of a tenant."""
        with self._lock:
            return [
                value.digest
                for value in self._index.namespace_ids.values.values()
                if value.tenant == tenant
            ]

    def pin(self, digest: bytes, prefix_hashes: Sequence[bytes], ttl_s: int) -> list[bool]:
        """Pin pages for `ttl_s`; return True for each that exists. 0 ends pins.

        Raises Exhausted, and pins none, if too much would be pinned.
        """
        with self._lock:
            if self.stop_reason:
                return [False] * len(prefix_hashes)
            return self._index.pin(digest, prefix_hashes, ttl_s, self._clock_s())

    def has_room(self, space: PageNamespace) -> bool:
        """Return whether a page of this namespace can be stored without evicting another."""
        with self._lock:
            if self.records.accounts.of(space.value.tenant).full_for(space.slot_nbytes):
                return False
            return self.records.slots.free_count(space.slot_nbytes) > 0

    def offer(self, pages: Sequence[Page], urgent: bool) -> int:
        """Queue pages for writing."""
        return self.writer.offer(pages, urgent)

    def set_limits(self, limits: Callable[[str], Limits], promised_nbytes: int) -> None:
        """Set the tenants' limits and their sum.

        Pages beyond a quota are evicted when space is needed. Pages of a tenant that gets or loses
        a quota change their pool in the background.
        """
        with self._lock:
            changed = self.records.accounts.set_limits(limits, promised_nbytes)
        if changed:
            self._regroup()

    def _regroup(self) -> None:
        """Move pages to their tenants' pools, in the order of their last use."""
        strays: list[list[tuple[int, int]]] = []
        for first in range(1, self.records.number_end, REGROUP_LOOKED_AT):
            with self._lock:
                strays.append(
                    self.records.strays(
                        first, min(first + REGROUP_LOOKED_AT, self.records.number_end)
                    )
                )
            time.sleep(0)  # otherwise this thread would have the lock again
        moving = heapq.merge(*strays, reverse=True)
        while some := list(islice(moving, REGROUPED)):
            with self._lock:
                for used_s, record in some:
                    self.records.regroup(record, used_s)
            time.sleep(0)

    # ---- write: the writer thread only ---------------------------------------------------

    def _write(self, pages: Sequence[Page], is_barrier: bool) -> bool:
        """Store pages, and sync if that is due.

        Return whether everything before is durable. Raises OSError.
        """
        if not pages:
            self.check_io_process()
        if self.stop_reason:
            return False
        if self.space.is_due():
            with self._io:
                self.space.look()
        if self.space.rows_closed:
            if pages or is_barrier:
                raise OSError(errno.ENOSPC, self.space.reason)
            return False
        if pages or self.tombstone_count:
            self.store(pages)
        if is_barrier and self.tombstone_count:  # pages removed while they were written have rows
            self.store([])
        idle = not pages and self.sync_pending
        if is_barrier or idle or self.unsafe_count >= SYNC_PAGES:
            self.sync()
        return True

    def store(self, pages: Sequence[Page]) -> None:
        """Write pages and their rows, and delete the rows of removed pages.

        Raises OSError.
        """
        with self._io:
            self._store(pages)

    def _store(self, pages: Sequence[Page]) -> None:
        """Store pages, with a few attempts on a full file system."""
        for left in range(SPACE_TRIES, -1, -1):
            try:
                self._store_once(pages)
            except OSError as error:
                if not left or not is_full(error) or not self.space.make_room(error):
                    raise
            else:
                return

    def _store_once(self, pages: Sequence[Page]) -> None:
        now_s = self._clock_s()
        reserved: list[tuple[Page, int]] = []
        with self._lock:
            self._index.make_room_for_spaces()
        try:
            # A page may have been offered twice.
            visible = {
                (p.namespace.digest, p.prefix_hash): p for p in pages if p.state is State.VISIBLE
            }
            for page in visible.values():
                record = AGAIN
                while record == AGAIN:  # other threads run meanwhile
                    with self._lock:
                        record = self._index.reserve(page, now_s)
                if record:
                    reserved.append((page, record))
            self._blank_ends(reserved)
            self.files.write_all(self._index.slots(reserved))
            deleted = self._write_rows(reserved, now_s)
        except BaseException:
            with self._lock:
                for _, record in reserved:
                    self.records.cancel(record)
            raise
        with self._lock:
            self._index.publish(reserved, deleted, now_s)

    def _blank_ends(self, reserved: Sequence[tuple[Page, int]]) -> None:
        """Zero the slots behind the pages, which may have bytes of other pages."""
        for page, _ in reserved:
            end, slot_nbytes = page.namespace.page_nbytes, page.namespace.slot_nbytes
            if end < slot_nbytes:
                self._view(page.offset + end, slot_nbytes - end)[:] = bytes(slot_nbytes - end)

    def _write_rows(self, reserved: Sequence[tuple[Page, int]], now_s: int) -> list[bytes]:
        """Write rows in batches, of which all but the last only delete.

        Return the keys of pages that the last one deleted.
        """
        while True:
            with self._lock:
                batch = self._index.take_batch(reserved, now_s)
            try:
                self.rows.write(batch.namespaces, batch.pages, batch.deleted)
            except BaseException:
                with self._lock:
                    self._index.put_back(batch)
                raise
            deleted = batch.deleted_pages()
            if not batch.partial:
                return deleted
            with self._lock:
                self._index.publish([], deleted, now_s)

    @property
    def tombstone_count(self) -> int:
        """Return how many rows wait for their deletion."""
        return self._index.tombstones.count

    @property
    def unsafe_count(self) -> int:
        """Return how many stored pages are not durable yet."""
        return self._index.syncs.unsafe_count

    @property
    def sync_pending(self) -> bool:
        """Return whether a power loss would undo anything."""
        return self._index.syncs.pending

    def sync(self) -> None:
        """Make everything stored before durable: bytes first, then rows.

        Raises OSError; it is unknown then what is durable.
        """
        with self._io:
            self._sync()

    def _sync(self) -> None:
        syncs = self._index.syncs
        with self._lock:
            mark = syncs.begin_sync()
        try:
            self.files.sync()
            self.rows.sync()
        except OSError as error:  # any kind: a sync that ran out of memory has lost writes, too
            with self._lock:
                syncs.fail_sync()
            if not is_full(error):
                raise OSError(f"sync: {error}") from error
            with self._lock:  # the tier goes on, without the pages that may not be on the medium
                self._index.forget_doubtful()
            raise OSError(error.errno, f"sync: {error}") from error
        with self._lock:
            safe = syncs.end_sync(mark)
        while safe:  # freed one by one: freeing millions at once would hold the GIL
            safe.pop()

    # ---- trouble -------------------------------------------------------------------------

    def stop_after_error(self, reason: str) -> None:
        """Stop the tier after an error; the RAM tier continues to serve."""
        with self._lock:
            if self.stop_reason:
                return
            self.stop_reason = reason
        log.error("disk tier stopped, RAM still serves: %s", reason)
        self.on_health(False)

    def on_error(self, doing: str, error: BaseException) -> None:
        """Stop the tier for an error of the disk, but not for a shortage of the node."""
        if is_shortage(error):
            self._shortages.report(doing, error)
        elif is_full(error):
            self.space.report(error)
            self.space.look_soon()
        elif isinstance(error, OSError):
            self.stop_after_error(f"{doing} failed: {error}")
        else:
            log.error("disk tier, %s", doing, exc_info=error)
            self.stop_after_error(f"internal error: {error!r}")

    def check_io_process(self) -> None:
        """Check that the disk's I/O process still runs.

        The writer calls it when it is idle.
        """
        if not self.directory.trouble() or not self._io.acquire(blocking=False):
            return
        try:  # it is not being replaced now
            trouble = self.directory.trouble()
            if trouble and not self.space.rows_closed:
                self.stop_after_error(trouble)
        finally:
            self._io.release()

    def recover(self) -> None:
        """Use the disk again, after a trial: a file and a row are written, synced and read.

        Raises OSError, and stays stopped, if it fails. A tier that only found its file system full
        is not stopped by that.
        """
        if not self._restored:  # a page might overwrite one that is not known
            raise OSError("the rows could not be read at the start; restart the node")
        if not self._io.acquire(timeout=RECOVER_WAIT_S):
            raise OSError(f"a call of the disk has not returned for {RECOVER_WAIT_S:g} s")
        try:
            # otherwise a process that still hangs could not be tried again
            with self.directory.limited():
                forgotten = self._recover()
        except OSError as error:
            if not is_full(error):
                self.stop_after_error(f"recover: {error}")
            raise
        finally:
            self._io.release()
        log.warning(
            "disk tier recovered; %d pages that may not have reached the disk were forgotten",
            forgotten,
        )
        self.on_health(True)

    def _recover(self) -> int:
        """Return how many pages were forgotten, because they may not have reached the disk."""
        if self.directory.trouble():
            with self._lock:
                self._index.syncs.fail_sync()  # a pending sync died with the process
        self.directory.revive()
        self._try_disk()
        with self._lock:
            forgotten = self._index.forget_doubtful()
        self._sync()
        self.space.trust()
        with self._lock:
            self.stop_reason = ""
        return forgotten

    def _try_disk(self) -> None:
        """Write, sync and read a trial, once more if there is room to make for it."""
        try:
            self.directory.trial()
        except OSError as error:
            if not is_full(error) or not self.space.make_room(error):
                raise
            self.directory.trial()

    # ---- status --------------------------------------------------------------------------------

    def uses(self) -> dict[str, Use]:
        """Return each tenant's use of the disk."""
        with self._lock:
            return {account.tenant: account.use() for account in self.records.accounts.all()}

    def page_count(self, digest: bytes) -> int:
        """Return the pages of a namespace on disk."""
        return self._index.namespace_ids.counts[self._index.namespace_ids.known(digest)]

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        with self._lock:
            return self.records.check()

    def close(self) -> None:
        """Close the directory.

        Raises OSError if the rows can not be closed; everything else is closed all the same.
        """
        self.directory.close()
