"""Save and load through a real node.

Saved pages load into other slots. Failures give a smaller count, never an exception or a hang.
"""

import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import Agent, AgentConfig, KVPool, TorchTransfer, UnitTable
from gpu_agent.transfer_path import BufferedPath, MappedPath, PageBatch
from kvstore import (
    Client,
    ClientConfig,
    ConfigError,
    InvalidRequest,
    Namespace,
    PutOutcome,
    opaque_layout,
    prefix_hashes,
)
from kvstore.checksum import leaf
from kvstore.tools.node_process import NodeProcess

PAGES = 6
WAIT_S = 60.0  # limit for a future, so that a lost one fails the test


class GatedTransfer(TorchTransfer):
    """Block before every gather until the test opens the gate."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def gather(self, *arguments: Any) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        super().gather(*arguments)


def hashes(count: int = PAGES, salt: int = 0) -> list[bytes]:
    return prefix_hashes([salt + 7 * i for i in range(8 * count)], 8)


def pages_at(pool: KVPool, units: torch.Tensor) -> torch.Tensor:
    """Return the pages that are in these slots now."""
    count = len(units) // pool.layout.page_tokens
    pages = torch.empty((count, pool.layout.page_nbytes), dtype=torch.uint8)
    TorchTransfer().gather(pool, pool.unit_table(units, count), pages, None)
    return pages


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move four pages at a time in place, too."""
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 4096)


@pytest.fixture
def namespace(token_pool: KVPool) -> Namespace:
    """Return a namespace that no other test uses."""
    return Namespace(model=f"agent-test-{uuid.uuid4()}", layout=token_pool.layout)


@pytest.fixture
def agent(client: Client, namespace: Namespace, token_pool: KVPool) -> Iterator[Agent]:
    """Make an agent with four pages per staging buffer, so that six pages take two chunks."""
    config = AgentConfig(workers=2, staging_nbytes=4096, pending_nbytes_max=64 << 10)
    with Agent(client, namespace, token_pool, config) as agent:
        yield agent
        assert agent.check() == []


@pytest.fixture
def dead_client() -> Iterator[Client]:
    """Make a client of an address that refuses connections."""
    with Client(
        ClientConfig(address="127.0.0.1:9", timeout_s=1.0, connect_timeout_s=0.2)
    ) as client:
        yield client


def test_saved_pages_load_into_other_slots(agent: Agent, token_pool: KVPool) -> None:
    slots = torch.randperm(96)
    source, target = slots[:48], slots[48:]
    expected = pages_at(token_pool, source)
    job = agent.save(hashes(), source)
    result = job.done.result(WAIT_S)
    job.gathered.result(WAIT_S)
    assert (result.stored, result.existing, result.dropped, result.reason) == (6, 0, 0, None)
    assert agent.lookup(hashes()) == 6
    assert agent.lookup(hashes(9)) == 6

    loaded = agent.load(hashes(), target).done.result(WAIT_S)
    assert (loaded.pages, loaded.loaded, loaded.error) == (6, 6, None)
    assert torch.equal(pages_at(token_pool, target), expected)
    assert torch.equal(pages_at(token_pool, source), expected)


def test_second_save_gathers_only_missing_pages(
    client: Client, namespace: Namespace, token_pool: KVPool, agent: Agent
) -> None:
    agent.save(hashes(), torch.arange(48)).done.result(WAIT_S)
    client.remove(namespace, [hashes()[1], hashes()[4]])
    gathered = []

    class Spy(TorchTransfer):
        def gather(self, pool: KVPool, units: UnitTable, *arguments: Any) -> None:
            gathered.append(units.flat("token").tolist())
            super().gather(pool, units, *arguments)

    with Agent(client, namespace, token_pool, agent.config, Spy()) as second:
        result = second.save(hashes(), torch.arange(48)).done.result(WAIT_S)
        assert (result.stored, result.existing, result.dropped) == (2, 4, 0)
        assert gathered == [[*range(8, 16), *range(32, 40)]]
        assert second.lookup(hashes()) == 6


def test_load_stops_at_the_first_missing_page(
    client: Client, namespace: Namespace, token_pool: KVPool, agent: Agent
) -> None:
    source, target = torch.arange(48), torch.arange(48, 96)
    expected = pages_at(token_pool, source)
    agent.save(hashes(), source).done.result(WAIT_S)
    client.remove(namespace, [hashes()[3]])
    before = pages_at(token_pool, target)
    assert agent.lookup(hashes()) == 3
    loaded = agent.load(hashes(), target).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (3, None)
    assert torch.equal(pages_at(token_pool, target)[:3], expected[:3])
    assert torch.equal(pages_at(token_pool, target)[3:], before[3:])


@pytest.mark.parametrize("skip_tokens", [0, 3, 8, 19, 47, 48])
def test_skipped_tokens_are_neither_fetched_nor_written(
    client: Client, namespace: Namespace, token_pool: KVPool, agent: Agent, skip_tokens: int
) -> None:
    source, target = torch.arange(48), torch.arange(48, 96)
    agent.save(hashes(), source).done.result(WAIT_S)
    whole = skip_tokens // 8
    if whole:
        client.remove(namespace, hashes()[:whole])
    before = [plane.bits.clone() for plane in token_pool.planes]
    loaded = agent.load(hashes(), target, skip_tokens).done.result(WAIT_S)
    assert (loaded.pages, loaded.loaded, loaded.error) == (6, 6 - whole, None)
    for plane, old in zip(token_pool.planes, before, strict=True):
        cut = 48 + skip_tokens
        assert torch.equal(plane.bits[:cut], old[:cut])
        assert torch.equal(plane.bits[cut:], old[skip_tokens:48])


def test_round_trip_of_a_pool_of_slots_and_blocks(client: Client, mixed_pool: KVPool) -> None:
    namespace = Namespace(model=f"agent-test-{uuid.uuid4()}", layout=mixed_pool.layout)
    token, block = torch.randperm(40), torch.randperm(10)
    source = {"token": token[:16], "block": block[:4]}
    target = {"token": token[16:32], "block": block[4:8]}
    with Agent(client, namespace, mixed_pool, AgentConfig(workers=1)) as agent:
        assert agent.save(hashes(2), source).done.result(WAIT_S).stored == 2
        assert agent.load(hashes(2), target, skip_tokens=4).done.result(WAIT_S).pages == 2
    for plane in mixed_pool.planes:
        skip = 4 // plane.piece.plane.unit_tokens
        assert torch.equal(
            plane.bits[target[plane.space][skip:]], plane.bits[source[plane.space][skip:]]
        )


def test_unreachable_node_is_a_miss(
    dead_client: Client, namespace: Namespace, token_pool: KVPool
) -> None:
    before = [plane.bits.clone() for plane in token_pool.planes]
    with Agent(dead_client, namespace, token_pool) as agent:
        assert agent.lookup(hashes()) == 0
        job = agent.save(hashes(), torch.arange(48))
        saved = job.done.result(WAIT_S)
        job.gathered.result(WAIT_S)
        assert (saved.stored, saved.existing, saved.dropped) == (0, 0, 6)
        assert saved.reason
        loaded = agent.load(hashes(), torch.arange(48)).done.result(WAIT_S)
        assert (loaded.pages, loaded.loaded) == (0, 0)
        assert loaded.error
        assert (
            agent.stats.lookups_failed,
            agent.stats.pages_dropped,
            agent.stats.loads_failed,
        ) == (1, 6, 1)
        assert agent.check() == []
    assert all(
        torch.equal(plane.bits, old) for plane, old in zip(token_pool.planes, before, strict=True)
    )


def test_node_killed_during_a_load_leaves_a_correct_count(
    token_pool: KVPool, namespace: Namespace
) -> None:
    source, target = torch.arange(48), torch.arange(48, 96)
    expected = pages_at(token_pool, source)
    before = pages_at(token_pool, target)
    with (
        NodeProcess("--ram-bytes", "64MiB", "--extent-bytes", "16MiB") as node,
        Client(ClientConfig(address=node.address, **PATIENT)) as client,
    ):

        class Killing(TorchTransfer):
            def scatter(self, *arguments: Any, **named: Any) -> None:
                super().scatter(*arguments, **named)
                node.kill()

        with Agent(
            client, namespace, token_pool, AgentConfig(staging_nbytes=4096), Killing()
        ) as agent:
            assert agent.save(hashes(), source).done.result(WAIT_S).stored == 6
            loaded = agent.load(hashes(), target).done.result(WAIT_S)
            count = loaded.pages
            # The second chunk may have been fetched by then.
            assert (count, loaded.loaded) in (
                (1, 1),
                (5, 5),
            )
            assert loaded.error
            assert agent.lookup(hashes()) == 0
    assert torch.equal(pages_at(token_pool, target)[:count], expected[:count])
    assert torch.equal(pages_at(token_pool, target)[count:], before[count:])


def test_jobs_over_the_limit_are_refused_at_once(
    client: Client, namespace: Namespace, token_pool: KVPool
) -> None:
    transfer = GatedTransfer()
    config = AgentConfig(workers=1, staging_nbytes=8192, pending_nbytes_max=8192)
    with Agent(client, namespace, token_pool, config, transfer) as agent:
        first = agent.save(hashes(), torch.arange(48))
        assert transfer.entered.wait(WAIT_S)
        second = agent.save(hashes(3, salt=1), torch.arange(24))
        assert second.done.done()
        assert second.gathered.done()
        assert second.done.result().dropped == 3
        assert "pending_nbytes_max" in str(second.done.result().reason)
        assert not first.gathered.done()
        assert agent.check() == []
        transfer.gate.set()
        assert first.done.result(WAIT_S).stored == 6
        refused = agent.load(hashes(9), torch.arange(72)).done
        assert refused.done()
        assert refused.result().pages == 0
        assert "pending_nbytes_max" in str(refused.result().error)
        assert agent.stats.pages_dropped == 3
        assert agent.load(hashes(), torch.arange(48)).done.result(WAIT_S).pages == 6


def test_slots_are_freed_before_the_pages_are_stored(
    client: Client, namespace: Namespace, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, gate = client.put, threading.Event()

    def gated_put(*args: object, **kwargs: object) -> object:
        assert gate.wait(WAIT_S)
        return put(*args, **kwargs)  # type: ignore[arg-type]

    def gated_leaf(part: memoryview) -> bytes:
        assert gate.wait(WAIT_S)
        return leaf(part)

    monkeypatch.setattr(client, "put", gated_put)
    # In place, the checksum is computed before the commit.
    monkeypatch.setattr("gpu_agent.transfer_path.leaf", gated_leaf)
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 1 << 20)
    expected = pages_at(token_pool, torch.arange(48))
    with Agent(client, namespace, token_pool) as agent:
        job = agent.save(hashes(), torch.arange(48))
        job.gathered.result(WAIT_S)
        assert not job.done.done()
        for plane in token_pool.planes:
            plane.bits.zero_()  # the engine reuses its slots
        gate.set()
        assert job.done.result(WAIT_S).stored == 6
        agent.load(hashes(), torch.arange(48)).done.result(WAIT_S)
    assert torch.equal(pages_at(token_pool, torch.arange(48)), expected)


def test_chain_moved_in_chunks_is_touched_once_as_a_whole(
    client: Client, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touched by chunk, the tail would be the newest and the head would be evicted first."""
    lookup, touched = client.lookup, []

    def spy(
        namespace: Namespace, keys: list[bytes], touch: bool = False, timeout_s: float | None = None
    ) -> object:
        if touch:
            touched.append(list(keys))
        return lookup(namespace, keys, touch, timeout_s)

    monkeypatch.setattr(client, "lookup", spy)
    agent.save(hashes(), torch.arange(48)).done.result(WAIT_S)
    assert touched == [hashes()] * 2  # the lookup of missing pages, and the final touch
    agent.load(hashes(), torch.arange(48)).done.result(WAIT_S)
    agent.load(hashes(4), torch.arange(32)).done.result(WAIT_S)  # one chunk, touched by the get
    agent.close()  # the touch after a load is asynchronous
    assert touched == [hashes()] * 3


def test_full_node_stops_a_save_and_is_the_reason(
    client: Client, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full_after_two(path: object, chunk: PageBatch, gathered: object) -> object:
        calls.append(len(chunk.prefix_hashes))
        return [PutOutcome.STORED, PutOutcome.BUSY] + [PutOutcome.FULL] * (
            len(chunk.prefix_hashes) - 2
        )

    monkeypatch.setattr(BufferedPath, "save", full_after_two)
    monkeypatch.setattr(MappedPath, "save", full_after_two)
    job = agent.save(hashes(), torch.arange(48))
    result = job.done.result(WAIT_S)
    job.gathered.result(WAIT_S)
    assert (result.stored, result.existing, result.dropped) == (1, 1, 4)
    assert "full" in str(result.reason)
    assert calls == [4]


def test_job_past_its_deadline_moves_nothing(
    client: Client,
    namespace: Namespace,
    token_pool: KVPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer, later_s = GatedTransfer(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0])
    monkeypatch.setattr("kvstore.deadline.time", clock)
    config = AgentConfig(workers=1, save_timeout_s=WAIT_S)
    with Agent(client, namespace, token_pool, config, transfer) as agent:
        first, second = (agent.save(hashes(salt=i), torch.arange(48)) for i in (0, 1))
        assert transfer.entered.wait(WAIT_S)
        later_s[0] = WAIT_S
        transfer.gate.set()
        for job in (first, second):
            assert job.done.result(WAIT_S).dropped == 6
            assert "deadline" in str(job.done.result().reason)


def test_close_ends_all_jobs_and_refuses_new_ones(
    client: Client, namespace: Namespace, token_pool: KVPool
) -> None:
    transfer = GatedTransfer()
    agent = Agent(
        client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer
    )
    running = agent.save(hashes(), torch.arange(48))
    queued = agent.save(hashes(salt=1), torch.arange(48))
    assert transfer.entered.wait(WAIT_S)
    closer = threading.Thread(target=agent.close, args=(0.05,))
    closer.start()
    assert agent._saves.stopping.wait(WAIT_S)
    transfer.gate.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    first, second = running.done.result(0), queued.done.result(0)
    assert (first.stored, first.dropped, first.reason) == (4, 2, "the agent is closed")
    assert (second.stored, second.dropped, second.reason) == (0, 6, "the agent is closed")
    assert running.gathered.done()
    assert queued.gathered.done()
    late = agent.load(hashes(), torch.arange(48)).done.result(0)
    assert (late.pages, late.error) == (0, "the agent is closed")
    assert agent.check() == []


def test_job_that_raises_is_answered_and_frees_its_buffer(
    client: Client, namespace: Namespace, token_pool: KVPool, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TorchTransfer):
        def gather(self, *arguments: Any) -> None:
            raise RuntimeError("illegal memory access")

    with Agent(client, namespace, token_pool, AgentConfig(workers=1), Broken()) as agent:
        for _ in range(3):  # more jobs than buffers
            job = agent.save(hashes(), torch.arange(48))
            assert "illegal memory access" in str(job.done.result(WAIT_S).reason)
            job.gathered.result(WAIT_S)
        assert agent.check() == []
    assert "illegal memory access" in caplog.text


def test_check_reports_a_leaked_buffer_and_job(agent: Agent) -> None:
    buffer = agent._saves._buffers.get()
    assert agent.check() == ["save: 1 free and 0 used buffers, expected 2 in all"]
    agent._saves._buffers.put(buffer)
    agent._loads._running += 1
    assert len(agent.check()) == 2
    agent._loads._running -= 1


def test_invalid_calls_raise_before_anything_moves(agent: Agent, token_pool: KVPool) -> None:
    twice = [hashes()[0], hashes()[0]]
    with pytest.raises(InvalidRequest, match="twice"):
        agent.save(twice, torch.arange(16))
    with pytest.raises(InvalidRequest, match="units of space 'token'"):
        agent.load(hashes(), torch.arange(40))
    with pytest.raises(InvalidRequest, match=r"skip_tokens 49 is not in 0\.\.48"):
        agent.load(hashes(), torch.arange(48), skip_tokens=49)
    with pytest.raises(InvalidRequest, match="a prefix hash has 3 bytes"):
        agent.lookup([b"abc"])
    assert agent.stats.saves == agent.stats.loads == 0


def test_empty_chain_completes_at_once(agent: Agent) -> None:
    none = torch.arange(0)
    assert agent.lookup([]) == 0
    job = agent.save([], none)
    assert job.gathered.done()
    assert job.done.result(0).stored == 0
    assert agent.load([], none).done.result(0).pages == 0


def test_invalid_configurations_fail_the_start(
    client: Client, namespace: Namespace, token_pool: KVPool, mixed_pool: KVPool
) -> None:
    with pytest.raises(ConfigError, match=r"workers=0 is outside 1\.\.64"):
        AgentConfig(workers=0)
    with pytest.raises(
        ConfigError, match="pending_nbytes_max=4096 is smaller than staging_nbytes=8192"
    ):
        AgentConfig(staging_nbytes=8192, pending_nbytes_max=4096)
    with pytest.raises(InvalidRequest, match="layout is not the namespace's layout"):
        Agent(client, namespace, mixed_pool)
    with (
        Agent(client, namespace, None) as agent,
        pytest.raises(InvalidRequest, match="name one in the call"),
    ):
        agent.save(hashes(1), torch.arange(8))


def test_page_larger_than_the_staging_buffer_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="staging_nbytes=4096 must hold a page of 8192 bytes"):
        Agent(
            client,
            Namespace(model="m", layout=opaque_layout(8192)),
            None,
            AgentConfig(staging_nbytes=4096),
        )
