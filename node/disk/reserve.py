"""Keep space on a file system for the rows, which need some when they are opened."""

import contextlib
import logging
import os
from pathlib import Path

from node.disk.extents import FileLayer

log = logging.getLogger(__name__)


class RowReserve:
    """A preallocated file without content, which is emptied when the rows find no space.

    So a start on a file system that others have filled loses no page.
    """

    def __init__(self, path: Path, nbytes: int, layer: FileLayer) -> None:
        self._path, self._nbytes, self._layer = path, nbytes, layer

    def keep(self, free_nbytes: int) -> None:
        """Allocate the file, unless it is there or would use up more than `free_nbytes`."""
        try:
            if not self.missing_nbytes or free_nbytes < self._nbytes:
                return
            fd = self._layer.open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._layer.allocate(fd, self._nbytes)
            finally:
                self._layer.close(fd)
        except OSError as error:
            log.info("no space is kept for the rows: %s", error)
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def release(self) -> bool:
        """Give the space back to the file system; return whether there was any."""
        try:
            if not self._size():
                return False
            os.truncate(self._path, 0)
        except OSError:
            return False
        log.warning("the file system is full: %s gives its space to the rows", self._path)
        return True

    @property
    def missing_nbytes(self) -> int:
        """Return the bytes that the file lacks."""
        return max(0, self._nbytes - self._size())

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
