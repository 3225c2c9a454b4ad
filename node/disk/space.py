"""Fit the disk tier into its file system, which may be smaller than the tier's size, or full.

    capacity   --disk-bytes
    usable     extents that have blocks, and those for which the file system has space now
    withheld   the other extents: the allocator does not use them, so full means evict

Every few seconds the free space is compared with the extents that have no blocks yet. Some bytes
stay free for the rows (`reserve_nbytes`). If others use the reserve up, an extent with old pages is
evicted and returned to the file system, but never more than half of the extents. If RocksDB found
the file system full, it takes no more writes: then the I/O process is replaced, which opens the
rows anew.

An error of the disk is something else: it stops the tier (`node.disk.tier`).
"""

import logging
import threading
import time
from collections.abc import Callable

from node.disk.directory import Directory, FileSystem
from node.disk.index import FORGOTTEN, DiskIndex
from node.disk.rows import is_full

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks at the free space
LOG_S = 60.0  # between two lines about a full file system
# After an extent could not be allocated although the file system says that it has space, as with a
# quota of a project: then one extent is tried again.
RETRY_S = 60.0
RESTART_S = 30.0  # between two attempts to open the rows again
GROWTH = 16  # a look adds one of so many withheld extents, or one
SPARE_EXTENTS = 1  # that must be free before a limited tier grows again
KEPT_SHARE = 2  # one of so many extents is never returned
READ_S = 1.0  # for reads of an extent that is being returned
MIB = 1 << 20


class SpaceLimit:
    """The limit that the file system sets. The caller holds the tier's I/O lock.

    `lock` guards the index. `on_change` receives a text when the tier gets limited or grows.
    """

    def __init__(self, directory: Directory, index: DiskIndex, lock: threading.Lock) -> None:
        self._directory = directory
        self._index = index
        self._slots = index.records.slots
        self._lock = lock
        self._look_at = self._log_at = self._retry_at = self._restart_at = 0.0
        self._most = 0  # extents that had blocks
        self.file_system = FileSystem()
        self.reason = ""
        self.rows_closed = False  # they could not be opened again
        self.on_change: Callable[[bool, str], None] = lambda limited, text: None

    @property
    def usable_nbytes(self) -> int:
        """Return how much of its capacity the tier uses, or may use."""
        return self._slots.usable_nbytes

    def restored(self, file_system: FileSystem) -> None:
        """Set the limit at the start, before the first write."""
        self._fit(file_system)
        self._look_at = time.monotonic() + LOOK_S

    def is_due(self) -> bool:
        """Return whether to call `look`."""
        return time.monotonic() >= self._look_at

    def look_soon(self) -> None:
        """Make the next look due."""
        self._look_at = 0.0

    def trust(self) -> None:
        """Look, and believe the file system again that it has space. Raises OSError."""
        self._retry_at = self._restart_at = 0.0
        self.look()

    def look(self) -> None:
        """Compare the limit with the free space, and open rows that failed. Raises OSError."""
        self._look_at = time.monotonic() + LOOK_S
        if self.rows_closed:
            self.rows_closed = bool(self._directory.trouble())  # `recover` may have opened them
        if self.rows_closed and not self._reopen_rows():
            return
        file_system = self._directory.space()
        self._fit(file_system)
        if self._is_short(file_system):
            self._return_extent()
        if file_system.rows_failed and self._reopen_rows():
            self._fit(self._directory.space())

    def make_room(self, error: OSError) -> bool:
        """React to a write that found the file system full; return whether to try it again.

        Raises OSError.
        """
        self.report(error)
        if self.rows_closed:
            return False
        self.file_system = file_system = self._directory.space()
        if self._growth(file_system) > 0:
            self._retry_at = time.monotonic() + RETRY_S  # the numbers are wrong: a quota
        was_nbytes = self._slots.usable_nbytes
        self._fit(file_system)
        changed = self._slots.usable_nbytes != was_nbytes
        if file_system.rows_failed or self._is_short(file_system):
            changed |= self._return_extent()
        if file_system.rows_failed:
            changed |= self._reopen_rows()
        return changed

    def report(self, error: BaseException) -> None:
        """Count a full file system, and log it now and then."""
        self._index.counters.no_space_errors += 1
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_S
            log.warning(
                "disk tier: %s; it evicts pages and goes on with what it has, up to %d of %d MiB; "
                "free space in its file system, or lower --disk-bytes",
                error,
                self._slots.usable_nbytes // MIB,
                self._slots.region_nbytes // MIB,
            )

    # ---- limit ---------------------------------------------------------------------------

    def _growth(self, file_system: FileSystem) -> int:
        """Return how many extents may get blocks."""
        free_nbytes = file_system.free_nbytes - file_system.reserve_nbytes
        return max(0, free_nbytes // self._slots.extent_nbytes)

    def _is_short(self, file_system: FileSystem) -> bool:
        """Return whether the rows may soon find no space."""
        return file_system.free_nbytes < file_system.reserve_nbytes // 2

    def _fit(self, file_system: FileSystem) -> None:
        """Withhold extents that would find no space, or use some of them again."""
        if len(file_system.empty) < len(self.file_system.empty):
            self._retry_at = 0.0  # an extent got blocks since
        self.file_system = file_system
        is_retry = self._retry_at and time.monotonic() >= self._retry_at
        growth = 0 if self._retry_at and not is_retry else self._growth(file_system)
        with self._lock:
            withheld = self._slots.withheld
            self._most = max(self._most, self._slots.extent_count - len(file_system.empty))
            waiting = sorted(file_system.empty - withheld)
            if len(waiting) > growth:
                for number in waiting[growth:]:
                    self._slots.withhold(number)
            elif withheld and growth > len(waiting) + SPARE_EXTENTS:
                count = 1 if is_retry else -(-len(withheld) // GROWTH)
                for number in sorted(withheld)[: min(count, growth - len(waiting))]:
                    self._slots.supply(number)
            if is_retry:  # the next failure starts another wait
                self._retry_at = 0.0 if not withheld else time.monotonic() + RETRY_S
        self._explain()

    def _explain(self) -> None:
        """Set the reason, and announce a limit or its end."""
        slots, file_system, was = self._slots, self.file_system, self.reason
        if self.rows_closed:
            self.reason = "its rows find no space, so nothing is written"
        elif slots.withheld:
            self.reason = (
                f"its file system has no space for more than {slots.usable_nbytes // MIB:,} of "
                f"{slots.region_nbytes // MIB:,} MiB: {file_system.free_nbytes // MIB:,} of "
                f"{file_system.total_nbytes // MIB:,} MiB are free, of which "
                f"{file_system.reserve_nbytes // MIB:,} are kept for the rows"
            )
        else:
            self.reason = ""
        if bool(was) == bool(self.reason):
            return
        if self.reason:
            log.warning(
                "disk tier limited: %s; free space there, or lower --disk-bytes", self.reason
            )
            self.on_change(True, self.reason)
        else:
            text = f"its file system has space for all of {slots.region_nbytes // MIB:,} MiB again"
            log.warning("disk tier: %s", text)
            self.on_change(False, text)

    # ---- space for the rows --------------------------------------------------------------------

    def _return_extent(self) -> bool:
        """Return an extent to the file system: a free one, or one with old pages.

        Return False if there is none that may go.
        """
        empty, slots = self.file_system.empty, self._slots
        if slots.extent_count - len(empty) <= self._most // KEPT_SHARE:
            return False
        with self._lock:
            number = next((n for n in slots.free_extents() if n not in empty), -1)
            area = None if number >= 0 else self._index.records.coldest_extent()
        if number < 0 and area is None:
            return False
        if area is not None:
            number = area.start >> slots.level_max
            if not self._evict(area):
                return False
        with self._lock:
            slots.withhold(number)
        self._directory.files.release(number)
        self.file_system = self.file_system._replace(empty=empty | {number})
        self._explain()
        log.warning(
            "disk tier: returned %d MiB to its file system, for the rows",
            slots.extent_nbytes // MIB,
        )
        return True

    def _evict(self, area: range) -> bool:
        """Evict all pages of an extent; return False if one of them is being read for long."""
        records, slots = self._index.records, self._slots
        end = time.monotonic() + READ_S
        with self._lock:
            if not slots.close(area):
                return False
        try:
            while True:
                with self._lock:
                    some = records.published_in(area, FORGOTTEN)
                    for record in some:
                        self._index.forget(record)
                    self._index.counters.pages_evicted += len(some)
                    if not slots.blocks_in(area):
                        return True
                if not some and time.monotonic() > end:
                    return False
                time.sleep(0 if some else 0.01)
        finally:
            with self._lock:
                slots.reopen(area)

    def _reopen_rows(self) -> bool:
        """Open the rows again; return False if they find no space. Raises OSError."""
        if self.rows_closed and time.monotonic() < self._restart_at:
            return False
        try:
            self._directory.restart()
        except OSError as error:
            if not is_full(error):
                raise
            self.rows_closed, self._restart_at = True, time.monotonic() + RESTART_S
            self._explain()
            return False
        self.rows_closed = False
        self.file_system = self._directory.space()
        for number in self.file_system.empty:  # some may have been emptied to open the rows
            area = self._slots.extent(number)
            if self._slots.blocks_in(area):
                self._evict(area)
        self._explain()
        return True
