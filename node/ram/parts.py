"""Parts of a page that is in the tier below, in a slot that has room for no more.

    page    | 0 | 1 | 2 | 3 | 4 |       ranges lie in 1, 3 and 4
    slot    | 1 | 3 | 4 |               of one read, which nobody else can find; free when that ends

What a checksum's leaf covers is the least that can be verified (`kvstore.checksum`), and what is read from there begins
and ends at multiples of SLOT_ALIGN_NBYTES.
"""

import bisect
import itertools
from collections.abc import Sequence

from kvstore.checksum import cuts, hashed_nbytes, parts_of
from kvstore.layout import SLOT_ALIGN_NBYTES
from node.ram.counters import Counters
from node.ram.page import Page, Space

# Of a page, beyond which all of it is read: that costs little more, and then it is in RAM.
SHARE_MAX = 0.75

Range = tuple[int, int]


class Parts:
    """A `Space` for pages of which only those parts are wanted in which `ranges` (offset, nbytes) lie."""

    def __init__(self, space: Space, ranges: Sequence[Range]) -> None:
        self.value = space.value
        self.digest = space.digest
        self.account = space.account
        self.page_nbytes = space.page_nbytes
        self.counters: Counters = space.counters
        self.pages: dict[bytes, Page] = {}
        self.seed = space.seed
        self.numbers = sorted(parts_of(self.page_nbytes, ranges))
        self.runs: list[tuple[int, int]] = []  # of the page, (start, end): one after the other in the slot
        for number in self.numbers:
            start, end = cuts(self.page_nbytes)[number]
            self._add(start // SLOT_ALIGN_NBYTES * SLOT_ALIGN_NBYTES, -(-end // SLOT_ALIGN_NBYTES) * SLOT_ALIGN_NBYTES)
        ends = [*itertools.accumulate(end - start for start, end in self.runs)]
        self._starts = [start for start, _ in self.runs]
        self._places = [0, *ends[:-1]]  # of the runs in the slot
        self.slot_nbytes = ends[-1]

    def _add(self, start: int, end: int) -> None:
        if self.runs and start <= self.runs[-1][1]:
            start = self.runs.pop()[0]
        self.runs.append((start, end))

    def place(self, offset: int) -> int:
        """Where a byte of these parts is in the slot."""
        run = bisect.bisect_right(self._starts, offset) - 1
        assert offset < self.runs[run][1], f"byte {offset} of the page is not in these parts"
        return self._places[run] + offset - self._starts[run]

    def drop(self, page: Page) -> None:
        """Nobody can find it."""


def parts_wanted(space: Space, ranges: Sequence[Range]) -> Parts | None:
    """None if all of a page is to be read for these ranges."""
    if not ranges or hashed_nbytes(space.page_nbytes, ranges) > SHARE_MAX * space.page_nbytes:
        return None
    return Parts(space, ranges)
