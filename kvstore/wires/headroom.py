"""Whether this process has left what gRPC takes when it begins. Without it gRPC does not fail: it waits for
twelve seconds, whatever the deadline, and ends the process."""

import contextlib
import os
import threading

from kvstore.errors import Unavailable
from kvstore.sync import NoThread, run_in_helper_thread

DESCRIPTORS = 16  # it aborted with up to 5
THREADS = 8  # and with up to 4


def check_headroom() -> None:
    """Takes as many for a moment. Raises Unavailable."""
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
            raise Unavailable(f"this process has fewer than {DESCRIPTORS} descriptors left (ulimit -n)") from error
    enough, started = threading.Event(), []
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=enough.wait, name="kvstore-headroom", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise Unavailable(f"this process can start fewer than {THREADS} threads more (ulimit -u)") from error
    finally:
        enough.set()
        for thread in started:
            thread.join()
