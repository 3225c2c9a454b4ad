"""Whole units are copied one by one, in order: the same bytes as the reference, no others."""

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.host import slot_copies
from gpu_agent.host.slot_copies import SlotCopies
from gpu_agent.layouts.group import GroupView, pool_of

COUNT = 5
RUN_NBYTES = 64 << 10


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_copies, "RUN_NBYTES", RUN_NBYTES)


def random_tensor(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


def strided() -> KVPool:
    """Return pages whose K and V runs are half the pool apart, as in a host pool."""
    memory = random_tensor(2, 12, 8, 3, 4, dtype=torch.bfloat16)
    return pool_of(
        8, GroupView("host", (0,), {"page": [memory.transpose(0, 1)]}, unit_tokens=8, space="page")
    )


def odd() -> KVPool:
    """Return a plane of 16-bit words after one of 5 bytes, so that it starts at an odd byte."""
    planes = {"bytes": [random_tensor(12, 5)], "words": [random_tensor(12, 3, dtype=torch.int16)]}
    return pool_of(8, GroupView("host", (0,), planes, unit_tokens=8, space="page"))


def halves() -> KVPool:
    """Return pages of two units of 4 tokens each."""
    return pool_of(
        8,
        GroupView("host", (0, 1), {"kv": [random_tensor(24, 7)] * 2}, unit_tokens=4, space="block"),
    )


def large() -> KVPool:
    """Return pages that are one run each."""
    return pool_of(
        8, GroupView("host", (0,), {"page": [random_tensor(12, RUN_NBYTES)]}, unit_tokens=8)
    )


POOLS = {"strided": strided, "odd": odd, "halves": halves, "large": large}


def units(pool: KVPool) -> torch.Tensor:
    space = next(iter(pool.spaces.values()))
    return torch.randperm(space.slots)[: COUNT * 8 // space.unit_tokens]


def empty(pool: KVPool) -> list[torch.Tensor]:
    return list(torch.zeros(COUNT, pool.layout.page_nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("name", POOLS)
def test_gathered_pages_equal_the_references(name: str) -> None:
    pool = POOLS[name]()
    table = pool.unit_table(units(pool), COUNT)
    mine, expected = empty(pool), empty(pool)
    landed: list[int] = []
    SlotCopies().gather(pool, table, mine, None, landed=landed.extend)
    TorchTransfer().gather(pool, table, expected, None)
    assert all(torch.equal(page, other) for page, other in zip(mine, expected, strict=True))
    assert landed == list(range(COUNT))


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("name", POOLS)
def test_scattered_slots_equal_the_references(name: str, skip: int) -> None:
    pool, other = POOLS[name](), POOLS[name]()
    skip = skip if pool.planes[0].piece.plane.unit_tokens == 4 else 0
    for plane, twin in zip(pool.planes, other.planes, strict=True):
        twin.bits.copy_(plane.bits)
    table = pool.unit_table(units(pool), COUNT)
    pages = list(random_tensor(COUNT, pool.layout.page_nbytes))
    SlotCopies().scatter(pool, table, pages, None, skip)
    TorchTransfer().scatter(other, table, pages, None, skip)
    assert all(torch.equal(p.bits, q.bits) for p, q in zip(pool.planes, other.planes, strict=True))


def test_page_is_not_written_before_it_is_ready() -> None:
    pool = large()
    before = pool.planes[0].bits.clone()
    rows = units(pool)
    pages = list(random_tensor(COUNT, pool.layout.page_nbytes))

    def ready(run: range) -> None:
        if run.start == 2:
            raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        SlotCopies().scatter(pool, pool.unit_table(rows, COUNT), pages, None, ready=ready)
    now = pool.planes[0].bits
    assert torch.equal(now[rows[:2]], torch.stack(pages[:2]))
    untouched = [slot for slot in range(12) if slot not in rows[:2].tolist()]
    assert torch.equal(now[untouched], before[untouched])
