"""Files that are replaced whole or not at all: somebody may be reading them, or the power may go."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """`owner`: (user, group), another than this process's. It is there after a loss of power, too, and nobody has read
    it with another mode. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, mode)
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(fd, *owner)
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
