"""Which weights an engine serves, said so that every process that serves the same says the same.

A local path names nothing to others, and a name says nothing about bytes. A checkpoint in a
directory is therefore named by its last path component and a digest of its files; one from a hub by
its name and the commit that the hub's cache holds.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_agent.options import Identity
from kvstore.checksum import running_checksum
from kvstore.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model")
_READ_NBYTES = 16 << 20
# Of a hub's cache: models--owner--name/snapshots/<commit>
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
# Of a model's configuration, what says nothing about its KV: who wrote it, where it was, how it runs.
_NOT_IDENTITY = {"transformers_version", "_name_or_path", "use_cache", "return_dict", "output_attentions"}


def config_digest(config: Mapping[str, Any]) -> str:
    """32 hex digits over a model's configuration, as `to_dict()` or config.json has it."""
    identity = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]


def named(identity: Identity, model: str, revision: str = "") -> Identity:
    """`identity` with the model's name and revision filled in where the user gave none.

    `model`: what the engine loads, a hub's name or a directory; `revision`: of the hub, if the engine was
    told one. Reads the whole checkpoint if it is a directory without a revision: a second per 5 GB.
    Raises ConfigError if no weights are there.
    """
    path = Path(model)
    if not path.is_dir():
        return replace(identity, model=identity.model or model, revision=identity.revision or revision)
    snapshot = _SNAPSHOT.search(str(path))
    if snapshot:
        name, revision = snapshot["name"].replace("--", "/"), snapshot["commit"]
    else:
        name = path.resolve().name
    return replace(
        identity, model=identity.model or name, revision=identity.revision or revision or digest(str(path.resolve()))
    )


@functools.lru_cache(maxsize=8)
def digest(directory: str) -> str:
    """`"weights=..."`: xxh3_128 over names and bytes of a checkpoint's files, in order of their names."""
    files = sorted(path for path in Path(directory).iterdir() if path.is_file() and path.suffix in _WEIGHTS)
    if not files:
        raise ConfigError(f"{directory} holds no weights; name them with the options model and revision")
    running = running_checksum(0)
    for path in files:
        running.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_NBYTES):
                running.update(block)
    return f"weights={running.digest().hex()}"
