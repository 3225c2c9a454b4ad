"""gRPC and forks: while this process forks no call of ours is inside gRPC.

gRPC prepares for a fork only if no thread is inside it. Otherwise it can not be used in the child, and a child has
broken its parent's connections. So a fork waits for calls that are under way, and calls wait for the fork.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import InvalidRequest
from kvstore.sync import Event, in_main_thread

Result = TypeVar("Result")

FORK_S_MAX = 0.5  # that a fork waits for calls: those of a node that hangs go on, and the child can not use gRPC


class _Gate:
    """Calls enter it, in threads in which no signal handler raises. `lost`: this is a child of a fork that began while
    a call was inside, so gRPC can not be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._forking: set[int] = set()  # threads
        self._open = Event()
        self._open.set()
        self.lost = False

    def run(self, work: Callable[[], Result]) -> Result:
        assert not in_main_thread(), "another thread does it: kvstore.sync.aside"
        if self.lost:
            raise InvalidRequest(
                "this process was forked while a thread of its parent was in a gRPC call, so it can not use gRPC; fork "
                "before the first call, or start processes with subprocess or multiprocessing's 'spawn'"
            )
        while not self._enter():
            self._open.wait(1.0)
        try:
            return work()
        finally:
            with self._lock:
                self._inside -= 1

    def _enter(self) -> bool:
        with self._lock:
            if self._forking:
                return False
            self._inside += 1
            return True

    def before_fork(self) -> None:
        self._open.clear()
        self._forking.add(threading.get_ident())
        end = time.monotonic() + FORK_S_MAX
        while self._inside and time.monotonic() < end:
            time.sleep(0.0005)

    def after_in_parent(self) -> None:
        self._forking.discard(threading.get_ident())
        self._open.set()

    def after_in_child(self) -> None:
        lost = self.lost or self._inside > 0
        self.__init__()  # type: ignore[misc]
        self.lost = lost


gate = _Gate()
os.register_at_fork(before=gate.before_fork, after_in_parent=gate.after_in_parent, after_in_child=gate.after_in_child)
