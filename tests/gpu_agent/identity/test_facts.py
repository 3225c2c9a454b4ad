"""The facts that docs/identity.md says a namespace covers, each tested alone.

With an explicit revision the checkpoint and its configuration are not read, so that only the tested
fact can change the namespace.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_others
import on_sglang
import on_transformers
import on_vllm
import pytest
from claims import YARN, Way, tree
from on_others import SSM
from on_vllm import images

VOUCHED = {"options": {"revision": "r1"}}

ADAPTERS = {
    **on_vllm.ADAPTERS,
    **on_sglang.ADAPTERS,
    **on_others.ADAPTERS,
    **on_transformers.ADAPTERS,
}


class MLAAttentionSpec(SimpleNamespace):
    """Another kind of group with the same shape."""


def chunked(**fields: Any) -> SimpleNamespace:
    """Return a group whose attention reaches back to the start of its chunk."""
    return SimpleNamespace(**fields, attention_chunk_size=4096)


OTHER_CONFIG: dict[str, Any] = {"config": {"rope_scaling": YARN}}
OTHER_HASH = {"cache_config.prefix_caching_hash_algo": "sha256_cbor"}


@pytest.mark.parametrize(
    ("adapter", "way"),
    [
        ("vLLM connector", OTHER_CONFIG),
        ("vLLM connector", OTHER_HASH),
        ("vLLM connector", {"parallel_config.cp_kv_cache_interleave_size": 2}),
        ("vLLM connector", {"spec": MLAAttentionSpec}),
        ("vLLM connector", {"spec": chunked}),
        ("vLLM connector", {"layer": {"isa": "amx"}}),
        ("vLLM connector", {"layer": {"impl": tree(_soa_store=True)}}),
        ("vLLM connector", {"model_config.model_class_overrides": {"Llama": "other:Llama"}}),
        ("vLLM tier", OTHER_CONFIG),
        ("vLLM tier", OTHER_HASH),
        ("vLLM tier", {"model_config.model_class_overrides": {"Llama": "other:Llama"}}),
        (
            "vLLM tier",
            {"offloading.groups": [tree(group_id=1, tokens_per_block=16, layer_names=("0", "1"))]},
        ),
        ("SGLang HiCache", OTHER_CONFIG),
        ("SGLang linker", OTHER_CONFIG),
        ("LightLLM", OTHER_CONFIG),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_fact_alone_changes_the_namespace(
    adapter: str, way: dict[str, Any], tmp_path: Path
) -> None:
    namespace = ADAPTERS[adapter].namespace
    usual = namespace(tmp_path, VOUCHED)
    assert namespace(tmp_path, VOUCHED).digest == usual.digest
    assert namespace(tmp_path, {**VOUCHED, **way}).digest != usual.digest


@pytest.mark.parametrize(
    ("host", "pool", "by_rank"),
    [
        (on_sglang.MLAHost, "kv", False),
        (on_sglang.MLAHost, "mamba", True),
        (on_sglang.MHAHost, "draft", True),  # with heads, beside latents
    ],
)
def test_latents_of_sglang_are_named_without_their_rank_and_states_with_it(
    host: type[Any], pool: str, by_rank: bool, tmp_path: Path
) -> None:
    found = [
        on_sglang.hicache(
            tmp_path,
            {
                **VOUCHED,
                **{"host": host, "pool": pool},
                **{"engine.is_mla_model": True, "engine.tp_rank": rank},
            },
        ).digest
        for rank in (0, 1)
    ]
    assert (found[0] != found[1]) is by_rank


# Written out, so that a setting missing from the code's own lists is noticed.
PROCESSING = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_device_do_normalize",
)
SGLANG = (
    *(
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "json_model_override_args",
        "load_format",
        "weight_version",
    ),
    *(
        "model_loader_extra_config",
        "modelopt_quant",
        "modelopt_checkpoint_restore_path",
        "quantize_and_serve",
    ),
    *("rl_quant_profile", "torchao_config", "model_impl"),
)
SGLANG_STATES = (
    *("mamba_ssm_dtype", "mamba_backend", "mamba_cache_philox_rounds"),
    *("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"),
    *("linear_attn_verify_backend", "enable_mamba_cache_stochastic_rounding"),
)
LIGHTLLM = (
    *(
        "data_type",
        "quant_type",
        "expert_dtype",
        "llm_kv_type",
        "llm_kv_quant_group_size",
        "mtp_mode",
        "mtp_step",
    ),
    *("weight_version", "cpu_cache_token_page_size"),
)
LIGHTLLM_HYBRID = (
    *("linear_att_hash_page_size", "linear_att_page_block_num", "linear_att_ssm_data_type"),
    "disable_linear_att_small_page_cpu_cache",
)


def settings() -> Iterator[Any]:
    """Yield (adapter, usual way, way with a single setting changed)."""
    for name in PROCESSING:
        ways = [
            {"model_config.multimodal_config": images(**changes)}
            for changes in ({}, {name: "other"})
        ]
        for adapter in ("vLLM connector", "vLLM tier"):
            yield pytest.param(adapter, *ways, id=f"{adapter}-{name}")
    for name in SGLANG:
        for adapter in ("SGLang HiCache", "SGLang linker"):
            yield pytest.param(adapter, {}, {f"args.{name}": "other"}, id=f"{adapter}-{name}")
    for name in SGLANG_STATES:
        usual = {"args.uses_mamba_radix_cache": True}
        for adapter in ("SGLang HiCache", "SGLang linker"):
            other = {**usual, f"args.{name}": "other"}
            yield pytest.param(adapter, usual, other, id=f"{adapter}-{name}")
    for name in (*LIGHTLLM, *LIGHTLLM_HYBRID):
        model = SSM if name in LIGHTLLM_HYBRID else {}
        ways = [{**model, "arguments": {name: value}} for value in (1, 2)]
        yield pytest.param("LightLLM", *ways, id=f"LightLLM-{name}")


@pytest.mark.parametrize(("adapter", "usual", "other"), list(settings()))
def test_setting_alone_changes_the_namespace(
    adapter: str, usual: Way, other: Way, tmp_path: Path
) -> None:
    """Regression: fourteen rarely used settings that affect a page's bytes were missing."""
    namespace = ADAPTERS[adapter].namespace
    assert (
        namespace(tmp_path, {**VOUCHED, **usual}).digest
        != namespace(tmp_path, {**VOUCHED, **other}).digest
    )
