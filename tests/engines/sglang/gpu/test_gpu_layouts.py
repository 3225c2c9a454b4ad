"""HiCache host pool layouts and an fp8 cache on a GPU: restored pages are identical."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import agree, answers, found_locally, prompt
from restartable_node import RestartableNode
from sglang_handle import SGLangHandle, found_locally_and_stored, from_store, hicache

Engines = Callable[..., SGLangHandle]
Pair = tuple[SGLangHandle, SGLangHandle]
# Name -> (arguments of hicache(), arguments of SGLang).
KINDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "page_first_direct": ({"layout": "page_first_direct", "io": "direct"}, {}),
    "layer_first": ({"layout": "layer_first", "io": "kernel"}, {}),
    "page_head": ({"layout": "page_head"}, {}),
    "fp8": ({}, {"kv_cache_dtype": "fp8_e4m3"}),
}


@pytest.fixture(scope="module")
def pairs(engines: Engines, store: RestartableNode) -> dict[str, Pair]:
    """Start a writer and a reader of each kind together."""

    def engine(kind: str, role: str) -> SGLangHandle:
        options, arguments = KINDS[kind]
        return engines(f"{role} {kind}", **hicache(store.address, **options), **arguments)

    return {kind: (engine(kind, "writer"), engine(kind, "reader")) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_store_hit_answers_like_a_local_hit(
    kind: str, pairs: dict[str, Pair], store: RestartableNode
) -> None:
    """Compare with local hits of the same and of another process.

    All kinds use the same prompts, but never share pages.
    """
    writer, reader = pairs[kind]
    prompts = [prompt(1, 700), prompt(2, 1921)]
    expected = found_locally_and_stored(writer, store, *prompts)
    own, found = writer.alone(*prompts), reader.alone(*prompts)
    assert from_store(own) == from_store(found) == [640, 1920]
    assert answers(own) == answers(expected)
    assert answers(found) == answers(expected)
    assert answers(found) == answers(found_locally(reader, *prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_hits_and_misses_in_one_batch(
    kind: str, pairs: dict[str, Pair], store: RestartableNode
) -> None:
    writer, reader = pairs[kind]
    head = prompt(10, 640)
    some, other = head + prompt(11, 400), prompt(12, 500)
    expected = writer.alone(some, other, salts=["computed anew"])
    found_locally_and_stored(writer, store, head + prompt(13, 30))
    reader.reset()
    found = reader.generate(some, other)
    assert from_store(found) == [640, 0]
    assert agree(found, expected)
