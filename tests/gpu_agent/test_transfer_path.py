"""Pages are copied directly between an engine's slots and the node's mapped memory."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, damage, hashes, pages_at
from waiting import PATIENT

import gpu_agent.transfer_path
from gpu_agent import Agent, AgentConfig, KVPool, TorchTransfer
from kvstore import Client, ClientConfig, Namespace
from kvstore.checksum import leaf
from kvstore.tools.node_process import NodeProcess


@pytest.fixture
def namespace(token_pool: KVPool) -> Namespace:
    return Namespace(model=f"carriers-test-{uuid.uuid4()}", layout=token_pool.layout)


@pytest.fixture
def agent(shm_client: Client, namespace: Namespace, token_pool: KVPool) -> Iterator[Agent]:
    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=2, staging_nbytes=4096)
    ) as agent:
        yield agent
        assert agent.check() == []


def save(agent: Agent) -> None:
    result = agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert (result.stored, result.reason) == (PAGES, None)


def test_pages_are_copied_without_a_buffer(
    agent: Agent, shm_client: Client, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a page was copied through a buffer")

    monkeypatch.setattr(shm_client, "put", refuse)
    monkeypatch.setattr(shm_client, "get", refuse)
    save(agent)
    loaded = agent.load(hashes(), TARGET).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (PAGES, None)
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("group_nbytes", [1, 3000, 1 << 20])
def test_pages_stored_in_place_equal_those_of_other_wires(
    agent: Agent,
    shared_node: NodeProcess,
    namespace: Namespace,
    token_pool: KVPool,
    monkeypatch: pytest.MonkeyPatch,
    group_nbytes: int,
) -> None:
    """Bytes and checksums are equal, however many pages one thread hashes."""
    monkeypatch.setattr(gpu_agent.transfer_path, "HASHED_NBYTES_MIN", group_nbytes)
    monkeypatch.setattr(gpu_agent.transfer_path, "HASHED_TASKS", 1 << 20)
    save(agent)
    pages = torch.empty((PAGES, namespace.layout.page_nbytes), dtype=torch.uint8)
    with Client(ClientConfig(address=shared_node.address, wire="bulk", **PATIENT)) as other:
        assert other.get(namespace, hashes(), list(pages)) == [True] * PAGES
    assert torch.equal(pages, pages_at(token_pool, SOURCE))


def test_saved_missing_pages_have_the_right_keys(
    agent: Agent, shm_client: Client, namespace: Namespace, token_pool: KVPool
) -> None:
    save(agent)
    shm_client.remove(namespace, [hashes()[1], hashes()[4]])
    assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == 2
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("bad", [0, 3, PAGES - 1])
@pytest.mark.parametrize("by_layer", [False, True])
def test_load_ends_before_a_damaged_page_and_the_node_drops_it(
    agent: Agent,
    shm_client: Client,
    namespace: Namespace,
    token_pool: KVPool,
    bad: int,
    by_layer: bool,
) -> None:
    save(agent)
    before, expected = pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE)
    damage(shm_client, namespace, bad)
    layers: list[int] = []
    placed = (lambda layer, event: layers.append(layer)) if by_layer else None
    loaded = agent.load(hashes(), TARGET, placed=placed).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (bad, None)
    found = pages_at(token_pool, TARGET)
    assert torch.equal(found[:bad], expected[:bad])
    assert torch.equal(found[bad:], before[bad:]), "a slot after the damaged page was written"
    assert shm_client.lookup(namespace, hashes()).present == tuple(
        page != bad for page in range(PAGES)
    )


def test_layers_are_reported_in_order(agent: Agent, token_pool: KVPool) -> None:
    save(agent)
    layers: list[tuple[int, Any]] = []
    loaded = agent.load(
        hashes(), TARGET, placed=lambda *arguments: layers.append(arguments)
    ).done.result(WAIT_S)
    assert loaded.pages == PAGES
    assert layers == [(layer, None) for layer in token_pool.layout.layers]
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("move", ["gather", "scatter"])
def test_failed_copy_leaves_no_slot_reserved_or_held(
    shm_client: Client,
    namespace: Namespace,
    token_pool: KVPool,
    monkeypatch: pytest.MonkeyPatch,
    move: str,
) -> None:
    class Broken(TorchTransfer):
        broken = False

        def gather(self, *arguments: Any, **named: Any) -> None:
            super().gather(*arguments, **named)  # hashing is in progress
            if self.broken and move == "gather":
                raise RuntimeError("illegal memory access")

        def scatter(self, *arguments: Any, **named: Any) -> None:
            if self.broken and move == "scatter":
                raise RuntimeError("illegal memory access")
            super().scatter(*arguments, **named)

    transfer = Broken()
    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer
    ) as agent:
        if move == "scatter":
            save(agent)
        transfer.broken = True
        job = agent.save(hashes(), SOURCE) if move == "gather" else agent.load(hashes(), TARGET)
        result = job.done.result(WAIT_S)
        assert "illegal memory access" in str(
            getattr(result, "reason", None) or getattr(result, "error", None)
        )
        ram = shm_client.node_status().ram
        assert (ram.writing_count, ram.held_count) == (0, 0)
        transfer.broken = False
        assert agent.save(hashes(), SOURCE).done.result(WAIT_S).dropped == 0
        assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES


def test_hashing_ends_before_slots_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A freed slot may belong to another page, or the arena may be unmapped."""
    begun, ended = threading.Event(), threading.Event()

    def slow(part: memoryview) -> bytes:
        begun.set()
        time.sleep(0.2)
        ended.set()
        return leaf(part)

    monkeypatch.setattr(gpu_agent.transfer_path, "leaf", slow)
    with ThreadPoolExecutor(1) as hashers:
        with gpu_agent.transfer_path._LeafHashes(hashers, [memoryview(bytes(8))]) as made:
            made.begin(range(1))
            assert begun.wait(WAIT_S)
        assert ended.is_set()


def test_long_chain_is_copied_in_batches(
    agent: Agent, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 2 * token_pool.layout.page_nbytes)
    save(agent)
    layers: list[int] = []
    loaded = agent.load(
        hashes(), TARGET, 3, placed=lambda layer, _: layers.append(layer)
    ).done.result(WAIT_S)
    assert loaded.pages == PAGES
    assert layers == list(token_pool.layout.layers), (
        "layers must be reported once, with the last batch"
    )
    assert torch.equal(pages_at(token_pool, TARGET[8:]), pages_at(token_pool, SOURCE[8:]))


def test_slots_of_a_save_are_freed_after_its_last_batch(
    shm_client: Client, namespace: Namespace, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 2 * token_pool.layout.page_nbytes)
    ordered, given_back = threading.Event(), list[bool]()

    class Looking(TorchTransfer):
        def gather(self, *arguments: Any) -> None:
            assert ordered.wait(WAIT_S)
            given_back.append(job.gathered.done())
            super().gather(*arguments)

    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), Looking()
    ) as agent:
        job = agent.save(hashes(), SOURCE)
        ordered.set()
        assert job.done.result(WAIT_S).stored == PAGES
    assert given_back == [False] * 3


def test_next_part_of_a_load_is_fetched_while_one_is_copied(
    shm_client: Client, namespace: Namespace, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without overlap the link would be idle during lookups and checksums."""
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 2 * token_pool.layout.page_nbytes)
    fetched = threading.Semaphore(0)
    fetch = gpu_agent.transfer_path.MappedPath.fetch

    def recorded_fetch(path: Any, chunk: Any) -> Any:
        found = fetch(path, chunk)
        fetched.release()
        return found

    class Waiting(TorchTransfer):
        parts = 0

        def scatter(self, *arguments: Any, **named: Any) -> None:
            self.parts += 1
            if self.parts == 1:  # wait until the second part is fetched as well
                assert fetched.acquire(timeout=WAIT_S)
                assert fetched.acquire(timeout=WAIT_S)
            super().scatter(*arguments, **named)

    monkeypatch.setattr(gpu_agent.transfer_path.MappedPath, "fetch", recorded_fetch)
    transfer = Waiting()
    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer
    ) as agent:
        save(agent)
        assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
    assert transfer.parts == 4  # 1, 2, 2 and 1 pages
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))
    ram = shm_client.node_status().ram
    assert (ram.writing_count, ram.held_count) == (0, 0)


@pytest.mark.parametrize("move", ["save", "load"])
def test_jobs_fail_while_the_nodes_memory_is_being_locked(
    shm_client: Client,
    namespace: Namespace,
    token_pool: KVPool,
    monkeypatch: pytest.MonkeyPatch,
    move: str,
) -> None:
    """A GPU's driver would block copies until the lock is done: minutes for a terabyte."""
    monkeypatch.setattr("gpu_agent.transfer_path.SAVE_WAIT_S", 0.01)
    monkeypatch.setattr("gpu_agent.transfer_path.LOAD_WAIT_S", 0.01)

    class Locking(TorchTransfer):
        locking = False

        def host_memory(self, memory: memoryview) -> bool:
            return not self.locking

        def await_host_memory(self, timeout_s: float) -> bool:
            return not self.locking

    transfer = Locking()
    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer
    ) as agent:
        if move == "load":
            save(agent)
        transfer.locking = True
        job = agent.save(hashes(), SOURCE) if move == "save" else agent.load(hashes(), TARGET)
        result: Any = job.done.result(WAIT_S)
        assert "still being page-locked" in (result.reason if move == "save" else result.error)
        ram = shm_client.node_status().ram
        assert (ram.writing_count, ram.held_count) == (0, 0)
        transfer.locking = False
        assert agent.save(hashes(), SOURCE).done.result(WAIT_S).dropped == 0
        assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
