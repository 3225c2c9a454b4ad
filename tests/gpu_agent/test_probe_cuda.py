"""The findings of `kvstore doctor --gpu` here, compared with those of the agents' process."""

import time

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.worker import probe
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore import ClientConfig, Namespace
from kvstore.doctor.checks import FindingState, probed

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LONG_S = 180.0
GPU = torch.device("cuda", 0)


def test_doctor_agrees_with_the_agents_process() -> None:
    """Both map memory in the same way."""
    views = {"layers.0": torch.zeros((8, 2, 16, 8), dtype=torch.uint8, device=GPU)}
    pool = table_pool(views, 8, 16)
    home = ProcessBackend(
        [ShardPool(Namespace("probe", pool.layout), pool)],
        ClientConfig(address="127.0.0.1:9"),
        AgentConfig(),
    )
    try:
        home.agents(None)
        end = time.monotonic() + LONG_S
        while not home.loads:
            assert time.monotonic() < end
            home.poll()
            time.sleep(0.05)
    finally:
        home.close()
    found = probe._ipc(GPU)
    assert (found.state, found.found) == (
        FindingState.OK,
        "another process maps and reads memory of this one",
    )


def test_doctor_finds_no_failure() -> None:
    found = list(probed("GPU", "gpu_agent.worker.probe", [], LONG_S, "another Python"))
    assert [finding.name for finding in found] == [
        "torch",
        "GPU",
        "CuPy",
        "page-locking",
        "CUDA IPC",
    ]
    bad = [finding for finding in found if finding.state is FindingState.FAIL]
    assert bad == []


def test_wrong_gpu_memory_content_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "VALUE", 0x5B)  # here, not in the other process
    found = probe._ipc(GPU)
    assert (found.state, "holds something else" in found.found) == (FindingState.FAIL, True)
