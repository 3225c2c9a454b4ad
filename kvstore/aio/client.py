"""The asyncio client: bulk TCP on the event loop, everything else on a few threads.

    await client.get --> a single node by bulk TCP without TLS: sockets of the event loop
                     --> otherwise: the synchronous client on a thread

Routing, retries, the circuit breaker, batches and the protocol are those of `kvstore.Client`,
whose internal methods this file calls.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future as AnyFuture
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import kvstore
from kvstore.admin import FORGET_TIMEOUT_S, PREFIX_HASHES_MAX, RECOVER_TIMEOUT_S
from kvstore.aio.connections import AsyncBulkWire
from kvstore.aio.feed_reader import FeedReader
from kvstore.buffers import Pieces, page_segments
from kvstore.cluster.calls import (
    GetOptions,
    GetResult,
    check_lengths,
    get_pages,
    look_up,
    lookup_result,
    put_pages,
)
from kvstore.cluster.routing import Away
from kvstore.cluster.view import View
from kvstore.config import ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import Namespace, check_prefix_hashes
from kvstore.layout import ByteRange
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import (
    KEEP_WHILE_SPACE,
    ClientStats,
    Keep,
    LookupResult,
    PutOutcome,
    VerifyResult,
)
from kvstore.results.hints import Hint, HintResult
from kvstore.steps import run_async
from kvstore.threads import ThreadPool
from kvstore.tracing import carried
from kvstore.transports.bulk import BulkWire
from kvstore.transports.channel import ConnectionLease, NodeChannel, NodeConnection
from kvstore.transports.frames import FrameSocket

if TYPE_CHECKING:
    from kvstore.results.replies import (
        DrainProgress,
        Events,
        FeedEvent,
        ForgetResult,
        NamespaceInfo,
        NodeStatus,
        PageStat,
        PushedIdentities,
        QueryResult,
        Recorded,
        ScrubResult,
        SweepResult,
    )

Params = ParamSpec("Params")
Result = TypeVar("Result")
LIST_AT_ONCE = 256  # pages of a list that one visit to a thread fetches


class NativeConnection(NamedTuple):
    """A node for the calls of `kvstore.cluster.calls`, with coroutines."""

    wire: AsyncBulkWire
    limits: pb.Limits


class Client:
    """A connection to the store for asyncio, with the methods of `kvstore.Client`.

    Make one per process, and use it in one event loop at a time: `async with Client() as client`.

    Gets, puts and lookups of a single node over bulk TCP without TLS use the event loop's own
    sockets. Clusters, shared memory, gRPC, TLS, very large batches and all other calls use at most
    `connections_max` threads.

    A call that is cancelled does not touch its buffers any more after it has raised. On the event
    loop it ends at once, and its connection is closed. On a thread it ends when the synchronous
    call ends, by its deadline at the latest; a call that waits for a thread ends at once. A page of
    a cancelled `put` may be stored or not.
    """

    def __init__(self, config: ClientConfig | str | None = None) -> None:
        """Prepare a client; see `kvstore.Client`. Raises ConfigError."""
        self.sync = kvstore.Client(config)
        self._threads = ThreadPool(self.config.connections_max, "kvstore-aio")
        self._native: AsyncBulkWire | None = None

    @property
    def config(self) -> ClientConfig:
        """Return the client's configuration."""
        return self.sync.config

    @property
    def stats(self) -> ClientStats:
        """Return the client's counters of calls, failures and corrupt pages."""
        return self.sync.stats

    @property
    def key_id(self) -> str:
        """Return the id of the key that this client signs pages with; empty without a key."""
        return self.sync.key_id

    @property
    def tenant(self) -> str:
        """Return the tenant for this client's `Namespace`s; see `kvstore.Client.tenant`."""
        return self.sync.tenant

    @property
    def wire_name(self) -> str:
        """Return the transport in use: 'shm', 'bulk', 'grpc', 'none' or 'mixed'."""
        return self.sync.wire_name

    async def close(self) -> None:
        """Close idle connections now, and those in use when their call ends."""
        if self._native is not None:
            self._native.close()
        self.sync.close()
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- pages ---------------------------------------------------------------------------

    async def lookup(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        touch: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """Return which of these pages are stored; see `kvstore.Client.lookup`."""
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        deadline = self._deadline(timeout_s)
        channel = await self._single_node(deadline)
        if channel is None:
            return await self._thread(deadline, self.sync.lookup, namespace, prefix_hashes, touch)

        async def ask(connection: NodeConnection) -> list[int]:
            steps = look_up.steps(connection, namespace, prefix_hashes, touch, deadline)
            return await run_async(steps)

        present = await self._run(channel, ask, namespace, deadline)
        return lookup_result(present)

    async def put(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        pages: Sequence[Any],
        keep: Keep = KEEP_WHILE_SPACE,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store pages; return one outcome per key; see `kvstore.Client.put`.

        Do not change the pages until the call has returned or raised.
        """
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=True)
        views = page_segments(pages, namespace.layout.page_nbytes)
        check_lengths(prefix_hashes, views)
        key = self.sync._page_key(namespace)
        deadline = self._deadline(timeout_s)
        channel = await self._single_node(deadline, views)
        if channel is None:
            return await self._thread(
                deadline, self.sync.put, namespace, prefix_hashes, pages, keep
            )

        async def ask(connection: NodeConnection) -> list[PutOutcome]:
            steps = put_pages.steps(
                connection, namespace, prefix_hashes, views, keep, deadline, key
            )
            return await run_async(steps)

        outcomes: list[PutOutcome] = await self._run(channel, ask, namespace, deadline)
        return outcomes

    async def get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        prefix: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read pages into the caller's buffers; see `kvstore.Client.get`."""
        whole = (ByteRange(0, namespace.layout.page_nbytes),)
        options = GetOptions(whole, prefix, key=self.sync._page_key(namespace))
        call = partial(self.sync.get, namespace, prefix_hashes, buffers, prefix)
        return await self._get(namespace, prefix_hashes, buffers, options, timeout_s, call)

    async def get_ranges(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        ranges: Sequence[ByteRange],
        buffers: Sequence[Any],
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read parts of each page; see `kvstore.Client.get_ranges`."""
        if not ranges:
            raise InvalidRequest("ranges is empty; use get for whole pages")
        options = GetOptions(tuple(ranges), False, key=self.sync._page_key(namespace))
        call = partial(self.sync.get_ranges, namespace, prefix_hashes, ranges, buffers)
        return await self._get(namespace, prefix_hashes, buffers, options, timeout_s, call)

    async def _get(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        buffers: Sequence[Any],
        options: GetOptions,
        timeout_s: float | None,
        call: Callable[..., list[bool]],
    ) -> list[bool]:
        check_prefix_hashes(prefix_hashes, PREFIX_HASHES_MAX, distinct=False)
        views = page_segments(buffers, options.nbytes, writable=True)
        check_lengths(prefix_hashes, views)
        deadline = self._deadline(timeout_s)
        channel = await self._single_node(deadline, views)
        if channel is None:
            return await self._thread(deadline, call)

        async def ask(connection: NodeConnection) -> GetResult:
            steps = get_pages.steps(connection, namespace, prefix_hashes, views, options, deadline)
            return await run_async(steps)

        found: GetResult = await self._run(channel, ask, namespace, deadline)
        if found.corrupt or found.forged:
            await self._in_thread(
                channel.run,
                lambda connection, limit: self.sync._corruption_reports.report(
                    found, connection, namespace, limit
                ),
                namespace,
                deadline,
            )
        return found.hits

    # ---- administration ------------------------------------------------------------------

    async def open(self, namespace: Namespace, timeout_s: float | None = None) -> None:
        """Register the namespace now; see `kvstore.Client.open`."""
        await self._thread(self._deadline(timeout_s), self.sync.open, namespace)

    async def verify(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> VerifyResult:
        """Make nodes verify their copies of these pages and drop corrupt ones."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.verify, namespace, prefix_hashes, away=away
        )

    async def remove(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> list[bool]:
        """Remove pages, pinned ones too; return True for each that existed."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.remove, namespace, prefix_hashes, away=away
        )

    async def pin(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        ttl_s: float,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Protect pages from eviction for `ttl_s` seconds; return True for each page."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.pin, namespace, prefix_hashes, ttl_s
        )

    async def unpin(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        timeout_s: float | None = None,
        away: Away | None = None,
    ) -> list[bool]:
        """Unpin all copies of pages; return True for each page that was pinned."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.unpin, namespace, prefix_hashes, away=away
        )

    async def hint(
        self,
        namespace: Namespace,
        prefix_hashes: Sequence[bytes],
        hint: Hint,
        timeout_s: float | None = None,
    ) -> HintResult:
        """Tell the store what is known of pages' future; return what became of it."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.hint, namespace, prefix_hashes, hint
        )

    async def stat(
        self, namespace: Namespace, prefix_hashes: Sequence[bytes], timeout_s: float | None = None
    ) -> "list[PageStat]":
        """Return one PageStat per key; `present` is False for a miss."""
        return await self._thread(
            self._deadline(timeout_s), self.sync.stat, namespace, prefix_hashes
        )

    async def namespaces(
        self, timeout_s: float | None = None
    ) -> "list[tuple[Namespace, NamespaceInfo]]":
        """Return all namespaces and their counters, summed over the members that answer."""
        return await self._thread(self._deadline(timeout_s), self.sync.namespaces)

    async def view(self, timeout_s: float | None = None) -> View | None:
        """Return the newest view of the cluster; None for a node without a cluster."""
        return await self._thread(self._deadline(timeout_s), self.sync.view)

    async def node_status(self, timeout_s: float | None = None) -> "NodeStatus":
        """Return the node's own status: state, memory, namespaces, counters, limits."""
        return await self._thread(self._deadline(timeout_s), self.sync.node_status)

    async def statuses(
        self, timeout_s: float | None = None
    ) -> "dict[str, NodeStatus | KVStoreError]":
        """Return each node's own status, or the error of the call, by address."""
        return await self._thread(self._deadline(timeout_s), self.sync.statuses)

    async def events(
        self, since_unix_ms: int = 0, limit: int = 0, timeout_s: float | None = None
    ) -> "dict[str, Events | KVStoreError]":
        """Return the newest events that each node keeps, or the error of the call, by address."""
        return await self._thread(self._deadline(timeout_s), self.sync.events, since_unix_ms, limit)

    async def remove_namespace(self, namespace: Namespace, timeout_s: float | None = None) -> int:
        """Remove a namespace and all its pages; return how many entries were removed."""
        return await self._thread(self._deadline(timeout_s), self.sync.remove_namespace, namespace)

    async def flush(self, timeout_s: float | None = None, away: Away | None = None) -> int:
        """Wait until all visible pages survive power loss; return the pages on disk."""
        return await self._thread(self._deadline(timeout_s), self.sync.flush, away=away)

    async def scrub(
        self, cursor: bytes = b"", nbytes_max: int = 0, timeout_s: float | None = None
    ) -> "ScrubResult":
        """Make the node verify a part of its disk; continue with `next_cursor`."""
        return await self._thread(self._deadline(timeout_s), self.sync.scrub, cursor, nbytes_max)

    async def drain(self, end: bool = False, timeout_s: float | None = None) -> "DrainProgress":
        """Drain the named member, or cancel that; return the progress."""
        return await self._thread(self._deadline(timeout_s), self.sync.drain, end)

    async def sweep(self, dry: bool = False, timeout_s: float | None = None) -> "SweepResult":
        """Make the named member fetch owned pages that it lacks; `dry` only counts them."""
        return await self._thread(self._deadline(timeout_s), self.sync.sweep, dry)

    async def forget_member(self, member: str, timeout_s: float | None = None) -> None:
        """Stop reporting a lost member, which will not return."""
        await self._thread(self._deadline(timeout_s), self.sync.forget_member, member)

    async def record(
        self,
        seconds: float = 0.0,
        recording: bytes = b"",
        end: bool = False,
        timeout_s: float | None = None,
    ) -> "Recorded":
        """Record the node's requests for some seconds, or fetch the newly recorded ones."""
        deadline = self._deadline(timeout_s)
        return await self._thread(deadline, self.sync.record, seconds, recording, end)

    async def push_identities(
        self,
        content: bytes,
        force: bool = False,
        check: bool = False,
        timeout_s: float | None = None,
    ) -> "PushedIdentities":
        """Replace the identities file of the named member; `check` only validates the content."""
        deadline = self._deadline(timeout_s)
        return await self._thread(deadline, self.sync.push_identities, content, force, check)

    async def query(
        self,
        model: str,
        prefix_hashes: Sequence[bytes],
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> "list[QueryResult]":
        """Return how many leading blocks of a prompt are stored; see `kvstore.Client.query`."""
        deadline = self._deadline(timeout_s)
        return await self._thread(deadline, self.sync.query, model, prefix_hashes, tenant)

    async def forget(
        self, tenant: str, timeout_s: float = FORGET_TIMEOUT_S, away: Away | None = None
    ) -> "ForgetResult":
        """Erase everything that a tenant stores; see `kvstore.Client.forget`."""
        return await self._thread(self._deadline(timeout_s), self.sync.forget, tenant, away=away)

    async def recover(self, timeout_s: float = RECOVER_TIMEOUT_S) -> None:
        """Make the node use its failed disk again."""
        await self._thread(self._deadline(timeout_s), self.sync.recover)

    async def list_pages(
        self, namespace: Namespace, key_prefix: bytes = b"", limit: int = 0, after: bytes = b""
    ) -> "AsyncIterator[PageStat]":
        """Yield a namespace's pages, ordered by prefix hash; see `kvstore.Client.list_pages`."""
        pages = self.sync.list_pages(namespace, key_prefix, limit, after)
        while some := await self._in_thread(lambda: list(islice(pages, LIST_AT_ONCE))):
            for page in some:
                yield page

    async def feed(
        self, model: str = "", idle_s: float = 5.0, timeout_s: float | None = None
    ) -> "AsyncIterator[FeedEvent]":
        """Yield which blocks are stored, and then all changes, without end.

        See `kvstore.Client.feed`. Each feed has a thread of its own. A cancelled or closed one ends
        at once; its thread ends after the running call, within `idle_s` and a call's time.
        """
        reader = FeedReader(self.sync.feed(model, idle_s, timeout_s))
        try:
            while True:
                yield await asyncio.wrap_future(reader.read())
        finally:
            reader.close()

    # ---- one call ------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return self.sync._deadline(timeout_s)

    async def _single_node(
        self, deadline: Deadline, pages: Sequence[Pieces] = ()
    ) -> NodeChannel | None:
        """Return the channel to a node that the event loop's sockets reach; None for threads.

        The first call connects, on a thread.
        """
        channel = self.sync._single_node()
        if channel is None or channel.connection is None:
            channel = await self._in_thread(self.sync._single_node, deadline)
        connection = channel.connection if channel else None
        if connection is None or not isinstance(connection.wire, BulkWire):
            return None
        native = connection.wire.is_plain and (not pages or connection.wire.single_stream(pages))
        return channel if native else None

    async def _run(
        self,
        channel: NodeChannel,
        ask: Callable[[NodeConnection], Any],
        namespace: Namespace,
        deadline: Deadline,
    ) -> Any:
        """Run a call on the event loop, under the channel's breaker and with its retry."""

        async def connect(limit: Deadline) -> ConnectionLease:
            lease = channel.lease_now()
            if lease is None:
                lease = await self._in_thread(channel.connect, limit)
            return lease

        async def work(connection: NodeConnection, limit: Deadline) -> Any:
            native = NativeConnection(self._wire(connection), connection.limits)
            return await ask(cast(NodeConnection, native))  # the steps use no more of it

        async def opened(connection: NodeConnection, space: Namespace, limit: Deadline) -> None:
            await self._in_thread(connection.open, space, limit)

        return await run_async(channel.steps(connect, opened, work, namespace, deadline))

    def _wire(self, connection: NodeConnection) -> AsyncBulkWire:
        """Return the event loop's wire beside the channel's own, which is made with it."""
        wire = connection.wire
        if not isinstance(wire, BulkWire):  # the channel has found a better one meanwhile
            raise Unavailable("the connection changed during the call; try again")
        native, loop = self._native, asyncio.get_running_loop()
        if native is None or native.wire is not wire or not native.serves(loop):
            if native is not None:
                native.close()

            async def connect(deadline: Deadline) -> FrameSocket:
                frames: FrameSocket = await self._in_thread(
                    wire.separate, deadline, lost=FrameSocket.close
                )
                return frames

            self._native = native = AsyncBulkWire(wire, connect, self.config.connections_max)
            native.serves(loop)
        return native

    async def _thread(
        self, deadline: Deadline, call: Callable[..., Result], *args: Any, **named: Any
    ) -> Result:
        """Run a call of the synchronous client on a thread, with the time left for it."""

        def run() -> Result:
            return call(*args, timeout_s=deadline.remaining(), **named)

        return await self._in_thread(run)

    async def _in_thread(
        self,
        call: Callable[..., Result],
        *args: Any,
        lost: Callable[[Result], object] | None = None,
    ) -> Result:
        """Run a function on a thread; if this is cancelled, raise when the function has ended.

        It may use the caller's buffers until then. `lost` receives the result of such a function.
        """
        try:
            done = self._threads.submit(carried(partial(call, *args)))
        except RuntimeError as error:
            raise Unavailable(f"no thread for this call: {error}") from error
        waiting = asyncio.wrap_future(done)
        cancelled = None
        while True:
            try:
                result = await asyncio.shield(waiting)
                break
            except asyncio.CancelledError as error:
                cancelled = error
                if done.cancel():
                    raise
            except BaseException:
                if lost is not None:  # the coroutine may be closed, as that of a closed event loop
                    done.add_done_callback(partial(_lose, lost))
                if cancelled is not None:
                    raise cancelled from None
                raise
        if cancelled is not None:
            if lost is not None:
                lost(result)
            raise cancelled
        return result


def _lose(lost: Callable[[Result], object], done: "AnyFuture[Result]") -> None:
    if not done.cancelled() and done.exception() is None:
        lost(done.result())
