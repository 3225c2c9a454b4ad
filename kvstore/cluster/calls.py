"""Make a call at one node in batches that keep the node's limits on keys, bytes and ranges.

The calls are written as steps, for threads and for asyncio (`kvstore.steps`).

A chain of several batches is touched as a whole afterwards, so that its end is evicted before its
head.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from kvstore.buffers import Pieces, copy_segments
from kvstore.checksum import hashed_nbytes, key_seed
from kvstore.config import GET_PIECES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, ProtocolError
from kvstore.keys import Namespace
from kvstore.layout import ByteRange, check_ranges
from kvstore.page_hmac import PageHmacs, SignedRanges
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import ACK_ALL, Keep, LookupResult, PutOutcome, Tier
from kvstore.steps import Steps, Stepwise
from kvstore.transports.channel import NodeConnection

# A node stops waiting for the disk at least this long before the caller's deadline.
WAIT_MARGIN_S = 0.05
# A dict, because calling the enum takes ten times as long.
_OUTCOMES = {outcome.value: outcome for outcome in PutOutcome}
# Tiers that a newer node may tell are as far away as any; and whether a page is in one
_TIERS = bytes(min(number, Tier.PEER) for number in range(256))
_PRESENT = bytes(number > 0 for number in range(256))
NEAR_SHARE = 0.8  # share of the remaining time that a near node may spend on calls to other nodes
# bytes of temporary memory for signed parts, from which the requested ranges are copied
SCRATCH_NBYTES = 64 << 20


@Stepwise
def look_up(
    connection: NodeConnection,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    touch: bool,
    deadline: Deadline,
    near: bool = False,
) -> Steps[list[int]]:
    """Return the `Tier` of each page, or a false value if it is not stored.

    `near`: it may be stored at this node or, if this one is near, at others.

    Several batches go tail first: touching must end with the head, and after a transfer in batches
    this restores the whole chain's order.
    """
    found: list[list[int]] = []
    step = connection.limits.batch_keys_max
    for start in reversed(range(0, len(prefix_hashes), step)):
        hashes = prefix_hashes[start : start + step]
        request = pb.LookupRequest(namespace=namespace.digest, prefix_hashes=hashes, touch=touch)
        if near:
            request.near, request.wait_ms = True, near_wait_ms(deadline)
        reply = yield from _call(connection, "lookup", request, len(found) * step, deadline)
        present = reply.present[:]
        if len(present) != len(hashes):
            raise ProtocolError(
                f"the node answered a lookup of {len(hashes)} keys for {len(present)}"
            )
        if tiers := reply.tiers.translate(_TIERS):
            if tiers.translate(_PRESENT) != bytes(present):
                raise ProtocolError("the node's tiers of pages do not fit its answer to a lookup")
            present = list(tiers)
        found.append(present)
    return list(itertools.chain.from_iterable(reversed(found)))


def lookup_result(tiers: Sequence[int]) -> LookupResult:
    """Return the result of a lookup from what `look_up` told of each key."""
    if max(tiers, default=0) <= Tier.RAM:
        return LookupResult(leading(tiers), tuple(cast("Sequence[bool]", tiers)))
    return LookupResult(leading(tiers), tuple(map(bool, tiers)), bytes(tiers))


@Stepwise
def keyed_replies(
    connection: NodeConnection,
    op: str,
    message: Any,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    deadline: Deadline,
) -> Steps[list[Any]]:
    """Return the replies to a request about each key, one for each batch.

    `message` makes the request.
    """
    step = batch_pages_max(namespace.stored_nbytes if op == "verify" else 0, connection.limits)
    replies: list[Any] = []
    for start in range(0, len(prefix_hashes), step):
        request = message(
            namespace=namespace.digest, prefix_hashes=prefix_hashes[start : start + step]
        )
        replies.append((yield from _call(connection, op, request, start, deadline)))
    return replies


def _call(
    connection: NodeConnection, op: str, request: Any, answered: int, deadline: Deadline
) -> Steps[Any]:
    """Make the call of one batch, after other calls whose answers have as many keys.

    If its time ends, the batch was too large for it: Exhausted, which is no failure of the node.
    """
    try:
        return (yield connection.wire.call(op, request, deadline))
    except DeadlineExceeded as error:
        if not answered:
            raise
        raise Exhausted(f"only {answered} keys were answered in {deadline.seconds:g} s") from error


def put_request(
    namespace: Namespace, prefix_hashes: Sequence[bytes], keep: Keep, deadline: Deadline
) -> pb.PutRequest:
    """Build the request of a put."""
    return pb.PutRequest(
        namespace=namespace.digest,
        prefix_hashes=prefix_hashes,
        page_nbytes=namespace.stored_nbytes,
        ttl_ms=max(0, round(keep.ttl_s * 1000)),
        durable=keep.durable,
        ack_all=keep.ack == ACK_ALL,
        wait_ms=wait_ms(deadline) if keep.needs_ack else 0,
    )


def wait_ms(deadline: Deadline) -> int:
    """Return how many milliseconds a node may wait for its disk.

    It must answer before the deadline, so that a hanging disk is not taken for a hanging node.
    """
    left_s = deadline.remaining()
    return max(1, int(1000 * (left_s - max(WAIT_MARGIN_S, left_s / 10))))


def near_wait_ms(deadline: Deadline) -> int:
    """Return how many milliseconds a near node may wait for other nodes, at least 1.

    It must answer before the deadline, so that hanging owners are not taken for a hanging near
    node.
    """
    return max(1, int(1000 * deadline.remaining() * NEAR_SHARE))


def put_outcomes(verdicts: Sequence[int]) -> list[PutOutcome]:
    """Convert the statuses of a put's reply to outcomes. Raises ProtocolError for unknown ones."""
    try:
        return [_OUTCOMES[verdict] for verdict in verdicts]
    except KeyError as error:
        raise ProtocolError(f"the node answered a put with an unknown status: {error}") from error


def per_key(replies: Sequence[Any], field: str, prefix_hashes: Sequence[bytes]) -> list[Any]:
    """Return the values of the replies' field `field` for each key."""
    found = [value for reply in replies for value in getattr(reply, field)]
    if len(found) != len(prefix_hashes):
        raise ProtocolError(
            f"the node returned {len(found)} values of {field} for {len(prefix_hashes)} keys"
        )
    return found


def check_goes_on(request: pb.ListRequest, reply: pb.ListReply) -> None:
    """Raise ProtocolError for a list that makes no progress: it would be requested without end."""
    if reply.next_page_token and reply.next_page_token <= request.page_token:
        raise ProtocolError("the node's list of pages makes no progress")


def leading(present: Sequence[int]) -> int:
    """Return the length of the leading run of true values."""
    return present.index(False) if False in present else len(present)


def key_seeds(namespace: Namespace, prefix_hashes: Sequence[bytes]) -> list[int]:
    """Return the checksum seed of each key."""
    return [key_seed(namespace.digest, prefix_hash) for prefix_hash in prefix_hashes]


def batches(count: int, nbytes: int, limits: pb.Limits, pieces: int = 1) -> Iterator[slice]:
    """Yield slices within the limits on keys, bytes, segments; the latter two are per key."""
    step = batch_pages_max(nbytes, limits, pieces)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def batch_pages_max(nbytes: int, limits: pb.Limits, pieces: int = 1) -> int:
    """Return how many pages of `nbytes` bytes in so many segments one batch may hold."""
    return max(
        1,
        min(
            limits.batch_keys_max,
            limits.batch_nbytes_max // max(nbytes, 1),
            GET_PIECES_MAX // pieces,
        ),
    )


def check_lengths(prefix_hashes: Sequence[bytes], pages: Sequence[Pieces]) -> None:
    """Raise InvalidRequest unless there is one buffer per prefix hash."""
    if len(prefix_hashes) != len(pages):
        raise InvalidRequest(f"{len(prefix_hashes)} prefix hashes for {len(pages)} buffers")


@Stepwise
def put_pages(
    connection: NodeConnection,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    keep: Keep,
    deadline: Deadline,
    key: bytes | None = None,
) -> Steps[list[PutOutcome]]:
    """Send pages; return an outcome per key.

    `key`: of a keyed namespace.

    Raises Exhausted if nothing at all could be kept.
    """
    outcomes: list[PutOutcome] = []
    hmacs = None if key is None else PageHmacs(key, namespace.layout.page_nbytes)
    parts = list(batches(len(pages), namespace.stored_nbytes, connection.limits))
    for part in parts:
        hashes = prefix_hashes[part]
        if outcomes:  # these pages are the newest now: a chain that is too long loses its end
            yield from look_up.steps(
                connection, namespace, prefix_hashes[: part.start], True, deadline
            )
        request = put_request(namespace, hashes, keep, deadline)
        try:
            verdicts = yield connection.wire.put(request, pages[part], deadline, hmacs)
        except Exhausted:
            if not outcomes or keep.needs_ack:
                raise
            verdicts = [pb.FULL] * len(hashes)
        outcomes.extend(put_outcomes(verdicts))
    if len(parts) > 1:
        yield from look_up.steps(connection, namespace, prefix_hashes, True, deadline)
    return outcomes


@dataclass(frozen=True)
class GetOptions:
    """Options of a get.

    `prefix`: stop at the first miss. `near`: the node may fetch pages from others. `key`: the key
    of a keyed namespace.
    """

    ranges: tuple[ByteRange, ...]
    prefix: bool
    near: bool = False
    key: bytes | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all ranges together."""
        return sum(part.nbytes for part in self.ranges)


class GetResult(NamedTuple):
    """Result of a get.

    `hits`: whether each page exists and is intact. `corrupt`: keys of pages that do not match their
    checksum. `forged`: keys of pages that match it, without a valid HMAC.
    """

    hits: list[bool]
    corrupt: list[bytes]
    forged: list[bytes]


@Stepwise
def get_pages(
    connection: NodeConnection,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    options: GetOptions,
    deadline: Deadline,
) -> Steps[GetResult]:
    """Read pages into buffers; return which of them existed and were intact."""
    page_nbytes = namespace.layout.page_nbytes
    whole = options.ranges == (ByteRange(0, page_nbytes),)
    ranges = tuple((part.offset, part.nbytes) for part in options.ranges)
    if options.key is None:
        return (
            yield from _get(
                connection,
                namespace,
                prefix_hashes,
                pages,
                _NodeGet(() if whole else ranges),
                options,
                deadline,
            )
        )
    if whole:
        wanted = _NodeGet((), PageHmacs(options.key, page_nbytes))
        return (
            yield from _get(connection, namespace, prefix_hashes, pages, wanted, options, deadline)
        )
    return (
        yield from _get_signed_ranges(
            connection, namespace, prefix_hashes, pages, ranges, options, deadline
        )
    )


@dataclass(frozen=True)
class _NodeGet:
    """The parts of each page that a node shall send: `ranges`, or all if there are none.

    With `hmacs`, the last range, or the page, ends with the HMAC.
    """

    ranges: tuple[tuple[int, int], ...]
    hmacs: PageHmacs | None = None


def _get(
    connection: NodeConnection,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    wanted: _NodeGet,
    options: GetOptions,
    deadline: Deadline,
) -> Steps[GetResult]:
    stored_nbytes, ranges = namespace.stored_nbytes, wanted.ranges
    messages = [pb.ByteRange(offset=offset, nbytes=nbytes) for offset, nbytes in ranges]
    # Bytes that the node hashes for the ranges; at least as many as it sends.
    checked = hashed_nbytes(stored_nbytes, ranges or [(0, stored_nbytes)])
    hits: list[bool] = []
    corrupt: list[bytes] = []
    parts = list(batches(len(pages), checked, connection.limits, max(1, len(ranges))))
    for part in parts:
        hashes = prefix_hashes[part]
        request = pb.GetRequest(
            namespace=namespace.digest,
            prefix_hashes=hashes,
            ranges=messages,
            prefix_only=options.prefix,
            near=options.near,
            wait_ms=near_wait_ms(deadline) if options.near else 0,
            in_parts=len(hashes) > 1,
        )
        seeds = key_seeds(namespace, hashes)
        found, damaged = yield connection.wire.get(
            request, pages[part], seeds, deadline, wanted.hmacs
        )
        hits.extend(found)
        corrupt.extend(hashes[place] for place in damaged)
        if options.prefix and not all(found):
            break
    if len(parts) > 1:
        yield from look_up.steps(connection, namespace, prefix_hashes[: len(hits)], True, deadline)
    length = leading(hits) if options.prefix else len(hits)
    forged = wanted.hmacs.forged if wanted.hmacs else []
    return GetResult(hits[:length] + [False] * (len(pages) - length), corrupt, forged)


def _get_signed_ranges(
    connection: NodeConnection,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    pages: Sequence[Pieces],
    ranges: Sequence[tuple[int, int]],
    options: GetOptions,
    deadline: Deadline,
) -> Steps[GetResult]:
    """Read whole parts and their HMACs into temporary memory, and copy the verified ranges out."""
    assert options.key is not None
    page_nbytes = namespace.layout.page_nbytes
    check_ranges(ranges, page_nbytes)
    signed = SignedRanges(page_nbytes, ranges)
    behind = (page_nbytes, namespace.stored_nbytes - page_nbytes)
    found = GetResult([], [], [])
    step = min(len(pages), max(1, SCRATCH_NBYTES // signed.nbytes))
    scratch = [(memoryview(bytearray(signed.nbytes)),) for _ in range(step)]
    for start in range(0, len(pages), step):
        hashes = prefix_hashes[start : start + step]
        wanted = _NodeGet(
            (*signed.runs, behind), PageHmacs(options.key, page_nbytes, signed.numbers)
        )
        some = yield from _get(
            connection, namespace, hashes, scratch[: len(hashes)], wanted, options, deadline
        )
        for hit, page, (parts,) in zip(
            some.hits, pages[start : start + step], scratch, strict=False
        ):
            if hit:
                copy_segments(page, signed.pick(parts))
        found = GetResult(
            found.hits + some.hits, found.corrupt + some.corrupt, found.forged + some.forged
        )
    if step < len(pages):
        yield from look_up.steps(connection, namespace, prefix_hashes, True, deadline)
    return found
