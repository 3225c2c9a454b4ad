"""docs/reference/limits.md has a row for each limit of a node."""

import pathlib
import re
import socket

import pytest
from gateways import servicer_of

from node.server import Node
from node.serving import limits
from node.serving.reference import CAPS

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_every_limit_has_its_row(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function makes all limits, so those of a started node are complete."""
    assert node.shm is not None
    servicer, calls = servicer_of(node), node.grpc.calls
    budgets = [
        node.service.requests,
        node.sessions.reserved,
        node.sessions.held,
        node.service.followers._budget,
    ]
    budgets += node.service._long_calls.values()
    budgets += [calls.calls, calls.transfers, calls.durable, calls.loads]
    places = [node.bulk._limiter, node.shm._limiter, node.metrics._limiter, *servicer.limiters]
    with socket.socket() as unused:
        door = node.grpc.open_door("one more", unused)
    door._spare.close()
    places += [door._limiter]
    assert node.console is not None
    budgets += [node.console.watchers, node.console.calls, node.console.reads]
    caps = [one.cap for one in budgets] + [one.cap for one in places]
    assert {cap.what for cap in caps} == set(CAPS)
    for cap in caps:
        if re.fullmatch(r"[\d,]+", CAPS[cap.what].size):
            assert cap.total == int(CAPS[cap.what].size.replace(",", "")), cap.what
    assert all(0 < cap.per_peer <= cap.total for cap in caps)
    sources = [path.read_text() for path in (ROOT / "node").rglob("*.py")]
    made = (
        sum(len(re.findall(r"\bmake_limit\(", text)) for text in sources) - 1
    )  # minus its definition
    assert made == len(caps) - len(limits.LONG_CALLS) + 1, "a limit that this test does not know"
