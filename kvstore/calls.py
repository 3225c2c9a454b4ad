"""What a call does at one node, batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.batches import batches, key_seeds, leading, look_up, near_wait_ms, put_outcomes, put_request
from kvstore.checksum import hashed_nbytes
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted
from kvstore.keys import Namespace
from kvstore.layout import ByteRange
from kvstore.link import Link
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import Keep, PutOutcome


def put_pages(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    views: Sequence[memoryview],
    keep: Keep,
    deadline: Deadline,
) -> list[PutOutcome]:
    """An outcome per key. Raises Exhausted if nothing at all could be kept."""
    outcomes: list[PutOutcome] = []
    parts = list(batches(len(views), namespace.layout.page_nbytes, link.limits))
    for part in parts:
        hashes = prefix_hashes[part]
        if outcomes:  # what was sent is the newest now: a chain that is too long loses its end
            look_up(link, namespace, prefix_hashes[: part.start], True, deadline)
        request = put_request(namespace, hashes, keep, deadline)
        try:
            verdicts = link.wire.put(request, views[part], deadline)
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
    others."""

    ranges: tuple[ByteRange, ...]
    prefix: bool
    near: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.ranges)


def get_pages(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    views: Sequence[memoryview],
    wanted: Wanted,
    deadline: Deadline,
) -> tuple[list[bool], list[bytes]]:
    """(whether each is there and intact, the keys of those that are there and are not)."""
    ranges, page_nbytes = wanted.ranges, namespace.layout.page_nbytes
    messages = [pb.ByteRange(offset=part.offset, nbytes=part.nbytes) for part in ranges]
    whole = ranges == (ByteRange(0, page_nbytes),)
    # By the node, for the ranges; no less than it sends.
    checked = hashed_nbytes(page_nbytes, [(part.offset, part.nbytes) for part in ranges])
    hits: list[bool] = []
    corrupt: list[bytes] = []
    parts = list(batches(len(views), checked, link.limits, len(ranges)))
    for part in parts:
        hashes = prefix_hashes[part]
        request = pb.GetRequest(
            namespace=namespace.digest,
            prefix_hashes=hashes,
            ranges=[] if whole else messages,
            prefix_only=wanted.prefix,
            near=wanted.near,
            wait_ms=near_wait_ms(deadline) if wanted.near else 0,
        )
        found, damaged = link.wire.get(request, views[part], key_seeds(namespace, hashes), deadline)
        hits.extend(found)
        corrupt.extend(hashes[place] for place in damaged)
        if wanted.prefix and not all(found):
            break
    if len(parts) > 1:
        look_up(link, namespace, prefix_hashes[: len(hits)], True, deadline)
    length = leading(hits) if wanted.prefix else len(hits)
    return hits[:length] + [False] * (len(views) - length), corrupt
