"""An engine that loads another engine's pages answers as if there were no store."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
BLOCK = 32


@pytest.fixture(scope="module")
def writer(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("writer", model=models("llama"), store={"address": store.address})


@pytest.fixture(scope="module")
def reader(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    """Return an engine in a process of its own that never saw the prompts."""
    return engines("reader", model=models("llama"), store={"address": store.address})


def stored(writer: EngineHandle, *prompts: list[int]) -> list[dict[str, Any]]:
    """Compute these prompts with another engine and store their pages."""
    writer.reset()
    found = writer.generate(*prompts)
    writer.settle()
    return found


def test_full_hit(plain: Engines, writer: EngineHandle, reader: EngineHandle) -> None:
    """100 tokens are 3 blocks and 4 tokens; of 96 tokens, 3 blocks, the last one is recomputed."""
    prompts = [prompt(1, 100), prompt(2, 96)]
    expected = answers(plain().alone(*prompts))
    assert answers(stored(writer, *prompts)) == expected
    reader.reset()
    found = reader.generate(*prompts)
    assert answers(found) == expected
    assert cached(found)[0] == 96
    assert cached(found)[1] in (96, 95)
    assert reader.settle()["blocks_held"] == 0


def test_partial_hit(plain: Engines, writer: EngineHandle, reader: EngineHandle) -> None:
    """The stored prefix ends within the prompt; the rest is computed after it and stored."""
    head = prompt(3, 96)
    stored(writer, head + prompt(4, 10))
    prompts = [head + prompt(5, 70), head[:64] + prompt(6, 60)]
    expected = answers(plain().alone(*prompts))
    found = reader.alone(*prompts)
    assert answers(found) == expected
    if cached(found)[0] != 160:  # unless the previous reader stored the rest
        assert cached(found) == [96, 64]
    reader.settle()
    assert cached(reader.alone(*prompts)) == [160, 96]


def test_absent_prompts_miss(
    plain: Engines, reader: EngineHandle, request: pytest.FixtureRequest
) -> None:
    seed = 70 + len(request.node.name)  # differs per reader
    prompts = [prompt(seed, 100), prompt(seed + 1, 20), prompt(seed + 2, 31)]
    found = reader.alone(*prompts)
    assert answers(found) == answers(plain().alone(*prompts))
    assert cached(found) == [0, 0, 0]


def test_store_hit_after_a_local_hit(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """Two blocks are in the engine's own cache, and one more is in the store."""
    whole = prompt(9, 110)
    expected = answers(plain().alone(whole))
    reader.reset()
    reader.generate(whole[:70])
    stored(writer, whole)
    found = reader.generate(whole)
    assert answers(found) == expected
    assert cached(found) == [96]


def test_generated_tokens_are_stored(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """The next turn of a conversation finds the answer's blocks."""
    first = prompt(10, 60)
    writer.reset()
    answer = writer.generate(first, max_tokens=40)[0]["tokens"]
    writer.settle()
    second = first + answer + prompt(11, 20)
    found = reader.alone(second)
    assert answers(found) == answers(plain().alone(second))
    assert cached(found) == [96]  # the first turn has 99 tokens with KV


def test_hits_and_misses_in_one_batch(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """Full hits, partial hits and misses run in one batch; half of the prompts share a head."""
    head = prompt(12, 64)
    some = [head + prompt(13 + i, 20 + 11 * i) for i in range(4)]
    others = [prompt(20 + i, 40 + 13 * i) for i in range(4)]
    stored(writer, some[0], some[3], others[1])
    expected = answers(plain().alone(*some, *others))
    reader.reset()
    found = reader.generate(*some, *others)
    assert answers(found) == expected
    assert cached(found)[0] >= 64
    assert cached(found)[5] == 32


def test_chunked_prefill(
    plain: Engines, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """A prompt computed 64 tokens at a time is stored and found whole, and vice versa."""
    few: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    chunked = engines("chunked", model=models("llama"), store={"address": store.address}, **few)
    writer = engines("writer", model=models("llama"), store={"address": store.address})
    long, other = prompt(30, 300), prompt(31, 300)
    expected = answers(plain().alone(long, other))
    assert answers(chunked.generate(long)) == expected[:1]
    chunked.settle()
    stored(writer, other)
    found = writer.alone(long) + chunked.alone(other)
    assert cached(found) == [288, 288]
    assert answers(found) == expected


def test_engine_counters_include_store_hits(writer: EngineHandle, reader: EngineHandle) -> None:
    one = prompt(40, 100)
    stored(writer, one)
    names = ("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits")
    before = reader.ask("metrics")
    found = reader.alone(one)
    after = reader.ask("metrics")
    assert cached(found) == [96]
    assert [after[name] - before[name] for name in names] == [100, 96]


def test_waiting_request_makes_one_lookup(writer: EngineHandle, reader: EngineHandle) -> None:
    """The engine polls its connector in every step, but the connector asks the store only once."""
    one = prompt(41, 500)
    stored(writer, one)
    reader.reset()
    reader.calls()
    reader.generate(one)
    reader.settle()
    assert reader.calls()["lookup"] <= 3  # for the hit and for the save of the last block
