"""Nodes in this process, so that `check()` and the sessions can be looked at, and raw bulk connections
that can break every rule."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, ClientConfig, Exhausted, Namespace, PutOutcome, opaque_layout
from kvstore.measure.content import page_content
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.frames import FrameSocket
from node.config import NodeConfig
from node.ram.inventory import Inventory, PageInfo
from node.ram.namespace import Namespaces
from node.ram.page import Page
from node.ram.pinning import Pinning
from node.ram.reservation import Reservation
from node.ram.tier import RamTier
from node.server import Node
from node.slots import SlotAllocator

sys.path.append(str(Path(__file__).parent))  # modules of this folder are found by its tests
StartNode = Callable[..., Node]
SMALL: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "ram_nbytes": 16 << 20,
    "extent_nbytes": 1 << 20,
    "stall_s": 0.8,  # the shortest that a machine with other things to do bears
    "drain_s": 0.3,
    "log_level": "ERROR",
}


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    """Starts a small node in this process; keyword arguments are NodeConfig fields. At the end of the
    module each must be consistent, hold nothing, and stop."""
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(NodeConfig(**{**SMALL, **settings}))
        node.start()
        nodes.append(node)
        return node

    yield start
    try:
        for node in nodes:
            settle(node, sessions=None)
    finally:
        stopping = [threading.Thread(target=node.stop) for node in nodes]  # half a second each
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """One node for the tests of a module that leave it as it was. Use a namespace of your own."""
    return start_node()


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[..., None]:
    return settle


def settle(node: Node, sessions: int | None = 0) -> None:
    """Waits until nothing is being read or written and `sessions` sessions are left (None: any
    number); then nothing may have leaked. Idle bulk connections are sessions too."""

    def quiet() -> bool:
        tier = node.tier
        return not (tier.held_count or tier.writing_count) and sessions in (None, node.sessions.count)

    end = time.monotonic() + 10.0
    while not quiet() and time.monotonic() < end:
        threading.Event().wait(0.01)
    tier = node.tier
    assert quiet(), f"{tier.held_count=} {tier.writing_count=} {node.sessions.count=}, wanted {sessions}"
    assert node.check() == []


class Pages:
    """Pages of one namespace whose bytes follow from their keys."""

    def __init__(self, name: str, page_nbytes: int = 4096, **fields: Any) -> None:
        self.namespace = Namespace(model=name, layout=opaque_layout(page_nbytes), **fields)
        self.nbytes = page_nbytes

    def key(self, number: int) -> bytes:
        return number.to_bytes(32, "big")

    def keys(self, *numbers: int) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def content(self, key: bytes) -> bytes:
        return page_content(self.namespace.digest, key, self.nbytes)

    def put(self, client: Client, keys: Sequence[bytes]) -> list[PutOutcome]:
        return client.put(self.namespace, keys, [self.content(key) for key in keys])

    def get(self, client: Client, keys: Sequence[bytes]) -> list[bool]:
        """Reads and compares every byte of every hit."""
        buffers = [bytearray(self.nbytes) for _ in keys]
        hits = client.get(self.namespace, keys, buffers)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            assert not hit or buffer == self.content(key), f"wrong bytes under {key.hex()}"
        return hits


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name)


@pytest.fixture
def make_pages() -> type[Pages]:
    return Pages


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Clients of a node, closed at the end."""
    clients: list[Client] = []

    def to(node: Node, wire: str = "bulk", **settings: Any) -> Client:
        address = f"127.0.0.1:{node.grpc.port}"
        connect_s = min(5.0, settings.get("timeout_s", 5.0))  # a starved machine needs more than two
        client = Client(ClientConfig(**{"address": address, "wire": wire, "connect_timeout_s": connect_s, **settings}))
        clients.append(client)
        return client

    yield to
    for client in clients:
        client.close()


class Raw(FrameSocket):
    """A bulk connection that sends whatever it is told to."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        super().__init__(self.sock)
        self.arm(5.0)

    def request(self, **op: Any) -> None:
        self.send_frame(pb.BulkRequest(**op).SerializeToString())

    def reply(self) -> tuple[pb.BulkReply, int]:
        header, payload_nbytes = self.recv_frame(1 << 22)
        return pb.BulkReply.FromString(header), payload_nbytes

    def ask(self, **op: Any) -> pb.BulkReply:
        self.request(**op)
        return self.reply()[0]

    def ending(self) -> pb.Error | None:
        """The one error that the node says before it closes the connection, or None if it just closed."""
        try:
            reply = self.reply()[0]
        except ConnectionError:
            return None
        assert reply.WhichOneof("op") == "error", reply
        with pytest.raises(ConnectionError):
            self.reply()
        return reply.error


@pytest.fixture
def raw() -> Iterator[Callable[[Node | int], Raw]]:
    """Connects to a node, or to a bulk port."""
    connections: list[Raw] = []

    def to(where: Node | int) -> Raw:
        connections.append(Raw(where.bulk.port if isinstance(where, Node) else where))
        return connections[-1]

    yield to
    for connection in connections:
        connection.close()


class Bystander:
    """A client that does verified puts and gets of its own while others misbehave.

    `evicting`: the node is too small for all, so that a page may be gone again; never wrong."""

    def __init__(self, node: Node, evicting: bool = False) -> None:
        self._evicting = evicting
        self._pages = Pages("bystander")
        self._client = Client(ClientConfig(address=f"127.0.0.1:{node.grpc.port}", wire="bulk"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.005):
                keys = self._pages.keys(*range(self.rounds, self.rounds + 4))
                try:
                    outcomes = self._pages.put(self._client, keys)
                except Exhausted:
                    outcomes = [PutOutcome.FULL]
                hits = self._pages.get(self._client, keys)
                assert self._evicting or (PutOutcome.FULL not in outcomes and all(hits))
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 -- raised again in the test's thread
            self.error = error

    def __enter__(self) -> "Bystander":
        self._thread.start()
        self._wait_rounds(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._wait_rounds(self.rounds + 2)
        self._stop.set()
        self._thread.join()
        self._client.close()
        if self.error:
            raise self.error
        assert self._client.stats.connects == 1, "the bystander lost its connection"

    def _wait_rounds(self, count: int) -> None:
        end = time.monotonic() + 10.0
        while self.rounds < count and self._thread.is_alive():
            assert time.monotonic() < end, "the bystander is stuck"
            self._stop.wait(0.002)


@pytest.fixture
def bystander() -> type[Bystander]:
    return Bystander


class Sandbox:
    """A RAM tier with a bytearray for its arena and a clock that is moved by hand."""

    def __init__(self, ram_nbytes: int, extent_nbytes: int) -> None:
        self.arena = bytearray(ram_nbytes)
        self.now_ms = 1
        self.slots = SlotAllocator(ram_nbytes, extent_nbytes)
        self.tier = RamTier(Namespaces(64, extent_nbytes), self.slots, self._copy, lambda: self.now_ms)

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        self.arena[target : target + nbytes] = self.arena[source : source + nbytes]

    def open(self, name: str, page_nbytes: int) -> Pages:
        pages = Pages(name, page_nbytes)
        self.tier.open_namespace(pages.namespace, pages.namespace.digest)
        return pages

    def reserve(self, pages: Pages, keys: Sequence[bytes]) -> Reservation:
        return self.tier.reserve(pages.namespace.digest, keys, pages.nbytes)

    def write(self, pages: Pages, reservation: Reservation) -> None:
        for page in reservation.pages:
            self.arena[page.offset : page.offset + pages.nbytes] = pages.content(page.prefix_hash)

    def hold(self, pages: Pages, keys: Sequence[bytes]) -> list[Page | None]:
        """Held as a reader holds them, which is a use only later."""
        tier = self.tier
        return tier._in_turns(tier._hold_all(tier.namespace(pages.namespace.digest), keys, prefix_only=False)).pages

    def commit(self, reservation: Reservation) -> int:
        return self.tier.commit(reservation, [b"checksum"] * len(reservation.pages))

    def put(self, pages: Pages, keys: Sequence[bytes]) -> list[int]:
        reservation = self.reserve(pages, keys)
        self.write(pages, reservation)
        self.commit(reservation)
        return reservation.verdicts

    def acquire(self, pages: Pages, keys: Sequence[bytes]) -> list[Page | None]:
        return self.tier.acquire(pages.namespace.digest, keys, False, pages.nbytes).pages

    def intact(self, pages: Pages, page: Page) -> bool:
        return self.arena[page.offset : page.offset + pages.nbytes] == pages.content(page.prefix_hash)

    def get(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        """Reads and compares every byte of every hit."""
        found = self.acquire(pages, keys)
        held = [page for page in found if page is not None]
        assert all(self.intact(pages, page) for page in held)
        self.tier.release(held)
        return [page is not None for page in found]

    def present(self, pages: Pages, keys: Sequence[bytes]) -> set[bytes]:
        """Those that are visible; not a use."""
        return {info.prefix_hash for info in self.stat(pages, keys) if info.present}

    def stat(self, pages: Pages, keys: Sequence[bytes]) -> list[PageInfo]:
        return Inventory(self.tier).stat(pages.namespace.digest, keys)

    def pin(self, pages: Pages, keys: Sequence[bytes], ttl_ms: int = 1 << 30) -> list[bool]:
        return Pinning(self.tier).pin(pages.namespace.digest, keys, ttl_ms)

    def unpin(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return Pinning(self.tier).unpin(pages.namespace.digest, keys)

    def remove(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.remove(pages.namespace.digest, keys)


@pytest.fixture
def sandbox() -> type[Sandbox]:
    return Sandbox
