"""Random requests on two of LightLLM's servers with small pools, under faults.

Pages vanish between lookup and load or are damaged, saves fail, requests end early and the node
hangs. A page's bytes follow from its hash. As in an engine, a page computed after a wrong prefix is
wrong as well. The test compares every page given to a request and every stored page, lets a fresh
server read all of them, and checks that no reference leaks. SEEDS=1000 runs longer; KVSTORE_SEED
sets the first seed.
"""

import collections
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from client_faults import ClientFaults
from stopping import stop
from storms import storm_seeds

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

Make = Callable[..., Any]
REQUESTS, WRITER_TURN = 40, 0.4
QUEUE_GROUPS_MAX = 5  # queued prompts of eight pages; the pool has 24 pages
HASTY = {"LOOKUP": "0.3", "LOAD": "0.5", "SAVE": "0.5"}
KINDS = ["bf16", "int8", "mla"]


def truth(key: int, nbytes: int) -> torch.Tensor:
    """Return the bytes of the page with this hash, which stands for all tokens up to its end."""
    generator = torch.Generator().manual_seed(key & (1 << 63) - 1)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Storm:
    """Send requests to several servers, compute their missing pages and run their writers."""

    def __init__(self, servers: list[Any], rng: random.Random) -> None:
        self.servers, self.rng = servers, rng
        self.hashes: set[int] = set()
        self.wrong: list[str] = []
        self.loaded_pages = 0
        self._nbytes = servers[0].memory.shape[1]
        self._truth: dict[int, torch.Tensor] = {}
        self._queued: collections.Counter[Any] = collections.Counter()

    def truth(self, key: int) -> torch.Tensor:
        if key not in self._truth:
            self._truth[key] = truth(key, self._nbytes)
        return self._truth[key]

    def prompt(self, server: Any) -> list[int]:
        """Return the hashes of one of a few prompts or of a part of it, to share prefixes."""
        return list(server.hashes(self.rng.randrange(1, 5), self.rng.randrange(1, 9)))

    def request(self, server: Any, hashes: list[int]) -> None:
        """Match a request as LightLLM does, check its pages, and compute the rest or end early."""
        self.hashes.update(hashes)
        given = server.match(hashes)
        self.look(server, hashes, given)
        self.loaded_pages += server.loaded_tokens // 64
        server.release(given)
        if self.rng.random() < 0.7:  # else it was aborted before its pages were offloaded
            self.offload(server, hashes, self.rng.random() < 0.1)

    def look(self, server: Any, hashes: list[int], given: list[int]) -> None:
        for key, page in zip(hashes, given, strict=False):
            if not torch.equal(server.memory[page], self.truth(key)):
                self.wrong.append(f"a request was given a wrong page {page} for {key:x}")

    def offload(self, server: Any, hashes: list[int], slow: bool) -> None:
        """Fill and queue a prompt's pages as ranks do; they are LOADING during the copy."""
        # LightLLM raises with its lock held when its queue is full.
        if self._queued[server] == QUEUE_GROUPS_MAX:
            self.persist(server)
        self._queued[server] += 1
        pages, ready = server.locked(
            server.client.allocate_pages, hash_keys=hashes, disk_offload_enable=True
        )
        for key, page, there in zip(hashes, pages, ready, strict=True):
            if page != -1 and not there:
                server.memory[page] = self.truth(key)
        time.sleep(0.005 if slow else 0)
        server.locked(
            server.client.update_pages_status_to_ready,
            page_list=pages,
            deref=True,
            disk_offload_enable=True,
            token_num_in_page_list=len(pages) * 64,
        )

    def persist(self, server: Any) -> None:
        server.persist()
        self._queued[server] = 0

    def together(self, server: Any) -> None:
        """Send one prompt in several requests at once; later ones get pages still being loaded."""
        hashes = server.hashes(self.rng.randrange(1, 5), 8)
        self.hashes.update(hashes)
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(server.match(hashes))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert len(found) == len(threads), "a request was not forwarded"
        for given in found:
            self.look(server, hashes, given)
            server.release(given)

    def forget(self, server: Any) -> None:
        """Let another prompt, which is not saved, evict all unreferenced pages of the pool."""
        pages = server.locked(
            server.client.allocate_pages, hash_keys=server.hashes(99, 24), disk_offload_enable=True
        )
        server.memory[[page for page in pages[0] if page != -1]] = 0xA5
        server.locked(server.client.recycle_pages, page_list=pages[0])


@pytest.fixture
def faults(storm_node: NodeProcess, storm_seed: int) -> Iterator[ClientFaults]:
    made = ClientFaults(storm_node.address, random.Random(storm_seed + 1))
    yield made
    made.close()


@pytest.fixture(scope="module")
def storm_node() -> Iterator[NodeProcess]:
    with NodeProcess(
        "--ram-bytes",
        "64MiB",
        "--extent-bytes",
        "4MiB",
        python=os.environ.get("KVSTORE_NODE_PYTHON"),
    ) as node:
        yield node


def disturb(storm: Storm, node: NodeProcess, server: Any) -> None:
    what = storm.rng.random()
    if what < 0.25:
        storm.forget(server)
    elif what < 0.4:
        storm.together(server)
    elif what < 0.45:
        stop(node.pid)
        timer = threading.Timer(storm.rng.uniform(0.01, 0.4), os.kill, (node.pid, signal.SIGCONT))
        timer.start()
        try:
            storm.request(server, storm.prompt(server))
        finally:
            timer.join()
            os.kill(node.pid, signal.SIGCONT)


def wrong_pages(storm: Storm, address: str) -> tuple[int, list[str]]:
    """Return the number of stored pages and the names of those with wrong bytes."""
    keys = {key.to_bytes(16, "big"): key for key in storm.hashes}
    with Client(ClientConfig(address=address, timeout_s=20.0)) as client:
        namespace = storm.servers[0].service.namespace
        names = [page.prefix_hash for page in client.list_pages(namespace)]
        buffers = [bytearray(namespace.layout.page_nbytes) for _ in names]
        there = client.get(namespace, names, buffers) if names else []
    # Damaged pages are misses.
    pages = [(name, page) for name, page, hit in zip(names, buffers, there, strict=True) if hit]
    return len(pages), [
        name.hex()
        for name, page in pages
        if bytes(page) != storm.truth(keys[name]).numpy().tobytes()
    ]


@pytest.mark.parametrize("storm_seed", storm_seeds(3))
def test_stored_pages_after_a_storm_are_correct(
    storm_node: NodeProcess,
    make_server: Make,
    faults: ClientFaults,
    storm_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, servers = random.Random(storm_seed), []
    kind = KINDS[storm_seed % len(KINDS)]
    monkeypatch.setenv("KVSTORE_REVISION", f"storm-{storm_seed}-{time.monotonic_ns()}")
    for wire in rng.sample(("shm", "bulk", "grpc"), 2):
        monkeypatch.setenv("KVSTORE_WIRE", wire)
        with monkeypatch.context() as hasty:
            for name, seconds in HASTY.items():
                hasty.setenv(f"KVSTORE_AGENT_{name}_TIMEOUT_S", seconds)
            hasty.setenv("KVSTORE_BACKOFF_S_MAX", "0.1")
            servers.append(make_server(storm_node.address, kind))
        faults.watch(servers[-1].service._client)
    storm = Storm(servers, rng)
    for _ in range(REQUESTS):
        server = rng.choice(servers)
        storm.request(server, storm.prompt(server))
        if rng.random() < WRITER_TURN:
            storm.persist(rng.choice(servers))
        disturb(storm, storm_node, server)
    faults.share = 0.0
    for server in servers:
        storm.persist(server)
        assert server.references() == 0
    assert storm.wrong == []
    assert sum(faults.struck.values()) > faults.struck["none"]
    assert wrong_pages(storm, storm_node.address)[1] == []

    # One server saves the missing pages, then another one reads all of them.
    for _ in range(2):
        fresh = make_server(storm_node.address, kind)
        storm.loaded_pages = 0
        for seed in range(1, 5):
            storm.request(fresh, fresh.hashes(seed, 8))
            storm.offload(fresh, fresh.hashes(seed, 8), slow=False)
            storm.persist(fresh)
            storm.forget(fresh)
        assert fresh.references() == 0
    assert storm.wrong == []
    assert storm.loaded_pages == 4 * 8
    stored, wrong = wrong_pages(storm, storm_node.address)
    assert stored >= 4 * 8
    assert wrong == []
