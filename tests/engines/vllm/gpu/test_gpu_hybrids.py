"""Models with recurrent states beside attention, on a GPU: Mamba-2 and gated delta nets.

A state is a function of all tokens before it, and exists at the ends of some blocks only. Each kind
has one group of attention layers and three groups of states, with pages of their own.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from engine_answers import agree, answers, cached, found_locally, prompt
from engine_handle import EngineHandle
from gpu_answers import FULL_GRAPHS, agents_ready, stored
from restartable_node import RestartableNode

from kvstore import Namespace, PutOutcome

Engines = Callable[..., EngineHandle]

STEP_TOKENS = 512  # longer prompts are computed in several steps
COMMON: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": STEP_TOKENS}
BLOCK_TOKENS = 160  # vLLM chooses it for these models
# Name -> (model, vLLM's arguments). FlashInfer, the default of gated delta nets, is not needed.
# By default vLLM keeps only a prompt's last state; with the interval also those of its chunks and
# of the answer.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba-2": (
        "mamba2",
        {"enforce_eager": True, "prefix_cache_retention_interval": BLOCK_TOKENS},
    ),
    "gated delta net": (
        "gated_delta",
        {
            "additional_config": {"gdn_prefill_backend": "triton"},
            **FULL_GRAPHS,
        },
    ),
}
# Room for two requests of four
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "max_model_len": 640}
STATE_GROUPS = 3


@dataclass
class Fleet:
    """Engines of one kind. `block`: tokens of a block of each group. `model`: in namespaces."""

    model: str
    writer: EngineHandle
    reader: EngineHandle
    few_blocks: EngineHandle
    plain: EngineHandle
    block: int


@pytest.fixture(params=KINDS, scope="module")
def fleet(request: pytest.FixtureRequest, on_gpu: Engines, store: RestartableNode) -> Fleet:
    """Start all engines of a kind together."""
    kind, arguments = KINDS[request.param]

    def engine(role: str, **more: Any) -> EngineHandle:
        return on_gpu(f"{role} {kind}", kind, **{**COMMON, **arguments, **more})

    options = {"address": store.address}
    writer, reader = engine("writer", store=options), engine("reader", store=options)
    few_blocks, plain = engine("few blocks", store=options, **FEW_BLOCKS), engine("plain")
    for one in (writer, reader, few_blocks):
        agents_ready(one)
    cache = writer.ask("cache")
    assert len(cache["groups"]) == 1 + STATE_GROUPS
    assert cache["block_tokens"] == BLOCK_TOKENS
    return Fleet(f"tiny_{kind}", writer, reader, few_blocks, plain, BLOCK_TOKENS)


def test_full_hits_of_all_lengths(fleet: Fleet) -> None:
    """Hits end at block boundaries, and equal local hits bit for bit."""
    block = fleet.block
    lengths = [
        *(blocks * block + more for blocks in (1, 2, 3) for more in (-1, 0, 1)),
        *(STEP_TOKENS + more for more in (-1, 0, 1)),
        *(2 * STEP_TOKENS, 5 * block + block // 2, 1500),
    ]
    prompts = [prompt(length, length) for length in lengths]
    computed = [stored(fleet.writer, one)[0] for one in prompts]
    assert agree(computed, fleet.plain.alone(*prompts))
    expected = found_locally(fleet.writer, *prompts)
    found = fleet.writer.alone(*prompts)
    assert cached(found) == cached(expected)
    assert answers(found) == answers(expected)
    found = fleet.reader.alone(*prompts)
    assert cached(found) == cached(expected)
    assert answers(found) == answers(expected)
    # One token is left to compute, since a state must not take it twice.
    assert cached(found) == [(length - 1) // block * block for length in lengths]
    fleet.reader.settle()


def test_partial_hit(fleet: Fleet) -> None:
    """The stored prefix ends within the prompt; the rest is computed after it and stored."""
    head = prompt(10, 2 * fleet.block)
    stored(fleet.writer, head + prompt(11, 10))
    whole = head + prompt(12, fleet.block + 30)
    fleet.plain.reset()
    fleet.plain.generate(head + prompt(13, 10))
    expected = fleet.plain.generate(whole)
    assert cached(expected) == [len(head)]
    found = fleet.reader.alone(whole)
    assert cached(found) == [len(head)]
    assert answers(found) == answers(expected)
    fleet.reader.settle()
    again = fleet.writer.alone(whole)
    assert cached(again) == [3 * fleet.block]
    assert agree(again, expected)


def test_prefix_without_a_state_is_computed(fleet: Fleet) -> None:
    """Attention's pages alone do not hit: there is no state after the first block."""
    head = prompt(20, fleet.block)
    stored(fleet.writer, head + prompt(21, fleet.block + 20))
    whole = head + prompt(22, 40)
    found = fleet.reader.alone(whole)
    assert cached(found) == [0]
    assert agree(found, fleet.plain.alone(whole))


def test_generated_tokens_are_stored(fleet: Fleet) -> None:
    """The next turn of a conversation hits as far as in an engine's own cache."""
    first, more = prompt(30, fleet.block - 20), prompt(31, 20)
    local = first + _answer(fleet.plain, first) + more
    expected = cached(fleet.plain.generate(local))
    second = first + _answer(fleet.writer, first) + more
    found = fleet.reader.alone(second)
    assert cached(found) == expected
    assert agree(found, fleet.plain.alone(second))


def _answer(engine: EngineHandle, first: list[int]) -> list[int]:
    """Return an answer that ends behind the end of a block."""
    engine.reset()
    tokens: list[int] = engine.generate(first, max_tokens=50)[0]["tokens"]
    engine.settle()
    return tokens


def test_hits_and_misses_in_one_batch(fleet: Fleet) -> None:
    block = fleet.block
    known = [prompt(40 + i, block + 30 + 70 * i) for i in range(4)]
    new = [prompt(50 + i, 40 + 130 * i) for i in range(4)]
    stored(fleet.writer, *known)
    expected = fleet.plain.alone(*known, *new)
    fleet.reader.reset()
    found = fleet.reader.generate(*known, *new)
    assert all(tokens >= block for tokens in cached(found)[:4])
    assert cached(found)[4:] == [0] * 4
    assert agree(found, expected)


def test_preempted_requests(fleet: Fleet) -> None:
    """Four requests with room for two: preempted ones answer as if they were alone."""
    prompts = [prompt(60 + i, fleet.block + 50 + 10 * i) for i in range(4)]
    expected = fleet.plain.alone(*prompts, max_tokens=200)
    found = fleet.few_blocks.generate(*prompts, max_tokens=200)
    assert agree(found, expected)
    fleet.few_blocks.settle()
    assert fleet.few_blocks.ask("metrics")["vllm:num_preemptions"] >= 1
    found = fleet.few_blocks.alone(*prompts, max_tokens=200)
    assert agree(found, expected), "a stored state is wrong"


def spaces_of(fleet: Fleet, store: RestartableNode, whole: list[int], kind: str) -> list[Namespace]:
    """Return the namespaces of attention or of states that hold the prompt's last full block."""
    name = fleet.writer.chain(whole)[-1]
    with store.client() as client:
        found = [
            space
            for space, _ in client.namespaces()
            if space.model == fleet.model
            and client.lookup(space, [name]).prefix_pages
            and _holds(space) == kind
        ]
    assert len(found) == (STATE_GROUPS if kind == "states" else 1)
    return found


def _holds(space: Namespace) -> str:
    """Return the kind of layers of a namespace: vLLM registers states as bytes."""
    dtypes = {plane.dtype for group in space.layout.groups for plane in group.planes}
    return "states" if dtypes == {"int8"} else "attention"


@pytest.mark.parametrize("swapped", ["attention", "states"])
def test_swapped_pages_change_the_answer(
    swapped: str, fleet: Fleet, store: RestartableNode
) -> None:
    """Verify the checks: another prompt's pages under this prompt's hashes change the answer."""
    seed = 70 if swapped == "states" else 80
    length = 2 * fleet.block + 5
    right, wrong = prompt(seed, length), prompt(seed + 1, length)
    expected = fleet.plain.alone(right)
    stored(fleet.writer, right, wrong)
    names, others = fleet.writer.chain(right)[:2], fleet.writer.chain(wrong)[:2]
    if swapped == "states":  # only the last block's are stored
        names, others = names[1:], others[1:]
    spaces = spaces_of(fleet, store, right, swapped)
    with store.client() as client:
        for space in spaces:
            pages = [bytearray(space.layout.page_nbytes) for _ in others]
            assert all(client.get(space, others, pages))
            assert all(client.remove(space, names))
            assert client.put(space, names, pages) == [PutOutcome.STORED] * len(pages)
    found = fleet.reader.alone(right)
    assert cached(found) == [2 * fleet.block]
    assert not agree(found, expected)


@pytest.mark.parametrize("lost", ["attention", "states"])
def test_half_a_prefix_is_computed(lost: str, fleet: Fleet, store: RestartableNode) -> None:
    """A prefix of which one group's page was evicted is not loaded."""
    whole = prompt(90 if lost == "attention" else 91, fleet.block + 30)
    stored(fleet.writer, whole)
    space = spaces_of(fleet, store, whole, lost)[-1]
    with store.client() as client:
        assert all(client.remove(space, fleet.writer.chain(whole)[:1]))
    found = fleet.reader.alone(whole)
    assert cached(found) == [0]
    assert agree(found, fleet.plain.alone(whole))


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_node_killed_during_saves_and_loads(
    delay_s: float, fleet: Fleet, store: RestartableNode
) -> None:
    """No request fails, no answer changes, and no wrong page is stored."""
    seed = 1000 + round(delay_s * 1000) * 10
    known = [prompt(seed + i, 3 * fleet.block + 20 * i) for i in range(4)]
    fresh = [prompt(seed + 4 + i, 3 * fleet.block + 20 * i) for i in range(4)]
    expected = fleet.plain.alone(*known, *fresh)
    stored(fleet.reader, *known)
    store.flush()
    fleet.reader.reset()
    killer = threading.Timer(delay_s, store.end)
    killer.start()
    found = fleet.reader.generate(*known, *fresh)
    killer.join()
    store.start()
    assert agree(found, expected)
    fleet.reader.settle()
    assert agree(fleet.reader.alone(*known, *fresh), expected), "a stored page is wrong"
