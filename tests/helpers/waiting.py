"""Waiting for what happens beside a test."""

import threading
import time
from collections.abc import Callable

OthersRun = Callable[[Callable[[], object]], bool]  # whether another thread ran while a call did


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        threading.Event().wait(0.01)
