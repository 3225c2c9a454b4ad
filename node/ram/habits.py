"""How soon pages are used again, learned from the chains that come back. Pure: keys are any integers.

A chain is what one request uses, head first; a later one of the same conversation begins with it. What is known of a
chain is how often it came back, and how much was added then: that is the merit of its pages.

    GO      others are worth more: goes first
    END     the last page of its chain, which may be another when it comes back
    FIRST   used by one request, which added many pages .. by one that added a few .. LAST: came back thrice, a few
    SHARED  with which chains of several conversations begin

For each merit is counted how many pages were used, and how many of these again after how many others: the pages used by
anybody are the clock, so that neither an idle night nor a faster machine changes anything. What a page is worth
follows: the most hits for each page and time that it is kept, if it is kept from now on as long as is best.

    worth(merit, age) = max over t of   hits between age and t / page-time spent between age and t
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from node.ram.chains import TICKS, Chains

GO, END, FIRST = 0, 1, 2
TURNS = 4  # told apart: first, second, third, later
ADDED = (17, 5)  # pages, from which on they are many, some; else a few
STEP = len(ADDED) + 1
LAST = FIRST + TURNS * STEP - 1
SHARED = LAST + 1
MERITS = SHARED + 1
YOUNG_BITS = 6  # ages that are told apart: the first 64 uses, then each power of two
AGES = 21
EDGES = [0, *(1 << YOUNG_BITS + i for i in range(AGES))]
CHAINS_LEAST = 1 << 10
WEIGHED = 8  # chains, from one merit whose worths are made anew to the next
HALVED = 4096  # chains, after which what was counted counts half
PRIOR = 10.0  # pages that never came back


class Used(Protocol):
    """What is known of a page that is here."""

    merit: int
    tick: int


class Merits(NamedTuple):
    """Of a chain that is used: of its pages that are here, and of new ones, but for the last."""

    here: int
    new: int


class Habits:
    """Of the pages of one pool. Not thread-safe."""

    def __init__(self) -> None:
        self.tick = 0
        self._chains = Chains(CHAINS_LEAST)
        self._used = [PRIOR] * MERITS  # pages
        self._again = [[0.0] * AGES for _ in range(MERITS)]  # pages, by age
        self._worth = [[0.0] * AGES for _ in range(MERITS)]
        self._count = 0

    def remember(self, page_count: int) -> None:
        """There is a chain to be remembered for each page."""
        count = max(page_count, CHAINS_LEAST)
        if not len(self._chains) // 2 < count <= len(self._chains) * 5 // 4:
            self._chains.resize(count, self.tick)

    def ask(self, keys: Sequence[int], here: Sequence[Used]) -> None:
        """Somebody wants this chain, of which these leading pages are here. When it is used next, that is a request of
        its own."""
        found = self._chains.find(keys)
        if found is not None:
            self._chains.ask(found.place)
        shared_count = _shared(here)
        if shared_count:
            self._come_back(SHARED, here[shared_count - 1].tick, shared_count)
            self._used[SHARED] += shared_count
        more_count = len(here) - shared_count
        if found is None and more_count:
            self._come_back(here[-1].merit, here[-1].tick, more_count)
            self._used[SHARED] += more_count

    def use(self, keys: Sequence[int], here: Sequence[Used]) -> Merits:
        """A chain is used, of which these leading pages were here."""
        self.tick += len(keys)
        found = self._chains.find(keys)
        if found is None:
            return self._begin(keys, len(here))
        shared_count = _shared(here)
        added = _added(len(keys) - found.common_count)
        merit = found.merit
        if found.asked:
            self._come_back(merit, found.tick, min(found.common_count, found.page_count - 1) - shared_count)
            self._come_back(END, found.tick, found.has_end)
            turn = min((merit - FIRST) // STEP + 1, TURNS - 1)
            merit = FIRST + turn * STEP + added
            self._count_chain(merit, len(keys) - 1 - shared_count)
        elif len(keys) > found.page_count:  # the same request goes on
            self._count_pages(merit, shared_count + 1 - found.page_count)
            merit -= max((merit - FIRST) % STEP - added, 0)
            self._count_pages(merit, len(keys) - 1 - shared_count)
        else:
            return Merits(merit, merit)
        self._chains.forget(found.place)
        self._chains.remember(keys, max(0, len(keys) - 2), merit, self.tick)
        return Merits(merit, merit)

    def _begin(self, keys: Sequence[int], here_count: int) -> Merits:
        """Nobody knows this chain: what is here of it is of others. All of it may be a piece of one: it stays what it
        is."""
        if here_count == len(keys):
            return Merits(GO, FIRST)
        merit = FIRST + _added(len(keys) - here_count)
        self._count_chain(merit, len(keys) - 1 - here_count)
        self._chains.remember(keys, max(here_count, len(keys) - 2), merit, self.tick)
        return Merits(SHARED, merit)

    def next_tick(self) -> int:
        """When the pages of a batch are used, later than those of any other."""
        self.tick += 1
        return self.tick

    def worth(self, merit: int, tick: int) -> float:
        """Of a page that was last used then."""
        return self._worth[merit][_age(self.tick - tick)]

    def _come_back(self, merit: int, tick: int, page_count: int) -> None:
        self._again[merit][_age(self.tick - tick & TICKS)] += max(page_count, 0)

    def _count_pages(self, merit: int, page_count: int) -> None:
        self._used[merit] = max(self._used[merit] + page_count, PRIOR)

    def _count_chain(self, merit: int, page_count: int) -> None:
        """Its last page is not among them."""
        self._count_pages(merit, max(page_count, 0))
        self._count_pages(END, 1)
        self._count += 1
        if self._count % WEIGHED == 0:
            merit = END + self._count // WEIGHED % SHARED
            self._worth[merit] = _worths(self._used[merit], self._again[merit])
        if self._count % HALVED == 0:
            self._used = [(used - PRIOR) / 2 + PRIOR for used in self._used]
            self._again = [[pages / 2 for pages in again] for again in self._again]


def _shared(here: Sequence[Used]) -> int:
    """Leading pages that are."""
    for count, page in enumerate(here):
        if page.merit != SHARED:
            return count
    return len(here)


def _added(page_count: int) -> int:
    """0 for many."""
    for step, least in enumerate(ADDED):
        if page_count >= least:
            return step
    return len(ADDED)


def _age(ticks: int) -> int:
    return min((ticks >> YOUNG_BITS).bit_length(), AGES - 1)


def _worths(used: float, again: list[float]) -> list[float]:
    """By age."""
    waiting = [used]  # at the beginning of each age: pages that have not come back
    for pages in again:
        waiting.append(max(waiting[-1] - pages, 0.0))
    spent = [(waiting[age] + waiting[age + 1]) / 2 * (EDGES[age + 1] - EDGES[age]) for age in range(AGES)]
    worths = []
    for first in range(AGES):
        hits = time = best = 0.0
        for pages, page_time in zip(again[first:], spent[first:], strict=True):
            hits += pages
            time += page_time
            if time and hits > best * time:
                best = hits / time
        worths.append(best)
    return worths
