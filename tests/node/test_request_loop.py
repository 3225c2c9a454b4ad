"""The request loop: one thread serves the small requests of all connections.

Every behaviour of a connection must be the same as on a thread of its own.
"""

import contextlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, ConnectRaw, Raw, StartNode
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket, pack_fixed
from node.server import Node
from node.serving import connection as connections
from node.serving.acceptor import LOOP_CONNECTIONS_MIN
from node.serving.bulk import BulkConnection
from node.serving.connection import SMALL_RUN, Ready, caller_at
from node.serving.request_loop import REQUESTS_MAX, RequestLoop

NAME = "bulk-127.0.0.1:"


def port_of(raw: Raw) -> int:
    port: int = raw.sock.getsockname()[1]
    return port


def has_thread(raw: Raw) -> bool:
    """Return whether a thread of its own serves this connection."""
    name = f"{NAME}{port_of(raw)}"
    return any(thread.name == name for thread in threading.enumerate())


def lookup(pages: Pages, *keys: int) -> dict[str, Any]:
    return {
        "lookup": pb.LookupRequest(
            namespace=pages.namespace.digest, prefix_hashes=pages.keys(*keys or (1,))
        )
    }


def in_loop(raw: ConnectRaw, node: Node, pages: Pages) -> Raw:
    """Return a connection that the loop serves; page 1 is stored."""
    made = raw(node)
    assert made.ask(hello=pb.HelloRequest()).hello.bulk_port
    for _ in range(SMALL_RUN):
        assert made.ask(**lookup(pages)).lookup.present == [True]
    wait_until(lambda: not has_thread(made))
    return made


@pytest.fixture(autouse=True)
def loop_for_a_single_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.serving.acceptor.LOOP_CONNECTIONS_MIN", 1)


@pytest.fixture
def stored(node: Node, connect: Connect, pages: Pages) -> Pages:
    pages.put(connect(node), pages.keys(1))
    return pages


def test_connection_leaves_its_thread_for_small_requests_only(
    node: Node, raw: ConnectRaw, stored: Pages
) -> None:
    made = in_loop(raw, node, stored)
    assert made.ask(**lookup(stored, 1, 2)).lookup.present == [True, False]
    assert not has_thread(made)
    get = pb.GetRequest(namespace=stored.namespace.digest, prefix_hashes=stored.keys(1))
    made.request(get=get)
    reply, nbytes = made.reply()
    page = bytearray(nbytes)
    made.recv_into(memoryview(page))
    assert reply.get.hits == [True]
    assert bytes(page) == stored.content(stored.keys(1)[0])
    assert has_thread(made), "a transfer was served by the loop"
    for _ in range(SMALL_RUN):
        assert made.ask(**lookup(stored)).lookup.present == [True]
    wait_until(lambda: not has_thread(made))


def test_few_connections_keep_their_threads(
    start_node: StartNode, raw: ConnectRaw, connect: Connect, pages: Pages, monkeypatch: Any
) -> None:
    monkeypatch.setattr("node.serving.acceptor.LOOP_CONNECTIONS_MIN", LOOP_CONNECTIONS_MIN)
    node = start_node()
    with connect(node) as client:
        pages.put(client, pages.keys(1))
    wait_until(lambda: node.bulk.count == 0)
    few = [raw(node) for _ in range(LOOP_CONNECTIONS_MIN - 1)]
    for made in few:
        made.ask(hello=pb.HelloRequest())
        for _ in range(2 * SMALL_RUN):
            made.ask(**lookup(pages))
    assert all(map(has_thread, few))
    raw(node).ask(hello=pb.HelloRequest())
    few[0].ask(**lookup(pages))
    wait_until(lambda: not has_thread(few[0]))


def test_request_that_arrives_in_pieces_gets_a_thread(
    node: Node, raw: ConnectRaw, stored: Pages
) -> None:
    slow, fast = in_loop(raw, node, stored), in_loop(raw, node, stored)
    data = pb.BulkRequest(**lookup(stored)).SerializeToString()
    frame = pack_fixed(len(data), 0) + data
    for cut in (1, 20):
        slow.send(frame[:cut])
        wait_until(lambda: has_thread(slow))
        assert fast.ask(**lookup(stored)).lookup.present == [True]
        slow.send(frame[cut:])
        assert slow.reply()[0].lookup.present == [True]
        for _ in range(SMALL_RUN):
            slow.ask(**lookup(stored))
        wait_until(lambda: not has_thread(slow))


def test_pipelined_requests_are_all_answered(node: Node, raw: ConnectRaw, stored: Pages) -> None:
    made = in_loop(raw, node, stored)
    data = pb.BulkRequest(**lookup(stored)).SerializeToString()
    made.send((pack_fixed(len(data), 0) + data) * 200)
    for _ in range(200):
        assert made.reply()[0].lookup.present == [True]


def test_loop_never_waits_for_a_client_that_reads_no_replies(node: Node, stored: Pages) -> None:
    """A thread sends what the loop can not send without a wait; no byte is lost."""
    ours, sock = socket.socketpair()
    deaf = BulkConnection(
        FrameSocket(ours), "deaf", caller_at(ours, "deaf", "bulk"), node.service, 30.0
    )
    client = FrameSocket(sock)
    client.arm(60.0)
    small = pb.BulkRequest(**lookup(stored)).SerializeToString()
    large = pb.BulkRequest(**lookup(stored, *[1] * 100)).SerializeToString()
    with ThreadPoolExecutor(1) as thread, contextlib.closing(deaf), contextlib.closing(sock):
        client.send_frame(pb.BulkRequest(hello=pb.HelloRequest()).SerializeToString())
        for _ in range(SMALL_RUN):
            client.send_frame(small)
        assert node.bulk is not None
        assert deaf.serve(node.bulk)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sent, what = SMALL_RUN, Ready.SERVED
        while what is Ready.SERVED:
            client.send_frame(large)
            sent, what = sent + 1, deaf.serve_ready(node.bulk)
        assert what is Ready.NEEDS_THREAD
        served = thread.submit(deaf.proceed, node.bulk)
        replies = [client.recv_frame(1 << 22)[0] for _ in range(1 + sent)]
        found = [pb.BulkReply.FromString(reply).lookup.present for reply in replies[1:]]
        assert found == [[True]] * SMALL_RUN + [[True] * 100] * (sent - SMALL_RUN)
        client.shutdown()
        with pytest.raises(ConnectionError):
            served.result(60.0)


def test_send_now_returns_what_would_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = random.randbytes(4 << 20)
        rest = FrameSocket(ours).send_now(data)
        assert 0 < len(rest) < len(data)
        got = theirs.recv(len(data) - len(rest), socket.MSG_WAITALL)
        assert got + rest == data


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"GET / HTTP/1.1\r\n\r\n", "not a kvstore bulk frame"), (pack_fixed(3, 0) + b"\xff" * 3, "")],
)
def test_broken_frame_ends_its_connection_only(
    node: Node, raw: ConnectRaw, stored: Pages, data: bytes, says: str
) -> None:
    made, other = in_loop(raw, node, stored), in_loop(raw, node, stored)
    made.send(data)
    error = made.ending()
    assert error is not None
    assert says in error.message
    assert other.ask(**lookup(stored)).lookup.present == [True]


def test_failed_request_is_answered_and_counted(
    node: Node, raw: ConnectRaw, stored: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = in_loop(raw, node, stored)
    unknown = pb.LookupRequest(namespace=bytes(16), prefix_hashes=[b"k" * 32])
    assert "not open here" in made.ask(lookup=unknown).error.message
    with monkeypatch.context() as patch:
        patch.setattr(node.tier, "lookup", lambda *_: 1 // 0)
        reply = made.ask(**lookup(stored)).error
        assert "ZeroDivisionError" in reply.message
    assert made.ask(**lookup(stored)).lookup.present == [True]
    assert not has_thread(made)
    assert node.service.traffic.errors()["lookup", "bulk", "internal"] >= 1


def test_ended_connections_leave_nothing(node: Node, raw: ConnectRaw, stored: Pages) -> None:
    sessions = node.service.sessions.count
    made = [in_loop(raw, node, stored) for _ in range(3)]
    count = node.bulk.count
    made[0].close()
    made[1].sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: node.bulk.count == count - 2)
    made[2].close()
    wait_until(lambda: node.service.sessions.count == sessions)


def test_idle_connection_in_the_loop_can_be_evicted(
    start_node: StartNode, raw: ConnectRaw, connect: Connect, pages: Pages
) -> None:
    node = start_node(sessions_max=4)
    pages.put(connect(node), pages.keys(1))
    first, second = in_loop(raw, node, pages), in_loop(raw, node, pages)
    assert first.ask(**lookup(pages)).lookup.present == [True]  # `second` is the longest idle now
    third = raw(node)
    assert third.ask(hello=pb.HelloRequest()).hello.bulk_port
    with pytest.raises(ConnectionError):
        second.reply()
    assert first.ask(**lookup(pages)).lookup.present == [True]


def test_connection_without_a_thread_is_closed(
    node: Node, raw: ConnectRaw, stored: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may start no more threads when a request needs one."""
    made, other = in_loop(raw, node, stored), in_loop(raw, node, stored)

    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    sessions = node.service.sessions.count
    with monkeypatch.context() as patch:
        patch.setattr(node.bulk, "_start_thread", no_thread)
        made.request(get=pb.GetRequest(namespace=stored.namespace.digest))
        with pytest.raises(ConnectionError):
            made.reply()
        wait_until(lambda: node.service.sessions.count == sessions - 1)
        assert other.ask(**lookup(stored)).lookup.present == [True]


def test_stopped_server_closes_connections_of_the_loop(
    start_node: StartNode, raw: ConnectRaw, connect: Connect, pages: Pages
) -> None:
    node = start_node()
    with connect(node) as client:
        pages.put(client, pages.keys(1))
    made = [in_loop(raw, node, pages) for _ in range(3)]
    node.bulk.stop(5.0)
    for one in made:
        with pytest.raises(ConnectionError):
            one.reply()
    assert node.bulk.count == 0
    loop: Any = node.bulk._loop
    wait_until(lambda: loop._wakeup < 0)  # its thread has ended and closed its descriptors


def test_request_that_runs_at_a_stop_is_answered(
    start_node: StartNode,
    raw: ConnectRaw,
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = start_node()
    with connect(node) as client:
        pages.put(client, pages.keys(1))
    made, look_up = in_loop(raw, node, pages), node.tier.lookup

    def stopping(*arguments: Any) -> list[bool]:
        node.bulk._stopping = True
        return look_up(*arguments)

    monkeypatch.setattr(node.tier, "lookup", stopping)
    assert made.ask(**lookup(pages)).lookup.present == [True]
    with pytest.raises(ConnectionError):
        made.reply()


def test_stopped_loop_takes_no_connection(
    start_node: StartNode, raw: ConnectRaw, connect: Connect, pages: Pages
) -> None:
    node = start_node()
    pages.put(connect(node), pages.keys(1))
    made = raw(node)
    made.ask(hello=pb.HelloRequest())
    node.bulk._loop.stop()
    for _ in range(SMALL_RUN):
        made.ask(**lookup(pages))
    with pytest.raises(ConnectionError):
        made.ask(**lookup(pages))
    wait_until(lambda: node.bulk.count == 1)


# ---- turns -------------------------------------------------------------------------------------


class Waiting:
    """A connection with a number of requests that are there already."""

    def __init__(self, peer: str, served: list[str], requests: int) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._theirs.send(bytes(requests))
        self.peer, self.name = peer, peer
        self._served = served
        self.is_abandoned = self.is_faulty = False

    def serve_ready(self, server: Any) -> Ready:
        self.socket.recv(1)
        self._served.append(self.peer)
        return Ready.SERVED

    def abandoned(self) -> bool:
        if self.is_faulty:
            raise OSError("no check")
        return self.is_abandoned

    def close(self) -> None:
        self.socket.close()
        self._theirs.close()


@pytest.fixture
def loop() -> Any:
    left: list[Any] = []
    made = RequestLoop("test", None, left.append, left.append, 0.05)  # type: ignore[arg-type]
    made.left = left  # type: ignore[attr-defined]
    yield made
    made.stop()


def test_peer_with_many_connections_gets_no_more_turns(loop: Any) -> None:
    served: list[str] = []
    many = [Waiting("many", served, 50) for _ in range(20)]
    one = Waiting("one", served, 50)
    ready = [(waiting.socket.fileno(), waiting) for waiting in (*many, one)]
    for _ in range(10):
        loop._serve_round(ready)
    assert served.count("one") == served.count("many") == 10
    served.clear()
    loop._serve_round([(waiting.socket.fileno(), waiting) for waiting in many * 3])
    assert served == ["many"] * REQUESTS_MAX
    for waiting in (*many, one):
        waiting.close()


def test_abandoned_connection_gets_a_thread_that_ends_it(loop: Any) -> None:
    served: list[str] = []
    waiting, busy = Waiting("gone", served, 0), Waiting("busy", served, 1)
    waiting.is_abandoned = True
    assert loop.add(waiting)
    assert loop.add(busy)
    wait_until(lambda: loop.left == [waiting])
    loop.stop()
    wait_until(lambda: loop._wakeup < 0)
    waiting.close()
    busy.close()


def test_connection_that_can_not_be_checked_does_not_end_the_loop(loop: Any) -> None:
    faulty, gone = Waiting("faulty", [], 0), Waiting("gone", [], 0)
    faulty.is_faulty = gone.is_abandoned = True
    assert loop.add(faulty)
    assert loop.add(gone)
    wait_until(lambda: loop.left == [faulty, gone])
    loop.stop()
    wait_until(lambda: loop._wakeup < 0)
    faulty.close()
    gone.close()


def test_small_requests_never_wait() -> None:
    """A lookup that may ask other nodes waits for them, so the loop does not serve it."""
    assert connections.is_small("lookup", pb.LookupRequest())
    assert not connections.is_small("lookup", pb.LookupRequest(near=True))
    assert not connections.is_small("put", pb.PutRequest())
