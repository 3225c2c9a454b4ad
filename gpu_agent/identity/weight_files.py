"""The files of a checkpoint, and a digest over all their bytes.

Everything is read: weights that were trained further, or quantised again, keep their length, their names and
their headers. What is told apart by less would be told apart wrongly one day.
"""

import functools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvstore.checksum import running_digest
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

_READ_NBYTES = 16 << 20
SLOW_NBYTES = 8 << 30  # from here on, two seconds and more, a start says what it waits for
# What lies beside weights and says nothing about KV. Anything else counts: a format that nobody knows here would
# otherwise be no part of the name.
_NOISE = {".md", ".log", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".lock", ".tmp", ".pyc"}
# What counts and is no weights by itself: configurations, code, vocabularies.
_TEXT = {".json", ".yaml", ".yml", ".txt", ".py", ".jinja", ".model", ".tiktoken", ""}
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")

_Signature = tuple[tuple[str, int, int, int, int, int], ...]


def weight_files(path: Path) -> dict[str, Path]:
    """Files that count, by their name below `path`, in order: of a directory all but noise, of a file itself and
    the other parts of a checkpoint that is split (model-00001-of-00003.gguf). Raises ConfigError for a
    directory without weights."""
    if not path.is_dir():
        split = _SPLIT.match(path.name)
        parts = [file for file in path.parent.iterdir() if split and _same_split(split, file.name)]
        return {file.name: file for file in sorted(parts) or [path]}
    found = {str(file.relative_to(path)): file for file in _walk(path, {path.resolve()})}
    if all(file.suffix in _TEXT for file in found.values()):
        raise ConfigError(f"{path} holds no weights; name them with the option revision")
    return dict(sorted(found.items()))


def _same_split(first: re.Match[str], name: str) -> bool:
    other = _SPLIT.match(name)
    return other is not None and other.groupdict() == first.groupdict()


def _walk(directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Through links too: an engine follows them. `seen`: real directories, each read once."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            if entry.resolve() not in seen:
                seen.add(entry.resolve())
                yield from _walk(entry, seen)
        elif entry.is_file() and entry.suffix not in _NOISE:
            yield entry


def weights_digest(files: dict[str, Path]) -> str:
    """`"weights=..."`: xxh3_128 over names and bytes. A second per 5 GB; once per process and content. Raises
    ConfigError for a file that can not be read, or that changes meanwhile."""
    try:
        signature = _signature(files)
        nbytes = sum(size for *_, size, _, _ in signature)
        log.log(
            logging.WARNING if nbytes >= SLOW_NBYTES else logging.INFO,
            "reading %.1f GB of weights to name them; the option revision, if you vouch for it, saves this",
            nbytes / 1e9,
        )
        digest = _digest(tuple(files.items()), signature)
        changed = _signature(files) != signature
    except OSError as error:
        raise ConfigError(f"weights can not be read, and so not be named: {error}") from error
    if changed:
        raise ConfigError(f"weights changed while they were read: {next(iter(files.values())).parent}; start again")
    return digest


def _signature(files: dict[str, Path]) -> _Signature:
    """What changes with any change of content. Modification times are set by users, change times are not."""
    stats = [(name, os.stat(path)) for name, path in files.items()]
    return tuple(
        (name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats
    )


@functools.lru_cache(maxsize=8)
def _digest(files: tuple[tuple[str, Path], ...], signature: _Signature) -> str:
    running = running_digest()
    for (name, path), (_, _, _, size, _, _) in zip(files, signature, strict=True):
        running.update(f"{name} {size}\n".encode())
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_NBYTES):
                running.update(block)
    return f"weights={running.digest().hex()}"
