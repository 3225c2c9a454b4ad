"""Files that hold a secret, or say who may do what: regular ones, closed to others, no longer than they need be.

A file is named as `setting=path`, and so errors name it. They say nothing of what it holds.
"""

import os
import stat
from typing import Any

from kvstore.errors import ConfigError

SECRET_NBYTES_MAX = 4096  # of a file that holds one secret


def look_at(file: str, forbidden: int = 0) -> os.stat_result:
    """`forbidden`: bits of the mode that it may not have. Raises ConfigError."""
    try:
        return _checked(file, forbidden, os.stat(path_of(file)))
    except OSError as error:
        raise _unread(file, error) from error


def stamp(about: os.stat_result) -> tuple[int, ...]:
    """Other than it was when the file was written, replaced or made readable."""
    return about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_size


def read_guarded(file: str, forbidden: int, nbytes_max: int) -> bytes:
    """All of it, as its mode is while it is read. Never waits for who would write to a pipe. Raises ConfigError."""
    try:
        with open(path_of(file), "rb", opener=_at_once) as opened:
            _checked(file, forbidden, os.fstat(opened.fileno()))
            content: bytes = opened.read(nbytes_max + 1)
    except OSError as error:
        raise _unread(file, error) from error
    if len(content) > nbytes_max:
        raise ConfigError(f"{file} has more than {nbytes_max} bytes")
    return content


def path_of(file: str) -> str:
    return file.partition("=")[2]


def _at_once(path: Any, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _checked(file: str, forbidden: int, about: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{file} is no regular file")
    if about.st_mode & forbidden:
        raise ConfigError(
            f"{file} is open to others (mode {stat.S_IMODE(about.st_mode):04o}); chmod "
            f"{_closing(about.st_mode & forbidden)} {path_of(file)}, or, of a Kubernetes secret, defaultMode: 0400"
        )
    return about


def _closing(bits: int) -> str:
    """0o026 -> 'g-w,o-rw', as chmod takes it."""
    shown = stat.filemode(bits)
    letters = {"g": shown[4:7].replace("-", ""), "o": shown[7:].replace("-", "")}
    return ",".join(f"{who}-{some}" for who, some in letters.items() if some)


def _unread(file: str, error: OSError) -> ConfigError:
    return ConfigError(f"{file} can not be read: {error.strerror}")
