"""Undo a change that NVRTC makes to the process's signal handling."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Restore, after a call of NVRTC, that signals with a Python handler interrupt system calls.

    While compiling, NVRTC replaces the process's handlers and restores them with SA_RESTART set:
    system calls then continue after a signal. A main thread that waits in one, as an engine's does
    for requests, never returns to Python to run its handler: the process ignores SIGTERM until
    something else wakes it (NVRTC 13.0; seen in all vLLM engines with our agent).
    """
    try:
        yield
    finally:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.siginterrupt(number, True)
