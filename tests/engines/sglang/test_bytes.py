"""Prefetched pages equal saved ones in every host layout, by the generic, v1 and v2 methods."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import PAGE, dsa, fill, indexer_transfer, mamba, mha, mla, page_bytes
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

Make = Callable[..., Any]
TOKENS = list(range(12 * PAGE))
COPIED = "bulk, copied"
POOLS: dict[str, Callable[[], Any]] = {
    **{
        f"mha {layout}": lambda layout=layout: mha(layout)
        for layout in ("layer_first", "page_first")
    },
    **{
        f"mha {layout}": lambda layout=layout: mha(layout)
        for layout in ("page_first_direct", "page_head")
    },
    **{
        f"mla {layout}": lambda layout=layout: mla(layout)
        for layout in ("layer_first", "page_first")
    },
    "mla page_first_direct": lambda: mla("page_first_direct"),
    "mha fp8": lambda: mha(dtype=torch.float8_e5m2),
    "memfd": lambda: mha(allocator="shm"),
}
UNEQUAL = {
    f"K != V {layout}": lambda layout=layout: mha(layout, v_dim=16)
    for layout in ("page_first", "page_first_direct")
}


def scattered(engine: Any, pages: int) -> torch.Tensor:
    """Return the slots of pages in random order."""
    order = torch.randperm(engine.host.size // engine.page)[:pages]
    return (order[:, None] * engine.page + torch.arange(engine.page)).view(-1)


def round_trip(writer: Any, reader: Any) -> None:
    fill(writer.host)
    fill(reader.host)
    source, target = scattered(writer, 12), scattered(reader, 12)
    others = page_bytes(reader.host, torch.arange(reader.host.size))
    assert writer.backup(TOKENS, source).completed_tokens == len(TOKENS)
    operation = reader.query(TOKENS)
    assert operation.storage_hit_count == len(TOKENS)
    tokens, _ = reader.fetch(operation, target)
    assert tokens == len(TOKENS)
    assert page_bytes(reader.host, target) == page_bytes(writer.host, source)
    touched = set((target[:: reader.page] // reader.page).tolist())
    for page, (before, now) in enumerate(
        zip(others, page_bytes(reader.host, torch.arange(reader.host.size)), strict=True)
    ):
        assert page in touched or before == now, f"page {page} was not requested"


@pytest.mark.parametrize("wire", ["shm", "bulk", COPIED])
@pytest.mark.parametrize("writes", [0, 1])
@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize("pool", POOLS)
def test_round_trip_through_both_interfaces(
    engine: Make, pool: str, writes: int, reads: int, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wire == COPIED:
        monkeypatch.setattr("gpu_agent.host.slot_copies.PIECE_NBYTES_MIN", 1 << 40)
        wire = "bulk"
    writer = engine(POOLS[pool](), interface_v1=writes, wire=wire)
    reader = engine(POOLS[pool](), interface_v1=reads, wire=wire)
    round_trip(writer, reader)


@pytest.mark.parametrize("pool", UNEQUAL)
def test_round_trip_of_different_k_and_v_dims(engine: Make, pool: str) -> None:
    round_trip(engine(UNEQUAL[pool]()), engine(UNEQUAL[pool]()))


def test_round_trip_of_a_batch_of_many_slices(engine: Make) -> None:
    writer, reader = engine(mha(slots=8192)), engine(mha(slots=8192))
    tokens = list(range(300 * PAGE))
    fill(writer.host)
    slots = torch.arange(len(tokens))
    assert writer.backup(tokens, slots).completed_tokens == len(tokens)
    count, target = reader.prefetch(tokens)
    assert count == len(tokens)
    assert page_bytes(reader.host, target) == page_bytes(writer.host, slots)


@pytest.mark.parametrize("v1", [0, 1])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_round_trip_of_kv_with_its_indexer(engine: Make, layout: str, v1: int) -> None:
    writer, reader = engine(*dsa(layout), interface_v1=v1), engine(*dsa(layout), interface_v1=v1)
    tokens = list(range(6 * 64))
    for one in (*writer.hosts.values(), *reader.hosts.values()):
        fill(one)
    slots = torch.arange(len(tokens)) + 64
    assert writer.backup(tokens, slots, [indexer_transfer()]).completed_tokens == len(tokens)
    count, target = reader.prefetch(tokens, [indexer_transfer()])
    assert count == len(tokens)
    for name in (PoolName.KV, PoolName.INDEXER):
        assert page_bytes(reader.hosts[name], target) == page_bytes(writer.hosts[name], slots)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_round_trip_of_kv_with_its_final_state(engine: Make, layout: str) -> None:
    writer, reader = engine(mha(layout), mamba(layout)), engine(mha(layout), mamba(layout))
    for one in (*writer.hosts.values(), *reader.hosts.values()):
        fill(one)

    def state(made: Any, slot: int) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.MAMBA,
            keys=made.hashes(TOKENS)[-1:],
            host_indices=torch.tensor([slot]),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    slots = torch.arange(len(TOKENS))
    writer.backup(TOKENS, slots, [state(writer, 5)])
    operation = reader.query(TOKENS, [state(reader, 9)])
    assert operation.pool_storage_result.restorable_prefix_pages == [12]
    tokens, target = reader.fetch(operation)
    assert tokens == len(TOKENS)
    assert operation.pool_storage_result.extra_pool_hit_pages["mamba"] == 1
    assert page_bytes(reader.hosts[PoolName.MAMBA], torch.tensor([9])) == page_bytes(
        writer.hosts[PoolName.MAMBA], torch.tensor([5])
    )
    assert page_bytes(reader.host, target) == page_bytes(writer.host, slots)


def test_round_trip_of_kv_with_its_sliding_window(engine: Make) -> None:
    def pools() -> list[Any]:
        return [mha(), mha(name=PoolName.SWA, layers=2, first_layer=4)]

    writer, reader = engine(*pools()), engine(*pools())
    for one in (*writer.hosts.values(), *reader.hosts.values()):
        fill(one)

    def window(made: Any, first: int) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.SWA,
            keys=made.hashes(TOKENS)[-3:],
            host_indices=torch.arange(3 * PAGE) + first,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    writer.backup(TOKENS, torch.arange(len(TOKENS)), [window(writer, 4 * PAGE)])
    operation = reader.query(TOKENS, [window(reader, 0)])
    assert operation.pool_storage_result.restorable_prefix_pages == [12]
    tokens, _ = reader.fetch(operation)
    assert tokens == len(TOKENS)
    sources = page_bytes(writer.hosts[PoolName.SWA], torch.arange(3 * PAGE) + 4 * PAGE)
    assert page_bytes(reader.hosts[PoolName.SWA], torch.arange(3 * PAGE)) == sources
