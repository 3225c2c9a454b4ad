"""Overwriting what no page has on disk, and looking whether it worked.

    keeper    write zeros, sync, read back       some of it at a time; nothing is stored meanwhile
    writer    has its turn between

A slot that is being read although its page was removed is looked at again. What was never written is passed over. An
encrypted disk is not overwritten: whose key is gone, its bytes are noise.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from node.disk.extent_files import Overwritten
from node.disk.records import Records
from node.vacancy import stretch_at

TURN_NBYTES = 16 << 20
TURN_SLOTS = 4096  # looked at under one lock: a few ms
PAUSE_S = 0.002  # for whoever waits to store
LOOK_S = 0.05

Range = tuple[int, int]


class Vacant(NamedTuple):
    """Of a part of the disk: what no page has, slots that wait for their readers, and where to go on."""

    free: list[Range]
    busy: list[Range]
    end: int


class Dropped(NamedTuple):
    """Namespaces that were on disk, and in how many of the rows' files something of them is left."""

    spaces: int
    left: int


class Wiped(NamedTuple):
    """Bytes that were overwritten; pieces of them that are not zero all the same, and slots in use to the end."""

    nbytes: int
    left: int


class Tier(Protocol):
    """What is needed of the disk tier (`node.disk.tier.DiskTier`)."""

    records: Records

    def wipe_some(self, start: int, end: int) -> tuple[Vacant, Overwritten]: ...


def vacant(records: Records, at: int, end: int) -> Vacant:
    """From `at` on, as much as is overwritten at a time; nothing is stored meanwhile."""
    free: list[Range] = []
    busy: list[Range] = []
    room = TURN_NBYTES
    for _ in range(TURN_SLOTS):
        if at >= end or not room:
            break
        stretch = stretch_at(records.slots, at)
        if stretch.owner:
            if not records.can_be_found(stretch.owner):
                busy.append((stretch.start, stretch.end))
            at = stretch.end
            continue
        until = min(stretch.end, end, at + room)
        if free and free[-1][1] == at:
            free[-1] = (free[-1][0], until)
        else:
            free.append((at, until))
        room -= until - at
        at = until
    return Vacant(free, busy, at)


def wipe(tier: Tier, check: Callable[[], None], patience_s: float) -> Wiped:
    """`check` is called now and then, and may raise. `patience_s`: with slots in use, when all others are done.
    Raises OSError."""
    ranges, end_s = [(0, tier.records.slots.region_nbytes)], math.inf
    nbytes = left = 0
    while ranges:
        again: list[Range] = []
        for start, end in ranges:
            while start < end:
                (_, busy, start), wiped = tier.wipe_some(start, end)
                nbytes, left = nbytes + wiped.nbytes, left + wiped.left
                again += busy
                time.sleep(PAUSE_S)
                check()
        ranges = again
        end_s = min(end_s, time.monotonic() + patience_s)
        if time.monotonic() >= end_s:
            break
        time.sleep(LOOK_S if ranges else 0)
    return Wiped(nbytes, left + len(ranges))
