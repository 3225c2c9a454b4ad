"""Draining a member hands its pages to their owners, or reports how many are left."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fleet import plant, view_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from sweeping import NUMBERS, named, of, sweep
from sweeping import alone as alone
from sweeping import fleet as fleet
from sweeping import tell as tell
from waiting import wait_until

from kvstore import Client
from kvstore.cluster.view import Member, State, View
from kvstore.errors import Unavailable, UnknownNamespace
from node.cluster import drain
from node.cluster.drain import DrainTimeouts
from node.memory.inventory import Inventory
from node.server import Node


def announcer_of(tell: Callable[..., View]) -> Callable[[State], None]:
    """Return an announcer that sets the state of n1 in the cluster's view."""

    def announce(state: State) -> None:
        tell(n1=state)

    return announce


def test_member_drained_while_joining_stays_draining(
    fleet: list[Node], tell: Callable[..., View], connect: Connect, pages: Pages
) -> None:
    tell(n2=None)
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    states: list[State] = []
    fleet[2].membership.announcer = states.append
    tell(n2=State.JOINING)
    fleet[2].membership.announce(State.DRAINING)
    sweep(fleet[2])
    assert states == [State.DRAINING]


def test_drained_member_hands_over_all_its_pages(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    fleet[1].peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.05)
    view = tell()
    client = connect(fleet[0])
    pages.put(client, pages.keys(*NUMBERS))
    had = of(view, pages, "n1")
    fleet[1].membership.announcer = announcer_of(tell)
    direct = alone(fleet[1])
    assert not direct.drain().over
    for name in ("n0", "n2"):
        sweep(named(fleet)[name])
    wait_until(lambda: direct.drain().over)
    status = direct.drain()
    assert (status.pages_left, status.pages_handed) == (0, len(had))
    tell(n1=None)
    assert pages.get(connect(fleet[2]), pages.keys(*NUMBERS)) == [True] * len(NUMBERS)
    direct.drain(end=True)
    assert fleet[1].membership.view.by_id["n1"].state is State.SERVING


def test_silent_owner_is_asked_once_per_pass(
    fleet: list[Node], tell: Callable[..., View], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "PAGES", 4)
    view = tell(n1=State.DRAINING)
    plant(fleet[1], pages, pages.keys(*NUMBERS))
    theirs = of(view, pages, "n2")
    plant(fleet[2], pages, sorted(theirs))
    draining_ = fleet[1].peers.draining
    asked, there = list[str](), draining_._present_at

    def hangs(member: str, *arguments: Any) -> list[bytes]:
        asked.append(member)
        if member == "n0":
            raise Unavailable("it hung")
        return there(member, *arguments)

    monkeypatch.setattr(draining_, "_present_at", hangs)
    assert draining_._count_pages(view, threading.Event()) == (
        len(NUMBERS) - len(theirs),
        len(theirs),
    )
    assert asked.count("n0") == 1
    assert asked.count("n2") > 1


def test_drain_continues_after_the_member_left_the_view(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    """The member's lease expires during the drain, and the member registers again."""
    fleet[1].peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.01)
    tell()
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    fleet[1].membership.announcer = announcer_of(tell)
    direct = alone(fleet[1])
    direct.drain()
    wait_until(lambda: direct.drain().pages_left)
    fleet[1].membership.become(tell(n1=None), "n1")
    threading.Event().wait(0.1)
    tell(n1=State.DRAINING)
    for name in ("n0", "n2"):
        sweep(named(fleet)[name])
    wait_until(lambda: direct.drain().over)


def test_drain_reports_pages_without_a_taker(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    fleet[1].peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.02, patience_s=0.2)
    view = tell()
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    fleet[1].membership.announcer = announcer_of(tell)
    direct = alone(fleet[1])
    direct.drain()
    wait_until(lambda: direct.drain().over)
    assert direct.drain().pages_left == len(of(view, pages, "n1"))


def test_drain_survives_a_lost_lease_and_a_removed_namespace(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The view lacks the member, as after an expired lease, until it has registered again."""
    fleet[1].peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.02, patience_s=0.2)
    view, own = tell(), fleet[1]
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    direct = alone(own)
    own.membership.become(replace(view, number=50, members=(view.members[0], view.members[2])))
    own.membership.announce = lambda state: None  # type: ignore[method-assign]
    direct.drain()
    threading.Event().wait(0.2)
    listed, gone = Inventory.list_pages, iter([UnknownNamespace("removed just now")])

    def list_pages(self: Inventory, *arguments: Any) -> Any:
        for error in gone:
            raise error
        return listed(self, *arguments)

    monkeypatch.setattr(Inventory, "list_pages", list_pages)
    drained = replace(view.members[1], state=State.DRAINING)
    own.membership.become(
        replace(view, number=51, members=(view.members[0], drained, view.members[2]))
    )
    wait_until(lambda: direct.drain().over)
    assert direct.drain().pages_left == len(of(view, pages, "n1"))


def test_drain_respects_the_batch_limit_of_the_new_owner(
    start_node: StartNode,
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [start_node(), start_node(batch_keys_max=3)]
    nodes[0].peers.draining.timeouts = nodes[1].peers.draining.timeouts = DrainTimeouts(
        pass_pause_s=0.01
    )
    members = [Member(f"n{i}", f"127.0.0.1:{node.grpc.port}") for i, node in enumerate(nodes)]
    for node in nodes:
        plant(node, pages, pages.keys(*NUMBERS))

    def tell(state: State) -> None:
        for number, node in enumerate(nodes):
            view = View("fleet", 2, (replace(members[0], state=state), members[1]))
            node.membership.become(view, f"n{number}")

    tell(State.SERVING)
    monkeypatch.setattr(nodes[0].membership, "announce", tell)
    direct = alone(nodes[0])
    direct.drain()
    wait_until(lambda: direct.drain().over)
    assert direct.drain().pages_handed == len(NUMBERS)


def test_copies_of_the_next_owner_become_its_own_pages_in_a_drain(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    """Regression: n0 kept near copies as copies, which no disk takes, after n1 had left."""
    tell(n2=None)
    fleet[1].peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.05)

    def announce(state: State) -> None:
        tell(n1=state, n2=None)

    fleet[1].membership.announcer = announce
    near = connect(fleet[0], near="n0")
    keys = sorted(of(view_of(fleet[:2]), pages, "n1"))
    pages.put(connect(fleet[1], near="none"), keys)
    assert pages.get(near, keys) == [True] * len(keys)
    assert near.pin(pages.namespace, keys[:3], 60.0) == [True] * 3
    assert fleet[0].tier.eviction.copy_count == len(keys)
    direct = alone(fleet[1])
    assert not direct.drain().over, "copies at the next owner do not count"
    sweep(fleet[0])
    assert fleet[0].tier.eviction.copy_count == 0
    wait_until(lambda: direct.drain().over)
    assert direct.drain().pages_left == 0
    pinned = Inventory(fleet[0].tier).stat(pages.namespace.digest, keys)
    assert [info.pin_ttl_ms > 0 for info in pinned] == [key in keys[:3] for key in keys]
