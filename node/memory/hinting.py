"""Obey hints about pages: put them into a class of eviction, or out of RAM.

A hint concerns pages of one namespace, so of one tenant. What one session retains, another one can
not give away: only a session's own class is lowered by it.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from node.memory.classes import LOW, NORMAL, SHARED
from node.memory.lock_slices import STEPS, split_in_slices
from node.memory.page import NamespaceIndex, Page, State
from node.memory.tier import RamTier

T = TypeVar("T")
KEYS_A_SLICE = STEPS // 4  # each may need several steps


class Verdict(IntEnum):
    """Enumerate the answers to a hint about a page; values as in the HintVerdict message."""

    ACCEPTED = 1
    CLIPPED = 2
    REFUSED = 3


class Answer(NamedTuple):
    """The answer to a hint about one page; `reason` if it is not accepted."""

    verdict: Verdict
    reason: str = ""


ACCEPTED = Answer(Verdict.ACCEPTED)
ABSENT = Answer(Verdict.REFUSED, "the page is not here")
COPY = Answer(Verdict.REFUSED, "the page is a copy; its owners can keep it longer")
ON_DISK = Answer(Verdict.CLIPPED, "the page is on disk only, where it is the newest now")
NO_ROOM = Answer(Verdict.CLIPPED, "the tenant has raised pages in half of its RAM already")
SHARES = Answer(
    Verdict.REFUSED, "tenants without a quota share the RAM: between them only the age counts"
)
HIGHER = Answer(Verdict.CLIPPED, "another session keeps the page in a higher class, or for longer")
OTHERS = Answer(Verdict.REFUSED, "another session keeps or uses the page")
IN_USE = Answer(Verdict.REFUSED, "the page is pinned, or being read")
NOT_BELOW = Answer(Verdict.REFUSED, "the disk does not have the page")

Owns = Callable[[bytes], bool]


def retain(
    tier: RamTier,
    digest: bytes,
    prefix_hashes: Sequence[bytes],
    rank: int,
    ttl_ms: int,
    holder: bytes,
    owns: Owns,
) -> list[Answer]:
    """Put pages of a chain, head first, into a class for `ttl_ms`; return an answer per key.

    `owns`: whether the holder may give a page away that no session keeps.
    """

    def decide(some: Sequence[bytes]) -> list[Answer]:
        index, now_ms = tier.namespaces.find(digest), tier.clock_ms()
        tier.eviction.order.expire_pins(now_ms)
        wanted = _Wanted(tier, rank, now_ms + ttl_ms, holder, owns)
        below = tier.below.present(digest, some)
        answers = []
        for prefix_hash, is_below in zip(some, below, strict=True):
            page = tier.live(index, prefix_hash)
            if page is not None:
                answers.append(wanted.answer(page))
            else:
                answers.append(ON_DISK if is_below and rank > NORMAL else ABSENT)
        return answers

    def settle(some: Sequence[bytes]) -> Sequence[None]:
        pages, order = tier.namespaces.find(digest).pages, tier.eviction.order
        there = [page for each in some if (page := pages.get(each)) is not None]
        if rank > NORMAL:
            order.touch(there, tier.clock_ms())
        order.settle(there)
        return ()

    # The head first: if not all can be raised, the head is what others need. Then the tail first,
    # because the end of a chain is evicted before its head.
    answers = _in_slices(tier, decide, prefix_hashes)
    settled = [
        h for h, a in zip(prefix_hashes, answers, strict=True) if a.verdict < Verdict.REFUSED
    ]
    _in_slices(tier, settle, settled[::-1])
    if rank > NORMAL and settled:
        with tier.lock:
            tier.below.touch(digest, prefix_hashes)
    return answers


class _Wanted:
    """A class that is wanted for some pages; the caller has the tier's lock throughout."""

    def __init__(self, tier: RamTier, rank: int, end_ms: int, holder: bytes, owns: Owns) -> None:
        self._order = tier.eviction.order
        self._rank = rank
        self._end_ms = end_ms
        self._holder = holder
        self._owns = owns

    def answer(self, page: Page) -> Answer:
        """Give a page its class, and return the answer."""
        if page.is_copy:
            return COPY
        if self._rank <= NORMAL:
            return self._lower(page)
        if not page.namespace.account.nbytes_max and self._order.is_shared:
            return SHARES
        return self._raise(page)

    def _raise(self, page: Page) -> Answer:
        answer = ACCEPTED
        kept, rank, end_ms = self._order.kept.get(page), self._rank, self._end_ms
        holder = self._holder
        if kept is not None and kept.rank > NORMAL:
            if kept.holder != holder:
                known_ms = self._order.kept.end_ms(page)
                if kept.rank > rank or known_ms > end_ms:
                    answer = HIGHER
                rank, end_ms, holder = max(rank, kept.rank), max(end_ms, known_ms), SHARED
        elif not self._order.kept.has_room(page):
            return NO_ROOM
        self._order.keep(page, rank, end_ms, holder)
        return answer

    def _lower(self, page: Page) -> Answer:
        kept, is_own = self._order.kept.get(page), self._owns(page.prefix_hash)
        if kept is not None and kept.rank > NORMAL:
            if kept.holder != self._holder:
                return OTHERS
        elif self._rank == LOW and not is_own:
            return OTHERS
        if self._rank == LOW and is_own:
            self._order.keep(page, LOW, self._end_ms, self._holder)
        else:
            self._order.kept.discard(page)
        return ACCEPTED


def demote(
    tier: RamTier, digest: bytes, prefix_hashes: Sequence[bytes], holder: bytes, owns: Owns
) -> list[Answer]:
    """Take pages out of RAM that the disk has; return an answer per key."""

    def take(some: Sequence[bytes]) -> list[Answer]:
        index = tier.namespaces.find(digest)
        below = tier.below.present(digest, some)
        return [
            _demote(tier, index, prefix_hash, is_below, holder, owns)
            for prefix_hash, is_below in zip(some, below, strict=True)
        ]

    return _in_slices(tier, take, prefix_hashes)


def _demote(
    tier: RamTier, index: NamespaceIndex, prefix_hash: bytes, below: bool, holder: bytes, owns: Owns
) -> Answer:
    page, order = tier.live(index, prefix_hash), tier.eviction.order
    if page is None:
        return ACCEPTED if below else ABSENT
    if not below:
        return NOT_BELOW
    if _others_retain(tier, page, holder) or not owns(prefix_hash):
        return OTHERS
    if page.holds or page in order.pins:
        return IN_USE
    tier.forget(page, "evicted")
    return ACCEPTED


def delete(
    tier: RamTier, digest: bytes, prefix_hashes: Sequence[bytes], holder: bytes
) -> dict[bytes, bool]:
    """Remove a session's own pages, but not those that others retain, or that are pinned.

    Return the keys of the former, and whether each was here. A pin has no holder, so the session's
    own pins keep their pages, too, until they end.
    """

    def remove(some: Sequence[bytes]) -> Sequence[tuple[bytes, bool]]:
        index = tier.namespaces.find(digest)
        found = ((each, index.pages.get(each)) for each in some)
        own = [
            each
            for each, page in found
            if not _is_pinned(tier, digest, each, page) and not _others_retain(tier, page, holder)
        ]
        return list(zip(own, tier.remove_locked(index, own), strict=True))

    return dict(split_in_slices(tier.lock, remove, prefix_hashes))


def _is_pinned(tier: RamTier, digest: bytes, prefix_hash: bytes, page: Page | None) -> bool:
    """Return whether a page is pinned, in RAM or only below, as one that was pinned there."""
    if page is not None and page in tier.eviction.order.pins:
        return True
    below = tier.below.info(digest, prefix_hash)
    return below is not None and below.pin_ttl_s > 0


def _others_retain(tier: RamTier, page: Page | None, holder: bytes) -> bool:
    kept = tier.eviction.order.kept.get(page) if page is not None else None
    return kept is not None and kept.rank > NORMAL and kept.holder != holder


LONG_AGO_MS = -(1 << 65)  # before any session began


def stored_ms(tier: RamTier, digest: bytes, prefix_hashes: Sequence[bytes]) -> list[int | None]:
    """Return when each page was stored, by the tier's clock; None for those not in RAM.

    When a page was stored that came from elsewhere is unknown, so it is long ago.
    """

    def look(some: Sequence[bytes]) -> list[int | None]:
        pages = tier.namespaces.find(digest).pages
        return [
            (LONG_AGO_MS if page.is_fetched else page.stored_ms)
            if (page := pages.get(prefix_hash)) is not None and page.state is State.VISIBLE
            else None
            for prefix_hash in some
        ]

    return split_in_slices(tier.lock, look, prefix_hashes)


def _in_slices(
    tier: RamTier, work: Callable[[Sequence[bytes]], Sequence[T]], keys: Sequence[bytes]
) -> list[T]:
    done: list[T] = []
    for start in range(0, len(keys), KEYS_A_SLICE):
        done += split_in_slices(tier.lock, work, keys[start : start + KEYS_A_SLICE])
    return done
