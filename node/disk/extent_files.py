"""Page bytes on disk: one preallocated file per extent, moved straight between arena slot and file.

`O_DIRECT` where the file system allows: no copy through the page cache, and the serving process's
memory stays its own. Offsets and lengths are multiples of 4 KiB, as slots are. Reads and writes
release the GIL.
"""

import errno
import logging
import mmap
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

# Neighbouring slots are copied together and written at once up to this size: a call costs as much as
# copying 256 KiB, so pages of 4 KiB are written ten times as fast, and large ones are not copied.
RUN_NBYTES_MAX = 256 * 1024


class FileLayer:
    """The system calls in use. Tests put a layer in its place that fails."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Files that were made in it are there after power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


class ExtentFiles:
    """A region of bytes laid over files of `extent_nbytes`. Thread-safe; raises OSError."""

    def __init__(self, directory: Path, extent_nbytes: int, layer: FileLayer | None = None) -> None:
        self._directory = directory
        self._extent_nbytes = extent_nbytes
        self._layer = layer or FileLayer()
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._unsynced: set[int] = set()
        self._run = memoryview(mmap.mmap(-1, RUN_NBYTES_MAX))  # page-aligned, as O_DIRECT needs it
        directory.mkdir(parents=True, exist_ok=True)
        self._layer.sync_directory(directory)
        # An earlier run may have been killed before it synced what it made and wrote: the first sync is for all.
        self._unsynced |= {int(path.name) for path in directory.iterdir() if path.name.isdigit()}
        self.direct = self._direct_works()
        if not self.direct:
            log.warning("%s does not support O_DIRECT; using the page cache", directory)

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

    def write(self, offset: int, view: memoryview) -> None:
        """Whole slots. The bytes survive a crash of the process now and one of the host after `sync`."""
        number, within = divmod(offset, self._extent_nbytes)
        fd = self._fd(number)
        while view.nbytes:
            moved = self._layer.write(fd, view, within)
            if moved <= 0:
                raise OSError(errno.EIO, f"extent {number}: nothing was written at {within}")
            view, within = view[moved:], within + moved
        with self._lock:
            self._unsynced.add(number)  # not before: a sync by another thread would take it as done

    def write_all(self, slots: list[tuple[int, memoryview]]) -> None:
        """Writes many slots; neighbouring small ones in one call. One thread at a time."""
        run: list[memoryview] = []
        start = end = nbytes = 0
        for offset, view in sorted(slots, key=lambda slot: slot[0]):
            same_extent = offset // self._extent_nbytes == start // self._extent_nbytes
            if not (run and offset == end and same_extent and nbytes + view.nbytes <= RUN_NBYTES_MAX):
                self._write_run(start, run)
                run, start, nbytes = [], offset, 0
            run.append(view)
            nbytes += view.nbytes
            end = offset + view.nbytes
        self._write_run(start, run)

    def _write_run(self, offset: int, views: list[memoryview]) -> None:
        if len(views) <= 1:
            for view in views:
                self.write(offset, view)
            return
        nbytes = 0
        for view in views:
            self._run[nbytes : nbytes + view.nbytes] = view
            nbytes += view.nbytes
        self.write(offset, self._run[:nbytes])

    def read(self, offset: int, view: memoryview) -> None:
        number, within = divmod(offset, self._extent_nbytes)
        fd = self._fd(number)
        while view.nbytes:
            moved = self._layer.read(fd, view, within)
            if moved <= 0:
                raise OSError(errno.EIO, f"extent {number} ends before {within + view.nbytes}")
            view, within = view[moved:], within + moved

    def sync(self) -> None:
        """Everything written before is on the medium when this returns."""
        with self._lock:
            numbers, self._unsynced = self._unsynced, set()
        try:
            for number in numbers:
                self._layer.sync(self._fd(number))
        except BaseException:
            with self._lock:
                self._unsynced |= numbers
            raise

    def _fd(self, number: int) -> int:
        with self._lock:
            fd = self._fds.get(number)
            if fd is None:
                fd = self._fds[number] = self._open(number)
            return fd

    def _open(self, number: int) -> int:
        """Opens an extent's file; a new one gets all its blocks now, so that it can not run out later."""
        path = self._directory / f"{number:06d}"
        fd = self._layer.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0))
        try:
            had_nbytes = os.fstat(fd).st_size
            if had_nbytes != self._extent_nbytes:
                self._allocate(fd, had_nbytes)
        except OSError:
            self._layer.close(fd)
            raise
        return fd

    def _allocate(self, fd: int, had_nbytes: int) -> None:
        try:
            self._layer.allocate(fd, self._extent_nbytes)
        except OSError:
            os.ftruncate(fd, had_nbytes)  # a full file system gets back what was found for half an extent
            raise
        self._layer.sync_directory(self._directory)

    def drop_from(self, count: int) -> None:
        """Gives the files of extents from number `count` on back: an earlier run may have had more."""
        for path in self._directory.iterdir():
            if path.name.isdigit() and int(path.name) >= count:
                path.unlink()
                self._unsynced.discard(int(path.name))

    def trial(self) -> None:
        """Writes, syncs and reads back 4 KiB beside the extents. Raises OSError if that fails."""
        path = self._directory / "trial"
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        fd = self._layer.open(path, flags)
        try:
            with mmap.mmap(-1, 4096) as memory, memoryview(memory) as view:
                view[:8] = b"kvstore\n"
                if self._layer.write(fd, view, 0) != 4096:
                    raise OSError(errno.EIO, "a trial write was short")
                self._layer.sync(fd)
                view[:8] = bytes(8)
                if self._layer.read(fd, view, 0) != 4096 or bytes(view[:8]) != b"kvstore\n":
                    raise OSError(errno.EIO, "a trial write can not be read back")
        finally:
            self._layer.close(fd)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                self._layer.close(fd)
            self._fds.clear()
