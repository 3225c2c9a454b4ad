"""Sizes as options of commands have them."""

from collections.abc import Sequence

from kvstore.config import parse_nbytes
from kvstore.errors import InvalidRequest


def option_nbytes(text: str, option: str) -> int:
    """Raises InvalidRequest, which names the option."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise InvalidRequest(f"{option} {text!r} is not a size; write for example 4096, 256KiB or 1MiB") from error


def option_sizes(texts: Sequence[str] | None, option: str) -> tuple[int, ...]:
    """Of an option that may be there several times, or have several with commas: rising, each once."""
    return tuple(sorted({option_nbytes(part, option) for text in texts or () for part in text.split(",")}))
