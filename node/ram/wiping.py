"""Overwriting what no page has in RAM: free slots, and what is left over beside and behind pages.

    block   | page . | free  | page . | free | rest |        .: behind a page, up to the end of its slot
    zeros          ^   ^^^^^         ^  ^^^^   ^^^^

A slot whose bytes may still be those of an earlier page (it is being written or filled), or that waits for the readers
of a page that is to be erased, is looked at again and again, as long as there is time. Others are served meanwhile: a
turn under the lock is so many slots and so many bytes.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.buffers import copy
from node.ram.ghosts import Ghosts
from node.ram.namespace import Namespaces
from node.ram.page import Page, State
from node.slots import SlotAllocator
from node.vacancy import stretch_at

TURN_NBYTES = 1 << 20  # overwritten under one lock: 0.1 ms
TURN_SLOTS = 256
LOOK_S = 0.05  # between two looks at slots that are in use

Range = tuple[int, int]


class Tier(Protocol):
    """What is needed of the RAM tier (`node.ram.tier.RamTier`)."""

    lock: threading.Lock
    slots: SlotAllocator
    namespaces: Namespaces
    ghosts: Ghosts


class Wiped(NamedTuple):
    """Bytes that were overwritten, and how many slots were in use to the end."""

    nbytes: int
    left: int


class Wiping:
    """`view(offset, nbytes)` is the arena's memory; `erased` says whether a page that nobody can find any more is to
    leave nothing behind."""

    def __init__(self, tier: Tier, view: Callable[[int, int], memoryview], erased: Callable[[Page], bool]) -> None:
        self._tier = tier
        self._view = view
        self._erased = erased
        self._zeros = memoryview(bytes(TURN_NBYTES))
        self._nbytes = 0
        self._again: list[Range] = []

    def run(self, check: Callable[[], None], patience_s: float) -> Wiped:
        """`check` is called now and then, and may raise. `patience_s`: with slots that are in use, when all others are
        done."""
        ranges, end_s = [(0, self._tier.slots.region_nbytes)], math.inf
        while ranges:
            for start, end in ranges:
                while start < end:
                    with self._tier.lock:
                        start = self._turn(start, end)
                    time.sleep(0)  # else this thread would have the lock again
                    check()
            ranges, self._again = self._again, []
            end_s = min(end_s, time.monotonic() + patience_s)
            if time.monotonic() >= end_s:
                break
            time.sleep(LOOK_S if ranges else 0)
        return Wiped(self._nbytes, len(ranges))

    def _turn(self, at: int, end: int) -> int:
        """Where to go on."""
        room = TURN_NBYTES
        for _ in range(TURN_SLOTS):
            if at >= end or not room:
                break
            stretch = stretch_at(self._tier.slots, at)
            page: Page | None = stretch.owner
            blank = at
            if page is not None:
                blank = min(stretch.end, max(at, stretch.start + page.namespace.page_nbytes))
                if not self._settled(page):
                    self._again.append((stretch.start, stretch.end))
                    blank = stretch.end
            at = max(blank, min(stretch.end, end, blank + room))
            if blank < at:
                copy(self._view(blank, at - blank), self._zeros[: at - blank])
                self._nbytes += at - blank
                room -= at - blank
        return at

    def _settled(self, page: Page) -> bool:
        """Its bytes are its own, and may stay."""
        if page.state is State.DOOMED:
            return bool(page.checksum) and not self._erased(page)
        return page.state is State.VISIBLE


def close_namespaces(tier: Tier, digests: Sequence[bytes]) -> int:
    """Forgets namespaces that have no pages any more, and why pages are gone, of whomever. How many had some."""
    with tier.lock:
        tier.ghosts.forget()
        return len([digest for digest in digests if not tier.namespaces.close(digest)])
