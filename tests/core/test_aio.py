"""The asyncio client: the sync client's answers, under concurrency, deadlines and cancellation."""

import asyncio
import gc
import inspect
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, cast

import pytest
from known_pages import Pages
from waiting import PATIENT, wait_until

import kvstore
from kvstore import (
    ByteRange,
    ClientConfig,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    Keep,
    PutOutcome,
    Unauthenticated,
    Unavailable,
)
from kvstore.aio import Client
from kvstore.aio.connections import AsyncBulkWire, AsyncConnection
from kvstore.deadline import Deadline
from kvstore.results import FeedEvent
from kvstore.tools.node_process import NodeProcess

PAGE_NBYTES = 192 << 10  # more than a socket's buffers hold, so that gets are cut in mid-page
SYNC_ONLY = {"open_put", "open_get", "batch_pages_max", "maps_arena"}  # the node's own memory


def run(node: NodeProcess, body: Callable[[Client], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with Client(ClientConfig(node.address, **{"wire": "bulk", **settings})) as client:
            return await body(client)

    return asyncio.run(main())


def test_aio_client_has_the_methods_and_arguments_of_the_sync_client() -> None:
    for name, method in inspect.getmembers(kvstore.Client):
        if name.startswith("_") or name in SYNC_ONLY or not callable(method):
            continue
        other = getattr(Client, name)
        assert list(inspect.signature(other).parameters.items()) == list(
            inspect.signature(method).parameters.items()
        ), name


@pytest.mark.parametrize("wire", ["bulk", "auto", "grpc"])
def test_pages_put_by_aio_are_got_by_the_sync_client_and_back(
    shared_node: NodeProcess, wire: str
) -> None:
    chain = Pages(f"aio-{wire}", page_nbytes=PAGE_NBYTES)
    keys = chain.keys(*range(6))

    async def body(client: Client) -> None:
        pages = [chain.content(key) for key in keys]
        assert await client.put(chain.namespace, keys[:4], pages[:4]) == [PutOutcome.STORED] * 4
        assert await client.put(chain.namespace, keys[3:5], pages[3:5]) == [
            PutOutcome.EXISTS,
            PutOutcome.STORED,
        ]
        assert (await client.lookup(chain.namespace, keys)).prefix_pages == 5
        buffers = [bytearray(PAGE_NBYTES) for _ in keys]
        assert await client.get(chain.namespace, keys, buffers) == [True] * 5 + [False]
        assert buffers[:5] == pages[:5]
        part = bytearray(100)
        ranges = [ByteRange(7, 60), ByteRange(70_000, 40)]
        assert await client.get_ranges(chain.namespace, keys[2:3], ranges, [part]) == [True]
        assert bytes(part) == pages[2][7:67] + pages[2][70_000:70_040]
        listed = [page.prefix_hash async for page in client.list_pages(chain.namespace)]
        assert listed == sorted(keys[:5])
        assert (await client.stat(chain.namespace, keys[:1]))[0].present
        assert await client.get(chain.namespace, keys[::-1], buffers, prefix=True) == [False] * 6
        assert await client.remove(chain.namespace, keys[4:]) == [True, False]
        (last,) = chain.keys(9)
        await client.put(chain.namespace, [last], pages[:1], Keep(ttl_s=600.0))
        assert (await client.stat(chain.namespace, [last]))[0].ttl_ms > 0
        with pytest.raises(InvalidRequest):
            await client.put(chain.namespace, [last] * 2, pages[:2])
        assert (await client.node_status()).state == "SERVING"
        assert client.wire_name == (wire if wire != "auto" else "shm")

    run(shared_node, body, wire=wire)
    with kvstore.Client(shared_node.address) as client:
        assert chain.get(client, keys) == [True] * 4 + [False] * 2


def test_many_concurrent_calls_share_few_connections(shared_node: NodeProcess) -> None:
    chain = Pages("aio-many", page_nbytes=4096)
    keys = chain.keys(*range(64))

    async def body(client: Client) -> None:
        await client.put(chain.namespace, keys, [chain.content(key) for key in keys])
        before = (await client.node_status()).session_count

        async def one(key: bytes) -> bool:
            buffer = bytearray(4096)
            (hit,) = await client.get(chain.namespace, [key], [buffer])
            return hit and bytes(buffer) == chain.content(key)

        assert all(await asyncio.gather(*map(one, keys * 4)))
        assert (await client.node_status()).session_count - before <= 2
        assert client._native is not None
        assert client._native._count <= 3

    run(shared_node, body, connections_max=3)


def test_cancelled_calls_leave_buffers_and_connections_alone(shared_node: NodeProcess) -> None:
    """Random cancellations: no later call reads another's bytes, no buffer changes afterwards.

    Each buffer of a cancelled get is filled with a mark at once, and must keep it.
    """
    chain = Pages("aio-storm", page_nbytes=PAGE_NBYTES)
    keys = chain.keys(*range(8))
    contents = [chain.content(key) for key in keys]
    rng = random.Random(7)
    ends = {"hit": 0, "cancelled": 0}

    async def read(client: Client) -> None:
        some = rng.sample(range(8), 3)
        buffers = [bytearray(PAGE_NBYTES) for _ in some]
        get = client.get(chain.namespace, [keys[i] for i in some], buffers)
        task = asyncio.ensure_future(get)
        if rng.random() < 0.6:
            await asyncio.sleep(rng.random() * 0.004)
            task.cancel()
        try:
            hits = await task
        except asyncio.CancelledError:
            ends["cancelled"] += 1
            marks = [b"M" * PAGE_NBYTES] * 3
            for buffer, mark in zip(buffers, marks, strict=True):
                buffer[:] = mark
            await asyncio.sleep(0.01)
            assert buffers == marks, "a cancelled get wrote into its buffer"
            return
        ends["hit"] += 1
        assert hits == [True] * 3
        assert buffers == [contents[i] for i in some], "a get returned other bytes"

    async def write(client: Client, number: int) -> None:
        (key,) = chain.keys(100 + number)
        put = client.put(chain.namespace, [key], [chain.content(key)])
        task = asyncio.ensure_future(put)
        await asyncio.sleep(rng.random() * 0.002)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        buffer = bytearray(PAGE_NBYTES)
        (hit,) = await client.get(chain.namespace, [key], [buffer])
        assert not hit or bytes(buffer) == chain.content(key), "a cancelled put stored other bytes"

    async def body(client: Client) -> None:
        await client.put(chain.namespace, keys, contents)
        for start in range(0, 120, 12):
            calls: list[Awaitable[None]] = [read(client) for _ in range(12)]
            calls += [write(client, start + i) for i in range(4)]
            await asyncio.gather(*calls)

    for wire in ("bulk", "grpc"):
        run(shared_node, body, connections_max=4, wire=wire, timeout_s=20.0)
    assert ends["cancelled"] > 20, ends
    assert ends["hit"] > 20, ends
    with kvstore.Client(shared_node.address) as client:
        assert client.node_status().ram.writing_count == 0, "a cancelled put keeps its slots"
        assert client.stats.corrupt_pages == 0


@pytest.mark.parametrize("call", ["get", "put"])
def test_call_cancelled_at_any_wait_closes_its_connection(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Cancel a call at its first wait, its second, and so on, until it ends before the wait."""
    chain = Pages(f"aio-waits-{call}", page_nbytes=2 << 20)
    keys = chain.keys(*range(1, 200))
    monkeypatch.setattr("kvstore.aio.connections.TURN_NBYTES", 32 << 10)
    left = -1
    wait, moved = AsyncConnection._ready, AsyncConnection._moved

    def count() -> None:
        nonlocal left
        left -= 1
        task = asyncio.current_task()
        if left == 0 and task is not None:
            task.cancel()

    async def counted_wait(self: AsyncConnection, doing: str) -> None:
        count()
        await wait(self, doing)

    async def counted_move(self: AsyncConnection, nbytes: int) -> None:
        if self._unyielded + nbytes >= 32 << 10:
            count()
        await moved(self, nbytes)

    async def body(client: Client) -> int:
        nonlocal left
        for number, key in enumerate(keys, 1):
            content, buffer = chain.content(key), bytearray(chain.nbytes)
            cancelled: Coroutine[Any, Any, Any]
            if call == "get":
                await client.put(chain.namespace, [key], [content])
                cancelled = client.get(chain.namespace, [key], [buffer])
            else:
                cancelled = client.put(chain.namespace, [key], [content])
            task = asyncio.ensure_future(cancelled)
            left = number
            await asyncio.wait([task])
            left = -1
            native = client._native
            if not task.cancelled():
                return number
            assert native is not None
            assert (native._count, native._idle) == (0, []), "it could be reused in mid-frame"
            assert await client.get(chain.namespace, [key], [buffer]) in ([True], [False])
            assert call == "put" or bytes(buffer) == content
        raise AssertionError("the call has more waits than keys")

    monkeypatch.setattr(AsyncConnection, "_ready", counted_wait)
    monkeypatch.setattr(AsyncConnection, "_moved", counted_move)
    assert run(shared_node, body) > 3


def test_late_calls_raise_by_their_deadline_and_the_next_ones_work(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Pages("aio-late", page_nbytes=4096)
    (key,) = chain.keys(1)
    some = AsyncConnection._some

    async def body(client: Client) -> None:
        await client.put(chain.namespace, [key], [chain.content(key)])
        assert client._native is not None
        held = [await client._native._lease(client._deadline(1.0)) for _ in range(2)]
        with pytest.raises(Exhausted, match="connections_max"):
            await client.lookup(chain.namespace, [key], timeout_s=0.2)
        for _, lent in held:
            client._native._return(lent, in_step=True)

        async def nothing(self: object, view: memoryview) -> None:
            """Send nothing: the node never answers."""

        with monkeypatch.context() as patch:
            patch.setattr("kvstore.aio.connections.AsyncConnection._send", nothing)
            with pytest.raises(DeadlineExceeded):
                await client.lookup(chain.namespace, [key], timeout_s=0.09)

        assert (await client.lookup(chain.namespace, [key])).prefix_pages == 1

        async def slow(self: AsyncConnection, view: memoryview) -> int:
            """Receive when the deadline has passed; the bytes are there without a wait."""
            time.sleep(0.15)
            return await some(self, view)

        with monkeypatch.context() as patch:
            patch.setattr("kvstore.aio.connections.TURN_NBYTES", 1)
            patch.setattr(AsyncConnection, "_some", slow)
            with pytest.raises(DeadlineExceeded):
                await client.get(chain.namespace, [key], [bytearray(4096)], timeout_s=0.1)

    run(shared_node, body, connections_max=2)


def test_idle_connection_that_the_node_closed_is_replaced(shared_node: NodeProcess) -> None:
    chain = Pages("aio-closed", page_nbytes=4096)
    (key,) = chain.keys(1)

    async def body(client: Client) -> None:
        await client.lookup(chain.namespace, [key])
        assert client._native is not None
        client._native._idle[0]._sock.shutdown(2)
        assert not (await client.lookup(chain.namespace, [key])).prefix_pages

    run(shared_node, body)


def test_unreachable_node_is_an_error_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transports.channel.PAUSE_S_MIN", 600.0)

    async def main() -> None:
        chain = Pages("aio-none")
        config = ClientConfig("bulk://127.0.0.1:1", backoff_s_max=600.0)
        async with Client(config) as client:
            with pytest.raises(Unavailable):
                await client.node_status()
            with pytest.raises(Unavailable, match="next try in"):
                await client.lookup(chain.namespace, chain.keys(1))
        with pytest.raises(Unavailable):
            await client.node_status()

    asyncio.run(main())


def test_failed_connections_leave_room_for_others() -> None:
    async def connect(deadline: Deadline) -> Any:
        raise Unavailable("no")

    async def main() -> None:
        wire = AsyncBulkWire(None, connect, 1)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(Unavailable):
                await wire._lease(Deadline(5.0))

    asyncio.run(main())


def test_connections_of_a_closed_wire_are_closed_when_their_call_ends() -> None:
    wire = AsyncBulkWire(None, None, 1)  # type: ignore[arg-type]

    class Connection:
        closed = False

        def close(self) -> None:
            self.closed = True

    connection = Connection()
    wire._count = 1
    wire.close()
    wire._return(connection, in_step=True)  # type: ignore[arg-type]
    assert (connection.closed, wire._count) == (True, 0)


def test_result_for_a_closed_coroutine_is_disposed_of() -> None:
    """Regression: the socket that a thread had connected for a closed event loop stayed open."""
    client, may_end, lost = Client("127.0.0.1:1"), threading.Event(), list[bool]()

    def work() -> bool:
        return may_end.wait(30)

    loop = asyncio.new_event_loop()
    task = loop.create_task(client._in_thread(work, lost=lost.append))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.get_coro().close()  # type: ignore[union-attr]  # as the garbage collector does
    assert not lost
    may_end.set()
    wait_until(lambda: lost == [True])
    asyncio.run(client.close())


def test_event_loop_closed_in_mid_call_takes_no_connection_with_it(
    shared_node: NodeProcess,
) -> None:
    """Calls of a closed loop never end; the next loop has all connections, and no old waits."""
    chain = Pages("aio-loops", page_nbytes=PAGE_NBYTES)
    keys = chain.keys(*range(4))
    config = ClientConfig(shared_node.address, wire="bulk", timeout_s=5.0, connections_max=2)
    client = Client(config)

    async def read(key: bytes) -> bool:
        buffer = bytearray(PAGE_NBYTES)
        (hit,) = await client.get(chain.namespace, [key], [buffer])
        return hit and bytes(buffer) == chain.content(key)

    async def read_all() -> list[bool]:
        return await asyncio.gather(*map(read, keys))

    asyncio.run(client.put(chain.namespace, keys, [chain.content(key) for key in keys]))
    cut = asyncio.new_event_loop()
    calls = [cut.create_task(read(key)) for key in keys]
    while client._native is None or not client._native._waiting:
        if all(call.done() for call in calls):  # they ended before the loop could stop between them
            calls = [cut.create_task(read(key)) for key in keys]
        cut.call_soon(cut.stop)
        cut.run_forever()
    cut.close()
    assert asyncio.run(read_all()) == [True] * 4
    for call in calls:
        call._log_destroy_pending = False  # type: ignore[attr-defined]
        call.get_coro().close()  # type: ignore[union-attr]  # as the garbage collector does
    assert asyncio.run(read_all()) == [True] * 4
    assert client._native._count == len(client._native._idle) == 2

    async def in_two_loops() -> None:
        await read(keys[0])
        await asyncio.to_thread(asyncio.run, read(keys[1]))

    with pytest.raises(InvalidRequest, match="another event loop"):
        asyncio.run(in_two_loops())
    asyncio.run(client.close())


def test_feed_tells_and_ends_when_it_is_cancelled_or_closed(shared_node: NodeProcess) -> None:
    chain = Pages("aio-feed", page_nbytes=4096)
    keys = chain.keys(1, 2)

    async def body(client: Client) -> None:
        told: dict[str, list[bytes]] = {"stored": [], "removed": []}
        feed = client.feed("aio-feed", idle_s=0.2)

        async def until(kind: str, count: int) -> None:
            async for event in feed:
                told.setdefault(event.kind, []).extend(event.prefix_hashes)
                if event.kind == kind and len(told[kind]) >= count:
                    return

        await asyncio.wait_for(until("ready", 0), 60)
        await client.put(chain.namespace, keys, [chain.content(key) for key in keys])
        await asyncio.wait_for(until("stored", 2), 60)
        assert sorted(told["stored"]) == sorted(keys)
        await client.remove(chain.namespace, keys[:1])
        await asyncio.wait_for(until("removed", 1), 60)
        assert told["removed"] == keys[:1]
        # Other calls go on beside feeds, which may be more than there are threads for calls
        others = [client.feed("aio-feed", idle_s=60.0) for _ in range(3)]
        for other in others:
            assert (await anext(other)).kind == "reset"
        waiting = asyncio.create_task(until("never", 1))
        assert (await client.lookup(chain.namespace, keys)).present == (False, True)
        waiting.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for other in others:
            await cast(AsyncGenerator[FeedEvent], other).aclose()
        assert time.monotonic() - began < 50.0  # an idle wait is longer

    run(shared_node, body, connections_max=2)
    wait_until(lambda: not feed_threads())


@pytest.mark.parametrize("waits", [False, True])
def test_feed_of_a_closed_event_loop_leaves_no_thread(
    shared_node: NodeProcess, waits: bool
) -> None:
    """Regression: Python runs no `finally` of such a generator, and its thread waited for ever."""
    client, loop = Client(ClientConfig(shared_node.address, **PATIENT)), asyncio.new_event_loop()

    async def begin() -> AsyncIterator[FeedEvent]:
        feed = client.feed("nobody's", idle_s=0.1)
        assert [(await anext(feed)).kind for _ in range(2)] == ["reset", "ready"]
        return feed

    feed = loop.run_until_complete(begin())
    if waits:
        task = loop.create_task(cast(Coroutine[Any, Any, FeedEvent], anext(feed)))
        loop.call_soon(loop.stop)
        loop.run_forever()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task
    loop.close()
    del loop, feed
    wait_until(lambda: (gc.collect(), feed_threads())[1] == 0)
    asyncio.run(client.close())


def feed_threads() -> int:
    return sum(thread.name == "kvstore-aio-feed" for thread in threading.enumerate())


def test_feed_raises_what_does_not_pass(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Iterator[FeedEvent]:
        yield from ()
        raise Unauthenticated("the token is unknown")

    monkeypatch.setattr(kvstore.Client, "feed", refuse)

    async def body(client: Client) -> None:
        with pytest.raises(Unauthenticated, match="the token is unknown"):
            async for _ in client.feed():
                pass

    run(shared_node, body)
