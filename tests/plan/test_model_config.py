"""The bytes that a model caches, from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tools.model_config import cache_size

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
# Fields of published models
QWEN3_NEXT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "dtype": "bfloat16",
}
QWEN3_5 = {
    **QWEN3_NEXT,
    "num_hidden_layers": 40,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "mamba_ssm_dtype": "float32",
}
GRANITE_4 = {
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}
BAMBA = {
    **{name: value for name, value in GRANITE_4.items() if name != "layer_types"},
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_head": "auto",
}
NEMOTRON_H = {
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "conv_kernel": 4,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "ssm_state_size": 128,
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
}
JAMBA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
KIMI_LINEAR = {
    "num_hidden_layers": 27,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        (LLAMA, 131_072),
        ({**LLAMA, "torch_dtype": "float32"}, 262_144),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, 65_536),
        ({**LLAMA, "num_key_value_heads": None, "head_dim": 64}, 262_144),
        ({"text_config": LLAMA, "vision_config": {}}, 131_072),
        (
            {
                "num_hidden_layers": 61,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "dtype": "bfloat16",
            },
            70_272,
        ),
    ],
)
def test_model_config_gives_the_bytes_of_a_token(
    tmp_path: Path, model: dict[str, Any], nbytes: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    assert cache_size(path) == (nbytes, 0)


@pytest.mark.parametrize(
    ("model", "token_nbytes", "state_nbytes"),
    [
        (QWEN3_NEXT, 12 * 2048, 36 * (2 * 32 * 128 * 128 + 2 * 3 * 8192)),
        ({"text_config": QWEN3_5}, 10 * 2048, 30 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)),
        (GRANITE_4, 4 * 4096, 36 * 2 * (8192 * 128 + 3 * (8192 + 2 * 128))),
        (BAMBA, 3 * 4096, 29 * 2 * (8192 * 128 + 3 * (8192 + 2 * 128))),
        (NEMOTRON_H, 4 * 4096, 24 * 2 * (8192 * 128 + 3 * (8192 + 2 * 8 * 128))),
        (FALCON_H1, 44 * 1024, 44 * 2 * (3072 * 256 + 3 * (3072 + 2 * 256))),
        (JAMBA, 4 * 4096, 28 * 2 * (8192 * 16 + 3 * 8192)),
        (KIMI_LINEAR, 7 * 1152, 20 * (4 * 32 * 128 * 128 + 2 * 3 * 3 * 4096)),
    ],
    ids=["qwen3_next", "qwen3_5", "granite_4", "bamba", "nemotron_h", "falcon_h1", "jamba", "kimi"],
)
def test_hybrid_models_have_a_token_size_and_a_state_size(
    tmp_path: Path, model: dict[str, Any], token_nbytes: int, state_nbytes: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    assert cache_size(path) == (token_nbytes, state_nbytes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "describes no model"),
        ("[]", "describes no model"),
        ("{}", "num_attention_heads|num_hidden_layers"),
        (json.dumps({**LLAMA, "torch_dtype": "int3"}), "unknown dtype 'int3'"),
        (
            json.dumps({**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}),
            "sliding_attention",
        ),
        (json.dumps({**LLAMA, "mamba_d_state": 16, "lru_width": 4096}), "lru_width, mamba_d_state"),
        (
            json.dumps({**LLAMA, "layer_types": ["linear_attention"] * 32}),
            "recurrent layers have no mamba_d_conv or conv_kernel",
        ),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "ZeroDivisionError"),
        (json.dumps({**LLAMA, "num_hidden_layers": -3}), "would take -12288 bytes"),
        (json.dumps({**LLAMA, "num_hidden_layers": 1e300}), "a token would take"),
        ("[" * 100_000, "RecursionError"),
        (None, "can not read"),
    ],
)
def test_invalid_model_description_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=message) as caught:
        cache_size(path)
    assert "config.json" in str(caught.value)
