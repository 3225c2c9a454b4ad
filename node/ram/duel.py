"""Exact LRU, unless there is proof that what was learned is better: two small shadow caches duel, and the winner rules.

    each lookup    what has each of the two shadows, and what is really here? Of every so-many-th page only
    each use       is one in both shadows, too
    lead           hits that the habits' shadow is ahead of LRU's, less a page for each hundred asked: worth it, or not

    LRU rules      the habits rule when their lead is an eighth of all pages; it may be as far behind, too
    habits rule    LRU rules again when the lead is lost, or when what is really found is a 32nd of all pages behind

What a reign did not gain of that 32nd is paid off, a page for each 2,000 asked, before there is another. So habits that
stop being true cost no more than that in the long run, and in the short what one reign may lose. Pages are chosen for
the shadows by their hashes: any part of them, with the same part of the capacity, has the same share of hits as the
whole. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from node.ram.habits import Habits, Merits, Used
from node.ram.shadow import LeastWorth, Oldest

SHADOW_PAGES = 256  # or up to twice as many
SHADOW_LEAST = 200  # with fewer chance says who is ahead
PART_LEAST = 4  # every fourth page at most
PART_BIT = 20  # of a key, from which on it is chosen by; dicts look at the lower ones
PROOF = 1 / 8  # of the pages, to be ahead by
LEAD_MAX = 1 / 4  # of the pages; what was gained before counts no more
STAKE, STAKE_LEAST = 1 / 32, 32  # of the pages, and more; to be lost before LRU rules again
WORTH_IT = 0.01  # of the pages asked for
PAID_OFF = 1 / 2000  # of the pages asked for


@dataclass(slots=True)
class DuelCounters:
    """Of all duels together; names as in the EvictionStatus message."""

    switches: int = 0
    shadow_asked: int = 0
    shadow_hits_lru: int = 0
    shadow_hits_learned: int = 0


class Duel:
    """Of the pages of one pool. Not thread-safe."""

    def __init__(self, counters: DuelCounters) -> None:
        self.habits = Habits()
        self.learned_rules = False
        self._counters = counters
        self._part = 0  # every so-many-th page is in the shadows; 0: there are none yet
        self._page_count = 0
        self._lru, self._learned = Oldest(0), LeastWorth(0, self.habits)
        self._lead = self._left = self._gain = self._owed = 0.0

    def ask(self, keys: Sequence[int], here: Sequence[Used]) -> None:
        """Somebody wants these pages, head first, of which these leading ones are here."""
        self.habits.ask(keys, here)
        if not self._part:
            return
        some = self._some(keys)
        lru, learned = self._lru.run(some), self._learned.run(some)
        self._counters.shadow_asked += len(some)
        self._counters.shadow_hits_lru += lru
        self._counters.shadow_hits_learned += learned
        really = len(self._some(keys[: len(here)])) if self.learned_rules else learned
        self._judge((learned - lru) * self._part, (really - lru) * self._part, len(keys))

    def use(self, keys: Sequence[int], here: Sequence[Used]) -> Merits:
        """They are used, and these leading ones were here."""
        merits = self.habits.use(keys, here)
        if self._part and keys:
            some = self._some(keys)
            if some:
                self._lru.use(some)
                self._learned.use(some, merits, keys[-1])
        return merits

    def fill(self, page_count: int) -> None:
        """Room is needed; there are so many pages."""
        self._page_count = page_count
        self.habits.remember(page_count)
        if not self._part or (self._part > PART_LEAST and page_count < SHADOW_PAGES * self._part // 2):
            self._begin(page_count)  # for the first time, or there are far fewer than before
            return
        while page_count >= 2 * SHADOW_PAGES * self._part:
            for shadow in (self._lru, self._learned):
                shadow.keep(self._part << PART_BIT)
            self._part *= 2
        for shadow in (self._lru, self._learned):
            shadow.capacity = max(1, page_count // self._part)
            shadow.shrink()

    def _begin(self, page_count: int) -> None:
        self._rule(False)
        self._lead, self._part = 0.0, 0
        if page_count < SHADOW_LEAST * PART_LEAST:
            return
        self._part = PART_LEAST
        while page_count >= 2 * SHADOW_PAGES * self._part:
            self._part *= 2
        self._lru = Oldest(page_count // self._part)
        self._learned = LeastWorth(page_count // self._part, self.habits)

    def _some(self, keys: Sequence[int]) -> list[int]:
        """Those that are in the shadows, if they are anywhere."""
        chosen = (self._part - 1) << PART_BIT
        return [key for key in keys if not key & chosen]

    def _judge(self, ahead: int, really: int, asked: int) -> None:
        """The habits' shadow found so many more than LRU's, and the pool did."""
        self._lead += ahead - WORTH_IT * asked
        if self.learned_rules:
            self._gain += min(ahead, really)
            self._lead = min(self._lead, self._page_count * LEAD_MAX)
            self._left = min(self._left + really, self._page_count * LEAD_MAX)
            if self._lead <= 0 or self._left <= 0:
                self._owed = max(0.0, self._stake - self._gain)
                self._rule(False)
        else:
            proof = self._page_count * PROOF
            self._owed -= PAID_OFF * asked
            self._lead = min(max(self._lead, -proof), proof + 1)
            if self._lead > proof and self._owed <= 0:
                self._rule(True)

    @property
    def _stake(self) -> float:
        return self._page_count * STAKE + STAKE_LEAST

    def _rule(self, learned: bool) -> None:
        self._counters.switches += learned != self.learned_rules
        self.learned_rules = learned
        self._lead = self._page_count * PROOF if learned else 0.0
        self._left = self._stake
        self._gain = 0.0

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        shadows = (self._lru, self._learned)
        return [f"a shadow has {len(s)} pages of {s.capacity}" for s in shadows if len(s) > s.capacity]
