"""Keys for nodes with an encrypted disk, and pieces of their pages in plain text."""

import base64
import os
from pathlib import Path
from typing import Any

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


def key_file(path: Path, key: bytes = KEY, mode: int = 0o400, form: str = "hex") -> str:
    """Write a key file and return its path as a setting."""
    path.unlink(missing_ok=True)
    path.write_text(key.hex() if form == "hex" else base64.b64encode(key).decode() + "\n")
    path.chmod(mode)
    return str(path)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def pieces(pages: Any, keys: list[bytes], nbytes: int = 64) -> list[bytes]:
    """Return pieces of the plain bytes of pages: their start, middle and end."""
    contents = [pages.content(key) for key in keys]
    return [
        content[at : at + nbytes]
        for content in contents
        for at in (0, len(content) // 2, len(content) - nbytes)
    ]
