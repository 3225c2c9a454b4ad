"""Random calls of many threads over shared memory: every byte read was written under its key.

Meanwhile pages are removed and evicted.
"""

import random
import threading

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode, settle

from kvstore import Client, Exhausted
from kvstore.checksum import checksum, key_seed, leaves
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node

PAGE = 16 << 10
KEYS = 96  # the node has room for 64


class RandomCalls:
    """Random calls on pages whose contents follow from their keys."""

    def __init__(self, client: Client, pages: Pages, seed: int) -> None:
        self._client, self._pages = client, pages
        self._chance = random.Random(seed)
        self.hits = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            start = self._chance.randrange(KEYS)
            keys = self._pages.keys(
                *((start + n) % KEYS for n in range(self._chance.randrange(1, 9)))
            )
            action = self._chance.choice(
                (self.put, self.get, self.put_in_place, self.get_in_place, self.remove)
            )
            try:
                action(keys)
            except Exhausted:
                pass  # all pages are being read or written by others

    def put(self, keys: list[bytes]) -> None:
        self._pages.put(self._client, keys)

    def get(self, keys: list[bytes]) -> None:
        self.hits += sum(self._pages.get(self._client, keys))

    def remove(self, keys: list[bytes]) -> None:
        self._client.remove(self._pages.namespace, keys)

    def put_in_place(self, keys: list[bytes]) -> None:
        with self._client.open_put(self._pages.namespace, keys) as slots:
            chosen = [
                key
                for key, verdict in zip(keys, slots.verdicts, strict=True)
                if verdict == pb.WRITE
            ]
            for view, key in zip(slots.pages, chosen, strict=True):
                view[:] = self._pages.content(key)
            if chosen and self._chance.random() < 0.8:
                slots.commit([leaves(self._pages.content(key)) for key in chosen])

    def get_in_place(self, keys: list[bytes]) -> None:
        with self._client.open_get(self._pages.namespace, keys) as held:
            found = [key for key, hit in zip(keys, held.hits, strict=True) if hit]
            for view, key, expected in zip(held.pages, found, held.checksums, strict=True):
                assert view == self._pages.content(key)
                assert self._sum(key, view) == expected
            self.hits += len(found)

    def _sum(self, key: bytes, data: bytes | memoryview) -> bytes:
        return checksum(data, key_seed(self._pages.namespace.digest, key))


def test_random_calls_of_many_threads_read_no_wrong_byte(
    start_node: StartNode, connect: Connect, seed: int
) -> None:
    node = start_node(ram_nbytes=1 << 20, extent_nbytes=256 << 10, batch_nbytes_max=256 << 10)
    client, pages = connect(node, "shm"), Pages("storm", PAGE)
    workers = [RandomCalls(client, pages, seed + number) for number in range(6)]
    failures: list[BaseException] = []

    def work(worker: RandomCalls) -> None:
        try:
            worker.run(150)
        except BaseException as error:  # noqa: BLE001 -- raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert sum(worker.hits for worker in workers) > 50
    assert client.stats == (1, 0, 0, 0)
    settle(node, sessions=None)
    assert node.tier.slots.used_nbytes == node.tier.visible_count * PAGE


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_pages_stored_over_one_wire_are_read_over_another(
    node: Node, connect: Connect, wire: str
) -> None:
    pages = Pages(f"with {wire}", PAGE)
    shm, other = connect(node, "shm"), connect(node, wire)
    pages.put(shm, pages.keys(1, 2))
    pages.put(other, pages.keys(3, 4))
    assert pages.get(other, pages.keys(1, 2, 3, 4)) == [True] * 4
    assert pages.get(shm, pages.keys(1, 2, 3, 4)) == [True] * 4
