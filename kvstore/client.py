"""Store and read pages: batched, thread-safe, every call under a deadline.

    Client -- routing: which nodes? -- channel: breaker, retry -- transport: shm, bulk, gRPC -- node

Page bytes move between the caller's buffers and the node's memory, or the socket, without another
copy. Index 0 of every batch is the head of a prefix chain. A miss, a page that does not match its
checksum, and a page that could not be stored are values; errors mean that no node could be called.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import not_
from typing import Any, TypeVar

from kvstore.admin import PREFIX_HASHES_MAX, Admin
from kvstore.buffers import Pieces, page_segments
from kvstore.cluster.calls import (
    GetOptions,
    GetResult,
    batch_pages_max,
    check_lengths,
    get_pages,
    leading,
    look_up,
    lookup_result,
    near_wait_ms,
    put_pages,
    put_request,
)
from kvstore.cluster.fan_out import Indices, select
from kvstore.cluster.routing import TRY_NEXT
from kvstore.config import ClientConfig, client_config
from kvstore.deadline import Deadline
from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    Unavailable,
)
from kvstore.keys import Namespace, check_prefix_hashes
from kvstore.layout import ByteRange
from kvstore.log_rate import LogRate
from kvstore.page_hmac import page_keys
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import ACK_ALL, KEEP_WHILE_SPACE, ClientStats, Keep, LookupResult, PutOutcome
from kvstore.security.secrets import tenant_of
from kvstore.steps import Steps, Stepwise
from kvstore.transports.channel import NodeConnection
from kvstore.transports.mapped_memory import AcquiredSlots, ReservedSlots
from kvstore.transports.shm import ShmWire

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Slots = TypeVar("Slots", ReservedSlots, AcquiredSlots)
Presence = Steps[list[int]]  # made once: it takes ten microseconds
# Outcomes after which the page is as safe as the put's options require
ACKNOWLEDGED = (PutOutcome.STORED, PutOutcome.EXISTS)


class Client(Admin):
    """A connection to the store.

    Make one per process and share it between threads.

    After a fork, calls in the child raise InvalidRequest. A signal handler may raise during a call:
    the client stays usable.
    """

    def __init__(self, config: ClientConfig | str | None = None) -> None:
        """Prepare a client; it connects at the first call.

        `config`: settings, or an address. What it does not give comes from the environment
        (`KVSTORE_*`). Raises ConfigError.
        """
        if not isinstance(config, ClientConfig):
            config = client_config(address=config)
        super().__init__(config)
        self._page_keys = page_keys(self.config)
        self._corruption_reports = CorruptionReports()

    @property
    def stats(self) -> ClientStats:
        """Return the client's counters of calls, failures and corrupt pages."""
        return ClientStats(
            *self._fan_out.nodes.counts,
            self._corruption_reports.corrupt_pages,
            self._corruption_reports.forged_pages,
        )

    @property
    def key_id(self) -> str:
        """Return the id of the key that this client signs pages with; empty without a key."""
        return self._page_keys.key_id if self._page_keys else ""

    @property
    def tenant(self) -> str:
        """Return the tenant for this client's `Namespace`s: the configured one, else the token's.

        Raises ConfigError if the token can not be read.
        """
        return tenant_of(self.config)

    @property
    def wire_name(self) -> str:
        """Return the transport in use: 'shm', 'bulk' or 'grpc'.

        It is 'none' before the first call and while no node is reachable, and 'mixed' if the
        members of a cluster are reached by several transports.
        """
        names = {channel.wire_name for channel in self._fan_out.nodes.all().values()} - {"none"}
        return "mixed" if len(names) > 1 else names.pop() if names else "none"

    @property
    def maps_arena(self) -> bool:
        """Return whether `open_put` and `open_get` work; known after a first call, such as `open`.

        They do not work while a near node fails; `put` and `get` do.
        """
        channel = self._fan_out.nodes.local_channel
        return channel is not None and channel.wire_name == ShmWire.name

    def close(self) -> None:
        """Close idle connections now, and those in use when their call ends."""
        self._fan_out.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- pages ---------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        touch: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """Return which of these pages are stored.

        `touch` counts as a use for eviction. A plain lookup does not, so polling can not keep dead
        pages alive.
        """

        @Stepwise
        def ask(
            indices: Indices, connection: NodeConnection, limit: Deadline, near: bool = False
        ) -> Presence:
            if near:
                connection.check_asks_others()
            hashes = select(prefix_hashes, indices)
            return (yield from look_up.steps(connection, namespace, hashes, touch, limit, near))

        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        deadline = self._deadline(timeout_s)
        present = self._fan_out.near(partial(ask, near=True), namespace, prefix_hashes, deadline)
        if present is None:
            present = self._fan_out.route(ask, namespace, prefix_hashes, deadline, not_, False)
        return lookup_result(present)

    def put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        pages: Sequence[Any],
        keep: Keep = KEEP_WHILE_SPACE,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store pages; return one outcome per key.

        Pages that exist are touched, not sent.

        `pages`: a buffer for each page, or a list or tuple of buffers that together hold exactly
        `layout.page_nbytes` bytes. Pass the whole chain, head first: the tail is evicted first.
        Raises Exhausted only if no page could be stored, and for a durable put whose pages are
        visible but not yet durable. Raises ConfigError for a namespace that is keyed with another
        key than this client's; so do gets.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        views = page_segments(pages, namespace.layout.page_nbytes)
        check_lengths(prefix_hashes, views)
        key = self._page_key(namespace)

        def ask(indices: Indices, connection: NodeConnection, limit: Deadline) -> list[PutOutcome]:
            connection.check_asks_others()
            try:
                return put_pages(connection, namespace, prefix_hashes, views, keep, limit, key)
            except InvalidRequest as error:
                if not keep.durable:
                    raise
                # Exhausted, because the other owners may still store them
                raise Exhausted(
                    f"the near node can not acknowledge these pages as durable: {error}"
                ) from error

        deadline = self._deadline(timeout_s)
        outcomes = self._fan_out.near(ask, namespace, prefix_hashes, deadline)
        if outcomes is None:
            return self._put_at_owners(namespace, prefix_hashes, views, keep, deadline)
        left = [
            index
            for index, outcome in enumerate(outcomes)
            if keep.needs_ack and outcome not in ACKNOWLEDGED
        ]
        if left:
            hashes, rest = select(prefix_hashes, left), select(views, left)
            asked = self._put_at_owners(namespace, hashes, rest, keep, deadline)
            for index, outcome in zip(left, asked, strict=True):
                outcomes[index] = outcome
        return outcomes

    def _put_at_owners(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        views: Sequence[Pieces],
        keep: Keep,
        deadline: Deadline,
    ) -> list[PutOutcome]:
        """Put pages at their owners, or at the only node.

        This is the path without a near node, or after the near node failed to give the
        acknowledgement.
        """
        key = self._page_key(namespace)
        # By key: the error of an owner that has no space or could not acknowledge.
        full: dict[int, Exhausted] = {}

        def ask(indices: Indices, connection: NodeConnection, limit: Deadline) -> list[PutOutcome]:
            try:
                if keep.ack == ACK_ALL and self._fan_out.nodes.view is not None:
                    connection.check_knows_members()
                hashes, pages = select(prefix_hashes, indices), select(views, indices)
                return put_pages(connection, namespace, hashes, pages, keep, limit, key)
            except Exhausted as error:
                if error.answered:
                    full.update(dict.fromkeys(indices, error))
                raise

        try:
            outcomes = self._fan_out.route(
                ask, namespace, prefix_hashes, deadline, _full, PutOutcome.AWAY
            )
        except (Unavailable, DeadlineExceeded):
            if full:  # more informative than an error of a node that did not answer
                raise next(iter(full.values())) from None
            raise
        refused = [index for index in full if not outcomes[index].kept]
        if refused and keep.needs_ack:
            raise full[refused[0]]
        for index in refused:
            outcomes[index] = PutOutcome.FULL
        return outcomes

    def get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        prefix: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read pages into the caller's buffers.

        Return True for each page that exists, is intact and, in a keyed namespace, has a valid
        HMAC.

        `buffers`: writable, for each page as in `put`. Buffers must not overlap. After a miss the
        buffer's content is undefined. No buffer is written after this call has returned or raised.
        `prefix` stops at the first miss.
        """
        whole = (ByteRange(0, namespace.layout.page_nbytes),)
        options = GetOptions(whole, prefix, key=self._page_key(namespace))
        return self._get(namespace, prefix_hashes, buffers, options, timeout_s)

    def get_ranges(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        ranges: Sequence[ByteRange],
        buffers: Sequence[Any],
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read parts of each page, as `get` does; for a layer, `ranges=layout.layer_ranges(layer)`.

        A page's buffers take the ranges one after the other. The node verifies the parts of the
        page that contain the ranges (`kvstore.checksum.cuts`) before it sends them. In a keyed
        namespace it sends all of these parts.
        """
        if not ranges:
            raise InvalidRequest("ranges is empty; use get for whole pages")
        options = GetOptions(tuple(ranges), False, key=self._page_key(namespace))
        return self._get(namespace, prefix_hashes, buffers, options, timeout_s)

    def _get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        options: GetOptions,
        timeout_s: float | None,
    ) -> list[bool]:
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        views = page_segments(buffers, options.nbytes, writable=True)
        check_lengths(prefix_hashes, views)

        deadline = self._deadline(timeout_s)
        view = self._fan_out.nodes.found(deadline)
        several = view is not None and (view.replicas > 1 or not view.settled)
        forged: set[bytes] = set()
        # A page that one member lacks may be at another: no single member knows where the prefix
        # ends.
        of_owners = replace(options, prefix=False) if several else options

        def ask(
            indices: Indices, connection: NodeConnection, limit: Deadline, asked: GetOptions
        ) -> list[bool]:
            if asked.near:
                connection.check_asks_others()
            hashes, into = select(prefix_hashes, indices), select(views, indices)
            found = get_pages(connection, namespace, hashes, into, asked, limit)
            forged.update(found.forged)
            self._corruption_reports.report(found, connection, namespace, limit)
            return found.hits

        ask_near = partial(ask, asked=replace(options, near=True))
        ask_owners = partial(ask, asked=of_owners)
        hits = self._fan_out.near(ask_near, namespace, prefix_hashes, deadline)
        if hits is None:
            hits = self._fan_out.route(ask_owners, namespace, prefix_hashes, deadline, not_, False)
        elif forged:  # one owner may have a forged copy, and another the real page
            left = [
                index
                for index, hit in enumerate(hits)
                if not hit and prefix_hashes[index] in forged
            ]

            def ask_again(
                indices: Indices, connection: NodeConnection, limit: Deadline
            ) -> list[bool]:
                return ask_owners(select(left, indices), connection, limit)

            with contextlib.suppress(*TRY_NEXT):
                hashes = select(prefix_hashes, left)
                again = self._fan_out.route(ask_again, namespace, hashes, deadline, not_, False)
                for index, hit in zip(left, again, strict=True):
                    hits[index] = hit
        length = leading(hits) if options.prefix else len(hits)
        return hits[:length] + [False] * (len(views) - length)

    def _page_key(self, namespace: Namespace) -> bytes | None:
        """Return the key that the namespace's pages are signed with; None for an unkeyed namespace.

        Raises ConfigError if the namespace was made with another key than this client's.
        """
        if not namespace.key_id:
            return None
        if self._page_keys is None or self._page_keys.key_id != namespace.key_id:
            own = f"has {self.key_id}" if self._page_keys else "has none"
            raise ConfigError(
                f"namespace {namespace.digest.hex()[:12]} is keyed: its pages are signed "
                f"with the key {namespace.key_id}, and this client {own}; set "
                "page_key_file (KVSTORE_PAGE_KEY_FILE) to the file with that key"
            )
        return self._page_keys.key_for(namespace.digest)

    # ---- pages in place ------------------------------------------------------------------

    def open_put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        keep: Keep = KEEP_WHILE_SPACE,
        timeout_s: float | None = None,
    ) -> contextlib.AbstractContextManager[ReservedSlots]:
        """Reserve slots in the node's own memory: `with client.open_put(...) as slots`.

        Write pages there, then call `slots.commit(leaves)`. Leaving without a commit stores
        nothing.

        At most `batch_pages_max` keys. Raises InvalidRequest unless `maps_arena`. A context has its
        own connection; `timeout_s` covers everything up to the commit. A near node that does not
        answer uses up to half of it. Raises InvalidRequest for a keyed namespace too: another
        process that maps the node's memory could change a page between its check and its use, or
        before its HMAC is made.
        """
        until = self._deadline(timeout_s)

        def enter(
            wire: ShmWire, deadline: Deadline
        ) -> contextlib.AbstractContextManager[ReservedSlots]:
            return wire.reserving(
                put_request(namespace, prefix_hashes, keep, deadline), deadline, until
            )

        return self._in_place(enter, namespace, until)

    def open_get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        prefix: bool = False,
        timeout_s: float | None = None,
    ) -> contextlib.AbstractContextManager[AcquiredSlots]:
        """Acquire pages in the node's own memory: `with client.open_get(...) as slots`.

        They keep their bytes and their slots until the context is left.

        The caller compares the bytes with `slots.checksums`, and calls `verify` for a page that
        does not match. Otherwise as `open_put`.
        """

        def enter(
            wire: ShmWire, deadline: Deadline
        ) -> contextlib.AbstractContextManager[AcquiredSlots]:
            request = pb.GetRequest(
                namespace=namespace.digest, prefix_hashes=prefix_hashes, prefix_only=prefix
            )
            if self._fan_out.nodes.view is not None:
                request.near, request.wait_ms = True, near_wait_ms(deadline)
            return wire.acquiring(request, namespace.stored_nbytes, deadline)

        return self._in_place(enter, namespace, self._deadline(timeout_s))

    def batch_pages_max(self, namespace: Namespace, timeout_s: float | None = None) -> int:
        """Return how many pages of this namespace one `open_put` or `open_get` may ask for."""
        nbytes = namespace.stored_nbytes
        near = self._fan_out.nodes.local_channel
        if near is not None and (limits := near.limits) is not None:
            return batch_pages_max(nbytes, limits)
        deadline = self._deadline(timeout_s)
        return self._fan_out.in_place(
            lambda connection, _: batch_pages_max(nbytes, connection.limits),
            namespace,
            deadline,
            "batch_pages_max",
        )

    @contextlib.contextmanager
    def _in_place(
        self,
        enter: Callable[[ShmWire, Deadline], contextlib.AbstractContextManager[Slots]],
        namespace: Namespace,
        deadline: Deadline,
    ) -> Iterator[Slots]:
        if namespace.key_id:
            raise InvalidRequest(
                "pages of a keyed namespace are signed and verified in private memory: use "
                "put and get"
            )

        def run(
            connection: NodeConnection, deadline: Deadline
        ) -> tuple[contextlib.AbstractContextManager[Slots], Slots]:
            if not isinstance(connection.wire, ShmWire):
                raise InvalidRequest(
                    f"the {connection.wire.name} wire maps no memory of the node; use put and get"
                )
            context = enter(connection.wire, deadline)
            return context, context.__enter__()

        # No ExitStack: after two interrupts it would keep the connection. The traceback of an
        # interrupt inside its `__exit__` and that frame refer to each other until the next garbage
        # collection.
        context, slots = self._fan_out.in_place(run, namespace, deadline, "a page in place")
        try:
            yield slots
        except BaseException:
            if not context.__exit__(*sys.exc_info()):
                raise
        else:
            context.__exit__(None, None, None)


class CorruptionReports:
    """Count, log and report the corrupt pages that nodes sent to one client.

    The node can drop or repair them. Whatever it answers to a report, the read was a miss.
    """

    def __init__(self) -> None:
        self.corrupt_pages = 0
        self.forged_pages = 0

    def report(
        self, found: GetResult, connection: NodeConnection, namespace: Namespace, deadline: Deadline
    ) -> None:
        """Report the bad pages of a result.

        The node verifies its copies of corrupt pages and drops bad ones. It removes forged pages,
        which would otherwise block the real ones: their maker does not have the key that the
        namespace names.
        """
        named = namespace.digest.hex()
        if corrupt := found.corrupt:
            self.corrupt_pages += len(corrupt)
            log.error(
                "%d pages of namespace %s did not match their checksum: misses",
                len(corrupt),
                named,
            )
            _report(connection, "verify", pb.VerifyRequest, namespace, corrupt, deadline)
        if forged := found.forged:
            self.forged_pages += len(forged)
            log.error(
                "%d pages of namespace %s were made or changed without its key; treated as misses",
                len(forged),
                named,
            )
            _report(connection, "remove", pb.RemoveRequest, namespace, forged, deadline)


def _report(
    connection: NodeConnection,
    op: str,
    message: Any,
    namespace: Namespace,
    prefix_hashes: list[bytes],
    deadline: Deadline,
) -> None:
    request = message(namespace=namespace.digest, prefix_hashes=list(dict.fromkeys(prefix_hashes)))
    try:
        connection.wire.call(op, request, deadline)
    except KVStoreError as error:
        log.warning("%s of corrupt or forged pages at the node failed: %s", op, error)


def _full(outcome: PutOutcome) -> bool:
    return outcome is PutOutcome.FULL
