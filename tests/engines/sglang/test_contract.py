"""The store as SGLang's controller sees it: keys, return values, holes, side pools and statistics.

Also the engine's own random failures.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from asking import traces_of_calls
from harness import PAGE, dsa, fill, hashes, indexer_transfer, mamba, mha, mla, page_bytes
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvstore import prefix_hashes

Make = Callable[..., Any]
TOKENS = list(range(10 * PAGE))
SLOTS = torch.arange(len(TOKENS))
GOLDEN = {
    (0, 64): ["fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5"],
    (100, 228): [
        "1e8618e2a4aa0be3b9726ed0189947770f9b3d63e5c5fb3e3b1fd1c0df8da181",
        "5abee2b088eefde6e1d0b5dfde686507791e602467d1f5a9fba4d394993e5fd6",
    ],
}


def forget(engine: Any, pool: str, *pages: int, tokens: list[int] = TOKENS) -> None:
    """Remove these pages, as if the node had evicted them."""
    keys = engine.hashes(tokens)
    namespace = engine.backend._pages[pool].namespace
    removed = engine.backend._client.remove(
        namespace, [bytes.fromhex(keys[page]) for page in pages]
    )
    assert all(removed)


@pytest.fixture
def pair(engine: Make) -> tuple[Any, Any]:
    """Return two engines, the first of which has stored its pages."""
    writer, reader = engine(mha()), engine(mha())
    fill(writer.host)
    assert writer.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    return writer, reader


# ---- keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("span", GOLDEN)
def test_engine_keys_equal_our_prefix_hashes(span: tuple[int, int]) -> None:
    tokens = list(range(*span))
    assert hashes(tokens, 64) == GOLDEN[span]
    assert [digest.hex() for digest in prefix_hashes(tokens, 64)] == GOLDEN[span]


def test_salted_keys_equal_recorded_value() -> None:
    key = RadixKey(list(range(64)), extra_key="lora1", cache_salt="tA")
    assert get_storage_hash_str(key, None, page_size=64) == [
        "3e7e3077150ea1a4187e89287d97a78e5ce582145022991a65a9e2513d73c541"
    ]


# ---- call ids -------------------------------------------------------------------------------


def test_each_call_has_its_own_id(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine passes no request id, so the backend makes one per call."""
    made = engine(mha())
    backend, keys, asked = made.backend, made.hashes(TOKENS), traces_of_calls(monkeypatch)
    seen = []
    for call in (
        lambda: backend.batch_set_v1(keys, SLOTS, None),
        lambda: backend.batch_exists(keys),
        lambda: backend.batch_get_v1(keys, SLOTS, None),
    ):
        del asked[:]
        call()
        (trace,) = set(asked)
        assert trace is not None
        seen.append(trace)
    assert len(set(seen)) == 3


# ---- v1 and generic -------------------------------------------------------------------------


def test_results_are_lists_of_bools_one_per_key(pair: tuple[Any, Any]) -> None:
    backend, keys = pair[1].backend, pair[1].hashes(TOKENS)
    other = hashes(list(range(5000, 5000 + 3 * PAGE)), PAGE)
    assert backend.batch_get_v1(keys, SLOTS) == [True] * 10
    assert backend.batch_set_v1(keys, SLOTS) == [True] * 10  # already stored
    assert backend.batch_get_v1(other, SLOTS[: 3 * PAGE], None) == [False] * 3
    assert backend.batch_set_v1([], SLOTS[:0]) == backend.batch_get_v1([], SLOTS[:0]) == []
    assert backend.batch_exists(keys) == 10
    assert backend.batch_exists(keys + other) == 10
    assert backend.batch_exists([]) == 0
    assert backend.exists(keys[9]) is True
    assert backend.exists(other[0]) is False


def test_generic_values_are_tensors_or_none(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    keys = reader.hashes(TOKENS)
    missing = hashes([9] * PAGE, PAGE)
    targets = [reader.host.get_dummy_flat_data_page() for _ in range(3)]
    got = reader.backend.batch_get([*keys[:2], *missing], targets)
    assert got[0] is targets[0]
    assert got[2] is None
    assert targets[1].view(torch.uint8).numpy().tobytes() == page_bytes(writer.host, SLOTS)[1]
    assert reader.backend.get(keys[0], targets[2]) is targets[2]
    assert reader.backend.get(missing[0], targets[2]) is None
    assert reader.backend.get(keys[0]) is None
    assert reader.backend.set(missing[0], targets[0]) is True
    assert reader.backend.batch_set([], []) is True


@pytest.mark.parametrize("slots", [SLOTS[:-1], SLOTS + 1, SLOTS.flip(0), SLOTS + 1 << 20, None])
def test_invalid_slots_move_nothing(pair: tuple[Any, Any], slots: torch.Tensor | None) -> None:
    _, reader = pair
    before = [part.clone() for part in (reader.host.kv_buffer,)]
    keys = reader.hashes(TOKENS)
    assert reader.backend.batch_get_v1(keys, slots) == [False] * 10
    assert reader.backend.batch_set_v1(keys, slots) == [False] * 10
    assert torch.equal(before[0], reader.host.kv_buffer)


def test_buffer_of_another_size_is_refused(pair: tuple[Any, Any]) -> None:
    """R5: only buffers of exactly a page's length are copied."""
    _, reader = pair
    key = reader.hashes(TOKENS)[0]
    for count in (0, 7, reader.host.get_dummy_flat_data_page().numel() + 1):
        target = torch.full((count,), 3.0, dtype=torch.bfloat16)
        assert reader.backend.get(key, target) is None
        assert reader.backend.set(hashes([7] * PAGE, PAGE)[0], target) is False
        assert bool((target == 3.0).all())


@pytest.mark.parametrize("keys", [["no hex"], ["ab"], [""], ["00" * 32] * 2])
def test_invalid_keys_do_not_raise(pair: tuple[Any, Any], keys: list[str]) -> None:
    backend, slots = pair[1].backend, SLOTS[: PAGE * len(keys)]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, slots) == [False] * len(keys)
    assert backend.batch_set_v1(keys, slots) == [False] * len(keys)


@pytest.mark.parametrize("v1", [0, 1])
def test_page_evicted_between_query_and_read_shortens_the_prefix(engine: Make, v1: int) -> None:
    """R10: `exists` reported ten pages, then one of them was evicted."""
    writer, reader = engine(mha(), interface_v1=v1), engine(mha(), interface_v1=v1)
    fill(writer.host)
    fill(reader.host)
    writer.backup(TOKENS, SLOTS)
    operation = reader.query(TOKENS)
    assert operation.storage_hit_count == len(TOKENS)
    forget(writer, "kv", 6)
    slots = reader.host.alloc(len(TOKENS))
    before = page_bytes(reader.host, slots)
    tokens, _ = reader.fetch(operation, slots)
    assert tokens == 6 * PAGE
    now = page_bytes(reader.host, slots)
    assert now[:6] == page_bytes(writer.host, SLOTS)[:6]
    assert now[6:] == before[6:]
    assert reader.query(TOKENS).storage_hit_count == 6 * PAGE


def test_second_writer_succeeds_without_overwriting(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    expected = page_bytes(writer.host, SLOTS)
    fill(reader.host)
    assert reader.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    _, target = reader.prefetch(TOKENS)
    assert page_bytes(reader.host, target) == expected  # the first writer's pages


def test_full_node_stores_a_part(engine: Make) -> None:
    from harness import start_node

    with start_node("--ram-bytes", "1MiB", "--extent-bytes", "256KiB") as small:
        writer = engine(mha(slots=4096), address=small.address)
        tokens = list(range(200 * PAGE))
        fill(writer.host)
        done = writer.backup(tokens, torch.arange(len(tokens))).completed_tokens
        hit, target = writer.prefetch(tokens)
        assert hit <= done or done == 0
        assert page_bytes(writer.host, target[:hit]) == page_bytes(writer.host, torch.arange(hit))
        writer.detach()


# ---- side pools -----------------------------------------------------------------------------


def test_indexer_lost_after_the_query_shortens_the_prefix(engine: Make) -> None:
    """R4: a KV page without its indexer is a miss."""
    tokens = list(range(10 * 64))
    writer, reader = engine(*dsa(slots=2048)), engine(*dsa(slots=2048))
    fill(writer.host)
    writer.backup(tokens, torch.arange(len(tokens)), [indexer_transfer()])
    operation = reader.query(tokens, [indexer_transfer()])
    assert operation.storage_hit_count == len(tokens)
    forget(writer, "indexer", 6, tokens=tokens)
    done, _ = reader.fetch(operation)
    assert done == 6 * 64
    again = reader.query(tokens, [indexer_transfer()])
    assert again.storage_hit_count == 6 * 64
    assert again.query_pool_hit_pages == {PoolName.KV: 10, PoolName.INDEXER: 6}


def test_kv_without_its_indexer_is_a_miss(engine: Make) -> None:
    tokens = list(range(4 * 64))
    writer, reader = engine(*dsa()), engine(*dsa())
    writer.backup(tokens, torch.arange(len(tokens)))
    assert reader.query(tokens, [indexer_transfer()]).storage_hit_count == 0
    assert reader.query(tokens).storage_hit_count == len(tokens)


def trailing(engine: Any, count: int, pages: int = 10) -> PoolTransfer:
    """Return the transfer of a window of the last `count` of `pages` pages."""
    return PoolTransfer(
        name=PoolName.SWA,
        keys=engine.hashes(TOKENS)[pages - count : pages],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


def test_restorable_lengths_may_have_holes(engine: Make) -> None:
    made = engine(mha(), mha(name=PoolName.SWA))
    keys = made.hashes(TOKENS)
    made.backup(TOKENS, SLOTS)
    for last in (2, 3, 4, 8, 9):  # windows of two pages end at 3 and 4, and at 9
        slots = torch.arange(PAGE) + last * PAGE
        assert made.backend.batch_set_v2(
            [PoolTransfer(name=PoolName.SWA, keys=[keys[last - 1]], host_indices=slots)],
            extra_info=None,
        ) == {PoolName.SWA: [True]}
    result = made.backend.batch_exists_v2(keys, [trailing(made, 2)], None)
    assert result.restorable_prefix_pages == [3, 4, 9]
    assert result.kv_hit_pages == 9
    assert result.extra_pool_hit_pages == {PoolName.KV: 10, PoolName.SWA: 9}
    forget(made, "kv", 8)
    result = made.backend.batch_exists_v2(keys, [trailing(made, 2)], None)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [3, 4])


def test_block_groups_do_not_limit_hits(engine: Make) -> None:
    made = engine(mha(), mha(name=PoolName.SWA))
    made.backup(TOKENS, SLOTS)
    groups = PoolTransfer(name=PoolName.SWA, keys=None, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    result = made.backend.batch_exists_v2(made.hashes(TOKENS), [groups], None)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (10, {PoolName.KV: 10})


def test_unregistered_pool_is_a_miss(engine: Make) -> None:
    made = engine(mha())
    made.backup(TOKENS, SLOTS)
    keys = made.hashes(TOKENS)
    assert made.backend.batch_exists_v2(keys, [trailing(made, 1)], None).kv_hit_pages == 0
    transfer = PoolTransfer(name=PoolName.SWA, keys=keys[:1], host_indices=SLOTS[:PAGE])
    assert made.backend.batch_get_v2([transfer], extra_info=None) == {PoolName.SWA: [False]}
    assert made.backend.batch_set_v2([transfer], extra_info=None) == {PoolName.SWA: [False]}


def test_pool_registered_later_is_used(engine: Make) -> None:
    made, late = engine(mha()), mamba()
    made.backend.register_mem_host_pool_v2(late.host_pool, late.name)
    fill(late.host_pool)
    key = made.hashes(TOKENS)[:1]
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=key, host_indices=torch.tensor([3]))
    assert made.backend.batch_set_v2([transfer], extra_info=None) == {PoolName.MAMBA: [True]}
    back = PoolTransfer(name=PoolName.MAMBA, keys=key, host_indices=torch.tensor([4]))
    assert made.backend.batch_get_v2([back], extra_info=None) == {PoolName.MAMBA: [True]}
    pages = page_bytes(late.host_pool, torch.tensor([3, 4]))
    assert pages[0] == pages[1]


def test_anchor_without_memory_hits_with_its_side_pools(engine: Make) -> None:
    """The anchor of DeepSeek-V4 has slots, but no KV of its own."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
    from sglang.srt.mem_cache.pool_host.group import PoolEntry

    side = mha(name=PoolName.DEEPSEEK_V4_C4)
    anchor = PoolEntry(
        PoolName.KV,
        LogicalHostPool(side.host_pool.size, PAGE),
        side.device_pool,
        lambda i: i,
        is_primary_index_anchor=True,
    )
    made, transfer = (
        engine(anchor, side),
        PoolTransfer(name=side.name, indices_from_pool=PoolName.KV),
    )
    fill(side.host_pool)
    assert made.query(TOKENS).storage_hit_count == 0
    assert made.query(TOKENS, [transfer]).storage_hit_count == 0
    assert made.backup(TOKENS, SLOTS, [transfer]).completed_tokens == len(TOKENS)
    operation = made.query(TOKENS, [PoolTransfer(name=side.name, indices_from_pool=PoolName.KV)])
    assert operation.storage_hit_count == len(TOKENS)
    tokens, target = made.fetch(operation, SLOTS + 512)
    assert tokens == len(TOKENS)
    assert page_bytes(side.host_pool, target) == page_bytes(side.host_pool, SLOTS)
    assert made.query(TOKENS).storage_hit_count == 0  # an anchor alone is a miss


def test_only_one_rank_writes_latents(engine: Make) -> None:
    from harness import parallel

    with parallel(1, 2):
        second = engine(mla())
    calls: list[str] = []
    for name in ("batch_set_v1", "batch_set_v2", "batch_set", "set"):
        setattr(second.backend, name, lambda *_, name=name, **__: calls.append(name))
    second.backup(TOKENS, SLOTS)
    assert calls == []
    with parallel(0, 2):
        first = engine(mla())
    fill(first.host)
    first.backup(TOKENS, SLOTS)
    tokens, target = second.prefetch(TOKENS)
    assert tokens == len(TOKENS)
    assert page_bytes(second.host, target) == page_bytes(first.host, SLOTS)


# ---- statistics, injected failures, start -----------------------------------------------------


def test_statistics_are_reported_once(engine: Make) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    made = engine(mha(), settings={"metrics": True})
    made.backup(TOKENS, SLOTS)
    made.prefetch(TOKENS)
    stats = made.backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([10], [10])
    assert all(gb_s > 0 for gb_s in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert made.backend.get_stats() == StorageMetrics()


def test_random_failures_give_correct_bytes_or_fewer_pages(
    engine: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SGLang's fault injector fails half of all calls and delays the others."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    outcomes = set()
    for v1 in (0, 1):
        writer, reader = engine(mha(), interface_v1=v1), engine(mha(), interface_v1=v1)
        assert type(reader.backend).__name__ == "HiCacheStorageFailureInjector"
        fill(writer.host)
        for attempt in range(15):
            tokens = [100 * v1 + attempt, *TOKENS[1:]]  # both interfaces share pages
            stored = writer.backup(tokens, SLOTS).completed_tokens
            operation = reader.query(tokens)
            done, target = reader.fetch(operation, SLOTS + 256)
            outcomes.add((stored, operation.storage_hit_count, done))
            assert done <= operation.storage_hit_count <= stored
            assert page_bytes(reader.host, target[:done]) == page_bytes(writer.host, SLOTS[:done])
    assert (len(TOKENS),) * 3 in outcomes
    assert len(outcomes) > 1, "no failure was injected"


def test_first_request_compiles_and_starts_nothing(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: the store starts no process at the first request.

    SGLang builds its own hash at its first use, which the fixtures trigger.
    """
    made = engine(mha())

    def refuse(*args: Any, **_: Any) -> None:
        raise AssertionError(f"started {args}")

    for module, name in (
        ("subprocess", "Popen"),
        ("os", "posix_spawn"),
        ("os", "fork"),
        ("os", "system"),
    ):
        monkeypatch.setattr(f"{module}.{name}", refuse)
    assert os.fork is refuse
    assert made.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    assert made.prefetch(TOKENS)[0] == len(TOKENS)
