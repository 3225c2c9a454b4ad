"""An engine that finds what another engine computed answers as if there were no store."""

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
    """A process of its own that never saw the prompts."""
    return engines("reader", model=models("llama"), store={"address": store.address})


def stored(writer: EngineHandle, *prompts: list[int]) -> list[dict[str, Any]]:
    """Has another engine compute these prompts; they are in the store afterwards."""
    writer.reset()
    found = writer.generate(*prompts)
    writer.settle()
    return found


def test_a_full_hit(plain: Engines, writer: EngineHandle, reader: EngineHandle) -> None:
    """100 tokens are 3 blocks and 4 tokens; 96 are 3 blocks, whose last token is computed again."""
    prompts = [prompt(1, 100), prompt(2, 96)]
    expected = answers(plain().alone(*prompts))
    assert answers(stored(writer, *prompts)) == expected
    reader.reset()
    found = reader.generate(*prompts)
    assert answers(found) == expected
    assert cached(found)[0] == 96
    assert cached(found)[1] in (96, 95)
    assert reader.settle()["blocks_held"] == 0


def test_a_partial_hit(plain: Engines, writer: EngineHandle, reader: EngineHandle) -> None:
    """The stored prefix ends in the middle of the prompt; what follows is computed on top of it and
    stored too.
    """
    head = prompt(3, 96)
    stored(writer, head + prompt(4, 10))
    prompts = [head + prompt(5, 70), head[:64] + prompt(6, 60)]
    expected = answers(plain().alone(*prompts))
    found = reader.alone(*prompts)
    assert answers(found) == expected
    if cached(found)[0] != 160:  # unless the reader before this one stored the rest
        assert cached(found) == [96, 64]
    reader.settle()
    assert cached(reader.alone(*prompts)) == [160, 96]


def test_no_hit(plain: Engines, reader: EngineHandle, request: pytest.FixtureRequest) -> None:
    seed = 70 + len(request.node.name)  # another one for each reader
    prompts = [prompt(seed, 100), prompt(seed + 1, 20), prompt(seed + 2, 31)]
    found = reader.alone(*prompts)
    assert answers(found) == answers(plain().alone(*prompts))
    assert cached(found) == [0, 0, 0]


def test_a_hit_behind_the_engines_own(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """Two blocks are in the engine's own cache, one more is in the store."""
    whole = prompt(9, 110)
    expected = answers(plain().alone(whole))
    reader.reset()
    reader.generate(whole[:70])
    stored(writer, whole)
    found = reader.generate(whole)
    assert answers(found) == expected
    assert cached(found) == [96]


def test_generated_tokens_are_stored_too(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """A conversation's next turn finds the answer's blocks."""
    first = prompt(10, 60)
    writer.reset()
    answer = writer.generate(first, max_tokens=40)[0]["tokens"]
    writer.settle()
    second = first + answer + prompt(11, 20)
    found = reader.alone(second)
    assert answers(found) == answers(plain().alone(second))
    assert cached(found) == [96]  # of 99 tokens of the first turn whose KV there is


def test_many_requests_at_a_time(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    """Hits, part hits and misses in one batch, half of them with the same head."""
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
    """A prompt computed 64 tokens at a time is stored block by block and found whole, and the other
    way round.
    """
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


def test_the_engines_own_counters_see_the_store(writer: EngineHandle, reader: EngineHandle) -> None:
    one = prompt(40, 100)
    stored(writer, one)
    names = ("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits")
    before = reader.ask("metrics")
    found = reader.alone(one)
    after = reader.ask("metrics")
    assert cached(found) == [96]
    assert [after[name] - before[name] for name in names] == [100, 96]


def test_waiting_costs_no_requests(writer: EngineHandle, reader: EngineHandle) -> None:
    """The engine polls its connector in every step; the store is asked once."""
    one = prompt(41, 500)
    stored(writer, one)
    reader.reset()
    reader.calls()
    reader.generate(one)
    reader.settle()
    assert reader.calls()["lookup"] <= 3  # the hit, and what a save of the last block asks for
