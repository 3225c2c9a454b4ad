"""Use order of pages: an intrusive doubly linked list, O(1) per use and 16 bytes per page.

oldest -> ... -> newest          (a batch is touched tail -> head: its head ends up newest)
"""

from collections.abc import Iterator

from node.ram.page import Page


class LruList:
    """Pages of one slot size that may be evicted. A page is in at most one list."""

    __slots__ = ("_root", "count")

    def __init__(self) -> None:
        self._root = root = Page.__new__(Page)  # sentinel: root.newer is the oldest page
        root.newer = root.older = root
        self.count = 0

    def push_newest(self, page: Page) -> None:
        assert page.newer is None
        root, newest = self._root, self._root.older
        assert newest is not None
        page.older, page.newer = newest, root
        newest.newer = root.older = page
        self.count += 1

    def unlink(self, page: Page) -> None:
        older, newer = page.older, page.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        page.older = page.newer = None
        self.count -= 1

    def move_newest(self, page: Page) -> None:
        self.unlink(page)
        self.push_newest(page)

    def oldest_first(self) -> Iterator[Page]:
        """The page being visited may be unlinked; no other change is allowed meanwhile."""
        page = self._root.newer
        while page is not self._root:
            assert page is not None
            following = page.newer
            yield page
            page = following
