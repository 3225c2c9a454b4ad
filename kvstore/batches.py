"""A call's keys in batches: the node's limits, and what must hold across them."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.checksum import key_seed
from kvstore.config import GET_PIECES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, ProtocolError
from kvstore.keys import Namespace
from kvstore.link import Link
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pieces import Pieces
from kvstore.results import ACK_ALL, Keep, PutOutcome

# So long before a caller's deadline a node ends its waiting for the disk, at least.
WAIT_MARGIN_S = 0.05
_OUTCOMES = {outcome.value: outcome for outcome in PutOutcome}  # to call the enum takes ten times as long
NEAR_SHARE = 0.8  # of the time that is left, for what a near node asks of others


def look_up(
    link: Link,
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    touch: bool,
    deadline: Deadline,
    near: bool = False,
) -> list[bool]:
    """Presence per key; `near`: at this node or at others. Several batches go tail first: touching must end with the
    head, and after a transfer in batches this puts the whole chain's order right."""
    found: list[list[bool]] = []
    step = link.limits.batch_keys_max
    for start in reversed(range(0, len(prefix_hashes), step)):
        hashes = prefix_hashes[start : start + step]
        request = pb.LookupRequest(namespace=namespace.digest, prefix_hashes=hashes, touch=touch)
        if near:
            request.near, request.wait_ms = True, near_wait_ms(deadline)
        with _too_many(len(found) * step, deadline):
            present = link.wire.call("lookup", request, deadline).present[:]
        if len(present) != len(hashes):
            raise ProtocolError(f"the node answered a lookup of {len(hashes)} keys for {len(present)}")
        found.append(present)
    return list(itertools.chain.from_iterable(reversed(found)))


def keyed_replies(
    link: Link, op: str, message: Any, namespace: Namespace, prefix_hashes: Sequence[bytes], deadline: Deadline
) -> list[Any]:
    """Replies of a request per key, one for each batch. `message`: makes the request."""
    step = batch_pages_max(namespace.stored_nbytes if op == "verify" else 0, link.limits)
    replies: list[Any] = []
    for start in range(0, len(prefix_hashes), step):
        request = message(namespace=namespace.digest, prefix_hashes=prefix_hashes[start : start + step])
        with _too_many(start, deadline):
            replies.append(link.wire.call(op, request, deadline))
    return replies


@contextlib.contextmanager
def _too_many(answered: int, deadline: Deadline) -> Iterator[None]:
    """Around each batch of a call that has answers for so many keys. If its time ends, so many keys were too many for
    it: Exhausted, which is no failure of a node that answers."""
    try:
        yield
    except DeadlineExceeded as error:
        if not answered:
            raise
        raise Exhausted(f"only {answered} keys were answered in {deadline.seconds:g} s") from error


def put_request(namespace: Namespace, prefix_hashes: Sequence[bytes], keep: Keep, deadline: Deadline) -> pb.PutRequest:
    return pb.PutRequest(
        namespace=namespace.digest,
        prefix_hashes=prefix_hashes,
        page_nbytes=namespace.stored_nbytes,
        ttl_ms=max(0, round(keep.ttl_s * 1000)),
        durable=keep.durable,
        ack_all=keep.ack == ACK_ALL,
        wait_ms=wait_ms(deadline) if keep.promised else 0,
    )


def wait_ms(deadline: Deadline) -> int:
    """How long a node may wait for its disk: it answers before the deadline, so that a disk that hangs is not taken
    for a node that does."""
    left_s = deadline.remaining()
    return max(1, int(1000 * (left_s - max(WAIT_MARGIN_S, left_s / 10))))


def near_wait_ms(deadline: Deadline) -> int:
    """How long a near node may ask others: it answers before the deadline, so that others that hang are not taken for
    a near node that does. The least is for one that asks next to nobody."""
    return max(1, int(1000 * deadline.remaining() * NEAR_SHARE))


def put_outcomes(verdicts: Sequence[int]) -> list[PutOutcome]:
    try:
        return [_OUTCOMES[verdict] for verdict in verdicts]
    except KeyError as error:
        raise ProtocolError(f"the node answered a put with a verdict that nobody knows: {error}") from error


def per_key(replies: Sequence[Any], field: str, prefix_hashes: Sequence[bytes]) -> list[Any]:
    """What the replies' `field` says of each key."""
    found = [value for reply in replies for value in getattr(reply, field)]
    if len(found) != len(prefix_hashes):
        raise ProtocolError(f"the node said what is {field} of {len(found)} keys, asked about {len(prefix_hashes)}")
    return found


def check_goes_on(request: pb.ListRequest, reply: pb.ListReply) -> None:
    """A list that did not go on would be asked for without end."""
    if reply.next_page_token and reply.next_page_token <= request.page_token:
        raise ProtocolError("the node's list of pages goes in a circle")


def leading(present: Sequence[bool]) -> int:
    """Length of the leading run of True."""
    return present.index(False) if False in present else len(present)


def key_seeds(namespace: Namespace, prefix_hashes: Sequence[bytes]) -> list[int]:
    return [key_seed(namespace.digest, prefix_hash) for prefix_hash in prefix_hashes]


def batches(count: int, nbytes: int, limits: pb.Limits, pieces: int = 1) -> Iterator[slice]:
    """Slices of a batch that keep the limits on keys, bytes and pieces; the latter two are per key."""
    step = batch_pages_max(nbytes, limits, pieces)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def batch_pages_max(nbytes: int, limits: pb.Limits, pieces: int = 1) -> int:
    """Pages in one batch, of each of which `nbytes` bytes in so many pieces are moved."""
    return max(1, min(limits.batch_keys_max, limits.batch_nbytes_max // max(nbytes, 1), GET_PIECES_MAX // pieces))


def check_lengths(prefix_hashes: Sequence[bytes], pages: Sequence[Pieces]) -> None:
    if len(prefix_hashes) != len(pages):
        raise InvalidRequest(f"{len(prefix_hashes)} prefix hashes for {len(pages)} buffers")
