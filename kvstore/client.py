"""The client: batched, thread-safe, every call under a deadline.

    Client --- placement: which node? --- breaker: worth trying? --- wire: bulk TCP or gRPC --- node

Page bytes move between the caller's buffers and the socket without a copy in between (bulk wire).
Index 0 of every batch is the head of a prefix chain. A miss, a page that does not match its
checksum, and a page that could not be stored are values; errors mean the node could not be asked.
"""

import enum
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvstore.buffers import byte_views
from kvstore.checksum import key_seed
from kvstore.config import GET_PIECES_MAX, ClientConfig, client_config
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError
from kvstore.keys import Namespace, check_prefix_hashes
from kvstore.layout import ByteRange
from kvstore.link import Link, NodeLink
from kvstore.messages import namespace_value
from kvstore.pb import kvstore_pb2 as pb
from kvstore.placement import SingleNode

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PREFIX_HASHES_MAX = 1 << 20  # of one call of ours; the node's own limit splits it into batches


class PutOutcome(enum.Enum):
    """What became of one page of a put."""

    STORED = pb.WRITE
    EXISTS = pb.EXISTS  # was there already; counts as a use
    BUSY = pb.BUSY  # another writer is just storing it
    FULL = pb.FULL  # the node has no space it may free


@dataclass(frozen=True)
class LookupResult:
    """`prefix_pages`: leading keys that are stored. `present`: one bool per key."""

    prefix_pages: int
    present: tuple[bool, ...]


@dataclass(frozen=True)
class Keep:
    """How long and how well the pages of a put are kept. `ttl_s`: seconds after which new pages are
    forgotten for certain, 0: whenever space runs out. `durable`: the put returns when they survive
    `kill -9` and power loss; needs a node with a data directory."""

    ttl_s: float = 0.0
    durable: bool = False


class VerifyResult(NamedTuple):
    """Pages whose copy at the node is good, was bad and is gone now, or is not there."""

    intact: int
    dropped: int
    absent: int


class ClientStats(NamedTuple):
    """Counts since the client was made."""

    connects: int
    failures: int
    corrupt_pages: int


class Client:
    """A connection to the store. Make one per process and share it between threads."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config or client_config()
        self._placement = SingleNode(self.config.address)
        self._node = NodeLink(self._placement.nodes[0], self.config)
        self._corrupt_pages = 0

    @property
    def stats(self) -> ClientStats:
        return ClientStats(self._node.connect_count, self._node.failure_count, self._corrupt_pages)

    @property
    def wire_name(self) -> str:
        """'bulk' or 'grpc'; 'none' before the first call and while the node is unreachable."""
        return self._node.wire_name

    def close(self) -> None:
        """Closes idle connections now and those in use when their call ends."""
        self._node.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- pages ---------------------------------------------------------------------------

    def lookup(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], touch: bool = False, timeout_s: float | None = None
    ) -> LookupResult:
        """Which of these pages are stored. `touch` counts as a use; a plain lookup does not, so
        that polling can not keep dead pages alive."""

        def run(link: Link, deadline: Deadline) -> LookupResult:
            present = _lookup(link, namespace, prefix_hashes, touch, deadline)
            return LookupResult(_leading(present), tuple(present))

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        return self._run(run, namespace, timeout_s)

    def put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        pages: Sequence[Any],
        keep: Keep = Keep(),
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Stores pages; one outcome per key. Pages that exist are touched, not sent.

        `pages`: buffers of exactly `layout.page_nbytes` bytes each. Give the whole chain, head
        first: the node ages it tail first. Raises Exhausted only if nothing at all could be kept,
        and Exhausted for a durable put whose pages are visible but not safe.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        views = byte_views(pages, namespace.layout.page_nbytes)
        _check_lengths(prefix_hashes, views)

        def run(link: Link, deadline: Deadline) -> list[PutOutcome]:
            outcomes: list[PutOutcome] = []
            parts = list(_parts(len(views), namespace.layout.page_nbytes, link.limits))
            for part in parts:
                hashes = prefix_hashes[part]
                if outcomes:  # what was sent is the newest now: a chain that is too long loses its end
                    _lookup(link, namespace, prefix_hashes[: part.start], True, deadline)
                request = pb.PutRequest(
                    namespace=namespace.digest,
                    prefix_hashes=hashes,
                    page_nbytes=namespace.layout.page_nbytes,
                    ttl_ms=max(0, round(keep.ttl_s * 1000)),
                    durable=keep.durable,
                )
                try:
                    verdicts = link.wire.put(request, views[part], _seeds(namespace, hashes), deadline)
                except Exhausted:
                    if not outcomes or keep.durable:
                        raise
                    verdicts = [pb.FULL] * len(hashes)
                outcomes.extend(PutOutcome(verdict) for verdict in verdicts)
            if len(parts) > 1:
                _lookup(link, namespace, prefix_hashes, True, deadline)
            return outcomes

        return self._run(run, namespace, timeout_s)

    def get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        prefix: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Reads pages into the callers' buffers; True for each that is there and intact.

        `buffers`: writable, `layout.page_nbytes` bytes each; those of misses hold nothing of
        meaning afterwards. `prefix` stops at the first miss.
        """
        whole = (ByteRange(0, namespace.layout.page_nbytes),)
        return self._get(namespace, prefix_hashes, buffers, whole, prefix, timeout_s)

    def get_ranges(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        ranges: Sequence[ByteRange],
        buffers: Sequence[Any],
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Like `get` for parts of each page: for a layer, `ranges=layout.layer_ranges(layer)`.

        A buffer takes the ranges one after the other. The node checks the whole page against its
        checksum before it sends a part.
        """
        if not ranges:
            raise InvalidRequest("ranges is empty; use get for whole pages")
        return self._get(namespace, prefix_hashes, buffers, tuple(ranges), False, timeout_s)

    def _get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        ranges: tuple[ByteRange, ...],
        prefix: bool,
        timeout_s: float | None,
    ) -> list[bool]:
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        nbytes = sum(part.nbytes for part in ranges)
        views = byte_views(buffers, nbytes, writable=True)
        _check_lengths(prefix_hashes, views)
        messages = [pb.ByteRange(offset=part.offset, nbytes=part.nbytes) for part in ranges]
        whole = ranges == (ByteRange(0, namespace.layout.page_nbytes),)

        def run(link: Link, deadline: Deadline) -> list[bool]:
            hits: list[bool] = []
            parts = list(_parts(len(views), nbytes, link.limits, len(ranges)))
            for part in parts:
                hashes = prefix_hashes[part]
                request = pb.GetRequest(
                    namespace=namespace.digest,
                    prefix_hashes=hashes,
                    ranges=[] if whole else messages,
                    prefix_only=prefix,
                )
                found, corrupt = link.wire.get(request, views[part], _seeds(namespace, hashes), deadline)
                hits.extend(found)
                if corrupt:
                    self._report_corrupt(link, namespace, [hashes[i] for i in corrupt], deadline)
                if prefix and not all(found):
                    break
            if len(parts) > 1:
                _lookup(link, namespace, prefix_hashes[: len(hits)], True, deadline)
            length = _leading(hits) if prefix else len(hits)
            return hits[:length] + [False] * (len(views) - length)

        return self._run(run, namespace, timeout_s)

    def _report_corrupt(self, link: Link, namespace: Namespace, prefix_hashes: list[bytes], deadline: Deadline) -> None:
        """The node checks its copies and drops bad ones; whatever it says, this read is a miss."""
        self._corrupt_pages += len(prefix_hashes)
        log.error(
            "%d pages of namespace %s did not match their checksum; treated as misses",
            len(prefix_hashes),
            namespace.digest.hex(),
        )
        try:
            distinct = list(dict.fromkeys(prefix_hashes))
            request = pb.VerifyRequest(namespace=namespace.digest, prefix_hashes=distinct)
            link.control.call("verify", request, deadline)
        except KVStoreError as error:
            log.warning("could not report corrupt pages: %s", error)

    # ---- management ----------------------------------------------------------------------

    def open(self, namespace: Namespace, timeout_s: float | None = None) -> None:
        """Registers the namespace now. Every other call does it by itself when needed."""
        self._run(lambda link, deadline: None, namespace, timeout_s)

    def verify(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> VerifyResult:
        """Lets the node check its copies of these pages; it drops those that are bad."""
        replies = self._keyed("verify", pb.VerifyRequest, namespace, prefix_hashes, timeout_s)
        return VerifyResult(*(sum(getattr(reply, name) for reply in replies) for name in VerifyResult._fields))

    def remove(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> list[bool]:
        """Forgets pages, pinned ones too; True for each that was there."""
        replies = self._keyed("remove", pb.RemoveRequest, namespace, prefix_hashes, timeout_s)
        return [removed for reply in replies for removed in reply.removed]

    def pin(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], ttl_s: float, timeout_s: float | None = None
    ) -> list[bool]:
        """Keeps pages from eviction for `ttl_s` seconds; True for each that is there."""
        message = functools.partial(pb.PinRequest, ttl_ms=max(0, round(ttl_s * 1000)))
        replies = self._keyed("pin", message, namespace, prefix_hashes, timeout_s)
        return [pinned for reply in replies for pinned in reply.pinned]

    def unpin(self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """True for each page that was pinned."""
        replies = self._keyed("unpin", pb.UnpinRequest, namespace, prefix_hashes, timeout_s)
        return [unpinned for reply in replies for unpinned in reply.unpinned]

    def stat(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> list[pb.PageStat]:
        """One PageStat per key; `present` is False for a miss."""
        replies = self._keyed("stat", pb.StatRequest, namespace, prefix_hashes, timeout_s)
        return [page for reply in replies for page in reply.pages]

    def list_pages(self, namespace: Namespace, key_prefix: bytes = b"", limit: int = 0) -> Iterator[pb.PageStat]:
        """Pages in the order of their prefix hashes, fetched piece by piece. `limit` 0: all."""
        request = pb.ListRequest(namespace=namespace.digest, key_prefix=key_prefix)
        count = 0
        while True:
            request.limit = limit - count if limit else 0
            reply = self._call("list", request, namespace, None)
            yield from reply.pages
            request.page_token, count = reply.next_page_token, count + len(reply.pages)
            if not request.page_token or (limit and count >= limit):
                return

    def namespaces(self, timeout_s: float | None = None) -> list[tuple[Namespace, pb.NamespaceInfo]]:
        """All namespaces the node knows, with their counters."""
        reply = self._call("list_namespaces", pb.ListNamespacesRequest(), None, timeout_s)
        return [(namespace_value(info.namespace), info) for info in reply.namespaces]

    def node_status(self, timeout_s: float | None = None) -> pb.NodeStatusReply:
        """What the node says of itself: state, memory, namespaces, counters, limits."""
        reply: pb.NodeStatusReply = self._call("node_status", pb.NodeStatusRequest(), None, timeout_s)
        return reply

    def remove_namespace(self, namespace: Namespace, timeout_s: float | None = None) -> int:
        """Forgets all pages of a namespace in every tier; how many entries went."""
        request = pb.RemoveNamespaceRequest(namespace=namespace.digest)
        removed: int = self._call("remove_namespace", request, namespace, timeout_s).removed
        return removed

    def flush(self, timeout_s: float | None = None) -> int:
        """Returns when all visible pages survive power loss; the number of pages on disk."""
        pages: int = self._call("flush", pb.FlushRequest(), None, timeout_s).pages_on_disk
        return pages

    def scrub(self, cursor: bytes = b"", nbytes_max: int = 0, timeout_s: float | None = None) -> pb.ScrubReply:
        """Lets the node verify a stretch of its disk; go on with `next_cursor` until it is empty."""
        reply: pb.ScrubReply = self._call(
            "scrub", pb.ScrubRequest(cursor=cursor, nbytes_max=nbytes_max), None, timeout_s
        )
        return reply

    def recover(self, timeout_s: float | None = None) -> None:
        """Lets the node try its failed disk again. Raises Exhausted if it still fails."""
        self._call("recover", pb.RecoverRequest(), None, timeout_s)

    # ---- one call ------------------------------------------------------------------------

    def _keyed(
        self, op: str, message: Any, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None
    ) -> list[Any]:
        """Replies of a request per key, in as many batches as the node's limit asks for."""

        def run(link: Link, deadline: Deadline) -> list[Any]:
            step = link.limits.batch_keys_max
            batches = [prefix_hashes[start : start + step] for start in range(0, len(prefix_hashes), step)]
            requests = [message(namespace=namespace.digest, prefix_hashes=batch) for batch in batches]
            return [link.wire.call(op, request, deadline) for request in requests]

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=op != "stat")
        return self._run(run, namespace, timeout_s)

    def _call(self, op: str, request: Any, namespace: Namespace | None, timeout_s: float | None) -> Any:
        return self._run(lambda link, deadline: link.wire.call(op, request, deadline), namespace, timeout_s)

    def _run(
        self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, timeout_s: float | None
    ) -> Result:
        deadline = Deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        return self._node.run(call, namespace, deadline)


def _lookup(
    link: Link, namespace: Namespace, prefix_hashes: Sequence[bytes], touch: bool, deadline: Deadline
) -> list[bool]:
    """Presence per key. Several batches go tail first: touching must end with the head, and after a
    transfer in batches this puts the whole chain's order right."""
    parts: list[list[bool]] = []
    step = link.limits.batch_keys_max
    for start in reversed(range(0, len(prefix_hashes), step)):
        hashes = prefix_hashes[start : start + step]
        request = pb.LookupRequest(namespace=namespace.digest, prefix_hashes=hashes, touch=touch)
        parts.append(link.wire.call("lookup", request, deadline).present[:])
    return list(itertools.chain.from_iterable(reversed(parts)))


def _leading(present: Sequence[bool]) -> int:
    """Length of the leading run of True."""
    return present.index(False) if False in present else len(present)


def _seeds(namespace: Namespace, prefix_hashes: Sequence[bytes]) -> list[int]:
    return [key_seed(namespace.digest, prefix_hash) for prefix_hash in prefix_hashes]


def _parts(count: int, nbytes: int, limits: pb.Limits, pieces: int = 1) -> Iterator[slice]:
    """Slices of a batch that keep the limits on keys, bytes and pieces; the latter two are per key."""
    step = max(1, min(limits.batch_keys_max, limits.batch_nbytes_max // max(nbytes, 1), GET_PIECES_MAX // pieces))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _check_lengths(prefix_hashes: Sequence[bytes], views: Sequence[memoryview]) -> None:
    if len(prefix_hashes) != len(views):
        raise InvalidRequest(f"{len(prefix_hashes)} prefix hashes for {len(views)} buffers")
