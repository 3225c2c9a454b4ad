"""Typer's runner of commands in this process, which builds the commands of an app once.

A run changes nothing of them, and building them takes as long as most of the runs.
"""

import functools

import typer.main
import typer.testing
from typer.testing import CliRunner as CliRunner

typer.testing._get_command = functools.cache(typer.main.get_command)
