"""Tables that fit a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli import output
from kvstore.cli.output import fitting, note
from kvstore.security.certificates import date

COLUMNS = ("MEMBER", ">IDLE", ">RAM", "ZONE")
ROWS = [("n1", 0, "7 %", "r1"), ("n[2]", "-", "12 %", "r2")]


def lines(width: int) -> list[str]:
    out = Console(width=width)
    with out.capture() as captured:
        out.print(fitting(COLUMNS, ROWS, width))
    return [" ".join(line.split()) for line in captured.get().splitlines() if "─" not in line]


def test_narrow_table_drops_empty_columns_first_then_those_at_the_right() -> None:
    assert lines(24) == ["MEMBER IDLE RAM ZONE", "n1 0 7 % r1", "n[2] - 12 % r2"]
    assert lines(23) == lines(18) == ["MEMBER RAM ZONE", "n1 7 % r1", "n[2] 12 % r2"]
    assert lines(17) == lines(12) == ["MEMBER RAM", "n1 7 %", "n[2] 12 %"]
    assert lines(11) == lines(6) == ["MEMBER", "n1", "n[2]"]


def test_control_characters_in_remarks_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, and other users, choose parts of them."""
    note("n1: \x1b]0;title\x07 DISK STOPPED\nkvstore: all is well")
    assert capsys.readouterr().err == (
        "n1: \\x1b]0;title\\x07 DISK STOPPED\\nkvstore: all is well\n"
    )


def test_time_that_no_calendar_has_is_shown() -> None:
    assert date((1 << 64) / 1000) == "9999-12-31 23:59:59 UTC"


def test_long_names_are_cut_in_the_middle_before_columns_are_dropped() -> None:
    """Regression: at 80 columns a long model name hid itself and every column after it."""
    model = "organisation/llama-" + "x" * 60 + "-instruct-fp8"
    columns = ("NAMESPACE", "MODEL", "TENANT", ">ON DISK", "SALT")
    rows = [("ab" * 6, model, "research-" * 3, 1234, ""), ("cd" * 6, "gpt", "ä", 5, "")]
    out = Console(width=70)
    with out.capture() as captured:
        out.print(fitting(columns, rows, out.width))
    head, _, first, second = captured.get().splitlines()
    assert head.split() == ["NAMESPACE", "MODEL", "TENANT", "ON", "DISK"]
    assert first.split() == ["ab" * 6, "organisati…nstruct-fp8", "research-re…h-research-", "1,234"]
    assert second.split() == ["cd" * 6, "gpt", "ä", "5"]


def test_prose_is_folded_and_identifiers_are_not() -> None:
    """Regression: events at 80 columns broke member ids over two lines."""
    columns = ("MEMBER", "EVENT", "WHAT", "SEEN BY")
    rows = [("n0994cf1e2b729680", "lost", "it left 10.0.0.7:7440 without a drain", "n1 " * 15)]
    out = Console(width=48)
    with out.capture() as captured:
        out.print(fitting(columns, rows, out.width, "WHAT"))
    first, *more = captured.get().splitlines()[2:]
    assert first.split()[:3] == ["n0994cf1e2b729680", "lost", "it"]
    assert " ".join(" ".join(more).split()).endswith("without a drain")


def test_control_characters_in_names_are_escaped() -> None:
    out = Console(width=200, force_terminal=True, color_system=None)
    with out.capture() as captured:
        out.print(fitting(("MODEL", "SALT"), [("\x1b]0;mine\x07llama\nteam-z", "\u202ená\r")], 200))
    assert [line.split() for line in captured.get().splitlines()][2:] == [
        ["\\x1b]0;mine\\x07llama\\nteam-z", "\\u202ená\\r"]
    ]


KEYS = ["ab" * 32, "ab" * 10 + "cd" * 22, "ff" * 32]


def keyed(
    monkeypatch: pytest.MonkeyPatch, width: int, full: bool = False, terminal: bool = True
) -> list[str]:
    def made(**settings: Any) -> Console:
        return Console(**{"width": width, **settings}, file=out, force_terminal=terminal)

    out = io.StringIO()
    monkeypatch.setattr(output, "console", made)
    monkeypatch.setattr(output, "_Console", made)
    rows = [(key, "ram+disk", "256.0 KiB") for key in KEYS]
    output.show_keyed(("KEY", "WHERE", ">SIZE"), rows, full)
    return [line.split()[0] for line in out.getvalue().splitlines() if "ram" in line]


def test_keys_are_cut_to_the_terminal_but_stay_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keyed(monkeypatch, 60) == [key[: 60 - 8 - 9 - 4] for key in KEYS]
    assert keyed(monkeypatch, 40) == [key[:21] for key in KEYS]  # the first digit that differs
    assert keyed(monkeypatch, 100) == KEYS


def test_whole_keys_are_on_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keyed(monkeypatch, 40, full=True) == KEYS
    assert keyed(monkeypatch, output.PIPE_COLUMNS, terminal=False) == KEYS


def test_key_that_begins_another_is_told_apart() -> None:
    assert output.unique_digits(["ab" * 16, "ab" * 17]) == 33
    assert output.unique_digits(["ab" * 16]) == output.unique_digits([]) == output.DIGITS_MIN
