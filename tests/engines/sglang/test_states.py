"""Recurrent states beside KV: a hit ends at a boundary that has a state, and has all KV before it.

SGLang stores a state under the key of the page that it follows, and only where a node of its tree
ends.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import PAGE, fill, mamba, mha, mla, page_bytes, start_node, stopped
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

import gpu_agent.engines.sglang_weights as weights
from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

Make = Callable[..., Any]
PAGES = 10
TOKENS = list(range(PAGES * PAGE))
SLOTS = torch.arange(len(TOKENS))
TARGET = SLOTS + 512


def store_state(engine: Any, slot: int, length: int, tokens: list[int] = TOKENS) -> None:
    """Store the state in this slot as that after `length` pages."""
    transfer = PoolTransfer(
        name=PoolName.MAMBA,
        keys=[engine.hashes(tokens)[length - 1]],
        host_indices=torch.tensor([slot]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    assert engine.backend.batch_set_v2([transfer], extra_info=None) == {PoolName.MAMBA: [True]}


def asked(slot: int) -> list[PoolTransfer]:
    """Return the transfer of a prefetch; SGLang fills in the key when it knows the hit."""
    return [
        PoolTransfer(
            name=PoolName.MAMBA,
            keys=["__placeholder__"],
            host_indices=torch.tensor([slot]),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
    ]


def state(engine: Any, slot: int) -> bytes:
    return page_bytes(engine.hosts[PoolName.MAMBA], torch.tensor([slot]))[0]


def forget(engine: Any, pool: str, page: int) -> None:
    key = bytes.fromhex(engine.hashes(TOKENS)[page])
    assert engine.backend._client.remove(engine.backend._pages[pool].namespace, [key]) == [True]


def damage(engine: Any, pool: str, page: int) -> None:
    """Flip a bit of a page directly in the node's memory."""
    key = bytes.fromhex(engine.hashes(TOKENS)[page])
    with (
        Client(ClientConfig(address=engine.backend._client.config.address, wire="shm")) as client,
        client.open_get(engine.backend._pages[pool].namespace, [key]) as slots,
    ):
        slots.arena.memory[slots.offsets[0] + 77] ^= 1


@pytest.fixture(params=["mha", "mla"])
def pair(request: pytest.FixtureRequest, engine: Make) -> tuple[Any, Any]:
    """Return (engine that stored ten pages, and states after 4 and 8 of them, another engine)."""
    kv = {"mha": mha, "mla": mla}[request.param]
    writer, reader = engine(kv(), mamba()), engine(kv(), mamba())
    for one in (writer, reader):
        for host in one.hosts.values():
            fill(host)
    assert writer.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    store_state(writer, 4, 4)
    store_state(writer, 8, 8)
    return writer, reader


def test_hit_ends_at_the_deepest_boundary_with_a_state(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    operation = reader.query(TOKENS, asked(9))
    assert operation.pool_storage_result.restorable_prefix_pages == [4, 8]
    assert operation.storage_hit_count == 8 * PAGE
    tokens, target = reader.fetch(operation, TARGET)
    assert tokens == 8 * PAGE
    assert state(reader, 9) == state(writer, 8)
    assert page_bytes(reader.host, target[:tokens]) == page_bytes(writer.host, SLOTS[:tokens])


def test_hit_cut_to_a_shorter_prefix_takes_the_earlier_state(pair: tuple[Any, Any]) -> None:
    """Another request's prompt ends after six pages, or the engine has room for no more."""
    writer, reader = pair
    operation = reader.query(TOKENS[: 6 * PAGE], asked(9))
    assert operation.storage_hit_count == 4 * PAGE
    assert reader.fetch(operation, TARGET)[0] == 4 * PAGE
    assert state(reader, 9) == state(writer, 4)


@pytest.mark.parametrize(("lost", "hit"), [(8, 8), (7, 4), (4, 4), (2, 0)])
def test_state_without_all_kv_before_it_is_not_restored(
    pair: tuple[Any, Any], lost: int, hit: int
) -> None:
    """A page of the chain was evicted."""
    _, reader = pair
    forget(reader, "kv", lost)
    assert reader.query(TOKENS, asked(9)).storage_hit_count == hit * PAGE


def test_kv_without_a_state_is_a_miss(pair: tuple[Any, Any]) -> None:
    _, reader = pair
    forget(reader, "mamba", 3)
    forget(reader, "mamba", 7)
    assert reader.query(TOKENS, asked(9)).storage_hit_count == 0


@pytest.mark.parametrize("fate", [forget, damage])
def test_state_lost_after_the_query_is_reported_as_absent(
    pair: tuple[Any, Any], fate: Callable[[Any, str, int], None]
) -> None:
    """Its slot keeps its content, and SGLang makes no node with a state of it."""
    _, reader = pair
    operation = reader.query(TOKENS, asked(9))
    before = state(reader, 9)
    fate(reader, "mamba", 7)
    reader.fetch(operation, TARGET)
    assert operation.pool_storage_result.extra_pool_hit_pages[PoolName.MAMBA] == 0
    if fate is forget:
        assert state(reader, 9) == before
    assert reader.query(TOKENS, asked(9)).storage_hit_count == 4 * PAGE


def test_kv_lost_after_the_query_leaves_the_state_unread(pair: tuple[Any, Any]) -> None:
    _, reader = pair
    operation = reader.query(TOKENS, asked(9))
    before = state(reader, 9)
    forget(reader, "kv", 5)
    assert reader.fetch(operation, TARGET)[0] == 5 * PAGE
    assert operation.pool_storage_result.extra_pool_hit_pages.get(PoolName.MAMBA, 0) == 0
    assert state(reader, 9) == before


def test_weight_update_leaves_no_state_of_the_old_weights(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a state of the old weights beside KV of the new ones, nor the reverse."""
    serving = SimpleNamespace(weight_version="1")
    monkeypatch.setattr("gpu_agent.engines.sglang_weights.get_serving", lambda: serving)
    writer, _ = pair
    assert writer.query(TOKENS, asked(9)).storage_hit_count == 0  # the version has changed
    serving.weight_version = "2"
    assert writer.query(TOKENS, asked(9)).storage_hit_count == 0
    transfer = PoolTransfer(
        name=PoolName.MAMBA,
        keys=[writer.hashes(TOKENS)[7]],
        host_indices=torch.tensor([8]),
    )
    assert writer.backend.batch_set_v2([transfer], extra_info=None) == {PoolName.MAMBA: [False]}
    monkeypatch.setattr(writer.backend, "_settled", 0.0)  # as if 15 seconds had passed
    writer.backup(TOKENS, SLOTS)
    assert writer.query(TOKENS, asked(9)).storage_hit_count == 0  # KV, and no state
    store_state(writer, 4, 4)
    assert writer.query(TOKENS, asked(9)).storage_hit_count == 4 * PAGE


# ---- what decides a state's bytes -------------------------------------------------------------


def test_states_of_other_dtypes_have_other_namespaces(engine: Make) -> None:
    """States of float16 and bfloat16 have equal sizes."""

    def namespace(dtype: torch.dtype) -> bytes:
        pages = engine(mha(), mamba(dtype=dtype)).backend._pages["mamba"]
        assert pages.page_nbytes == 2 * 4 * 8 * 16 * 2 + 2 * 34 * 3 * 2
        return bytes(pages.namespace.digest)

    assert namespace(torch.float16) != namespace(torch.bfloat16)
    assert namespace(torch.float16) == namespace(torch.float16)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("mamba_ssm_dtype", "float16"), ("mamba_backend", "flashinfer")],
)
def test_arguments_of_states_count_for_all_pools_of_a_recurrent_model(
    recurrent: bool, argument: str, value: str, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV behind a recurrent layer depends on its states. Other models keep their namespaces."""
    from harness import server_arguments

    arguments = server_arguments("a revision")
    arguments.uses_mamba_radix_cache = recurrent
    arguments.mamba_ssm_dtype, arguments.mamba_backend = None, "triton"
    monkeypatch.setattr(weights, "get_server_args", lambda: arguments)
    monkeypatch.setattr(weights, "model_config", lambda _: {"model_type": "granite"})

    def namespaces() -> dict[str, bytes]:
        made = engine(mha(), mamba())
        return {name: bytes(pages.namespace.digest) for name, pages in made.backend._pages.items()}

    before = namespaces()
    setattr(arguments, argument, value)
    for name, digest in namespaces().items():
        assert (digest != before[name]) is recurrent, name


# ---- nodes that evict, hang or die ----------------------------------------------------------


@pytest.fixture
def own_node() -> Iterator[NodeProcess]:
    """Start a node with room for a few hundred pages."""
    with start_node("--ram-bytes", "2MiB", "--extent-bytes", "256KiB") as node:
        yield node
        node.kill()


def test_evicted_chains_end_at_boundaries_with_right_states(
    own_node: NodeProcess, engine: Make
) -> None:
    """The node keeps a part of 60 chains, each with states after 4, 8 and 10 pages."""
    made = engine(mha(), mamba(), address=own_node.address)
    for host in made.hosts.values():
        fill(host)
    chains = [[1000 + number, *TOKENS[1:]] for number in range(60)]
    source, states = page_bytes(made.host, SLOTS), {}
    for number, tokens in enumerate(chains):
        for index, length in enumerate((4, 8, 10)):
            slot = (number * 3 + index) % 60
            store_state(made, slot, length, tokens)
            states[number, length] = state(made, slot)
        made.backup(tokens, SLOTS)
    hits = []
    for number in reversed(range(60)):
        operation = made.query(chains[number], asked(63))
        hits.append(operation.storage_hit_count // PAGE)
        if hits[-1]:
            assert hits[-1] in (4, 8, 10)
            done, _ = made.fetch(operation, TARGET)
            assert page_bytes(made.host, TARGET[:done]) == source[: done // PAGE]
            assert state(made, 63) == states[number, hits[-1]]
    assert hits[0] == 10
    assert 0 in hits, "the node did not evict"


@pytest.mark.parametrize("fate", ["killed", "hung"])
def test_node_lost_between_kv_and_state(own_node: NodeProcess, engine: Make, fate: str) -> None:
    """The KV is loaded; the state is not, and its slot is untouched after the call."""
    made = engine(
        mha(), mamba(), address=own_node.address, load_timeout_s=1.0, lookup_timeout_s=1.0,
        timeout_per_ki_token_s=0.0,
    )  # fmt: skip
    for host in made.hosts.values():
        fill(host)
    made.backup(TOKENS, SLOTS)
    store_state(made, 4, 10)
    operation = made.query(TOKENS, asked(9))
    assert operation.storage_hit_count == len(TOKENS)
    before, load = state(made, 9), made.backend.batch_get_v2

    def lost(*arguments: Any, **named: Any) -> Any:
        if fate == "killed":
            own_node.kill()
            return load(*arguments, **named)
        with stopped(own_node):
            return load(*arguments, **named)

    made.backend.batch_get_v2 = lost
    assert made.fetch(operation, TARGET)[0] == len(TOKENS)
    assert operation.pool_storage_result.extra_pool_hit_pages[PoolName.MAMBA] == 0
    assert state(made, 9) == before
