"""End a command: exit codes, and one line on stderr for every error.

0    ok
1    miss, not found, nothing matched
2    usage or invalid request
3    node unavailable, or deadline exceeded
4    exhausted
5    corrupt data or mismatches
74   the output can not be written
130  interrupted
141  the reader of stdout has left
"""

import enum
import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

from kvstore.cli.help import Group
from kvstore.cli.output import Unwritten, note, printable, silence
from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    KVStoreError,
    ProtocolError,
    Unavailable,
    UnknownNamespace,
)


class ExitCode(enum.IntEnum):
    """Enumerate the exit codes of the command line."""

    OK = 0
    MISS = 1
    USAGE = 2
    UNAVAILABLE = 3
    EXHAUSTED = 4
    CORRUPT = 5
    UNWRITTEN = 74  # the code of sysexits.h, because scripts interpret 1 to 5
    INTERRUPTED = 130
    BROKEN_PIPE = 141


# All other errors are for the caller to correct: USAGE.
_CODES: dict[type[KVStoreError], ExitCode] = {
    UnknownNamespace: ExitCode.MISS,
    Unavailable: ExitCode.UNAVAILABLE,
    DeadlineExceeded: ExitCode.UNAVAILABLE,
    ProtocolError: ExitCode.UNAVAILABLE,
    Exhausted: ExitCode.EXHAUSTED,
}


def code_of(error: KVStoreError) -> ExitCode:
    """Return the exit code of an error."""
    return _CODES.get(type(error), ExitCode.USAGE)


# From 0.25 on typer bundles its own copy of click, so its classes are taken from typer.
_UsageError: Any = typer.BadParameter.__base__
_ClickException: Any = _UsageError.__base__


class Failure(Exception):
    """The command could not do what it was asked to do; it has printed no output."""

    def __init__(self, message: str, code: ExitCode = ExitCode.MISS) -> None:
        super().__init__(message)
        self.code = code


class Root(Group):
    """The root command: the one place where exceptions become exit codes."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command and exit with its code; errors are one line on stderr."""
        given = list(sys.argv[1:] if args is None else args)
        self._as_json = "--json" in given
        options["standalone_mode"] = False
        if sys.stdout is None:  # the output would be lost without an error
            sys.exit(
                self._fail(
                    "stdout is closed; redirect it to /dev/null if it is not needed",
                    ExitCode.UNWRITTEN,
                )
            )
        sys.exit(self._run(given, *rest, **options))

    def _run(self, args: list[str], *rest: Any, **options: Any) -> int:
        try:
            try:
                result = super().main(args, *rest, **options)
            finally:
                sys.stdout.flush()
            return result if isinstance(result, int) else ExitCode.OK
        except KVStoreError as error:
            return self._fail(str(error), code_of(error), type(error).__name__)
        except Failure as failure:
            return self._fail(str(failure), failure.code)
        except _ClickException as error:
            return self._fail(_usage_message(error), ExitCode.USAGE)
        except UnicodeEncodeError as error:  # an argument: its bytes are kept as surrogates
            return self._fail(f"{error.object[:80]!r} is not UTF-8", ExitCode.USAGE)
        except (KeyboardInterrupt, typer.Abort):
            return self._fail("interrupted", ExitCode.INTERRUPTED)
        except BrokenPipeError:
            return leave_broken_pipe()
        except Unwritten as error:
            silence(sys.stdout)
            return self._fail(
                f"{error}; the rest of the command was carried out", ExitCode.UNWRITTEN
            )

    def _fail(self, message: str, code: ExitCode, kind: str = "") -> int:
        """Print an error and return the code; `kind` is the error's class."""
        message = " ".join(message.split())
        if self._as_json:
            message = json.dumps({"error": message, "kind": kind or code.name.title()})
        else:
            message = printable(f"kvstore: {message}")
        note(message)
        return code


def _usage_message(error: Any) -> str:
    """Return what is wrong with the command line, and which --help explains it."""
    message: str = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
        message = "Missing command"
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return message
    end = " See" if message.endswith("?") else "; see"
    return f"{message.rstrip('.')}{end} {ctx.command_path} --help"


def leave_broken_pipe() -> int:
    """Discard all further output after stdout was closed, also at the interpreter's end."""
    silence(sys.stdout)
    return ExitCode.BROKEN_PIPE
