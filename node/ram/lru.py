"""Use order of pages: an intrusive doubly linked list, O(1) per use and 16 bytes per page.

oldest -> ... -> newest          (a batch is touched tail -> head: its head ends up newest)
"""

from collections.abc import Iterator

from node.ram.aside import Aside
from node.ram.page import Page
from node.ram.turn import Turn


class LruList:
    """Pages of one slot size that may be evicted once nobody holds them. A page is in at most one list."""

    __slots__ = ("_aside", "_root", "count")

    def __init__(self) -> None:
        self._root = root = Page.__new__(Page)  # sentinel: root.newer is the oldest page
        root.newer = root.older = root
        self._aside: Aside[Page] = Aside()  # held pages that would be in the way of who looks for the oldest
        self.count = 0  # those aside included

    def push_newest(self, page: Page) -> None:
        assert page.newer is None
        root, newest = self._root, self._root.older
        assert newest is not None
        page.older, page.newer = newest, root
        newest.newer = root.older = page
        self.count += 1

    def push_oldest(self, page: Page) -> None:
        assert page.newer is None
        root, oldest = self._root, self._root.newer
        assert oldest is not None
        page.older, page.newer = root, oldest
        oldest.older = root.newer = page
        self.count += 1

    def unlink(self, page: Page) -> None:
        older, newer = page.older, page.newer
        if newer is None:
            was_aside = self._aside.discard(page)
            assert was_aside
        else:
            assert older is not None
            older.newer, newer.older = newer, older
            page.older = page.newer = None
        self.count -= 1

    def move_newest(self, page: Page) -> None:
        older, newer = page.older, page.newer
        if newer is None:
            self.unlink(page)
            self.push_newest(page)
            return
        assert older is not None
        older.newer, newer.older = newer, older
        root = self._root
        newest = root.older
        assert newest is not None
        page.older, page.newer = newest, root
        newest.newer = root.older = page

    def oldest(self, turn: Turn) -> Page | None:
        """The oldest page that nobody holds. None: there is none, or the turn is over."""
        if self._aside and (page := self._aside.oldest(_may_go, turn.take)) is not None:
            return page
        root = self._root
        while turn.left > 0 and (first := root.newer) is not root:
            assert first is not None
            if not first.holds:
                return first
            turn.left -= 1
            self.unlink(first)
            self.count += 1
            self._aside.put(first)
        return None

    def give_back(self, page: Page) -> bool:
        """The last reader of a page is done. Whether it was aside, and may be the oldest now."""
        return self._aside.give_back(page)

    def oldest_first(self) -> Iterator[Page]:
        """All but those aside. The page being visited may be unlinked; no other change is allowed meanwhile."""
        page = self._root.newer
        while page is not self._root:
            assert page is not None
            following = page.newer
            yield page
            page = following

    def pages(self) -> list[Page]:
        """All of them; those aside first, in no order."""
        return [*self._aside, *self.oldest_first()]

    def __contains__(self, page: Page) -> bool:
        return page.newer is not None or page in self._aside

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        pages = self.pages()
        wrong = [] if len(pages) == self.count else [f"{len(pages)} pages, {self.count} counted"]
        return wrong + self._aside.check(_may_go)


def _may_go(page: Page) -> bool:
    return not page.holds
