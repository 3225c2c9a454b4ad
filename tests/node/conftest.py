"""Nodes in this process, so that `check()` and the sessions can be looked at, and raw bulk connections
that can break every rule."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fleet import MB, renewed
from fleets import SMALL
from fleets import etcd as etcd
from fleets import fleet as fleet
from known_pages import Pages
from visits import nothing_is_left_at_the_console as nothing_is_left_at_the_console

from kvstore import Client, ClientConfig, Exhausted, PutOutcome
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from node.config import NodeConfig
from node.memory.inventory import Inventory, PageInfo
from node.memory.page import Namespaces, Page, Reservation
from node.memory.tenant_usage import Limits
from node.memory.tier import RamTier
from node.server import Node
from node.slab import SlotAllocator

StartNode = Callable[..., Node]
STALL_S = 0.8  # where clients stall on purpose: the shortest that a machine with other things to do bears


@pytest.fixture(scope="module")
def start_node() -> Iterator[StartNode]:
    """Starts a small node in this process; keyword arguments are NodeConfig fields. At the end of the
    module each must be consistent, hold nothing, and stop."""
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(NodeConfig(**{**SMALL, **settings}))
        node.peers.sweeper.settle_s = 1e6  # a test that wants a sweep asks for it
        node.start()
        nodes.append(node)
        return node

    yield start
    try:
        for node in nodes:
            leave_cluster(node)
            settle(node, sessions=None)
    finally:
        stopping = [threading.Thread(target=node.stop) for node in nodes]  # half a second each
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()


def leave_cluster(node: Node) -> None:
    """It is the only member now: nothing waits to be handed to who is away."""
    view = node.membership.view
    if view is not None:
        left = [member for member in view.members if member.id == node.membership.member]
        node.membership.become(replace(view, number=view.number + 1000, members=tuple(left), replicas=1))


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """One node for the tests of a module that leave it as it was. Use a namespace of your own."""
    return start_node(stall_s=STALL_S)


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[..., None]:
    return settle


def settle(node: Node, sessions: int | None = 0) -> None:
    """Waits until nothing is being read or written and `sessions` sessions are left (None: any
    number); then nothing may have leaked. Idle bulk connections are sessions too."""

    def quiet() -> bool:
        tier = node.tier
        return not (tier.held_count or tier.writing_count) and sessions in (None, node.sessions.count)

    end = time.monotonic() + 60.0
    while not quiet() and time.monotonic() < end:
        threading.Event().wait(0.01)
    tier = node.tier
    assert quiet(), f"{tier.held_count=} {tier.writing_count=} {node.sessions.count=}, wanted {sessions}"
    assert node.check() == []


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
        calls_s = settings.get("timeout_s", 30.0)  # on a starved machine a call takes longer than five seconds
        patience = {"timeout_s": calls_s, "connect_timeout_s": min(20.0, calls_s)}
        client = Client(ClientConfig(**{"address": address, "wire": wire, **patience, **settings}))
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
        self.arm(60.0)

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
        address = f"127.0.0.1:{node.grpc.port}"
        self._client = Client(ClientConfig(address, wire="bulk", timeout_s=30.0, connect_timeout_s=20.0))
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
        end = time.monotonic() + 60.0
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
        self.tier = RamTier(Namespaces(64, extent_nbytes), self.slots, self._copy, self._zero, lambda: self.now_ms)

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        self.arena[target : target + nbytes] = self.arena[source : source + nbytes]

    def _zero(self, offset: int, nbytes: int) -> None:
        self.arena[offset : offset + nbytes] = bytes(nbytes)

    def open(self, name: str, page_nbytes: int, **fields: Any) -> Pages:
        pages = Pages(name, page_nbytes, **fields)
        self.tier.open_namespace(pages.namespace, pages.namespace.digest)
        return pages

    def limit(self, pins: int = 0, **quotas: int) -> None:
        """Bytes of RAM by tenant; the others have no quota. `pins`: of each of all."""
        self.tier.set_limits(lambda tenant: Limits(quotas.get(tenant, 0), pins), sum(quotas.values()))

    def nbytes(self, tenant: str) -> int:
        return self.tier.eviction.order.accounts.of(tenant).nbytes

    def reserve(self, pages: Pages, keys: Sequence[bytes]) -> Reservation:
        return self.tier.reserve(pages.namespace.digest, keys, pages.nbytes)

    def write(self, pages: Pages, reservation: Reservation) -> None:
        for page in reservation.pages:
            self.arena[page.offset : page.offset + pages.nbytes] = pages.content(page.prefix_hash)

    def hold(self, pages: Pages, keys: Sequence[bytes]) -> list[Page | None]:
        """Held as a reader holds them, which is a use only later."""
        tier = self.tier
        with tier.lock:
            found = tier.live_all(tier.namespace(pages.namespace.digest), keys)
            tier.hold_all([page for page in found if page is not None])
        return found

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
        return self.tier.pin(pages.namespace.digest, keys, ttl_ms)

    def unpin(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.unpin(pages.namespace.digest, keys)

    def remove(self, pages: Pages, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.remove(pages.namespace.digest, keys)


@pytest.fixture
def sandbox() -> type[Sandbox]:
    return Sandbox


@pytest.fixture(scope="module")
def three(start_node: Any) -> list[Node]:
    return [start_node() for _ in range(3)]


@pytest.fixture(scope="module")
def two(start_node: Any) -> list[Node]:
    """The first is small, and has room for few copies: 256 pages of 16 KiB, of which 64."""
    return [start_node(ram_nbytes=4 * MB, extent_nbytes=MB // 4, copies_share=0.25), start_node()]


@pytest.fixture
def cluster(three: list[Node]) -> list[Node]:
    return renewed(three)


@pytest.fixture
def pair(two: list[Node]) -> list[Node]:
    return renewed(two)


@pytest.fixture
def far(connect: Any) -> Callable[[Sequence[Node]], Client]:
    """A client that asks the owners themselves."""
    return lambda nodes: connect(nodes[-1], near="none", timeout_s=30.0)


@pytest.fixture
def near(connect: Any) -> Callable[[Sequence[Node]], Client]:
    """One that asks the first node for everything."""
    return lambda nodes: connect(nodes[0], "auto", near="n0", timeout_s=30.0)
