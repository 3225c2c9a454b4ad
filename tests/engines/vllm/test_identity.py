"""What vLLM's own block hash covers and what it does not, as docs/identity.md states."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's imports
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.renderers.base import BaseRenderer
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

from gpu_agent.identity.vllm import not_shareable

pytestmark = pytest.mark.filterwarnings("default")
BLOCK = 16


def hashes(**more: Any) -> list[bytes]:
    """Return the block hashes of a prompt of four blocks, whose second one may hold an image."""
    algorithm = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(algorithm)
    sampling = SamplingParams(max_tokens=1)
    sampling.update_from_generation_config({}, 2)
    hasher = get_request_block_hasher(BLOCK, algorithm)
    return list(
        Request(
            "r", list(range(4 * BLOCK)), sampling, None, block_hasher=hasher, **more
        ).block_hashes
    )


def image(identifier: str) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            None, "image", identifier, PlaceholderRange(offset=BLOCK, length=BLOCK)
        )
    ]


def content(pixels: torch.Tensor) -> str:
    """Return the identifier that vLLM itself gives to an image."""
    return str(MultiModalHasher.hash_kwargs("blake3", model_id="m", image=pixels))


def test_block_hash_covers_salt() -> None:
    assert hashes() == hashes()
    assert not set(hashes()) & set(hashes(cache_salt="a"))


def test_block_hash_covers_lora_name_and_path() -> None:
    """The hash does not cover a LoRA's weights.

    So the connector ignores requests with a LoRA, and the tier refuses to start.
    """
    found = [
        hashes(lora_request=LoRARequest(name, 1, path))
        for name, path in (("a", "/x"), ("b", "/x"), ("a", "/y"))
    ]
    assert len({digest for chain in [hashes(), *found] for digest in chain}) == 4 * 4
    assert hashes(lora_request=LoRARequest("a", 2, "/x")) == found[0]


def test_block_hash_covers_image_content() -> None:
    one, two = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)
    two[0, 0, 0] = 1
    found = [hashes(mm_features=image(content(pixels))) for pixels in (one, two, one.clone())]
    assert found[0] == found[2]
    assert found[0][0] == found[1][0], "the block before the image must be equal"
    assert not set(found[0][1:]) & set(found[1][1:])


def test_numbered_images_without_both_caches_are_refused() -> None:
    """Without its caches vLLM numbers images, as LightLLM always does.

    Different images then get the same number in different processes.
    """
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))
    cache = SimpleNamespace(enable_prefix_caching=False)
    config = SimpleNamespace(model_config=model, cache_config=cache)
    renderer = SimpleNamespace(
        model_config=model, config=config, _validate_mm_uuids=lambda *_: None
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    named = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    assert named == {"image": ["renderer0-mm-1-image-0"]}
    assert "numbered in the order of their arrival" in not_shareable(config)
    cache.enable_prefix_caching = True
    assert BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1") == {}
    assert not_shareable(config) == ""
