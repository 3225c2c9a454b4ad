"""The feed of a node with a disk: a replay of it equals the list of the pages, whatever happened.

Random puts, evictions, expiries, removals, erasures, damages, restarts and failures of the disk,
with readers that are fast, slow or new. For a longer run set KVSTORE_MODEL_STEPS=20000.
"""

import contextlib
import itertools
import os
import random
import threading

import pytest
from disk_nodes import Clock, Nodes, Pages, settle
from local_nodes import connect
from ports import free_port
from replayed import Reader, listed
from told_blocks import ToldBlocks

from kvstore import Client, ClientConfig, Exhausted
from kvstore.keys import block_part, part_of
from node.feed import change_log
from node.feed import feed as feed_module
from node.memory import changes

STEPS = int(os.environ.get("KVSTORE_MODEL_STEPS") or 150)
KEYS = 60
GROUPS = [part_of("of two groups", group, 2) for group in range(2)]


class Life:
    """A node, its namespaces, and readers of its feed."""

    def __init__(self, nodes: Nodes, rng: random.Random) -> None:
        self.nodes, self.rng, self.clock = nodes, rng, Clock()
        self.pages = [
            *(Pages("ranks", 8192, tp_rank=rank, tp_size=2) for rank in range(2)),
            *(
                Pages("groups", nbytes, part=part)
                for nbytes, part in zip((4096, 8192), GROUPS, strict=True)
            ),
            Pages("alone", 8192, tenant="other"),
        ]
        self.readers = [Reader() for _ in range(3)]
        self.done: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        self.node = self.nodes.start()
        self.clock.govern(self.node)
        self.client = self.nodes.connect(self.node)

    def some(self) -> tuple[Pages, list[bytes]]:
        pages = self.rng.choice(self.pages)
        numbers = self.rng.sample(range(KEYS), self.rng.randint(1, 6))
        return pages, pages.keys(*numbers)

    def put(self) -> None:
        pages, keys = self.some()
        same = [other for other in self.pages if other.namespace.model == pages.namespace.model]
        ttl_s = self.rng.choice((0.0, 0.0, 5.0, 60.0))
        for part in same if self.rng.random() < 0.8 else [pages]:
            part.put(self.client, keys, ttl_s=ttl_s)

    def get(self) -> None:
        pages, keys = self.some()
        pages.get(self.client, keys)

    def remove(self) -> None:
        pages, keys = self.some()
        self.client.remove(pages.namespace, keys)

    def remove_namespace(self) -> None:
        self.client.remove_namespace(self.rng.choice(self.pages).namespace)

    def erase(self) -> None:
        with contextlib.suppress(Exhausted):  # the disk has stopped
            self.client.forget("other")

    def wait(self) -> None:
        self.clock.now_s += self.rng.choice((1, 3, 30))

    def drop_from_ram(self) -> None:
        pages = self.rng.choice(self.pages)
        if any(space.digest == pages.digest for space, _ in self.client.namespaces()):
            pages.drop_from_ram(self.node)

    def damage(self) -> None:
        pages, keys = self.some()
        with self.node.tier.lock:
            held = {index.digest: index for index in self.node.tier.namespaces.all()}
            index = held.get(pages.digest)
            there = index is not None and self.node.tier.live(index, keys[0]) is not None
        if there:
            pages.flip(self.node, keys[0])
            self.client.verify(pages.namespace, keys[:1])

    def scrub(self) -> None:
        self.nodes.layer.flip = True
        try:
            with contextlib.suppress(Exhausted):  # as above
                self.client.scrub()
        finally:
            self.nodes.layer.flip = False

    def stop_disk(self) -> None:
        assert self.node.disk is not None
        self.node.disk.stop_after_error("a test")
        if self.rng.random() < 0.7:
            self.client.recover()

    def recover(self) -> None:
        assert self.node.disk is not None
        if self.node.disk.stop_reason:
            self.client.recover()

    def restart(self) -> None:
        self.node = self.nodes.restart(self.node)
        self.clock.govern(self.node)
        self.client = self.nodes.connect(self.node)

    def step(self) -> None:
        operation = self.rng.choices(
            (
                *(self.put, self.get, self.remove, self.remove_namespace, self.erase, self.wait),
                *(self.drop_from_ram, self.damage, self.scrub, self.stop_disk, self.recover),
                self.restart,
            ),
            (40, 20, 8, 1, 0.5, 3, 3, 2, 0.3, 0.5, 2, 0.5),
        )[0]
        operation()
        self.done[operation.__name__] = self.done.get(operation.__name__, 0) + 1
        for reader, often in zip(self.readers, (0.8, 0.2, 0.02), strict=True):
            if self.rng.random() < often:
                reader.poll(self.node)
        if self.rng.random() < 0.05:
            self.readers[2] = Reader()

    def compare(self) -> None:
        settle(self.node)
        spaces = [pages.namespace for pages in self.pages]
        truth = listed(self.client, spaces)
        for number, reader in enumerate(self.readers):
            assert reader.catch_up(self.node) == truth, f"reader {number}"


@pytest.mark.parametrize("seed", [1, 2])
def test_replay_equals_the_list(nodes: Nodes, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small, so that readers fall behind, and snapshots have several parts
    monkeypatch.setattr(changes, "ENTRIES", 64)
    monkeypatch.setattr(change_log, "KEYS_MAX", 128)
    monkeypatch.setattr(change_log, "CHANGE_KEYS", 8)
    monkeypatch.setattr(feed_module, "PART_KEYS", 8)
    monkeypatch.setattr(feed_module, "REPLY_KEYS", 16)
    monkeypatch.setattr(feed_module, "LOCKED_KEYS", 3)
    life = Life(nodes, random.Random(seed))
    for step in range(STEPS):
        life.step()
        if step % 15 == 0:
            life.compare()
    life.compare()
    assert all(reader.begins for reader in life.readers)


def test_reader_reconnects_to_a_restarted_node(nodes: Nodes) -> None:
    port, pages = free_port(), Pages("restarted")
    node = nodes.start(port=port)
    pages.put(nodes.connect(node), pages.keys(1, 2), durable=True)
    with Client(ClientConfig(f"127.0.0.1:{port}", timeout_s=20.0)) as client:
        told = ToldBlocks(client.feed(idle_s=0.2))
        told.until_kind("ready")
        nodes.stop(node)
        told.until_kind("away")
        node = nodes.start(port=port)
        pages.put(nodes.connect(node), pages.keys(3))
        told.until(lambda: told.kinds.count("reset") == 2)
        told.until(lambda: told.of(pages.namespace) == {*pages.keys(1, 2, 3)})


def test_expired_blocks_are_removed_though_nobody_asks_for_them(nodes: Nodes) -> None:
    node, clock, pages, reader = nodes.start(), Clock(), Pages("expiring"), Reader()
    clock.govern(node)
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), ttl_s=5.0)
    pages.put(client, pages.keys(2))
    model = block_part(pages.namespace).id
    assert reader.catch_up(node) == {model: {*pages.keys(1, 2)}}
    clock.now_s += 6
    assert reader.catch_up(node) == {model: {*pages.keys(2)}}
    assert reader.begins == 1


def test_page_whose_last_second_ends_while_it_is_looked_up_is_not_told_as_endless(
    nodes: Nodes,
) -> None:
    """Regression: no time left means without end."""
    node, clock, pages = nodes.start(), Clock(), Pages("ending")
    clock.govern(node)
    pages.put(nodes.connect(node), pages.keys(1), ttl_s=5.0, durable=True)
    assert node.disk is not None
    for ticks in (2, 1, 0):
        last, over = clock.now_s + 4, clock.now_s + 5
        seconds = itertools.chain(itertools.repeat(last, ticks), itertools.repeat(over))
        node.disk._clock_s = seconds.__next__
        info = node.disk.info(pages.digest, pages.key(1))
        assert info is None or info.ttl_s > 0
    assert info is None


def test_page_that_moves_behind_a_snapshot_is_told(nodes: Nodes) -> None:
    node, pages, reader = nodes.start(), Pages("moving"), Reader()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1, 2), durable=True)
    pages.drop_from_ram(node)
    pages.get(client, pages.keys(1))
    assert reader.poll(node).begin  # the pages in RAM; those on disk come next
    pages.get(client, pages.keys(2))
    settle(node)
    assert node.disk is not None
    node.disk.remove(pages.digest, pages.keys(2))
    assert reader.catch_up(node) == {block_part(pages.namespace).id: {*pages.keys(1, 2)}}


def test_page_that_leaves_the_disk_while_it_is_loaded_is_told(nodes: Nodes) -> None:
    """It is told as removed while it is in neither tier, and then as stored."""
    node, pages, reader = nodes.start(), Pages("loading"), Reader()
    client = nodes.connect(node)
    pages.put(client, pages.keys(1), durable=True)
    pages.drop_from_ram(node)
    model = block_part(pages.namespace).id
    assert reader.catch_up(node) == {model: {*pages.keys(1)}}
    nodes.layer.reading.clear()
    get = threading.Thread(target=pages.get, args=(client, pages.keys(1)))
    get.start()
    assert nodes.layer.waiting.acquire(timeout=60.0)
    assert node.disk is not None
    node.disk.remove(pages.digest, pages.keys(1))
    assert reader.catch_up(node) == {}
    nodes.layer.reading.set()
    get.join()
    settle(node)
    assert reader.catch_up(node) == listed(client, [pages.namespace])


def test_feed_goes_on_when_its_node_comes_back_in_a_cluster(nodes: Nodes) -> None:
    port, pages = free_port(), Pages("a node alone", 8192)
    alone = nodes.start(port=port)
    with connect(f"127.0.0.1:{port}", backoff_s_max=0.1) as reader:
        told = ToldBlocks(reader.feed(idle_s=0.2))
        pages.put(nodes.connect(alone), pages.keys(0), durable=True)
        told.until(lambda: told.of(pages.namespace) == {*pages.keys(0)})
        fleet = f"static:fleet/n0=127.0.0.1:{port}"
        member = nodes.restart(alone, port=port, cluster=fleet, member="n0")
        pages.put(nodes.connect(member), pages.keys(1))
        told.until(lambda: told.of(pages.namespace) == {*pages.keys(0, 1)})
        assert told.kinds.count("reset") == 2
