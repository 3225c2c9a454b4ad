"""Commands still print all JSON fields in golden/names/json.json, on which scripts rely."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from told import told

from kvstore.cli.commands import build

PROMISED = json.loads((Path(__file__).parents[1] / "golden" / "names" / "json.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return told(tmp_path_factory.mktemp("commands"))


@pytest.mark.parametrize("command", PROMISED)
def test_command_prints_every_recorded_field(command: str, found: dict[str, list[str]]) -> None:
    """A command prints every recorded field; a missing one would break scripts.

    New fields are allowed; `make golden` records them.
    """
    assert [name for name in PROMISED[command] if name not in found[command]] == []


def commands(group: Any, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{path}{name}"
        yield from commands(command, f"{path}{name} ") if hasattr(command, "commands") else ()


def test_recording_covers_every_command(found: dict[str, list[str]]) -> None:
    groups = {"tokens", "certs", "context", "identities", "tenants"}  # groups of commands
    endless = {"events"}  # tests/cli/test_events.py reads its output
    assert {name.partition(" of ")[0] for name in found} == set(
        commands(typer.main.get_command(build()))
    ) - groups - endless


def test_every_command_prints_objects_with_one_vocabulary(found: dict[str, list[str]]) -> None:
    """Bytes are `nbytes` or `*_nbytes`, times end with `_s` or `_ms`; no output is a bare list."""
    # The field of a message: calls that were refused after too many bytes.
    stable = "refused_bytes"
    for command, names in found.items():
        assert not [name for name in names if name.startswith("[]")], command
        words = {part.removesuffix("[]") for name in names for part in name.split(".")}
        wrong = [
            word
            for word in words - {stable}
            if re.search(r"(^|_)(bytes|seconds|secs|millis|mb|gib)(_|$)", word)
        ]
        assert not wrong, command
