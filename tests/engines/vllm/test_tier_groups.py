"""The tier accepts only kinds of KV cache that it was tested with, by vLLM's own classes."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import ConfigError
from kvstore.tools.node_process import NodeProcess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import BLOCK_TOKENS, Engine, model_directory, prompt
    from vllm.v1 import kv_cache_interface as specs

    from gpu_agent.engines.vllm_identity import TIER_SPECS, check_tier_groups

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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (STATE, "MambaSpec"),
        (
            specs.UniformTypeKVCacheSpecs(
                block_size=BLOCK_TOKENS, kv_cache_specs={"layers.1": STATE}
            ),
            "MambaSpec",
        ),
        (specs.CrossAttentionSpec(**SHAPE), "CrossAttentionSpec"),
        (specs.SinkFullAttentionSpec(**SHAPE, sink_len=4), "SinkFullAttentionSpec"),
        (specs.SlidingWindowMLASpec(**SHAPE, sliding_window=32), "SlidingWindowMLASpec"),
        (FutureSpec(**SHAPE), "FutureSpec"),
    ],
    ids=["recurrent", "recurrent of one type", "cross attention", "sink", "sliding MLA", "unknown"],
)
def test_group_of_an_untested_kind_is_refused_by_name(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"group 1 \(layers\.1\) is a {name}, .*Remove the tier"):
        check_tier_groups(config(FULL, kind))


def test_engine_with_recurrent_state_does_not_start(tmp_path: Path) -> None:
    groups = config(FULL, STATE).kv_cache_groups
    with pytest.raises(ConfigError, match=r"group 1 \(layers\.1\) is a MambaSpec"):
        Engine(model_directory(tmp_path / "tiny"), {"address": "localhost:1"}, groups=groups)


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
    assert {type(kind) for kind in KINDS.values()} == set(TIER_SPECS)
