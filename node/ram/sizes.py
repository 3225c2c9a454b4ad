"""Pages of one slot size in the order in which they may go: copies first, then what the node keeps for good.

What it keeps is in one list for each merit (`habits.py`), by use; all have the same where nothing is learned. So the
oldest of all is the oldest of one of them, and so is that which is worth least.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvstore.keys import short
from node.ram.habits import GO, Habits
from node.ram.lru import LruList
from node.ram.page import Page, Waiting
from node.ram.turn import Turn

COPIES_FIRST_MS = 1 << 62  # so much older a copy counts than it is


def rank_ms(page: Page) -> int:
    """By which pages of different sizes are compared."""
    return page.used_ms - COPIES_FIRST_MS if page.is_copy else page.used_ms


class SizeOrder:
    """As one `LruList`, of the pages of a `pool`. Not thread-safe."""

    __slots__ = ("_copies", "_going", "_own", "count", "is_known", "pool")

    def __init__(self, pool: Waiting) -> None:
        self.pool = pool
        self._copies = LruList()
        self._own: dict[int, LruList] = {}  # by merit
        self._going: tuple[LruList, int] | None = None  # the list, and the batch in it, that goes next
        self.count = 0
        self.is_known = False  # to those who compare sizes

    def _list(self, page: Page) -> LruList:
        if page.is_copy:
            return self._copies
        own = self._own.get(page.merit)
        if own is None:
            own = self._own[page.merit] = LruList()
        return own

    def push_newest(self, pages: Sequence[Page]) -> None:
        """One after the other."""
        for page in pages:
            if page.merit == GO:
                self._going = None
            lru = self._copies if page.is_copy else self._own.get(page.merit) or self._list(page)
            lru.push_newest(page)
        self.count += len(pages)

    def push_oldest(self, page: Page) -> None:
        self._going = None
        self.count += 1
        self._list(page).push_oldest(page)

    def unlink(self, page: Page) -> None:
        self.count -= 1
        (self._copies if page.is_copy else self._own[page.merit]).unlink(page)

    def use(self, pages: Iterable[Page], tick: int, merit: int) -> int:
        """They are used then, one after the other, in a chain of this merit; the merit of the last of them."""
        for page in pages:
            lru = self._copies if page.is_copy else self._own[page.merit]
            page.tick = tick
            was_aside = page.newer is None  # it was held when it was the oldest
            if merit <= page.merit:
                lru.move_newest(page)
            else:
                lru.unlink(page)
                page.merit = merit
                self._list(page).push_newest(page)
            if was_aside:
                self.pool.came_back(page)
            merit = page.merit
        return merit

    def oldest_copy(self, turn: Turn) -> Page | None:
        """None: there is none that nobody holds, or the turn is over."""
        return self._copies.oldest(turn) if self._copies.count else None

    def oldest(self, turn: Turn) -> Page | None:
        """The page that was used before all others, of those that nobody holds. None: there is none, or the turn is
        over."""
        if self._copies.count:
            copy = self._copies.oldest(turn)
            if copy is not None or turn.over:
                return copy
        if len(self._own) == 1:
            return next(iter(self._own.values())).oldest(turn)
        return self._first(turn, _by_tick)

    def next_to_go(self, turn: Turn, habits: Habits | None) -> Page | None:
        """The same, or that which is worth least by these habits. Pages of one batch go one after the other, so
        that the lists are seldom compared."""
        copy = self.oldest_copy(turn)
        if copy is not None or (self._copies.count and turn.over):
            return copy
        if self._going is not None:
            own, tick = self._going
            page = own.oldest(turn)
            if page is not None and page.tick == tick:
                return page
        page = self._first(turn, _by_tick if habits is None else lambda page: _by_worth(page, habits))
        self._going = (self._own[page.merit], page.tick) if page is not None else None
        return page

    def think_again(self) -> None:
        """About what goes next: another policy rules."""
        self._going = None

    def _first(self, turn: Turn, key: Callable[[Page], Any]) -> Page | None:
        firsts: list[Page] = []
        for own in self._own.values():
            page = own.oldest(turn) if own.count else None
            if page is not None:
                firsts.append(page)
            elif own.count and turn.over:
                return None
        return min(firsts, key=key, default=None)

    def least_worth(self, habits: Habits) -> float:
        """What the page that is worth least is worth, those left out that go first anyway."""
        oldest = [next(own.oldest_first(), None) for own in self._own.values()]
        return min((habits.worth(p.merit, p.tick) for p in oldest if p is not None and p.merit > GO), default=0.0)

    def give_back(self, page: Page) -> bool:
        """The last reader of a page is done. Whether it was aside, and may be the oldest now."""
        self._going = None
        return self._list(page).give_back(page)

    def oldest_first(self) -> Iterator[Page]:
        """All but those aside; nothing may change meanwhile, but that the page being visited is unlinked."""
        yield from self._copies.oldest_first()
        yield from heapq.merge(*(own.oldest_first() for own in self._own.values()), key=_by_tick)

    def pages(self) -> list[Page]:
        """All of them."""
        return self._copies.pages() + [page for own in self._own.values() for page in own.pages()]

    def __contains__(self, page: Page) -> bool:
        return page in self._list(page)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        strange = [page for page in self._copies.pages() if not page.is_copy]
        wrong = self._copies.check()
        for merit, own in self._own.items():
            strange += [page for page in own.pages() if page.is_copy or page.merit != merit]
            ticks = [page.tick for page in own.oldest_first()]
            wrong += own.check() + ([f"merit {merit} is not in order of use"] if ticks != sorted(ticks) else [])
        count = self._copies.count + sum(own.count for own in self._own.values())
        wrong += [f"{count} pages, {self.count} counted"] if count != self.count else []
        return wrong + [f"page {short(page.prefix_hash)} is among the wrong ones" for page in strange]


def _by_worth(page: Page, habits: Habits) -> tuple[float, int]:
    return (habits.worth(page.merit, page.tick) if page.merit > GO else -1.0), page.merit


def _by_tick(page: Page) -> tuple[int, int]:
    return page.tick, page.merit  # of one batch, the lower merit is nearer to the end of the chain
