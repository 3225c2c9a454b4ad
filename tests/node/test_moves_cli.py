"""The commands `kvstore cluster drain` and `rebalance`: their effects, output and exit codes."""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from cli_runner import CliRunner
from fleet import tell, view_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import PATIENT, wait_until

from kvstore import Client, ClientConfig
from kvstore.cli import cluster
from kvstore.cli.commands import build
from kvstore.cluster.view import Member, State, View
from node.cluster.drain import DrainTimeouts
from node.server import Node

KEYS = range(30)


@pytest.fixture
def fleet(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    monkeypatch.setattr(cluster, "LOOK_S", 0.02)
    nodes = [start_node() for _ in range(2)]
    be_patient(nodes, 0.3)
    numbers = itertools.count(1)
    tell(nodes, view_of(nodes, number=next(numbers)))
    nodes[1].membership.announcer = lambda state: tell(
        nodes, view_of(nodes, number=next(numbers), n1=state)
    )
    return nodes


def be_patient(nodes: list[Node], seconds: float) -> None:
    """Let drains wait so long for pages that no other member takes."""
    for node in nodes:
        node.peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.02, patience_s=seconds)


@pytest.fixture
def kvstore(fleet: list[Node], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{fleet[0].grpc.port}")
    monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "5")
    return lambda *args: CliRunner().invoke(build(), list(args), prog_name="kvstore")


def test_drain_reports_left_pages(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    pages.put(connect(fleet[0]), pages.keys(*KEYS))
    had = fleet[1].tier.visible_count
    shown = kvstore("cluster", "drain", "n1", "--json")  # the other member does not sweep
    assert json.loads(shown.stdout) == {"member": "n1", "handed": 0, "left": had, "serves": False}
    assert shown.exit_code == 4
    assert "add members or memory" in shown.stderr
    assert kvstore("cluster", "drain", "n1", "--end").stdout == "n1 serves again\n"
    be_patient(fleet, 60.0)
    fleet[0].peers.rebalancer.settle_s = 0.0
    fleet[0].membership.on_view(lambda view: fleet[0].peers.rebalancer.schedule_in(0.0))
    shown = kvstore("cluster", "drain", "n1")
    assert shown.exit_code == 0
    assert shown.stdout == f"n1: {had} pages are with their owners, 0 are not\n"
    assert pages.get(connect(fleet[0]), pages.keys(*KEYS)) == [True] * len(KEYS)


def test_rebalance_repeats_for_left_pages(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    """After adding memory or members a second drain hands over the rest, as the message says."""
    pages.put(connect(fleet[0]), pages.keys(*KEYS))
    had = fleet[1].tier.visible_count
    assert kvstore("cluster", "drain", "n1").exit_code == 4
    be_patient(fleet, 60.0)
    fleet[0].peers.rebalancer.schedule_in(0.0)
    wait_until(lambda: fleet[0].tier.visible_count == len(KEYS))
    shown = kvstore("cluster", "drain", "n1")
    assert (shown.exit_code, shown.stdout) == (
        0,
        f"n1: {had} pages are with their owners, 0 are not\n",
    )


def test_drain_progress_continues_after_a_view_gap(
    fleet: list[Node], kvstore: Callable[..., Any]
) -> None:
    """The member's lease expires during the drain, and the member registers again."""
    client = Client(ClientConfig(address=f"127.0.0.1:{fleet[1].grpc.port}", direct=True, **PATIENT))
    with client:
        view = fleet[1].membership.view
        assert view is not None
        fleet[1].membership.announce = lambda state: fleet[1].membership.become(
            View("fleet", 2, view.members[:1])
        )  # type: ignore[method-assign]
        assert not client.drain().over
        time.sleep(0.2)
        tell(fleet, view_of(fleet, number=3, n1=State.DRAINING))
        wait_until(lambda: client.drain().over)


def test_drain_reports_an_unreachable_registry(
    fleet: list[Node], kvstore: Callable[..., Any]
) -> None:
    """Without etcd no other member learns of the drain, so the command waits."""
    assert kvstore("cluster", "drain", "n1").stderr == ""
    for node in fleet:
        node.membership.registry = lambda: ("for 7 s: no answer; the last view stays in force", [])
    shown = kvstore("cluster", "drain", "n1", "--end")
    assert "other members learn of it when etcd answers again: for 7 s: no answer" in shown.stderr
    fleet[1].membership.registry = lambda: ("for 8 s: no answer; the last view stays in force", [])
    assert kvstore("cluster").stdout.splitlines()[0].endswith("  from the last one")


def test_draining_member_has_no_share(fleet: list[Node], kvstore: Callable[..., Any]) -> None:
    assert kvstore("cluster").stdout.count("50.0 %") == 2
    tell(fleet, view_of(fleet, number=9, n1=State.DRAINING))
    (first,) = [line for line in kvstore("cluster").stdout.splitlines() if line.startswith("n0")]
    (second,) = [line for line in kvstore("cluster").stdout.splitlines() if line.startswith("n1")]
    assert ("100.0 %" in first, "0.0 %" in second) == (True, True)


def test_rebalance(
    fleet: list[Node], kvstore: Callable[..., Any], connect: Connect, pages: Pages
) -> None:
    pages.put(connect(fleet[0]), pages.keys(*KEYS))
    shown = kvstore("cluster", "rebalance", "--dry-run", "--json")
    shares = json.loads(shown.stdout)["members"]
    assert [(member["member"], member["pages"]) for member in shares] == [("n0", 0), ("n1", 0)]
    assert "WOULD FETCH" in kvstore("cluster", "rebalance", "--dry-run").stdout
    assert "2 members rebalance" in kvstore("cluster", "rebalance").stdout


def test_drain_of_an_unknown_member_is_refused(kvstore: Callable[..., Any]) -> None:
    shown = kvstore("cluster", "drain", "n9")
    assert shown.exit_code == 1
    assert "'n9' is no member of fleet; its members are n0, n1" in shown.stderr


def test_rebalance_reports_a_dead_member(fleet: list[Node], kvstore: Callable[..., Any]) -> None:
    view = fleet[0].membership.view
    assert view is not None
    gone = View("fleet", 9, (*view.members, Member("gone", "127.0.0.1:9")))
    fleet[0].membership.become(gone)
    shown = kvstore("cluster", "rebalance")
    assert shown.exit_code == 3
    assert "gone: " in shown.stderr
