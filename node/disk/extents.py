"""Store page bytes on disk: one preallocated file per extent, directly from and to arena slots.

`O_DIRECT` where the file system allows it: no copy through the page cache, which so stays free for
the serving process. Offsets and lengths are multiples of 4 KiB, as slots are. Reads and writes
release the GIL.

Every extent's file is open from the start, empty until its first page comes: so the disk never
lacks descriptors later. The last bytes of the file system are left to the rows: an extent that
would take them fails as on a full file system.
"""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from node.disk.encryption import UNIT_NBYTES, DiskLocation

log = logging.getLogger(__name__)

# Neighbouring slots are copied together and written at once up to this size. A call costs as much
# as copying 256 KiB, so pages of 4 KiB are written ten times as fast, and large ones are not
# copied.
RUN_NBYTES_MAX = 256 * 1024


class Slot(NamedTuple):
    """A page to be written: its location in the arena, and on disk."""

    arena_offset: int
    nbytes: int
    location: DiskLocation


class FileLayer:
    """The system calls in use.

    Tests replace it by a layer that fails.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open a file."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def space(self, path: Path) -> tuple[int, int]:
        """Return the bytes of a file system that are free for its users, and all of its bytes."""
        about = os.statvfs(path)
        return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize

    def allocate(self, fd: int, nbytes: int) -> None:
        """Allocate a file's blocks."""
        os.posix_fallocate(fd, 0, nbytes)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        """Write at an offset; return the bytes written."""
        return os.pwritev(fd, [view], offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Read at an offset; return the bytes read."""
        return os.preadv(fd, [view], offset)

    def sync(self, fd: int) -> None:
        """Make a file's data durable."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make new entries of a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)


class OpenExtents:
    """The open files of a region of bytes.

    Any number of threads may read. Raises OSError.
    """

    def __init__(
        self, directory: Path, extent_nbytes: int, count: int, flags: int, layer: FileLayer
    ) -> None:
        """Open a number of extents with flags of open(2)."""
        self._extent_nbytes = extent_nbytes
        self._layer = layer
        self._fds: list[int] = []
        try:
            for number in range(count):
                self._fds.append(layer.open(directory / f"{number:06d}", flags))
        except OSError:
            self.close()
            raise

    def find(self, offset: int) -> tuple[int, int, int]:
        """Return (extent number, descriptor, offset within it)."""
        number, within = divmod(offset, self._extent_nbytes)
        return number, self._fds[number], within

    def fd(self, number: int) -> int:
        """Return an extent's descriptor."""
        return self._fds[number]

    def read(self, offset: int, view: memoryview) -> bool:
        """Fill `view`; return False if the file is shorter, so that there is no page."""
        _, fd, within = self.find(offset)
        while view.nbytes:
            moved = self._layer.read(fd, view, within)
            if moved <= 0:
                return False
            view, within = view[moved:], within + moved
        return True

    def close(self) -> None:
        """Close all extents."""
        for fd in self._fds:
            self._layer.close(fd)
        self._fds.clear()


def empty_last(directory: Path) -> bool:
    """Empty the last extent that has bytes; return False if none has any, or if it would not help.

    Its pages are lost. It makes room on a full file system for rows that can not be opened.
    """
    if not directory.is_dir():
        return False
    about = os.statvfs(directory)
    if about.f_files and not about.f_favail:  # an emptied file keeps its inode
        return False
    numbered = (path for path in directory.iterdir() if path.name.isascii() and path.name.isdigit())
    full = [path for path in numbered if path.stat().st_blocks]
    if not full:
        return False
    os.truncate(max(full), 0)
    log.warning("the file system is full: emptied extent %s for the rows", max(full).name)
    return True


class ExtentFiles:
    """A region of bytes laid over files of `extent_nbytes`.

    Thread-safe, but only one thread may write. Raises OSError. `view(offset, nbytes)` is the
    arena's memory. New extents leave `reserve_nbytes` of the file system free.
    """

    def __init__(
        self,
        directory: Path,
        extent_nbytes: int,
        count: int,
        view: Callable[[int, int], memoryview],
        layer: FileLayer | None = None,
        reserve_nbytes: int = 0,
    ) -> None:
        self._directory = directory
        self._reserve_nbytes = reserve_nbytes
        self._extent_nbytes = extent_nbytes
        self._view = view
        self._layer = layer or FileLayer()
        self._lock = threading.Lock()
        self._unsynced: set[int] = set()
        self._run = memoryview(mmap.mmap(-1, UNIT_NBYTES))  # page-aligned, as O_DIRECT needs it
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = os.stat(directory)
        self._identity = (about.st_dev, about.st_ino)
        self._drop_from(count)
        self._direct = os.O_DIRECT if self._direct_works() else 0
        flags = os.O_RDWR | os.O_CREAT | self._direct
        self._open = OpenExtents(directory, extent_nbytes, count, flags, self._layer)
        nbytes = [os.fstat(self._open.fd(number)).st_size for number in range(count)]
        self._allocated = {number for number in range(count) if nbytes[number] == extent_nbytes}
        self.empty = {number for number in range(count) if not nbytes[number]}
        # An earlier run may have been killed before it synced its files: the first sync covers all.
        self._unsynced |= self._allocated
        self._layer.sync_directory(directory)
        if not self.direct:
            log.warning("%s does not support O_DIRECT; using the page cache", directory)

    @property
    def direct(self) -> bool:
        """Return whether files are open for O_DIRECT."""
        return bool(self._direct)

    def _direct_works(self) -> bool:
        probe = self._directory / "probe"
        try:
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True

    def _drop_from(self, count: int) -> None:
        """Delete the files of extents from number `count` on, left by a larger earlier run."""
        for path in self._directory.iterdir():
            if path.name.isascii() and path.name.isdigit() and int(path.name) >= count:
                path.unlink()

    def write_all(self, slots: Sequence[Slot]) -> None:
        """Write whole slots, neighbouring small ones in one call.

        The bytes survive a crash of the process now, and one of the host after `sync`.
        """
        run: list[Slot] = []
        start = end = nbytes = 0
        for slot in sorted(slots, key=lambda slot: slot.location.offset):
            offset = slot.location.offset
            same_extent = offset // self._extent_nbytes == start // self._extent_nbytes
            if not (
                run and offset == end and same_extent and nbytes + slot.nbytes <= RUN_NBYTES_MAX
            ):
                self._write_run(run)
                run, start, nbytes = [], offset, 0
            run.append(slot)
            nbytes += slot.nbytes
            end = offset + slot.nbytes
        self._write_run(run)

    def _write_run(self, run: list[Slot]) -> None:
        if len(run) == 1:
            self._write_slot(run[0])
        elif run:
            nbytes = 0
            for slot in run:
                self._copy(slot, 0, self._run[nbytes : nbytes + slot.nbytes])
                nbytes += slot.nbytes
            self._write(run[0].location.offset, self._run[:nbytes])

    def _write_slot(self, slot: Slot) -> None:
        """Write a slot from the arena, or unit by unit through encryption."""
        if slot.location.encryption is None:
            self._write(slot.location.offset, self._view(slot.arena_offset, slot.nbytes))
            return
        for start in range(0, slot.nbytes, UNIT_NBYTES):
            unit = self._run[: slot.nbytes - start]
            self._copy(slot, start, unit)
            self._write(slot.location.offset + start, unit)

    def _copy(self, slot: Slot, start: int, target: memoryview) -> None:
        """Copy bytes of a slot as they are on disk."""
        source = self._view(slot.arena_offset + start, target.nbytes)
        if slot.location.encryption is None:
            target[:] = source
        else:
            slot.location.encryption.encrypt(start, source, target)

    def _write(self, offset: int, view: memoryview) -> None:
        number, fd, within = self._open.find(offset)
        if number not in self._allocated:
            self._allocate(number, fd)
        while view.nbytes:
            moved = self._layer.write(fd, view, within)
            if moved <= 0:
                raise OSError(errno.EIO, f"extent {number}: nothing was written at {within}")
            view, within = view[moved:], within + moved
        with self._lock:
            self._unsynced.add(number)  # not before: a sync by another thread would take it as done

    def read(self, offset: int, view: memoryview) -> bool:
        """See `OpenExtents.read`."""
        return self._open.read(offset, view)

    def _allocate(self, number: int, fd: int) -> None:
        """Allocate all blocks of an extent, so that it cannot run out of space later."""
        had_nbytes = os.fstat(fd).st_size
        free_nbytes, _ = self._layer.space(self._directory)
        if free_nbytes - self._extent_nbytes < self._reserve_nbytes:
            raise OSError(
                errno.ENOSPC,
                f"No space left for an extent of {self._extent_nbytes} bytes: {free_nbytes} are "
                f"free, of which {self._reserve_nbytes} are kept for the rows",
            )
        try:
            self._layer.allocate(fd, self._extent_nbytes)
        except OSError:
            # Return half an extent to a full file system
            os.ftruncate(fd, had_nbytes)
            raise
        self._allocated.add(number)
        self.empty.discard(number)

    def release(self, number: int) -> None:
        """Return an extent's blocks to the file system. No page of it may be in use."""
        os.ftruncate(self._open.fd(number), 0)
        self._allocated.discard(number)
        self.empty.add(number)

    def sync(self) -> None:
        """Make everything written before durable."""
        self._check_directory()
        with self._lock:
            numbers, self._unsynced = self._unsynced, set()
        try:
            for number in numbers:
                self._layer.sync(self._open.fd(number))
        except BaseException:
            with self._lock:
                self._unsynced |= numbers
            raise

    def _check_directory(self) -> None:
        """Raise OSError if the directory was removed: open files of it end with this process."""
        about = os.stat(self._directory)
        if (about.st_dev, about.st_ino) != self._identity:
            raise OSError(errno.ENOENT, f"{self._directory} was replaced by another directory")

    def trial(self) -> None:
        """Write, sync and read 4 KiB beside the extents. Raises OSError if that fails."""
        self._check_directory()
        path = self._directory / "trial"
        fd = self._layer.open(path, os.O_RDWR | os.O_CREAT | self._direct)
        try:
            with mmap.mmap(-1, 4096) as memory, memoryview(memory) as view:
                written = os.urandom(4096)
                view[:] = written
                if self._layer.write(fd, view, 0) != 4096:
                    raise OSError(errno.EIO, "a trial write was short")
                self._layer.sync(fd)
                view[:] = bytes(4096)
                if self._layer.read(fd, view, 0) != 4096 or bytes(view) != written:
                    raise OSError(errno.EIO, "a trial write can not be read back")
        finally:
            self._layer.close(fd)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files."""
        self._open.close()
