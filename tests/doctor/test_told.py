"""Findings from the hellos and statuses of members, without a node: one fault at a time."""

from types import SimpleNamespace
from typing import Any

import pytest

import kvstore
from kvstore import ClientConfig
from kvstore.cluster.view import Member, View
from kvstore.config import PROTOCOL_VERSION
from kvstore.doctor import members
from kvstore.doctor.checks import Finding, FindingState, fail, ok
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import NodeStatus, PeersStatus

MEMBERS = (Member("n0", "10.0.0.1:7440"), Member("n1", "10.0.0.2:7440"))
VIEW = View("fleet", 1, MEMBERS, 2)


# ---- members ---------------------------------------------------------------------------------


def of_members(*views: View | None, peers: PeersStatus | None = None) -> dict[str, Finding]:
    """Return the findings, by name, about members with these views; None: in no cluster."""
    nodes: dict[str, Any] = {}
    for number, view in enumerate(views):
        hello = pb.HelloReply() if view is None else pb.HelloReply(view=view.message)
        status = NodeStatus() if peers is None else NodeStatus(peers=peers)
        nodes[f"n{number}"] = SimpleNamespace(hello=hello, status=status, ask_again=lambda: None)
    return {finding.name: finding for finding in members.findings(VIEW, nodes)}


@pytest.fixture(autouse=True)
def no_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "SETTLE_S", 0.0)


def test_members_that_agree_pass() -> None:
    found = of_members(VIEW, VIEW, peers=PeersStatus(registry="static"))
    assert {finding.state for finding in found.values()} == {FindingState.OK}
    assert found.keys() == {"members", "view", "registry"}


def test_silent_member_and_unknown_near_node_are_failures() -> None:
    found = of_members(VIEW)["members"]
    assert (found.state, found.found) == (FindingState.FAIL, "1 of 2 answer here; not n1")
    assert members.near(VIEW, ClientConfig(near="n1"), {}).state is FindingState.OK
    assert members.near(VIEW, ClientConfig(near="n7"), {}).state is FindingState.FAIL


def test_view_that_reaches_a_member_late_passes() -> None:
    later = View("fleet", 2, MEMBERS, 2)
    behind = SimpleNamespace(hello=pb.HelloReply(view=VIEW.message), status=NodeStatus())
    behind.ask_again = lambda: setattr(behind, "hello", pb.HelloReply(view=later.message))
    ahead = SimpleNamespace(
        hello=pb.HelloReply(view=later.message), status=NodeStatus(), ask_again=list
    )
    nodes: dict[str, Any] = {"n0": behind, "n1": ahead}
    found = {finding.name: finding for finding in members.findings(VIEW, nodes)}
    assert (found["view"].state, "number 2" in found["view"].found) == (FindingState.OK, True)


def test_more_replicas_than_members_are_a_warning() -> None:
    three = View("fleet", 1, MEMBERS, 3)
    nodes: dict[str, Any] = {"n0": SimpleNamespace(hello=None)}
    (found,) = (finding for finding in members.findings(three, nodes) if finding.name == "replicas")
    assert (found.state, "3 are configured, but there are only 2 members" in found.found) == (
        FindingState.WARN,
        True,
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (None, "n1 is in no cluster"),
        (View("fleet", 2, MEMBERS, 2), "n0 has 1, n1 has 2"),
        (View("fleet", 1, MEMBERS[:1], 2), "n0 and n1 have lists"),
        (View("fleet", 1, MEMBERS, 1), "--replicas"),
        (View("swarm", 1, MEMBERS, 2), "the cluster's name"),
    ],
)
def test_differing_members_are_a_failure(other: View | None, text: str) -> None:
    found = of_members(VIEW, other)["view"]
    assert (found.state, text in found.found) == (FindingState.FAIL, True), found


def test_registry_findings_depend_on_the_role() -> None:
    assert of_members(VIEW, VIEW)["registry"].state is FindingState.SKIPPED
    found = of_members(
        VIEW, VIEW, peers=PeersStatus(registry="no etcd answers", apart=("n7: another key",))
    )
    assert found["registry"].state is FindingState.WARN
    assert "the registry of n0 does not answer: no etcd answers" in found["registry"].found
    assert "n7: another key" in found["registry"].found


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        ("auto", "n1, by shared memory"),
        ("shm", "n1, by shared memory"),
        ("bulk", "none by wire bulk"),
    ],
)
def test_near_node_is_reached_by_shared_memory(wire: str, text: str) -> None:
    found = members.near(VIEW, ClientConfig(wire=wire), {"n0": False, "n1": True})
    assert (found.state, found.found.startswith(text)) == (FindingState.OK, True)


# ---- a node ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "state"),
    [
        (
            pb.HelloReply(version=kvstore.__version__, protocol_version=PROTOCOL_VERSION),
            FindingState.OK,
        ),
        (pb.HelloReply(version="0.0.9", protocol_version=PROTOCOL_VERSION), FindingState.WARN),
        (
            pb.HelloReply(version=kvstore.__version__, protocol_version=PROTOCOL_VERSION - 1),
            FindingState.WARN,
        ),
    ],
)
def test_differing_versions_are_a_warning(hello: pb.HelloReply, state: FindingState) -> None:
    assert members.version(hello).state is state


def test_draining_and_insecure_nodes_are_a_warning() -> None:
    assert members.state(NodeStatus(state="SERVING")).state is FindingState.OK
    assert members.state(NodeStatus(state="DRAINING")).state is FindingState.WARN
    names = {
        finding.name: finding
        for finding in members.check_status(NodeStatus(insecure="anybody may write"))
    }
    assert (names["strangers"].state, names["strangers"].found) == (
        FindingState.WARN,
        "anybody may write",
    )
    assert "strangers" not in {finding.name for finding in members.check_status(NodeStatus())}


def test_connection_shows_failures_or_one_line() -> None:
    tcp, bad = ok("TCP", "in 1 ms"), fail("gRPC", "hangs", "look")
    assert [finding.name for finding in members.reached([tcp])] == ["reached"]
    assert [finding.name for finding in members.reached([tcp, bad])] == ["gRPC"]
