"""What a call does at one node, batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.batches import batches, key_seeds, leading, look_up, near_wait_ms, put_outcomes, put_request
from kvstore.checksum import hashed_nbytes
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted
from kvstore.keys import Namespace
from kvstore.layout import ByteRange, check_ranges
from kvstore.link import Link
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pieces import Pieces, copy_pieces
from kvstore.results import Keep, PutOutcome
from kvstore.seals import SealedRanges, Seals

SCRATCH_NBYTES = 64 << 20  # of parts of sealed pages, in which the ranges that are wanted lie


def put_pages(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    keep: Keep,
    deadline: Deadline,
    key: bytes | None = None,
) -> list[PutOutcome]:
    """An outcome per key. `key`: of a keyed namespace. Raises Exhausted if nothing at all could be kept."""
    outcomes: list[PutOutcome] = []
    seals = None if key is None else Seals(key, namespace.layout.page_nbytes)
    parts = list(batches(len(pages), namespace.stored_nbytes, link.limits))
    for part in parts:
        hashes = prefix_hashes[part]
        if outcomes:  # what was sent is the newest now: a chain that is too long loses its end
            look_up(link, namespace, prefix_hashes[: part.start], True, deadline)
        request = put_request(namespace, hashes, keep, deadline)
        try:
            verdicts = link.wire.put(request, pages[part], deadline, seals)
        except Exhausted:
            if not outcomes or keep.promised:
                raise
            verdicts = [pb.FULL] * len(hashes)
        outcomes.extend(put_outcomes(verdicts))
    if len(parts) > 1:
        look_up(link, namespace, prefix_hashes, True, deadline)
    return outcomes


@dataclass(frozen=True)
class Wanted:
    """What a get asks of each page. `prefix`: nothing behind the first miss; `near`: the node may fetch it from
    others; `key`: of a keyed namespace."""

    ranges: tuple[ByteRange, ...]
    prefix: bool
    near: bool = False
    key: bytes | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.ranges)


class Found(NamedTuple):
    """`hits`: whether each is there and good. Keys of pages that are there: `corrupt` do not match their checksum,
    `forged` do and have not their seal."""

    hits: list[bool]
    corrupt: list[bytes]
    forged: list[bytes]


def get_pages(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    wanted: Wanted,
    deadline: Deadline,
) -> Found:
    page_nbytes = namespace.layout.page_nbytes
    whole = wanted.ranges == (ByteRange(0, page_nbytes),)
    ranges = tuple((part.offset, part.nbytes) for part in wanted.ranges)
    if wanted.key is None:
        return _get(link, namespace, prefix_hashes, pages, _Asked(() if whole else ranges), wanted, deadline)
    if whole:
        asked = _Asked((), Seals(wanted.key, page_nbytes))
        return _get(link, namespace, prefix_hashes, pages, asked, wanted, deadline)
    return _get_sealed_ranges(link, namespace, prefix_hashes, pages, ranges, wanted, deadline)


@dataclass(frozen=True)
class _Asked:
    """What a node is asked for, of each page: its `ranges`, none for all of it; with `seals` what the last of them, or
    the page, ends with is the seal."""

    ranges: tuple[tuple[int, int], ...]
    seals: Seals | None = None


def _get(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    asked: _Asked,
    wanted: Wanted,
    deadline: Deadline,
) -> Found:
    stored_nbytes, ranges = namespace.stored_nbytes, asked.ranges
    messages = [pb.ByteRange(offset=offset, nbytes=nbytes) for offset, nbytes in ranges]
    # By the node, for the ranges; no less than it sends.
    checked = hashed_nbytes(stored_nbytes, ranges or [(0, stored_nbytes)])
    hits: list[bool] = []
    corrupt: list[bytes] = []
    parts = list(batches(len(pages), checked, link.limits, max(1, len(ranges))))
    for part in parts:
        hashes = prefix_hashes[part]
        request = pb.GetRequest(
            namespace=namespace.digest,
            prefix_hashes=hashes,
            ranges=messages,
            prefix_only=wanted.prefix,
            near=wanted.near,
            wait_ms=near_wait_ms(deadline) if wanted.near else 0,
        )
        seeds = key_seeds(namespace, hashes)
        found, damaged = link.wire.get(request, pages[part], seeds, deadline, asked.seals)
        hits.extend(found)
        corrupt.extend(hashes[place] for place in damaged)
        if wanted.prefix and not all(found):
            break
    if len(parts) > 1:
        look_up(link, namespace, prefix_hashes[: len(hits)], True, deadline)
    length = leading(hits) if wanted.prefix else len(hits)
    forged = asked.seals.forged if asked.seals else []
    return Found(hits[:length] + [False] * (len(pages) - length), corrupt, forged)


def _get_sealed_ranges(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    ranges: Sequence[tuple[int, int]],
    wanted: Wanted,
    deadline: Deadline,
) -> Found:
    """All of the parts in which the ranges lie come, into memory of our own, with the seal; the ranges are copied from
    there when that fits."""
    assert wanted.key is not None
    page_nbytes = namespace.layout.page_nbytes
    check_ranges(ranges, page_nbytes)
    sealed = SealedRanges(page_nbytes, ranges)
    behind = (page_nbytes, namespace.stored_nbytes - page_nbytes)
    found = Found([], [], [])
    step = min(len(pages), max(1, SCRATCH_NBYTES // sealed.nbytes))
    scratch = [(memoryview(bytearray(sealed.nbytes)),) for _ in range(step)]
    for start in range(0, len(pages), step):
        hashes = prefix_hashes[start : start + step]
        asked = _Asked((*sealed.runs, behind), Seals(wanted.key, page_nbytes, sealed.numbers))
        some = _get(link, namespace, hashes, scratch[: len(hashes)], asked, wanted, deadline)
        for hit, page, (parts,) in zip(some.hits, pages[start : start + step], scratch, strict=False):
            if hit:
                copy_pieces(page, sealed.pick(parts))
        found = Found(found.hits + some.hits, found.corrupt + some.corrupt, found.forged + some.forged)
    if step < len(pages):
        look_up(link, namespace, prefix_hashes, True, deadline)
    return found
