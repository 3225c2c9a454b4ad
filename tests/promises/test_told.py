"""golden/names/json.json: the fields that commands print with --json, by which scripts find what
they want.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from told import told

from kvstore.cli.commands import app

PROMISED = json.loads((Path(__file__).parents[1] / "golden" / "names" / "json.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return told(tmp_path_factory.mktemp("told"))


@pytest.mark.parametrize("command", PROMISED)
def test_a_command_prints_every_field_that_it_did(
    command: str, found: dict[str, list[str]]
) -> None:
    """One that is missing is a script that breaks; what is new may be there.

    `make golden` records it.
    """
    assert [name for name in PROMISED[command] if name not in found[command]] == []


def commands(group: Any, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{path}{name}"
        yield from commands(command, f"{path}{name} ") if hasattr(command, "commands") else ()


def test_every_command_is_asked(found: dict[str, list[str]]) -> None:
    groups = {"tokens", "certs"}  # which do nothing by themselves
    assert {name.partition(" of ")[0] for name in found} == set(
        commands(typer.main.get_command(app))
    ) - groups
