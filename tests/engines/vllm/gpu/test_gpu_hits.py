"""On a GPU, a hit on another engine's pages answers like a hit in the engine's own cache."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import agree, answers, cached, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import agents_ready, stored
from restartable_node import RestartableNode

from kvstore import PutOutcome

Engines = Callable[..., EngineHandle]
Pair = tuple[EngineHandle, EngineHandle]


FEW_TOKENS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 9, "max_model_len": 256}


@pytest.fixture(scope="module")
def fleet(mode: dict[str, Any], on_gpu: Engines, store: RestartableNode) -> dict[str, EngineHandle]:
    """Start all engines together, since starting takes most of the time; return them by role.

    Pages stored by engines of another mode would hit too, so they are removed first.
    """
    with store.client() as client:
        for namespace, _ in client.namespaces():
            client.remove_namespace(namespace)
    roles: dict[str, dict[str, Any]] = {
        "writer": {},
        "reader": {},
        "chunked": FEW_TOKENS,
        "few blocks": FEW_BLOCKS,
    }
    engines = {
        role: on_gpu(f"{role} {mode}", store={"address": store.address}, **mode, **more)
        for role, more in roles.items()
    }
    plain = on_gpu(f"plain {mode}", **mode)
    for engine in engines.values():
        agents_ready(engine)
    return {**engines, "plain": plain}


@pytest.fixture
def plain(fleet: dict[str, EngineHandle]) -> EngineHandle:
    """Return the engine without a connector."""
    return fleet["plain"]


@pytest.fixture
def pair(fleet: dict[str, EngineHandle]) -> Pair:
    """Return (writer, reader)."""
    return fleet["writer"], fleet["reader"]


def test_full_hit(plain: EngineHandle, pair: Pair) -> None:
    writer, reader = pair
    prompts = [prompt(1, 100), prompt(2, 96), prompt(3, 500)]
    expected = found_locally(plain, *prompts)
    assert agree(stored(writer, *prompts), expected)
    found = reader.alone(*prompts)
    assert cached(found)[0] == 96
    assert cached(found)[1] in (95, 96)
    assert cached(found)[2] == 480
    assert answers(found)[::2] == answers(expected)[::2]
    assert agree(found, expected)  # vLLM recomputes the last token or block of 96 tokens
    assert answers(found)[::2] == answers(found_locally(reader, *prompts))[::2]


def test_partial_hit(plain: EngineHandle, pair: Pair) -> None:
    """The stored prefix ends within the prompt; the rest is computed after it and stored."""
    writer, reader = pair
    head = prompt(4, 96)
    stored(writer, head + prompt(5, 10))
    whole = head + prompt(6, 70)
    plain.reset()
    plain.generate(head + prompt(7, 10))
    expected = plain.generate(whole)  # computes the same tokens after the same head
    assert cached(expected) == [96]
    found = reader.alone(whole)
    assert cached(found) == [96]
    assert answers(found) == answers(expected)
    reader.settle()
    again = reader.alone(whole)
    assert cached(again) == [160]
    assert agree(again, expected)


def test_absent_prompts_miss(plain: EngineHandle, pair: Pair) -> None:
    _, reader = pair
    prompts = [prompt(10, 100), prompt(11, 20), prompt(12, 31)]
    expected = plain.alone(*prompts)
    found = reader.alone(*prompts)
    assert cached(found) == [0, 0, 0]
    assert answers(found) == answers(expected)


def test_generated_tokens_are_stored(plain: EngineHandle, pair: Pair) -> None:
    """The next turn of a conversation finds the answer's blocks, computed one token at a time."""
    writer, reader = pair
    first = prompt(13, 60)
    answer = stored(writer, first, max_tokens=40)[0]["tokens"]
    second = first + answer + prompt(14, 20)
    found = reader.alone(second)
    assert cached(found) == [96]
    assert agree(found, plain.alone(second))


def test_hits_and_misses_in_one_batch(plain: EngineHandle, pair: Pair) -> None:
    writer, reader = pair
    head = prompt(20, 64)
    some = [head + prompt(21 + i, 20 + 40 * i) for i in range(4)]
    others = [prompt(30 + i, 40 + 13 * i) for i in range(4)]
    stored(writer, some[0], some[3], others[1])
    expected = plain.alone(*some, *others)
    reader.reset()
    found = reader.generate(*some, *others, max_tokens=8)
    assert cached(found)[0] >= 64
    assert cached(found)[5] == 32
    assert agree(found, expected)


def test_chunked_prefill(plain: EngineHandle, pair: Pair, fleet: dict[str, EngineHandle]) -> None:
    """A prompt computed 64 tokens at a time is stored and found whole, and vice versa."""
    writer, chunked = pair[0], fleet["chunked"]
    long, other = prompt(40, 300), prompt(41, 300)
    expected = plain.alone(long, other)
    assert agree(stored(chunked, long), expected[:1])
    stored(writer, other)
    found = writer.alone(long) + chunked.alone(other)
    assert cached(found) == [288, 288]
    assert agree(found, expected)


def test_preemption(plain: EngineHandle, fleet: dict[str, EngineHandle]) -> None:
    """With blocks for one and a half of two requests, the preempted one reloads its KV."""
    engine = fleet["few blocks"]
    prompts = [prompt(50, 70), prompt(51, 70)]
    expected = plain.alone(*prompts, max_tokens=100)
    found = engine.generate(*prompts, max_tokens=100)
    assert agree(found, expected)
    engine.settle()
    metrics = engine.ask("metrics")
    assert metrics["vllm:num_preemptions"] >= 1
    assert metrics["vllm:kvstore_hit_tokens"] >= 32, "the preempted request was not reloaded"


def test_wrong_kv_changes_the_answer(
    plain: EngineHandle, pair: Pair, store: RestartableNode
) -> None:
    """Verify the check: another prompt's pages under this prompt's hashes change the answer."""
    writer, reader = pair
    right, wrong = prompt(60, 100), prompt(61, 100)
    expected = plain.alone(right)
    stored(writer, right, wrong)
    names, others = writer.chain(right), writer.chain(wrong)
    with store.client() as client:
        (namespace,) = [
            space
            for space, _ in client.namespaces()
            if client.lookup(space, names).prefix_pages == 3
        ]
        pages = [bytearray(namespace.layout.page_nbytes) for _ in others]
        assert all(client.get(namespace, others, pages))
        assert all(client.remove(namespace, names))
        assert client.put(namespace, names, pages) == [PutOutcome.STORED] * 3
    found = reader.alone(right)
    assert cached(found) == [96]
    assert not agree(found, expected)
