"""docs/operations.md, "Limits": every cap has its row, and every row its test."""

import pathlib
import re
from typing import Any

from node.serve import limits
from node.server import Node

ROOT = pathlib.Path(__file__).parent.parent.parent


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.split("## Limits\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [cells for cells in lines[2:] if cells]


def test_every_row_of_the_table_names_tests_that_exist() -> None:
    there = {
        name
        for folder in ("node", "disk")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(rows()) > 15
    for row in rows():
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert named, f"{row[0]} has no test"
        assert set(named) <= there, f"{row[0]}: {set(named) - there} do not exist"


def test_every_cap_has_its_row(node: Node, monkeypatch: Any) -> None:
    """Caps are made by one function; those of a node that starts are all of them."""
    assert node.shm is not None
    servicer = node.grpc._servicer
    budgets = [node.service.requests, node.sessions.reserved, node.sessions.held, servicer._transfers]
    budgets += node.service._long_calls.values()
    places = [node.bulk._places, node.shm._places, servicer._calls, servicer._health_calls, servicer._reflections]
    places += [node.metrics._places]
    caps = [one.cap for one in (*budgets, *places)] + [node.grpc._connections._cap]
    told = {name.strip() for row in rows() for name in row[0].split(",")}
    assert {cap.what for cap in caps} <= told
    assert all(0 < cap.per_peer <= cap.total for cap in caps)
    sources = [path.read_text() for path in (ROOT / "node").rglob("*.py")]
    made = sum(len(re.findall(r"\bcap\(", text)) for text in sources) - 1  # its definition
    assert made == len(caps) - len(limits.LONG_CALLS) + 1, "a cap that this test does not know"
