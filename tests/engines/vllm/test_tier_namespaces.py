"""Engines share a tier's pages only if their rows hold the same bytes for the same key."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import ConfigError, Namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from scheduler_harness import Engine, model_directory
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    from gpu_agent.engines.vllm_tier import KVStoreTier, split_arguments, tier_options

pytestmark = pytest.mark.filterwarnings("default")
ROW_NBYTES = 8192
FACTS = {"vllm": "0.33", "backend": "FLASH_ATTN"}


def config(**changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=changes.pop("agnostic", False),
    )
    known = {
        name: changes.pop(name) for name in list(changes) if name.endswith(("_size", "_index"))
    }
    plain = OffloadingConfig(
        groups=(
            OffloadingGroupConfig(
                tokens_per_block=16, layer_names=("layers.0", "layers.1"), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=ROW_NBYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=replace(parallel, **known),
        kv_cache_layout="LBHNC",
    )
    return replace(plain, **changes)


def namespace(config: OffloadingConfig, row_nbytes: int = ROW_NBYTES, **options: Any) -> Namespace:
    view = memoryview(bytearray(4 * row_nbytes)).cast("B", (4, row_nbytes))
    values = {
        "facts": FACTS,
        "weights": ["org/model", "r1"],
        "address": "localhost:1",
        "staging_nbytes": 65536,
        **options,
    }
    tier = KVStoreTier(SimpleNamespace(config=config), view, "KVStoreTier", **values)
    try:
        assert tier.check() == []
        return tier.namespace
    finally:
        tier.shutdown()


CHANGES: dict[str, Callable[[], Namespace]] = {
    "nothing": lambda: namespace(config()),
    "tenant": lambda: namespace(config(), tenant="b"),
    "model": lambda: namespace(config(), weights=["org/other", "r1"]),
    "KV dtype": lambda: namespace(
        config(model=OffloadingModelConfig(name="org/model", dtype="fp8"))
    ),
    "weights": lambda: namespace(config(), weights=["org/model", "r2"]),
    "salt": lambda: namespace(config(), salt="x"),
    "epoch": lambda: namespace(config(), epoch=1),
    "facts": lambda: namespace(config(), facts={**FACTS, "backend": "FLASHINFER"}),
    "row": lambda: namespace(config(), row_nbytes=2 * ROW_NBYTES),
    "TP": lambda: namespace(config(tp_size=2, world_size=2)),
    "PP": lambda: namespace(config(pp_size=2, world_size=2)),
    "prefill CP": lambda: namespace(config(pcp_size=2, world_size=2)),
    "decode CP": lambda: namespace(config(dcp_size=2)),
    "layout": lambda: namespace(config(kv_cache_layout="BLHNC")),
    "canonical": lambda: namespace(config(canonical_layout=True)),
    "replicated": lambda: namespace(config(replicated_layout=True)),
    "blocks of a chunk": lambda: namespace(config(cache=OffloadingCacheConfig(16, 2))),
    "tokens of a hash": lambda: namespace(config(cache=OffloadingCacheConfig(8, 1))),
    "layers": lambda: namespace(config(groups=(OffloadingGroupConfig(16, ("layers.0",), 0),))),
    "tokens of a block": lambda: namespace(
        config(groups=(OffloadingGroupConfig(32, ("layers.0", "layers.1"), 0),))
    ),
    "group": lambda: namespace(
        config(groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 1),))
    ),
}


def test_changes_that_affect_bytes_change_the_namespace() -> None:
    digests = {name: made().digest for name, made in CHANGES.items()}
    assert len(set(digests.values())) == len(digests), digests


def test_options_that_keep_the_bytes_share_a_namespace() -> None:
    plain = namespace(config()).digest
    assert namespace(config(engine_id="other")).digest == plain
    assert namespace(config(data_parallel_index=1, data_parallel_size=2)).digest == plain
    assert namespace(config(), load_timeout_s=3.0).digest == plain


def test_canonical_layout_is_shared_by_all_tensor_parallel_sizes() -> None:
    alone, together = (
        namespace(config(canonical_layout=True, agnostic=True, tp_size=size, world_size=size))
        for size in (1, 2)
    )
    assert alone.digest == together.digest
    direct = namespace(config(agnostic=True, tp_size=2, world_size=2))
    assert direct.tp_size == 2  # vLLM's direct rows are split by rank


def test_tier_without_facts_and_weights_names_the_remedy() -> None:
    untold: dict[str, Any] = {"facts": None, "weights": None}
    with pytest.raises(ConfigError, match=r"KVStoreOffloadingConnector.*revision and salt"):
        namespace(config(), **untold)
    by_hand = namespace(config(), **untold, revision="2026-11-01", salt="vllm 0.33 FLASH_ATTN bf16")
    assert by_hand.digest != namespace(config()).digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adress": "store:7440"}, "unknown option 'adress'"),
        ({"locality": "MOON"}, "locality='MOON' must be one of LOCAL, REMOTE"),
        ({"load_timeout_s": 0}, "load_timeout_s=0"),
    ],
)
def test_wrong_option_fails_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        namespace(config(), **options)


def test_tier_takes_the_arguments_of_other_releases() -> None:
    """Branches of vLLM pass a tier more objects, and one may pass fewer."""

    def newer(self: Any, offloading_spec: Any, tier_type: str, *, admission: Any) -> None: ...

    given = {"offloading_spec": 1, "primary_kv_view": 2, "tier_type": "T", "admission": 3}
    taken, options = split_arguments(newer, {**given, "lifecycle": 4, "address": "store:7440"})
    assert taken == {"offloading_spec": 1, "tier_type": "T", "admission": 3}
    assert options == {"address": "store:7440"}


def test_engine_without_prefix_caching_is_refused() -> None:
    """vLLM disables prefix caching where a prompt must not continue from cached KV."""
    cache = SimpleNamespace(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        tier_options(SimpleNamespace(model_config=SimpleNamespace(), cache_config=cache), {})


def test_connector_passes_weights_and_facts_to_the_tier(tmp_path: Path) -> None:
    engine = Engine(model_directory(tmp_path / "tiny"), {"address": "localhost:1"})
    try:
        space = engine.tier.namespace
        found = tier_options(engine.config, {})
        assert [space.model, space.revision] == found["weights"]
        assert space.model == "tiny"
        assert space.revision.startswith("weights=")
        assert all(f"{name}={value}" in space.salt for name, value in found["facts"].items())
        assert found["facts"]["hash"] == "sha256"
        assert tier_options(engine.config, {"model": "mine", "revision": "r1"})["weights"] == [
            "mine",
            "r1",
        ]

        def changed(**attributes: Any) -> dict[str, Any]:
            model = SimpleNamespace(**{**vars(engine.config.model_config), **attributes})
            return tier_options(
                SimpleNamespace(**{**vars(engine.config), "model_config": model}), {}
            )["facts"]

        assert changed() == found["facts"]
        longer = engine.config.model_config.hf_config.__class__(rope_theta=1e6)
        for change in ({"quantization": "fp8"}, {"dtype": torch.float16}, {"hf_config": longer}):
            assert changed(**change) != found["facts"]
        assert changed(max_model_len=64) == found["facts"]
        scaled = SimpleNamespace(to_dict=lambda: {"rope_scaling": {"rope_type": "longrope"}})
        assert changed(hf_config=scaled, max_model_len=64) != changed(hf_config=scaled)
    finally:
        engine.close()


def test_server_with_lora_needs_the_option_lora(tmp_path: Path) -> None:
    engine = Engine(model_directory(tmp_path / "tiny"), {"address": "localhost:1"})
    try:
        served = SimpleNamespace(**{**vars(engine.config), "lora_config": object()})
        with pytest.raises(ConfigError, match=r'LoRA.*"lora": "named"'):
            tier_options(served, {})
        assert tier_options(served, {"lora": "named"}) == tier_options(engine.config, {})
    finally:
        engine.close()


def test_plain_connector_needs_revision_and_salt(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="revision and salt"):
        Engine(model, {"address": "localhost:1"}, connector="OffloadingConnector")
    named = {"address": "localhost:1", "revision": "r1", "salt": "vllm 0.33 CPU fp32"}
    Engine(model, named, connector="OffloadingConnector").close()
