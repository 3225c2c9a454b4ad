"""Run the node of a host's engines, which one of them starts (`kvstore.tools.local_node`).

It serves its user by a Unix socket alone. Variables set what else it has: KVSTORE_NODE_RAM_BYTES,
KVSTORE_NODE_DATA_DIR.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
import time

from kvstore.config import Supervisor, in_environment, local_file
from kvstore.tools.local_node import is_there, taken
from node.config import NodeConfig
from node.main import STOP_SIGNALS, listening, stopping
from node.main import main as run
from node.memory.arena import unused_nbytes
from node.process import leave_cores, yield_memory_first

log = logging.getLogger(__name__)

IDLE_S = 3600.0  # an engine that is restarted finds its pages
LOOK_S = 2.0
TAKE_S = 1.0
BEGIN_S = 20.0
TOUCH_S = 3600.0  # systemd removes files of /tmp that nobody has touched for ten days
STARTED_S = 60.0  # a node that has run for so long counts as a try that did not fail
# Of the memory that is free at the start. Models are loaded after that, and into GPUs.
RAM_SHARE = 4
RAM_NBYTES_MIN, RAM_NBYTES_MAX = 64 << 20, 64 << 30


def main() -> None:
    """Run the node until a signal, or until no engine has used it for `--idle-s`."""
    parser = argparse.ArgumentParser("node.local")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--stay", action="store_true", help="as a child of its starter")
    arguments = parser.parse_args()
    # Not the engine's: a child that it forks meanwhile would have a copy of it, and keep it
    lock = os.open(local_file("lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not _take(lock):
        os._exit(0)
    users = os.open(local_file("users"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    before = _socket_made_ns()
    # An engine may ignore it, and the end of a child would be lost
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not arguments.stay and (node := os.fork()):
        os._exit(_begun(node, before))
    # An engine binds its processes to cores, and pays more for its end than for that of a cache
    leave_cores()
    yield_memory_first()
    # As the node does, and before the thread starts, which must not take one of them
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    threading.Thread(target=_end_unused, args=(lock, users, arguments.idle_s), daemon=True).start()
    sys.argv = ["kvstore-node", "--host", "none", "--shm-socket", local_file("sock")]
    if "ram_nbytes" not in in_environment(NodeConfig, "KVSTORE_NODE"):
        free = unused_nbytes() // RAM_SHARE
        sys.argv += ["--ram-bytes", str(max(RAM_NBYTES_MIN, min(free, RAM_NBYTES_MAX)))]
    run(Supervisor())  # the engine's is not told that a node is ready or alive


def _take(lock: int) -> bool:
    """Take the lock, which engines that look have for an instant; False if a node has it."""
    end = time.monotonic() + TAKE_S
    while not taken(lock):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _begun(node: int, before: int) -> int:
    """Wait some seconds until a node listens or has failed; return 1 if it has.

    In a container without an init nobody else would collect those that fail, 144 of them a day.
    """
    end = time.monotonic() + BEGIN_S
    while time.monotonic() < end and _socket_made_ns() == before:
        if os.waitpid(node, os.WNOHANG)[0]:
            return 1
        time.sleep(0.05)
    return 0


def _socket_made_ns() -> int:
    try:
        return os.stat(local_file("sock")).st_ctime_ns
    except FileNotFoundError:
        return 0


def _end_unused(lock: int, users: int, idle_s: float) -> None:
    """End this node when it was unused for so long, or when somebody removed its files."""
    began = used_at = time.monotonic()
    touched_at = 0.0
    while (
        time.monotonic() - used_at < idle_s
        and is_there("lock", lock)
        and is_there("users", users)
        and not (listening.is_set() and not _socket_made_ns())
    ):
        if not touched_at or time.monotonic() - touched_at > TOUCH_S:
            touched_at = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(lock)
                os.utime(users)
                if listening.is_set():
                    os.utime(local_file("sock"))
        if stopping.wait(min(LOOK_S, idle_s / 4)):
            return
        if time.monotonic() - began > STARTED_S and os.fstat(lock).st_size > 1:
            os.ftruncate(lock, 1)
        if taken(users):
            fcntl.flock(users, fcntl.LOCK_UN)
        else:
            used_at = time.monotonic()
    if stopping.is_set():  # a second signal would end it at once
        return
    log.info("no engine has used this node for %g s, or its files are gone: it ends", idle_s)
    os.ftruncate(lock, 0)  # the next engine may start a node at once
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
