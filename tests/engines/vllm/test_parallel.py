"""Tensor parallelism: every rank stores its shard, and a page hits only if all shards exist."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import agree, answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def writer(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("writer", model=models("llama"), store={"address": store.address}, **TWO)


@pytest.fixture(scope="module")
def reader(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("reader", model=models("llama"), store={"address": store.address}, **TWO)


def stored(writer: EngineHandle, *prompts: list[int]) -> list[dict[str, Any]]:
    writer.reset()
    found = writer.generate(*prompts)
    writer.settle()
    return found


def test_full_partial_and_absent_prompts(
    plain: Engines, writer: EngineHandle, reader: EngineHandle
) -> None:
    first, second, third = prompt(1, 100), prompt(2, 96), prompt(3, 100)
    partial = first[:64] + prompt(4, 50)
    prompts = [first, second, partial, third]
    expected = answers(plain(**TWO).alone(*prompts))
    assert answers(stored(writer, first, second)) == expected[:2]
    found = reader.alone(*prompts)
    assert answers(found) == expected
    assert cached(found)[0] == 96
    assert cached(found)[1] >= 64
    assert cached(found)[2:] == [64, 0]


def test_page_without_one_ranks_shard_is_a_miss(
    plain: Engines, writer: EngineHandle, reader: EngineHandle, store: RestartableNode
) -> None:
    """R4: the prefix ends where any rank's shard is missing, and that shard is stored again."""
    reader.settle()  # its last blocks, of another test, are saved by its next step
    for seed, rank, page, left in ((10, 1, 1, 32), (11, 0, 2, 64), (12, 1, 0, 0)):
        whole = prompt(seed, 100)
        expected = answers(plain(**TWO).alone(whole))
        stored(writer, whole)
        complete = store.pages()
        names = writer.chain(whole)
        with store.client() as client:
            namespace = next(space for space, _ in client.namespaces() if space.tp_rank == rank)
            assert client.remove(namespace, [names[page]]) == [True]
        found = reader.alone(whole)
        assert cached(found) == [left]
        assert answers(found) == expected
        reader.settle()
        assert store.pages() == complete


@pytest.mark.parametrize(("writes", "reads"), [(ONE, TWO), (TWO, ONE)], ids=["1 to 2", "2 to 1"])
def test_ranks_of_another_number_read_the_same_shards(
    engines: Engines,
    models: Callable[..., str],
    store: RestartableNode,
    writes: dict[str, Any],
    reads: dict[str, Any],
) -> None:
    """Sums over ranks differ in the last bits."""
    made = []
    for role, ranks in (("writes", writes), ("reads", reads)):
        options = {"address": store.address, "head_shards": 2, "salt": f"shards {len(writes)}"}
        size = "two" if ranks else "one"
        made.append(engines(f"{role} {size}", model=models("llama"), store=options, **ranks))
    writing, reading = made
    prompts = [prompt(30 + len(writes), 100), prompt(40 + len(writes), 96)]
    before = len(store.pages())
    expected = stored(writing, *prompts)
    assert len(store.pages()) - before == 2 * 6
    found = reading.alone(*prompts)
    assert cached(found)[0] == 96
    assert cached(found)[1] >= 64
    assert agree(found, expected)


def test_mla_has_one_writer(
    engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """All ranks have the same MLA cache, so one rank stores it and all load it.

    The reference is a hit in the engine's own cache. On a CPU without AMX the engine caches
    nothing, so nothing is stored either (see test_caches.py).
    """
    arguments = {
        "model": models("mla"),
        "store": {"address": store.address},
        "dtype": "bfloat16",
        **TWO,
    }
    writer, reader = engines("mla writer", **arguments), engines("mla reader", **arguments)
    one = prompt(20, 100)
    before = store.pages()
    writer.generate(one)
    expected = writer.generate(one)
    writer.settle()
    pages = 3 if writer.ask("cache")["prefix_caching"] else 0
    assert len(store.pages()) - len(before) == pages
    found = reader.alone(one)
    assert cached(found) == cached(expected) == [32 * pages]
    assert answers(found) == answers(expected)
