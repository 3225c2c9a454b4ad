"""Keep a node on this host for its engines, which name it by the address `local`.

    engine process   shares the lock of local.users as long as it lives; if nobody has the lock of
                     local.lock, it notes there that it starts a node
    node             has the lock of local.lock until it ends, an hour after the last engine

The files are in `runtime_dir()`, where only this user may write. The kernel releases the locks of a
process that ends, however it does. So there is one node for all engines and ranks of a user, and
none waits for another (docs/decisions/0056-one-line-start.md).
"""

import contextlib
import fcntl
import logging
import os
import subprocess
import time

from kvstore import programs
from kvstore.config import local_file
from kvstore.errors import ConfigError
from kvstore.sync import start_thread
from kvstore.transports.unix_sockets import private_directory

log = logging.getLogger(__name__)

LOOK_S = 2.0
# Between two tries of all engines together, twice as long after each that failed
RETRY_S, RETRY_S_MAX = 10.0, 600.0
_WORDS_NBYTES_MAX = 4096
_KILLED = "nothing, as when the kernel ends it for its memory"
_CREATED = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_keeper = 0  # the process whose thread keeps the node; a child that is forked has no such thread


def keep() -> None:
    """Begin to keep a node, once in a process. It neither waits for the node nor raises."""
    global _keeper
    if _keeper == os.getpid():
        return
    _keeper = os.getpid()
    try:
        start_thread(_Keeper().run, "kvstore-local")
    except RuntimeError as error:
        log.warning("no node is started on this host, the engine recomputes: %s", error)


class _Keeper:
    """The part of one engine process, in a thread of its own."""

    def __init__(self) -> None:
        self.started = False  # the last one that this process started may still run
        self._users = -1
        self._problem = ""

    def run(self) -> None:
        """Look every other second, until the process ends."""
        while True:
            try:
                problem = self.look()
            except (ConfigError, OSError) as error:
                problem = str(error)
            if problem and not self._problem:
                log.warning("no node on this host, the engine recomputes: %s", problem)
                self._problem = problem
            time.sleep(LOOK_S)

    def look(self) -> str:
        """Start a node if none has the lock. Return why the last one failed; empty if it runs.

        Raises ConfigError and OSError.
        """
        private_directory()
        if self._users >= 0 and not is_there("users", self._users):
            os.close(self._users)  # somebody removed it: a new node could not see this lock
            self._users = -1
        if self._users < 0:
            self._users = os.open(local_file("users"), os.O_RDWR | _CREATED, 0o600)
        fcntl.flock(self._users, fcntl.LOCK_SH)  # a node holds it for microseconds
        lock, problem = os.open(local_file("lock"), os.O_RDWR | _CREATED, 0o600), ""
        starts = False
        try:
            if not taken(lock):
                self._problem = ""
                return ""
            about = os.fstat(lock)
            tries = about.st_size  # a node that ends as it should makes the file empty
            if self.started and tries:
                problem = _last_words()
            wait_s = min(RETRY_S * 2 ** min(tries - 1, 10), RETRY_S_MAX) if tries else 0.0
            if abs(time.time() - about.st_mtime) >= wait_s:
                starts = True
                try:
                    os.pwrite(lock, b".", tries)  # so no other engine tries for RETRY_S
                except OSError as error:  # such as a full file system
                    raise OSError(error.errno, error.strerror, local_file("lock")) from None
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy
            os.close(lock)
        if starts:
            self._start()
        return problem

    def _start(self) -> None:
        path = local_file("log")
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, f"{path}.1")
        said = os.open(path, os.O_WRONLY | os.O_APPEND | _CREATED, 0o600)
        try:
            # It takes the lock and leaves a child behind, which no end of an engine reaches: vLLM
            # kills all processes below its own, and Ctrl-C those of its session.
            subprocess.run(
                programs.command("node.local", begin=programs.python()),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                check=False,
            )
        except OSError as error:
            raise OSError(f"no process can be started: {error}") from error
        finally:
            os.close(said)
        self.started = True


def is_there(name: str, fd: int) -> bool:
    """Return whether `local_file(name)` is the open file `fd`, and was not removed or replaced."""
    try:
        return os.path.samestat(os.stat(local_file(name)), os.fstat(fd))
    except OSError:
        return False


def taken(lock: int) -> bool:
    """Take the lock of an open file, and return whether nobody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last_words() -> str:
    path, lines = local_file("log"), [""]
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _WORDS_NBYTES_MAX))
        lines = file.read().decode(errors="replace").split("\n")
    words = next((line for line in reversed(lines) if line.strip()), _KILLED)
    return f"the last one ended, its log with: {words} ({path})"
