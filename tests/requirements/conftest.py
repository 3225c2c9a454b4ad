"""Requirements end to end: real clients over real sockets. A node runs in this process where a test must
get at its memory; `Chain` is a namespace whose page contents follow from their keys."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore import Client, ClientConfig, Namespace, PutOutcome, opaque_layout
from kvstore.tools.trace import page_content
from node.config import NodeConfig
from node.server import Node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start_node() -> Iterator[Callable[..., Node]]:
    """A node in this process; keyword arguments are NodeConfig fields. At the end of the module all must
    be consistent; they stop together, because each takes half a second."""
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        ports = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
        node = Node(
            NodeConfig(**{**ports, "ram_nbytes": 1 << 20, "extent_nbytes": 64 << 10, "drain_s": 0.5, **settings})
        )
        node.start()
        nodes.append(node)
        return node

    yield start
    violations = [violation for node in nodes for violation in node.check()]
    stopping = [threading.Thread(target=node.stop) for node in nodes]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()
    assert violations == []


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def to(where: Any, wire: str = "bulk", **settings: Any) -> Client:
        address = f"127.0.0.1:{where.grpc.port}" if isinstance(where, Node) else where
        calls_s = settings.get("timeout_s", 30.0)  # on a starved machine a call takes longer than five seconds
        patience = {"timeout_s": calls_s, "connect_timeout_s": min(20.0, calls_s)}
        clients.append(Client(ClientConfig(**{"address": address, "wire": wire, **patience, **settings})))
        return clients[-1]

    yield to
    for client in clients:
        client.close()


class Chain:
    """Pages of one namespace, by number."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.nbytes = namespace.layout.page_nbytes

    def keys(self, *numbers: int) -> list[bytes]:
        return [number.to_bytes(32, "big") for number in numbers]

    def content(self, key: bytes) -> bytes:
        return page_content(self.namespace.digest, key, self.nbytes)

    def put(self, client: Client, keys: Sequence[bytes]) -> list[PutOutcome]:
        return client.put(self.namespace, keys, [self.content(key) for key in keys])

    def get(self, client: Client, keys: Sequence[bytes], prefix: bool = False) -> list[bool]:
        """Every byte of every hit is compared."""
        buffers = [bytearray(self.nbytes) for _ in keys]
        hits = client.get(self.namespace, keys, buffers, prefix)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            assert not hit or buffer == self.content(key), f"wrong bytes under {key.hex()}"
        return hits


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> Chain:
    return Chain(Namespace(request.node.name, opaque_layout(4096)))


@pytest.fixture
def make_chain() -> Callable[..., Chain]:
    return lambda name, page_nbytes=4096, **fields: Chain(Namespace(name, opaque_layout(page_nbytes), **fields))
