"""What is tested: a connector's `kv_transfer_config`, and commands for its store."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_S = 60.0
COMMAND_S = 60.0
FIELDS = ("description", "kv_transfer_config", "environment", "store", "evict", "device", "modules")


class ConfigurationError(Exception):
    """The configuration can not be used; the message says why and what to write instead."""


class StoreFailed(Exception):
    """A command of the store failed; the message has its last line."""


@dataclass(frozen=True)
class Configuration:
    """A connector to test.

    In all strings {folder}, {port}, {port2}, {python}, {here} (the folder configurations/) and
    variables, $NAME, are replaced.

    `store`: a program that serves the store, started before the engines; it must listen on {port}.
    `evict`: a shell command that removes some pages of each prompt. `device`: "cuda" if the
    connector needs one. `modules`: Python modules that it needs.
    """

    name: str
    kv_transfer_config: dict[str, Any]
    description: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    store: Sequence[str] = ()
    evict: str = ""
    device: str = ""
    modules: Sequence[str] = ()


def load(path: Path) -> Configuration:
    """Read a file with these fields, or with a bare `kv_transfer_config`.

    Raises ConfigurationError.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    if isinstance(found, dict) and "kv_connector" in found:
        found = {"kv_transfer_config": found}
    config = found.get("kv_transfer_config") if isinstance(found, dict) else None
    if not isinstance(config, dict) or "kv_connector" not in config:
        raise ConfigurationError(
            f"{path} names no connector: write a kv_transfer_config with kv_connector in it"
        )
    if unknown := sorted(found.keys() - set(FIELDS)):
        raise ConfigurationError(
            f"{path} has unknown fields: {', '.join(unknown)}; known are {', '.join(FIELDS)}"
        )
    for name, value in found.items():
        if wanted := _kind_lacking(name, value):
            raise ConfigurationError(f"{path}: {name} must be {wanted}")
    return Configuration(path.stem, **found)


def _kind_lacking(name: str, value: Any) -> str:
    """Return what a field's value must be, if it is something else."""
    if name == "environment":
        fits = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
        return "" if fits else 'an object of texts, {"NAME": "VALUE"}'
    if name in ("store", "modules"):
        fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
        return "" if fits else 'a list of texts, ["PROGRAM", "ARGUMENT"]'
    return "" if name == "kv_transfer_config" or isinstance(value, str) else "a text"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Store:
    """A configuration with its store: placeholders replaced, program running."""

    def __init__(self, configuration: Configuration, folder: Path, python: str) -> None:
        self.configuration = configuration
        self.folder = folder
        self._python = python
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / "store.log"
        self.used_for = "the import of vLLM"  # then the model and its case, for a message
        self.renew("data")

    def renew(self, name: str) -> None:
        """Continue with an empty folder and other ports; the program must be started again."""
        self.kill()
        data = self.folder / name
        data.mkdir(exist_ok=True)
        self.names = {
            "folder": str(data),
            "port": str(free_port()),
            "port2": str(free_port()),
            "python": self._python,
            "here": str(HERE / "configurations"),
        }

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        found: dict[str, Any] = self._filled(self.configuration.kv_transfer_config)
        return found

    @property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = self._filled(dict(self.configuration.environment))
        return found

    @property
    def has_program(self) -> bool:
        return bool(self.configuration.store)

    def start(self) -> None:
        """Start the program, if there is one, and wait until it listens. Raises StoreFailed."""
        if not self.has_program:
            return
        command = self._filled(list(self.configuration.store))
        with self._log.open("a") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    text=True,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise StoreFailed(f"{command[0]} can not be run: {error.strerror}") from error
        end = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise StoreFailed(f"{shlex.join(command)} does not listen: {self._last_line()}")
            time.sleep(0.05)

    def ensure(self) -> None:
        """Start the program again if a case has left it dead."""
        if self.has_program and self._process is None:
            self.start()

    def kill(self) -> None:
        """Kill the program, with no time to save anything."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def evict(self) -> None:
        """Run the command that removes some pages. Raises StoreFailed."""
        done = subprocess.run(
            self._filled(self.configuration.evict),
            shell=True,
            capture_output=True,
            text=True,
            env={**os.environ, **self.environment},
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise StoreFailed(f"evict ended with {done.returncode}: {lines[-1]}")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(self.names["port"])), 1.0).close()
            return True
        return False

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            for name, text in self.names.items():
                value = value.replace(f"{{{name}}}", text)
            return os.path.expandvars(value)
        if isinstance(value, dict):
            return {name: self._filled(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        return value
