"""vLLM's configuration, as far as the connector and the tier read it."""

from pathlib import Path
from typing import Any

from claims import CONFIG, DYNAMIC, LONGROPE, YARN, Adapter, Way, changed, checkpoint, tree

from gpu_agent.identity.vllm import (
    check_tier,
    model_facts,
    namespaces,
    not_shareable,
    tier_facts,
    tier_namespace,
    weights_of,
)
from gpu_agent.identity.vllm_shards import GroupShard, rank_axes
from gpu_agent.options import identity_of
from kvstore import ConfigError, LayerGroup, Namespace, PageLayout, Plane

ENGINE_TESTS = "tests/engines/vllm/"
HASHES = ENGINE_TESTS + "test_identity.py::"


def config(tmp_path: Path, way: Way) -> Any:
    hf = {**CONFIG, **way.get("config", {})}
    usual = tree(
        model_config=tree(
            model=checkpoint(tmp_path, way),
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_config=tree(to_dict=lambda: hf),
            max_model_len=4096,
            is_prefix_caching_supported=True,
            multimodal_config=None,
        ),
        cache_config=tree(
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            enable_prefix_caching=True,
            calculate_kv_scales=False,
        ),
        parallel_config=tree(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            prefill_context_parallel_size=2,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        load_config=tree(load_format="auto", download_dir=None, model_loader_extra_config={}),
        attention_config=tree(backend=None),
        mamba_config=tree(backend=tree(name="TRITON"), enable_stochastic_rounding=False),
        num_hash_lookahead_tokens=0,
        lora_config=None,
        speculative_config=way.get("draft") and draft(checkpoint(tmp_path, way["draft"])),
        compilation_config=tree(
            static_forward_context=dict.fromkeys(
                ("0", "1"), layer(way.get("backend", "FLASH"), way.get("layer", {}))
            )
        ),
    )
    return changed(usual, way)


def draft(model: str, **changes: Any) -> Any:
    return tree(**{"method": "eagle", "model": model, "revision": None, **changes})


def layer(backend: str, fields: dict[str, Any]) -> Any:
    return tree(get_attn_backend=lambda: tree(get_name=lambda: backend), **fields)


def images(**changes: Any) -> Any:
    """Return vLLM's settings for multimodal input."""
    return tree(**{"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, **changes})


def connector(tmp_path: Path, way: Way) -> Namespace:
    planes = (Plane("kv", way.get("page_dtype", "bfloat16"), (2, way.get("dim", 32))),)
    layout = PageLayout(way.get("block", 16), (LayerGroup("full", (0, 1), planes),))
    spec = way.get("spec", tree)(sliding_window=way.get("window"))
    group = tree(kv_cache_spec=spec, layer_names=way.get("layers", ["0", "1"]))
    ranks = {"tp": 0, "pp": 0, "cp": 0, **way.get("ranks", {})}
    made = config(tmp_path, way)
    if reason := not_shareable(made):  # the real connector logs this and stays inactive
        raise ConfigError(f"kvstore: nothing is saved or loaded: this engine has {reason}")
    caches = tree(kv_cache_groups=[group])
    pool: Any = tree(layout=layout)
    shard = GroupShard(pool, tuple(group.layer_names), rank_axes(made.parallel_config, ranks, 1))
    ((found,),) = namespaces(
        made, caches, identity_of(way.get("options", {})), [[shard]], way.get("seed", "none")
    )
    return found


def tier(tmp_path: Path, way: Way) -> Namespace:
    made, options = config(tmp_path, way), way.get("options", {})
    check_tier(made, options.get("lora", ""))
    facts = model_facts(made, "revision" in options)
    facts = tier_facts(made, way.get("release", "0.33.0"), way.get("device", "cuda9.0"), facts)
    identity = weights_of(made, identity_of(options))
    offloading = tree(
        parallel=tree(is_parallelism_agnostic=False, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        canonical_layout=False,
        replicated_layout=False,
        model=tree(dtype="bfloat16"),
        kv_cache_layout="LBHNC",
        cache=tree(blocks_per_chunk=1, tokens_per_hash=16),
        groups=[tree(group_id=0, tokens_per_block=16, layer_names=("0", "1"))],
    )
    changed(
        tree(offloading=offloading),
        {name: way[name] for name in way if name.startswith("offloading.")},
    )
    return tier_namespace(offloading, identity, facts, way.get("row", 8192))


BY_ARRIVAL = {
    "model_config.multimodal_config": images(mm_processor_cache_gb=0),
    "cache_config.enable_prefix_caching": 0,
}
BOTH: dict[str, dict[str, Any]] = {
    "model": {
        "namespace": [
            {"name": "other"},
            {"config": {"num_hidden_layers": 3}},
            {"options": {"model": "mine"}},
        ]
    },
    "weights": {
        "namespace": [
            {"weights": b"retrained"},
            {"options": {"revision": "2"}},
            {"load_config.load_format": "dummy"},
            {"load_config.model_loader_extra_config": {"tensorizer_uri": "a"}},
        ],
        "refused": [
            {"model_config.model": "org/unheard-of"},
            {"model_config.model_weights": "s3://bucket/tiny"},
            {"load_config.load_format": "tensorizer"},
            {"load_config.load_format": "ipc_cache"},
            {"load_config.load_format": "of-a-plugin"},
        ],
    },
    "dtype": {"namespace": [{"model_config.dtype": "torch.float16"}]},
    "quantisation": {
        "namespace": [
            {"model_config.quantization": "fp8"},
            {"config": {"quantization_config": {"bits": 4}}},
            {"model_config.quantization_config": {"linear": "int8"}},
        ]
    },
    "RoPE scaling": {
        "namespace": [
            {"config": {"rope_scaling": YARN}},
            {"config": {"rope_theta": 5e6}},
            {"config": {"rope_scaling": DYNAMIC}},
        ],
        "refused": [
            {
                "config": {"rope_scaling": kind},
                "model_config.using_transformers_backend": lambda: True,
            }
            for kind in (DYNAMIC, LONGROPE)
        ],
    },
    "draft layers": {
        "namespace": [{"draft": {"name": "eagle"}}],
        "refused": [{"speculative_config": draft("org/unheard-of")}],
    },
}
ADAPTERS = {
    "vLLM connector": Adapter(
        connector,
        {
            **BOTH,
            "KV dtype": {
                "namespace": [
                    {"cache_config.cache_dtype": "fp8_e5m2"},
                    {"page_dtype": "uint8"},
                    {"cache_config.kv_cache_dtype_skip_layers": ["0"]},
                ],
                "refused": [{"cache_config.calculate_kv_scales": True}],
            },
            "layout": {
                "namespace": [
                    {"cache_config.kv_cache_layout": "LBNHC"},
                    {"block": 32},
                    {"dim": 64},
                    {"window": 128},
                    {"layers": ["0", "2"]},
                ]
            },
            "backend": {"namespace": [{"backend": "FLASHINFER"}]},
            "ranks": {
                "namespace": [
                    {"ranks": {"tp": 1}},
                    {"ranks": {"pp": 1}},
                    {"ranks": {"cp": 1}},
                    {"parallel_config.tensor_parallel_size": 4},
                    {"parallel_config.pipeline_parallel_size": 4},
                    {"parallel_config.prefill_context_parallel_size": 4},
                    {"parallel_config.decode_context_parallel_size": 2},
                ]
            },
            "LoRA": {"hash": HASHES + "test_block_hash_covers_lora_name_and_path"},
            "salts": {
                "namespace": [
                    {"options": {"tenant": "b"}},
                    {"options": {"salt": "x"}},
                    {"seed": "7"},
                ],
                "hash": ENGINE_TESTS
                + "test_configurations.py::test_salted_request_hits_only_its_own_salt",
            },
            "multimodal": {
                "namespace": [
                    {
                        "model_config.multimodal_config": images(
                            mm_processor_kwargs={"max_pixels": 9}
                        )
                    }
                ],
                "hash": HASHES + "test_block_hash_covers_image_content",
                "refused": [BY_ARRIVAL],
            },
        },
    ),
    "vLLM tier": Adapter(
        tier,
        {
            **BOTH,
            "KV dtype": {
                "namespace": [
                    {"offloading.model.dtype": "fp8"},
                    {"cache_config.kv_cache_dtype_skip_layers": ["0"]},
                ],
                "refused": [{"cache_config.calculate_kv_scales": True}],
            },
            "layout": {
                "namespace": [
                    {"offloading.kv_cache_layout": "BLHNC"},
                    {"offloading.canonical_layout": True},
                    {"offloading.replicated_layout": True},
                    {"offloading.cache.blocks_per_chunk": 2},
                    {"offloading.cache.tokens_per_hash": 8},
                    {
                        "offloading.groups": [
                            tree(group_id=0, tokens_per_block=16, layer_names=("0",))
                        ]
                    },
                    {"row": 16384},
                ]
            },
            "backend": {
                "namespace": [
                    {"attention_config.backend": tree(name="FLASHINFER")},
                    {"release": "0.34.0"},
                    {"device": "cuda10.0"},
                ]
            },
            "ranks": {
                "namespace": [
                    {f"offloading.parallel.{kind}_size": 2} for kind in ("tp", "pp", "pcp", "dcp")
                ],
            },
            "LoRA": {
                "hash": HASHES + "test_block_hash_covers_lora_name_and_path",
                "refused": [{"lora_config": tree()}],
            },
            "salts": {
                "namespace": [{"options": {"tenant": "b"}}, {"options": {"salt": "x"}}],
                "hash": HASHES + "test_block_hash_covers_salt",
            },
            "multimodal": {
                "namespace": [
                    {
                        "model_config.multimodal_config": images(
                            mm_processor_kwargs={"max_pixels": 9}
                        )
                    }
                ],
                "hash": HASHES + "test_block_hash_covers_image_content",
                "refused": [BY_ARRIVAL],
            },
        },
    ),
}
