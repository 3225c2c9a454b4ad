"""The tier accepts only kinds of KV cache that it was tested with, by vLLM's own classes."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import ConfigError
from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import BLOCK_TOKENS, Engine, model_directory, prompt
    from vllm.v1 import kv_cache_interface as specs

    from gpu_agent.engines.vllm_identity import (
        STATES_SERVED,
        check_tier_groups,
        tier_state_facts,
    )
    from gpu_agent.engines.vllm_specs import SPECS, STORED

pytestmark = pytest.mark.filterwarnings("default")
SHAPE = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = specs.FullAttentionSpec(**SHAPE)
STATE = specs.MambaSpec(
    block_size=BLOCK_TOKENS,
    shapes=((16, 32),),
    dtypes=(torch.float32,),
    page_size_padded=8192,
    mamba_cache_mode="align",
)


class FutureSpec(specs.FullAttentionSpec):
    """A kind that a later vLLM may add."""


def config(*kinds: Any) -> Any:
    groups = [
        specs.KVCacheGroupSpec([f"layers.{number}"], kind) for number, kind in enumerate(kinds)
    ]
    return specs.KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


VLLM = SimpleNamespace(cache_config=SimpleNamespace())


def together(*kinds: Any) -> Any:
    layers = {f"layers.{number + 1}": kind for number, kind in enumerate(kinds)}
    return specs.UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers)


def refused_kinds() -> Iterator[Any]:
    """Yield kinds that the tier refuses, and the reasons. Not every vLLM has all of them."""
    window = {**SHAPE, "sliding_window": 32}
    for name, fields in {
        "CrossAttentionSpec": SHAPE,
        "EncoderOnlyAttentionSpec": SHAPE,
        "SinkFullAttentionSpec": {**SHAPE, "sink_len": 4},
        "SlidingWindowMLASpec": window,
        "RSWASpec": {**SHAPE, "rswa_window": 32},
        "HiddenStateCacheSpec": {**SHAPE, "num_kv_heads": 1},
        "CircularBufferSpec": SHAPE,
        "HiSparseHotSpec": {"block_size": 16, "page_size": 8192, "blocks_per_request": 1},
        "HiSparseResidentSpec": {"block_size": 16, "page_size": 8192},
    }.items():
        if kind := getattr(specs, name, None):
            yield pytest.param(kind(**fields), rf"is a {name} \({SPECS[name].reason}", id=name)
    unknown = rf"is a FutureSpec \({SPECS['any other'].reason}\)"
    yield pytest.param(FutureSpec(**SHAPE), unknown, id="unknown")
    future = together(FULL, FutureSpec(**SHAPE))
    yield pytest.param(future, unknown, id="unknown beside a known one")
    mixed = together(FULL, specs.SlidingWindowSpec(**window))
    yield pytest.param(mixed, "has layers of several kinds", id="several kinds")
    if not STATES_SERVED:
        yield pytest.param(STATE, "needs vLLM 0.33 or newer", id="state")
        yield pytest.param(together(STATE), "needs vLLM 0.33 or newer", id="states")
        return
    other = replace(STATE, mamba_cache_mode="none")
    yield pytest.param(other, "no prefix caching", id="states between boundaries")
    drafted = replace(STATE, num_speculative_blocks=2)
    yield pytest.param(drafted, "state of drafted tokens", id="states of drafts")
    yield pytest.param(together(FULL, STATE), "has layers of several kinds", id="state and KV")


@pytest.mark.parametrize(("kind", "reason"), list(refused_kinds()))
def test_group_of_an_untested_kind_is_refused_by_name(kind: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"group 1 \(layers\.1\) .*{reason}.*Remove the tier"):
        check_tier_groups(VLLM, config(FULL, kind))


@pytest.mark.skipif(not STATES_SERVED, reason="the tier refuses all states of this vLLM")
@pytest.mark.parametrize("option", ["use_replayssm", "use_kda_recoverssm"])
def test_state_that_is_completed_from_other_memory_is_refused(option: str) -> None:
    vllm = SimpleNamespace(cache_config=SimpleNamespace(**{option: True}))
    with pytest.raises(ConfigError, match=f"completed from other memory .{option}"):
        check_tier_groups(vllm, config(FULL, STATE))


def test_engine_with_an_untested_kind_does_not_start(tmp_path: Path) -> None:
    groups = config(FULL, FutureSpec(**SHAPE)).kv_cache_groups
    with pytest.raises(ConfigError, match=r"group 1 \(layers\.1\) is a FutureSpec"):
        Engine(model_directory(tmp_path / "tiny"), {"address": "localhost:1"}, groups=groups)


def test_bytes_of_states_are_named() -> None:
    vllm = SimpleNamespace(cache_config=SimpleNamespace())
    assert tier_state_facts(vllm, config(FULL)) == {}
    kinds = [STATE, replace(STATE, dtypes=(torch.bfloat16,)), replace(STATE, shapes=((32, 16),))]
    found = [tier_state_facts(vllm, config(FULL, kind)) for kind in kinds]
    assert len({fact["states"] for fact in found}) == len(kinds)
    assert tier_state_facts(vllm, config(FULL, together(STATE))) == found[0]
    vllm.mamba_config = SimpleNamespace(backend="flashinfer", enable_stochastic_rounding=True)
    assert tier_state_facts(vllm, config(FULL, STATE)) not in found


@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "window"])
def test_plain_connector_refuses_groups_that_may_be_recurrent(
    tmp_path: Path, recurrent: bool
) -> None:
    """vLLM's plain connector passes a group's reach to a tier, but not its kind."""
    window = specs.SlidingWindowSpec(**SHAPE, sliding_window=32)
    groups = config(FULL, STATE if recurrent else window).kv_cache_groups
    named = {"address": "localhost:1", "revision": "r1", "salt": "vllm 0.33 CPU fp32"}
    with pytest.raises(
        ConfigError, match=r"group \d \(layers\.\d\).*recurrent state.*KVStoreOffloadingConnector"
    ):
        Engine(
            model_directory(tmp_path / "tiny"),
            named,
            connector="OffloadingConnector",
            groups=groups,
        )


KINDS: dict[str, Any] = {
    "full": FULL,
    "MLA": specs.MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1}),
    "window": specs.SlidingWindowSpec(**SHAPE, sliding_window=48),
    "chunks": specs.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_kind_is_restored(tmp_path: Path, node: NodeProcess, kind: str) -> None:
    model, options = model_directory(tmp_path / "tiny"), {"address": node.address}
    # Models with such layers have full attention layers as well.
    beside = [FULL] if kind in ("window", "chunks") else []
    engines = [
        Engine(model, options, groups=config(*beside, KINDS[kind]).kv_cache_groups)
        for _ in range(2)
    ]
    try:
        assert engines[0].serve("cold", prompt(124)) == 0
        assert engines[1].serve("warm", prompt(124)) == 112
    finally:
        for engine in engines:
            engine.close()


def test_all_accepted_kinds_are_tested() -> None:
    """Recurrent states have tests of their own (test_tier_hybrids.py)."""
    accepted = {kind for kind, verdict in SPECS.items() if verdict.tier == STORED}
    assert {type(kind).__name__ for kind in KINDS.values()} == accepted - {"MambaSpec, align"}


def test_scales_in_blocks_are_not_restored_before_the_first_forward_pass(
    tmp_path: Path, node: NodeProcess
) -> None:
    """It overwrites the scales of all blocks."""
    scaled = replace(FULL, dtype=torch.int8, kv_quant_mode=specs.KVQuantMode.INT8_PER_TOKEN_HEAD)
    names = [f"layers.{number}" for number in range(4)]
    options = {"address": node.address, "lookup_timeout_s": 20.0, "timeout_s": 30.0}
    found = []
    for _ in range(2):
        engine = Engine(
            model_directory(tmp_path / "tiny"),
            options,
            groups=[specs.KVCacheGroupSpec(names, scaled)],
        )
        try:
            found += [engine.serve(f"r{seed}", prompt(100, seed)) for seed in (7, 11)]
        finally:
            engine.close()
    assert found == [0, 0, 0, 96]
