"""How soon pages are used again, learned from the chains that come back. Pure: keys are any integers.

A chain is what one request uses, head first. A later request of the same conversation begins with it, all but its last
page perhaps, which was not full; so the last two pages of a chain tell that it came back.

    GO      nothing better is known than that others are worth more: goes first
    END     the last page of its chain
    FIRST   used by one request ... LAST: by so many of one conversation, or more

That is a page's merit: of its chain, or of the best that it was part of. For each merit is counted how many pages were
used, and how many of these again after how many others: the pages used by anybody are the clock, so that neither an
idle night nor a faster machine changes anything. What a page is worth follows: the most hits for each page and time
that it is kept, if it is kept from now on as long as is best.

    worth(merit, age) = max over t of   hits between age and t / page-time spent between age and t
"""

from collections import OrderedDict
from collections.abc import Sequence

GO, END, FIRST, LAST = 0, 1, 2, 6
MERITS = LAST + 1
YOUNG_BITS = 4  # uses that are told apart: the first 16, then each power of two
AGES = 24
EDGES = [0, *(1 << YOUNG_BITS + i for i in range(AGES))]
ENDS_LEAST = 1 << 12  # that are remembered: 1 MiB
WEIGHED = 128  # chains, from one time that worths are made anew to the next: 0.4 ms
HALVED = 4096  # chains, after which what was counted counts half
PRIOR = 10.0  # pages that never came back


class _Chain:
    """`asked`: somebody looked for it since it was used last."""

    __slots__ = ("asked", "ends", "merit", "page_count", "tick")

    def __init__(self) -> None:
        self.merit = FIRST
        self.tick = self.page_count = 0
        self.ends: Sequence[int] = ()
        self.asked = False


class Habits:
    """Of the pages of one pool. Not thread-safe."""

    def __init__(self) -> None:
        self.tick = 0
        self.ends_max = ENDS_LEAST
        self._chains: OrderedDict[int, _Chain] = OrderedDict()  # by their last two pages, the newest last
        self._used = [PRIOR] * MERITS  # pages
        self._again = [[0.0] * AGES for _ in range(MERITS)]  # pages, by age
        self._worth = [[0.0] * AGES for _ in range(MERITS)]
        self._count = 0

    def ask(self, keys: Sequence[int]) -> None:
        """Somebody wants this chain. When it is used next, that is a request of its own."""
        found = self._find(keys)
        if found is not None:
            found[0].asked = True

    def use(self, keys: Sequence[int], known_count: int) -> int:
        """A chain is used, of which so many leading pages were here; its merit."""
        self.tick += len(keys)
        found = self._find(keys)
        if found is None:
            if known_count == len(keys):
                return FIRST  # of what others brought
            chain, new_count, first = _Chain(), len(keys), known_count
        else:
            chain, first = found[0], 0
            new_count = len(keys) - chain.page_count
            if chain.asked:
                self._came_back(chain, found[1])
                new_count = len(keys)
        if new_count > 0:
            self._used[chain.merit] += new_count - 1
            self._used[END] += 1
            self._count_chain()
        for end in chain.ends:
            self._chains.pop(end, None)
        chain.tick, chain.page_count, chain.asked = self.tick, len(keys), False
        chain.ends = keys[max(first, len(keys) - 2) :]
        for end in chain.ends:
            self._chains[end] = chain
        while len(self._chains) > self.ends_max:
            self._chains.popitem(last=False)
        return chain.merit

    def next_tick(self) -> int:
        """When the pages of a batch are used, later than those of any other."""
        self.tick += 1
        return self.tick

    def worth(self, merit: int, tick: int) -> float:
        """Of a page that was last used then."""
        return self._worth[merit][_age(self.tick - tick)]

    def _find(self, keys: Sequence[int]) -> tuple[_Chain, int] | None:
        """The chain that these go on, and how many pages of it are among them."""
        chains = self._chains
        for behind, key in enumerate(reversed(keys)):
            if key in chains:
                return chains[key], len(keys) - behind
        return None

    def _came_back(self, chain: _Chain, page_count: int) -> None:
        age = _age(self.tick - chain.tick)
        self._again[chain.merit][age] += min(page_count, chain.page_count - 1)
        self._again[END][age] += page_count == chain.page_count
        chain.merit = min(chain.merit + 1, LAST)

    def _count_chain(self) -> None:
        self._count += 1
        if self._count % WEIGHED == 0:
            for merit in range(END, MERITS):
                self._worth[merit] = _worths(self._used[merit], self._again[merit])
        if self._count % HALVED == 0:
            self._used = [(used - PRIOR) / 2 + PRIOR for used in self._used]
            self._again = [[pages / 2 for pages in again] for again in self._again]


def _age(ticks: int) -> int:
    return min((ticks >> YOUNG_BITS).bit_length(), AGES - 1)


def _worths(used: float, again: list[float]) -> list[float]:
    """By age."""
    waiting = [used]  # at the beginning of each age: pages that have not come back
    for pages in again:
        waiting.append(max(waiting[-1] - pages, 0.0))
    worths = []
    for first in range(AGES):
        hits = spent = best = 0.0
        for age in range(first, AGES):
            hits += again[age]
            spent += (waiting[age] + waiting[age + 1]) / 2 * (EDGES[age + 1] - EDGES[age])
            if spent and hits / spent > best:
                best = hits / spent
        worths.append(best)
    return worths
