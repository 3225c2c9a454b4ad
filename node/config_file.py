"""Read a node's configuration file, and print the effective configuration.

    [memory]
    ram-bytes = "64GiB"

Tables are the groups of `--help`, and keys are flags without dashes in front. Keys may also stand
without a table. A flag comes before its variable, and a variable before the file.
"""

import dataclasses
import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.config import in_environment, load, parse_setting
from kvstore.environment import nearest, variable_of
from kvstore.errors import ConfigError
from kvstore.units import format_nbytes
from node.config import GROUPS, NodeConfig, missing

PREFIX = "KVSTORE_NODE"
EXPERT = "expert"
FILE_NBYTES_MAX = 1 << 20
FIELDS = {field.name: field for field in dataclasses.fields(NodeConfig)}


def key_of(name: str) -> str:
    """Return the key of a setting in a file, its flag without the dashes in front."""
    return name.replace("nbytes", "bytes").replace("_", "-")


SECRETS = {key_of(name): name for name, field in FIELDS.items() if field.metadata.get("secret")}
# By table: the settings in it, by key
TABLES = {title.lower(): {key_of(name): name for name in names} for title, names in GROUPS.items()}
TABLES[EXPERT] = {key_of(name): name for name in FIELDS if FIELDS[name].metadata.get("expert")}
KEYS = {key: name for table in TABLES.values() for key, name in table.items()}


@dataclass(frozen=True)
class Settings:
    """A node's settings and where each comes from: a flag, a variable, the file, or the default."""

    config: NodeConfig
    sources: Mapping[str, str]

    def as_toml(self) -> str:
        """Return a file with these settings.

        Settings that follow from others are comments, and so are secrets, without their value.
        """
        lines: list[str] = []
        for title, names in TABLES.items():
            lines += ["", f"[{title}]"]
            for key, name in names.items():
                source, value = self.sources[name], _toml(name, getattr(self.config, name))
                mark = "# " if source == "derived" else ""
                lines.append(f"{mark}{key} = {value}  # {source}")
        lines += ["", "# Secrets, which only the environment sets"]
        for name in SECRETS.values():
            said = "set" if getattr(self.config, name) else "not set"
            lines.append(f"# {variable_of(PREFIX, name)} is {said}")
        return "\n".join(lines[1:])

    def as_json(self) -> str:
        """Return all settings by key, with bytes and seconds as numbers."""
        shown = {
            key: {"value": getattr(self.config, name), "source": self.sources[name]}
            for key, name in KEYS.items()
        }
        secrets = {
            key: {"set": bool(getattr(self.config, name)), "source": self.sources[name]}
            for key, name in SECRETS.items()
        }
        return json.dumps({"settings": shown, "secrets": secrets}, indent=2)


def _toml(name: str, value: Any) -> str:
    if value and "nbytes" in name:
        value = format_nbytes(value)
    return json.dumps(value, ensure_ascii=False)


def load_settings(flags: Mapping[str, Any], path: str = "") -> Settings:
    """Load a node's settings from flags, the environment and a file. Raises ConfigError."""
    from_file = read_file(path) if path else {}
    config = load(NodeConfig, PREFIX, flags, defaults=from_file)
    sources, in_variables = {}, in_environment(NodeConfig, PREFIX)
    for name, field in FIELDS.items():
        if flags.get(name) is not None:
            sources[name] = f"--{key_of(name)}"
        elif name in in_variables:
            sources[name] = variable_of(PREFIX, name)
        elif name in from_file:
            sources[name] = path
        else:
            same = getattr(config, name) == field.default
            sources[name] = "default" if same else "derived"
    return Settings(config, sources)


def read_file(path: str) -> dict[str, Any]:
    """Return the settings of a configuration file by field. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            about, content = os.fstat(file.fileno()), file.read(FILE_NBYTES_MAX + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can not be read: {error}") from error
    if len(content) > FILE_NBYTES_MAX:
        raise ConfigError(f"{path} is larger than {format_nbytes(FILE_NBYTES_MAX)}: no settings")
    if stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} may be written by every user of this host, and it names commands and files of "
            f"secrets: chmod o-w {path}"
        )
    found: dict[str, Any] = {}
    for key, value in _parsed(path, text).items():
        if isinstance(value, dict):
            for inner, setting in value.items():
                _check_table(path, key, inner)
                _take(path, found, inner, setting)
        else:
            _take(path, found, key, value)
    return found


def _parsed(path: str, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise ConfigError(missing("tomli")) from error
    try:
        found: dict[str, Any] = tomllib.loads(text)
        return found
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def _check_table(path: str, table: str, key: str) -> None:
    if table not in TABLES:
        near = nearest(table, TABLES)
        remedy = f"did you mean [{near}]?" if near else f"tables are {', '.join(TABLES)}"
        raise ConfigError(f"{path}: unknown table [{table}]; {remedy}")
    key = key.replace("_", "-")
    right = next((title for title, keys in TABLES.items() if key in keys), table)
    if right != table:
        raise ConfigError(f"{path}: {key} belongs to the table [{right}], not to [{table}]")


def _take(path: str, found: dict[str, Any], key: str, value: Any) -> None:
    """Check one key and add its value. `ram_bytes` is accepted as `ram-bytes`."""
    name = KEYS.get(key.replace("_", "-"))
    if name is None:
        raise ConfigError(f"{path}: {_unknown(key)}")
    if name in found:
        raise ConfigError(f"{path}: {key} is given twice")
    field = FIELDS[name]
    kind = type(field.default)
    if isinstance(value, str):
        value = parse_setting(f"{path}: {key}", value, field)
    elif kind is float and type(value) is int:
        value = float(value)
    elif type(value) is not kind:
        raise ConfigError(f"{path}: {key}={value!r} must be of type {kind.__name__}, or text")
    found[name] = value


def _unknown(key: str) -> str:
    """Return the error about a key that is no setting, with the remedy."""
    if secret := SECRETS.get(key.replace("_", "-")):
        return f"{key} is a secret, which only {variable_of(PREFIX, secret)} sets"
    near = nearest(key.replace("_", "-"), KEYS)
    remedy = f"did you mean {near}?" if near else "kvstore-node --help lists the settings"
    return f"unknown setting {key}; {remedy}"
