"""The data directory of a node: one process at a time, opened and put together here.

data_dir/lock             held while a node runs
data_dir/rows/            RocksDB: what is on disk
data_dir/extents/000000   page bytes
"""

import contextlib
import fcntl
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError
from node.disk.extent_files import ExtentFiles, FileLayer
from node.disk.records import Records
from node.disk.rows import Rows
from node.disk.tier import DiskTier

log = logging.getLogger(__name__)

OTHER_FILES = 512  # sockets, rows, libraries: what a node has open beside its extents


def open_data_dir(
    path: Path,
    disk_nbytes: int,
    extent_nbytes: int,
    queue_nbytes_max: int,
    view: Callable[[int, int], memoryview],
    layer: FileLayer | None = None,
    keep_own_extents: bool = False,
) -> tuple[DiskTier, int]:
    """(the disk tier, the descriptor that holds the lock). Raises ConfigError for a directory that
    can not be used, is in use, or was made with another extent size (unless it may keep its own)."""
    layer = layer or FileLayer()
    try:
        _make(path, layer)
        with contextlib.ExitStack() as undo:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows = Rows(path / "rows", extent_nbytes, keep_own_extents)  # first: they know what the extents are
            undo.callback(rows.close)
            extent_count = disk_nbytes // rows.extent_nbytes
            if not extent_count:
                raise ConfigError(f"disk_nbytes={disk_nbytes} is less than one extent of {rows.extent_nbytes} bytes")
            _allow_open_files(extent_count)
            files = ExtentFiles(path / "extents", rows.extent_nbytes, layer)
            files.drop_from(extent_count)
            layer.sync_directory(path)  # rows and extents are there after power loss
            undo.pop_all()
    except BlockingIOError as error:
        raise ConfigError(f"data_dir={path} is in use by another node; give each node its own") from error
    except OSError as error:
        raise ConfigError(f"data_dir={path} can not be used: {error}") from error
    if rows.extent_nbytes < extent_nbytes:
        log.info("data_dir keeps its extents of %d bytes; larger pages stay in RAM", rows.extent_nbytes)
    records = Records(extent_count * rows.extent_nbytes, rows.extent_nbytes)
    return DiskTier(rows, files, records, view, queue_nbytes_max), lock


def _make(path: Path, layer: FileLayer) -> None:
    """The directory and what it lies in, to stay: each new one is an entry of the one above."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        layer.sync_directory(directory.parent)


def _allow_open_files(extent_count: int) -> None:
    """Each extent is an open file. Raises ConfigError if the process may not have so many."""
    wanted = extent_count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard >= wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    elif soft != resource.RLIM_INFINITY and soft < wanted:
        raise ConfigError(
            f"{extent_count} extents on disk need {wanted} open files, {hard} are allowed (ulimit -Hn); allow more, "
            "or take fewer disk_nbytes or, in a new data_dir, a larger disk_extent_nbytes"
        )
