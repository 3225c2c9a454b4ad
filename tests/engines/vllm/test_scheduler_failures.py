"""vLLM's own scheduler with our connector: a failure is a miss, and nothing wrong is stored."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import scheduler_engine
from preemptions import schedule_by_priority, watch_preemptions
from scheduler_engine import BLOCK, Engines, answer, start_node, tokens
from stopping import stop

from gpu_agent.blocks.ranks import LoadsEnded

pytestmark = pytest.mark.filterwarnings("default")

P = tokens(7, 60)  # 3 blocks and 12 tokens


def assert_whole_prompt_loads(make: Engines, prompt: list[int], **arguments: Any) -> None:
    """Assert that a fresh engine loads the whole prompt and answers correctly."""
    engine = make(**arguments)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.cached == {"r": (len(prompt) - 1) // BLOCK * BLOCK}


@pytest.mark.parametrize("page", [0, 1, 2])
def test_page_lost_between_lookup_and_load_is_recomputed_and_saved(
    make: Engines, page: int
) -> None:
    """If the first page is lost, the request must not be offered the same load forever."""
    make.save(P)
    engine = make()
    engine.forget_when_loading(page)
    assert engine.generate(P) == answer(P, 8)
    assert engine.stats.data["loads_failed"] == 1
    assert engine.stats.data["lookups"] == 1
    assert len([step for step in engine.steps if step]) < 20
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert_whole_prompt_loads(make, P)


def test_second_bad_page_ends_the_prefix(make: Engines) -> None:
    make.save(P)
    engine = make()
    engine.forget_when_loading(1)
    assert engine.generate(P) == answer(P, 8)
    assert next(step for step in engine.steps if step) == {"r": 44}


@pytest.mark.parametrize("group", [0, 1])
def test_failed_load_with_several_groups_is_recomputed_from_the_start(
    make: Engines, group: int
) -> None:
    prompt = tokens(7, 200)
    make.save(prompt, window=40, blocks=128)
    engine = make(window=40, blocks=128)
    engine.forget_when_loading(1, group=group)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert next(step for step in engine.steps if step) == {"r": 200}
    assert len([step for step in engine.steps if step]) < 20
    assert_whole_prompt_loads(make, prompt, window=40, blocks=128)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_computed_from_a_failed_load_are_never_saved(make: Engines, ranks: int) -> None:
    """Contract 5, poisoning: the second block of a loaded prefix fails on one rank only.

    A third engine reads all pages back.
    """
    prompt = P[:48] + tokens(13, 70)
    make.save(P, ranks=ranks)
    engine = make(ranks=ranks, batch_tokens=80)  # recomputing takes several steps
    engine.reads_at_once = True
    engine.forget_when_loading(1, rank=ranks - 1)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert engine.stats.data["loads_failed"] == 1
    assert_whole_prompt_loads(make, prompt, ranks=ranks)


def test_overlapping_steps_save_correct_blocks(make: Engines) -> None:
    """With async scheduling, steps are planned before the results of earlier ones are known."""
    prompt = tokens(17, 200)
    make.save(prompt[:100], count=40, overlap=True, batch_tokens=64)
    engine = make(overlap=True, batch_tokens=64)
    engine.forget_when_loading(3)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert_whole_prompt_loads(make, prompt)
    longer = prompt[:100] + answer(prompt[:100], 40)
    assert_whole_prompt_loads(make, longer[:130])


@pytest.mark.parametrize("ranks", [1, 2])
def test_overlapping_steps_after_a_failed_load_poison_nothing(make: Engines, ranks: int) -> None:
    """Steps are planned before the result of the step that reports the failure is known."""
    prompt = P[:48] + tokens(13, 150)
    make.save(P, ranks=ranks)
    engine = make(ranks=ranks, overlap=True, batch_tokens=48)
    engine.reads_at_once = True
    engine.forget_when_loading(1, rank=ranks - 1)
    assert engine.generate(prompt, 1) == answer(prompt, 1)
    assert engine.stats.data["loads_failed"] == 1
    assert_whole_prompt_loads(make, prompt, ranks=ranks)


def test_two_requests_sharing_a_failed_load_are_correct(make: Engines) -> None:
    """The second request may not read blocks that the first one is still loading."""
    one, two = P[:48] + tokens(13, 40), P[:48] + tokens(17, 40)
    make.save(P)
    engine = make()
    engine.forget_when_loading(1)
    engine.add("one", one)
    engine.add("two", two)
    engine.run()
    assert engine.outputs == {"one": answer(one, 8), "two": answer(two, 8)}
    for prompt in (one, two):
        again = make()
        assert again.generate(prompt) == answer(prompt, 8)
        assert again.cached["r"] >= 48


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_request_ended_during_recomputation_leaves_no_wrong_block(
    make: Engines, end: str, ranks: int, window: int
) -> None:
    """Regression: loads within a step (`load="sync"`, removed) left failed blocks in the prefix
    cache.

    A request that hits such blocks computes from garbage, and its results are stored.
    """
    one, two = P[:48] + tokens(13, 200), P[:48] + tokens(13, 70)
    arguments = {"ranks": ranks, "window": window, "blocks": 128}
    make.save(P, **arguments)
    engine = make(**arguments, batch_tokens=16)
    engine.forget_when_loading(1, rank=ranks - 1)
    request = engine.add("one", one)
    engine.run(until=lambda: bool(engine.stats.data.get("loads_failed")))
    if end == "abort":
        engine.abort("one")
    else:
        engine.run(until=lambda: request in engine.scheduler.running)
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
    assert engine.generate(two, name="two") == answer(two, 8)
    assert end == "abort" or engine.outputs["one"] == answer(one, 8)
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert_whole_prompt_loads(make, two, **arguments)


def test_policy_fail_ends_only_the_failed_request(make: Engines) -> None:
    make.save(P)
    engine = make(policy="fail")
    engine.forget_when_loading(1)
    assert engine.generate(P, name="failed") == []
    assert engine.generate(tokens(3, 40), name="next") == answer(tokens(3, 40), 8)
    assert engine.pool.get_num_free_blocks() == engine.free_blocks


def test_request_aborted_during_its_load_frees_its_blocks(make: Engines) -> None:
    make.save(P)
    engine = make()
    loading: list[Any] = []
    engine.on_execute = lambda orders: loading.extend(orders.loads)
    engine.add("r", P)
    engine.run(until=lambda: bool(loading))
    engine.abort("r")
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert_whole_prompt_loads(make, P)


@pytest.mark.parametrize("window", [0, 40])
def test_request_aborted_while_one_rank_loads_saves_nothing_wrong(
    make: Engines, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """One rank's load has failed while the other rank is still loading.

    vLLM learns of the failure when both have ended; until then the promised tokens count as
    computed.
    """
    prompt, arguments = tokens(7, 200), {"window": window, "blocks": 128, "ranks": 2}
    make.save(prompt, **arguments)
    engine = make(**arguments)
    engine.forget_when_loading(1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.ranks[1].connector._rank, "loads_ended", LoadsEnded)  # still loading
        engine.add("r", prompt)
        engine.run(until=lambda: bool(engine.stats.data.get("loads_failed")))
        engine.abort("r")
        for _ in range(50):
            engine.step()
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    again = make(**arguments)
    assert again.generate(prompt) == answer(prompt, 8)


def test_request_aborted_during_prefill_saves_correct_blocks(make: Engines) -> None:
    prompt = tokens(17, 200)
    engine = make(batch_tokens=64)
    engine.add("r", prompt)
    engine.run(until=lambda: len([step for step in engine.steps if step]) == 2)
    engine.abort("r")
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    again = make()
    assert again.generate(prompt) == answer(prompt, 8)
    assert again.cached == {"r": 128}


def test_engine_starts_and_runs_without_a_node(make: Engines) -> None:
    make.address = "127.0.0.1:1"
    engine = make(store={"lookup_timeout_s": 0.5, "save_timeout_s": 0.5})
    assert engine.generate(P) == answer(P, 8)
    assert engine.pool.get_num_free_blocks() == engine.free_blocks


def test_r7_hung_node_costs_one_deadline(make: Engines) -> None:
    """R7: if a node stops answering, one request waits for one deadline, and later ones do not."""
    with start_node() as node:
        make.address = node.address
        make.save(P)
        deadlines = {"lookup_timeout_s": 3.0, "load_timeout_s": 3.0, "save_timeout_s": 3.0}
        engine = make(store=deadlines)
        assert engine.generate(P, name="before") == answer(P, 8)
        stop(node.pid)
        try:
            began = time.monotonic()
            for number in range(8):
                prompt = tokens(19 + number, 60)
                engine.add(f"r{number}", prompt)
                engine.run(until=lambda: not engine.scheduler.has_unfinished_requests())
                assert engine.outputs[f"r{number}"] == answer(prompt, 8)
            assert time.monotonic() - began < 5 * 3.0  # eight that waited would take 24 s
        finally:
            os.kill(node.pid, signal.SIGCONT)


def test_node_killed_before_the_load_is_a_miss(make: Engines) -> None:
    with start_node() as node:
        make.address = node.address
        make.save(P)
        engine = make(store={"load_timeout_s": 1.0})

        def kill(orders: Any) -> None:
            if orders.loads:
                node.kill()

        engine.on_execute = kill
        assert engine.generate(P) == answer(P, 8)
        assert engine.stats.data["loads_failed"] == 1


def test_r2_reset_makes_stored_pages_miss(make: Engines) -> None:
    """R2: after a weight update, lookups use a new epoch, and blocks computed before are not saved
    in it.

    Another engine with the old weights keeps the old epoch.
    """
    make.save(P)
    engine = make()
    engine.add("old", tokens(3, 100), 20)
    engine.run(until=lambda: len(engine.outputs["old"]) == 3)
    assert engine.connector.reset_cache() is True
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for name, prompt in (("stored before", P), ("computed before", tokens(3, 100))):
        assert engine.generate(prompt, name=name) == answer(prompt, 8)
        assert engine.cached[name] == 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate(P, name="stored after") == answer(P, 8)
    assert engine.cached["stored after"] == 48
    assert_whole_prompt_loads(make, P)
    other = make()
    other.connector.reset_cache()
    assert other.generate(P) == answer(P, 8)
    assert other.cached == {"r": 0}


def test_load_in_progress_during_a_reset_is_discarded(make: Engines) -> None:
    make.save(P)
    engine = make()

    def reset(orders: Any) -> None:
        if orders.loads:
            engine.connector.reset_cache()

    engine.on_execute = reset
    engine.add("r", P)
    engine.run()
    assert engine.outputs["r"] == answer(P, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"store": {"revision": "b"}},
        {"store": {"model": "b"}},
        {"store": {"salt": "b"}},
        {"store": {"epoch": 1}},
        {"ranks": 2},
        {"hash_algorithm": "sha256_cbor"},
    ],
    ids=lambda change: " ".join(change.get("store", change)),
)
def test_r1_other_configurations_never_hit(make: Engines, change: dict[str, Any]) -> None:
    """R1: each change alone makes another namespace, in which another engine finds nothing."""
    make.save(P)
    engine = make(**change)
    first = make()
    mine = {space.digest for group in engine.ranks[0].connector._namespaces for space in group}
    assert not mine & {
        space.digest for group in first.ranks[0].connector._namespaces for space in group
    }
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 0}


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "kv_cache_layout", "BLHNC"),
        ("model_config", "quantization", "awq"),
        ("model_config", "dtype", "bfloat16"),
    ],
)
def test_r1_namespace_covers_every_fact(
    make: Engines, monkeypatch: pytest.MonkeyPatch, place: str, name: str, value: Any
) -> None:
    """R1: an engine's dtype, quantization, KV dtype and layout are read from its configuration."""
    engine = make()
    before = engine.ranks[0].connector._namespaces[0][0].digest
    monkeypatch.setattr(getattr(engine.config, place), name, value)
    connector = engine.ranks[0].connector
    connector.register_kv_caches(engine.ranks[0].kv)
    assert connector._namespaces[0][0].digest != before


def test_engine_without_prefix_caching_does_not_use_the_store(
    make: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM disables prefix caching where a prompt must not continue from cached KV.

    The store must not bypass that, and the log says so.
    """
    make.save(P)
    engine = make(prefix_caching=False)
    assert "nothing is saved or loaded" in caplog.text
    assert "--enable-prefix-caching" in caplog.text
    assert engine.generate(P) == answer(P, 8)
    assert engine.cached == {"r": 0}
    assert all(rank.connector._rank is None for rank in engine.ranks)


def test_r22_first_request_compiles_and_starts_nothing(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: agents, buffers and kernels are ready when the engine is.

    A first hit and a first save start no process and import no module of ours.
    """
    make.save(P)
    engine = make()
    assert all(rank.connector._rank for rank in engine.ranks)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = set(sys.modules)
    assert engine.generate(P, 40) == answer(P, 40)
    assert engine.cached == {"r": 48}
    ours = {
        name
        for name in set(sys.modules) - before
        if name.split(".")[0] in ("gpu_agent", "kvstore", "cupy")
    }
    assert ours == set()


@pytest.mark.parametrize("params", [{}, {"kvstore.skip": True}], ids=["stored", "skipped"])
def test_blocks_of_a_step_that_lost_its_request_are_not_used(
    make: Engines, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """vLLM 0.33 has them in its prefix cache: it preempted the request after scheduling it."""
    schedule_by_priority(scheduler_engine, monkeypatch)
    engine = make(blocks=20, batch_tokens=96)
    found = watch_preemptions(engine.scheduler, BLOCK, monkeypatch)
    long, short = tokens(7, 257), tokens(11, 30)
    engine.add("long", long, 4, priority=5, kv_transfer_params=params)
    engine.connector._lookups.awaited("long", 10.0)
    engine.step()
    engine.add("short", short, priority=0)
    engine.connector._lookups.awaited("short", 10.0)
    engine.run()
    assert any(found)  # with blocks that this step would have computed
    assert engine.outputs == {"long": answer(long, 4), "short": answer(short, 8)}
    fresh = make(blocks=64)
    assert fresh.generate(long, 4) == answer(long, 4)


@pytest.mark.parametrize(
    ("option", "value"), [("lora", "yes"), ("adress", "x"), ("lookup_timeout_s", -1)]
)
def test_wrong_option_fails_the_start_by_name(make: Engines, option: str, value: Any) -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match=option), contextlib.ExitStack():
        make(store={option: value})


@pytest.mark.parametrize("value", ["sync", "async"])
def test_removed_option_load_is_refused_with_its_fix(make: Engines, value: str) -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(
        ConfigError,
        match=r"option load='\w+' was removed: delete it; .* asynchronous.*failed load.*stored",
    ):
        make(store={"load": value})
