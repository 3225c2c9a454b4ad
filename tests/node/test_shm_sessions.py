"""Slots of a shared-memory client that goes away.

They are free at once after a release, but never while its process may still write.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode, settle
from waiting import wait_until

from kvstore import Client, ClientConfig, PutOutcome, Unavailable
from kvstore.checksum import leaves
from kvstore.tools.node_process import NodeProcess
from node.config import NodeConfig
from node.server import Node

PAGE = 64 << 10
# A client in its own process. It holds pages 0 to 3 or has reserved pages 100 to 103, prints
# "ready", and runs the commands from stdin.
CHILD = """
import os, socket, sys
from kvstore import Client, ClientConfig, InvalidRequest, Namespace, opaque_layout
address, model, what = sys.argv[1:]
namespace = Namespace(model=model, layout=opaque_layout(65536))
keys = lambda first: [n.to_bytes(32, "big") for n in range(first, first + 4)]
client = Client(ClientConfig(address=address, wire="shm"))
held = what == "held"
context = client.open_get(namespace, keys(0)) if held else client.open_put(namespace, keys(100))
slots = context.__enter__()
print("ready", *slots.offsets, flush=True)
for line in sys.stdin:
    match line.split():
        case ["hangup"]:
            # As after close() with a thread still writing: the socket is shut, the process lives.
            slots._lease.connection._sock.shutdown(socket.SHUT_RDWR)
        case ["write", value]:
            for view in slots.pages:
                view[:] = bytes([int(value)]) * len(view)
        case ["same", value]:
            assert all(view == bytes([int(value)]) * len(view) for view in slots.pages)
        case ["lookup-in-fork"]:
            pid = os.fork()
            if pid == 0:
                try:
                    client.lookup(namespace, keys(0))
                except InvalidRequest as error:
                    os._exit(0 if "fork" in str(error) else 1)
                os._exit(2)
            assert os.waitpid(pid, 0)[1] == 0
        case ["lookup"]:
            assert client.lookup(namespace, keys(0)).prefix_pages == 4
            assert client.stats.connects == 1
        case ["fork"]:
            if os.fork() == 0:
                sys.stdin.close()
                maps = open("/proc/self/maps").read()
                os.write(1, b"mapped\\n" if "kvstore-arena" in maps else b"unmapped\\n")
                while True:
                    os.read(int(os.environ["WAIT_FD"]), 1) or os._exit(0)
    os.write(1, b"done\\n")  # written at once, without buffering
"""


class Child:
    """A client process that holds or has reserved slots."""

    def __init__(self, node: Node, pages: Pages, what: str) -> None:
        wait_fd, self._let_go = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHILD,
                f"127.0.0.1:{node.grpc.port}",
                pages.namespace.model,
                what,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[wait_fd],
            env={**os.environ, "WAIT_FD": str(wait_fd)},
        )
        os.close(wait_fd)
        self.offsets = [int(word) for word in self.expect("ready")]

    def expect(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        first, *rest = self.process.stdout.readline().split() or [""]
        assert first == word
        return rest

    def send(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def do(self, what: str) -> None:
        self.send(what)
        self.expect("done")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        os.close(self._let_go)  # ends forked children
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name, PAGE)


@pytest.fixture
def small(start_node: StartNode) -> Node:
    """Start a node with room for 64 pages."""
    return start_node(ram_nbytes=4 << 20, stall_s=2.0)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(node: Node, pages: Pages, what: str) -> Child:
        children.append(Child(node, pages, what))
        return children[-1]

    yield start
    for child in children:
        child.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what}"
        threading.Event().wait(0.005)


def orphan_pages(node: Node) -> int:
    assert node.shm is not None
    return int(node.shm.status().orphan_page_count)


def refill(client: Client, pages: Pages, first: int = 1000) -> None:
    """Put three times as many pages as fit."""
    for number in range(first, first + 192, 8):
        pages.put(client, pages.keys(*range(number, number + 8)))


def owned(node: Node, pages: Pages) -> set[int]:
    """Return the offsets of all visible pages."""
    return {
        page.offset
        for page in node.tier.namespace(pages.namespace.digest).pages.values()
        if page.checksum
    }


@pytest.mark.parametrize("what", ["held", "reserved"])
def test_slots_of_a_killed_client_are_free_when_its_process_ends(
    small: Node, connect: Connect, pages: Pages, spawn: Callable[..., Child], what: str
) -> None:
    client = connect(small)
    pages.put(client, pages.keys(0, 1, 2, 3))
    child = spawn(small, pages, what)
    assert (small.tier.held_count, small.tier.writing_count) == (
        (4, 0) if what == "held" else (0, 4)
    )
    client.remove(pages.namespace, pages.keys(0, 1, 2, 3))
    refill(client, pages)
    assert not owned(small, pages) & set(child.offsets)
    child.kill()
    settle(small, sessions=None)
    assert orphan_pages(small) == 0
    assert client.lookup(pages.namespace, pages.keys(100)).prefix_pages == 0
    assert pages.put(client, pages.keys(100, 101)) == [PutOutcome.STORED] * 2


def test_lost_connection_keeps_slots_while_its_process_lives(
    small: Node, connect: Connect, pages: Pages, spawn: Callable[..., Child]
) -> None:
    client = connect(small)
    child = spawn(small, pages, "reserved")
    child.do("hangup")
    wait_for(lambda: orphan_pages(small) == 4, "the orphans")
    status = client.node_status().shm
    assert (status.orphan_count, status.orphan_page_count) == (1, 4)
    refill(client, pages)
    assert not owned(small, pages) & set(child.offsets)
    child.do("write 7")  # long after the hang-up
    numbers = range(1000 + 192 - 32, 1000 + 192)
    assert pages.get(client, pages.keys(*numbers)) == [True] * 32  # compares every byte
    child.do("same 7")
    child.kill()
    settle(small, sessions=None)
    wait_for(lambda: orphan_pages(small) == 0, "the end of the orphans")
    refill(client, pages, first=2000)
    assert owned(small, pages) & set(child.offsets)


def test_stopped_process_keeps_the_pages_it_reads(
    small: Node, connect: Connect, pages: Pages, spawn: Callable[..., Child]
) -> None:
    client = connect(small)
    pages.put(client, pages.keys(0, 1, 2, 3))
    child = spawn(small, pages, "held")
    child.process.send_signal(signal.SIGSTOP)
    client.remove(pages.namespace, pages.keys(0, 1, 2, 3))
    refill(client, pages)
    threading.Event().wait(2.2)  # longer than stall_s
    for number, offset in enumerate(child.offsets):
        assert small.arena.view(offset, PAGE) == pages.content(pages.keys(number)[0])
    child.kill()
    settle(small, sessions=None)


def test_forked_child_keeps_no_slots_of_a_dead_parent(
    small: Node, connect: Connect, pages: Pages, spawn: Callable[..., Child]
) -> None:
    """The child has the parent's socket open, but not its map of the arena, so it cannot write."""
    child = spawn(small, pages, "reserved")
    child.send("fork")
    assert sorted(child.process.stdout.readline() for _ in range(2)) == ["done\n", "unmapped\n"]
    child.kill()
    settle(small, sessions=None)


def test_forked_child_does_not_use_the_clients_connections(
    small: Node, connect: Connect, pages: Pages, spawn: Callable[..., Child]
) -> None:
    """Two processes on one stream would take each other's answers. The end of the child ends
    nothing.
    """
    pages.put(connect(small), pages.keys(0, 1, 2, 3))
    child = spawn(small, pages, "held")
    child.do("lookup-in-fork")
    assert small.tier.held_count == 4
    child.do("lookup")


@pytest.fixture
def stopping_node() -> Iterator[Callable[..., Node]]:
    """Return a function that starts nodes which the test stops."""
    nodes: list[Node] = []

    def start(drain_s: float) -> Node:
        ports: dict[str, Any] = {"port": 0, "bulk_port": 0, "metrics_port": 0}
        nodes.append(
            Node(NodeConfig(host="127.0.0.1", ram_nbytes=16 << 20, drain_s=drain_s, **ports))
        )
        nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        if not node.service.draining:
            node.stop()


def test_draining_node_lets_a_writer_finish(
    stopping_node: Callable[..., Node], connect: Connect, pages: Pages
) -> None:
    node = stopping_node(drain_s=20.0)
    client = connect(node, "shm")
    (key,) = pages.keys(1)
    with client.open_put(pages.namespace, [key]) as slots:
        stopping = threading.Thread(target=node.stop)
        stopping.start()
        wait_for(lambda: node.service.draining, "the drain")
        slots.pages[0][:] = pages.content(key)
        slots.commit([leaves(slots.arena.memory[slots.offsets[0] :][:PAGE])])
    stopping.join()
    assert node.tier.visible_count == 1
    with pytest.raises(Unavailable):
        client.lookup(pages.namespace, [key])


def test_node_stops_while_clients_keep_slots(
    stopping_node: Callable[..., Node], connect: Connect, pages: Pages, spawn: Callable[..., Child]
) -> None:
    """The kept slots go to no other client during the drain, and their memory stays mapped."""
    node = stopping_node(drain_s=0.1)
    pages.put(connect(node), pages.keys(0, 1, 2, 3))
    spawn(node, pages, "held")
    orphan = spawn(node, pages, "reserved")
    orphan.do("hangup")
    wait_for(lambda: orphan_pages(node) == 4, "the orphans")
    node.stop()
    assert (node.tier.held_count, node.tier.writing_count) == (4, 4)
    orphan.do("write 7")
    orphan.do("same 7")
    assert node.shm is not None
    assert not os.path.exists(node.shm.path)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(FileNotFoundError):
        late.connect(node.shm.path)


@pytest.mark.parametrize("what", ["held", "reserved"])
def test_delayed_client_still_releases_its_slots(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its thread paused for longer than a release may take. Otherwise the node would keep the
    slots.
    """
    monkeypatch.setattr("kvstore.transports.mapped_memory.RELEASE_S", -1.0)
    client, keys = connect(node, "shm"), pages.keys(0, 1)
    pages.put(client, keys)
    if what == "held":
        with client.open_get(pages.namespace, keys) as held:
            assert held.hits == [True, True]
    else:
        with client.open_put(pages.namespace, pages.keys(2, 3)) as slots:
            assert len(slots.pages) == 2
    settle(node, sessions=None)
    assert client.stats.connects == 1


def test_memory_of_a_dead_node_is_given_back_without_a_garbage_collection() -> None:
    """Regression: references in circles kept it, as long as no other node was there."""
    pages = Pages("dead", PAGE)
    with (
        NodeProcess("--ram-bytes", "16MiB") as node,
        Client(ClientConfig(address=node.address, wire="shm", timeout_s=30.0)) as client,
    ):
        pages.put(client, pages.keys(1))
        with client.open_get(pages.namespace, pages.keys(1)) as slots:
            arena = weakref.ref(slots.arena)
        del slots
        node.kill()
        gc.disable()
        try:
            with contextlib.suppress(Unavailable):
                client.lookup(pages.namespace, pages.keys(1))
            wait_until(lambda: arena() is None)
        finally:
            gc.enable()
