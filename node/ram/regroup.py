"""Quotas of the RAM change while the node serves: pages of a tenant that gets one, or loses it, change their pool."""

import time
from collections.abc import Callable, Sequence

from node.ram.accounts import Limits
from node.ram.page import Page
from node.ram.tier import RamTier
from node.ram.walk import walk

REGROUPED = 256  # pages under one lock


def set_ram_limits(tier: RamTier, limits: Callable[[str], Limits], promised_nbytes: int) -> None:
    """`limits` of each tenant, and their bytes all together. What is more than a quota goes when room is needed."""
    order = tier.eviction.order
    with tier.lock:
        changed = order.accounts.set_limits(limits, promised_nbytes)
    if not changed:
        return
    moving: list[tuple[int, Page]] = []

    def collect(pages: Sequence[Page]) -> None:
        moving.extend((page.used_ms, page) for page in pages if page.namespace.account in changed)

    walk(tier, None, collect)
    moving.sort(key=lambda entry: entry[0], reverse=True)  # each goes before those that were used later
    for start in range(0, len(moving), REGROUPED):
        with tier.lock:
            for used_ms, page in moving[start : start + REGROUPED]:
                order.regroup(page, used_ms)
        time.sleep(0)  # else this thread would have the lock again
