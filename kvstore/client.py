"""The client: batched, thread-safe, every call under a deadline.

    Client --- cluster: which nodes? --- breaker: worth trying? --- wire: shared memory, bulk TCP or gRPC --- node

Page bytes move between the caller's buffers and the node's memory, or the socket, without a copy in between.
Index 0 of every batch is the head of a prefix chain. A miss, a page that does not match its
checksum, and a page that could not be stored are values; errors mean the node could not be asked.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from operator import not_
from typing import Any, TypeVar

from kvstore.batches import (
    batch_pages_max,
    check_lengths,
    leading,
    look_up,
    put_request,
)
from kvstore.buffers import byte_views
from kvstore.calls import Wanted, get_pages, put_pages
from kvstore.cluster.fan_out import Places, chosen
from kvstore.config import ClientConfig, client_config
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError
from kvstore.keys import Namespace, check_prefix_hashes
from kvstore.layout import ByteRange
from kvstore.link import Link
from kvstore.log_rate import LogRate
from kvstore.management import PREFIX_HASHES_MAX, Management
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import KEEP_WHILE_SPACE, ClientStats, Keep, LookupResult
from kvstore.results import PutOutcome as PutOutcome
from kvstore.wires.mapped_slots import AcquiredSlots, ReservedSlots
from kvstore.wires.shm import ShmWire

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")
Slots = TypeVar("Slots", ReservedSlots, AcquiredSlots)


class Client(Management):
    """A connection to the store. Make one per process and share it between threads."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        super().__init__(config or client_config())
        self._corrupt_pages = 0

    @property
    def stats(self) -> ClientStats:
        return ClientStats(*self._fan_out.nodes.counts, self._corrupt_pages)

    @property
    def wire_name(self) -> str:
        """'shm', 'bulk' or 'grpc'; 'none' before the first call and while no node is reachable; 'mixed' where the
        members of a cluster are reached by several."""
        names = {link.wire_name for link in self._fan_out.nodes.all().values()} - {"none"}
        return "mixed" if len(names) > 1 else names.pop() if names else "none"

    @property
    def maps_arena(self) -> bool:
        """Whether `open_put` and `open_get` work; after the first call, such as `open`."""
        return self._fan_out.nodes.view is None and self._fan_out.nodes.only.wire_name == ShmWire.name

    def close(self) -> None:
        """Closes idle connections now and those in use when their call ends."""
        self._fan_out.close()

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

        def ask(link: Link, deadline: Deadline, places: Places) -> list[bool]:
            return look_up(link, namespace, chosen(prefix_hashes, places), touch, deadline)

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        present = self._fan_out.per_key(ask, namespace, prefix_hashes, not_, False, self._deadline(timeout_s))
        return LookupResult(leading(present), tuple(present))

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

        full: set[int] = set()  # places of keys whose owner answered that it is

        def ask(link: Link, deadline: Deadline, places: Places) -> list[PutOutcome]:
            try:
                return put_pages(link, namespace, chosen(prefix_hashes, places), chosen(views, places), keep, deadline)
            except Exhausted as error:
                full.update(places if error.answered else ())
                raise

        deadline = self._deadline(timeout_s)
        outcomes = self._fan_out.per_key(ask, namespace, prefix_hashes, _never, PutOutcome.AWAY, deadline)
        return [
            PutOutcome.FULL if outcome is PutOutcome.AWAY and place in full else outcome
            for place, outcome in enumerate(outcomes)
        ]

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
        return self._get(namespace, prefix_hashes, buffers, Wanted(whole, prefix), timeout_s)

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
        return self._get(namespace, prefix_hashes, buffers, Wanted(tuple(ranges), False), timeout_s)

    def _get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        wanted: Wanted,
        timeout_s: float | None,
    ) -> list[bool]:
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        views = byte_views(buffers, wanted.nbytes, writable=True)
        check_lengths(prefix_hashes, views)

        def ask(link: Link, deadline: Deadline, places: Places) -> list[bool]:
            hashes = chosen(prefix_hashes, places)
            hits, corrupt = get_pages(link, namespace, hashes, chosen(views, places), wanted, deadline)
            if corrupt:
                self._report_corrupt(link, namespace, corrupt, deadline)
            return hits

        hits = self._fan_out.per_key(ask, namespace, prefix_hashes, not_, False, self._deadline(timeout_s))
        length = leading(hits) if wanted.prefix else len(hits)
        return hits[:length] + [False] * (len(views) - length)

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
        return self._one("batch_pages_max", lambda link, _: batch_pages_max(nbytes, link.limits), namespace, timeout_s)

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

        slots, stack = self._one("a page in place", run, namespace, timeout_s)
        with stack:
            yield slots


def _never(_: object) -> bool:
    return False
