"""A Hugging Face hub's cache on this machine: which commit it holds for a name, and whether a snapshot is as
the hub made it.

    models--owner--name/refs/<branch, tag or pull request>   text: a commit
                        snapshots/<commit>/<file>            -> ../../blobs/<hash of the content>
                        blobs/<hash>                         large files: SHA-256; small ones: git's SHA-1
"""

import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from kvstore.errors import ConfigError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?P<rest>/.*)?$")
_BLOB = re.compile(r"/models--[^/]+/blobs/(?:(?P<git>[0-9a-f]{40})|[0-9a-f]{64})$")


def commit_of(cache: Path, name: str, revision: str) -> str | None:
    """The commit that `revision` (empty: main) of a repository stands for here; None if its snapshot is not here.
    A commit stands for itself.

    Raises ConfigError if it stands for another one since this process began: the engine has loaded one of them,
    and nothing says which.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    repository = cache / f"models--{name.replace('/', '--')}"
    ref, snapshots = repository / "refs" / (revision or "main"), repository / "snapshots"
    try:
        commit, moved = ref.read_text().strip(), ref.stat().st_mtime
        known = sum(1 for _ in snapshots.iterdir())
    except (OSError, ValueError):
        return None
    if known > 1 and moved > process_start():
        raise ConfigError(
            f"{name} moved on to another commit while this engine was starting, and nothing says which one it has "
            "loaded: start it again, or set the option revision"
        )
    return commit if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir() else None


def process_start() -> float:
    """When this process began, on the clock of files."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def snapshot_of(path: Path, files: Iterable[Path]) -> tuple[str, str] | None:
    """(name, commit) of a snapshot, or of a file in one; None if it is none, or if one of `files`, those of it that
    count, is not what the hub put there.

    Small files are read and compared with their names. Large ones are believed to be what they are called, if
    they are links to a blob: reading them is what this saves.
    """
    place = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    match = _SNAPSHOT.search(str(place))
    if not match or not all(_untouched(file) for file in files):
        return None
    return match["name"].replace("--", "/") + (match["rest"] or "").rstrip("/"), match["commit"]


def _untouched(file: Path) -> bool:
    blob = _BLOB.search(str(file.resolve()))
    if not file.is_symlink() or not blob:
        return False
    if blob["git"] is None:
        return True
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == blob["git"]
