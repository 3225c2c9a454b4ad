"""Wait for conditions in tests."""

import threading
import time
from collections.abc import Callable
from typing import Any

# A client's settings: on an overloaded host, a healthy node may take several seconds to answer.
PATIENT: dict[str, Any] = {"timeout_s": 60.0, "connect_timeout_s": 20.0}
OthersRun = Callable[[Callable[[], object]], bool]  # tells whether another thread ran during a call


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {timeout_s:g} s"
        threading.Event().wait(0.01)
