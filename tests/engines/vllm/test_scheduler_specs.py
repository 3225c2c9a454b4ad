"""Each spec class of vLLM is stored, limits the hit or is refused, as docs/engines/vllm.md says."""

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_engine import BLOCK, Engine, Engines, answer, tokens
    from vllm.v1 import kv_cache_interface as specs

    from gpu_agent.blocks.groups import BlockGroup
    from gpu_agent.engines import vllm_identity
    from gpu_agent.engines.vllm_identity import (
        STATES_SERVED,
        block_groups,
        check_tier_groups,
        full_hits,
        scales_in_blocks,
    )
    from gpu_agent.engines.vllm_specs import REFUSED, SPECS, STORED, kind_of

pytestmark = pytest.mark.filterwarnings("default")
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}
STATE: dict[str, Any] = {"block_size": BLOCK, "shapes": ((4,),), "dtypes": (torch.float32,)}
# Classes that no cache group has alone
WITHOUT_GROUP = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
FIELDS: dict[str, dict[str, Any]] = {
    "SlidingWindowSpec": {**SHAPE, "sliding_window": 40},
    "SlidingWindowMLASpec": {**SHAPE, "sliding_window": 40, "extra_retained_tokens": 2},
    "SlidingWindowMLASpec, bounded replay": {**SHAPE, "sliding_window": 40, "bounded_replay": True},
    "ChunkedLocalAttentionSpec": {**SHAPE, "attention_chunk_size": 64},
    "MambaSpec, align": {**STATE, "mamba_cache_mode": "align"},
    "MambaSpec, none": {**STATE, "mamba_cache_mode": "none"},
    "MambaSpec, all": {**STATE, "mamba_cache_mode": "all"},
    "RSWASpec": {**SHAPE, "rswa_window": 40},
    "SinkFullAttentionSpec": {**SHAPE, "sink_len": BLOCK},
    "HiSparseHotSpec": {"block_size": BLOCK, "page_size": 64, "blocks_per_request": 2},
    "HiSparseResidentSpec": {"block_size": BLOCK, "page_size": 64},
}
GROUPS = {
    "SlidingWindowSpec": BlockGroup(BLOCK, window_tokens=39),
    "SlidingWindowMLASpec": BlockGroup(BLOCK, window_tokens=41),
    "ChunkedLocalAttentionSpec": BlockGroup(BLOCK, chunk_tokens=64),
    "MambaSpec, align": BlockGroup(BLOCK, window_tokens=1, is_state=True),
}


class FutureSpec(specs.FullAttentionSpec):
    """A class that a later vLLM may add."""


def made(kind: str) -> Any:
    """Return a spec of a row of the table."""
    name, _, which = kind.partition(", ")
    if kind == "any other":
        return FutureSpec(**SHAPE)
    if which == "non-causal":
        return specs.FullAttentionSpec(**SHAPE, non_causal=True)
    if which == "in host memory":
        return specs.MLAAttentionSpec(**SHAPE)
    return getattr(specs, name)(**FIELDS.get(kind, SHAPE))


def caches(*kinds: str) -> Any:
    groups = [
        specs.KVCacheGroupSpec([f"l.{i}"], made(kind), host_resident=kind.endswith("host memory"))
        for i, kind in enumerate(kinds)
    ]
    return specs.KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def config(**cache: Any) -> Any:
    cache = {"enable_prefix_caching": True, **cache}
    return SimpleNamespace(
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def test_table_has_every_class_of_vllm() -> None:
    classes = {
        name
        for name, kind in vars(specs).items()
        if isinstance(kind, type) and issubclass(kind, specs.KVCacheSpec)
    }
    assert classes - WITHOUT_GROUP == {
        row.partition(", ")[0] for row in SPECS if not row.startswith("any")
    }
    for name in WITHOUT_GROUP - {"UniformTypeKVCacheSpecs"}:
        assert kind_of(object.__new__(getattr(specs, name))) == "any other"


@pytest.mark.parametrize("kind", SPECS)
def test_connector_treats_a_class_as_the_table_says(kind: str) -> None:
    found = block_groups(config(), caches("FullAttentionSpec", kind))
    if SPECS[kind].connector == REFUSED:
        name = type(made(kind)).__name__
        assert found == f"a group of {name} ({SPECS[kind].reason})"
    else:
        expected = GROUPS.get(kind, BlockGroup(BLOCK)) if SPECS[kind].connector == STORED else None
        assert found == [BlockGroup(BLOCK), expected]
    wrapped = caches("FullAttentionSpec", kind)
    inner = made(kind)
    wrapped.kv_cache_groups[1].kv_cache_spec = specs.UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"l.1": inner}
    )
    assert block_groups(config(), wrapped) == found


@pytest.mark.parametrize("kind", SPECS)
def test_tier_treats_a_class_as_the_table_says(kind: str) -> None:
    too_old = kind == "MambaSpec, align" and not STATES_SERVED  # vLLM 0.32
    if SPECS[kind].tier == REFUSED or too_old:
        with pytest.raises(ConfigError, match=type(made(kind)).__name__):
            check_tier_groups(config(), caches("FullAttentionSpec", kind))
    else:
        check_tier_groups(config(), caches("FullAttentionSpec", kind))


def test_hit_leaves_the_last_token_where_it_cannot_be_computed_again() -> None:
    assert full_hits(caches("FullAttentionSpec", "SlidingWindowSpec"))
    for kind in ("MambaSpec, align", "CircularBufferSpec"):
        assert not full_hits(caches("FullAttentionSpec", kind))
    compressed = caches("FullAttentionSpec")
    compressed.kv_cache_groups[0].kv_cache_spec = specs.MLAAttentionSpec(
        **SHAPE, tokens_per_state=4
    )
    assert not full_hits(compressed)


def test_scales_are_seen_in_layers_of_several_sizes() -> None:
    """The first forward pass overwrites them, so there is no hit before."""
    plain, mode = made("FullAttentionSpec"), specs.KVQuantMode.INT8_PER_TOKEN_HEAD
    scaled = dataclasses.replace(plain, kv_quant_mode=mode, dtype=torch.int8)
    several = specs.UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"l.0": plain, "l.1": scaled}
    )
    for spec, expected in ((plain, False), (scaled, True), (several, True)):
        found = caches("FullAttentionSpec")
        found.kv_cache_groups[0].kv_cache_spec = spec
        assert scales_in_blocks(found) == expected


@pytest.mark.parametrize("option", ["use_replayssm", "use_kda_recoverssm"])
def test_states_completed_from_other_memory_are_refused(option: str) -> None:
    found = block_groups(config(**{option: True}), caches("FullAttentionSpec", "MambaSpec, align"))
    assert isinstance(found, str)
    assert option in found


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("hash_tokens", [BLOCK // 2, BLOCK])
def test_states_that_vllm_caches_under_wrong_keys_are_refused(
    checkpoints: int, hash_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit inside a block, of a layer that exports checkpoints of its states."""
    monkeypatch.setattr(vllm_identity, "block_sizes", lambda *_: (hash_tokens, hash_tokens))
    model = caches("FullAttentionSpec", "MambaSpec, align")
    model.kv_cache_groups[1].kv_cache_spec = specs.MambaSpec(
        **STATE, mamba_cache_mode="align", num_prefill_checkpoint_blocks=checkpoints
    )
    found = block_groups(config(), model)
    if checkpoints and hash_tokens < BLOCK:
        assert "hits inside blocks" in found
    else:
        assert found == [BlockGroup(BLOCK), GROUPS["MambaSpec, align"]]


def test_vllm_that_offers_no_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_identity, "offers_states", lambda: False)
    found = block_groups(config(), caches("FullAttentionSpec", "MambaSpec, align"))
    assert found == "recurrent states (MambaSpec), which this vLLM does not offer to connectors"
    assert block_groups(config(), caches("FullAttentionSpec")) == [BlockGroup(BLOCK)]


def test_group_without_pages_leaves_the_others_their_hits(make: Engines) -> None:
    """A ring beside attention: block tables and orders count the stored groups only.

    A hit of the whole prompt ends a block earlier.
    """

    def engine() -> Engine:
        return make(ring=specs.CircularBufferSpec(**RING))

    prompt = tokens(7, 4 * BLOCK)
    for cached in (0, 2 * BLOCK):
        one = engine()
        assert one.generate(prompt) == answer(prompt, 8)
        assert one.cached == {"r": cached}
        assert one.pool.get_num_free_blocks() == one.free_blocks
        assert len(one.connector._groups) == 1


def test_refused_group_is_named_once_and_the_engine_runs_without_the_store(
    make: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens(7, 4 * BLOCK)
    for _ in range(2):  # the second finds nothing
        caplog.clear()
        one = make(ring=specs.HiddenStateCacheSpec(**SHAPE), ranks=2)
        assert one.generate(prompt) == answer(prompt, 8)
        assert one.cached == {"r": 0}
        (said,) = [text for text in caplog.messages if "nothing is saved or loaded" in text]
        assert "a group of HiddenStateCacheSpec (" in said
        assert SPECS["HiddenStateCacheSpec"].reason in said
        assert all(rank.connector._rank is None for rank in one.ranks)


RING: dict[str, Any] = {
    "block_size": 2 * BLOCK,
    "num_kv_heads": 2,
    "head_size": 2,
    "dtype": torch.int32,
}
