"""The data directory of a node: one process at a time, opened and put together here.

data_dir/lock             held while a node runs
data_dir/rows/            RocksDB: what is on disk
data_dir/extents/000000   page bytes
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError
from node.disk import DiskTier
from node.extent_files import ExtentFiles, FileLayer
from node.records import Records
from node.rows import Rows


def open_data_dir(
    path: Path,
    disk_nbytes: int,
    extent_nbytes: int,
    queue_nbytes_max: int,
    view: Callable[[int, int], memoryview],
    layer: FileLayer | None = None,
) -> tuple[DiskTier, int]:
    """(the disk tier, the descriptor that holds the lock). Raises ConfigError for a directory that
    can not be used, is in use, or was made with another extent size."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows = Rows(path / "rows", extent_nbytes)  # first: it knows whether the extents are ours
            files = ExtentFiles(path / "extents", extent_nbytes, layer)
            files.drop_from(disk_nbytes // extent_nbytes)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(f"data_dir={path} is in use by another node; give each node its own") from error
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise ConfigError(f"data_dir={path} can not be used: {error}") from error
    records = Records(disk_nbytes, extent_nbytes)
    return DiskTier(rows, files, records, view, queue_nbytes_max), lock
