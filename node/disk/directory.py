"""Define what the disk tier asks of an open data directory.

`node.disk.io_process` does it through an I/O process, `node.disk.data_dir` in the process that
calls: that one, and that of tests. Everything raises OSError where the disk fails.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from node.disk.extents import Slot
from node.disk.rows import PageRow


class RowStore(Protocol):
    """See `node.disk.rows.Rows`."""

    def write(
        self, namespaces: dict[int, bytes], pages: Iterable[PageRow], gone: Iterable[bytes]
    ) -> None: ...

    def sync(self) -> None: ...

    def namespaces(self) -> Iterator[tuple[int, bytes]]: ...

    def pages(self, start: bytes = b"P") -> Iterator[tuple[bytes, bytes]]:
        """Raises Exhausted if the disk hangs."""

    def page(self, key: bytes) -> PageRow | None:
        """The row of one page; None if there is none.

        Raises Exhausted if the disk hangs.
        """

    def purge(self, needles: Sequence[bytes]) -> int:
        """Rewrites the rows without what was deleted; in how many files one of the needles is still
        found.
        """

    def all_pages(self) -> Iterator[tuple[bytes, bytes]]: ...


class PageFiles(Protocol):
    """See `node.disk.extents.ExtentFiles`."""

    @property
    def direct(self) -> bool: ...

    def write_all(self, slots: Sequence[Slot]) -> None: ...

    def read(self, offset: int, view: memoryview) -> bool:
        """Any thread; False if there is less in the file."""

    def sync(self) -> None: ...

    def trial(self) -> None: ...


class Directory(Protocol):
    """The rows and files of one data directory, and whoever works on them."""

    extent_nbytes: int
    extent_count: int

    @property
    def rows(self) -> RowStore: ...

    @property
    def files(self) -> PageFiles: ...

    def trouble(self) -> str:
        """Why nothing can be done any more until `revive`; empty if all is well.

        Never waits.
        """

    def limited(self) -> AbstractContextManager[None]:
        """What takes too long within it raises OSError, if it is done by another process."""

    def revive(self) -> None: ...

    def close(self) -> None: ...
