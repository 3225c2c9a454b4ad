"""What is said of a GPU, with none: CUDA itself is tried by `kvstore doctor --gpu` where there is
one.
"""

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


def test_without_cupy_pages_are_moved_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CudaDevice", None)
    monkeypatch.setattr(probe, "_missing", "No module named 'cupy'", raising=False)
    monkeypatch.setattr(probe.torch.version, "cuda", "13.0")
    cupy, locking = probe._kernels()
    assert (cupy.state, cupy.remedy) == (FindingState.WARN, "install cupy-cuda13x")
    assert locking.state is FindingState.SKIPPED


def test_kernels_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any) -> None:
        raise RuntimeError("no nvrtc")

    monkeypatch.setattr(probe, "CudaDevice", broken)
    assert [finding.state for finding in probe._kernels()] == [
        FindingState.FAIL,
        FindingState.SKIPPED,
    ]


def test_memory_that_can_not_be_page_locked() -> None:
    locks = Locks()
    assert probe._locking(locks).state is FindingState.OK
    assert locks.registered == []
    found = probe._locking(Locks(refuses=True))
    assert (found.state, "LimitMEMLOCK" in found.remedy) == (FindingState.WARN, True)


CPU = torch.device("cpu")


def other(text: str) -> list[str]:
    """The other process, played by a program of the test."""
    return [sys.executable, "-X", "faulthandler", "-c", text]


SEGV = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def test_another_process_maps_and_reads_memory_of_this_one() -> None:
    """The whole way, with memory of a CPU: two processes, the description, the marks,
    what is read.
    """
    found = probe._ipc(CPU)
    assert (found.state, found.found) == (
        FindingState.OK,
        "another process maps and reads memory of this one",
    )


def test_a_process_that_reads_and_then_breaks_has_mapped_the_memory() -> None:
    found = probe._ipc(CPU, other(f"print({probe.READ!r}, flush=True); {SEGV}"))
    assert found.state is FindingState.OK
    assert "SIGSEGV, after it had read them" in found.found


def test_a_process_that_dies_before_it_has_read_is_a_failure_that_names_the_signal() -> None:
    found = probe._ipc(CPU, other(SEGV))
    assert found.state is FindingState.FAIL
    assert "it was ended by SIGSEGV before it had read it: File" in found.found
    assert "-11" not in found.found


def test_a_process_that_can_not_map_says_why() -> None:
    found = probe._ipc(CPU, other("raise SystemExit('invalid device context')"))
    assert (found.state, found.found.rpartition(": ")[2]) == (
        FindingState.FAIL,
        "invalid device context",
    )
    assert "one container" in found.remedy


def test_a_process_that_ends_well_and_says_nothing_has_not_read() -> None:
    assert probe._ipc(CPU, other("pass")).state is FindingState.FAIL


def test_memory_that_holds_something_else_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "VALUE", 0x5B)  # here, not in the other process
    found = probe._ipc(CPU)
    assert (found.state, "holds something else" in found.found) == (FindingState.FAIL, True)


def test_cuda_is_initialised_before_its_memory_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not do it by itself when a storage comes from another process, and dies of it by
    SIGSEGV.
    """
    done: list[str] = []

    def opened(*_: Any) -> torch.UntypedStorage:
        done.append("opened")
        return torch.UntypedStorage(1)

    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)
    ipc_memory.opened_storages([dict.fromkeys(ipc_memory._CUDA_FIELDS, 0)])
    assert done == ["init", "opened"]


def test_without_cuda_memory_of_a_gpu_is_refused_in_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA, or no GPU")
    with pytest.raises(ConfigError, match="CUDA can not be used here"):
        ipc_memory.opened_storages([dict.fromkeys(ipc_memory._CUDA_FIELDS, 0)])
