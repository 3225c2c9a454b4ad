"""vLLM's recurrent states and block hashes in the namespace; nothing else changes one."""

from pathlib import Path
from typing import Any

import pytest
from claims import Way, tree
from on_vllm import ADAPTERS, connector

# Of 0.1.0: pages that are stored must stay found
USUAL = (
    "vllm backend=FLASH config=ca9dfbc7cff679ae9f6946d818858a6b dcp=1 dtype=bfloat16 "
    "generation=0.29 hash=sha256 interleave=1 kind=SimpleNamespace kv_dtype=auto kv_layout=LBHNC "
    "layers=1e9987e996a1c529 load=auto quantization=None seed=140bedbf window=0"
)
VOUCHED: Way = {"options": {"revision": "r1"}}
STATE: dict[str, Any] = {
    "shapes": ((4, 16), (8, 16, 16)),
    "dtypes": ("torch.bfloat16", "torch.float32"),
    "mamba_type": tree(name="GDN_ATTN"),
    "mamba_cache_mode": "align",
    "tp_replicated": False,
}


def of_state(tmp_path: Path, way: Way, **changes: Any) -> str:
    return connector(
        tmp_path,
        {**VOUCHED, **way, "spec": lambda sliding_window: tree(**{**STATE, **changes})},
    ).digest


def test_facts_of_attention_are_those_of_earlier_releases(tmp_path: Path) -> None:
    assert connector(tmp_path, VOUCHED).salt == USUAL


@pytest.mark.parametrize(
    "changes",
    [
        {"shapes": ((16, 4), (8, 16, 16))},  # of as many bytes
        {"dtypes": ("torch.float32", "torch.bfloat16")},
        {"mamba_type": tree(name="MAMBA2")},
        {"mamba_cache_mode": "all"},
        {"tp_replicated": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_property_of_states_changes_the_namespace(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert of_state(tmp_path, {}) == of_state(tmp_path, {})
    assert of_state(tmp_path, {}, **changes) != of_state(tmp_path, {})


@pytest.mark.parametrize(
    "way",
    [
        {"mamba_config.backend": tree(name="FLASHINFER")},
        {"mamba_config.enable_stochastic_rounding": True},
        {"cache_config.mamba_ssm_cache_dtype": "float16"},
        {"config": {"mamba_chunk_size": 64}},
    ],
    ids=lambda way: next(iter(way)),
)
def test_setting_of_states_changes_only_their_namespace(tmp_path: Path, way: Way) -> None:
    assert of_state(tmp_path, way) != of_state(tmp_path, {})
    if "config" not in way:
        assert connector(tmp_path, {**VOUCHED, **way}).salt == USUAL


@pytest.mark.parametrize("adapter", ["vLLM connector", "vLLM tier"])
def test_tokens_after_a_block_in_its_hash_change_the_namespace(
    adapter: str, tmp_path: Path
) -> None:
    namespace = ADAPTERS[adapter].namespace
    usual = namespace(tmp_path, VOUCHED)
    assert namespace(tmp_path, {**VOUCHED, "num_hash_lookahead_tokens": 0}).digest == usual.digest
    assert namespace(tmp_path, {**VOUCHED, "num_hash_lookahead_tokens": 1}).digest != usual.digest
