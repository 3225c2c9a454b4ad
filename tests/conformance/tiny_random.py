"""Make tiny models with random weights, in which wrong KV changes tokens.

Attention is peaked (large queries and keys), and recurrent states remember some hundred tokens.
`python tiny_random.py KIND DIRECTORY [float32|bfloat16]` makes one.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from engine_control import SOUND
from safetensors.torch import load_file, save_file

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
RECURRENT = (["linear_attention"] * 3 + ["full_attention"]) * 2
# Kind -> transformers' class of the configuration, of the model, and what differs from COMMON.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
    # Alternating layers: two groups of the engine's cache, which share memory.
    "sliding": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    # The size of DeepSeek's latent cache, 512 + 64, for which engines have kernels.
    "mla": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
        },
    ),
    "mamba2": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 8,
            "layer_types": RECURRENT,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.1,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
        },
    ),
    "gated-delta": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_hidden_layers": 8,
            "head_dim": 64,
            "layer_types": RECURRENT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mamba_ssm_dtype": "float32",
        },
    ),
}
# Beside states, attention is too quiet: without these factors a wrong block of it is lost in the
# rounding of bfloat16.
LOUDER = {"mamba2": 4.0, "gated-delta": 4.0}
SOUND_HZ, SOUND_S = 16_000, 1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8


def save_model(kind: str, directory: Path, dtype: str) -> None:
    """Save a checkpoint. Raises AttributeError if transformers does not know the model."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    made(kind, dtype).save_pretrained(directory)


@torch.no_grad()
def made(kind: str, dtype: str) -> Any:
    """Return a model of transformers. Raises AttributeError if transformers does not know it."""
    import transformers

    config_class, model_class, changes = KINDS[kind]
    config = getattr(transformers, config_class)(**{**COMMON, **changes}, dtype=dtype)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            # transformers' initial values forget within a few tokens.
            torch.nn.init.uniform_(weights, math.log(0.001), math.log(0.03))
        elif name.endswith(("q_norm.weight", "k_norm.weight")) and kind == "gated-delta":
            torch.nn.init.ones_(weights)  # this norm adds 1: doubles queries and keys
        elif name.endswith("self_attn.o_proj.weight"):
            weights *= LOUDER.get(kind, 1.0)
    return model.to(getattr(torch, dtype))


def save_adapter(directory: Path, dtype: str, seed: int) -> None:
    """Save a LoRA for the kind "llama" with random weights, large enough to change answers."""
    directory.mkdir(parents=True)
    numbers = torch.Generator().manual_seed(seed)
    hidden, kv_heads, head = COMMON["hidden_size"], COMMON["num_key_value_heads"], 32
    outputs = {"k_proj": kv_heads * head, "v_proj": kv_heads * head}
    tensors = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            shapes = {"A": (RANK, hidden), "B": (outputs.get(target, hidden), RANK)}
            for part, shape in shapes.items():
                weights = torch.randn(*shape, generator=numbers) * 0.15
                tensors[f"{name}.lora_{part}.weight"] = weights.to(getattr(torch, dtype))
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "base_model_name_or_path": "",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


@torch.no_grad()
def save_sound_model(directory: Path, dtype: str) -> None:
    """Save a Qwen2-Audio, a kind whose input needs neither torchvision nor librosa.

    It has a tokenizer of numbered words, since vLLM's processor wants one.
    """
    import transformers
    from tokenizers import Tokenizer, models

    heads = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    encoder = transformers.Qwen2AudioEncoderConfig(d_model=32, num_mel_bins=80, **heads)
    config = transformers.Qwen2AudioConfig(
        audio_config=encoder, text_config=transformers.Qwen2Config(**COMMON)
    )
    config.audio_token_index = SOUND
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    # transformers 5 writes a prefix twice, which vLLM does not read.
    file = str(directory / "model.safetensors")
    weights = {name.replace("model.model.", "model."): one for name, one in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    words = {f"t{number}": number for number in range(SOUND - 3)}
    for word in ("<unk>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"):
        words[word] = len(words)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        pad_token="t0",
        additional_special_tokens=["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"],
    )
    features = transformers.WhisperFeatureExtractor(feature_size=80)
    transformers.Qwen2AudioProcessor(features, tokenizer).save_pretrained(directory)


def sound(seed: int) -> tuple[Any, int]:
    """Return noise and its sampling rate: 25 tokens of a prompt."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(SOUND_HZ * SOUND_S, generator=numbers).numpy(), SOUND_HZ


def main(kind: str, directory: str, dtype: str = "float32") -> None:
    if kind.startswith("adapter-"):
        save_adapter(Path(directory), dtype, int(kind.partition("-")[2]))
    elif kind == "sound":
        save_sound_model(Path(directory), dtype)
    else:
        save_model(kind, Path(directory), dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
