"""Leaves of checksums are computed where pages are copied, when saving and when loading.

A simulated GPU's copies can damage pages; test_leaves_cuda.py tests the kernel.
"""

import ctypes
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from page_pools import (
    PAGES,
    SOURCE,
    TARGET,
    WAIT_S,
    blocks_at,
    damage,
    hashes,
    packed_pool,
    pages_at,
)
from waiting import PATIENT, wait_until

from gpu_agent import Agent, AgentConfig, KVPool
from gpu_agent.kernels import staged
from gpu_agent.kernels.device import Addresses
from gpu_agent.kernels.simulated import SimulatedDevice, Stream
from gpu_agent.kernels.staged import StagedTransfer
from gpu_agent.layouts.vllm import table_pool
from kvstore import Client, ClientConfig, Namespace
from kvstore import checksum as checksums
from kvstore.tools.node_process import NodeProcess


class Damaging(SimulatedDevice):
    """Flip a bit at the target of copy number `spoilt`, counting copies of a page or more."""

    spoilt = -1

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: int, stream: Stream, locked: bool
    ) -> None:
        super().copy(targets, sources, nbytes, stream, locked)
        if nbytes < 1024:  # indices
            return
        self.spoilt -= 1
        if self.spoilt == -1:
            target = targets[len(targets) // 2] + nbytes // 3

            def step() -> bool:
                ctypes.c_uint8.from_address(target).value ^= 4
                return True

            stream.steps.append(step)


def of(pages: torch.Tensor) -> list[bytes]:
    return [checksums.leaves(page.numpy().tobytes()) for page in pages]


@pytest.mark.parametrize("as_runs", [True, False])
@pytest.mark.parametrize("buffer_nbytes", [4096, 64 << 10])
@pytest.mark.usefixtures("small_leaves")
def test_leaves_match_the_bytes(
    as_runs: bool, buffer_nbytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "RUN_NBYTES_MIN", 1 if as_runs else 1 << 30)
    monkeypatch.setattr(staged, "RUN_CHUNK_NBYTES", 7000)
    pool, transfer = packed_pool(), StagedTransfer(SimulatedDevice(seed), buffer_nbytes)
    assert transfer.makes_leaves(pool)
    source, target = torch.randperm(24)[:22].split(11)
    expected = blocks_at(pool, source)
    pages = torch.full_like(expected, 0x5A)
    out, in_ = list[bytes](), list[bytes]()
    transfer.gather(pool, pool.unit_table(source, 11), list(pages), None, summed=out.extend)
    assert torch.equal(pages, expected)
    assert out == of(expected)
    transfer.scatter(pool, pool.unit_table(target, 11), list(pages), None, summed=in_.extend)
    assert in_ == out
    assert torch.equal(blocks_at(pool, target), expected)


def test_partly_skipped_page_is_hashed_as_a_whole(token_pool: KVPool, seed: int) -> None:
    transfer = StagedTransfer(SimulatedDevice(seed), 4096)
    pages = torch.randint(0, 256, (3, token_pool.layout.page_nbytes), dtype=torch.uint8)
    found: list[bytes] = []
    table = token_pool.unit_table(torch.arange(24), 3)
    transfer.scatter(token_pool, table, list(pages), None, skip_tokens=3, summed=found.extend)
    assert found == of(pages)


@pytest.mark.parametrize(
    ("cell", "buffer_nbytes", "made"),
    [
        (24, 4096, True),
        (64, 4096, False),  # pages are copied in pieces
        (64, 1 << 20, True),
        (1, 4096, False),  # 96 bytes: XXH3 uses another function
    ],
)
def test_leaves_on_the_gpu_where_supported(cell: int, buffer_nbytes: int, made: bool) -> None:
    pool = packed_pool(cell=cell) if cell != 64 else packed_pool(layers=6, cell=64)
    assert StagedTransfer(SimulatedDevice(0), buffer_nbytes).makes_leaves(pool) == made


def test_unaligned_runs_have_no_gpu_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "RUN_NBYTES_MIN", 1)
    memory = torch.zeros(4 * 424 + 8, dtype=torch.uint8)
    for start, stride, made in ((0, 424, True), (8, 424, True), (4, 424, False), (0, 420, False)):
        pool = table_pool(
            {"layers.0": memory.as_strided((4, 2, 16, 13), (stride, 208, 13, 1), start)}, 4, 16
        )
        assert StagedTransfer(SimulatedDevice(0), 4096).makes_leaves(pool) == made


def test_concurrent_jobs_have_separate_memory_for_leaves() -> None:
    device, kept = SimulatedDevice(0), list[Any]()
    first = staged._Sums(device, kept, 4096, 3)
    other = staged._Sums(device, kept, 4096, 3)
    first.of_pages()
    second, third = staged._Sums(device, kept, 4096, 3), staged._Sums(device, kept, 4096, 3)
    assert second._out == first._out
    assert len({other._out, second._out, third._out}) == 3
    count = staged.SUMS_NBYTES // 8 + 1
    assert staged._Sums(device, kept, 4096, count)._memory.nbytes >= 8 * count


def test_pages_of_partial_words_have_no_gpu_leaves() -> None:
    # 416 bytes per page; every second page starts at a multiple of 8.
    memory = torch.zeros((4, 1, 2, 16, 13), dtype=torch.uint8)
    pool = table_pool({"layers.0": memory[:, 0]}, 4, 16)
    assert pool.layout.page_nbytes % 8 == 0
    assert StagedTransfer(SimulatedDevice(0), 4096).makes_leaves(pool)
    odd = torch.zeros((4, 1, 2, 2, 101), dtype=torch.uint8)
    assert not StagedTransfer(SimulatedDevice(0), 4096).makes_leaves(
        table_pool({"layers.0": odd[:, 0]}, 4, 2)
    )


# ---- through an agent ---------------------------------------------------------------------


@pytest.fixture
def device(seed: int) -> Damaging:
    return Damaging(seed)


@pytest.fixture
def agent(shm_client: Client, token_pool: KVPool, device: Damaging) -> Iterator[Agent]:
    namespace = Namespace(model=f"leaves-test-{uuid.uuid4()}", layout=token_pool.layout)
    config = AgentConfig(workers=1, staging_nbytes=4096)
    with Agent(shm_client, namespace, token_pool, config, StagedTransfer(device, 4096)) as agent:
        yield agent
        assert agent.check() == []


@pytest.fixture
def _no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bytes:
        raise AssertionError("a page was hashed on a CPU")

    monkeypatch.setattr("gpu_agent.transfer_path.leaf", refuse)


@pytest.mark.usefixtures("_no_hashing")
def test_pages_are_saved_and_loaded_without_hashing_on_a_cpu(
    agent: Agent, token_pool: KVPool
) -> None:
    assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == PAGES
    loaded = agent.load(hashes(), TARGET).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (PAGES, None)
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


def test_gpu_leaves_verify_on_other_wires(
    agent: Agent, shared_node: NodeProcess, token_pool: KVPool
) -> None:
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    pages = torch.empty((PAGES, token_pool.layout.page_nbytes), dtype=torch.uint8)
    with Client(ClientConfig(address=shared_node.address, wire="bulk", **PATIENT)) as other:
        assert other.get(agent.namespace, hashes(), list(pages)) == [True] * PAGES
    assert torch.equal(pages, pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("at", [0, 1])
def test_bit_flipped_on_the_way_to_the_node_is_a_miss(
    agent: Agent, shared_node: NodeProcess, device: Damaging, token_pool: KVPool, at: int
) -> None:
    """The node's bytes differ from the GPU's memory, whose leaves it received."""
    device.spoilt = at
    assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == PAGES
    pages = torch.empty((PAGES, token_pool.layout.page_nbytes), dtype=torch.uint8)
    with Client(ClientConfig(address=shared_node.address, wire="bulk", **PATIENT)) as other:
        hits = other.get(agent.namespace, hashes(), list(pages))
    assert hits.count(False) == 1
    assert all(
        torch.equal(a, b)
        for a, b, hit in zip(pages, pages_at(token_pool, SOURCE), hits, strict=True)
        if hit
    )


@pytest.mark.parametrize("at", [0, 1])
def test_bit_flipped_on_the_way_to_the_gpu_ends_the_load(
    agent: Agent, shm_client: Client, device: Damaging, token_pool: KVPool, at: int
) -> None:
    """The node's copy is intact and stays, so the next load succeeds."""
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    device.spoilt = at
    loaded = agent.load(hashes(), TARGET).done.result(WAIT_S)
    assert loaded.pages < PAGES
    assert loaded.error is None
    assert torch.equal(
        pages_at(token_pool, TARGET)[: loaded.pages], pages_at(token_pool, SOURCE)[: loaded.pages]
    )
    assert shm_client.lookup(agent.namespace, hashes()).prefix_pages == PAGES
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("bad", [0, 3, PAGES - 1])
@pytest.mark.parametrize("by_layer", [False, True])
def test_page_damaged_in_the_node_ends_the_load_and_is_dropped(
    agent: Agent, shm_client: Client, token_pool: KVPool, bad: int, by_layer: bool
) -> None:
    """With `by_layer`, no layer is reported and nothing is written before all is verified."""
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    before = pages_at(token_pool, TARGET)
    damage(shm_client, agent.namespace, bad)
    reported: list[int] = []
    placed = (lambda layer, _: reported.append(layer)) if by_layer else None
    assert agent.load(hashes(), TARGET, placed=placed).done.result(WAIT_S).pages == bad
    assert reported == []
    found = pages_at(token_pool, TARGET)
    assert torch.equal(found[:bad], pages_at(token_pool, SOURCE)[:bad])
    if by_layer:
        assert torch.equal(found[bad:], before[bad:])
    assert shm_client.lookup(agent.namespace, hashes()).present == tuple(
        page != bad for page in range(PAGES)
    )


def test_parts_of_a_load_are_copied_concurrently(
    agent: Agent, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part is being copied before the first one has arrived."""
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 3 * token_pool.layout.page_nbytes)
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    both, scatter = threading.Barrier(2), agent._transfer.scatter

    def together(*arguments: Any, **named: Any) -> None:
        both.wait(WAIT_S)
        scatter(*arguments, **named)

    monkeypatch.setattr(agent._transfer, "scatter", together)
    monkeypatch.setattr("gpu_agent.load_pipeline.parts_of", lambda *_: [range(3), range(3, PAGES)])
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
    assert torch.equal(pages_at(token_pool, TARGET), pages_at(token_pool, SOURCE))


@pytest.mark.parametrize("bad", range(PAGES))
def test_load_ends_before_a_damaged_page_despite_later_parts(
    agent: Agent, shm_client: Client, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", token_pool.layout.page_nbytes)
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    damage(shm_client, agent.namespace, bad)
    scatter, moving = agent._transfer.scatter, list[int]()

    def counted(*arguments: Any, **named: Any) -> None:
        moving.append(1)
        try:
            scatter(*arguments, **named)
        finally:
            moving.pop()

    monkeypatch.setattr(agent._transfer, "scatter", counted)
    load, left = agent.load(hashes(), TARGET), list[int]()
    load.done.add_done_callback(lambda _: left.append(len(moving)))
    loaded = load.done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (bad, None)
    assert torch.equal(pages_at(token_pool, TARGET)[:bad], pages_at(token_pool, SOURCE)[:bad])
    wait_until(lambda: left)
    assert left == [0], "a page was read after the load had ended"
    # The node handles a release asynchronously, possibly a little after the load has ended.
    wait_until(lambda: shm_client.stat(agent.namespace, hashes()[-1:])[0].holds == 0)


@pytest.mark.parametrize("made", [0, 2])
def test_page_without_leaves_is_not_loaded(
    agent: Agent, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    scatter = agent._transfer.scatter

    def forgetful(*arguments: Any, summed: Any, **named: Any) -> None:
        scatter(*arguments, summed=lambda leaves: summed(leaves[:made]) if made else None, **named)

    monkeypatch.setattr(agent._transfer, "scatter", forgetful)
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == made


def test_leaves_of_an_earlier_job_are_not_reused(
    agent: Agent, device: Damaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reused memory holds correct leaves of the same pages, even if the kernel does not run."""
    agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == PAGES
    launch = device.launch
    monkeypatch.setattr(
        device, "launch", lambda kernel, *rest: kernel == "leaves" or launch(kernel, *rest)
    )
    assert agent.load(hashes(), TARGET).done.result(WAIT_S).pages == 0


def test_memory_of_leaves_is_reused_by_jobs_that_fit(
    token_pool: KVPool, device: Damaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "SUMS_NBYTES", 2 * checksums.LEAF_SUM_NBYTES)
    transfer, allocated = StagedTransfer(device, 4096), list[int]()
    host_memory = device.host_memory
    monkeypatch.setattr(
        device, "host_memory", lambda nbytes: allocated.append(nbytes) or host_memory(nbytes)
    )
    for count in (1, 2, 3, 3, 2):
        pages, out = (
            torch.empty(count, token_pool.layout.page_nbytes, dtype=torch.uint8),
            list[bytes](),
        )
        table = token_pool.unit_table(torch.arange(8 * count), count)
        transfer.gather(token_pool, table, list(pages), None, summed=out.extend)
        assert out == of(pages)
    assert allocated == [16, 24]


def test_miss_with_a_skip_inside_the_first_page_is_no_error(
    agent: Agent, shm_client: Client
) -> None:
    """Regression: a scatter of no pages refused `skip_tokens`, and the load counted as failed."""
    shm_client.open(agent.namespace)
    loaded = agent.load(hashes()[:1], TARGET[:8], skip_tokens=2).done.result(WAIT_S)
    assert (loaded.pages, loaded.error) == (0, None)
    assert agent.stats.loads_failed == 0
