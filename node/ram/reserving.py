"""Slots for a writer: as many of the pages that are not here as there are slots for at once, then one by one, as room
is made."""

from collections.abc import Container, Sequence
from itertools import groupby
from typing import Protocol

from node.ram.eviction import Eviction
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page
from node.ram.reservation import Reservation
from node.ram.turn import STEPS, Work

KEYS_A_TURN = STEPS // 4  # each may take others: a page that goes for it, a place that is looked for

Asked = Sequence[tuple[bytes, bool]]  # keys, and whether the tier below has them


class Places(Protocol):
    """What is needed of the RAM tier (`node.ram.tier.RamTier`)."""

    eviction: Eviction

    def place(
        self, index: NamespaceIndex, prefix_hashes: Sequence[bytes], now_ms: int, is_copy: bool
    ) -> list[Page]: ...


def reserve_all(tier: Places, result: Reservation, asked: Asked, copies: Container[bytes], now_ms: int) -> Work[None]:
    """Adds pages and verdicts to the `result`, in turns. `copies`: keys that other members own."""
    for start in range(0, len(asked), KEYS_A_TURN):
        if start:
            yield None
        yield from _reserve_some(tier, result, asked[start : start + KEYS_A_TURN], copies, now_ms)


def _reserve_some(tier: Places, result: Reservation, asked: Asked, copies: Container[bytes], now_ms: int) -> Work[None]:
    index = result.namespace
    lacking = [] if result.is_full else [h for h, is_below in asked if not is_below and h not in index.pages]
    first = len(result.pages)
    for is_copy, some in groupby(lacking, copies.__contains__):
        hashes = list(some)
        placed = tier.place(index, hashes, now_ms, is_copy)
        result.pages += placed  # now: a caller who is never told of them can not give them back
        if len(placed) < len(hashes):
            break
    at_once = result.pages[first:]
    if len(at_once) == len(asked):
        result.write(at_once)
        return
    new = {page.prefix_hash: page for page in at_once}
    for prefix_hash, is_below in asked:
        page, is_copy = new.get(prefix_hash) or index.pages.get(prefix_hash), prefix_hash in copies
        while page is None and not (is_below or result.is_full):
            if one := tier.place(index, [prefix_hash], now_ms, is_copy):
                result.pages += one
                page = new[prefix_hash] = one[0]
            else:
                result.is_full = not (yield from tier.eviction.make_room(index, now_ms, is_copy))
                page = index.pages.get(prefix_hash)  # others had their turn
        if page is not None and prefix_hash in new:
            result.write([page])
        else:
            result.refuse(page, is_below)
    # In the order of the verdicts, by which the writer finds them: a page that was here may have gone for those that
    # came at once, and has been given a new place behind them.
    result.pages[first:] = [new[prefix_hash] for prefix_hash, _ in asked if prefix_hash in new]
