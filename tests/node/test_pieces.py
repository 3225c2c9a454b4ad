"""Pages scattered over pieces of the caller's memory, through several nodes or TLS.

Each page is whole, and a late worker writes into no piece.
"""

import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from authorities import of_client, of_node
from fleet import hang_gets, owners, tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import Client, PutOutcome
from kvstore.cli.authority import Authority
from kvstore.results import Keep
from node.server import Node

NUMBERS = range(24)


class InPieces(Pages):
    """Pages that each call cuts into random pieces."""

    def __init__(self, name: str, rng: random.Random, page_nbytes: int = 4096) -> None:
        super().__init__(name, page_nbytes)
        self._rng = rng

    def cut(self, page: bytes | bytearray) -> list[memoryview]:
        edges = [
            0,
            *sorted(self._rng.sample(range(1, len(page)), self._rng.randrange(1, 9))),
            len(page),
        ]
        return [memoryview(page)[start:end] for start, end in itertools.pairwise(edges)]

    def put(self, client: Client, keys: Sequence[bytes], **keep: Any) -> list[PutOutcome]:
        return client.put(
            self.namespace, keys, [self.cut(self.content(key)) for key in keys], Keep(**keep)
        )

    def get(self, client: Client, keys: Sequence[bytes], prefix: bool = False) -> list[bool]:
        buffers = [bytearray(self.nbytes) for _ in keys]
        hits = client.get(self.namespace, keys, [self.cut(buffer) for buffer in buffers], prefix)
        for key, hit, buffer in zip(keys, hits, buffers, strict=True):
            assert not hit or buffer == self.content(key), f"wrong bytes under {key.hex()}"
        return hits


@pytest.fixture
def cut(request: pytest.FixtureRequest, seed: int) -> InPieces:
    return InPieces(request.node.name, random.Random(seed))


@pytest.fixture
def trio(start_node: StartNode) -> list[Node]:
    nodes = [start_node() for _ in range(3)]
    tell(nodes, view_of(nodes, 2))
    return nodes


@pytest.mark.parametrize("wire", ["bulk", "grpc", "shm"])
@pytest.mark.parametrize("page_nbytes", [4096, 300_000])
def test_over_tls(
    start_node: StartNode,
    connect: Connect,
    ours: Authority,
    seed: int,
    request: pytest.FixtureRequest,
    wire: str,
    page_nbytes: int,
) -> None:
    pages = InPieces(request.node.name, random.Random(seed), page_nbytes)
    client, keys = (
        connect(start_node(**of_node(ours)), wire, **of_client(ours)),
        pages.keys(*range(9)),
    )
    assert pages.put(client, keys) == [PutOutcome.STORED] * 9
    assert pages.get(client, [*keys, pages.key(99)]) == [True] * 9 + [False]
    assert client.wire_name == wire


@pytest.mark.parametrize("how", [{}, {"near": "n0"}], ids=["spread", "near"])
def test_page_damaged_at_its_first_owner_comes_whole_from_the_next(
    trio: list[Node], connect: Connect, cut: InPieces, how: dict[str, Any]
) -> None:
    keys = cut.keys(*NUMBERS)
    assert cut.put(connect(trio[0]), keys) == [PutOutcome.STORED] * len(keys)
    wait_replicated(trio)
    routes = owners(view_of(trio, 2), cut.namespace, keys)
    damaged = next(key for key, route in zip(keys, routes, strict=True) if route[0] == "n1")
    cut.flip(trio[1], damaged)
    client = connect(trio[0], **how)
    assert cut.get(client, [*keys, cut.key(99)]) == [True] * len(keys) + [False]


def test_late_worker_writes_into_no_piece(
    trio: list[Node], connect: Connect, cut: InPieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = connect(trio[0], timeout_s=3.0), cut.keys(*NUMBERS)
    cut.put(client, keys)
    wait_replicated(trio)
    go = hang_gets(trio[1], monkeypatch)
    buffers = [bytearray(cut.nbytes) for _ in keys]
    assert client.get(cut.namespace, keys, [cut.cut(buffer) for buffer in buffers]) == [True] * len(
        keys
    )
    assert [bytes(buffer) for buffer in buffers] == [cut.content(key) for key in keys]
    for buffer in buffers:
        buffer[:] = bytes(cut.nbytes)
    go.set()  # now the slow node sends
    threading.Event().wait(0.5)
    assert not any(any(buffer) for buffer in buffers)
