"""Hits in each stretch of time at some sizes: what links and disks must bear at the worst, not only on average."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from kvstore.plan.stack import Reuse


class Windows:
    """`sizes`: in pages, rising."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._whole: dict[int, list[int]] = {}  # by window: pages of runs that are hits from this size on
        self._parts: dict[int, list[int]] = {}  # pages of runs of which this size has the beginning

    def add(self, window: int, reuse: Reuse) -> None:
        distance, pages, _ = reuse
        if window not in self._whole:
            self._whole[window] = [0] * (len(self._sizes) + 1)
            self._parts[window] = [0] * len(self._sizes)
        whole = bisect_left(self._sizes, distance + pages)
        self._whole[window][whole] += pages
        for place in range(bisect_right(self._sizes, distance, 0, whole), whole):
            self._parts[window][place] += self._sizes[place] - distance

    def hits(self) -> dict[int, list[int]]:
        """By window, at each of the sizes."""
        return {
            window: [run + part for run, part in zip(accumulate(whole), self._parts[window], strict=False)]
            for window, whole in self._whole.items()
        }
