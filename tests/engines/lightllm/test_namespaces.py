"""R1, R2, R3: servers with incompatible pages never share them.

LightLLM's hashes of a prompt are the same on all servers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.tools.node_process import NodeProcess

Make = Callable[..., Any]


def gets(server: Any, hashes: list[int]) -> int:
    """Return how many pages a request with this prompt is given."""
    given = server.match(hashes)
    server.release(given)
    assert server.references() == 0
    return len(given)


@pytest.mark.parametrize(
    "changed",
    [
        {"data_type": "float16"},
        {"quant_type": "fp8w8a8"},
        {"llm_kv_type": "fp8kv_sph"},
        {"llm_kv_quant_group_size": 16},
        {"mtp_mode": "eagle_with_att"},
        {"weight_version": "2"},
    ],
    ids=str,
)
def test_r01_servers_with_different_formats_never_share(
    node: NodeProcess, make_server: Make, changed: dict[str, Any]
) -> None:
    first = make_server(node.address)
    hashes = first.hashes(1, 4)
    first.compute(hashes)
    first.persist()
    assert gets(make_server(node.address, **changed), hashes) == 0
    assert gets(make_server(node.address), hashes) == 4


def test_r01_kinds_of_pages_never_share(node: NodeProcess, make_server: Make) -> None:
    kinds = ("bf16", "int8", "mla", "hybrid")
    hashes = []
    for kind in kinds:
        server = make_server(node.address, kind)
        hashes = server.hashes(1, 2)
        assert gets(server, hashes) == 0
        server.compute(hashes)
        server.persist()
    assert [gets(make_server(node.address, kind), hashes) for kind in kinds] == [2] * 4


def test_tensor_parallel_sizes_share_except_hybrid_models(
    node: NodeProcess, make_server: Make
) -> None:
    for kind, shared in (("bf16", 3), ("hybrid", 0)):
        server = make_server(node.address, kind, tp=2)
        hashes = server.hashes(2, 3)
        server.compute(hashes)
        server.persist()
        assert gets(make_server(node.address, kind, tp=4), hashes) == shared


def test_r01_static_fp8_scales_are_compared_by_content(
    node: NodeProcess, make_server: Make, tmp_path: Path
) -> None:
    def server(name: str, scale: float) -> Any:
        path = tmp_path / name
        path.write_text(json.dumps({"quant_type": "per_head", "scales": [scale] * 24}))
        return make_server(
            node.address, llm_kv_type="fp8kv_sph", kv_quant_calibration_config_path=str(path)
        )

    first = server("one.json", 0.5)
    hashes = first.hashes(3, 3)
    first.compute(hashes)
    first.persist()
    assert gets(server("other.json", 0.25), hashes) == 0
    assert gets(server("copy.json", 0.5), hashes) == 3


def test_r02_new_weights_and_a_raised_epoch_miss_old_pages(
    node: NodeProcess, make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_server(node.address)
    hashes = first.hashes(4, 3)
    first.compute(hashes)
    first.persist()
    monkeypatch.setenv("KVSTORE_EPOCH", "1")
    assert gets(make_server(node.address), hashes) == 0
    monkeypatch.delenv("KVSTORE_EPOCH")
    retrained = tmp_path / "retrained" / "model-bf16"
    retrained.mkdir(parents=True)
    (retrained / "config.json").write_bytes((tmp_path / "model-bf16" / "config.json").read_bytes())
    (retrained / "model.safetensors").write_bytes(b"others!")
    assert gets(make_server(node.address, model_dir=str(retrained)), hashes) == 0
    assert gets(make_server(node.address), hashes) == 3


@pytest.mark.parametrize("variable", ["KVSTORE_TENANT", "KVSTORE_SALT"])
def test_r03_tenants_and_salts_never_share(
    node: NodeProcess, make_server: Make, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "a")
    first = make_server(node.address)
    hashes = first.hashes(5, 3)
    first.compute(hashes)
    first.persist()
    monkeypatch.setenv(variable, "b")
    second = make_server(node.address)
    assert gets(second, hashes) == 0
    second.compute(hashes)
    second.persist()
    assert not torch.equal(first.memory[0], second.memory[0])
    monkeypatch.setenv(variable, "a")
    third = make_server(node.address)
    given = third.match(hashes)
    assert torch.equal(third.memory[given], first.memory[: len(given)])
    third.release(given)
