"""What the namespace of encoder outputs covers (docs/decisions/0051), each fact alone."""

from pathlib import Path
from typing import Any

import pytest
from claims import Way
from on_vllm import config, images

from gpu_agent.identity.vllm import encoder_namespace
from gpu_agent.objects.tensors import chunk_layout
from gpu_agent.options import identity_of

ENVIRONMENT = {"vllm": "0.33", "transformers": "5.23.0", "device": "cuda"}


def digest(tmp_path: Path, way: Way) -> str:
    made = config(tmp_path, {"model_config.multimodal_config": images(), **way})
    identity = identity_of(way.get("options", {"revision": "r1"}))
    environment = {**ENVIRONMENT, **way.get("environment", {})}
    return encoder_namespace(made, identity, chunk_layout(), environment).digest.hex()


@pytest.mark.parametrize(
    "way",
    [
        {"options": {"revision": "r2"}},
        {"options": {}, "weights": b"retrained"},
        {"config": {"num_hidden_layers": 3}},
        {"model_config.dtype": "torch.float16"},
        {"model_config.quantization": "fp8"},
        {"model_config.quantization_config": {"linear": "int8"}},
        {"load_config.load_format": "dummy"},
        {"load_config.model_loader_extra_config": {"tensorizer_uri": "a"}},
        *({"environment": {name: "another"}} for name in ENVIRONMENT),
        *(
            {"model_config.multimodal_config": images(**{name: "other"})}
            for name in ("mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend")
        ),
    ],
    ids=lambda way: " ".join(map(str, way.items())),
)
def test_fact_alone_changes_the_namespace(tmp_path: Path, way: Way) -> None:
    assert digest(tmp_path, way) != digest(tmp_path, {})


def test_content_of_scales_is_named_and_not_their_path(tmp_path: Path) -> None:
    def scaled(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        settings: Any = images(mm_encoder_fp8_scale_path=str(path))
        return digest(tmp_path, {"model_config.multimodal_config": settings})

    assert scaled("a.json", "1.0") == scaled("b.json", "1.0") != scaled("c.json", "2.0")


def test_number_of_ranks_does_not_change_the_namespace(tmp_path: Path) -> None:
    assert digest(tmp_path, {"parallel_config.tensor_parallel_size": 8}) == digest(tmp_path, {})
