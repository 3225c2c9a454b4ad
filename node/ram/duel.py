"""Exact LRU, unless there is proof that what was learned is better: two small shadow caches duel, and the winner rules.

    each lookup    what has each of the two shadows, and what is really here? Of every so-many-th page only
    each use       is one in both shadows, too
    lead           hits that the habits are ahead of LRU, less a page for each hundred asked: worth it, or not at all

    LRU rules      lead of one shadow over the other. The habits rule when it is an eighth of all pages
    habits rule    lead of the real pages over LRU's shadow. LRU rules again when a 64th of all pages is lost

A reign that ended with a loss makes the next need four times the lead. So habits that stop being true cost a few of
each hundred pages that there are, once, and seldom again. Pages are chosen for the shadows by their hashes: any part of
them, with the same part of the capacity, has the same share of hits as the whole. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from node.ram.habits import ENDS_LEAST, Habits
from node.ram.shadow import Shadow

SHADOW_PAGES = 256  # or up to twice as many
SHADOW_LEAST = 200  # with fewer chance says who is ahead
PART_LEAST = 4  # every fourth page at most
PAGES_AN_END = 8  # of those that are remembered, see `habits.py`
PART_BIT = 20  # of a key, from which on it is chosen by; dicts look at the lower ones
PROOF = 1 / 8  # of the pages, to be ahead by
LEAD_MAX = 1 / 4  # of the pages; what was gained before counts no more
STAKE, STAKE_LEAST = 1 / 64, 32  # of the pages, and more; to be lost before LRU rules again
WORTH_IT = 0.01  # of the pages asked for
HARDER, HARDEST = 4, 64  # after a loss; at most


class Seen(Protocol):
    """A page, or what is not here."""

    def __call__(self, at: int) -> bool: ...


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
        self._lru = self._learned = Shadow(0)
        self._lead = self._gain = 0.0
        self._need = 1

    def ask(self, keys: Sequence[int], is_here: Seen) -> None:
        """Somebody wants these pages, head first. `is_here(i)`: whether the pool has that one."""
        self.habits.ask(keys)
        if not self._part:
            return
        chosen = self._chosen()
        places = [at for at, key in enumerate(keys) if not key & chosen]
        some = [keys[at] for at in places]
        lru, learned = self._lru.run(some), self._learned.run(some)
        self._counters.shadow_asked += len(some)
        self._counters.shadow_hits_lru += lru
        self._counters.shadow_hits_learned += learned
        if self.learned_rules:
            learned = next((count for count, at in enumerate(places) if not is_here(at)), len(places))
        self._judge((learned - lru) * self._part, len(keys))

    def use(self, keys: Sequence[int], known_count: int) -> int:
        """They are used, and so many leading ones were here; their merit."""
        merit = self.habits.use(keys, known_count)
        if self._part and keys:
            chosen = self._chosen()
            some = [key for key in keys if not key & chosen]
            self._lru.use(some, merit, keys[-1], self.habits.tick)
            self._learned.use(some, merit, keys[-1], self.habits.tick)
        return merit

    def fill(self, page_count: int) -> None:
        """Room is needed; there are so many pages."""
        self._page_count = page_count
        self.habits.ends_max = max(ENDS_LEAST, page_count // PAGES_AN_END)
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
        self._lru = Shadow(page_count // self._part)
        self._learned = Shadow(page_count // self._part, self.habits)

    def _chosen(self) -> int:
        """The bits of a key that are clear if it is in the shadows."""
        return (self._part - 1) << PART_BIT

    def _judge(self, ahead: int, asked: int) -> None:
        ahead_by = ahead - WORTH_IT * asked
        self._lead += ahead_by
        if self.learned_rules:
            self._gain += ahead
            self._lead = min(self._lead, self._page_count * LEAD_MAX)
            if self._lead <= 0:
                self._need = min(self._need * HARDER, HARDEST) if self._gain < 0 else 1
                self._rule(False)
        else:
            self._lead = max(self._lead, 0.0)
            if self._lead > self._page_count * PROOF * self._need:
                self._rule(True)

    def _rule(self, learned: bool) -> None:
        self._counters.switches += learned != self.learned_rules
        self.learned_rules = learned
        self._lead = self._page_count * STAKE + STAKE_LEAST if learned else 0.0
        self._gain = 0.0

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        shadows = (self._lru, self._learned)
        return [f"a shadow has {len(s)} pages of {s.capacity}" for s in shadows if len(s) > s.capacity]
