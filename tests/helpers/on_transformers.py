"""Tiny models of transformers, named as both adapters name them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from claims import DYNAMIC, LONGROPE, YARN, Adapter, Way
from lazily import adapters, transformers

from kvstore import Namespace

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}


def rope(kind: Way) -> dict[str, Any]:
    short = {name: factor[:4] for name, factor in kind.items() if isinstance(factor, list)}
    return {"rope_parameters": {**_ROPE, **kind, **short}}


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))
        .to(dtype)
        .eval()
    )


def multimodal() -> Any:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = transformers.Gemma3TextConfig(**SIZES)
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=1
        )
    )


def encoder_decoder() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=128, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
        )
    )


def with_attribute(name: str, value: Any, of: Callable[[Any], Any] = lambda model: model) -> Any:
    model = tiny()
    setattr(of(model), name, value)
    return model


def namespace(tmp_path: Path, way: Way) -> Namespace:
    del tmp_path
    model = way["model"]() if "model" in way else tiny(**way.get("config", {}))
    return adapters.namespace_of(
        model, way.get("name", "org/tiny"), way.get("revision"), way.get("page", 16)
    )


CACHES = "tests/gpu_agent/test_transformers.py::"
PAGED = "tests/gpu_agent/test_transformers_paged.py::"
CLAIMS: dict[str, dict[str, Any]] = {
    "model": {"namespace": [{"name": "org/other"}, {"config": {"num_hidden_layers": 3}}]},
    "weights": {"namespace": [{"config": {"seed": 1}}, {"revision": "2"}]},
    "dtype": {"namespace": [{"config": {"dtype": torch.bfloat16}}]},
    "quantisation": {
        "namespace": [
            {
                "model": lambda: with_attribute(
                    "quantization_config", {"bits": 4}, lambda model: model.config
                )
            },
        ]
    },
    "layout": {"namespace": [{"page": 32}, {"config": {"head_dim": 16}}]},
    "backend": {"no": [{"config": {"attn_implementation": "eager"}}]},
    "RoPE scaling": {
        "namespace": [{"config": rope(YARN)}, {"config": {"rope_theta": 5e6}}],
        "refused": [
            {"config": rope(DYNAMIC)},
            {"config": rope(LONGROPE)},
            {"revision": "r1", "config": rope(DYNAMIC)},
            {
                "model": lambda: with_attribute(
                    "rope_type", "dynamic", lambda model: model.model.rotary_emb
                )
            },
            {"model": lambda: with_attribute("use_dynamic_ntk", True, lambda model: model.config)},
        ],
    },
    "salts": {"namespace": [{"name": "org/tiny of team b"}]},
    "ranks": {"refused": [{"model": lambda: with_attribute("_tp_size", 2)}]},
    "LoRA": {
        "refused": [
            {"model": lambda: with_attribute("_hf_peft_config_loaded", True)},
            {"model": lambda: with_attribute("peft_config", {"default": "lora"})},
        ]
    },
    "multimodal": {
        "refused": [
            {"model": multimodal},
            {"model": encoder_decoder},
            {
                "model": lambda: with_attribute(
                    "use_bidirectional_attention", True, lambda model: model.config
                )
            },
        ]
    },
}
ADAPTERS = {
    "transformers DynamicCache": Adapter(
        namespace,
        {
            **CLAIMS,
            "KV dtype": {"refused": CACHES + "test_cache_of_another_dtype_is_refused"},
            "draft layers": {"refused": CACHES + "test_layers_of_another_model_are_refused"},
        },
    ),
    "transformers paged": Adapter(
        namespace,
        {
            **CLAIMS,
            "KV dtype": {"refused": PAGED + "test_cache_of_another_dtype_is_refused"},
            "draft layers": {"refused": PAGED + "test_layers_of_another_model_are_refused"},
        },
    ),
}
