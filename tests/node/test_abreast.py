"""One batch over several connections: same bytes, same answers, and no leaked thread."""

import concurrent.futures
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
from forging import SECRET, key_id
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import (
    ByteRange,
    Client,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    PutOutcome,
    Unavailable,
)
from kvstore.cluster.calls import key_seeds
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports import bulk
from kvstore.transports.bulk import Arrived, BulkWire
from kvstore.transports.parallel import (
    STREAMS_MAX,
    THREADS_MAX,
    ParallelTransfer,
    split,
    stream_count,
)
from node.server import Node

LANES = 3


@pytest.fixture
def node(start_node: StartNode) -> Node:
    return start_node()


@pytest.fixture
def client(node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr("kvstore.transports.bulk.stream_count", lambda pages, _: min(LANES, pages))
    return connect(node, "bulk")


def link_of(client: Client) -> BulkWire:
    wire = client._fan_out.nodes.only._connection.wire
    assert isinstance(wire, BulkWire)
    return wire


def test_parallel_batch_keeps_bytes_and_order(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, met, put = pages.keys(*range(11)), threading.Barrier(LANES), BulkWire._put

    def together(*arguments: Any) -> list[int]:
        met.wait(60.0)  # raises unless LANES transfers run at a time
        return put(*arguments)

    assert pages.put(client, keys[3:5]) == [PutOutcome.STORED] * 2
    expected = [PutOutcome.EXISTS if 3 <= i < 5 else PutOutcome.STORED for i in range(11)]
    monkeypatch.setattr(BulkWire, "_put", together)
    assert pages.put(client, keys) == expected
    client.remove(pages.namespace, [keys[0], keys[7]])
    assert pages.get(client, keys) == [i not in (0, 7) for i in range(11)]


def test_shares_of_a_fetch_take_turns(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, took, asked, get = pages.keys(*range(11)), list[int](), list[list[bytes]](), BulkWire._get
    pages.put(client, keys)
    buffers = [bytearray(pages.nbytes) for _ in keys]

    def noted(wire: BulkWire, request: pb.GetRequest, *arguments: Any) -> list[Arrived | None]:
        asked.append(request.prefix_hashes[:])
        return get(wire, request, *arguments)

    def take(place: int, _: Arrived) -> None:
        assert buffers[place] == pages.content(keys[place])
        took.append(place)

    monkeypatch.setattr(BulkWire, "_get", noted)
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=keys)
    slots = [(memoryview(buffer),) for buffer in buffers]
    seeds = key_seeds(pages.namespace, keys)
    found = link_of(client).fetch(request, slots, seeds, Deadline(60.0), on_page=take)
    assert sorted(asked) == [keys[first::LANES] for first in range(LANES)]
    assert sorted(took) == [*range(len(keys))]
    assert None not in found


@pytest.mark.parametrize("keyed", [False, True])
def test_any_number_of_shares_and_misses_keeps_bytes_and_places(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, seed: int, keyed: bool
) -> None:
    rng, lanes = random.Random(seed), 1
    client = connect(node, "bulk", page_key=SECRET)
    monkeypatch.setattr("kvstore.transports.bulk.stream_count", lambda pages, _: min(lanes, pages))
    for turn in range(20):
        lanes, nbytes = rng.randint(1, 8), rng.choice((1, 77, 4096, 9001))
        own = {"key_id": key_id()} if keyed else {}
        pages = Pages(f"shares {seed} {turn} {keyed}", nbytes, **own)
        keys = pages.keys(*rng.sample(range(100), rng.randint(1, 20)))
        there = {key for key in keys if rng.random() < 0.8}
        if there:
            pages.put(client, list(there))
        hits = [key in there for key in keys]
        assert pages.get(client, keys) == hits
        count = [*hits, False].index(False)
        assert pages.get(client, keys, prefix=True) == [i < count for i in range(len(keys))]
        client.remove_namespace(pages.namespace)


def test_prefix_ends_at_first_miss_of_any_share(client: Client, pages: Pages) -> None:
    keys = pages.keys(*range(9))
    pages.put(client, keys)
    client.remove(pages.namespace, keys[4:5])
    buffers = [bytearray(pages.nbytes) for _ in keys]
    assert client.get(pages.namespace, keys, buffers, prefix=True) == [True] * 4 + [False] * 5


def test_ranges_and_damaged_pages_keep_their_index(
    client: Client, pages: Pages, node: Node
) -> None:
    keys = pages.keys(*range(9))
    pages.put(client, keys)
    buffers = [bytearray(7) for _ in keys]
    assert client.get_ranges(pages.namespace, keys, [ByteRange(5, 7)], buffers) == [True] * 9
    assert buffers == [pages.content(key)[5:12] for key in keys]
    for bad in (1, 5, 8):
        pages.flip(node, keys[bad])
    assert pages.get(client, keys) == [i not in (1, 5, 8) for i in range(9)]
    assert client.lookup(pages.namespace, keys).present == tuple(
        i not in (1, 5, 8) for i in range(9)
    )


@pytest.mark.parametrize("error", [Unavailable("gone"), DeadlineExceeded("late")])
def test_failed_share_fails_the_call_after_all_ended(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keys, ended, wire = pages.keys(*range(6)), [], link_of_opened(client, pages)
    put = BulkWire._put

    def failing(
        wire: BulkWire, request: Any, views: Any, deadline: Deadline, *more: Any
    ) -> list[int]:
        if keys[2] in request.prefix_hashes:
            raise error
        time.sleep(0.05)
        found = put(wire, request, views, deadline, *more)
        ended.append(len(found))
        return found

    monkeypatch.setattr(BulkWire, "_put", failing)
    request = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=pages.nbytes
    )
    with pytest.raises(type(error)):
        wire.put(request, [(memoryview(pages.content(key)),) for key in keys], Deadline(10.0))
    assert ended == [2, 2]


def test_failed_share_of_a_get_leaves_no_thread_in_its_buffers(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reuses them, perhaps for the same pages of another owner."""
    keys, get, failed = pages.keys(*range(9)), BulkWire._get, threading.Event()
    pages.put(client, keys)
    ended = list[int]()

    def failing(wire: BulkWire, request: pb.GetRequest, *more: Any) -> list[Arrived | None]:
        if keys[1] in request.prefix_hashes:
            failed.set()
            raise DeadlineExceeded("late")
        assert failed.wait(60.0)
        time.sleep(0.05)  # so that the call could return first
        found = get(wire, request, *more)
        ended.append(len(found))
        return found

    monkeypatch.setattr(BulkWire, "_get", failing)
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=keys)
    buffers = [(memoryview(bytearray(pages.nbytes)),) for _ in keys]
    with pytest.raises(DeadlineExceeded):
        link_of(client).get(request, buffers, key_seeds(pages.namespace, keys), Deadline(60.0))
    assert ended == [3, 3]


def link_of_opened(client: Client, pages: Pages) -> BulkWire:
    client.open(pages.namespace)
    return link_of(client)


def test_share_without_room_is_full_and_no_error(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, wire = pages.keys(*range(6)), link_of_opened(client, pages)
    put, refused = BulkWire._put, {keys[2]}

    def without_room(
        wire: BulkWire, request: Any, views: Any, deadline: Deadline, *more: Any
    ) -> list[int]:
        if refused & set(request.prefix_hashes):
            raise Exhausted("no slot")
        return (
            [pb.WRITE] * len(views)
            if request.durable
            else put(wire, request, views, deadline, *more)
        )

    monkeypatch.setattr(BulkWire, "_put", without_room)
    request = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=pages.nbytes
    )
    views = [(memoryview(pages.content(key)),) for key in keys]
    assert wire.put(request, views, Deadline(10.0)) == [
        pb.WRITE,
        pb.WRITE,
        pb.FULL,
        pb.FULL,
        pb.WRITE,
        pb.WRITE,
    ]
    request.durable = True
    with pytest.raises(Exhausted):
        wire.put(request, views, Deadline(10.0))
    request.durable = False
    refused.update(keys)
    with pytest.raises(Exhausted):
        wire.put(request, views, Deadline(10.0))


def test_one_connection_transfers_all_without_threads(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", none_left)
    keys = pages.keys(*range(6))
    wire = link_of_opened(client, pages)
    request = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=pages.nbytes
    )
    assert (
        wire.put(request, [(memoryview(pages.content(key)),) for key in keys], Deadline(10.0))
        == [pb.WRITE] * 6
    )


def test_share_without_a_thread_is_not_run_again_later(
    client: Client, pages: Pages, connect: Connect, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a share whose thread could not start stayed queued, and a later call's thread
    stored it with the bytes that its buffers held by then.
    """
    keys, others = pages.keys(*range(6)), pages.keys(*range(10, 16))
    buffers = [bytearray(pages.content(key)) for key in keys]
    client.open(pages.namespace)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert client.put(pages.namespace, keys, buffers) == [PutOutcome.STORED] * 6
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    beside = connect(node, "grpc")
    assert beside.remove(pages.namespace, keys) == [True] * 6  # stands for an eviction
    assert pages.put(client, others) == [PutOutcome.STORED] * 6
    threads = link_of(client)._threads._threads
    assert threads is not None
    threads.submit(lambda: None).result(60.0)  # all that was queued before has run
    threads.shutdown()
    assert beside.lookup(pages.namespace, keys).present == (False,) * 6


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_interrupt_while_a_thread_starts_ends_its_share(
    client: Client, pages: Pages, connect: Connect, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the share went on in its thread, and read buffers that the caller reused."""
    keys, reused, send, start = (
        pages.keys(*range(6)),
        threading.Event(),
        bulk._send_pages,
        threading.Thread.start,
    )
    client.open(pages.namespace)

    def slow(*arguments: Any) -> list[bytes]:
        if threading.current_thread() is not threading.main_thread():
            reused.wait(1.0)
        return send(*arguments)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("kvstore-streams"):
            signal.raise_signal(signal.SIGINT)

    buffers = [bytearray(pages.content(key)) for key in keys]
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "_send_pages", slow)
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.put(pages.namespace, keys, buffers)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    reused.set()
    link_of(client)._threads.close()
    beside = connect(node, "grpc")
    found = [bytearray(pages.nbytes) for _ in keys]
    hits = beside.get(pages.namespace, keys, found)
    assert [
        key
        for key, hit, page in zip(keys, hits, found, strict=True)
        if hit and page != pages.content(key)
    ] == []


def test_wire_after_a_fork_raises_without_waiting(
    client: Client, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process has no running copies of the threads, so a call must not wait for them."""
    keys = pages.keys(*range(6))
    pages.put(client, keys)
    wire = link_of(client)
    wire._pool._pid = os.getpid() + 1  # as in a forked child
    monkeypatch.setattr(wire._threads, "run", None)
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=keys)
    buffers = [(memoryview(bytearray(pages.nbytes)),) for _ in keys]
    with pytest.raises(InvalidRequest, match="before a fork"):
        wire.get(request, buffers, [0] * 6, Deadline(10.0))


def test_parallel_transfer_after_a_fork_starts_new_threads() -> None:
    """Cluster calls run in these threads before any wire can notice the fork."""
    threads = ParallelTransfer()
    threads.run([os.getpid, os.getpid])
    time.sleep(0.1)  # until the thread is idle and would get more work
    child = os.fork()
    if not child:
        signal.alarm(10)
        os._exit(threads.run([os.getpid, os.getpid]) != [os.getpid()] * 2)
    _, status = os.waitpid(child, 0)
    threads.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_unexpected_error_is_raised_after_all_shares_ended() -> None:
    ended: list[int] = []

    def broken() -> int:
        raise MemoryError("this process is in trouble")

    def slow() -> int:
        time.sleep(0.1)
        ended.append(1)
        return 1

    for calls in ([broken, slow, slow], [slow, broken, slow]):
        ended.clear()
        threads = ParallelTransfer()
        with pytest.raises(MemoryError):
            threads.run(calls)
        assert len(ended) == 2
        threads.close()


def test_interrupted_call_waits_for_all_its_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: shares read the caller's buffers after the call had ended, and stored new bytes
    under old keys.
    """
    wait, interrupts, ended = (
        concurrent.futures.Future.exception,
        iter([KeyboardInterrupt(), KeyboardInterrupt()]),
        list[int](),
    )

    def interrupted(*arguments: Any) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return wait(*arguments)

    def slow() -> None:
        time.sleep(0.2)
        ended.append(1)

    monkeypatch.setattr(concurrent.futures.Future, "exception", interrupted)
    threads = ParallelTransfer()
    with pytest.raises(KeyboardInterrupt):
        threads.run([lambda: None, slow, slow])
    assert ended == [1, 1]
    threads.close()


def test_call_does_not_wait_for_threads_of_other_calls() -> None:
    """Regression: a call with a deadline of 0.5 s waited 15 s for calls to a hung node."""
    threads, go_on = ParallelTransfer(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        hung = [callers.submit(threads.run, [go_on.wait] * STREAMS_MAX) for _ in range(4)]
        try:
            while threads._busy < THREADS_MAX:
                time.sleep(0.001)
            assert threads.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
        finally:
            go_on.set()
    assert [one.result() for one in hung] == [[True] * STREAMS_MAX] * 4
    assert threads._busy == 0
    threads.close()


@pytest.mark.parametrize("op", ["_put", "_get"])
def test_chain_loses_its_end_first_with_parallel_shares(
    start_node: StartNode,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
) -> None:
    monkeypatch.setattr("kvstore.transports.bulk.stream_count", lambda pages, _: min(LANES, pages))
    client = connect(start_node(ram_nbytes=16 << 20, extent_nbytes=4 << 20), "bulk")
    pages = Pages(f"order {op}", 1 << 20)
    keys, share = pages.keys(*range(6)), getattr(BulkWire, op)
    if op == "_get":
        pages.put(client, keys)

    def slow_at_the_end(wire: BulkWire, request: Any, *rest: Any) -> Any:
        if keys[-1] in request.prefix_hashes:
            time.sleep(0.1)
        return share(wire, request, *rest)

    monkeypatch.setattr(BulkWire, op, slow_at_the_end)
    pages.put(client, keys) if op == "_put" else pages.get(client, keys)
    monkeypatch.undo()
    for number in range(100, 113):
        pages.put(client, pages.keys(number))
    assert client.lookup(pages.namespace, keys).present == (True, True, True, False, False, False)


def test_evicted_idle_connections_are_no_failure(client: Client, pages: Pages, node: Node) -> None:
    keys = pages.keys(*range(9))
    pages.put(client, keys)
    connects, known = client._fan_out.nodes.only.connect_count, link_of(client)
    for _ in range(3):
        idle = len(known._pool._idle)
        assert idle
        while node.bulk._limiter.drop_idle():
            pass
        assert pages.get(client, keys) == [True] * 9
    assert (
        link_of(client),
        client._fan_out.nodes.only.connect_count,
        client._fan_out.nodes.only.failure_count,
    ) == (
        known,
        connects,
        0,
    )


@pytest.mark.parametrize(
    ("cores", "mib", "pages", "lanes"),
    [
        (2, 1024, 64, 1),
        (16, 8, 8, 1),
        (16, 64, 64, 4),
        (16, 48, 64, 3),
        (6, 1024, 64, 2),
        (16, 1024, 1, 1),
    ],
)
def test_how_many(
    cores: int, mib: int, pages: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert stream_count(pages, (mib << 20) // pages) == lanes


def test_split_covers_all_pages_in_order() -> None:
    for count in range(1, 40):
        for lanes in range(1, min(count, 8) + 1):
            parts = [list(range(count))[part] for part in split(count, lanes)]
            assert [number for part in parts for number in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
