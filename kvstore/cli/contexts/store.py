"""Read and change the file of contexts.

    ~/.config/kvstore/contexts.json
    {"current": "prod", "contexts": {"prod": {"address": "n1:7440", "tls_ca": "/etc/ca.pem"}}}

A context has the names of secret files, never their content. Only the command line reads contexts;
programs and engines read the environment.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.config import ClientConfig, in_environment, user_config_dir
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.security.secrets import read_guarded, write_whole

NONE = "none"  # the name that means: use no context
# Settings of ClientConfig that a context may have.
FIELDS = (
    "address",
    "wire",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_name",
    "token_file",
    "insecure",
    "tenant",
    "page_key_file",
)
FILES = ("tls_ca", "tls_cert", "tls_key", "token_file", "page_key_file")
# Settings that exclude each other: a secret, and the file that holds it.
ALTERNATIVES = {"token_file": "token", "page_key_file": "page_key"}
FILE_NBYTES_MAX = 1 << 20
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_REMEDY = "correct it, or remove it and add the contexts again"


@dataclass
class Contexts:
    """Content of the file: settings by context, and the name of the current one, if any."""

    current: str = ""
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, name: str) -> dict[str, Any]:
        """Return a context's settings. Raises InvalidRequest for an unknown name."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none yet; add one with kvstore context add"
            raise InvalidRequest(f"there is no context {name!r}; known: {known}")
        return self.by_name[name]


def path() -> Path:
    """Return the path of the file. Raises ConfigError if this user has no home directory."""
    folder = user_config_dir()
    if not folder:
        raise ConfigError("contexts need a home directory: set HOME or XDG_CONFIG_HOME")
    return Path(folder, "contexts.json")


def read() -> Contexts:
    """Read the contexts; none if there is no file. Raises ConfigError."""
    file = path()
    # Others may not write it: it decides where a token is sent.
    with contextlib.suppress(PermissionError):
        if not file.exists():
            return Contexts()
        if (owner := file.stat().st_uid) not in (0, os.geteuid()):  # as under `sudo -E`
            raise ConfigError(
                f"{file} belongs to another user (uid {owner}); set HOME or XDG_CONFIG_HOME to a "
                "directory of yours, or KVSTORE_CONTEXT=none"
            )
    content = read_guarded(f"contexts={file}", stat.S_IWGRP | stat.S_IWOTH, FILE_NBYTES_MAX)
    try:
        return _checked(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no valid file of contexts: {error}; {_REMEDY}") from error


def _checked(value: Any) -> Contexts:
    """Return the contexts of a parsed file. Raises ValueError."""
    contexts = value.get("contexts") if isinstance(value, dict) else None
    current = value.get("current") if isinstance(value, dict) else None
    if not isinstance(contexts, dict) or not isinstance(current, str | None):
        raise ValueError("it has no object `contexts`, or `current` is no name")
    defaults = {one.name: one.default for one in dataclasses.fields(ClientConfig)}
    for name, settings in contexts.items():
        if not isinstance(settings, dict):
            raise ValueError(f"the context {name!r} is no object")
        for setting, given in settings.items():
            if setting not in FIELDS:
                raise ValueError(f"the context {name!r} has an unknown setting {setting!r}")
            if type(given) is not type(defaults[setting]):
                raise ValueError(f"{setting} of the context {name!r} has a value of another type")
    return Contexts(current or "", contexts)


@contextlib.contextmanager
def changed() -> Iterator[Contexts]:
    """Yield the contexts for changes and write them back, one writer at a time.

    Raises ConfigError. If the body raises, the file stays as it was.
    """
    file = path()
    with _writing(file):
        file.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        contexts = read()
        yield contexts
        known = dict(sorted(contexts.by_name.items()))
        text = json.dumps({"current": contexts.current or None, "contexts": known}, indent=1)
        with _writing(file):
            write_whole(file, f"{text}\n".encode(), FILE_MODE)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}; XDG_CONFIG_HOME may name another directory"
        raise ConfigError(f"{file} can not be written: {why}") from error


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that a context can not have."""
    if not _NAME.fullmatch(name) or name == NONE:
        raise InvalidRequest(
            f"{name!r} can not name a context; use letters, digits, dots, - and _, and not {NONE}"
        )


def defaults_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a context's settings without files whose secret the environment gives."""
    given = in_environment(ClientConfig, "KVSTORE")
    return {name: value for name, value in settings.items() if ALTERNATIVES.get(name) not in given}
