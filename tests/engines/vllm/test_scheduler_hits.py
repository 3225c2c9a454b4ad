"""vLLM's own scheduler from the official wheel, with our connector and a real node: hits."""

import time
from pathlib import Path
from typing import Any

import pytest
from asking import traces_of_calls
from scheduler_engine import BLOCK, Engines, adapter, answer, start_node, tokens

from gpu_agent.blocks import scheduler
from kvstore.client import Client
from kvstore.tracing import named

pytestmark = pytest.mark.filterwarnings("default")

P = tokens(7, 60)  # 3 blocks and 12 tokens


def test_second_engine_loads_what_the_first_computed(make: Engines) -> None:
    make.save(P)
    engine = make()
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 48}
    assert next(step for step in engine.steps if step) == {"r": 12}
    assert engine.pool.get_num_free_blocks() == engine.free_blocks


def test_calls_carry_the_request_id(make: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traces_of_calls(monkeypatch)
    writer, reader = make(), make()
    del asked[:]  # opening namespaces belongs to no request
    writer.generate(P, name="cmpl-1")
    writer.close()
    saved = set(asked)
    del asked[:]
    reader.generate(P, name="cmpl-2")
    assert reader.cached == {"cmpl-2": 48}
    assert named("cmpl-1") in saved
    assert named("cmpl-2") in asked
    assert saved | set(asked) <= {named("cmpl-1"), named("cmpl-2"), None}, "None is for connecting"


def test_load_does_not_delay_other_requests(make: Engines) -> None:
    """A hit takes no slot of the batch while it loads."""
    make.save(P)
    engine = make()
    engine.add("hit", P)
    engine.add("other", tokens(3, 40))
    engine.run()
    assert engine.outputs == {"hit": answer(P, 8), "other": answer(tokens(3, 40), 8)}
    assert engine.cached == {"other": 0, "hit": 48}  # in the order of first tokens


def test_prompt_of_whole_blocks_leaves_one_token_to_compute(make: Engines) -> None:
    prompt = tokens(11, 4 * BLOCK)
    make.save(prompt)
    engine = make()
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.cached == {"r": 63}


def test_longer_prompt_loads_its_stored_prefix(make: Engines) -> None:
    make.save(P)
    longer = P[:48] + tokens(13, 30)
    engine = make()
    assert engine.generate(longer) == answer(longer, 8)
    assert engine.cached == {"r": 48}


def test_locally_cached_blocks_are_not_loaded(make: Engines) -> None:
    longer = tokens(7, 100)
    make.save(longer)
    engine = make()
    assert engine.generate(longer[:40], name="short") == answer(longer[:40], 8)
    assert engine.generate(longer, name="long") == answer(longer, 8)
    assert engine.cached == {"short": 32, "long": 96}
    assert engine.stats.data["pages_loaded"] == 2 + 4


def test_generated_tokens_are_saved_in_blocks(make: Engines) -> None:
    make.save(P, count=40)  # 99 tokens with KV in the end
    longer = P + answer(P, 40)
    engine = make()
    assert engine.generate(longer) == answer(longer, 8)
    assert engine.cached == {"r": 96}


def test_prompt_computed_in_chunks_is_saved_whole(make: Engines) -> None:
    prompt = tokens(17, 200)
    make.save(prompt, batch_tokens=48)
    engine = make(batch_tokens=48)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.cached == {"r": 192}


def test_preempted_request_reloads_its_own_pages(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 12.2: with at least one preemption, a request loads pages that it saved itself."""
    monkeypatch.setattr(scheduler, "REFRESH_S", 0.02)
    monkeypatch.setattr(
        "gpu_agent.engines.vllm.HOLD_S", 0.0
    )  # blocks are few and must be freed early
    monkeypatch.setattr("gpu_agent.engines.vllm.PINNED_SHARE", 2)
    engine = make(blocks=9)
    one, two = tokens(7, 50), tokens(11, 50)
    orders: list[Any] = []
    # Slow the steps down, so that saves can keep up.
    engine.on_execute = lambda step: (
        orders.append(step),
        time.sleep(0.005),
    )
    requests = [engine.add("one", one, 60), engine.add("two", two, 40)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) >= 1
    assert any(step.loads for step in orders)
    assert engine.outputs == {"one": answer(one, 60), "two": answer(two, 40)}
    assert engine.pool.get_num_free_blocks() == engine.free_blocks


def test_waiting_request_makes_one_lookup(make: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    make.save(P)
    engine = make()
    asked = []
    original = Client.lookup

    def lookup(
        self: Client, namespace: Any, hashes: Any, touch: bool = False, timeout_s: Any = None
    ) -> Any:
        if not touch and self is engine.connector._lookups._backend._client:
            asked.append(len(hashes))
        return original(self, namespace, hashes, touch, timeout_s)

    monkeypatch.setattr(Client, "lookup", lookup)
    request = engine.add("r", P)
    polls = [engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(200)]
    engine.run()
    assert polls[0] == (None, False)  # not known yet
    assert engine.cached == {"r": 48}
    assert asked == [3]


def test_window_group_loads_its_window_and_no_null_block(make: Engines) -> None:
    prompt = tokens(7, 200)
    orders: list[Any] = []
    for _ in range(2):
        engine = make(window=40, blocks=128)
        engine.on_execute = orders.append
        assert engine.generate(prompt) == answer(prompt, 8)
        assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert engine.cached == {"r": 192}
    moved = [
        part for step in orders for order in [*step.loads, *step.saves] for part in order.parts
    ]
    assert moved
    assert all(0 not in part.blocks for part in moved)
    full, window = next(step.loads for step in orders if step.loads)[0].parts
    assert len(full.keys) == 12
    assert len(window.keys) == 3  # 39 tokens before the next token


def test_window_group_may_lack_blocks_before_its_window(make: Engines) -> None:
    prompt = tokens(7, 200)
    make.save(prompt, window=40, blocks=128)
    engine = make(window=40, blocks=128)
    keys = list(engine.add("probe", prompt).block_hashes)
    engine.abort("probe")
    engine.forget(keys[:5], group=1)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.cached == {"r": 192}


@pytest.mark.parametrize(
    ("group", "block", "hit"),
    [(0, 7, 7), (1, 7, 12), (1, 10, 10), (0, 0, 0), (1, 11, 11)],
    ids=["full", "before the window", "in the window", "the head", "the last"],
)
def test_r4_block_missing_in_one_group_shortens_the_prefix(
    make: Engines, group: int, block: int, hit: int
) -> None:
    """R4: a block hits only if all groups that need it have it."""
    prompt = tokens(7, 200)
    make.save(prompt, window=40, blocks=128)
    engine = make(window=40, blocks=128)
    keys = list(engine.add("probe", prompt).block_hashes)
    engine.abort("probe")
    engine.forget([keys[block]], group=group)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.cached == {"r": hit * BLOCK}


def test_r4_block_missing_in_one_rank_shortens_the_prefix(make: Engines) -> None:
    """R4: a block hits only if the shards of all ranks exist; the missing one is saved again."""
    make.save(P, ranks=2)
    engine = make(ranks=2)
    keys = list(engine.add("probe", P).block_hashes)
    engine.abort("probe")
    engine.forget([keys[1]], rank=1)
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 16}
    again = make(ranks=2)
    assert again.generate(P) == answer(P, 8)
    assert again.cached == {"r": 48}


def test_request_can_skip_the_store(make: Engines) -> None:
    engine = make()
    assert engine.generate(P, kv_transfer_params={"kvstore.skip": True}) == answer(P, 8)
    other = make()
    assert other.generate(P, kv_transfer_params={"kvstore.skip": True}) == answer(P, 8)
    assert other.generate(P, name="s") == answer(P, 8)
    assert other.cached["r"] == 0


def test_r3_cache_salt_isolates_tenants(make: Engines) -> None:
    """R3: the salt is part of the engine's block hash, which is our key."""
    engine = make()
    assert engine.generate(P, cache_salt="a") == answer(P, 8)
    other = make()
    assert other.generate(P, cache_salt="b", name="b") == answer(P, 8)
    assert other.generate(P, cache_salt="a", name="a") == answer(P, 8)
    assert other.cached == {"b": 0, "a": 48}


def test_counts_appear_in_vllms_statistics(make: Engines) -> None:
    make.save(P)
    engine = make()
    assert engine.generate(P) == answer(P, 8)
    counts = engine.stats.data
    assert counts["lookups"] == counts["hits"] == counts["loads"] == 1
    assert (counts["queried_tokens"], counts["hit_tokens"], counts["pages_loaded"]) == (60, 48, 3)
    assert (
        counts["loaded_nbytes"]
        == 3 * engine.ranks[0].connector._namespaces[0][0].layout.page_nbytes
    )
    assert "loads_failed" not in counts
    rebuilt = type(engine.connector).build_kv_connector_stats(counts)
    assert (
        rebuilt.aggregate(type(engine.connector).build_kv_connector_stats(counts)).reduce()[
            "hit_tokens"
        ]
        == 96
    )


def test_hit_tokens_are_counted_by_tier(make: Engines, tmp_path: Path) -> None:
    """A node that was restarted has its pages on disk only; those that were read are in RAM."""
    flags = ("--data-dir", str(tmp_path / "data"), "--disk-bytes", "128MiB")
    with start_node(*flags) as node:
        make.save(P, store={"address": node.address})
    with start_node(*flags) as node:
        for name, tier in (("first", "disk"), ("second", "ram")):
            engine = make(store={"address": node.address})
            assert engine.generate(P, name=name) == answer(P, 8)
            counts = {key: n for key, n in engine.stats.data.items() if "hit_tokens" in key}
            assert counts == {"hit_tokens": 48, f"hit_tokens_{tier}": 48}


def test_engine_reports_its_counts_before_it_becomes_idle(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are reported rarely while requests run, so the last step must report the rest.

    Otherwise they would wait for the next request.
    """
    monkeypatch.setattr(adapter, "STATS_S", 3600.0)
    engine = make()
    for number in range(3):
        engine.generate(tokens(13 + number, 60), name=f"r{number}")
    engine.step()  # an empty step, as the last one of every engine
    assert engine.stats.data["pages_saved"] == 3 * 4
    assert engine.ranks[0].connector._rank.counts.pages_saved == 0, "some counts were not reported"


def test_long_prompt_at_the_head_of_the_queue_gets_its_blocks(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a long prompt that needs 60 of 88 blocks never ran while short ones kept coming.

    Whenever its lookup was refreshed, vLLM got "not known yet", skipped it, and gave the free
    blocks to the prompts behind it.
    """
    monkeypatch.setattr(scheduler, "REFRESH_S", 0.2)
    engine, count = make(blocks=89), 0

    def short() -> None:
        nonlocal count
        count += 1
        engine.add(f"short {count}", [count % 500 + 5, count // 500 + 5, *tokens(3, 63)], 100)

    for _ in range(8):  # staggered, so that blocks become free gradually
        short()
        for _ in range(12):
            engine.step()
    engine.add("long", tokens(7, 960), 4)
    for _ in range(400):
        while (
            sum(
                request.status.name.startswith("WAITING")
                for request in engine.scheduler.requests.values()
            )
            < 4
        ):
            short()
        engine.step()
        time.sleep(0.006)
        if "long" in engine.steps[-1]:
            return
    raise AssertionError(f"still waiting after 400 steps and {count} requests")
