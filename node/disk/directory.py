"""Define the interface of an open data directory.

`node.disk.io_process` implements it through an I/O process, `node.disk.data_dir` in the calling
process (the I/O process, or a test). All methods raise OSError for a failure of the disk.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from node.disk.extents import Slot
from node.disk.rows import PageRow, PageRun


class FileSystem(NamedTuple):
    """The space of the file system that has a data directory, in bytes.

    `reserve_nbytes` must stay free for the rows. `rows_failed`: RocksDB may take no more writes
    until it is reopened. `empty`: numbers of extents that have no blocks yet.
    """

    free_nbytes: int = 0
    total_nbytes: int = 0
    reserve_nbytes: int = 0
    rows_failed: bool = False
    empty: frozenset[int] = frozenset()


class RowStore(Protocol):
    """Rows of a data directory; see `node.disk.rows.Rows`."""

    def write(
        self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]
    ) -> None:
        """Write rows and delete others."""

    def sync(self) -> None:
        """Make all rows durable."""

    def namespaces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the namespace rows."""

    def pages(self, start: bytes = b"P") -> Iterator[tuple[bytes, bytes]]:
        """Yield page rows from a key on. Raises Exhausted if the disk hangs."""

    def page(self, key: bytes) -> PageRow | None:
        """Return the row of a page; None if there is none. Raises Exhausted if the disk hangs."""

    def purge(self, needles: Sequence[bytes]) -> int:
        """Rewrite the rows without deleted data; return how many files still contain a needle."""

    def all_pages(self) -> Iterator[PageRun]:
        """Yield all page rows, verified."""


class PageFiles(Protocol):
    """Page bytes of a data directory; see `node.disk.extents.ExtentFiles`."""

    @property
    def direct(self) -> bool:
        """Return whether files are open for O_DIRECT."""

    def write_all(self, slots: Sequence[Slot]) -> None:
        """Write whole slots."""

    def read(self, offset: int, view: memoryview) -> bool:
        """Fill a view from any thread; return False if the file is shorter."""

    def sync(self) -> None:
        """Make all written pages durable."""

    def release(self, number: int) -> None:
        """Return an extent's blocks to the file system. No page of it may be in use."""


class Directory(Protocol):
    """The rows and files of one data directory, and the process that accesses them."""

    extent_nbytes: int
    extent_count: int

    @property
    def rows(self) -> RowStore:
        """Return the rows."""

    @property
    def files(self) -> PageFiles:
        """Return the page files."""

    def trouble(self) -> str:
        """Return why nothing works until `revive`; empty if all is well. It never waits."""

    def limited(self) -> AbstractContextManager[None]:
        """Return a context in which calls to another process raise OSError after a time limit."""

    def revive(self) -> None:
        """Restart the process that does the I/O, if there is one and it has ended."""

    def restart(self) -> None:
        """Reopen the rows in another process, if a process has them."""

    def trial(self) -> None:
        """Write, sync and read a test file and a row. Raises OSError."""

    def space(self) -> FileSystem:
        """Return the space of the file system."""

    def read_file(self, name: str) -> bytes:
        """Return the last bytes of a small file. Raises FileNotFoundError if there is none."""

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a small file atomically; the new one survives a power loss."""

    def close(self) -> None:
        """Close rows, files and process."""
