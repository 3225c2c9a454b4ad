"""vLLM's own scheduler with recurrent states beside attention, with our connector and a node."""

from typing import Any

import pytest
from scheduler_engine import BLOCK, Engine, Engines, answer, tokens

pytestmark = pytest.mark.filterwarnings("default")
SHAPES = [
    {"states": BLOCK},
    {"states": 2 * BLOCK},
    {"states": BLOCK, "checkpoints": True},
    {"states": 2 * BLOCK, "checkpoints": True},  # they are mostly within blocks
    {"states": 2 * BLOCK, "window": 40, "blocks": 128},
]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)
STATES = {"states": 2 * BLOCK}
P = tokens(7, 100)  # 3 blocks of states and 4 tokens


def states_of(engine: Engine, rank: int = 0) -> Any:
    """Return the namespace of the states of a rank."""
    (space,) = engine.ranks[rank].connector._namespaces[-1]
    return space


def stored_states(engine: Engine, prompt: list[int], rank: int = 0) -> list[int]:
    """Return which blocks of states of a prompt are stored."""
    request = engine.add("asked", prompt, 1)
    step = (engine.connector._groups[-1].block_tokens) // engine.connector._hash_tokens
    client = engine.ranks[rank].connector._rank._backend._client
    found = client.lookup(states_of(engine, rank), request.block_hashes[step - 1 :: step])
    engine.abort("asked")
    return [number for number, there in enumerate(found.present) if there]


@ALL_SHAPES
def test_prompt_of_any_length_resumes_at_its_last_state(
    make: Engines, shape: dict[str, Any]
) -> None:
    """vllm#53084: multiples of a block and of a chunk, and one more or less, and less than a block.

    A prompt is asked again and continued; another engine loads what both computed.
    """
    writer, reader, block = make(**shape, batch_tokens=96), make(**shape), shape["states"]
    lengths = [5, block - 1, block, block + 1, 95, 96, 97, 3 * block, 5 * block, 191, 192, 193]
    for length in lengths:
        prompt = tokens(length, length)
        for name, engine in (("writer", writer), ("reader", reader)):
            expected = answer(prompt, 8)
            assert engine.generate(prompt, name=f"{name} {length}") == expected, length
            longer = prompt + expected + tokens(3, 20)
            assert engine.generate(longer, name=f"{name} longer {length}") == answer(longer, 8)
        loaded = reader.cached[f"reader {length}"]
        expected = (length - 1) // block * block
        assert loaded == expected or (block > BLOCK and shape.get("checkpoints")), length
    for engine in (writer, reader):
        assert engine.pool.get_num_free_blocks() == engine.free_blocks
        assert not engine.stats.data.get("loads_failed")


def test_swapped_states_are_noticed_by_the_model(make: Engines) -> None:
    """The simulated model of these tests would show a wrong state."""
    other = tokens(11, 100)
    make.save(P, **STATES)
    make.save(other, **STATES)
    engine = make(**STATES)

    def swap(orders: Any) -> None:
        for load in orders.loads:
            one, two = (load.parts[-1], orders.loads[1 - orders.loads.index(load)].parts[-1])
            one.keys[:], two.keys[:] = two.keys[:], one.keys[:]
            break

    engine.on_execute = swap
    for name, prompt in (("one", P), ("two", other)):
        engine.add(name, prompt)
        engine.connector._lookups.awaited(name, 10.0)
    engine.run()
    assert engine.cached == {"one": 96, "two": 96}
    assert engine.outputs["one"] != answer(P, 8)
    assert engine.outputs["two"] != answer(other, 8)


def test_chunks_of_a_prompt_store_a_state_each(make: Engines) -> None:
    prompt = tokens(7, 300)
    writer = make(**STATES, batch_tokens=96)
    assert writer.generate(prompt) == answer(prompt, 8)
    assert stored_states(writer, prompt) == [2, 5, 8]
    reader = make(**STATES)
    assert reader.generate(prompt[:200]) == answer(prompt[:200], 8)
    assert reader.cached == {"r": 192}


@pytest.mark.parametrize("group", [0, 1])
def test_hit_needs_attention_and_state_of_its_end(make: Engines, group: int) -> None:
    """A state without attention pages, or the reverse, shortens the hit to the boundary before."""
    prompt = tokens(7, 300)
    writer = make(**STATES, batch_tokens=96)
    writer.generate(prompt)
    request = writer.add("r2", prompt, 1)
    last = request.block_hashes[17]  # the token before 288
    writer.abort("r2")
    writer.forget([last], group=group)
    reader = make(**STATES)
    assert reader.generate(prompt) == answer(prompt, 8)
    assert reader.cached == {"r": 192}
    assert stored_states(reader, prompt) == [2, 5, 8]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_without_a_state_shortens_the_hit(make: Engines, ranks: int) -> None:
    prompt = tokens(7, 300)
    writer = make(**STATES, batch_tokens=96, ranks=ranks)
    writer.generate(prompt)
    request = writer.add("r2", prompt, 1)
    writer.abort("r2")
    writer.forget([request.block_hashes[17]], rank=ranks - 1, group=1)
    reader = make(**STATES, ranks=ranks)
    assert reader.generate(prompt) == answer(prompt, 8)
    assert reader.cached == {"r": 192}


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_load_is_computed_from_the_start_and_stored_right(
    make: Engines, group: int, ranks: int
) -> None:
    arguments = {**STATES, "ranks": ranks}
    make.save(P, **arguments)
    engine = make(**arguments)
    engine.reads_at_once = True
    engine.forget_when_loading(0, rank=ranks - 1, group=group)
    longer = P + tokens(13, 60)
    assert engine.generate(longer) == answer(longer, 8)
    assert next(step for step in engine.steps if step)["r"] % 32 == 0
    assert engine.stats.data["loads_failed"] == 1
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    reader = make(**arguments)
    assert reader.generate(longer) == answer(longer, 8)
    assert reader.cached == {"r": 128 if group else 160 - 32}


def test_group_of_states_alone_recomputes_a_failed_load_from_the_start(make: Engines) -> None:
    """No shorter prefix has its state, so vLLM must not continue from one."""
    make.save(P, **STATES, attention=False)
    engine = make(**STATES, attention=False)
    engine.forget_when_loading(0)
    assert engine.generate(P) == answer(P, 8)
    again = make(**STATES, attention=False)
    assert again.generate(P) == answer(P, 8)
    assert again.cached == {"r": 96}


def test_window_alone_recomputes_a_failed_load_from_the_start(make: Engines) -> None:
    """The window of a shorter prefix reaches back to blocks that were left out."""
    prompt = tokens(7, 200)
    shape = {"window": 40, "attention": False}
    make.save(prompt, **shape)
    engine = make(**shape)
    engine.forget_when_loading(-1)
    assert engine.generate(prompt) == answer(prompt, 8)
    assert next(step for step in engine.steps if step) == {"r": 200}


def test_aborted_load_stores_and_leaks_nothing(make: Engines) -> None:
    make.save(P, **STATES)
    engine = make(**STATES)
    engine.add("r", P + tokens(13, 60))
    engine.run(until=lambda: bool(engine.connector._scheduler._requests["r"].loading))
    engine.abort("r")
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    assert stored_states(engine, P + tokens(13, 60)) == [2]
    assert engine.generate(P, name="again") == answer(P, 8)


def test_offer_for_a_request_that_is_gone_stores_no_state(
    make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(**STATES)
    request = engine.add("r", P)
    allocate = engine.scheduler.kv_cache_manager.take_boundary_state_offloads

    def offers() -> Any:
        found = allocate()
        return {"gone": found["r"]} if "r" in found else found

    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "take_boundary_state_offloads", offers)
    engine.run()
    assert request.is_finished()
    assert stored_states(engine, P) == []


def test_generated_states_are_stored_and_continue_an_answer(make: Engines) -> None:
    make.save(P, count=60, **STATES)
    longer = P + answer(P, 60)
    engine = make(**STATES)
    assert engine.generate(longer) == answer(longer, 8)
    assert engine.cached == {"r": 128}


def test_state_with_rejected_drafts_is_never_stored(make: Engines) -> None:
    """Its block is wrong between the steps, as if the engine kept the right one elsewhere."""
    writer = make(**STATES)
    writer.scheduler.num_spec_tokens = 2
    request = writer.add("r", P, 60)
    while not request.is_finished():
        if request.num_output_tokens:
            request.spec_token_ids = [3, 4]
        writer.step()
    assert list(request.output_token_ids) == answer(P, 60)
    writer.run()
    longer = P + answer(P, 60)
    assert stored_states(writer, longer) == [2]
    reader = make(**STATES)
    assert reader.generate(longer) == answer(longer, 8)
    assert reader.cached == {"r": 96}


def test_state_without_room_is_saved_later(make: Engines) -> None:
    """It is offered once, and stays in vLLM's prefix cache for a while."""
    engine = make(**STATES)
    plan = engine.connector._scheduler._plan
    plan._blocks_max, most = 0, plan._blocks_max
    engine.add("r", P)
    engine.run(until=lambda: any(engine.steps))
    plan._blocks_max = most
    engine.run()
    assert engine.outputs["r"] == answer(P, 8)
    assert stored_states(engine, P) == [2]
    assert engine.stats.data.get("pages_dropped", 0) == 0
    assert engine.stats.data["pages_saved"] == 7


@pytest.mark.parametrize("how", ["skip", "lora", "reset", "stopped"])
def test_barred_request_stores_no_state(make: Engines, how: str) -> None:
    engine = make(**STATES, batch_tokens=48)
    skip = {"kv_transfer_params": {"kvstore.skip": True}} if how == "skip" else {}
    request = engine.add("r", P, **skip)
    if how == "lora":
        engine.connector._scheduler.finished(request, ([], []))  # as if never asked for
    if how == "stopped":
        engine.connector._scheduler.stop_saving()
    engine.step()
    if how == "reset":
        engine.connector.reset_cache()
    engine.run()
    assert engine.outputs["r"] == answer(P, 8)
    engine.connector._scheduler._epoch, epoch = None, engine.connector._scheduler._epoch
    assert stored_states(engine, P) == []
    assert (epoch is not None) == (how == "reset")


def test_overlapping_steps_store_right_states(make: Engines) -> None:
    make.save(P, count=60, **STATES, overlap=True, batch_tokens=64)
    longer = P + answer(P, 60)
    engine = make(**STATES, overlap=True)
    assert engine.generate(longer) == answer(longer, 8)
    assert engine.cached == {"r": 128}


def test_states_age_with_their_chain(make: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends touches the pages of all groups."""
    make.save(P, **STATES)
    engine = make(**STATES)
    touched: list[Any] = []
    monkeypatch.setattr(
        engine.connector._lookups, "touch", lambda name, asked: touched.append(asked)
    )
    engine.generate(P)
    ((attention, states),) = touched
    assert (len(attention[1]), len(states[1])) == (6, 3)
    assert states[0] == [states_of(engine)]
