"""LightLLM's start arguments and LMCache's keys and options, for tests of identity."""

from pathlib import Path
from typing import Any

import torch
from claims import YARN, Adapter, Way, checkpoint

from gpu_agent.identity.lightllm import namespace_of
from gpu_agent.layouts.lmcache import Naming, ObjectKey, object_layout
from gpu_agent.options import identity_of
from kvstore import Namespace

ARGUMENTS: dict[str, Any] = {
    "data_type": None,
    "quant_type": "none",
    "llm_kv_type": "None",
    "llm_kv_quant_group_size": 8,
    "kv_quant_calibration_config_path": None,
    "mtp_mode": None,
    "mtp_step": 0,
    "mtp_draft_model_dir": None,
    "cpu_cache_token_page_size": 64,
    "weight_version": "default",
    "enable_multimodal": False,
    "disable_vision": True,
    "disable_audio": True,
    "run_mode": "normal",
    "tp": 2,
    "dp": 1,
    "nnodes": 1,
    "node_rank": 0,
}
SSM: Way = {"config": {"model_type": "qwen3_5", "text_config": {"linear_num_key_heads": 4}}}


def lightllm(tmp_path: Path, way: Way) -> Namespace:
    arguments = {**ARGUMENTS, "model_dir": checkpoint(tmp_path, way), **way.get("arguments", {})}
    arguments = {name: value for name, value in arguments.items() if value != "absent"}
    for argument in ("kv_quant_calibration_config_path", "quant_cfg"):
        if argument in way:
            (tmp_path / argument).write_text(way[argument])
            arguments[argument] = str(tmp_path / argument)
    if "draft" in way:
        arguments["mtp_draft_model_dir"] = [checkpoint(tmp_path, way["draft"])]
    memory = torch.zeros((4, way.get("nbytes", 4096)), dtype=torch.uint8)
    return namespace_of(
        arguments, way.get("variables", {}), identity_of(way.get("options", {})), memory
    )


def lmcache(tmp_path: Path, way: Way) -> Namespace:
    del tmp_path  # LMCache's adapter has no access to the weights
    options = {"revision": "r1", "kv_format": "vllm 0.33 bf16", **way.get("options", {})}
    key = ObjectKey(**{**_KEY, **way.get("key", {})})
    name = Naming(identity_of(options), options["kv_format"]).of(key, None)
    shape, dtype = way.get("shape", (2, 4, 16, 8)), way.get("dtype", torch.bfloat16)
    layout = object_layout([shape], [dtype], torch.Size(shape).numel() * dtype.itemsize)
    return Namespace(**{**vars(name.scope), "layout": layout})


_KEY: dict[str, Any] = {
    "model_name": "org/tiny",
    "kv_rank": 0x02000200,
    "object_group_id": 0,
    "chunk_hash": bytes(32),
}
_NO_MULTIMODAL = [
    {"arguments": {"enable_multimodal": True}},
    {"arguments": {"enable_multimodal": "absent", "disable_vision": False}},
    {"arguments": {"enable_multimodal": "absent", "disable_audio": None}},
    {"arguments": {"run_mode": "decode"}},
]
ADAPTERS = {
    "LightLLM": Adapter(
        lightllm,
        {
            "model": {"namespace": [{"name": "other"}, {"config": {"num_hidden_layers": 3}}]},
            "weights": {
                "namespace": [
                    {"weights": b"retrained"},
                    {"options": {"revision": "2"}},
                    {"arguments": {"weight_version": "2"}},
                ],
                "refused": [
                    {"arguments": {"model_dir": "org/unheard-of"}},
                    {"arguments": {"enable_rl": True}},
                ],
            },
            "dtype": {
                "namespace": [
                    {"arguments": {"data_type": "float16"}},
                    {"config": {"dtype": "float16"}},
                ]
            },
            "quantisation": {
                "namespace": [
                    {"arguments": {"quant_type": "fp8w8a8"}},
                    {"arguments": {"expert_dtype": "fp4"}},
                    {"quant_cfg": "layer 3: int8"},
                ]
            },
            "KV dtype": {
                "namespace": [
                    {"arguments": {"llm_kv_type": "int8kv"}},
                    {"arguments": {"llm_kv_quant_group_size": 16}},
                    {"kv_quant_calibration_config_path": "scales 2"},
                ]
            },
            "layout": {
                "namespace": [{"arguments": {"cpu_cache_token_page_size": 32}}, {"nbytes": 8192}]
            },
            "backend": {"no": [{"arguments": {"llm_prefill_att_backend": ["flashinfer"]}}]},
            "RoPE scaling": {
                "namespace": [
                    {"config": {"rope_scaling": YARN}},
                    {"variables": {"LIGHTLLM_NTK_ALPHA": "2"}},
                ],
                "no": [{"arguments": {"max_req_total_len": 131072}}],
            },
            "ranks": {
                "namespace": [
                    *({"arguments": {"nnodes": 2, "node_rank": rank}} for rank in (0, 1)),
                    {**SSM, "arguments": {"tp": 4}, "unlike": SSM},
                ],
                "no": [{"arguments": {"tp": 4}}],
            },
            "LoRA": {
                "no": "tests/engines/lightllm/test_arguments.py::test_lightllm_serves_no_lora"
            },
            "salts": {"namespace": [{"options": {"tenant": "b"}}, {"options": {"salt": "x"}}]},
            "multimodal": {"refused": _NO_MULTIMODAL},
            "draft layers": {
                "namespace": [
                    {"draft": {"name": "eagle"}},
                    {"arguments": {"mtp_mode": "eagle_with_att"}},
                    {"arguments": {"mtp_step": 2}},
                ],
                "refused": [{"arguments": {"mtp_draft_model_dir": "org/unheard-of"}}],
            },
        },
    ),
    "LMCache": Adapter(
        lmcache,
        {
            "model": {"namespace": [{"key": {"model_name": "org/other"}}]},
            "weights": {
                "namespace": [{"options": {"revision": "r2"}}],
                "refused": [{"options": {"revision": ""}}],
            },
            "dtype": {
                "namespace": [
                    {"dtype": torch.float16},
                    {"options": {"kv_format": "vllm 0.33 fp16"}},
                ]
            },
            "quantisation": {"namespace": [{"options": {"kv_format": "vllm 0.33 bf16 w=fp8"}}]},
            "KV dtype": {
                "namespace": [
                    {"dtype": torch.uint8},
                    {"options": {"kv_format": "vllm 0.33 bf16 kv=fp8_e5m2"}},
                ],
                "refused": [{"options": {"kv_format": ""}}],
            },
            "layout": {"namespace": [{"shape": (2, 4, 32, 4)}, {"key": {"object_group_id": 1}}]},
            "backend": {"namespace": [{"options": {"kv_format": "vllm 0.33 bf16 FLASHINFER"}}]},
            "RoPE scaling": {
                "namespace": [{"options": {"kv_format": "vllm 0.33 bf16 max_model_len=131072"}}]
            },
            "ranks": {
                "namespace": [{"key": {"kv_rank": 0x02010201}}, {"key": {"kv_rank": 0x04000400}}]
            },
            "LoRA": {"unprotected": [{"key": {}}]},
            "salts": {
                "namespace": [
                    {"key": {"cache_salt": "a"}},
                    {"options": {"tenant": "b"}},
                    {"options": {"salt": "x"}},
                ]
            },
            "multimodal": {
                "hash": "tests/engines/lmcache/test_images.py"
                "::test_chunk_hash_covers_image_identifier"
            },
            "draft layers": {"namespace": [{"options": {"kv_format": "vllm 0.33 bf16 eagle@r1"}}]},
        },
    ),
}
