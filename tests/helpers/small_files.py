"""Small files of a data directory, without a node."""

from pathlib import Path

from node.disk.data_dir import DataDir
from node.disk.extents import FileLayer
from node.disk.small_file import SmallFile


class SmallFiles(DataDir):
    """A data directory of which only the small files are used: it opens no rows."""

    def __init__(self, path: Path) -> None:
        self._path, self._layer = path, FileLayer()

    def open(self, name: str) -> SmallFile:
        """Return a file of this directory."""
        return SmallFile(self, name)
