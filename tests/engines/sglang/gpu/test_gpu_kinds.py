"""HiCache's side pools on a GPU: recurrent states, windows, an indexer's keys; and latents.

A restored prefix answers like one in the engine's own cache, ends where the model can go on, and
pages of another prompt change the answer.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from engine_answers import agree, prompt
from restartable_node import RestartableNode
from sglang_handle import (
    STORED_S,
    SGLangHandle,
    check_partial_hit,
    check_store_hits,
    found_locally_and_stored,
    from_store,
    hicache,
)

from kvstore import Client, Namespace, PutOutcome

Engines = Callable[..., SGLangHandle]
Pair = tuple[SGLangHandle, SGLangHandle]


class Kind(NamedTuple):
    """A tiny model, changes of its configuration, arguments of SGLang and its environment.

    `recurrent`: its hits end only where a request's prompt did, at the page before.
    """

    model: str
    changes: dict[str, Any]
    arguments: dict[str, Any]
    recurrent: bool = False
    environment: Mapping[str, str] = MappingProxyType({})


# SGLang keeps states at ends of pages only with its extra buffer.
STATES = {"mamba_radix_cache_strategy": "extra_buffer", "max_mamba_cache_size": 160}
# Sparse attention with what gives the same bits twice and needs no DeepGEMM: SGLang's own kernel
# writes the chosen tokens in any order.
SPARSE = {
    "attention_backend": "dsa",
    "kv_cache_dtype": "bfloat16",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "flashmla_sparse",
    "dsa_topk_backend": "torch",
}
SPARSE_ENVIRONMENT = {
    "SGLANG_DSA_FUSE_TOPK": "false",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "true",
}
KINDS = {
    "gated delta net": Kind("gated_delta", {}, STATES, recurrent=True),
    "Mamba-2": Kind("mamba2", {"mamba_n_heads": 8}, STATES, recurrent=True),
    # The configuration says what SGLang knows of released models by their names
    "window": Kind("hybrid", {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}, {}),
    "latents": Kind("mla", {}, {}),
    "DSA": Kind("dsa", {}, SPARSE, environment=SPARSE_ENVIRONMENT),
}


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, engines: Engines, store: RestartableNode
) -> Iterator[Pair]:
    """Yield (writer, reader) of a kind; both run only as long as its tests."""
    kind: Kind = KINDS[request.param]

    def engine(role: str) -> SGLangHandle:
        return engines(
            f"{role} {request.param}",
            kind=kind.model,
            model=kind.changes,
            **hicache(store.address),
            **kind.arguments,
        )

    with pytest.MonkeyPatch.context() as patch:
        for name, value in kind.environment.items():
            patch.setenv(name, value)
        both = engine("writer"), engine("reader")
    yield both
    for one in both:
        one.close()


def for_kinds(*names: str) -> Any:
    return pytest.mark.parametrize("pair", names or list(KINDS), indirect=True, scope="module")


@for_kinds()
def test_store_hit_answers_like_a_local_hit(pair: Pair, store: RestartableNode) -> None:
    """Compare with local hits of the same and of another process."""
    check_store_hits(*pair, store)


@for_kinds()
def test_partial_hit_answers_like_a_local_hit(pair: Pair, store: RestartableNode) -> None:
    """The stored prefix ends where a shorter prompt has ended; the rest is computed after it."""
    check_partial_hit(*pair, store)


@for_kinds(*(name for name, kind in KINDS.items() if kind.recurrent))
def test_prefix_between_boundaries_is_computed(pair: Pair, store: RestartableNode) -> None:
    """The KV of 600 tokens is stored, and no state that ends there."""
    writer, reader = pair
    head = prompt(20, 600)
    found_locally_and_stored(writer, store, head + prompt(21, 100))
    other = head + prompt(22, 300)
    found = reader.alone(other)
    assert from_store(found) == [0]
    assert agree(found, writer.alone(other, salts=["computed anew"]))


@for_kinds()
def test_hits_and_misses_in_one_batch(pair: Pair, store: RestartableNode) -> None:
    writer, reader = pair
    head = prompt(30, 640)
    some, other = head + prompt(31, 400), prompt(32, 500)
    expected = writer.alone(some, other, salts=["computed anew"])
    found_locally_and_stored(writer, store, head + prompt(33, 30))
    reader.reset()
    found = reader.generate(some, other)
    assert from_store(found) == [640, 0]
    assert agree(found, expected)


@for_kinds()
def test_side_pages_of_another_prompt_change_the_answer(pair: Pair, store: RestartableNode) -> None:
    """Verify the check: the last page is that of another prompt, in side pools if there are any.

    It has the state, or the window.
    """
    writer, reader = pair
    right, wrong = prompt(40, 700), prompt(41, 700)
    expected = found_locally_and_stored(writer, store, right, wrong)[:1]
    name, other = writer.chain(right)[-1], writer.chain(wrong)[-1]
    first = writer.chain(right)[0]
    with store.client() as client:
        spaces = _spaces(client, name)
        # Side pools lack the first page, whose state or window nobody needs
        sides = [space for space in spaces if not client.lookup(space, [first]).prefix_pages]
        assert spaces
        for space in sides or spaces:
            _replace(client, space, name, other)
    found = reader.alone(right)
    assert from_store(found) == [640]
    assert not agree(found, expected)


@for_kinds("DSA")
def test_indexer_keys_of_another_prompt_change_the_answer(
    pair: Pair, store: RestartableNode
) -> None:
    """Verify the check: the latents are right, and other tokens are chosen."""
    writer, reader = pair
    right, wrong = prompt(50, 700), prompt(51, 700)
    expected = found_locally_and_stored(writer, store, right, wrong)[:1]
    names, others = writer.chain(right), writer.chain(wrong)
    with store.client() as client:
        end = time.monotonic() + STORED_S
        while len(spaces := _spaces(client, *names, *others)) < 2:
            assert time.monotonic() < end, "not stored in both pools"
            time.sleep(0.02)
        # A key takes 132 bytes, a latent 1152
        keys = min(spaces, key=lambda space: space.layout.page_nbytes)
        for name, other in zip(names, others, strict=True):
            _replace(client, keys, name, other)
    found = reader.alone(right)
    assert from_store(found) == [640]
    assert not agree(found, expected)


def _spaces(client: Client, *names: bytes) -> list[Namespace]:
    return [
        space
        for space, _ in client.namespaces()
        if client.lookup(space, names).prefix_pages == len(names)
    ]


def _replace(client: Client, space: Namespace, name: bytes, other: bytes) -> None:
    """Store the page of `other` as that of `name`."""
    page = bytearray(space.layout.page_nbytes)
    assert all(client.get(space, [other], [page]))
    assert all(client.remove(space, [name]))
    assert client.put(space, [name], [page]) == [PutOutcome.STORED]
