"""Pages that are contiguous in memory are copied by the copy engine, without a kernel."""

import pytest
import torch
from page_pools import BLOCKS, blocks_at, packed_pool

from gpu_agent import KVPool
from gpu_agent.kernels import staged
from gpu_agent.kernels.plan import run_of
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "RUN_NBYTES_MIN", 1)


# A page has 2304 bytes, so chunks hold a part of a page or several pages.
@pytest.mark.parametrize("chunk_nbytes", [4096, 9000, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_contiguous_blocks_are_copied_without_a_kernel(
    chunk_nbytes: int, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "RUN_CHUNK_NBYTES", chunk_nbytes)
    pool, device = packed_pool(), SimulatedDevice(seed)
    transfer = StagedTransfer(device, 4096)
    source, target = torch.randperm(BLOCKS)[: 2 * count].split(count)
    expected, others = blocks_at(pool, source), blocks_at(pool, torch.arange(BLOCKS))
    pages = torch.full((count, pool.layout.page_nbytes), 0x5A, dtype=torch.uint8)
    landed: list[int] = []
    complete: list[bool] = []

    def gathered() -> None:
        complete.append(torch.equal(pages, expected))

    transfer.gather(
        pool, pool.unit_table(source, count), list(pages), None, gathered, landed.extend
    )
    assert torch.equal(pages, expected)
    assert complete == [True]  # slots are reported as read only after their bytes were copied
    assert landed == list(range(count))

    ready: list[int] = []
    transfer.scatter(pool, pool.unit_table(target, count), list(pages), None, ready=ready.extend)
    assert ready == list(range(count))
    others[target] = expected
    assert torch.equal(blocks_at(pool, torch.arange(BLOCKS)), others)
    assert device.launches == 0


def test_page_larger_than_a_chunk_is_copied_in_pieces(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "RUN_CHUNK_NBYTES", 4096)
    pool, device = packed_pool(layers=6, cell=64), SimulatedDevice(seed)  # 12 KiB
    transfer = StagedTransfer(device, 4096)
    expected = blocks_at(pool, torch.tensor([5, 3]))
    pages = torch.zeros((2, pool.layout.page_nbytes), dtype=torch.uint8)
    transfer.gather(pool, pool.unit_table(torch.tensor([5, 3]), 2), list(pages), None)
    assert torch.equal(pages, expected)
    transfer.scatter(pool, pool.unit_table(torch.tensor([7, 8]), 2), list(pages), None)
    assert torch.equal(blocks_at(pool, torch.tensor([7, 8])), expected)
    assert (device.launches, device.copies > 4) == (0, True)


def test_skipped_units_are_not_written(token_pool: KVPool, seed: int) -> None:
    """A kernel copies a part of a page, and a page that is not contiguous."""
    device = SimulatedDevice(seed)
    assert run_of(token_pool) is None
    pages = list(torch.randint(0, 256, (2, token_pool.layout.page_nbytes), dtype=torch.uint8))
    before = [plane.bits.clone() for plane in token_pool.planes]
    table = token_pool.unit_table(torch.arange(16), 2)
    StagedTransfer(device, 4096).scatter(token_pool, table, pages, None, skip_tokens=3)
    assert all(
        torch.equal(p.bits[:3], b[:3]) for p, b in zip(token_pool.planes, before, strict=True)
    )
    assert device.launches > 0
    pool = packed_pool()
    expected, blocks = blocks_at(pool, torch.arange(BLOCKS)), torch.tensor([3, 7, 5])
    fresh = torch.randint(0, 256, (3, pool.layout.page_nbytes), dtype=torch.uint8)
    StagedTransfer(device, 4096).scatter(
        pool, pool.unit_table(blocks, 3), list(fresh), None, skip_tokens=16
    )
    expected[blocks[1:]] = fresh[1:]
    assert torch.equal(blocks_at(pool, torch.arange(BLOCKS)), expected)


def test_small_pages_are_copied_by_a_kernel(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A separate copy of each page would take longer than its bytes."""
    monkeypatch.setattr(staged, "RUN_NBYTES_MIN", 1 << 20)
    pool, device = packed_pool(), SimulatedDevice(seed)
    assert run_of(pool) is not None
    pages = torch.zeros((2, pool.layout.page_nbytes), dtype=torch.uint8)
    StagedTransfer(device, 4096).gather(
        pool, pool.unit_table(torch.tensor([5, 3]), 2), list(pages), None
    )
    assert torch.equal(pages, blocks_at(pool, torch.tensor([5, 3])))
    assert device.launches > 0


def test_layer_by_layer_load_of_contiguous_blocks(seed: int) -> None:
    pool, device = packed_pool(), SimulatedDevice(seed)
    pages = torch.randint(0, 256, (3, pool.layout.page_nbytes), dtype=torch.uint8)
    layers: list[int] = []
    table = pool.unit_table(torch.tensor([2, 9, 4]), 3)
    StagedTransfer(device, 4096).scatter(
        pool, table, list(pages), None, placed=lambda layer, _: layers.append(layer)
    )
    assert torch.equal(blocks_at(pool, torch.tensor([2, 9, 4])), pages)
    assert layers == [0, 1, 2]
