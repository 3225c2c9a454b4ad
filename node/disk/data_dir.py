"""Open a node's data directory, rows and extents, and lock it against other processes.

    data_dir/lock             held by the node, which owns the directory
    data_dir/keeper.lock      held by the node's I/O process while rows and extents are open
    data_dir/rows/            RocksDB: index of the pages on disk
    data_dir/extents/000000   page bytes
    data_dir/reserve          space for the rows to be opened on a full file system
    data_dir/NAME             small files, each replaced as a whole (`node.disk.small_file`)

Two locks, because an I/O process may outlive its node until its current disk call returns.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import resource
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.security.secrets import write_whole
from node.disk.directory import FileSystem
from node.disk.extents import ExtentFiles, FileLayer, empty_last
from node.disk.reserve import RowReserve
from node.disk.rows import Rows, is_full, write_buffer_nbytes

log = logging.getLogger(__name__)

OTHER_FILES = 512  # sockets, rows, libraries: other files that a process has open
# for the I/O process of a killed node, which ends with its current disk call
LOCK_WAIT_S = 20.0
# Kept free for the rows, in write buffers: the log, the file made of it, and merged files
ROWS_BUFFERS = 4
RESERVED_BUFFERS = 2  # that a file keeps for the rows' next start
SMALL_NBYTES_MAX = 1 << 20  # of a small file, the last bytes are read
EMPTIED_MAX = 8  # extents emptied until the rows of a full file system can be opened
_LOCK_STEP_S = 0.02


class DataDir:
    """An open data directory. Calls run in this process, and block as long as the disk does.

    A node has it in a separate process (`node.disk.io_worker`), tests in their own.

    `arena_fd`: the file of the arena, mapped for reading. Raises ConfigError for a directory that
    can not be used, is in use, or was made with another extent size (unless it may keep its own) or
    another key than that of `key_mark` (`node.disk.encryption`).
    """

    def __init__(
        self,
        path: Path,
        disk_nbytes: int,
        extent_nbytes: int,
        arena_fd: int,
        keep_own_extents: bool = False,
        key_mark: str = "",
        layer: FileLayer | None = None,
    ) -> None:
        layer = layer or FileLayer()
        with contextlib.ExitStack() as undo, refused(path):
            self.arena_nbytes = os.fstat(arena_fd).st_size
            self._map = mmap.mmap(arena_fd, self.arena_nbytes, prot=mmap.PROT_READ)
            self._arena = memoryview(self._map)
            undo.callback(self._unmap)
            make_directory(path, layer)
            self._lock = take_lock(path / "keeper.lock", LOCK_WAIT_S)
            undo.callback(release_lock, self._lock)
            self._path, self._layer = path, layer
            buffer_nbytes = write_buffer_nbytes(min(disk_nbytes, layer.space(path)[1]))
            self.reserve_nbytes = ROWS_BUFFERS * buffer_nbytes
            self._reserve = RowReserve(path / "reserve", RESERVED_BUFFERS * buffer_nbytes, layer)
            # First: they have the size of the extents
            self.rows = open_rows(
                path,
                lambda: Rows(
                    path / "rows", extent_nbytes, keep_own_extents, key_mark, buffer_nbytes
                ),
                self._reserve.release,
            )
            undo.callback(self.rows.close)
            self.extent_nbytes = self.rows.extent_nbytes
            self.extent_count = disk_nbytes // self.extent_nbytes
            if not self.extent_count:
                raise ConfigError(
                    f"disk_nbytes={disk_nbytes} is less than one extent of {self.extent_nbytes} "
                    "bytes"
                )
            allow_open_files(self.extent_count)
            self.files = ExtentFiles(
                path / "extents",
                self.extent_nbytes,
                self.extent_count,
                self._view,
                layer,
                self.reserve_nbytes,
            )
            layer.sync_directory(path)  # rows and extents survive a power loss
            undo.pop_all()
        if self.extent_nbytes < extent_nbytes:
            log.info(
                "data_dir keeps its extents of %d bytes; larger pages stay in RAM",
                self.extent_nbytes,
            )

    def trouble(self) -> str:
        """Return what is wrong with the process that does the I/O; always empty in this process."""
        return ""

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: calls in this process have no time limit."""
        return contextlib.nullcontext()

    def revive(self) -> None:
        """Do nothing: there is no process to restart."""

    def restart(self) -> None:
        """Do nothing: there is no process to restart."""

    def trial(self) -> None:
        """Write, sync and read a test file and a row. Raises OSError."""
        self.files.trial()
        self.rows.trial()

    def space(self) -> FileSystem:
        """Return the space of the file system; allocate a used reserve again if there is room.

        Old extents are returned until half of the reserved bytes are free, so the missing file
        counts twice.
        """
        free_nbytes, _ = self._layer.space(self._path)
        self._reserve.keep(free_nbytes - self.reserve_nbytes // 2)
        return FileSystem(
            *self._layer.space(self._path),
            self.reserve_nbytes + 2 * self._reserve.missing_nbytes,
            self.rows.failed,
            frozenset(self.files.empty),
        )

    def read_file(self, name: str) -> bytes:
        """Return the last SMALL_NBYTES_MAX bytes of a small file. Raises OSError."""
        with open(self._path / name, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - SMALL_NBYTES_MAX))
            return file.read(SMALL_NBYTES_MAX)

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a small file atomically; the new one survives a power loss. Raises OSError."""
        write_whole(self._path / name, content, 0o600)

    def _view(self, offset: int, nbytes: int) -> memoryview:
        return self._arena[offset : offset + nbytes]

    def _unmap(self) -> None:
        self._arena.release()
        # An exception that is still referenced holds a view, and closes it later
        with contextlib.suppress(BufferError):
            self._map.close()

    def close(self) -> None:
        """Close everything, even if the rows fail. Raises OSError if they cannot be closed."""
        try:
            self.files.close()
            self.rows.close()
        finally:
            release_lock(self._lock)
            self._unmap()


def open_rows(path: Path, open_once: Callable[[], Rows], release: Callable[[], bool]) -> Rows:
    """Open the rows; on a full file system, `release` frees the space that is kept for that.

    If that is not enough, extents are emptied, whose pages are lost.
    """
    for _ in range(1 + EMPTIED_MAX):
        try:
            return open_once()
        except OSError as error:
            if not is_full(error) or not (release() or empty_last(path / "extents")):
                raise
    return open_once()


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Translate system errors at a node's start to ConfigError."""
    try:
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"data_dir={path} is in use by another node; give each node its own. If that "
            "node has ended, its I/O process still waits for the disk"
        ) from error
    except OSError as error:
        remedy = "; free some of its file system, or name another" if is_full(error) else ""
        raise ConfigError(f"data_dir={path} can not be used: {error}{remedy}") from error


def make_directory(path: Path, layer: FileLayer) -> None:
    """Make a directory and its parents, and sync each new entry."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in missing:
        layer.sync_directory(directory.parent)


def open_to_others(path: Path) -> str:
    """Return the first path that other users of the host may access; empty if there is none.

    Only the bits of others count: access by a group may be intended, as with fsGroup in Kubernetes.
    """
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return str(path)
    if not mode & stat.S_IXOTH:  # other users can not reach its content
        return ""
    inside = (entry for entry in sorted(path.iterdir()) if not entry.is_symlink())
    return next((str(entry) for entry in inside if entry.stat().st_mode & stat.S_IRWXO), "")


def warn_if_open(path: Path) -> None:
    """Log a warning with the remedy if other users can read the directory, as with older releases.

    The modes are not changed: the operator may have set them for a program that reads it.
    """
    try:
        found = open_to_others(path)
    except OSError as error:
        log.warning("data_dir=%s: can not check whether other users may read it: %s", path, error)
        return
    if found:
        log.warning(
            "data_dir=%s is readable for other users of this host (%s): its rows name "
            "models, tenants, salts and prompt hashes; close it with: chmod -R o= %s",
            path,
            found,
            shlex.quote(str(path)),
        )


def take_lock(path: Path, wait_s: float) -> int:
    """Take the lock and return its descriptor.

    Raises BlockingIOError if another process has it for longer.
    """
    end = time.monotonic() + wait_s
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(lock)
                raise
            time.sleep(_LOCK_STEP_S)
        else:
            return lock


def release_lock(lock: int) -> None:
    """Close the lock's descriptor.

    Ignore errors: on a broken file system the first error says more.
    """
    with contextlib.suppress(OSError):
        os.close(lock)


def allow_open_files(extent_count: int) -> None:
    """Raise the limit on open files: each extent is one.

    Raises ConfigError if this process may not have so many.
    """
    wanted = extent_count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (
        soft != resource.RLIM_INFINITY
        and soft < wanted
        and (hard == resource.RLIM_INFINITY or hard >= wanted)
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    elif soft != resource.RLIM_INFINITY and soft < wanted:
        raise ConfigError(
            f"{extent_count} extents on disk need {wanted} open files, {hard} are allowed (ulimit "
            "-Hn); allow more, or take fewer disk_nbytes or, in a new data_dir, a larger "
            "disk_extent_nbytes"
        )
