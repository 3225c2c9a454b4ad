"""Say what takes long, so that a log shows it, and where a run hangs."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

TELL_S = 30.0  # a GPU may compile kernels for minutes before the first outcome


@contextlib.contextmanager
def telling(
    what: Callable[[], str], every_s: float = TELL_S, into: TextIO = sys.stderr
) -> Iterator[None]:
    """Say what runs now and then, with the seconds since the beginning, until the block ends."""
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(every_s):
            print(f"{time.monotonic() - began:.0f} s: {what()}", file=into, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
