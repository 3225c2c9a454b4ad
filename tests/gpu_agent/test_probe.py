"""What is said of a GPU, with none: CUDA itself is tried by `kvstore doctor --gpu` where there is one."""

from typing import Any

import pytest

from gpu_agent.process import probe
from kvstore.doctor.finding import State
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
        "torch": State.OK,
        "GPU": State.FAIL,
        "CuPy": State.SKIPPED,
        "page-locking": State.SKIPPED,
        "CUDA IPC": State.SKIPPED,
    }


def test_without_cupy_pages_are_moved_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CudaDevice", None)
    monkeypatch.setattr(probe, "_missing", "No module named 'cupy'", raising=False)
    monkeypatch.setattr(probe.torch.version, "cuda", "13.0")
    cupy, locking = probe._kernels()
    assert (cupy.state, cupy.remedy) == (State.WARN, "install cupy-cuda13x")
    assert locking.state is State.SKIPPED


def test_kernels_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any) -> None:
        raise RuntimeError("no nvrtc")

    monkeypatch.setattr(probe, "CudaDevice", broken)
    assert [finding.state for finding in probe._kernels()] == [State.FAIL, State.SKIPPED]


def test_memory_that_can_not_be_page_locked() -> None:
    locks = Locks()
    assert probe._locking(locks).state is State.OK
    assert locks.registered == []
    found = probe._locking(Locks(refuses=True))
    assert (found.state, "LimitMEMLOCK" in found.remedy) == (State.WARN, True)


def test_memory_that_another_process_has_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other process does it, with memory of a CPU."""
    storage = probe.torch.full((4096,), probe.VALUE, dtype=probe.torch.uint8).untyped_storage()
    monkeypatch.setattr(probe, "opened_storages", lambda described: [storage])
    probe._open("{}")
    storage.fill_(0)
    with pytest.raises(ConfigError, match="something else"):
        probe._open("{}")
