"""When the process has no descriptor left: one is kept in reserve, so that there is always one to answer with."""

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator

log = logging.getLogger(__name__)

PLENTY = 1 << 13
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


_highest = 0  # of the descriptors that `few_left` was asked about


def few_left(fd: int, count: int) -> bool:
    """Whether fewer than `count` descriptors are left; `fd` was opened just now. It is the lowest that was free, so as
    long as none came near the limit there are enough. Once one did, they are counted: a low one may have filled the
    only gap."""
    global _highest
    _highest = max(_highest, fd)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if _highest + count < allowed:
        return False
    try:
        return allowed - (len(os.listdir("/proc/self/fd")) - 1) < count  # one was to look
    except OSError:
        return True


class SpareDescriptor:
    """Thread-safe. While it is lent, there is none in reserve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = _open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, one descriptor more can be opened, if nobody else is quicker; it must be closed inside."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            try:
                yield
            finally:
                self._fd = _open()

    def shed(self, listener: socket.socket) -> None:
        """Takes a waiting connection off a listener that does not block, and closes it: left alone, it would
        make `accept` fail again at once."""
        with self.lent(), contextlib.suppress(OSError):
            listener.accept()[0].close()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def _open() -> int:
    """-1 if somebody else was quicker: then there is none until the next try."""
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def allow_descriptors(count: int) -> None:
    """Lets this process open so many more than it may now, as far as that is its own decision."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= PLENTY:
        return
    allowed = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < soft + count:
        log.warning("%d descriptors may be too few for all connections; idle ones leave then (ulimit -Hn)", allowed)
