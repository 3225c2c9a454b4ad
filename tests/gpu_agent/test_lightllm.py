"""The module `light_mem` without LightLLM: its namespace, and that no call raises."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_agent.engines.lightllm import PyLocalCacheService, PyState, light_mem_path
from gpu_agent.identity.lightllm import namespace_of
from gpu_agent.options import Identity
from kvstore import Namespace, tracing
from kvstore.config import load
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tools.node_process import NodeProcess

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}
HYBRID = {
    "model_type": "qwen3_5",
    "text_config": {"linear_num_key_heads": 4, "full_attention_interval": 4},
}
ARGUMENTS = {
    "data_type": "bfloat16",
    "quant_type": "none",
    "llm_kv_type": "None",
    "llm_kv_quant_group_size": 8,
    "kv_quant_calibration_config_path": None,
    "mtp_mode": None,
    "mtp_step": 0,
    "mtp_draft_model_dir": None,
    "cpu_cache_token_page_size": 64,
    "linear_att_hash_page_size": 512,
    "linear_att_page_block_num": 8,
    "linear_att_ssm_data_type": "float32",
    "disable_linear_att_small_page_cpu_cache": False,
    "weight_version": "default",
    "enable_multimodal": False,
    "run_mode": "normal",
    "tp": 2,
    "dp": 1,
    "nnodes": 1,
    "node_rank": 0,
    "port": 8000,
}
MEMORY = torch.zeros((4, 4096), dtype=torch.uint8)
Arguments = Callable[..., dict[str, Any]]


def checkpoint(folder: Path, config: dict[str, Any] = CONFIG, weights: bytes = b"weights") -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """Return a function that gives LightLLM's start arguments, with changes."""
    model_dir = checkpoint(tmp_path / "model")
    return lambda **changed: {**ARGUMENTS, "model_dir": model_dir, **changed}


# ---- the namespace; the facts that change it are in tests/gpu_agent/identity ------------------


def space_of(arguments: dict[str, Any]) -> Namespace:
    return namespace_of(arguments, {}, load(Identity, "KVSTORE", {}), MEMORY)


@pytest.mark.parametrize(
    "changed", [{"tp": 4}, {"port": 9000}, {"linear_att_hash_page_size": 256}], ids=str
)
def test_options_without_effect_on_bytes_keep_the_namespace(
    arguments: Arguments, changed: dict[str, Any]
) -> None:
    """A page of CPU memory holds the heads of all ranks, so their number does not matter."""
    assert space_of(arguments(**changed)).digest == space_of(arguments()).digest


@pytest.mark.parametrize(
    "changed",
    [{"tp": 4}, {"linear_att_hash_page_size": 256}, {"linear_att_ssm_data_type": "bfloat16"}],
    ids=str,
)
def test_hybrid_namespace_covers_ranks_and_states(
    arguments: Arguments, tmp_path: Path, changed: dict[str, Any]
) -> None:
    hybrid = checkpoint(tmp_path / "hybrid", HYBRID)
    kept = space_of(arguments(model_dir=hybrid))
    assert space_of(arguments(model_dir=hybrid, **changed)).digest != kept.digest
    same = space_of(arguments(model_dir=hybrid, tp=4, dp=2))  # two ranks per replica, as before
    assert same.digest == kept.digest


@pytest.mark.parametrize(
    "field",
    ["linear_num_key_heads", "mamba_d_state", "ssm_state_size", "hybrid_override_pattern"],
)
def test_hybrid_model_without_states_in_its_pages_is_refused(
    arguments: Arguments, tmp_path: Path, field: str
) -> None:
    config = {**CONFIG, "model_type": "qwen3_next", field: 4}
    with pytest.raises(ConfigError, match="qwen3_next has recurrent layers"):
        space_of(arguments(model_dir=checkpoint(tmp_path / "next", config)))


def test_configuration_is_read_even_with_a_revision(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a revision the checkpoint is not read, but its configuration is."""
    monkeypatch.setenv("KVSTORE_REVISION", "r1")
    first = space_of(arguments())
    rope = space_of(
        arguments(model_dir=checkpoint(tmp_path / "b" / "model", {**CONFIG, "rope": 2}))
    )
    written_by = {**CONFIG, "transformers_version": "5"}
    same = space_of(arguments(model_dir=checkpoint(tmp_path / "c" / "model", written_by)))
    assert first.revision == "r1"
    assert first.digest not in {rope.digest}
    assert same.digest == first.digest


@pytest.mark.parametrize("argument", ["kv_quant_calibration_config_path", "quant_cfg"])
def test_quantization_file_is_identified_by_its_content(
    arguments: Arguments, tmp_path: Path, argument: str
) -> None:
    """The file has the scales of fp8 pages, so equal bytes may mean other values."""
    for name, text in [("one", "scales 1"), ("two", "scales 2"), ("copy", "scales 1")]:
        (tmp_path / name).write_text(text)
    one, two, copy, none = (
        space_of(arguments(**{argument: path and str(tmp_path / path)})).digest
        for path in ("one", "two", "copy", None)
    )
    assert len({one, two, none}) == 3
    assert copy == one
    with pytest.raises(ConfigError, match="absent"):
        space_of(arguments(**{argument: str(tmp_path / "absent")}))


@pytest.mark.parametrize(
    "variable", ["KVSTORE_TENANT", "KVSTORE_SALT", "KVSTORE_MODEL", "KVSTORE_REVISION"]
)
def test_namespace_covers_identity_options(
    arguments: Arguments, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = space_of(arguments())
    monkeypatch.setenv(variable, "other")
    assert space_of(arguments()).digest != before.digest


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"enable_rl": True}, "enable_rl.*--enable_disk_cache"),
        ({"enable_multimodal": True}, "--disable_vision and --disable_audio"),
        ({"run_mode": "decode"}, "--enable_disk_cache"),
    ],
)
def test_server_with_indistinguishable_pages_does_not_start(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], remedy: str
) -> None:
    """A server may change its weights while it runs, or serve images.

    Servers number different images alike, and page hashes do not cover their content.
    """
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments(**changed)))
    with pytest.raises(ConfigError, match=remedy):
        PyLocalCacheService(MEMORY)


def test_namespace_covers_the_ntk_alpha_variable(
    arguments: Arguments, shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightLLM reads LIGHTLLM_NTK_ALPHA for its rotary embeddings; its arguments lack it."""
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments()))
    monkeypatch.setenv("KVSTORE_ADDRESS", shared_node.address)
    found = set()
    for alpha in ("", "2"):
        monkeypatch.setenv("LIGHTLLM_NTK_ALPHA", alpha)
        service = PyLocalCacheService(MEMORY)
        found.add(service.namespace.digest)
        service.close()
    assert len(found) == 2


# ---- the service ----------------------------------------------------------------------------


@pytest.fixture
def service(
    arguments: Arguments,
    shared_node: NodeProcess,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[PyLocalCacheService]:
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments()))
    monkeypatch.setenv("KVSTORE_ADDRESS", shared_node.address)
    monkeypatch.setenv("KVSTORE_AGENT_LOOKUP_TIMEOUT_S", "10")  # the machine may be busy
    monkeypatch.setenv("KVSTORE_AGENT_LOAD_TIMEOUT_S", "10")
    monkeypatch.setenv("KVSTORE_SALT", request.node.name)  # other tests use the same hashes
    made = PyLocalCacheService(
        kvcache_tensor=torch.randint(0, 256, (8, 4096), dtype=torch.uint8),
        file="/nowhere/cache_file",
        storage_size=1 << 30,
        num_shard=8,
        num_worker=24,
        index_endpoint="redis:6379",
        index_prefix="lightllm",
        bandwidth_log=True,
    )
    yield made
    made.close()
    assert made.pages.check() == []


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def wait_ready(task: Any) -> None:
    """Wait as LightLLM does; until the task is ready all its pages are WORKING."""
    deadline = time.monotonic() + 60
    while not task.ready():
        states = set(task.state())
        assert states == {PyState.Working} or task.ready()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("value", [None, "", "no JSON", "[1]", "{}"])
def test_start_without_start_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("LIGHTLLM_START_ARGS", raising=False)
    if value is not None:
        monkeypatch.setenv("LIGHTLLM_START_ARGS", value)
    with pytest.raises(ConfigError, match=r"LIGHTLLM_START_ARGS|model_dir"):
        PyLocalCacheService(MEMORY)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(2, 8),
        torch.zeros(2, 2, 4, dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.uint8)[:, :4],
    ],
)
def test_unsupported_pool_memory_is_refused(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, memory: torch.Tensor
) -> None:
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments()))
    with pytest.raises(InvalidRequest, match="host memory"):
        PyLocalCacheService(memory)


def test_each_call_has_its_own_id(
    service: PyLocalCacheService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = []

    def broken(*_: Any) -> None:
        trace = tracing.current()
        ids.append(trace.request_id if trace else "")
        raise RuntimeError("broken")

    monkeypatch.setattr(service.pages, "present", broken)
    monkeypatch.setattr(service.pages, "save", broken)
    assert service.query([1]) == [False]
    assert service.create(hash_128s=[1], kv_page_indexer=rows(0), mode="w").ready()
    assert all(len(bytes.fromhex(one)) == tracing.TRACE_NBYTES for one in ids)
    assert len(set(ids)) == 2
    lines = ("a query failed", "a task of mode 'w' failed at its start")
    assert caplog.messages == [
        f"{line} [request {one}]" for line, one in zip(lines, ids, strict=True)
    ]
    assert tracing.current() is None


def test_states_of_tasks(service: PyLocalCacheService) -> None:
    hashes = [1 << 127, 2, (1 << 128) - 1]
    write = service.create(hash_128s=hashes, kv_page_indexer=rows(0, 1, 2), mode="w", start_pos=0)
    wait_ready(write)
    assert write.data_safe()
    assert write.state() == [PyState.Finished] * 3
    assert write.page_already_list == []
    assert service.query([*hashes, 7]) == [True, True, True, False]
    again = service.create(hash_128s=[*hashes, 7], kv_page_indexer=rows(0, 1, 2, 3), mode="w")
    assert again.page_already_list == [0, 1, 2]
    read = service.create(
        hash_128s=[*hashes, 9], kv_page_indexer=rows(0, 5, 6, 7), mode="r", start_pos=1
    )
    wait_ready(read)
    assert read.state() == [PyState.Finished, PyState.Finished, PyState.Aborted]
    assert [state.value for state in PyState] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("hashes", "indexer", "mode"),
    [
        ([1, 2], rows(0), "w"),
        ([1, 2], rows(0, 1).long(), "w"),
        ([1, 2], rows(0, -1), "w"),
        ([1, 2], rows(0, 8), "w"),
        ([1, -2], rows(0, 1), "w"),
        ([1, 1 << 128], rows(0, 1), "w"),
        ([5, 5], rows(0, 1), "w"),
        ([1, "x"], rows(0, 1), "w"),
        ([1, 2], None, "w"),
        ([1, 2], rows(0, 0), "r"),
        ([1, 2], rows(0, -1), "r"),
        ([1, 2], rows(0), "r"),
        ([1, 2], rows(0, 1), "x"),
    ],
)
def test_invalid_call_returns_a_failed_task(
    service: PyLocalCacheService,
    hashes: list[Any],
    indexer: Any,
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exception would end LightLLM's writer thread, or lose a request."""
    task = service.create(hash_128s=hashes, kv_page_indexer=indexer, mode=mode)
    assert task.ready()
    assert task.data_safe()
    assert set(task.state()) == {PyState.Aborted}
    assert list(task.page_already_list) == []
    assert "failed at its start" in caplog.text
    service.abort(task)


@pytest.mark.parametrize("hashes", [[-1], [1 << 128], ["x"], [3, 3], [None]])
def test_invalid_query_finds_nothing(
    service: PyLocalCacheService, hashes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert service.query(hashes) == [False] * len(hashes)
    assert "a query failed" in caplog.text


def test_internal_error_is_a_miss(
    service: PyLocalCacheService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    for name in ("present", "save", "load"):
        monkeypatch.setattr(service.pages, name, broken)
    assert service.query([1, 2, 3]) == [False] * 3
    for mode in ("r", "w"):
        task = service.create(hash_128s=[1, 2, 3], kv_page_indexer=rows(0, 1, 2), mode=mode)
        assert task.ready()
        assert set(task.state()) == {PyState.Aborted}
    assert caplog.text.count("RuntimeError: a bug") == 3


def test_active_threads_counts_until_a_task_is_done(service: PyLocalCacheService) -> None:
    assert (service.active_threads("r"), service.active_threads("w")) == (0, 0)
    task = service.create(hash_128s=[11, 12], kv_page_indexer=rows(0, 1), mode="w")
    wait_ready(task)
    assert (service.active_threads("r"), service.active_threads("w")) == (0, 0)


def test_command_prints_the_folder_of_light_mem() -> None:
    """The command is run as by `python -m`, but without torch, which takes seconds to import."""
    code = """
import contextlib, io, runpy, sys
from unittest.mock import MagicMock
sys.modules["torch"] = MagicMock()
with contextlib.redirect_stdout(io.StringIO()) as output:
    runpy.run_module("gpu_agent.engines.lightllm", run_name="__main__", alter_sys=True)
folder = output.getvalue().strip()
assert "light_mem" not in sys.modules
sys.path.insert(0, folder)
import light_mem
print(folder, light_mem.__file__, light_mem.PyLocalCacheService._n, "lightllm" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == [light_mem_path(), f"{light_mem_path()}/light_mem/__init__.py", "1", "False"]
