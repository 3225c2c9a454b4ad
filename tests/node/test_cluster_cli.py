"""`kvstore` against a cluster: one screen of its members, whose a key is, and every command as with one node."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import app
from kvstore.cluster.view import Member, View
from node.server import Node


@pytest.fixture
def fleet(start_node: Any) -> list[Node]:
    nodes = [start_node() for _ in range(2)]
    members = tuple(Member(f"n{i}", f"127.0.0.1:{node.grpc.port}", 1.0 + i) for i, node in enumerate(nodes))
    for number, node in enumerate(nodes):
        node.service.membership.view, node.service.membership.member = View("fleet", 1, members), f"n{number}"
    return nodes


@pytest.fixture
def kvstore(fleet: list[Node], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{fleet[0].grpc.port}")
    monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "5")
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="kvstore")


def test_members_and_shares(fleet: list[Node], kvstore: Any) -> None:
    shown = kvstore("cluster")
    assert shown.exit_code == 0
    assert "cluster fleet  view 1  members 2, 2 answer" in shown.stdout
    assert "33.3 %" in shown.stdout
    found = json.loads(kvstore("cluster", "--json").stdout)
    assert [member["answers"] for member in found["members"]] == [True, True]
    assert [member["weight"] for member in found["members"]] == [1.0, 2.0]


def test_a_member_that_is_away(fleet: list[Node], kvstore: Any, connect: Any, pages: Any) -> None:
    pages.put(connect(fleet[0]), pages.keys(*range(20)))
    view = View("fleet", 2, (*fleet[0].service.membership.view.members, Member("gone", "127.0.0.1:9")))
    fleet[0].service.membership.view = view
    shown = kvstore("cluster")
    assert shown.exit_code == 3
    assert "DOES NOT ANSWER" in shown.stdout
    assert "127.0.0.1:9: " in shown.stderr
    assert kvstore("status").exit_code == 0
    assert kvstore("ls").exit_code == 0


def test_commands_work_as_with_one_node(fleet: list[Node], kvstore: Any, connect: Any, pages: Any) -> None:
    keys = pages.keys(*range(20))
    pages.put(connect(fleet[1]), keys)
    known = [key.hex() for key in keys]
    listed = json.loads(kvstore("ls", "--model", pages.namespace.model, "--json").stdout)
    assert [page["prefix_hash"] for page in listed] == sorted(known)
    owners = json.loads(kvstore("cluster", "owners", *known[:4], "--json").stdout)
    assert {some for found in owners for some in found["owners"]} <= {"n0", "n1"}
    assert [found["prefix_hash"] for found in owners] == known[:4]
    assert "(127.0.0.1:" in kvstore("cluster", "owners", known[0]).stdout
    assert kvstore("lookup", *known).exit_code == 0
    assert kvstore("verify", *known).exit_code == 0
    assert json.loads(kvstore("status", "--json").stdout)["namespaces"][0]["page_count"] == 20
    assert kvstore("rm", *known).exit_code == 0
    assert [node.tier.visible_count for node in fleet] == [0, 0]


def test_one_member_alone(fleet: list[Node], kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvstore("top", "--once").exit_code == 0
    assert "no disk tier" in kvstore("scrub").stderr
    one = os.environ["KVSTORE_ADDRESS"]
    monkeypatch.setenv("KVSTORE_ADDRESS", f"{one},127.0.0.1:9")
    for command in ("top", "scrub", "recover"):
        refused = kvstore(command)
        assert (refused.exit_code, "names 2 nodes, and this is asked of one" in refused.stderr) == (2, True)
        assert "asked of one" not in kvstore(command, *(("--once",) if command == "top" else ()), "-a", one).stderr
    monkeypatch.setenv("KVSTORE_ADDRESS", one)
    monkeypatch.setenv("KVSTORE_DIRECT", "1")
    assert json.loads(kvstore("status", "--json").stdout)["state"] == "SERVING"
    assert kvstore("cluster").exit_code == 2
    monkeypatch.setenv("KVSTORE_DIRECT", "maybe")
    assert "KVSTORE_DIRECT='maybe' must be one of" in kvstore("status").stderr
