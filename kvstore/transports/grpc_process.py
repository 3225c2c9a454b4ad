"""Keep calls out of gRPC while this process forks, and check that it has what gRPC needs.

gRPC prepares for a fork only if no thread is inside it. Otherwise it can not be used in the child,
and the child may break its parent's connections. So a fork waits for running calls, and calls wait
for the fork.

At its start gRPC takes descriptors and threads. If this process has none left, gRPC does not fail:
it waits for twelve seconds, whatever the deadline, and aborts the process.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.sync import NoThread, in_main_thread, run_in_helper_thread

DESCRIPTORS = 16  # gRPC aborted with up to 5
THREADS = 8  # and with up to 4


def check_headroom() -> None:
    """Take as many descriptors and threads as gRPC for a moment.

    Raises Unavailable.
    """
    try:
        run_in_helper_thread(_check)
    except NoThread as error:
        raise Unavailable("this process can start no thread more (ulimit -u)") from error


def _check() -> None:
    with contextlib.ExitStack() as taken:
        try:
            for _ in range(DESCRIPTORS):
                taken.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            raise Unavailable(
                f"this process has fewer than {DESCRIPTORS} descriptors left (ulimit -n)"
            ) from error
    enough, started = threading.Event(), []
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=enough.wait, name="kvstore-headroom", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise Unavailable(
            f"this process can start fewer than {THREADS} threads more (ulimit -u)"
        ) from error
    finally:
        enough.set()
        for thread in started:
            thread.join()


Outcome = TypeVar("Outcome")

# A fork waits this long for calls. Calls of a hanging node go on, and the child can not use gRPC
FORK_S_MAX = 0.5
LOOK_S = 0.0005


class _Gate:
    """Let calls into gRPC while this process does not fork.

    Calls come from helper threads, which no signal handler interrupts.

    `unusable`: this is a child of a fork that began while a call was inside, so gRPC can not be
    used here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.forking: list[None] = []  # one entry for each thread that forks
        self.unusable = False

    def run(self, work: Callable[[], Outcome]) -> Outcome:
        assert not in_main_thread(), "call it on a helper thread: kvstore.sync.run_in_helper_thread"
        if self.unusable:
            raise InvalidRequest(
                "this process was forked while a thread of its parent was in a gRPC call, so it "
                "can not use gRPC; fork before the first call, or start processes with subprocess "
                "or multiprocessing's 'spawn'"
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
# A signal handler may raise in Python code and skip the rest of it. A gate that stays closed would
# hang every later call, so C code closes and opens it. The `before` registered last is called
# first.
os.register_at_fork(before=gate.wait_for_calls, after_in_child=gate.after_in_child)
os.register_at_fork(
    before=partial(gate.forking.append, None),
    after_in_parent=gate.forking.pop,
    after_in_child=gate.forking.clear,
)
