"""Page-lock the memory of the node's arena in the background."""

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable

from gpu_agent.kernels.device import Device
from kvstore.errors import ConfigError
from kvstore.sync import Condition, run_in_helper_thread

log = logging.getLogger(__name__)
_NEVER_UNMAPPED: list[memoryview] = []


class ArenaLock:
    """Page-lock an arena in the background. Thread-safe.

    A restarted node has another arena: the old one is unlocked, and so returned to the system, when
    no copy can be running in it: within `idle()` none is.

    Locked memory stays mapped. New mappings at the addresses of locked memory can not be used with
    CUDA ("resource already mapped"), and in the end neither can the process.
    """

    def __init__(
        self, device: Device, idle: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._device = device
        self._idle = idle
        self._lock = Condition()  # notified when the thread ends
        self._wanted: memoryview | None = None
        self._locked: memoryview | None = None
        self._failed: memoryview | None = None  # not tried again
        self._thread: threading.Thread | None = None
        self._kept: dict[int, memoryview] = {}  # by address: locked, or being locked
        weakref.finalize(
            self, _unlock_all, device, self._kept
        ).atexit = False  # the system frees it at exit

    def use(self, memory: memoryview) -> bool:
        """Return whether `memory` is page-locked; if not, begin to lock it."""
        with self._lock:
            self._wanted = memory
            if self._thread is None and memory is not self._locked and memory is not self._failed:
                self._thread = threading.Thread(
                    target=self._run, name="kvstore-page-lock", daemon=True
                )
                try:
                    run_in_helper_thread(self._thread.start)
                # no thread can be started: tried again at the next use
                except RuntimeError as error:
                    self._thread = None
                    log.warning(
                        "no thread to page-lock the node's memory, copies are slow: %s", error
                    )
            return memory is self._locked

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being locked or unlocked; return False after the time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                memory, old = self._wanted, self._locked
                if memory is None or memory is old or memory is self._failed:
                    self._thread = None
                    self._lock.notify_all()
                    return
            if old is not None:
                self._unlock(old)
            failed = not self._register(memory)
            with self._lock:
                self._locked, self._failed = (None, memory) if failed else (memory, None)

    def _register(self, memory: memoryview) -> bool:
        began = time.monotonic()
        self._kept[address_of(memory)] = memory
        try:
            with self._device.active():
                self._device.register(address_of(memory), memory.nbytes)
        except (ConfigError, RuntimeError) as error:
            del self._kept[address_of(memory)]
            log.warning(
                "copies to and from the node's memory stay slow, it can not be page-locked: %s",
                error,
            )
            return False
        log.info(
            "%d bytes of the node's memory are page-locked after %.1f s",
            memory.nbytes,
            time.monotonic() - began,
        )
        return True

    def _unlock(self, memory: memoryview) -> None:
        with self._lock:
            self._locked = None
        try:
            with self._idle(), self._device.active():
                self._device.unregister(address_of(memory))
            del self._kept[address_of(memory)]
        except (ConfigError, RuntimeError) as error:
            log.warning("the memory of the node's previous run can not be released: %s", error)


def _unlock_all(device: Device, kept: dict[int, memoryview]) -> None:
    """Unlock the memory of a dropped lock; memory that can not be unlocked stays mapped."""
    for address, memory in kept.items():
        try:
            with device.active():
                device.unregister(address)
        except (ConfigError, RuntimeError) as error:
            _NEVER_UNMAPPED.append(memory)
            log.warning("the node's memory can not be unlocked: %s", error)


def address_of(memory: memoryview) -> int:
    """Return the address of a memoryview."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
