"""Measure how long a lock is held in bytecodes instead of time."""

import sys
import threading
from types import FrameType
from typing import Any


class CountedLock:
    """A lock that counts the bytecodes that its owner executes while holding it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self.longest = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._count = 0
        frame = sys._getframe(1)
        frame.f_trace = self._step
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys._getframe(1).f_trace = None
        self.longest = max(self.longest, self._count)
        self._lock.release()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._count += event == "opcode"
        return self._step
