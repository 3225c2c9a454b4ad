"""Hybrid models, whose pages hold recurrent states, by LightLLM's own rules.

LightLLM hashes a hybrid's prompt at small pages. Its CPU pages are big ones, of several small
pages, and one for the prompt's last small pages. Each CPU page holds the KV of its tokens and the
state after its last token.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_agent.identity.lightllm as ours
from kvstore.tools.model_config import cache_size
from kvstore.tools.node_process import NodeProcess

SMALL = 64
BLOCKS = 2
BIG = BLOCKS * SMALL
ARGUMENTS = {
    "linear_att_hash_page_size": SMALL,
    "linear_att_page_block_num": BLOCKS,
    "cpu_cache_token_page_size": BIG,
}
MODEL = {
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
}


@pytest.fixture
def node(start_node: Callable[..., NodeProcess]) -> NodeProcess:
    return start_node()


def cpu_pages(small_pages: int) -> tuple[list[int], list[int]]:
    """Return the hashes and the lengths in tokens of a prompt's CPU pages, as LightLLM does."""
    from lightllm.server.core.objs.req import Req
    from lightllm.utils.kv_cache_utils import compute_token_list_hash

    hashes = compute_token_list_hash(list(range(1, small_pages * SMALL + 2)), SMALL)
    request = SimpleNamespace(linear_att_token_hash_list=SimpleNamespace(get_all=lambda: hashes))
    found: tuple[list[int], list[int]] = Req._calcu_linear_att_cpu_cache_page_len_list(request)
    return found


def test_hit_ends_where_a_state_was_stored(node: NodeProcess, make_server: Any) -> None:
    """A prompt of 5 small pages leaves states after 2, 4 and 5 of them, and nowhere else."""
    first = make_server(node.address, "hybrid", **ARGUMENTS)
    hashes, lengths = cpu_pages(5)
    assert lengths == [BIG, 2 * BIG, 2 * BIG + SMALL]
    written = first.compute(hashes)
    first.persist()
    second = make_server(node.address, "hybrid", **ARGUMENTS)
    second.memory[:] = 0xA5
    for small_pages, hits in [(7, 2), (6, 2), (5, 3), (4, 2), (3, 1), (1, 0)]:
        given = second.match(cpu_pages(small_pages)[0])
        assert len(given) == hits, f"{small_pages} small pages"
        assert torch.equal(second.memory[given], first.memory[written[:hits]])
        second.release(given)


def test_lightllm_stores_states_of_the_models_that_are_served(tmp_path: Path) -> None:
    from lightllm.utils.config_utils import is_linear_att_mixed_model

    for model_type in (*ours._HYBRID_MODELS, "qwen3_next"):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert is_linear_att_mixed_model(str(folder)) == (model_type in ours._HYBRID_MODELS)


def test_page_has_the_bytes_that_a_plan_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightllm.common.linear_att_cache_manager.config_objs import LinearAttCacheConfig
    from lightllm.utils import envs_utils

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": MODEL}))
    arguments = {
        "model_dir": str(tmp_path),
        "data_type": "bfloat16",
        "linear_att_ssm_data_type": "float32",
        "mtp_mode": None,
        "tp": 2,
        "dp": 1,
        **ARGUMENTS,
    }
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments))
    envs_utils.get_env_start_args.cache_clear()
    size = cache_size(path)
    nbytes = BIG * size.token_nbytes + size.state_nbytes
    assert LinearAttCacheConfig.load_from_args().get_cpu_cache_big_page_bytes() == nbytes
    envs_utils.get_env_start_args.cache_clear()
