"""The most that any store of a size could have hit: the bound beside every hit rate.

A page that two requests use, one after the other, is a hit at the second if it is kept all the time between them. So a
hit is an interval, a store of C pages keeps at most C of them at any time, and the bound is the largest number of
intervals of which no more than C overlap. Greedy gives it: whenever there are too many, the one that ends last goes
(Belady 1966, with bypass: it may have only just begun; optimal for intervals: Carlisle and Lloyd 1995).

A page is asked for again no later than one behind it in its chain, and of those that are asked for together the tail
can go first: what is kept of a chain is a leading run. So the bound is reached by who knows the future, also where only
leading runs count.

Pages of one run that one request uses again are one interval with a weight, as `stack` finds them.
"""

from array import array
from heapq import heappop, heappush


class Intervals:
    """Filled in the order of their ends."""

    def __init__(self) -> None:
        self._starts, self._ends, self._counts = array("q"), array("q"), array("q")

    def add(self, start: int, end: int, count: int) -> None:
        """`count` pages that request `start` used, and then request `end`."""
        self._starts.append(start)
        self._ends.append(end)
        self._counts.append(count)

    def overlap(self) -> int:
        """The most that are wanted at a time: a store of that size has all."""
        if not self._ends:
            return 0
        change = array("q", bytes(8 * (self._ends[-1] + 1)))
        for start, end, count in zip(self._starts, self._ends, self._counts, strict=True):
            change[start] += count
            change[end] -= count
        most = now = 0
        for by in change:
            now += by
            most = max(most, now)
        return most

    def by_start(self) -> "Starts":
        """For `most_hits`, as often as one likes."""
        if not self._ends:
            return Starts(array("q"), array("q"), array("q"), array("q"))
        requests = self._ends[-1] + 1
        heads = array("q", b"\xff" * (8 * requests))  # -1: none
        behind = array("q", bytes(8 * len(self._starts)))
        for place, start in enumerate(self._starts):
            behind[place] = heads[start]
            heads[start] = place
        return Starts(heads, behind, self._ends, self._counts)


class Starts:
    """Intervals as lists, one for each request that they start with."""

    def __init__(self, heads: "array[int]", behind: "array[int]", ends: "array[int]", counts: "array[int]") -> None:
        self._heads, self._behind, self._ends, self._counts = heads, behind, ends, counts

    def most_hits(self, capacity: int) -> int:
        ends, counts, behind = self._ends, self._counts, self._behind
        kept = [0] * len(self._heads)  # by the request that they end with
        latest: list[int] = []  # those ends, negative: what ends last is on top
        hits = total = 0
        for number, place in enumerate(self._heads):
            ended = kept[number]
            if ended:
                hits += ended
                total -= ended
                if not total:
                    latest.clear()
            while place >= 0:
                end, count = ends[place], counts[place]
                if not kept[end]:
                    heappush(latest, -end)
                kept[end] += count
                total += count
                place = behind[place]
            while total > capacity:
                end = -latest[0]
                count = min(kept[end], total - capacity)
                kept[end] -= count
                total -= count
                if not kept[end]:
                    heappop(latest)
        return hits
