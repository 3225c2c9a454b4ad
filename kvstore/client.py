"""The client: batched, thread-safe, every call under a deadline.

    Client --- placement: which node? --- breaker: worth trying? --- wire: shared memory, bulk TCP or gRPC --- node

Page bytes move between the caller's buffers and the node's memory, or the socket, without a copy in between.
Index 0 of every batch is the head of a prefix chain. A miss, a page that does not match its
checksum, and a page that could not be stored are values; errors mean the node could not be asked.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvstore.batches import (
    batch_pages_max,
    batches,
    check_goes_on,
    check_lengths,
    key_seeds,
    keyed_replies,
    leading,
    look_up,
    per_key,
    put_outcomes,
    put_request,
    wait_ms,
)
from kvstore.buffers import byte_views
from kvstore.checksum import hashed_nbytes
from kvstore.config import ClientConfig, client_config
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError
from kvstore.keys import Namespace, check_prefix_hashes
from kvstore.layout import ByteRange
from kvstore.link import Link, NodeLink
from kvstore.log_rate import LogRate
from kvstore.messages import namespace_value
from kvstore.pb import kvstore_pb2 as pb
from kvstore.placement import SingleNode
from kvstore.results import KEEP_WHILE_SPACE, ClientStats, Keep, LookupResult, VerifyResult
from kvstore.results import PutOutcome as PutOutcome
from kvstore.wires.mapped_slots import AcquiredSlots, ReservedSlots
from kvstore.wires.shm import ShmWire

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")
Slots = TypeVar("Slots", ReservedSlots, AcquiredSlots)

PREFIX_HASHES_MAX = 1 << 20  # of one call of ours; the node's own limit splits it into batches
RECOVER_TIMEOUT_S = 45.0  # a node gives a disk that hangs 30 s, and says so then


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
        """'shm', 'bulk' or 'grpc'; 'none' before the first call and while the node is unreachable."""
        return self._node.wire_name

    @property
    def maps_arena(self) -> bool:
        """Whether `open_put` and `open_get` work; after the first call, such as `open`."""
        return self.wire_name == ShmWire.name

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
            present = look_up(link, namespace, prefix_hashes, touch, deadline)
            return LookupResult(leading(present), tuple(present))

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        return self._run(run, namespace, timeout_s)

    def put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        pages: Sequence[Any],
        keep: Keep = KEEP_WHILE_SPACE,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Stores pages; one outcome per key. Pages that exist are touched, not sent.

        `pages`: buffers of exactly `layout.page_nbytes` bytes each. Give the whole chain, head
        first: the node ages it tail first. Raises Exhausted only if nothing at all could be kept,
        and Exhausted for a durable put whose pages are visible but not safe.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        views = byte_views(pages, namespace.layout.page_nbytes)
        check_lengths(prefix_hashes, views)

        def run(link: Link, deadline: Deadline) -> list[PutOutcome]:
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
                    if not outcomes or keep.durable:
                        raise
                    verdicts = [pb.FULL] * len(hashes)
                outcomes.extend(put_outcomes(verdicts))
            if len(parts) > 1:
                look_up(link, namespace, prefix_hashes, True, deadline)
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

        A buffer takes the ranges one after the other. The node checks the parts of the page in which they
        lie (`kvstore.checksum.cuts`) before it sends them.
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
        check_lengths(prefix_hashes, views)
        messages = [pb.ByteRange(offset=part.offset, nbytes=part.nbytes) for part in ranges]
        whole = ranges == (ByteRange(0, namespace.layout.page_nbytes),)
        # By the node, for the ranges; no less than it sends.
        checked = hashed_nbytes(namespace.layout.page_nbytes, [(part.offset, part.nbytes) for part in ranges])

        def run(link: Link, deadline: Deadline) -> list[bool]:
            hits: list[bool] = []
            parts = list(batches(len(views), checked, link.limits, len(ranges)))
            for part in parts:
                hashes = prefix_hashes[part]
                request = pb.GetRequest(
                    namespace=namespace.digest,
                    prefix_hashes=hashes,
                    ranges=[] if whole else messages,
                    prefix_only=prefix,
                )
                found, corrupt = link.wire.get(request, views[part], key_seeds(namespace, hashes), deadline)
                hits.extend(found)
                if corrupt:
                    self._report_corrupt(link, namespace, [hashes[i] for i in corrupt], deadline)
                if prefix and not all(found):
                    break
            if len(parts) > 1:
                look_up(link, namespace, prefix_hashes[: len(hits)], True, deadline)
            length = leading(hits) if prefix else len(hits)
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

    # ---- pages in place ------------------------------------------------------------------

    def open_put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        keep: Keep = KEEP_WHILE_SPACE,
        timeout_s: float | None = None,
    ) -> contextlib.AbstractContextManager[ReservedSlots]:
        """`with client.open_put(...) as slots`: the node's own memory, to write pages in and then
        `slots.commit(leaves)`. Leaving without a commit stores nothing.

        At most `batch_pages_max` keys. Raises InvalidRequest unless `maps_arena`. A context has a
        connection of its own; `timeout_s` covers all of it up to the commit.
        """

        def enter(wire: ShmWire, deadline: Deadline) -> contextlib.AbstractContextManager[ReservedSlots]:
            return wire.reserving(put_request(namespace, prefix_hashes, keep, deadline), deadline)

        return self._in_place(enter, namespace, timeout_s)

    def open_get(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], prefix: bool = False, timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[AcquiredSlots]:
        """`with client.open_get(...) as slots`: the pages in the node's own memory, which keep their
        bytes and their place until the context is left, for however long that is.

        The caller compares bytes and `slots.checksums`, and tells `verify` of a page that does not
        match. Otherwise as `open_put`.
        """
        request = pb.GetRequest(namespace=namespace.digest, prefix_hashes=prefix_hashes, prefix_only=prefix)
        nbytes = namespace.layout.page_nbytes
        return self._in_place(lambda wire, deadline: wire.acquiring(request, nbytes, deadline), namespace, timeout_s)

    def batch_pages_max(self, namespace: Namespace, timeout_s: float | None = None) -> int:
        """Pages of this namespace that one `open_put` or `open_get` may ask for."""
        nbytes = namespace.layout.page_nbytes
        return self._run(lambda link, deadline: batch_pages_max(nbytes, link.limits), namespace, timeout_s)

    @contextlib.contextmanager
    def _in_place(
        self,
        enter: Callable[[ShmWire, Deadline], contextlib.AbstractContextManager[Slots]],
        namespace: Namespace,
        timeout_s: float | None,
    ) -> Iterator[Slots]:
        def run(link: Link, deadline: Deadline) -> tuple[Slots, contextlib.ExitStack]:
            if not isinstance(link.wire, ShmWire):
                raise InvalidRequest(f"the {link.wire.name} wire maps no memory of the node; use put and get")
            with contextlib.ExitStack() as stack:
                return stack.enter_context(enter(link.wire, deadline)), stack.pop_all()

        slots, stack = self._run(run, namespace, timeout_s)
        with stack:
            yield slots

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
        return per_key(replies, "removed", prefix_hashes)

    def pin(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], ttl_s: float, timeout_s: float | None = None
    ) -> list[bool]:
        """Keeps pages from eviction for `ttl_s` seconds; True for each that is there."""
        message = functools.partial(pb.PinRequest, ttl_ms=max(0, round(ttl_s * 1000)))
        replies = self._keyed("pin", message, namespace, prefix_hashes, timeout_s)
        return per_key(replies, "pinned", prefix_hashes)

    def unpin(self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """True for each page that was pinned."""
        replies = self._keyed("unpin", pb.UnpinRequest, namespace, prefix_hashes, timeout_s)
        return per_key(replies, "unpinned", prefix_hashes)

    def stat(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> list[pb.PageStat]:
        """One PageStat per key; `present` is False for a miss."""
        replies = self._keyed("stat", pb.StatRequest, namespace, prefix_hashes, timeout_s)
        return per_key(replies, "pages", prefix_hashes)

    def list_pages(
        self, namespace: Namespace, key_prefix: bytes = b"", limit: int = 0, after: bytes = b""
    ) -> Iterator[pb.PageStat]:
        """Pages in the order of their prefix hashes, fetched piece by piece, those `after` one. `limit` 0: all."""
        request = pb.ListRequest(namespace=namespace.digest, key_prefix=key_prefix, page_token=after)
        count = 0
        while True:
            request.limit = limit - count if limit else 0
            reply = self._call("list", request, namespace, None)
            check_goes_on(request, reply)
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

        def run(link: Link, deadline: Deadline) -> int:
            reply = link.wire.call("flush", pb.FlushRequest(wait_ms=wait_ms(deadline)), deadline)
            return int(reply.pages_on_disk)

        return self._run(run, None, timeout_s)

    def scrub(self, cursor: bytes = b"", nbytes_max: int = 0, timeout_s: float | None = None) -> pb.ScrubReply:
        """Lets the node verify a stretch of its disk; go on with `next_cursor` until it is empty."""
        reply: pb.ScrubReply = self._call(
            "scrub", pb.ScrubRequest(cursor=cursor, nbytes_max=nbytes_max), None, timeout_s
        )
        return reply

    def recover(self, timeout_s: float = RECOVER_TIMEOUT_S) -> None:
        """Lets the node try its failed disk again. Raises Exhausted if it still fails, or hangs for 30 s."""
        self._call("recover", pb.RecoverRequest(), None, timeout_s)

    # ---- one call ------------------------------------------------------------------------

    def _keyed(
        self, op: str, message: Any, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None
    ) -> list[Any]:
        """Replies of a request per key, in as many batches as the node's limit asks for."""
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=op != "stat")
        return self._run(
            lambda link, deadline: keyed_replies(link, op, message, namespace, prefix_hashes, deadline),
            namespace,
            timeout_s,
        )

    def _call(self, op: str, request: Any, namespace: Namespace | None, timeout_s: float | None) -> Any:
        return self._run(lambda link, deadline: link.wire.call(op, request, deadline), namespace, timeout_s)

    def _run(
        self, call: Callable[[Link, Deadline], Result], namespace: Namespace | None, timeout_s: float | None
    ) -> Result:
        deadline = Deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        return self._node.run(call, namespace, deadline)
