"""Run commands in this process with typer, whose command tree is built only once.

Runs do not modify the tree, and building it takes as long as most runs.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner as CliRunner

from kvstore.cli.commands import build

typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


class Ran:
    """The result of a finished command."""

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
        """Return the last line of stderr, parsed, of a command with --json."""
        error: dict[str, str] = json.loads(self.stderr.strip().splitlines()[-1])
        return error


Kvstore = Callable[..., Ran]


def run_kvstore(*args: str, stdin: bytes = b"") -> Ran:
    ran = CliRunner().invoke(build(), list(args), input=stdin, prog_name="kvstore")
    # A command must always exit by itself: an exception here would be a traceback for the user.
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return Ran(ran)
