"""Name the weights that an engine serves, equally in every process that serves them.

    a directory or a file       its last component, and a digest over its bytes
    a snapshot of a hub         its repository's name, and the commit
    a hub's name                the name, and the commit that this machine's cache holds for it
    anything else               the start ends, unless the user names a revision

A local path means nothing to other machines, and a name or a branch says nothing about bytes. A
revision that the user names is trusted, and covers all weights of the engine.

Files are read completely: weights that were trained further, or quantised again, keep their length,
their names and their headers. Any cheaper comparison would confuse two of them one day.

A Hugging Face hub's cache on this machine:

    models--owner--name/refs/<branch, tag or pull request>   text: a commit
                        snapshots/<commit>/<file>            -> ../../blobs/<hash of the content>
                        blobs/<hash>                         large: SHA-256; small: git's SHA-1
"""

import functools
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_agent.options import Identity
from kvstore.checksum import running_digest
from kvstore.config import hub_cache_dir
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

_READ_NBYTES = 16 << 20
SLOW_NBYTES = 8 << 30  # larger files take two seconds and more: a start logs what it waits for
# Files beside weights that do not affect KV. Anything else counts: otherwise an unknown format
# would be no part of the name.
_NOISE = {".md", ".log", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".lock", ".tmp", ".pyc"}
# Files that count but are no weights: configurations, code, vocabularies.
_TEXT = {".json", ".yaml", ".yml", ".txt", ".py", ".jinja", ".model", ".tiktoken", ""}
# Fields of a model's configuration that do not affect its KV: author, path, runtime settings.
_NOT_IDENTITY = {
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "return_dict",
    "output_attentions",
}
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(
    r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?P<rest>/.*)?$"
)
_BLOB = re.compile(r"/models--[^/]+/blobs/(?:(?P<git>[0-9a-f]{40})|[0-9a-f]{64})$")

_Signature = tuple[tuple[str, int, int, int, int, int], ...]


def named(identity: Identity, model: str, revision: str = "", cache: str | None = "") -> Identity:
    """Fill in model name and revision where the user gave none. Raises ConfigError.

    `model`: what the engine loads: a hub's name, a directory or a file. `revision`: the hub's, if
    the engine was given one. `cache`: where the engine keeps files of the Hugging Face hub (empty:
    this user's default; None: it fetches from elsewhere). Without a revision, weights in a
    directory or file are read completely.
    """
    path = Path(model)
    if not path.exists():
        commit = identity.revision or _commit(model, revision, cache)
        return replace(identity, model=identity.model or model, revision=commit)
    if identity.revision:
        snapshot = snapshot_of(path, ())
        return replace(
            identity, model=identity.model or (snapshot[0] if snapshot else path.resolve().name)
        )
    files = weight_files(path)
    snapshot = snapshot_of(path, files.values())
    name, content = snapshot or (path.resolve().name, weights_digest(files))
    return replace(identity, model=identity.model or name, revision=content)


def secondary_weights(
    revision_given: bool, model: str, revision: str = "", cache: str | None = ""
) -> str:
    """Return `"name@revision"` of further weights: a draft model or a LoRA.

    If the revision cannot be found, the name is used if the user vouches for the weights with a
    revision; otherwise it raises ConfigError.
    """
    try:
        other = named(Identity(), model, revision, cache)
    except ConfigError:
        if not revision_given:
            raise
        return f"{model}@{revision}"
    return f"{other.model}@{other.revision}"


def _commit(model: str, revision: str, cache: str | None) -> str:
    directory = None if cache is None else Path(cache or hub_cache_dir())
    commit = commit_of(directory, model, revision) if directory else None
    if commit is None:
        raise ConfigError(
            f"the weights of {model!r} are unknown: it is neither a directory nor a file here, and "
            + (
                f"{directory} holds no commit for its revision {revision or 'main'!r}"
                if directory
                else "no hub's name"
            )
            + "; set the option revision (a commit, a date), and another one after every change of "
            "the weights"
        )
    return commit


def config_digest(config: Mapping[str, Any]) -> str:
    """Return 32 hex digits over a model's configuration."""
    return text_digest({name: value for name, value in config.items() if name not in _NOT_IDENTITY})


def text_digest(value: Any) -> str:
    """Return 32 hex digits over a JSON value or text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def weight_files(path: Path) -> dict[str, Path]:
    """Return the files that count, by their name below `path`, in order.

    For a directory these are all files but noise; for a file, itself and the other parts of a split
    checkpoint (model-00001-of-00003.gguf). Raises ConfigError for a directory without weights.
    """
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
    """Yield files recursively, following links as an engine does, each real directory once.

    `seen`: real directories that were read.
    """
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
    """Return `"weights=..."`: xxh3_128 over names and bytes, once per process and content.

    It takes a second per 5 GB. Raises ConfigError for a file that is unreadable or changes
    meanwhile.
    """
    try:
        signature = _signature(files)
        nbytes = sum(size for *_, size, _, _ in signature)
        log.log(
            logging.WARNING if nbytes >= SLOW_NBYTES else logging.INFO,
            "reading %.1f GB of weights to name them; the option revision, if you vouch for it, "
            "saves this",
            nbytes / 1e9,
        )
        digest = _digest(tuple(files.items()), signature)
        changed = _signature(files) != signature
    except OSError as error:
        raise ConfigError(f"weights can not be read, and so not be named: {error}") from error
    if changed:
        raise ConfigError(
            f"weights changed while they were read: {next(iter(files.values())).parent}; start "
            "again"
        )
    return digest


def _signature(files: dict[str, Path]) -> _Signature:
    """Return a value that changes with any content.

    Users can set modification times, but not change times.
    """
    stats = [(name, os.stat(path)) for name, path in files.items()]
    return tuple(
        (name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
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


def commit_of(cache: Path, name: str, revision: str) -> str | None:
    """Return the commit of a repository's `revision` (empty: main); None without its snapshot.

    Raises ConfigError if it names another commit than when this process began: the engine has
    loaded one of them, and it is unknown which.
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
            f"{name} moved on to another commit while this engine was starting, and it is "
            "unknown which one it has loaded: start it again, or set the option revision"
        )
    return commit if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir() else None


def process_start() -> float:
    """Return when this process began, on the clock of the file system."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def snapshot_of(path: Path, files: Iterable[Path]) -> tuple[str, str] | None:
    """Return (name, commit) of an unchanged hub snapshot, or of a file in one; otherwise None.

    Small files are read and compared with their names. Large ones are trusted if they are links to
    a blob: not reading them is the purpose.
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
    return (
        hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        == blob["git"]
    )


def length_dependent(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of rotary embeddings whose angles depend on a prompt's length.

        dynamic        transformers: on the longest prompt since a short one; vLLM, SGLang: on
                       nothing; LightLLM: on a token's own position
        longrope, su   transformers, SGLang: on the longest prompt of a batch; vLLM: on
                       max_model_len; LightLLM: on a token's own position
        others         (linear, yarn, llama3, proportional, mrope) on nothing

    A page is found by its tokens and those before it. If its K depends on later tokens or on the
    rest of the batch, no key tells such pages apart.
    """
    return sorted({kind for kind in _kinds(config) if is_length_dependent(kind)})


def is_length_dependent(kind: str) -> bool:
    """Return transformers' rule; "su" is longrope's first name."""
    return "dynamic" in kind or kind in ("longrope", "su")


def _kinds(config: Mapping[str, Any], within: bool = False) -> Iterator[str]:
    """Yield kinds of rotary embeddings; `within`: the entry belongs to such a configuration.

    Nested: one for each kind of layer.
    """
    for name, value in config.items():
        if name == "use_dynamic_ntk" and value:
            yield "dynamic"
        elif isinstance(value, Mapping):
            yield from _kinds(value, within or name.startswith("rope"))
        elif within and name in ("rope_type", "type") and isinstance(value, str):
            yield value
