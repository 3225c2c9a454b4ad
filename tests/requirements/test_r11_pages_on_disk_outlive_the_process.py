"""R11: after `kill -9` and a restart, pages on disk are hits, and clients reconnect."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from kvstore import KVStoreError
from kvstore.results import Keep
from kvstore.tools.node_process import NodeProcess

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(64)]


class Restartable:
    """A node with a data directory that can be killed and restarted on the same ports."""

    def __init__(self, data_dir: Path) -> None:
        self._flags = ("--ram-bytes", "4MiB", "--data-dir", str(data_dir), "--disk-bytes", "128MiB")
        self.process = NodeProcess(*self._flags)
        self.address = self.process.address

    def kill_and_restart(self) -> None:
        bulk, metrics = str(self.process.bulk_port), str(self.process.metrics_port)
        port = self.address.rpartition(":")[2]
        self.process.kill()
        self.process = NodeProcess(
            *self._flags, "--port", port, "--bulk-port", bulk, "--metrics-port", metrics
        )


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    node = Restartable(tmp_path / "data")
    yield node
    node.process.kill()


def test_r11_durable_pages_hit_after_kill_9_through_the_same_client(
    restartable: Restartable, connect: Connect
) -> None:
    """Durable pages are hits after kill -9 for the same client, on each wire, without an error."""
    clients = {wire: connect(restartable.address, wire) for wire in ("shm", "bulk", "grpc")}
    chains = {wire: (Pages(f"small {wire}"), Pages(f"large {wire}", 100_000)) for wire in clients}
    for wire, client in clients.items():
        for chain in chains[wire]:
            pages = [chain.content(key) for key in KEYS[:32]]
            client.put(chain.namespace, KEYS[:32], pages, Keep(durable=True))
    restartable.kill_and_restart()
    for number, (wire, client) in enumerate(clients.items(), 1):
        small, large = chains[wire]
        # The next calls after the restart succeed at once
        assert client.lookup(small.namespace, KEYS).prefix_pages == 32
        assert small.get(client, KEYS) == [True] * 32 + [False] * 32
        assert large.get(client, KEYS[:32]) == [True] * 32
        assert client.node_status().disk.pages_read == number * 64
        assert client.stats.failures == 0


def test_r11_pages_of_a_keyed_namespace_hit_after_kill_9(
    restartable: Restartable, connect: Connect
) -> None:
    client = connect(restartable.address, page_key="7e" * 32)
    chain = Pages("keyed", 100_000, key_id=client.key_id)
    client.put(
        chain.namespace, KEYS[:8], [chain.content(key) for key in KEYS[:8]], Keep(durable=True)
    )
    restartable.kill_and_restart()
    assert [space for space, _ in client.namespaces()] == [chain.namespace]
    assert chain.get(client, KEYS[:9]) == [True] * 8 + [False]
    assert client.node_status().disk.pages_read == 8


def test_r11_flushed_pages_survive_kills_and_readers_hit_again(
    restartable: Restartable, connect: Connect
) -> None:
    """Flushed pages survive each kill, and a concurrent reader gets hits again.

    Meanwhile the reader gets misses or errors, but never wrong bytes.
    """
    chain = Pages("chain")
    client, readers_client = (
        connect(restartable.address),
        connect(restartable.address, backoff_s_max=0.2),
    )
    stop, hits = threading.Event(), [0]

    def read() -> None:
        while not stop.is_set():
            try:
                hits[0] += chain.get(readers_client, KEYS).count(True)
            except KVStoreError:
                pass
            stop.wait(0.01)

    def wait_for_hits(wanted: int) -> None:
        wanted += hits[0]
        wait_until(lambda: hits[0] >= wanted or not reader.is_alive())
        assert hits[0] >= wanted, "the reader got no hits again"

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for count in (32, 64):
            chain.put(client, KEYS[:count])
            assert client.flush() == count
            wait_for_hits(count)
            restartable.kill_and_restart()
            assert chain.get(client, KEYS) == [True] * count + [False] * (64 - count)
            wait_for_hits(2 * count)
    finally:
        stop.set()
        reader.join()
    assert readers_client.stats.corrupt_pages == 0
