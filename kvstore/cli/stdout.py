"""The command's stdout, of which a failure is told from any other: it may come from wherever something is printed, and
also when the rest is written at the end."""

import io
import sys
from typing import Any


class Unwritten(Exception):
    """What was to be shown is lost. (That a reader left is BrokenPipeError, as ever.)"""


class _Raw(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Unwritten(f"stdout can not be written: {error.strerror}") from error


def guard_stdout() -> None:
    """In place of Python's own, and otherwise the same."""
    own = sys.stdout
    if not isinstance(own, io.TextIOWrapper):  # None: it is closed
        return
    raw = _Raw(own.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if own.write_through else io.BufferedWriter(raw),
        encoding=own.encoding,
        errors=own.errors,
        line_buffering=own.line_buffering,
        write_through=own.write_through,
    )
