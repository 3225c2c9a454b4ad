"""Draw `kvstore top`: a table that is sorted, filtered and scrolled, and the keys that do it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvstore.cli.output import fitting, table
from kvstore.cli.top.keyboard import BACKSPACE, ENTER, ESCAPE
from kvstore.errors import InvalidRequest

# Lines beside the rows: an empty one, the head of the table and its line, the sums, the line about
# rows that are not shown, and the cursor.
OTHER_LINES = 7
OPERATION_COLUMNS = ("OPERATION", ">/s", ">p50", ">p99")
OPERATION_LINES = 3  # an empty one, the head and its line
OPERATION_ROWS_MAX = 6
KEYS = "q quit  s sort  r reverse  / filter  p pause  ? help"
HELP = """
  q, Ctrl-C        quit
  s, S             sort by the next, or the previous column; then by none
  r                reverse the order
  /                filter: type a text, Enter keeps it, Esc clears it
  p, space         pause, and go on
  up, down, k, j   scroll
  ?                this help; any key leaves it

  Times are those of answered requests in the last interval, by the node's
  clock: p50 is the median, and 1 % took longer than p99.
"""


class Cell(NamedTuple):
    """A cell: its text, and the value that it is sorted by; None is last."""

    text: str
    value: float | str | None = None


class Board(NamedTuple):
    """One sample, ready to be drawn. A column whose name starts with > is right-aligned."""

    head: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: Sequence[str]
    operations: Sequence[Sequence[str]]
    what: str  # the rows are these, in the plural
    urgent: Sequence[int] = ()  # rows with a problem, shown first where not all fit


@dataclass
class Controls:
    """Settings that keys change. `sort`: the name of a column in capitals; empty: none."""

    sort: str = ""
    reverse: bool = False
    text: str = ""
    paused: bool = False
    help: bool = False
    typing: bool = False
    first: int = 0  # row at the top
    note: str = field(default="")

    def press(self, key: str, columns: Sequence[str]) -> bool:
        """Apply a key; return False if it ends the program."""
        if self.help:
            self.help = False
            return True
        if self.typing:
            self._type(key)
            return True
        if key == "q":
            return False
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
        if key in moves:
            self.first = max(0, self.first + moves[key])
        elif key in ("s", "S"):
            self._sort(columns, 1 if key == "s" else -1)
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "/":
            self.typing, self.first = True, 0
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key == "?":
            self.help = True
        elif key == ESCAPE:
            self.text = ""
        return True

    def _type(self, key: str) -> None:
        if key == ENTER:
            self.typing = False
        elif key == ESCAPE:
            self.typing, self.text = False, ""
        elif key == BACKSPACE:
            self.text = self.text[:-1]
        elif len(key) == 1:
            self.text += key

    def _sort(self, columns: Sequence[str], step: int) -> None:
        names = ["", *map(name_of, columns)]
        place = names.index(self.sort) if self.sort in names else 0
        self.sort, self.reverse, self.first = names[(place + step) % len(names)], False, 0


def name_of(column: str) -> str:
    """Return a column's name without its alignment."""
    return column.removeprefix(">")


def sort_column(text: str, columns: Sequence[str]) -> str:
    """Return the column that --sort names. Raises InvalidRequest."""
    names = [name_of(column) for column in columns]
    found = [name for name in names if name.lower() == text.strip().lower()]
    if text and not found:
        known = ", ".join(name.lower() for name in names)
        raise InvalidRequest(f"--sort {text!r} is no column; columns are {known}")
    return found[0] if found else ""


def arranged(board: Board, controls: Controls) -> list[int]:
    """Return the indices of the rows that pass the filter, in order.

    Numbers are sorted from the largest, texts from A; without a value a row is last.
    """
    wanted = controls.text.casefold()
    kept = [
        index
        for index, row in enumerate(board.rows)
        if not wanted or any(wanted in cell.text.casefold() for cell in _names(board, row))
    ]
    names = [name_of(column) for column in board.columns]
    if controls.sort not in names:
        return kept
    place = names.index(controls.sort)
    value: Callable[[int], Any] = lambda index: board.rows[index][place].value  # noqa: E731
    known = [index for index in kept if value(index) is not None]
    falls = any(isinstance(value(index), float | int) for index in known)
    ordered = sorted(known, key=value, reverse=falls is not controls.reverse)
    return ordered + [index for index in kept if value(index) is None]


def _names(board: Board, row: Sequence[Cell]) -> list[Cell]:
    """Return the left-aligned cells, which are names."""
    return [cell for cell, name in zip(row, board.columns, strict=True) if name[:1] != ">"]


def draw(board: Board, controls: Controls, out: Console, keys: bool = False) -> Group:
    """Draw a sample; on a terminal it does not exceed the screen."""
    if controls.help:
        return Group(Text(HELP))
    cut = out.is_terminal  # folded lines would push rows off the screen
    head = Text(no_wrap=cut, overflow="ellipsis" if cut else None)
    head.append("\n".join(board.head) + "\n")
    indices, operations = arranged(board, controls), board.operations[:OPERATION_ROWS_MAX]
    room = len(indices)
    if cut:
        room = out.height - OTHER_LINES - len(board.head) - keys
        if room - OPERATION_LINES - len(operations) >= len(indices):
            room -= OPERATION_LINES + len(operations)
        else:
            operations = ()
        room = max(1, room)
    if not controls.sort and len(indices) > room:
        indices.sort(key=lambda index: index not in board.urgent)
    controls.first = min(controls.first, max(0, len(indices) - room))
    shown = indices[controls.first : controls.first + room]
    rows: list[Sequence[Any]] = [[cell.text for cell in board.rows[index]] for index in shown]
    parts: list[RenderableType] = [
        head,
        fitting(_marked(board, controls), [*rows, board.total], out.width),
    ]
    if len(shown) < len(board.rows):
        hidden = len(indices) - len(shown)
        said = [f"and {hidden:,} more {board.what}"] if hidden else []
        if len(indices) < len(board.rows):
            said.append(f"{len(indices):,} of {len(board.rows):,} {board.what} match")
        parts.append(Text(", ".join(said)))
    if operations:
        parts += [Text(), table(OPERATION_COLUMNS, operations, dense=True)]
    if keys:
        parts.append(Text(_status(controls), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _marked(board: Board, controls: Controls) -> list[str]:
    """Return the columns, with a mark at the one that sorts."""
    mark = "↑" if controls.reverse else "↓"
    return [
        f"{column}{mark}" if name_of(column) == controls.sort else column
        for column in board.columns
    ]


def _status(controls: Controls) -> str:
    if controls.typing:
        return f"filter: {controls.text}_   Enter keeps it, Esc clears it"
    said = [
        "PAUSED" if controls.paused else "",
        controls.note,
        f"sorted by {controls.sort}" if controls.sort else "",
        f"filter {controls.text!r}" if controls.text else "",
        KEYS,
    ]
    return "  ".join(filter(None, said))
