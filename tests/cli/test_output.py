"""Tables that fit a terminal."""

from rich.console import Console

from kvstore.cli.output import fitting

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


def test_control_characters_in_names_are_escaped() -> None:
    out = Console(width=200, force_terminal=True, color_system=None)
    with out.capture() as captured:
        out.print(fitting(("MODEL", "SALT"), [("\x1b]0;mine\x07llama\nteam-z", "\u202ená\r")], 200))
    assert [line.split() for line in captured.get().splitlines()][2:] == [
        ["\\x1b]0;mine\\x07llama\\nteam-z", "\\u202ená\\r"]
    ]
