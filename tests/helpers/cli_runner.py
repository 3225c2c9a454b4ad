"""Typer's runner of commands in this process, which builds the commands of an app once.

A run changes nothing of them, and building them takes as long as most of the runs.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner as CliRunner

from kvstore.cli.commands import app

typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


class Ran:
    """A finished command."""

    def __init__(self, result: Any) -> None:
        self.code: int = result.exit_code
        self.stdout: str = result.stdout
        self.data: bytes = result.stdout_bytes
        self.stderr: str = result.stderr

    @property
    def json(self) -> Any:
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)

    @property
    def error(self) -> dict[str, str]:
        """The last line of stderr, of a command with --json."""
        error: dict[str, str] = json.loads(self.stderr.strip().splitlines()[-1])
        return error


Kvstore = Callable[..., Ran]


def run_kvstore(*args: str, stdin: bytes = b"") -> Ran:
    ran = CliRunner().invoke(app, list(args), input=stdin, prog_name="kvstore")
    # Whatever happens, a command ends by itself: an exception here would be a traceback for its
    # user.
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return Ran(ran)
