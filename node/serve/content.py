"""The bytes of held pages: where ranges of them are in the arena, and whether they are intact."""

from collections.abc import Callable, Iterator, Sequence

from kvstore.checksum import checksum, hashed_nbytes, joined_checksum, parts_match, root
from node.ram.arena import Arena
from node.ram.page import Page
from node.ram.parts import Parts, Range
from node.ram.tier import RamTier
from node.serve.charge import Charge


class Content:
    """Thread-safe. A page that does not match its checksum is dropped."""

    def __init__(self, arena: Arena, tier: RamTier) -> None:
        self._arena = arena
        self._tier = tier

    def views(self, pages: Sequence[Page], ranges: Sequence[Range]) -> Iterator[memoryview]:
        """Of ranges of each page that are in its slot; without any, of all of it."""
        if pages and not ranges:
            return iter(self._arena.views([page.offset for page in pages], pages[0].namespace.page_nbytes))
        return (
            self._arena.view(place, nbytes)
            for page in pages
            for place, (_, nbytes) in zip(places(page, ranges), ranges, strict=True)
        )

    def checksum(self, page: Page, ranges: Sequence[Range]) -> bytes:
        """For the way of these ranges, none if the page is not intact; nothing is copied for it. Their reader has not
        all that a leaf covers, so that is checked here; of a page of which only parts are here it was just now."""
        if not isinstance(page.namespace, Parts) and not self.intact(page, ranges):
            return b""
        nbytes = sum(nbytes for _, nbytes in ranges)
        return joined_checksum(self.views([page], ranges), nbytes, page.namespace.seed(page.prefix_hash))

    def checksums(
        self, pages: Sequence[Page], ranges: Sequence[Range], charge: Charge, check: Callable[[], None]
    ) -> dict[Page, bytes]:
        """Of each page that is intact, once for a page however often it is asked for. `check` may raise in between."""
        sums, wanted_nbytes = {}, sum(nbytes for _, nbytes in ranges)
        for page in dict.fromkeys(pages):
            check()
            charge.add_processed(wanted_nbytes + _checked_nbytes(page, ranges))
            if checksum := self.checksum(page, ranges):
                sums[page] = checksum
        return sums

    def intact(self, page: Page, ranges: Sequence[Range] = ()) -> bool:
        """Compares a page, or what has to do with `ranges` of it, with its checksum."""
        view = self._arena.view(page.offset, page.namespace.page_nbytes)
        seed = page.namespace.seed(page.prefix_hash)
        if ranges and page.leaves:
            intact = root(page.leaves, seed) == page.checksum and parts_match(view, page.leaves, ranges)
        else:
            intact = checksum(view, seed) == page.checksum
        if not intact:
            self._tier.drop_corrupt(page)
        return intact


def _checked_nbytes(page: Page, ranges: Sequence[Range]) -> int:
    """Return how many bytes are hashed to verify these ranges: whole leaves, or the page if it has only one."""
    if isinstance(page.namespace, Parts):
        return 0  # they were verified when they were read from disk
    page_nbytes = page.namespace.page_nbytes
    return hashed_nbytes(page_nbytes, ranges) if page.leaves else page_nbytes


def places(page: Page, ranges: Sequence[Range]) -> list[int]:
    """Where in the arena each of the ranges begins."""
    space = page.namespace
    if isinstance(space, Parts):
        return [page.offset + space.place(offset) for offset, _ in ranges]
    return [page.offset + offset for offset, _ in ranges]


def offsets_of(pages: Sequence[Page], ranges: Sequence[Range]) -> list[int]:
    """The same of each page; without any ranges, where each page does."""
    return [place for page in pages for place in places(page, ranges)] if ranges else [page.offset for page in pages]


def ttls_ms(pages: Sequence[Page], clock_s: Callable[[], int]) -> list[int]:
    """Until each page is forgotten, 0 without a time to live; nothing if none has one."""
    expiries_s = [page.expiry_s for page in pages]
    if not any(expiries_s):
        return []
    now_s = clock_s()
    return [max(1, expiry_s - now_s) * 1000 if expiry_s else 0 for expiry_s in expiries_s]
