"""Which weights an engine serves, said so that every process that serves the same says the same.

    a directory or a file       its last component, and a digest over its bytes
    a snapshot of a hub         its repository's name, and the commit
    a hub's name                the name, and the commit that this machine's cache holds for it
    anything else               the start ends, unless the user names a revision

A local path names nothing to others, and a name or a branch says nothing about bytes. A revision that the user
names is believed, and vouches for all weights of the engine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_agent.identity.hub_cache import commit_of, snapshot_of
from gpu_agent.identity.weight_files import weight_files, weights_digest
from gpu_agent.options import Identity
from kvstore.config import hub_cache_dir
from kvstore.errors import ConfigError

# Of a model's configuration, what says nothing about its KV: who wrote it, where it was, how it runs.
_NOT_IDENTITY = {"transformers_version", "_name_or_path", "use_cache", "return_dict", "output_attentions"}


def config_digest(config: Mapping[str, Any]) -> str:
    """32 hex digits over a model's configuration, as `to_dict()` or config.json has it."""
    return text_digest({name: value for name, value in config.items() if name not in _NOT_IDENTITY})


def text_digest(value: Any) -> str:
    """32 hex digits over anything that JSON can hold, or text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def named(identity: Identity, model: str, revision: str = "", cache: str | None = "") -> Identity:
    """`identity` with the model's name and revision filled in where the user gave none.

    `model`: what the engine loads, a hub's name, a directory or a file; `revision`: of the hub, if the engine
    was told one; `cache`: where the engine keeps what it fetches from the Hugging Face hub (empty: this user's
    place, None: it fetches from elsewhere). Without a revision of the user's, weights in a directory or a file
    are read as a whole. Raises ConfigError if nothing says which weights these are.
    """
    path = Path(model)
    if not path.exists():
        commit = identity.revision or _commit(model, revision, cache)
        return replace(identity, model=identity.model or model, revision=commit)
    if identity.revision:
        snapshot = snapshot_of(path, ())
        return replace(identity, model=identity.model or (snapshot[0] if snapshot else path.resolve().name))
    files = weight_files(path)
    snapshot = snapshot_of(path, files.values())
    name, content = snapshot or (path.resolve().name, weights_digest(files))
    return replace(identity, model=identity.model or name, revision=content)


def also_loaded(vouched: bool, model: str, revision: str = "", cache: str | None = "") -> str:
    """`"name@revision"` of weights that an engine has beside its model's: a draft model, a LoRA. What can not be
    named is taken by its name if the user vouches for the engine's weights with a revision; else raises ConfigError."""
    try:
        other = named(Identity(), model, revision, cache)
    except ConfigError:
        if not vouched:
            raise
        return f"{model}@{revision}"
    return f"{other.model}@{other.revision}"


def _commit(model: str, revision: str, cache: str | None) -> str:
    directory = None if cache is None else Path(cache or hub_cache_dir())
    commit = commit_of(directory, model, revision) if directory else None
    if commit is None:
        raise ConfigError(
            f"nothing says which weights {model!r} are: it is no directory and no file here, and "
            + (f"{directory} holds no commit for its revision {revision or 'main'!r}" if directory else "no hub's name")
            + "; set the option revision (a commit, a date), and another one after every change of the weights"
        )
    return commit
