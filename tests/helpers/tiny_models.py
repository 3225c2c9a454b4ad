"""Models with random weights of a fixed seed, small enough for a forward pass in milliseconds."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 512
TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
COMMON: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
LLAMA = {**COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
# The size of DeepSeek's latent cache, 512 + 64, for which engines have kernels; both layers dense.
MLA = {
    **COMMON,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,  # SGLang reads it; transformers leaves it out
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
}
# DeepSeek-V3.2: an indexer chooses the 512 tokens that a token attends to. With fewer tokens or
# larger weights, a token chosen or not by rounding changes the answer.
DSA = {
    **MLA,
    "initializer_range": 0.1,
    "q_lora_rank": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
# Alternating layer types: two groups of the engine's cache, which share memory.
HYBRID = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Recurrent layers beside attention. Each third of them is a group of the engine's cache, and so are
# the attention layers. A state of 33 or 67 KiB makes blocks of 160 tokens.
RECURRENT_LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 2
MAMBA2 = {
    **COMMON,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "layer_types": RECURRENT_LAYERS,
    "num_local_experts": 0,
    "shared_intermediate_size": 256,
    "position_embedding_type": "rope",
    "attention_multiplier": 0.2,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
}
GATED_DELTA = {
    **COMMON,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": RECURRENT_LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 4,  # SGLang reads it; transformers leaves it out
    "mamba_ssm_dtype": "float32",
}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "mla": (DeepseekV2Config, DeepseekV2ForCausalLM, MLA),
    "dsa": (DeepseekV32Config, DeepseekV32ForCausalLM, DSA),
    "hybrid": (Olmo3Config, Olmo3ForCausalLM, HYBRID),
    "mamba2": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, MAMBA2),
    "gated_delta": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, GATED_DELTA),
}


def save_model(
    kind: str, directory: Path, seed: int = 0, dtype: str = "float32", **changes: Any
) -> None:
    """Save a checkpoint in `directory`; `changes` apply to the model's configuration."""
    disable_progress_bar()
    torch.manual_seed(seed)
    config_class, model_class, values = KINDS[kind]
    config = config_class(**{**values, **changes}, dtype=dtype)
    model = model_class(config)
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            # Remember some hundred tokens. A decay by transformers' initial values takes a few.
            torch.nn.init.uniform_(weights, math.log(0.001), math.log(0.03))
        elif name.endswith(("q_norm.weight", "k_norm.weight")) and kind == "gated_delta":
            torch.nn.init.ones_(weights)  # doubles queries and keys, for peaked attention
    model.to(getattr(torch, dtype)).save_pretrained(directory)
