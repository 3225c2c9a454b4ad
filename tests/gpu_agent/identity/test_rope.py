"""Rotary embeddings that depend on the length of a prompt must be refused.

A page of a short prompt is not the beginning of a long one's, though both have the same key.
"""

from pathlib import Path
from typing import Any

import on_vllm
import pytest
import torch
from claims import DYNAMIC, LONGROPE, YARN
from lazily import IS_PAGED, UNPAGED, adapters, batching_config, paged_adapters, transformers
from on_transformers import rope, tiny
from waiting import PATIENT

from gpu_agent.identity.checkpoint import length_dependent
from kvstore import Client, ClientConfig, InvalidRequest
from kvstore.tools.node_process import NodeProcess

TOKENS = torch.tensor([[(7 * i) % 120 + 5 for i in range(96)]])  # the models' original length is 32
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def keys(model: Any, count: int) -> torch.Tensor:
    """Return K of the first 16 tokens in the last layer, for a prompt of `count` tokens."""
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        model(TOKENS[:, :count], **{adapters.cache_argument(model): cache}, use_cache=True)
    found: torch.Tensor = cache.layers[-1].keys[0, :, :16]
    return found


@pytest.fixture
def client(shared_node: NodeProcess) -> Any:
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        yield client


def plain(client: Client, model: Any) -> None:
    adapters.TransformersAdapter(client, model, "tiny", page_tokens=16).close()


def paged(client: Client, model: Any) -> None:
    if not IS_PAGED:
        pytest.skip(UNPAGED)
    batching = batching_config(page_size=16, num_blocks=16, max_batch_tokens=64)
    generation = transformers.GenerationConfig(
        max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.start()
    try:
        paged_adapters.PagedAdapter(client, manager, "tiny").close()
    finally:
        manager.stop(block=True)


@pytest.mark.parametrize("kind", [DYNAMIC, LONGROPE], ids=lambda kind: kind["rope_type"])
def test_length_dependent_embeddings_are_refused(client: Client, kind: Any) -> None:
    model = tiny(**rope(kind))
    assert (keys(model, 24) - keys(model, 96)).abs().max() > 1e-3, "a hit would be correct"
    for make in (plain, paged):
        with pytest.raises(
            InvalidRequest, match=f"rotary embeddings of the kind '{kind['rope_type']}'"
        ):
            make(client, model)


@pytest.mark.parametrize("kind", [YARN, LINEAR, LLAMA3], ids=lambda kind: kind["rope_type"])
def test_length_independent_embeddings_are_served(client: Client, kind: Any) -> None:
    model = tiny(**rope(kind))
    assert torch.allclose(keys(model, 24), keys(model, 96), atol=1e-5)
    plain(client, model)
    paged(client, model)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"rope_scaling": None}, []),
        ({"rope_parameters": {"rope_type": "default"}}, []),
        ({"rope_scaling": {"type": "su"}}, ["su"]),
        ({"rope_scaling": {"rope_type": "longrope", "type": "longrope"}}, ["longrope"]),
        (
            {
                "rope_parameters": {
                    "full": {"rope_type": "yarn"},
                    "sliding": {"rope_type": "dynamic"},
                }
            },
            ["dynamic"],
        ),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, ["dynamic"]),
        ({"use_dynamic_ntk": True}, ["dynamic"]),
        ({"quantization_config": {"type": "dynamic"}}, []),
        ({"rope_type": "dynamic"}, []),
    ],
)
def test_rope_configuration_is_read(config: dict[str, Any], found: list[str]) -> None:
    assert length_dependent(config) == found


def test_vllm_longrope_namespace_depends_on_the_length_limit(tmp_path: Path) -> None:
    """vLLM selects longrope's factors by its length limit, so only equal limits share."""
    for make in (on_vllm.connector, on_vllm.tier):
        ways = [
            {"model_config.max_model_len": length, "config": {"rope_scaling": LONGROPE}}
            for length in (4096, 64)
        ]
        assert make(tmp_path, ways[0]).digest != make(tmp_path, ways[1]).digest
        assert make(tmp_path, ways[0]).digest == make(tmp_path, dict(ways[0])).digest
        static = [{"model_config.max_model_len": length} for length in (4096, 64)]
        assert make(tmp_path, static[0]).digest == make(tmp_path, static[1]).digest
