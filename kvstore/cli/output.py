"""What goes to stdout and stderr: JSON, tables, sizes for people, progress."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.cli.interrupts import deferred_interrupt

PIPE_COLUMNS = 4000  # a pipe has no width: nothing is cut or folded there

Report = Callable[[float], None]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with status 1, which means a miss here."""
        raise BrokenPipeError


def console() -> Console:
    return _Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def emit(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value, allow_nan=False))


def note(text: str) -> None:
    """A remark for people, out of the way of the output."""
    print(text, file=sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Columns whose header starts with '>' are right-aligned. Cells are shown as they are."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def show(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    console().print(table(columns, rows))


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("[", r"\[")  # brackets are markup to rich


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON values: every field, bytes as hex."""
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        repeated = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        values[field.name] = [_plain(item) for item in value] if repeated else _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return plain(value) if hasattr(value, "DESCRIPTOR") else value


def human_nbytes(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_ms(ms: float) -> str:
    """95000 -> '1.6 min'."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= length:
            return f"{ms / length:.1f} {unit}"
    return f"{ms:.0f} ms"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


@contextmanager
def progress(what: str, total: float) -> Iterator[Report]:
    """A progress bar on stderr if that is a terminal. The body reports how much is done so far.

    Reporting is also where Ctrl-C takes effect.
    """
    with deferred_interrupt() as safe_point, _bar(what, total) as advance:

        def report(done: float) -> None:
            safe_point()
            advance(done)

        yield report


@contextmanager
def _bar(what: str, total: float) -> Iterator[Report]:
    if not sys.stderr.isatty():  # a disabled Progress of older rich still prints a newline
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
