"""The bridge: what routers index from its bytes by their own rules is what the node lists.

Random puts, evictions, removals and restarts, with routers that lose batches and that come late.
"""

import random

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, of the extra `events`")
pytest.importorskip("msgpack", reason="needs msgpack, of the extra `events`")

import msgpack
from disk_nodes import Nodes, Pages
from ports import free_port
from replayed import listed
from routed_store import Bridged, Dynamo, Llmd
from router_rules import LlmdIndex

from kvstore import Client, ClientConfig
from kvstore.bridge import bridge as bridge_module
from kvstore.bridge import publisher as module
from kvstore.keys import block_part
from node.feed import feed as feed_module

KEYS = 60
STEPS = 100


class Life:
    """A node with one model of two ranks, a bridge, and routers."""

    def __init__(self, nodes: Nodes, rng: random.Random) -> None:
        self.nodes, self.rng, self.port = nodes, rng, free_port()
        self.parts = [Pages("ranks", 8192, tp_rank=rank, tp_size=2) for rank in range(2)]
        self.keys = self.parts[0].keys(*range(KEYS))
        self.tokens_of = {key: [number] * 4 for number, key in enumerate(self.keys)}
        self.node = nodes.start(port=self.port)
        self.client = nodes.connect(self.node)
        self.reader = Client(ClientConfig(f"127.0.0.1:{self.port}", timeout_s=20.0))
        self.bridged = Bridged(self.reader, "ranks")
        self.llmd: list[Llmd] = []
        self.dynamo: list[Dynamo] = []
        self.join()

    def join(self) -> None:
        self.llmd.append(self.bridged.llmd(self.tokens_of))
        self.dynamo.append(self.bridged.dynamo())

    def some(self) -> list[bytes]:
        return self.rng.sample(self.keys, self.rng.randint(1, 6))

    def put(self) -> None:
        keys = self.some()
        for part in self.parts if self.rng.random() < 0.9 else self.parts[:1]:
            part.put(self.client, keys)

    def remove(self) -> None:
        self.client.remove(self.rng.choice(self.parts).namespace, self.some())

    def restart(self) -> None:
        self.node = self.nodes.restart(self.node, port=self.port)
        self.client = self.nodes.connect(self.node)

    def lose(self) -> None:
        for router in self.bridged.routers:
            router.lose = self.rng.choice((0, 1, 2))
        self.put()

    def step(self) -> None:
        self.rng.choices((self.put, self.remove, self.restart, self.lose), (50, 10, 0.5, 2))[0]()
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            self.bridged.bridge.take(next(self.bridged.feed))
            self.bridged.tend()

    def compare(self) -> None:
        for router in self.bridged.routers:
            router.lose = 0
        self.join()  # its subscription brings a snapshot for all
        model = block_part(self.parts[0].namespace).id

        def equal() -> bool:
            truth = listed(self.client, [part.namespace for part in self.parts]).get(model, set())
            stored = [router.stored for router in self.llmd]
            stored += [router.stored(self.keys) for router in self.dynamo]
            return all(one == truth for one in stored)

        self.bridged.until(equal)
        for routers in (self.llmd, self.dynamo):
            if len(routers) > 2:
                self.bridged.routers.remove(routers[0])
                routers.pop(0).socket.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_routers_index_what_the_node_lists(
    nodes: Nodes, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 0.05)
    monkeypatch.setattr(module, "HASHES_AT_ONCE", 8)
    monkeypatch.setattr(module, "BATCHES_MAX", 50)
    monkeypatch.setattr(feed_module, "GATHER_S", 0.01)
    monkeypatch.setattr(feed_module, "TICK_S", 0.01)
    life = Life(nodes, random.Random(seed))
    try:
        for step in range(STEPS):
            life.step()
            if step % 20 == 0:
                life.compare()
        life.restart()
        life.compare()
        # A snapshot for the newest subscribers may be due, and begins another history
        monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 3600.0)
        # Who asks for the buffer gets a whole history: as llm-d's router when it connects
        index = LlmdIndex(4)
        index._request_keys = dict(life.llmd[-1].index._request_keys)
        batches = life.bridged.replayed(0)
        numbers = [number for _, number, _ in batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for topic, _, batch in batches:
            assert topic == b"kv@pool:store@ranks"
            index.apply("pool:store", msgpack.unpackb(batch)[1])
        assert index.held_by("pool:store") == life.llmd[-1].stored
        assert [n for _, n, _ in life.bridged.replayed(numbers[-1])] == numbers[-1:]
        assert life.bridged.replayed(numbers[-1] + 1) == []
    finally:
        life.bridged.close()
        life.reader.close()


def test_node_that_is_away_has_nothing(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "AWAY_S", 0.2)
    monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 0.05)
    life = Life(nodes, random.Random(0))
    try:
        for part in life.parts:
            part.put(life.client, life.keys[:5], durable=True)
        llmd, dynamo = life.llmd[0], life.dynamo[0]
        stored = {*life.keys[:5]}
        life.bridged.until(lambda: llmd.stored == dynamo.stored(life.keys) == stored)
        life.nodes.stop(life.node)
        life.bridged.until(lambda: not llmd.stored and not dynamo.stored(life.keys))
        life.join()  # gets nothing, too
        life.node = life.nodes.start(port=life.port)
        life.bridged.until(lambda: llmd.stored == dynamo.stored(life.keys) == stored)
        life.bridged.until(lambda: life.llmd[1].stored == stored)
        assert life.bridged.said.count("away") == life.bridged.said.count("back") == 1
    finally:
        life.bridged.close()
        life.reader.close()
