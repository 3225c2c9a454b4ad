"""What the node itself has run out of, told apart from what a disk can not do."""

import errno
import os

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
