"""Pages named by head range, on a GPU: engines of any tensor-parallel size read them.

One GPU is enough to read and write the shards of two ranks. Two ranks need two GPUs.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import agree, answers, cached, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import agents_ready, hits_again, stored
from restartable_node import RestartableNode

from kvstore import PutOutcome

Engines = Callable[..., EngineHandle]
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": True,
}
SHARDS = 2  # as many as the tiny model has heads of keys and values


@pytest.fixture(scope="module")
def one_rank(on_gpu: Engines, store: RestartableNode) -> Callable[[str], EngineHandle]:
    """Return `one_rank(role)`, which makes an engine whose pages are those of two ranks."""

    def engine(role: str) -> EngineHandle:
        options = {"address": store.address, "head_shards": SHARDS}
        return on_gpu(f"{role} of shards", store=options, enforce_eager=True)

    return engine


@pytest.fixture(scope="module")
def plain(on_gpu: Engines) -> EngineHandle:
    return on_gpu("plain", enforce_eager=True)


def test_one_rank_reads_the_shards_of_two(
    one_rank: Callable[[str], EngineHandle], plain: EngineHandle, store: RestartableNode
) -> None:
    writer, reader = one_rank("writer"), one_rank("reader")
    agents_ready(reader)
    prompts = [prompt(1, 100), prompt(2, 300)]
    before = len(store.pages())
    computed = stored(writer, *prompts)
    assert agree(computed, plain.alone(*prompts))
    assert len(store.pages()) - before == SHARDS * (3 + 9)
    expected = found_locally(writer, *prompts)
    found = reader.alone(*prompts)
    assert cached(found) == cached(expected) == [96, 288]
    assert answers(found) == answers(expected)


def test_swapped_shards_change_the_answer(
    one_rank: Callable[[str], EngineHandle], plain: EngineHandle, store: RestartableNode
) -> None:
    """Verify the check: with the pages of both shards exchanged, tokens are wrong."""
    writer, reader = one_rank("writer"), one_rank("reader")
    one = prompt(3, 100)
    stored(writer, one)
    names = writer.chain(one)
    with store.client() as client:
        spaces = [
            space
            for space, _ in client.namespaces()
            if client.lookup(space, names).prefix_pages == 3
        ]
        assert len(spaces) == SHARDS
        pages = [[bytearray(space.layout.page_nbytes) for _ in names] for space in spaces]
        for space, some in zip(spaces, pages, strict=True):
            assert all(client.get(space, names, some))
            assert all(client.remove(space, names))
        for space, some in zip(spaces, reversed(pages), strict=True):
            assert client.put(space, names, some) == [PutOutcome.STORED] * 3
    found = reader.alone(one)
    assert cached(found) == [96]
    assert not agree(found, plain.alone(one))


def of_two_ranks(on_gpu: Engines, store: RestartableNode) -> EngineHandle:
    if torch.cuda.device_count() < SHARDS:
        pytest.skip(f"needs {SHARDS} GPUs")
    options = {"address": store.address, "head_shards": SHARDS}
    return on_gpu("two ranks", store=options, **TWO_RANKS)


@pytest.mark.parametrize("writers", [1, 2])
def test_ranks_read_what_another_number_of_ranks_wrote(
    writers: int,
    one_rank: Callable[[str], EngineHandle],
    plain: EngineHandle,
    on_gpu: Engines,
    store: RestartableNode,
) -> None:
    """Results of one and two ranks differ by rounding, so hits are compared within an engine."""
    two_ranks = of_two_ranks(on_gpu, store)
    engines = [one_rank("writer"), two_ranks]
    writer, reader = engines if writers == 1 else reversed(engines)
    for engine in engines:
        agents_ready(engine)
    prompts = [prompt(10 * writers + 1, 100), prompt(10 * writers + 2, 300)]
    expected = plain.alone(*prompts)
    assert agree(stored(writer, *prompts), expected)
    found = []
    for one in prompts:
        found += reader.alone(one)
        again = reader.generate(one)  # over the same blocks, in the engine's own cache
        assert cached(again) == cached(found[-1:])
        assert answers(again) == answers(found[-1:])
    assert cached(found) == [96, 288]
    assert agree(found, expected)
    reader.settle()


def test_agents_process_of_one_rank_is_killed(
    plain: EngineHandle, on_gpu: Engines, store: RestartableNode
) -> None:
    """Half of the heads cannot be loaded: the engine computes instead, on all ranks."""
    engine = of_two_ranks(on_gpu, store)
    known = [prompt(30 + i, 300) for i in range(4)]
    expected = plain.alone(*known)
    stored(engine, *known)
    engine.reset()
    _, second = agents_ready(engine)
    os.kill(second["pid"], signal.SIGKILL)
    assert agree(engine.generate(*known), expected)
    engine.settle()
    assert [worker["pid"] != second["pid"] for worker in agents_ready(engine)] == [True, True]
    assert agree(engine.alone(*known), expected)
    hits_again(engine, 3000)


def test_pipeline_of_two_ranks_shares_pages_with_one(
    plain: EngineHandle, on_gpu: Engines, store: RestartableNode
) -> None:
    """Each rank holds half of the layers."""
    if torch.cuda.device_count() < SHARDS:
        pytest.skip(f"needs {SHARDS} GPUs")
    options = {"address": store.address, "layer_shards": SHARDS}
    pipeline = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    engines = [
        on_gpu("layers of one rank", store=options, enforce_eager=True),
        on_gpu("pipeline", store=options, enforce_eager=True, **pipeline),
    ]
    for engine in engines:
        agents_ready(engine)
    for number, (writer, reader) in enumerate([engines, engines[::-1]]):
        one = prompt(40 + number, 300)
        expected = plain.alone(one)
        assert agree(stored(writer, one), expected)
        found = reader.alone(one)
        assert cached(found) == [288]
        assert agree(found, expected)
