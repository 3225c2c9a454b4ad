"""Write to stdout and stderr: JSON, tables, sizes for people, progress.

It also defers Ctrl-C to a safe point.
"""

import io
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.messages import plain
from kvstore.units import parse_nbytes

if TYPE_CHECKING:
    from kvstore.results.replies import NodeStatus

NOTHING = ("", "-", "0", "0 B", "0 B/s")  # cells that mean nothing or zero
GAP = 2  # spaces between two columns of a dense table
DIGITS_MIN = 12  # of a key that is cut
NAME_MIN = 20  # cells of a text that is cut or folded, such as a model
PIPE_COLUMNS = 4000  # a pipe has no width: nothing is cut or folded

Report = Callable[[float], None]


class Unwritten(Exception):
    """Output could not be written.

    If the reader has left, that is BrokenPipeError instead.
    """


class _Raw(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Unwritten(f"stdout can not be written: {error.strerror}") from error


def guard_stdout() -> None:
    """Replace Python's stdout by one that raises `Unwritten`, and is otherwise the same.

    So a failure of stdout can be told from any other error, wherever something is printed and when
    the buffer is flushed at the end. A character that the terminal's encoding lacks becomes "?".
    """
    own = sys.stdout
    if not isinstance(own, io.TextIOWrapper):  # None: it is closed
        return
    raw = _Raw(own.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if own.write_through else io.BufferedWriter(raw),
        encoding=own.encoding,
        errors="replace",  # also for surrogateescape, which the C locale has
        line_buffering=own.line_buffering,
        write_through=own.write_through,
    )


def silence(stream: IO[str]) -> None:
    """Send the rest of a stream to /dev/null: the flush at the end would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; rich would exit with status 1, which means a miss here."""
        raise BrokenPipeError


def console() -> Console:
    """Return a console of the terminal's width, or a wide one in a pipe."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def emit(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(value, allow_nan=False))


def note(text: str) -> None:
    """Print a remark on stderr, on one line; ignore a closed stderr."""
    try:
        print(printable(text), file=sys.stderr)
    except OSError:
        silence(sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], dense: bool = False) -> Table:
    """Build a table; columns whose header starts with '>' are right-aligned.

    Cells are shown as they are.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=dense)
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def show(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    console().print(table(columns, rows))


def show_fitting(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], prose: str | None = None
) -> None:
    """Print a table that fits the terminal, as `fitting` does; a pipe gets all of it."""
    out = console()
    out.print(fitting(columns, rows, out.width, prose))


def show_keyed(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    full: bool = False,
    fold: bool = False,
) -> None:
    """Print a table whose first column has keys in hex; on a terminal they are cut to fit.

    A cut key is still the start of one row only, so that it can be copied. `full` keeps whole keys.
    `fold` wraps other columns where they do not fit, instead of leaving them out.
    """
    out = console()
    keys = [str(row[0]) for row in rows]
    if out.is_terminal and keys and not full:
        widths = _widths(columns[1:], [row[1:] for row in rows])
        room = out.width - sum(width + GAP for width in widths)
        digits = max(unique_digits(keys), min(room, max(map(len, keys))))
        rows = [(key[:digits], *row[1:]) for key, row in zip(keys, rows, strict=True)]
    if full:  # the terminal wraps whole lines; folded keys could not be copied
        _Console(highlight=False, width=PIPE_COLUMNS).print(table(columns, rows, dense=True))
    else:
        out.print(table(columns, rows, dense=True) if fold else fitting(columns, rows, out.width))


def unique_digits(keys: Sequence[str]) -> int:
    """Return how many leading digits tell these keys apart, at least DIGITS_MIN."""
    ordered = sorted(set(keys))
    digits = DIGITS_MIN
    for one, other in itertools.pairwise(ordered):
        while one[:digits] == other[:digits]:
            digits += 1
    return digits


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int, prose: str | None = None
) -> Table:
    """Build a table that fits the width.

    Empty columns are dropped first. Then texts are cut in the middle, except for the first column
    and the column `prose`, which is folded. If that is not enough, the last columns are dropped.
    """
    widths = _widths(columns, rows)
    said = [any(_text(row[place]) not in NOTHING for row in rows) for place in range(len(columns))]
    least = [
        width if column.startswith(">") or not place else min(width, max(NAME_MIN, len(column)))
        for place, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    kept = list(range(len(columns)))

    def excess(sizes: Sequence[int]) -> int:
        return sum(sizes[place] + GAP for place in kept) - GAP - width

    for sizes, may_go in ((widths, lambda place: not said[place]), (least, lambda place: place)):
        for place in [place for place in reversed(kept) if may_go(place)]:
            if excess(sizes) > 0:
                kept.remove(place)
    while excess(widths) > 0 and any(widths[place] > least[place] for place in kept):
        widest = max(kept, key=lambda place: (widths[place] > least[place]) * widths[place])
        widths[widest] -= 1
    folded = [place for place in kept if columns[place] == prose]
    made = table(
        [columns[place] for place in kept],
        [
            [row[place] if place in folded else _cut(row[place], widths[place]) for place in kept]
            for row in rows
        ],
        dense=True,
    )
    for place in folded:  # rich would narrow other columns, too
        made.columns[kept.index(place)].width = widths[place]
    return made


def _cut(value: Any, width: int) -> str:
    """Return a cell's text with an ellipsis in its middle if it is wider than `width` cells."""
    text = _text(value)
    if cell_len(text) <= width:
        return text
    tail = width // 2
    end = set_cell_size(text[::-1], tail)[::-1]
    return f"{set_cell_size(text, width - 1 - tail)}…{end}"


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
    """Return the width of each column."""
    return [
        max(map(cell_len, (column.removeprefix(">"), *(_text(row[place]) for row in rows))))
        for place, column in enumerate(columns)
    ]


def _cell(value: Any) -> str:
    return _text(value).replace("[", r"\[")  # brackets are markup to rich


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def printable(text: str) -> str:
    """Escape control characters: other users, and nodes, choose names and texts."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def human_nbytes(nbytes: float) -> str:
    """Format bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_count(count: float) -> str:
    """Format a count: 16505817 -> '16.5 M'."""
    for unit, least in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if count >= least:
            return f"{count / (1e3 if unit == 'k' else least):,.1f} {unit}"
    return f"{count:,.0f}"


def human_ms(ms: float) -> str:
    """Format milliseconds: 95000 -> '1.6 min'."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= length:
            return f"{ms / length:.1f} {unit}"
    return f"{ms:.0f} ms"


def human_latency(ms: float) -> str:
    """Format a short duration with two or three digits: 0.123 -> '123 µs', 4.56 -> '4.6 ms'."""
    if ms < 1:
        return f"{1000 * ms:.0f} µs"
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def human_share(part_nbytes: int, whole_nbytes: int) -> str:
    """Format a part of a whole: (10, 40 << 30) -> "0 % of 40.0 GiB"; "-" of nothing."""
    return (
        f"{100 * part_nbytes / whole_nbytes:.0f} % of {human_nbytes(whole_nbytes)}"
        if whole_nbytes
        else "-"
    )


def percent(part: float, whole: float) -> str:
    """Format a percentage; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def option_nbytes(text: str, option: str) -> int:
    """Parse a size option. Raises InvalidRequest, which names the option."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise InvalidRequest(f"{option} {error}") from error


def option_sizes(texts: Sequence[str] | None, option: str) -> tuple[int, ...]:
    """Parse a repeatable size option with commas; return each size once, ascending."""
    return tuple(
        sorted({option_nbytes(part, option) for text in texts or () for part in text.split(",")})
    )


def told_all(status: "NodeStatus") -> bool:
    """Return whether a status is complete.

    An identity of one tenant sees its own pages only.
    """
    return bool(status.ram)


def pages_told(status: "NodeStatus") -> int:
    """Return the visible pages in RAM: all, or the tenant's own."""
    return (
        status.ram.page_count
        if told_all(status)
        else sum(info.page_count for info in status.namespaces)
    )


def status_json(status: "NodeStatus") -> dict[str, Any]:
    """Convert a node's status to JSON values; what the caller may not see is null."""
    values = plain(status)
    if told_all(status):
        return values
    return {name: value if getattr(status, name) else None for name, value in values.items()}


@contextmanager
def progress(what: str, total: float) -> Iterator[Report]:
    """Show a progress bar on stderr if that is a terminal.

    The body calls the yielded function with the amount done so far. Ctrl-C takes effect in that
    call.
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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Give the body a function that raises KeyboardInterrupt if Ctrl-C was pressed since.

    KeyboardInterrupt may surface between any two bytecodes. Inside gRPC's Python code that can
    leave one of its locks held, and closing the channel then never returns (seen with grpcio 1.85).
    So the first Ctrl-C takes effect only where the command allows it. A second one does at once.
    """
    # only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    def safe_point() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield safe_point
    except KVStoreError:
        # a node that we started got the Ctrl-C as well: report the interrupt, not the lost node
        safe_point()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
