"""Limits of one request: memory, time, and how many of a kind run; and errors inside the node."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, ConnectRaw, StartNode, settle

from kvstore import (
    Client,
    Exhausted,
    Hint,
    HintAction,
    InvalidRequest,
    KVStoreError,
    Namespace,
    PutOutcome,
    Unavailable,
)
from kvstore.layout import ByteRange, LayerGroup, PageLayout, Plane
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import Caller
from node.config import NodeConfig
from node.server import Node, _clock_ms
from node.serving import limits
from node.serving.bulk import Pace

WIRES = ["shm", "bulk", "grpc"]
PAGE = 1 << 20


class Blocked:
    """A replacement of an operation that waits until `go_on` is set."""

    def __init__(self, node: Node, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = threading.Semaphore(0)
        self.go_on = threading.Event()
        answer = pb.PinReply(pinned=[True]) if op == "pin" else None

        def wait(*_: Any) -> Any:
            self.running.release()
            assert self.go_on.wait(60.0)
            return (
                answer
                or getattr(pb, "".join(word.capitalize() for word in op.split("_")) + "Reply")()
            )

        monkeypatch.setitem(node.service._unary, op, wait)


def refused(call: Callable[[], object]) -> None:
    """Make a call that is invalid on this node, and ignore InvalidRequest.

    A node without a cluster has no member to move pages to.
    """
    with contextlib.suppress(InvalidRequest):
        call()


def first_told(client: Client) -> None:
    """Take the first event of the feed, which tells an error that may pass by an event."""
    event = next(iter(client.feed()))
    if event.kind == "away":
        raise Exhausted(event.text)


LONG = {
    "list": lambda client, pages: list(client.list_pages(pages.namespace)),
    "feed": lambda client, pages: first_told(client),
    "query": lambda client, pages: client.query(pages.namespace.model, pages.keys(1)),
    "verify": lambda client, pages: client.verify(pages.namespace, pages.keys(1)),
    "remove_namespace": lambda client, pages: client.remove_namespace(pages.namespace),
    "forget": lambda client, pages: client.forget("nobody"),
    "flush": lambda client, pages: client.flush(),
    "scrub": lambda client, pages: client.scrub(),
    "recover": lambda client, pages: client.recover(),
    "drain": lambda client, pages: refused(client.drain),
    "sweep": lambda client, pages: refused(client.sweep),
    "record": lambda client, pages: refused(client.record),  # the call lacks a duration
    # the node has no file of identities
    "push_identities": lambda client, pages: refused(lambda: client.push_identities(b"")),
    "node_status": lambda client, pages: client.node_status(),
    "list_namespaces": lambda client, pages: client.namespaces(),
}


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_requests_of_one_peer_run_one_at_a_time(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """However many connections a peer has, another peer waits for one of its requests at most."""
    client = connect(node, wire, timeout_s=30.0, connections_max=8)
    client.open(pages.namespace)
    blocked = Blocked(node, "pin", monkeypatch)
    calls = [
        threading.Thread(target=client.pin, args=(pages.namespace, pages.keys(1), 1.0))
        for _ in range(6)
    ]
    for call in calls:
        call.start()
    assert blocked.running.acquire(timeout=60.0)
    assert not blocked.running.acquire(timeout=0.3)
    with node.service.peer_queue.turn("another peer"):
        pass
    blocked.go_on.set()
    for call in calls:
        call.join()
    assert node.service.peer_queue._waiting == {}


@pytest.mark.parametrize("wire", WIRES)
def test_no_other_call_waits_for_a_peers_hints(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """Regression: a long hint delayed lookups, and a late one made the client miss for seconds."""
    client = connect(node, wire, timeout_s=30.0, connections_max=8)
    pages.put(client, pages.keys(1))
    blocked = Blocked(node, "hint", monkeypatch)
    over = Hint(HintAction.DELETE, session="s")
    hints = [
        threading.Thread(target=client.hint, args=(pages.namespace, (), over)) for _ in range(3)
    ]
    for hint in hints:
        hint.start()
    assert blocked.running.acquire(timeout=60.0)
    assert client.lookup(pages.namespace, pages.keys(1)).present == (True,)
    assert pages.get(client, pages.keys(1)) == [True]
    assert not blocked.running.acquire(timeout=0.3), "hints of a peer run one at a time"
    blocked.go_on.set()
    for hint in hints:
        hint.join()
    assert node.service.peer_queue._waiting == {}


@pytest.mark.parametrize("op", LONG)
def test_long_calls_over_the_limit_are_refused(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    client = connect(node, timeout_s=30.0, connections_max=16)
    client.open(pages.namespace)
    blocked = Blocked(node, op, monkeypatch)
    allowed = -(-limits.LONG_CALLS[op] // 2)
    threads = [threading.Thread(target=LONG[op], args=(client, pages)) for _ in range(allowed)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert blocked.running.acquire(timeout=60.0)
        for wire in ("bulk", "grpc"):
            with pytest.raises(Exhausted, match=rf"{op} calls: {allowed} of 127\.0\.0\.1"):
                LONG[op](connect(node, wire), pages)
        assert client.lookup(pages.namespace, pages.keys(1)).prefix_pages == 0
    finally:
        blocked.go_on.set()
        for thread in threads:
            thread.join()
    LONG[op](client, pages)


def test_every_long_call_is_tried() -> None:
    assert set(LONG) == set(limits.LONG_CALLS)


def test_scrub_is_limited_in_bytes_and_time_and_continues(
    start_node: StartNode, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node(data_dir=str(tmp_path), disk_nbytes=64 << 20)
    pages = Pages("scrub")
    client = connect(node, timeout_s=30.0)
    pages.put(client, [bytes([number]) * 32 for number in range(16)])
    client.flush()
    monkeypatch.setattr("node.serving.admin_calls.SCRUB_NBYTES_MAX", 16 << 10)
    first = client.scrub(nbytes_max=1 << 60)
    assert (first.intact, first.nbytes) == (4, 16 << 10)
    intact, cursor = first.intact, first.next_cursor
    while cursor:
        reply = client.scrub(cursor, 1 << 60)
        intact, cursor = intact + reply.intact, reply.next_cursor
    assert intact == 16
    monkeypatch.setattr("node.serving.admin_calls.SCRUB_NBYTES_MAX", 1 << 30)
    assert not client.scrub().next_cursor
    monkeypatch.setattr("node.serving.admin_calls.SCRUB_S_MAX", 0.0)
    assert client.scrub().next_cursor


def test_caller_with_unread_input_is_seen_to_hang_up(
    node: Node, raw: ConnectRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a hang-up behind another request was not noticed on bulk connections."""
    asked, seen = threading.Event(), threading.Event()

    def wait(request: Any, caller: Caller) -> pb.VerifyReply:
        assert not caller.has_left()
        asked.set()
        for _ in range(500):
            if caller.has_left():
                seen.set()
                break
            threading.Event().wait(0.01)
        return pb.VerifyReply()

    monkeypatch.setitem(node.service._unary, "verify", wait)
    connection = raw(node)
    connection.request(verify=pb.VerifyRequest())
    assert asked.wait(60.0)
    connection.request(hello=pb.HelloRequest())
    connection.close()
    assert seen.wait(60.0)


def test_ranges_of_a_get_are_not_gathered_in_memory(
    start_node: StartNode, connect: Connect
) -> None:
    """Regression: 16 gets of overlapping ranges of small pages took 1 GiB."""
    node = start_node(ram_nbytes=16 << 20, batch_nbytes_max=8 << 20)
    pages = Pages("ranges", PAGE)
    pages.put(connect(node), pages.keys(*range(8)))
    half = PAGE // 2
    request = pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(*range(8)))
    request.ranges.extend(
        [pb.ByteRange(offset=half, nbytes=half), pb.ByteRange(offset=0, nbytes=half)]
    )
    with node.sessions.open(Caller("test")) as session:
        tracemalloc.start()
        try:
            nbytes, _, pieces = node.service.begin_get(session, request)
            assert nbytes == sum(piece.nbytes for piece in pieces) == 8 << 20
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("wire", WIRES)
def test_ranges_may_come_in_any_order_but_no_byte_twice(
    node: Node, connect: Connect, pages: Pages, wire: str
) -> None:
    client = connect(node, wire)
    (key,) = pages.keys(1)
    pages.put(client, [key])
    content, buffer = pages.content(key), bytearray(300)
    ranges = [ByteRange(1000, 100), ByteRange(0, 100), ByteRange(100, 100)]
    assert client.get_ranges(pages.namespace, [key], ranges, [buffer]) == [True]
    assert buffer == content[1000:1100] + content[:200]
    with pytest.raises(InvalidRequest, match=r"range 1000\+100 overlaps the one at 1099"):
        client.get_ranges(pages.namespace, [key], [ByteRange(1099, 1), *ranges], [bytearray(301)])
    assert client.stats.connects == 1


def test_huge_namespace_description_is_refused(node: Node, connect: Connect) -> None:
    """Regression: two namespaces with descriptions of 512 KiB, and a page, blocked all others."""
    client = connect(node)
    layout = PageLayout(
        1, (LayerGroup("all", tuple(range(1 << 15)), (Plane("k", "uint8", (1,)),)),)
    )
    huge = Namespace(model="huge", layout=layout)
    with pytest.raises(
        InvalidRequest,
        match=r"the description of this namespace has \d{5} bytes, allowed are 32768",
    ):
        client.put(huge, [bytes(32)], [bytes(1 << 15)])
    others = Pages("others")
    assert others.put(client, others.keys(1)) == [PutOutcome.STORED]


def test_verify_has_the_byte_limit_of_a_get_and_client_splits_it(
    start_node: StartNode, connect: Connect
) -> None:
    node = start_node(ram_nbytes=16 << 20, batch_nbytes_max=2 << 20)
    pages = Pages("verify", PAGE)
    client = connect(node)
    pages.put(client, pages.keys(*range(8)))
    request = pb.VerifyRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(0, 1, 2))
    with pytest.raises(InvalidRequest, match="batch_nbytes_max"):
        client._only("verify", request, None)
    assert client.verify(pages.namespace, pages.keys(*range(9))) == (8, 0, 1)


def test_cancelled_verify_stops(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.put(connect(node), pages.keys(*range(5)))
    verifying = node.service._verifying
    verify, verified = verifying._verified, []
    monkeypatch.setattr(
        verifying, "_verified", lambda *page: verified.append(page) or verify(*page)
    )
    request = pb.VerifyRequest(
        namespace=pages.namespace.digest, prefix_hashes=pages.keys(*range(5))
    )
    with pytest.raises(Unavailable, match="the caller has left"):
        node.service.call("verify", request, Caller("peer", lambda: len(verified) == 2))
    assert len(verified) == 2


def test_transfer_has_a_total_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("node.serving.bulk.time.monotonic", lambda: now[0])
    pace = Pace(10 << 20, stall_s=5.0)
    assert pace.limit_s == 15.0
    for second in range(0, 15, 3):
        now[0] = second
        assert pace.next_s() == min(5.0, 15.0 - second)
    now[0] = 15.0
    with pytest.raises(TimeoutError, match=r"not over after 15\.0 s"):
        pace.next_s()


# ---- when the node itself fails --------------------------------------------------------------


@pytest.fixture(scope="module")
def disk_node(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    return start_node(data_dir=str(tmp_path_factory.mktemp("data")), disk_nbytes=64 << 20)


@pytest.mark.parametrize("wire", WIRES)
def test_stat_and_list_work_after_the_clock_was_set_back(
    disk_node: Node, connect: Connect, wire: str
) -> None:
    """Regression: a negative age in an unsigned field raised, and the connection closed."""
    node = disk_node
    pages = Pages(f"clock {wire}")
    client = connect(node, wire, timeout_s=30.0)
    keys = [b"1" * 32, b"2" * 32]
    pages.put(client, keys)
    client.flush()
    client.pin(pages.namespace, keys[:1], 60.0)
    with node.tier.lock:
        for page in node.tier.namespaces.find(pages.namespace.digest).pages.values():
            page.used_ms = page.stored_ms = node.tier.clock_ms() + 1_000_000
    clock = node.disk._clock_s
    node.disk._clock_s = lambda: clock() - 100_000
    try:
        for stat in (*client.stat(pages.namespace, keys), *client.list_pages(pages.namespace)):
            assert (stat.present, stat.age_ms, stat.idle_ms) == (True, 0, 0)
        for page in list(node.tier.namespaces.find(pages.namespace.digest).pages.values()):
            with node.tier.lock:
                node.tier.forget(page, "evicted")
        (first, second) = client.stat(pages.namespace, keys)
        assert (first.on_disk, first.in_ram, first.idle_ms, second.idle_ms) == (True, False, 0, 0)
    finally:
        node.disk._clock_s = clock
    assert client.stats.connects == 1


def test_node_uses_the_monotonic_clock() -> None:
    assert abs(_clock_ms() - time.monotonic() * 1000) < 5000


@pytest.mark.parametrize("op", ["stat", "put", "commit", "get"])
@pytest.mark.parametrize("wire", WIRES)
def test_unexpected_exception_is_logged_and_keeps_the_connection(
    node: Node,
    connect: Connect,
    pages: Pages,
    caplog: pytest.LogCaptureFixture,
    wire: str,
    op: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect(node, wire)
    pages.put(client, pages.keys(1))
    calls = {
        "stat": lambda: client.stat(pages.namespace, pages.keys(1)),
        "put": lambda: pages.put(client, pages.keys(2)),
        "commit": lambda: pages.put(client, pages.keys(2)),
        "get": lambda: pages.get(client, pages.keys(1)),
    }
    name = {
        "stat": "_inventory.stat",
        "put": "_tier.reserve",
        "commit": "_tier.commit",
        "get": "_tier.acquire",
    }[op]
    owner = getattr(node.service, name.partition(".")[0])

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(owner, name.partition(".")[2], fail)
        for _ in range(3):
            with pytest.raises(
                KVStoreError, match=rf"{op} failed inside the node \(ZeroDivisionError\)"
            ) as caught:
                calls[op]()
            assert type(caught.value) is KVStoreError
    assert "a bug" in caplog.text
    assert pages.put(client, pages.keys(3)) == [PutOutcome.STORED]
    assert pages.get(client, pages.keys(1)) == [True]
    assert client.stats.connects == 1
    settle(node, sessions=None)


# ---- start -----------------------------------------------------------------------------------


def test_start_can_be_interrupted_while_memory_is_touched() -> None:
    pulses = []

    def pulse() -> None:
        pulses.append(1)
        if len(pulses) == 3:
            raise SystemExit(0)

    ports: dict[str, Any] = {"port": 0, "bulk_port": 0, "metrics_port": 0}
    node = Node(NodeConfig(host="127.0.0.1", ram_nbytes=256 << 20, **ports), pulse)
    assert node.shm is not None
    with pytest.raises(SystemExit):
        node.start()
    assert len(pulses) == 3
    assert not any(gateway._thread.is_alive() for gateway in node.grpc._gateways)


def test_sigterm_during_the_start_ends_it_with_status_0() -> None:
    """Regression: the signal was blocked until all RAM was touched, which takes minutes on some
    machines.
    """
    code = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM});"
        "os.kill(os.getpid(), signal.SIGTERM);"
        "os.execv(sys.executable, [sys.executable, '-m', 'node.main', *sys.argv[1:]])"
    )
    flags = (
        "--port",
        "0",
        "--bulk-port",
        "0",
        "--metrics-port",
        "0",
        "--ram-bytes",
        "4MiB",
        "--host",
        "127.0.0.1",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert done.returncode == 0, done.stderr
    assert "ready" not in done.stdout
