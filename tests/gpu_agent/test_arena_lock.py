"""The node's memory is page-locked in the background, and unlocked when it is replaced."""

import contextlib
import gc
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from gpu_agent.kernels import arena_lock
from gpu_agent.kernels.arena_lock import ArenaLock, address_of
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer
from kvstore.errors import ConfigError


def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 8192))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("condition not met in time")


def test_use_locks_memory_in_the_background() -> None:
    gate = threading.Event()

    class Slow(SimulatedDevice):
        def register(self, address: int, nbytes: int) -> None:
            assert gate.wait(60.0)
            super().register(address, nbytes)

    device, arena = Slow(1), memory()
    transfer = StagedTransfer(device)
    assert not transfer.host_memory(arena)
    assert not transfer.host_memory(arena)
    assert not transfer.await_host_memory(0.01)
    gate.set()
    assert transfer.await_host_memory(20.0)
    wait_until(lambda: transfer.host_memory(arena))
    assert device.registered == [(address_of(arena), 8192)]


def test_lock_without_a_thread_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each save would wait for a page-lock that no thread makes."""

    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    transfer, arena = StagedTransfer(SimulatedDevice(1)), memory()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        assert not transfer.host_memory(arena)
    assert transfer.await_host_memory(0.0)
    transfer.host_memory(arena)
    assert transfer.await_host_memory(20.0)
    assert transfer.host_memory(arena)


def test_another_arena_replaces_the_first_while_idle() -> None:
    device = SimulatedDevice(2)
    idle: list[list[tuple[int, int]]] = []

    @contextlib.contextmanager
    def note() -> Iterator[None]:
        idle.append(list(device.registered))
        yield
        idle.append(list(device.registered))

    lock, first, second = ArenaLock(device, note), memory(), memory()
    wait_until(lambda: lock.use(first))
    wait_until(lambda: lock.use(second))
    assert idle == [[(address_of(first), 8192)], []], "only the unlock may happen within idle"
    assert device.registered == [(address_of(second), 8192)]
    assert not lock.use(first)
    wait_until(lambda: lock.use(first))


def test_old_arena_is_kept_while_a_job_runs() -> None:
    device = SimulatedDevice(3)
    transfer, first, second = StagedTransfer(device), memory(), memory()
    wait_until(lambda: transfer.host_memory(first))
    waiter = transfer._in._tickets.get()  # as a job does
    transfer.host_memory(second)
    threading.Event().wait(0.1)
    assert device.registered == [(address_of(first), 8192)]
    transfer._in._tickets.put(waiter)
    wait_until(lambda: transfer.host_memory(second))
    assert device.registered == [(address_of(second), 8192)]


def test_failed_lock_is_logged_once_and_memory_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(SimulatedDevice):
        asked = 0

        def register(self, address: int, nbytes: int) -> None:
            self.asked += 1
            raise ConfigError("over the limit of locked memory")

    device, arena = Refusing(4), memory()
    transfer = StagedTransfer(device)
    transfer.host_memory(arena)
    wait_until(lambda: "over the limit" in caplog.text)
    for _ in range(5):
        assert not transfer.host_memory(arena)
        threading.Event().wait(0.01)
    assert device.asked == 1


def test_memory_is_unlocked_before_it_is_unmapped() -> None:
    """Regression: CUDA reported later mappings at that address, such as torch's pinned memory, as
    "already mapped".
    """
    device, arena = SimulatedDevice(1), memory()
    unmapped = weakref.ref(arena.obj)
    transfer = StagedTransfer(device)
    transfer.host_memory(arena)
    assert transfer.await_host_memory(20.0)
    where, still_mapped, unregister = address_of(arena), list[bool](), device.unregister

    def record(address: int) -> None:
        assert address == where
        still_mapped.append(unmapped() is not None)
        unregister(address)

    device.unregister = record  # type: ignore[method-assign]
    del arena, transfer
    gc.collect()
    assert (still_mapped, device.registered, unmapped()) == ([True], [], None)


def lock_down(lock: ArenaLock, arena: memoryview) -> None:
    wait_until(lambda: lock.use(arena))


class Keeping(SimulatedDevice):
    """Fail to unlock memory, which must stay mapped so that no other memory is locked."""

    def unregister(self, address: int) -> None:
        raise RuntimeError("can not be unlocked")


def test_memory_that_fails_to_unlock_stays_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = list[memoryview]()
    monkeypatch.setattr(arena_lock, "_NEVER_UNMAPPED", never)
    arena = memory()
    mapped, lock = weakref.ref(arena.obj), ArenaLock(Keeping(1), contextlib.nullcontext)
    lock_down(lock, arena)
    del arena, lock
    gc.collect()
    assert mapped() is not None
    assert len(never) == 1


def test_replaced_memory_that_fails_to_unlock_stays_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A log record would hold a reference to the memory as well.
    monkeypatch.setattr(arena_lock.log, "warning", lambda *_: None)
    first, second, lock = memory(), memory(), ArenaLock(Keeping(1), contextlib.nullcontext)
    mapped = weakref.ref(first.obj)
    lock_down(lock, first)
    lock_down(lock, second)
    del first
    gc.collect()
    assert mapped() is not None
