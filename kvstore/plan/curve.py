"""Hits at every size: how many of the pages that were asked for had fewer than so many newer ones."""

from array import array
from bisect import bisect_left
from itertools import accumulate

from kvstore.plan.stack import Reuse

GROW = 1 << 12


class Curve:
    """Filled first, read then."""

    def __init__(self) -> None:
        self._change = array("q", bytes(8 * GROW))  # of how many pages have a distance, from one distance to the next
        self._end = 0  # beyond all distances
        self._short: list[tuple[int, float]] = []  # (distance, tokens) of pages that are not full
        self._hits: array[int] | None = None  # by size, made when it is first asked for
        self._short_of: list[float] = []
        self.total = 0

    def add(self, reuse: Reuse) -> None:
        distance, pages, _ = reuse
        end = distance + pages
        if end > self._end:
            self._end = end
            if end >= len(self._change):
                self._change.frombytes(bytes(8 * (end + max(GROW, len(self._change)) - len(self._change))))
        self._change[distance] += 1
        self._change[end] -= 1
        self.total += pages

    def lacks(self, distance: int, tokens: float) -> None:
        """The page at this distance has so many tokens less than a full one."""
        self._short.append((distance, tokens))

    @property
    def pages_wanted(self) -> int:
        """The least size at which all are hits that are at any size."""
        return self._end

    def hits(self, pages: int) -> int:
        if self._hits is None:
            self._hits = array("q", accumulate(accumulate(self._change[: self._end], initial=0)))
        return self._hits[min(max(pages, 0), len(self._hits) - 1)]

    def tokens(self, pages: int, page_tokens: float) -> float:
        """That those hits stand for."""
        if len(self._short_of) <= len(self._short):
            self._short.sort()
            self._short_of = list(accumulate((tokens for _, tokens in self._short), initial=0.0))
        return self.hits(pages) * page_tokens - self._short_of[bisect_left(self._short, (pages, 0.0))]

    def size_for(self, hits: float) -> int:
        """The least with so many hits."""
        self.hits(0)
        assert self._hits is not None
        return min(bisect_left(self._hits, hits), self._end)
