"""What the node itself has run out of, told apart from what a disk can not do."""

import errno
import logging
import os
import time

log = logging.getLogger(__name__)

LOG_S = 10.0  # between two lines about it: it meets every page
CODES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NO_THREAD = "can't start new thread"  # all that Python says about it


def is_shortage(error: BaseException) -> bool:
    """Of descriptors, memory or threads. The disk is not to blame, and a moment later there may be enough."""
    if isinstance(error, OSError):
        return error.errno in CODES
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error))


def code_in(text: str) -> int | None:
    """The code of the shortage that a text is about: RocksDB tells of an error of the system in words."""
    return next((code for code in CODES if os.strerror(code) in text), None)


class Shortages:
    """A line in the log now and then."""

    def __init__(self) -> None:
        self._tell_again = 0.0

    def tell(self, doing: str, error: BaseException) -> None:
        if time.monotonic() >= self._tell_again:
            self._tell_again = time.monotonic() + LOG_S
            log.warning("disk tier, %s: the node is short of memory, descriptors or threads: %r", doing, error)
