"""The use order of the pages of one slot size: copies go first, then the node's own."""

from collections.abc import Iterable, Iterator, Sequence

from kvstore.keys import short
from node.ram.lru import LruList
from node.ram.page import Page, Waiting
from node.ram.turn import Turn

COPIES_FIRST_MS = 1 << 62  # so much older a copy counts than it is


def rank_ms(page: Page) -> int:
    """By which pages of different sizes are compared."""
    return page.used_ms - COPIES_FIRST_MS if page.is_copy else page.used_ms


class SizeOrder:
    """As one `LruList`, of the pages of a `pool`. Not thread-safe."""

    __slots__ = ("_copies", "_own", "is_known", "pool")

    def __init__(self, pool: Waiting) -> None:
        self.pool = pool
        self._copies = LruList()
        self._own = LruList()
        self.is_known = False  # to those who compare sizes

    @property
    def count(self) -> int:
        return self._copies.count + self._own.count

    def _list(self, page: Page) -> LruList:
        return self._copies if page.is_copy else self._own

    def push_newest(self, pages: Sequence[Page]) -> None:
        """One after the other."""
        for page in pages:
            self._list(page).push_newest(page)

    def push_oldest(self, page: Page) -> None:
        self._list(page).push_oldest(page)

    def unlink(self, page: Page) -> None:
        self._list(page).unlink(page)

    def use(self, pages: Iterable[Page]) -> None:
        """They are used now, one after the other."""
        copies, own = self._copies, self._own
        for page in pages:
            was_aside = page.newer is None  # it was held when it was the oldest
            (copies if page.is_copy else own).move_newest(page)
            if was_aside:
                self.pool.came_back(page)

    def oldest_copy(self, turn: Turn) -> Page | None:
        """None: there is none that nobody holds, or the turn is over."""
        return self._copies.oldest(turn) if self._copies.count else None

    def oldest(self, turn: Turn) -> Page | None:
        """The page that was used before all others, of those that nobody holds. None: there is none, or the turn is
        over."""
        copy = self.oldest_copy(turn)
        if copy is not None or (self._copies.count and turn.over):
            return copy
        return self._own.oldest(turn)

    def give_back(self, page: Page) -> bool:
        """The last reader of a page is done. Whether it was aside, and may be the oldest now."""
        return self._list(page).give_back(page)

    def oldest_first(self) -> Iterator[Page]:
        """All but those aside; nothing may change meanwhile, but that the page being visited is unlinked."""
        yield from self._copies.oldest_first()
        yield from self._own.oldest_first()

    def pages(self) -> list[Page]:
        """All of them."""
        return self._copies.pages() + self._own.pages()

    def __contains__(self, page: Page) -> bool:
        return page in self._list(page)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        strange = [page for page in self._copies.pages() if not page.is_copy]
        strange += [page for page in self._own.pages() if page.is_copy]
        wrong = self._copies.check() + self._own.check()
        return wrong + [f"page {short(page.prefix_hash)} is among the wrong ones" for page in strange]
