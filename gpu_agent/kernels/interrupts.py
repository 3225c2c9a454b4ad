"""Undo what NVRTC does to the process's signals."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Restore, after a call of NVRTC, that signals with a Python handler interrupt system calls.

    Compiling, NVRTC puts the process's handlers aside and back again, but marked so that system
    calls go on after a signal (SA_RESTART). A main thread that waits in one, as an engine's does
    for requests, then never sees that Python has a handler to run: the process ignores SIGTERM
    until something else wakes it (NVRTC 13.0; found with vLLM, all of whose engines with an agent
    of ours ignored SIGTERM).
    """
    try:
        yield
    finally:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.siginterrupt(number, True)
