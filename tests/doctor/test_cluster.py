"""The doctor's checks of a cluster: dead members, differing views and lists, and the near node."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from examined import Examined
from fleets import small_nodes
from local_nodes import stop_all

from kvstore.cluster.view import Member, View
from kvstore.doctor import members as cluster
from kvstore.doctor import runner
from kvstore.doctor.checks import Finding, FindingState
from kvstore.doctor.connectivity import Wires
from kvstore.doctor.pages import MODEL, Pages
from node.server import Node

Doctor = Callable[..., Examined]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor wait until its pages are gone: on a busy machine that may take seconds."""
    monkeypatch.setattr("kvstore.doctor.pages.EMPTY_S", 60.0)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with small_nodes() as start:
        made = [start() for _ in range(3)]
        for node in made:
            node.peers.rebalancer.settle_s = 1e6
        yield made
        for node in made:
            assert node.check() == []
        stop_all(made)


@pytest.fixture
def fleet(nodes: list[Node]) -> list[Node]:
    become(nodes, view_of(nodes))
    return nodes


def view_of(nodes: Sequence[Node], *more: Member, number: int = 1, replicas: int = 2) -> View:
    members = [Member(f"n{i}", f"127.0.0.1:{node.grpc.port}") for i, node in enumerate(nodes)]
    return View("fleet", number, (*members, *more), replicas)


def become(nodes: Sequence[Node], view: View) -> None:
    for number, node in enumerate(nodes):
        node.membership.become(view, f"n{number}")


def left(nodes: Sequence[Node]) -> int:
    """Return the number of pages and doctor namespaces that are left on the nodes."""
    count = 0
    for node in nodes:
        with node.tier.lock:
            count += node.tier.visible_count + (
                MODEL in {index.value.model for index in node.tier.namespaces.all()}
            )
    return count


def test_healthy_cluster_passes_and_keeps_no_page(fleet: list[Node], doctor: Doctor) -> None:
    found = doctor(fleet[0])
    assert found.failed == set()
    assert found.of("members").found == "3 of 3 answer here"
    assert found.of("view").state is FindingState.OK
    for member in ("n0", "n1", "n2"):
        assert found.of("version", member).state is FindingState.OK
        assert found.of("clock", member).state is FindingState.OK
        for wire in ("shm", "bulk", "grpc"):
            assert found.of(wire, member, group="wires").state is FindingState.OK
            assert found.of(wire, member, group="pages").state is FindingState.OK
    assert "by shared memory: it is asked for everything" in found.of("near node").found
    assert found.of("removed").found == "10 pages, and the namespace"
    for node in fleet:
        assert node.peers.replicator.wait_empty(20.0)
    assert left(fleet) == 0


def test_connections_to_members_without_pages_are_closed(
    fleet: list[Node], doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections to members without test pages are closed before the clean-up.

    Connections to a hundred members would use up all descriptors, so that the clean-up failed.
    """
    closed: list[str] = []
    closed_then: list[set[str]] = []
    close, clean = Wires.close, Pages.clean

    def closes(wires: Wires) -> None:
        closed.append(wires.node.address)
        close(wires)

    def cleans(pages: Pages) -> Iterator[Finding]:
        closed_then.append(set(closed))
        return clean(pages)

    monkeypatch.setattr(runner, "MEMBERS_MAX", 1)
    monkeypatch.setattr(Wires, "close", closes)
    monkeypatch.setattr(Pages, "clean", cleans)
    found = doctor(fleet[0])
    assert found.failed == set()
    assert found.of("bulk", "n2", group="wires").state is FindingState.OK
    assert "by shared memory" in found.of("near node").found
    assert closed_then[0] == {f"127.0.0.1:{node.grpc.port}" for node in fleet[1:]}


def test_dead_member_is_reported(nodes: list[Node], doctor: Doctor) -> None:
    gone = Member("gone", "127.0.0.1:9")
    become(nodes[:2], view_of(nodes[:2], gone))
    found = doctor(nodes[0])
    assert found.failed == {"gone TCP", "members"}
    assert found.of("members").found == "2 of 3 answer here; not gone"
    assert found.of("as a client").state is FindingState.OK
    assert found.of("bulk", "n1", group="pages").state is FindingState.OK
    assert "not at gone" in found.of("removed").found
    assert left(nodes[:2]) == 0


def test_members_of_a_static_list_with_own_ports_agree(fleet: list[Node], doctor: Doctor) -> None:
    """Views of a static list agree although each node adds its own frame port to its own view."""
    for node in fleet:
        assert node.bulk is not None
        node.membership.serve_frames(node.bulk.port)
    found = doctor(fleet[0])
    assert found.failed == set()
    assert found.of("view").state is FindingState.OK


def test_differing_member_list_is_reported(fleet: list[Node], doctor: Doctor) -> None:
    fleet[1].membership.become(view_of(fleet[:2]), "n1")
    found = doctor(fleet[0])
    assert found.of("view").state is FindingState.FAIL
    assert "lists of members that differ" in found.of("view").found


def test_member_with_an_old_view_is_reported(
    fleet: list[Node], doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SETTLE_S", 0.01)
    fleet[0].membership.become(replace(view_of(fleet), number=2), "n0")
    found = doctor(fleet[0])
    assert found.of("view").state is FindingState.FAIL
    assert found.of("view").found == "n0 has 2, n1 has 1, n2 has 1"


def test_member_with_a_changing_view_is_asked_again(
    fleet: list[Node], doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = replace(view_of(fleet), number=2)
    fleet[0].membership.become(newer, "n0")
    monkeypatch.setattr(time, "sleep", lambda seconds: become(fleet[1:], newer))
    assert doctor(fleet[0]).of("view").state is FindingState.OK


def test_near_node_outside_the_cluster_is_reported(fleet: list[Node], doctor: Doctor) -> None:
    found = doctor(fleet[0], near="n7")
    assert found.failed == {"near node"}
    assert "n0, n1, n2" in found.of("near node").remedy
    assert doctor(fleet[0], near="n1").of("near node").state is FindingState.OK


def test_direct_check_of_one_member_cleans_all_members(fleet: list[Node], doctor: Doctor) -> None:
    """Pages put through one member alone are removed from all members."""
    found = doctor(fleet[1], direct=True)
    assert found.failed == set()
    assert found.of("bulk", group="pages").state is FindingState.OK
    for node in fleet:
        assert node.peers.replicator.wait_empty(20.0)
    assert left(fleet) == 0


def test_unreachable_registry_is_a_warning(fleet: list[Node], doctor: Doctor) -> None:
    fleet[2].membership.registry = lambda: (
        "since 10 s: connection refused",
        ["n9: speaks protocol 9"],
    )
    found = doctor(fleet[0])
    assert found.of("registry").state is FindingState.WARN
    assert "the registry of n2 does not answer: since 10 s" in found.of("registry").found
    assert "n9: speaks protocol 9" in found.of("registry").found
