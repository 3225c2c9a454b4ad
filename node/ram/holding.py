"""Pages for a reader: held where they are, or with a slot that he has to fill first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from node.ram.below import Below
from node.ram.eviction import Eviction
from node.ram.loads import Loads
from node.ram.namespace import NamespaceIndex
from node.ram.page import Page, State
from node.ram.parts import Parts
from node.ram.reservation import Acquired
from node.ram.turn import Work

NOWHERE: Mapping[bytes, bool] = {}


class Pages(Protocol):
    """What is needed of the RAM tier (`node.ram.tier.RamTier`)."""

    loads: Loads
    below: Below
    eviction: Eviction
    clock_ms: Callable[[], int]

    def live(self, index: NamespaceIndex, prefix_hash: bytes) -> Page | None: ...

    def live_all(self, index: NamespaceIndex, prefix_hashes: Sequence[bytes]) -> list[Page | None]: ...

    def hold_all(self, pages: Sequence[Page]) -> None: ...

    def let_go(self, pages: Sequence[Page]) -> None: ...


def hold_all(
    tier: Pages,
    index: NamespaceIndex,
    prefix_hashes: Sequence[bytes],
    prefix_only: bool,
    parts: Parts | None = None,
    elsewhere: Mapping[bytes, bool] = NOWHERE,
) -> Work[Acquired]:
    """See `RamTier.acquire`."""
    visible = [page for page in tier.live_all(index, prefix_hashes) if page is not None]
    if len(visible) == len(prefix_hashes):
        tier.hold_all(visible)
        return Acquired([*visible], [], {}, [])
    acquired = Acquired([None] * len(prefix_hashes), [], {}, [])
    index.busy += 1
    try:
        for position, prefix_hash in enumerate(prefix_hashes):
            page = acquired.in_part.get(prefix_hash) or tier.live(index, prefix_hash)
            while page is None:
                page = index.pages.get(prefix_hash)
                is_written = page is not None and page.state is State.WRITING
                if page is not None and not (is_written and prefix_hash in elsewhere):
                    page = None if is_written else page
                    break
                space, is_copy = parts or index, False
                page, is_full = tier.loads.begin(tier.below, space, prefix_hash, acquired)
                if page is None and not is_full and prefix_hash in elsewhere:
                    space, is_copy = index, elsewhere[prefix_hash] and not is_written
                    page, is_full = tier.loads.begin_fetch(index, prefix_hash, is_copy, acquired, aside=is_written)
                if not is_full:
                    break
                if not (yield from tier.eviction.make_room(space, tier.clock_ms(), is_copy)):
                    break
            if page is not None:
                tier.hold_all([page])
                acquired.pages[position] = page
            elif prefix_only:
                break
    except BaseException:  # a caller who is never told of them can not release them
        tier.loads.give_up(tier.below, acquired)
        tier.let_go([page for page in acquired.pages if page is not None])
        raise
    finally:
        index.busy -= 1
    return acquired
