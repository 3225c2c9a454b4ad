"""HiCache on a GPU: a hit in the store gives the same answer as a hit in the engine's own cache.

Pages are computed by the same or another engine, with and without CUDA graphs.
"""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from endings import ended
from engine_answers import agree, answers, cached, found_locally, prompt
from restartable_node import RestartableNode
from sglang_handle import (
    SGLangHandle,
    continued_locally,
    found_locally_and_stored,
    from_store,
    hicache,
    wait_hit,
    wait_stored,
)

from kvstore import PutOutcome

Engines = Callable[..., SGLangHandle]
# Engines that must find none of the pages stored by the others.
STRANGERS: dict[str, dict[str, Any]] = {
    "another dtype": {"dtype": "float16"},
    "other weights": {"model": {"seed": 1}},
    "another salt": {"salt": "of others"},
}


@pytest.fixture(scope="module")
def fleet(engines: Engines, store: RestartableNode) -> dict[str, SGLangHandle]:
    """Start all engines together, since starting takes most of the time; return them by role."""
    found = {
        "plain": engines("plain"),
        "writer": engines("writer", **hicache(store.address)),
        "graphs": engines("graphs", disable_cuda_graph=False, **hicache(store.address)),
    }
    for name, changes in STRANGERS.items():
        options = {key: value for key, value in changes.items() if key == "salt"}
        others = {key: value for key, value in changes.items() if key != "salt"}
        found[name] = engines(name, **hicache(store.address, **options), **others)
    return found


@pytest.fixture(params=["writer", "graphs"])
def pair(
    request: pytest.FixtureRequest, fleet: dict[str, SGLangHandle]
) -> tuple[SGLangHandle, SGLangHandle]:
    """Return (writer, reader): one has CUDA graphs, the other does not, in both orders."""
    others = {"writer": "graphs", "graphs": "writer"}
    return fleet[request.param], fleet[others[request.param]]


def seed_of(engine: SGLangHandle, fleet: dict[str, SGLangHandle], seed: int) -> int:
    """Return a seed that differs per engine, so that each engine has prompts of its own."""
    return seed + 500 * (engine is fleet["graphs"])


def test_store_hit_answers_like_a_local_hit(
    pair: tuple[SGLangHandle, SGLangHandle], fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    """Compare with local hits of the same engine, another process and an engine without a store."""
    writer, reader = pair
    seed = seed_of(writer, fleet, 10)
    prompts = [prompt(seed, 700), prompt(seed + 1, 1300), prompt(seed + 2, 1921)]
    expected = found_locally_and_stored(writer, store, *prompts)
    own = writer.alone(*prompts)
    found = reader.alone(*prompts)
    assert from_store(own) == from_store(found) == [640, 1280, 1920]
    assert answers(own) == answers(expected)
    assert answers(found) == answers(found_locally(reader, *prompts))
    if writer is fleet["writer"]:
        assert answers(expected) == answers(found_locally(fleet["plain"], *prompts))
    assert agree(found, expected)


def test_partial_hit_answers_like_a_local_hit(
    pair: tuple[SGLangHandle, SGLangHandle], fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    """The stored prefix ends within the prompt; the rest is computed after it and stored."""
    writer, reader = pair
    seed = seed_of(writer, fleet, 20)
    head = prompt(seed, 640)
    first, own_whole, whole = (
        head + prompt(seed + more, tokens) for more, tokens in ((1, 10), (2, 500), (3, 500))
    )
    found_locally_and_stored(writer, store, first)
    own, found = writer.alone(own_whole), reader.alone(whole)
    assert from_store(own) == from_store(found) == [640]
    own_expected = continued_locally(writer, first, own_whole, f"only {seed}")
    expected = continued_locally(reader, first, whole, f"only {seed + 1}")
    assert cached(own_expected) == cached(expected) == [640]
    assert answers(own) == answers(own_expected)  # same tokens computed in the same steps
    # Another engine computed the head, with CUDA graphs or without.
    assert agree(found, expected)
    wait_stored(reader, store, whole)
    again = writer.alone(whole)
    assert from_store(again) == [1088]
    assert answers(again) == answers(found_locally(writer, whole))


def test_generated_tokens_are_stored(
    pair: tuple[SGLangHandle, SGLangHandle], fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    """The next turn of a conversation finds the answer's pages, computed one token at a time."""
    writer, reader = pair
    seed = seed_of(writer, fleet, 30)
    first = prompt(seed, 500)
    writer.reset()
    answer = writer.generate(first, max_tokens=150)[0]["tokens"]
    second = first + answer + prompt(seed + 1, 20)
    expected = writer.generate(second)
    assert cached(expected) == [640]
    wait_stored(writer, store, second[:640])
    found = reader.alone(second)
    assert from_store(found) == [640]
    assert agree(found, expected)
    own = writer.alone(second)
    assert from_store(own) == [640]
    assert answers(own) == answers(expected)


def test_hits_and_misses_in_one_batch(
    fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    writer, reader = fleet["writer"], fleet["graphs"]
    head = prompt(40, 640)
    some = [head + prompt(41 + i, 20 + 90 * i) for i in range(4)]
    others = [prompt(50 + i, 400 + 77 * i) for i in range(4)]
    expected = fleet["plain"].alone(*some, *others)
    found_locally_and_stored(writer, store, some[3], others[1])
    reader.reset()
    found = reader.generate(*some, *others)
    assert cached(found)[3] >= 640
    assert from_store(found)[5] == 448
    assert cached(found)[4] == cached(found)[6] == cached(found)[7] == 0
    assert agree(found, expected)


@pytest.mark.parametrize("name", STRANGERS)
def test_incompatible_engine_misses_then_hits_its_own_pages(
    name: str, fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    one = prompt(60 + list(STRANGERS).index(name), 700)
    found_locally_and_stored(fleet["writer"], store, one)
    stranger = fleet[name]
    assert from_store(stranger.alone(one)) == [0]
    stranger.generate(one)
    wait_hit(stranger, one)
    assert answers(stranger.alone(one)) == answers(found_locally(stranger, one))


def test_salted_request_finds_only_its_own_pages(
    fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    writer, reader = fleet["writer"], fleet["graphs"]
    one = prompt(70, 700)
    found_locally_and_stored(writer, store, one)
    assert from_store(reader.alone(one, salts=["mine"])) == [0]
    reader.generate(one, salts=["mine"])
    wait_hit(reader, one, salts=["mine"])
    assert answers(reader.alone(one, salts=["mine"])) == answers(
        found_locally(reader, one, salts=["mine"])
    )
    assert from_store(writer.alone(one, salts=["another's"])) == [0]


def test_wrong_kv_changes_the_answer(
    fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    """Verify the check: another prompt's pages under this prompt's hashes change the answer."""
    writer, reader = fleet["writer"], fleet["graphs"]
    right, wrong = prompt(80, 700), prompt(81, 700)
    expected = found_locally_and_stored(writer, store, right, wrong)[:1]
    names, others = writer.chain(right), writer.chain(wrong)
    with store.client() as client:
        (space,) = [
            one
            for one, _ in client.namespaces()
            if client.lookup(one, names).prefix_pages == len(names)
        ]
        pages = [bytearray(space.layout.page_nbytes) for _ in others]
        assert all(client.get(space, others, pages))
        assert all(client.remove(space, names))
        assert client.put(space, names, pages) == [PutOutcome.STORED] * len(names)
    found = reader.alone(right)
    assert from_store(found) == [640]
    assert not agree(found, expected)


@pytest.mark.parametrize("name", ["plain", "writer"])
def test_terminated_engine_leaves_nothing_behind(
    name: str, fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    ended(fleet[name], signal.SIGTERM)
    store.wait_nothing_open()


def test_killed_engine_leaves_nothing_behind(
    fleet: dict[str, SGLangHandle], store: RestartableNode
) -> None:
    ended(fleet["graphs"], signal.SIGKILL)
    store.wait_nothing_open()
