"""Compute the hits of exact LRU at all sizes at once, and the most that any policy could hit.

A node ages a request's pages tail first (docs/decisions/0005), and a page stands for itself and all
before it. So after every request, for each page p and the page q before it in its chain:

    q is newer than p       a request that uses p uses q as well, and ages q after p

With `distance` the number of newer pages when the request comes, it follows:

    a store of C pages has exactly those with distance < C           (LRU keeps the newest)
    distances rise along a chain                                     (q is newer than p)
    so each request hits a leading run, and no page behind it

Pages that a request was the last to use are the end of its chain. The whole order is therefore one
*run* per request, newest request first, each head to tail, and a request uses the beginnings of a
few runs. Each costs a logarithm of the number of requests, for any number of pages; memory is 8
bytes a page.

`Stack` finds the reuses; `Curve` sums them over all sizes, `Windows` over time windows, and
`Intervals` bounds what any policy could reach.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

ID_NBYTES = 8  # bytes; chains are ids as u64 in native order, so that runs compare as bytes
GROW = 1 << 12


class Reuse(NamedTuple):
    """Consecutive reused pages of a chain.

    The first has `distance`, each further one a distance greater by one; `last` is the request that
    used any of them last.
    """

    distance: int
    pages: int
    last: int


class Stack:
    """The pages in LRU order, as runs.

    A page is named by all ids up to its own, so ids that are no prefix hashes work, too.
    """

    def __init__(self) -> None:
        self._runs: dict[int, int] = {}  # hash of the chain up to a run's first page -> its request
        self._ids: list[bytes] = []  # of each request's run
        self._sums = [0]  # pages in runs: Fenwick (1994), grown by appending
        self.pages = 0  # distinct pages

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return len(self._ids)

    def use(self, chain: bytes) -> list[Reuse]:
        """Return the reused pages of a request in order, and make the request the newest."""
        found: list[Reuse] = []
        at, end = 0, len(chain)
        while at < end:
            last = self._runs.pop(hash(chain[: at + ID_NBYTES]), None)
            if last is None:
                break
            ids = self._ids[last]
            length = _common_nbytes(chain, at, ids)
            if not length:
                break  # two chains with the same 64-bit hash
            # pages that this request made the newest: no longer counted in the older run
            taken = at // ID_NBYTES
            found.append(Reuse(self._newer(last) + taken, length // ID_NBYTES, last))
            self._add(last, -(length // ID_NBYTES))
            at += length
            rest = self._ids[last] = ids[length:]
            if rest:
                self._runs[hash(chain[:at] + rest[:ID_NBYTES])] = last
        if chain:
            self._runs[hash(chain[:ID_NBYTES])] = len(self._ids)
        self._ids.append(chain)
        self._append(end // ID_NBYTES)
        return found

    # ---- sums: node i (from 1) has those of requests i - (i & -i) .. i - 1
    # ---------------------------------

    def _newer(self, number: int) -> int:
        """Return the pages in the runs of later requests."""
        sums, place, older = self._sums, number + 1, 0
        while place:
            older += sums[place]
            place &= place - 1
        return self.pages - older

    def _add(self, number: int, count: int) -> None:
        """Add to a request's page count and to the total."""
        sums, place, end = self._sums, number + 1, len(self._sums)
        while place < end:
            sums[place] += count
            place += place & -place
        self.pages += count

    def _append(self, count: int) -> None:
        sums, place = self._sums, len(self._sums)
        total, below, stop = count, place - 1, place & (place - 1)
        while below > stop:
            total += sums[below]
            below &= below - 1
        sums.append(total)
        self.pages += count


def _common_nbytes(chain: bytes, at: int, ids: bytes) -> int:
    """Return the common prefix of the chain from `at` on and `ids`, in whole ids."""
    most = min(len(chain) - at, len(ids))
    if chain[at : at + most] == ids[:most]:
        return most
    least = 0  # what is the same; the first difference is before `most`
    while most - least > ID_NBYTES:
        middle = (least + most) // (2 * ID_NBYTES) * ID_NBYTES
        if chain[at + least : at + middle] == ids[least:middle]:
            least = middle
        else:
            most = middle
    return least


class Curve:
    """Hits at every size: how many reused pages had fewer than so many newer ones.

    Fill it first, then read.
    """

    def __init__(self) -> None:
        # Change of the number of pages from one distance to the next
        self._change = array("q", bytes(8 * GROW))
        self._end = 0  # beyond all distances
        self._short: list[tuple[int, float]] = []  # (distance, tokens) of pages that are not full
        self._hits: array[int] | None = None  # by size, computed on first use
        self._short_of: list[float] = []
        self.total = 0

    def add(self, reuse: Reuse) -> None:
        """Add reused pages."""
        distance, pages, _ = reuse
        end = distance + pages
        if end > self._end:
            self._end = end
            if end >= len(self._change):
                self._change.frombytes(
                    bytes(8 * (end + max(GROW, len(self._change)) - len(self._change)))
                )
        self._change[distance] += 1
        self._change[end] -= 1
        self.total += pages

    def add_short_page(self, distance: int, tokens: float) -> None:
        """Note that the page at this distance has so many tokens less than a full one."""
        self._short.append((distance, tokens))

    @property
    def pages_wanted(self) -> int:
        """Return the smallest size at which everything that can hit does."""
        return self._end

    def hits(self, pages: int) -> int:
        """Return the hits of a store of so many pages."""
        if self._hits is None:
            self._hits = array("q", accumulate(accumulate(self._change[: self._end], initial=0)))
        return self._hits[min(max(pages, 0), len(self._hits) - 1)]

    def tokens(self, pages: int, page_tokens: float) -> float:
        """Return the tokens of those hits."""
        if len(self._short_of) <= len(self._short):
            self._short.sort()
            self._short_of = list(accumulate((tokens for _, tokens in self._short), initial=0.0))
        return (
            self.hits(pages) * page_tokens - self._short_of[bisect_left(self._short, (pages, 0.0))]
        )

    def size_for(self, hits: float) -> int:
        """Return the smallest size with so many hits."""
        self.hits(0)
        assert self._hits is not None
        return min(bisect_left(self._hits, hits), self._end)


class Windows:
    """Hits per time window at some sizes: links and disks must bear the worst window.

    `sizes` are in pages, ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._whole: dict[
            int, list[int]
        ] = {}  # by window: pages of whole runs that are hits from this size on
        self._parts: dict[int, list[int]] = {}  # pages of runs that are hits in part at this size

    def add(self, window: int, reuse: Reuse) -> None:
        """Add reused pages of a window."""
        distance, pages, _ = reuse
        if window not in self._whole:
            self._whole[window] = [0] * (len(self._sizes) + 1)
            self._parts[window] = [0] * len(self._sizes)
        whole = bisect_left(self._sizes, distance + pages)
        self._whole[window][whole] += pages
        for place in range(bisect_right(self._sizes, distance, 0, whole), whole):
            self._parts[window][place] += self._sizes[place] - distance

    def hits(self) -> dict[int, list[int]]:
        """Return the hits by window, at each of the sizes."""
        return {
            window: [
                run + part
                for run, part in zip(accumulate(whole), self._parts[window], strict=False)
            ]
            for window, whole in self._whole.items()
        }


class Intervals:
    """Compute the upper bound of the hit rate: the most that a store of a size could have hit.

    A page that two requests use, one after the other, is a hit at the second if it is kept between
    them. So a hit is an interval, a store of C pages keeps at most C of them at any time, and the
    bound is the largest number of intervals of which no more than C overlap. A greedy choice is
    optimal: whenever there are too many, drop the one that ends last (Belady 1966, with bypass: it
    may have only just begun; for intervals: Carlisle and Lloyd 1995).

    A page is reused no later than one behind it in its chain, and of pages that are reused together
    the tail can be dropped first: the kept part of a chain is a leading run. So a policy that knows
    the future reaches the bound, also where only leading runs count.

    Pages of one run that one request reuses are one interval with a weight, as `Stack` finds them.
    Intervals are added in the order of their ends.
    """

    def __init__(self) -> None:
        self._starts, self._ends, self._counts = array("q"), array("q"), array("q")

    def add(self, start: int, end: int, count: int) -> None:
        """Add `count` pages that request `start` used, and then request `end`."""
        self._starts.append(start)
        self._ends.append(end)
        self._counts.append(count)

    def overlap(self) -> int:
        """Return the most pages that are needed at one time: a store of that size hits all."""
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
        """Return the intervals sorted for `most_hits`."""
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

    def __init__(
        self, heads: "array[int]", behind: "array[int]", ends: "array[int]", counts: "array[int]"
    ) -> None:
        self._heads, self._behind, self._ends, self._counts = heads, behind, ends, counts

    def most_hits(self, capacity: int) -> int:
        """Return the most hits that any policy can have with this capacity."""
        ends, counts, behind = self._ends, self._counts, self._behind
        kept = [0] * len(self._heads)  # by the request that they end with
        latest: list[int] = []  # those ends, negated: the one that ends last is on top
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
