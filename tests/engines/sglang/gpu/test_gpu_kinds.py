"""HiCache's side pools on a GPU: recurrent states and sliding windows; and latents.

A restored prefix answers like one in the engine's own cache, ends where the model can go on, and
pages of another prompt change the answer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from engine_answers import agree, prompt
from restartable_node import RestartableNode
from sglang_handle import (
    SGLangHandle,
    check_partial_hit,
    check_store_hits,
    found_locally_and_stored,
    from_store,
    hicache,
)

from kvstore import PutOutcome

Engines = Callable[..., SGLangHandle]
Pair = tuple[SGLangHandle, SGLangHandle]


class Kind(NamedTuple):
    """A tiny model, changes of its configuration, and arguments of SGLang.

    `recurrent`: its hits end only where a request's prompt did, at the page before.
    """

    model: str
    changes: dict[str, Any]
    arguments: dict[str, Any]
    recurrent: bool = False


# SGLang keeps states at ends of pages only with its extra buffer.
STATES = {"mamba_radix_cache_strategy": "extra_buffer", "max_mamba_cache_size": 160}
KINDS = {
    "gated delta net": Kind("gated_delta", {}, STATES, recurrent=True),
    "Mamba-2": Kind("mamba2", {"mamba_n_heads": 8}, STATES, recurrent=True),
    # The configuration says what SGLang knows of released models by their names
    "window": Kind("hybrid", {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}, {}),
    "latents": Kind("mla", {}, {}),
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
        spaces = [
            space for space, _ in client.namespaces() if client.lookup(space, [name]).prefix_pages
        ]
        # Side pools lack the first page, whose state or window nobody needs
        sides = [space for space in spaces if not client.lookup(space, [first]).prefix_pages]
        assert spaces
        for space in sides or spaces:
            page = bytearray(space.layout.page_nbytes)
            assert all(client.get(space, [other], [page]))
            assert all(client.remove(space, [name]))
            assert client.put(space, [name], [page]) == [PutOutcome.STORED]
    found = reader.alone(right)
    assert from_store(found) == [640]
    assert not agree(found, expected)
