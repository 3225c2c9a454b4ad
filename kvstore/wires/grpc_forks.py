"""gRPC and forks: while this process forks no call of ours is inside gRPC.

gRPC prepares for a fork only if no thread is inside it. Otherwise it can not be used in the child, and a child has
broken its parent's connections. So a fork waits for calls that are under way, and calls wait for the fork.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.errors import InvalidRequest
from kvstore.sync import in_main_thread

Result = TypeVar("Result")

FORK_S_MAX = 0.5  # that a fork waits for calls: those of a node that hangs go on, and the child can not use gRPC
LOOK_S = 0.0005


class _Gate:
    """Let calls into gRPC while this process does not fork. Calls come in helper threads, which no handler interrupts.

    `unusable`: this is a child of a fork that began while a call was inside, so gRPC can not be used here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.forking: list[None] = []  # one for each thread that forks
        self.unusable = False

    def run(self, work: Callable[[], Result]) -> Result:
        assert not in_main_thread(), "another thread does it: kvstore.sync.run_in_helper_thread"
        if self.unusable:
            raise InvalidRequest(
                "this process was forked while a thread of its parent was in a gRPC call, so it can not use gRPC; fork "
                "before the first call, or start processes with subprocess or multiprocessing's 'spawn'"
            )
        while not self._enter():
            time.sleep(LOOK_S)
        try:
            return work()
        finally:
            with self._lock:
                self._inside -= 1

    def _enter(self) -> bool:
        with self._lock:
            if self.forking:
                return False
            self._inside += 1
            return True

    def wait_for_calls(self) -> None:
        """Wait until no call is inside, at most FORK_S_MAX."""
        end = time.monotonic() + FORK_S_MAX
        while self._inside and time.monotonic() < end:
            time.sleep(LOOK_S)

    def after_in_child(self) -> None:
        self.unusable = self.unusable or self._inside > 0
        self._inside = 0
        self._lock = threading.Lock()


gate = _Gate()
# A signal handler may raise in what is written in Python, and what is left of that does not happen. A gate that stays
# closed would hang every later call, so C closes and opens it. The `before` that is registered last is called first.
os.register_at_fork(before=gate.wait_for_calls, after_in_child=gate.after_in_child)
os.register_at_fork(
    before=partial(gate.forking.append, None), after_in_parent=gate.forking.pop, after_in_child=gate.forking.clear
)
