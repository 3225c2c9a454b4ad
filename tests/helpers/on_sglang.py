"""SGLang's arguments and pools, as far as HiCache and the linker read them."""

from pathlib import Path
from typing import Any

import torch
from claims import CONFIG, DYNAMIC, LONGROPE, YARN, Adapter, Way, changed, checkpoint, tree

from gpu_agent.identity.sglang import linker_namespace, pool_namespace, weights
from gpu_agent.options import Identity, identity_of
from kvstore import LayerGroup, Namespace, PageLayout, Plane

KEYS = "tests/engines/sglang/test_keys.py::"


def served(tmp_path: Path, way: Way) -> tuple[Identity, dict[str, Any]]:
    args = tree(
        args=tree(
            model_path=checkpoint(tmp_path, way),
            revision=None,
            dtype="auto",
            quantization=None,
            quantization_param_path=None,
            kv_cache_dtype="auto",
            json_model_override_args="{}",
            load_format="auto",
            weight_version="default",
            lora_paths=None,
            speculative_draft_model_path=checkpoint(tmp_path, way["draft"])
            if "draft" in way
            else None,
            speculative_draft_model_revision=None,
        )
    )
    changed(args, {name: value for name, value in way.items() if name.startswith("args.")})
    if "scales" in way:
        (tmp_path / "scales.json").write_text(way["scales"])
        args.args.quantization_param_path = str(tmp_path / "scales.json")
    if "lora" in way:
        args.args.lora_paths = [f"french={checkpoint(tmp_path, way['lora'])}"]
    config = {**CONFIG, **way.get("config", {})}
    return weights(
        identity_of(way.get("options", {})),
        args.args,
        config,
        native=lambda: way.get("native", True),
    )


class MHAHost:
    """A host pool with attention heads."""

    layout, dtype, head_num, start_layer, end_layer, layer_num, target_layer_num = (
        "page_first",
        "bf16",
        2,
        0,
        2,
        2,
        2,
    )


class MLAHost:
    """A host pool of latents, which are the same on all ranks."""

    layout, dtype, start_layer, end_layer = "page_first", "bf16", 0, 2


def page(way: Way) -> PageLayout:
    plane = Plane("page", "uint8", (way.get("nbytes", 4096),))
    return PageLayout(way.get("page", 64), (LayerGroup("page", (0,), (plane,)),))


def hicache(tmp_path: Path, way: Way) -> Namespace:
    identity, facts = served(tmp_path, way)
    engine = tree(
        tp_rank=0,
        tp_size=2,
        pp_rank=0,
        pp_size=2,
        attn_cp_rank=0,
        attn_cp_size=2,
        is_mla_model=False,
    )
    host = way.get("host", MHAHost)()
    changed(
        tree(engine=engine, host=host),
        {name: way[name] for name in way if name.startswith(("engine.", "host."))},
    )
    return pool_namespace(identity, facts, engine, way.get("pool", "kv"), host, page(way))


def linker(tmp_path: Path, way: Way) -> Namespace:
    identity, facts = served(tmp_path, way)
    params = tree(pp_rank=0, pp_size=2, attn_cp_rank=0, attn_cp_size=2)
    changed(tree(params=params), {name: way[name] for name in way if name.startswith("params.")})
    dtype = way.get("pool_dtype", torch.bfloat16)
    return linker_namespace(identity, facts, params, dtype, page(way), way.get("shard", (0, 2)))


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
            {"args.load_format": "dummy"},
            {"args.weight_version": "step-2"},
        ],
        "refused": [
            {"args.model_path": "org/unheard-of"},
            {"args.load_format": "remote_instance"},
            {"args.load_format": "ipc_cache"},
        ],
    },
    "dtype": {"namespace": [{"args.dtype": "float16"}]},
    "quantisation": {
        "namespace": [
            {"args.quantization": "awq"},
            {"args.torchao_config": "int4wo-128"},
            {"args.modelopt_quant": "fp8"},
            {"config": {"quantization_config": {"bits": 4}}},
        ]
    },
    "backend": {"no": [{"args.attention_backend": "flashinfer"}]},
    "RoPE scaling": {
        "namespace": [
            {"config": {"rope_scaling": YARN}},
            {"config": {"rope_theta": 5e6}},
            {"args.json_model_override_args": '{"rope_theta": 1}'},
        ],
        "refused": [
            {"config": {"rope_scaling": LONGROPE}},
            {"config": {"text_config": {"rope_scaling": LONGROPE}}},
            {"config": {"rope_scaling": DYNAMIC}, "args.model_impl": "transformers"},
            {"config": {"rope_scaling": DYNAMIC}, "native": False},
        ],
    },
    "LoRA": {
        "namespace": [{"lora": {}}],
        "hash": KEYS + "test_keys_cover_salt_and_lora",
        "refused": [{"args.lora_paths": ["french=org/unheard-of"]}],
    },
    "salts": {
        "namespace": [{"options": {"tenant": "b"}}, {"options": {"salt": "x"}}],
        "hash": KEYS + "test_keys_cover_salt_and_lora",
    },
    "multimodal": {"hash": KEYS + "test_keys_cover_image_content"},
}
ADAPTERS = {
    "SGLang HiCache": Adapter(
        hicache,
        {
            **BOTH,
            "KV dtype": {
                "namespace": [
                    {"args.kv_cache_dtype": "fp8_e4m3"},
                    {"host.dtype": "fp8"},
                    {"scales": "1.0"},
                ]
            },
            "layout": {
                "namespace": [
                    {"host.layout": "page_head"},
                    {"host": MLAHost},
                    {"host.end_layer": 3},
                    {"page": 32},
                    {"nbytes": 8192},
                    {"pool": "swa"},
                ]
            },
            "ranks": {
                "namespace": [
                    {f"engine.{kind}_{what}": 1 + (what == "size") * 3}
                    for kind in ("tp", "pp", "attn_cp")
                    for what in ("rank", "size")
                ]
            },
            "draft layers": {
                "namespace": [
                    {"pool": "draft", "draft": {"name": "eagle"}},
                    {"host.layer_num": 3, "draft": {"name": "eagle"}},
                ],
                "no": [{"draft": {"name": "eagle"}}],
                "refused": [{"args.speculative_draft_model_path": "org/unheard-of"}],
            },
        },
    ),
    "SGLang linker": Adapter(
        linker,
        {
            **BOTH,
            "KV dtype": {
                "namespace": [
                    {"args.kv_cache_dtype": "fp8_e4m3"},
                    {"pool_dtype": torch.float16},
                    {"scales": "1.0"},
                ]
            },
            "layout": {"namespace": [{"page": 32}, {"nbytes": 8192}]},
            "ranks": {
                "namespace": [
                    {"shard": (1, 2)},
                    {"shard": (0, 4)},
                    {"params.pp_rank": 1},
                    {"params.pp_size": 4},
                    {"params.attn_cp_rank": 1},
                    {"params.attn_cp_size": 4},
                ]
            },
            "draft layers": {"no": [{"draft": {"name": "eagle"}}]},
        },
    ),
}
