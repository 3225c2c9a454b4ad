"""vLLM's own scheduler: blocks of a long prompt that found no room before its request ended.

At most a quarter of the blocks is pinned for saves. The others stay in vLLM's prefix cache and are
saved when there is room, as long as vLLM does not evict them.
"""

from typing import Any

import pytest
from scheduler_engine import BLOCK, Engine, Engines, answer, tokens

pytestmark = pytest.mark.filterwarnings("default")

LONG = tokens(7, 900)  # 56 blocks, where 16 may be pinned


def assert_loads(make: Engines, prompt: list[int], tokens: int, **arguments: Any) -> None:
    """Assert that a fresh engine loads so many tokens of a prompt and answers correctly."""
    engine = make(blocks=256, **arguments)
    assert engine.generate(prompt, 1) == answer(prompt, 1)
    assert engine.cached == {"r": tokens}


def serve_holding(engine: Engine, prompt: list[int], count: int = 1) -> None:
    """Serve a prompt while no rank reports a save, so that pinned blocks stay pinned."""
    for rank in engine.ranks:
        rank.held = []
        rank.connector._rank.save = rank.held.extend
    engine.add("r", prompt, count)
    while not engine.requests["r"].is_finished():
        engine.step()


def release(engine: Engine) -> None:
    """Let the ranks save what `serve_holding` held back."""
    for rank in engine.ranks:
        del rank.connector._rank.save
        rank.connector._rank.save(rank.held)


def late_blocks(engine: Engine) -> list[int]:
    plan = engine.connector._scheduler._plan
    staged = [*plan._late, *(some for step in plan._steps.values() for some in step if some.late)]
    return [block for some in staged for part in some.parts for block in part.blocks]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ranks": 2},
        {"overlap": True, "batch_tokens": 128},
        {"window": 40, "blocks": 128},
        {"states": 32, "blocks": 96, "batch_tokens": 128},
    ],
    ids=["plain", "ranks", "overlap", "window", "states"],
)
def test_end_of_a_long_prompt_is_saved_after_its_request(
    make: Engines, arguments: dict[str, Any]
) -> None:
    engine = make(**{"blocks": 64, **arguments})
    serve_holding(engine, LONG)
    assert len(late_blocks(engine)) > 20
    release(engine)
    engine.run()
    assert engine.stats.data.get("pages_dropped", 0) == 0
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    shape = {name: arguments[name] for name in ("ranks", "window", "states") if name in arguments}
    assert_loads(make, LONG, 896, **shape)


@pytest.mark.parametrize("overlap", [False, True])
def test_window_that_the_answer_leaves_behind_is_saved(make: Engines, overlap: bool) -> None:
    """The engine frees those blocks while the request runs, and no save had room for them."""
    shape = {"window": 40}
    engine = make(blocks=128, batch_tokens=128, overlap=overlap, **shape)
    serve_holding(engine, LONG, 8)
    release(engine)
    engine.run()
    assert engine.stats.data.get("pages_dropped", 0) == 0
    assert_loads(make, LONG, 896, **shape)


def test_window_of_the_last_state_is_saved(make: Engines) -> None:
    """A hit ends with a state, up to two blocks before the end of the prompt."""
    shape, prompt = {"window": 40, "states": 32}, tokens(7, 890)
    engine = make(blocks=128, batch_tokens=128, **shape)
    serve_holding(engine, prompt, 8)
    release(engine)
    engine.run()
    assert_loads(make, prompt, 864, **shape)


def test_window_is_saved_from_the_table_as_long_as_it_is_there(make: Engines) -> None:
    """In a full engine, a block that has left the window is soon another one."""
    shape = {"window": 200}
    engine = make(blocks=160, batch_tokens=128, **shape)
    for rank in engine.ranks:
        rank.held = []
        rank.connector._rank.save = rank.held.extend
    engine.add("r", LONG, 40)
    while engine.requests["r"].num_output_tokens < 2:
        engine.step()
    taken = list[Any]()
    engine.reads_at_once = True
    release(engine)
    while not engine.requests["r"].is_finished():
        taken += engine.pool.get_new_blocks(max(0, engine.pool.get_num_free_blocks() - 4))
        engine.step()
    engine.pool.free_blocks(taken)
    engine.run()
    assert_loads(make, LONG, 896, **shape)


def test_blocks_that_vllm_evicted_meanwhile_are_counted_and_not_saved(make: Engines) -> None:
    engine = make(blocks=64)
    serve_holding(engine, LONG)
    late = late_blocks(engine)
    # vLLM gives some of them to another request, which writes other bytes
    engine.add("other", tokens(11, 170), 1)
    while not engine.requests["other"].is_finished():
        engine.step()
    release(engine)
    engine.run()
    dropped = engine.stats.data["pages_dropped"]
    assert 0 < dropped < len(late)
    assert_loads(make, LONG, 896 - dropped * BLOCK)
    assert_loads(make, tokens(11, 170), 160)


def test_late_blocks_never_make_blocks_scarce(make: Engines) -> None:
    engine = make(blocks=64)
    serve_holding(engine, LONG)
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 10)
    release(engine)
    for _ in range(20):
        engine.step()
        assert engine.pool.get_num_free_blocks() >= 8
    engine.pool.free_blocks(taken)
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_computed_blocks_of_an_aborted_request_are_saved(make: Engines, overlap: bool) -> None:
    engine = make(blocks=64, batch_tokens=512, overlap=overlap)
    engine.add("r", LONG)
    while not engine.scheduler.running:
        engine.step()
    engine.abort("r")
    assert len(late_blocks(engine)) == 16  # of 32 computed ones
    engine.run()
    assert engine.stats.data.get("pages_dropped", 0) == 0
    assert_loads(make, LONG, 512)


def test_preempted_request_loses_no_block(make: Engines) -> None:
    engine = make(blocks=64)
    engine.add("r", LONG, 2)
    while not engine.scheduler.running:
        engine.step()
    (request,) = engine.scheduler.running
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.run()
    assert engine.outputs["r"] == answer(LONG, 2)
    assert engine.stats.data.get("pages_dropped", 0) == 0
    assert_loads(make, LONG, 896)


def test_reset_forgets_late_blocks(make: Engines) -> None:
    """They were computed with the weights before the reset."""
    engine = make(blocks=64)
    serve_holding(engine, LONG)
    engine.connector.reset_cache()
    assert late_blocks(engine) == []
    release(engine)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.generate(LONG, 1, name="again") == answer(LONG, 1)
    assert engine.cached["again"] == 0


def test_prefix_cache_reset_without_the_connector_drops_late_blocks(make: Engines) -> None:
    engine = make(blocks=64)
    serve_holding(engine, LONG)
    late = late_blocks(engine)
    engine.pool.evict_blocks(set(late))
    release(engine)
    engine.run()
    assert engine.stats.data["pages_dropped"] == len(late)
    assert_loads(make, LONG, 896 - len(late) * BLOCK)
