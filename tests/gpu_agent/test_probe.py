"""The findings about a GPU, on a machine without one; `kvstore doctor --gpu` tests a real one."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from gpu_agent.worker import ipc_memory, probe
from kvstore.doctor.checks import FindingState
from kvstore.errors import ConfigError


class Locks:
    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise ConfigError("can not page-lock 64 bytes: out of memory")
        self.registered.append(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


def test_without_a_gpu_the_rest_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.torch.cuda, "is_available", lambda: False)
    found = {finding.name: finding.state for finding in probe.findings()}
    assert found == {
        "torch": FindingState.OK,
        "GPU": FindingState.FAIL,
        "CuPy": FindingState.SKIPPED,
        "page-locking": FindingState.SKIPPED,
        "CUDA IPC": FindingState.SKIPPED,
    }


def test_missing_cupy_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CudaDevice", None)
    monkeypatch.setattr(probe, "_missing", "No module named 'cupy'", raising=False)
    monkeypatch.setattr(probe.torch.version, "cuda", "13.0")
    cupy, locking = probe._kernels()
    assert (cupy.state, cupy.remedy) == (FindingState.WARN, "install cupy-cuda13x")
    assert locking.state is FindingState.SKIPPED


def test_failed_kernels_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any) -> None:
        raise RuntimeError("no nvrtc")

    monkeypatch.setattr(probe, "CudaDevice", broken)
    assert [finding.state for finding in probe._kernels()] == [
        FindingState.FAIL,
        FindingState.SKIPPED,
    ]


def test_failed_page_lock_is_a_warning() -> None:
    locks = Locks()
    assert probe._locking(locks).state is FindingState.OK
    assert locks.registered == []
    found = probe._locking(Locks(refuses=True))
    assert (found.state, "LimitMEMLOCK" in found.remedy) == (FindingState.WARN, True)


CPU = torch.device("cpu")


def other(text: str) -> list[str]:
    """Return the command of a stand-in for the other process."""
    return [sys.executable, "-X", "faulthandler", "-c", text]


SEGV = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def test_other_process_maps_and_reads_memory() -> None:
    """Run the whole check with CPU memory: two processes, the description, the marks, the read."""
    found = probe._ipc(CPU)
    assert (found.state, found.found) == (
        FindingState.OK,
        "another process maps and reads memory of this one",
    )


def test_process_that_crashes_after_reading_is_ok() -> None:
    found = probe._ipc(CPU, other(f"print({probe.READ!r}, flush=True); {SEGV}"))
    assert found.state is FindingState.OK
    assert "SIGSEGV, after it had read them" in found.found


def test_process_that_crashes_before_reading_fails_with_the_signal() -> None:
    found = probe._ipc(CPU, other(SEGV))
    assert found.state is FindingState.FAIL
    assert "it was ended by SIGSEGV before it had read it: File" in found.found
    assert "-11" not in found.found


def test_process_that_cannot_map_reports_the_reason() -> None:
    found = probe._ipc(CPU, other("raise SystemExit('invalid device context')"))
    assert (found.state, found.found.rpartition(": ")[2]) == (
        FindingState.FAIL,
        "invalid device context",
    )
    assert "one container" in found.remedy


def test_silent_process_is_a_failure() -> None:
    assert probe._ipc(CPU, other("pass")).state is FindingState.FAIL


def test_wrong_memory_content_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Do what the other process does; starting one with torch takes seconds."""
        monkeypatch.setattr(probe, "VALUE", 0x5B)
        with pytest.raises(ConfigError) as caught:
            probe._open(command[-1])
        return subprocess.CompletedProcess(command, 1, "", str(caught.value))

    monkeypatch.setattr(subprocess, "run", opened_here)
    found = probe._ipc(CPU)
    assert (found.state, "holds something else" in found.found) == (FindingState.FAIL, True)


def test_cuda_is_initialized_before_its_memory_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not initialize CUDA for a storage of another process, and dies of SIGSEGV."""
    done: list[str] = []

    def opened(*_: Any) -> torch.UntypedStorage:
        done.append("opened")
        return torch.UntypedStorage(1)

    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)
    ipc_memory.opened_storages([dict.fromkeys(ipc_memory._CUDA_FIELDS, 0)])
    assert done == ["init", "opened"]


def test_gpu_memory_without_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA, or no GPU")
    with pytest.raises(ConfigError, match="CUDA can not be used here"):
        ipc_memory.opened_storages([dict.fromkeys(ipc_memory._CUDA_FIELDS, 0)])
