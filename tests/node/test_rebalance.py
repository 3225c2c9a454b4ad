"""Sweeps: a member fetches the pages it owns, after it joined or was away, and at intervals."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fleet import commit, counts, plant, view_of
from fleet import tell as tell_all
from known_pages import Pages
from local_nodes import Connect, StartNode
from sweeping import NUMBERS, of, sweep, sweep_all, there
from sweeping import alone as alone
from sweeping import fleet as fleet
from sweeping import tell as tell
from waiting import wait_until

from kvstore import Client, InvalidRequest, PutOutcome
from kvstore.cluster.view import Member, State, View
from kvstore.errors import Unavailable
from kvstore.pb import kvstore_pb2 as pb
from node.cluster import rebalance
from node.cluster import rebalance as sweep_of
from node.cluster.drain import DrainTimeouts
from node.server import Node
from node.serving.limits import LONG_CALLS


def test_joining_member_fetches_its_share_before_it_serves(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    tell(n2=None)
    client = connect(fleet[0])
    pages.put(client, pages.keys(*NUMBERS))
    states: list[State] = []
    fleet[2].membership.announcer = states.append
    view = tell(n2=State.JOINING)
    # Served by their former owners
    assert pages.get(connect(fleet[1]), pages.keys(*NUMBERS)) == [True] * len(NUMBERS)
    report = sweep(fleet[2])
    mine = of(view, pages, "n2")
    assert 0 < len(mine) < len(NUMBERS)
    assert (report.missing, report.fetched, report.failed, report.away) == (
        len(mine),
        len(mine),
        0,
        (),
    )
    assert there(alone(fleet[2]), pages) == mine
    wait_until(lambda: states == [State.SERVING])


def test_sweep_reports_its_progress(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(n2=None)
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    mine = len(of(tell(), pages, "n2"))
    monkeypatch.setattr(sweep_of, "BATCH_KEYS", 2)
    seen: list[Any] = []

    def look(nbytes: int) -> bool:
        seen.append(counts(fleet[2]))
        return True

    monkeypatch.setattr(fleet[2].peers.rebalancer._sweep, "_pause", look)
    assert counts(fleet[2]).sweep_age_ms == 0
    sweep(fleet[2])
    assert all(status.sweeping for status in seen)
    fetched = [status.sweep_pages_fetched for status in seen if status.sweep_pages_missing == mine]
    assert fetched == sorted(fetched)
    assert {2, mine} <= {*fetched}
    done = counts(fleet[2])
    assert (done.sweeping, done.sweep_pages_fetched, done.sweep_age_ms > 0) == (False, mine, True)
    assert (done.cluster, done.member_id, done.member_count, done.replicas) == ("fleet", "n2", 3, 1)


def test_sweep_does_not_fetch_existing_pages(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    tell(n2=None)
    pages.put(connect(fleet[0]), pages.keys(*NUMBERS))
    view = tell()
    mine = sorted(of(view, pages, "n2"))
    plant(fleet[2], pages, mine[:3])
    assert sweep(fleet[2]).fetched == len(mine) - 3
    assert sweep(fleet[2]).missing == 0


def test_replica_fetches_pages_it_missed_while_away(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = tell(replicas=2)
    for node in fleet[:2]:
        plant(
            node,
            pages,
            sorted(of(view, pages, "n2") - of(view, pages, "n0" if node is fleet[1] else "n1")),
        )
    with monkeypatch.context() as patch:
        patch.setattr(rebalance.Rebalance, "_fetch", lambda sweep, missing: 0)
        missing = len(of(view, pages, "n2"))
        assert (sweep(fleet[2]).thin, counts(fleet[2]).pages_under_replicated) == (missing, missing)
    assert sweep(fleet[2]).failed == counts(fleet[2]).pages_under_replicated == 0
    assert there(alone(fleet[2]), pages) == of(view, pages, "n2")


def test_copies_beside_the_owners_are_no_replicas(fleet: list[Node], pages: Pages) -> None:
    """They are evicted first."""
    sweep, keys = fleet[0].peers.rebalancer._sweep, pages.keys(0, 1)
    plant(fleet[0], pages, [pages.key(2)])  # opens the namespace
    told = [pb.PageStat(prefix_hash=key, is_copy=key == keys[1]) for key in keys]
    found = list(sweep._absent("n1", pages.namespace.digest, told, frozenset()))
    assert [page.copies for page in found] == [1, 0]


def test_sweep_copies_times_to_live_and_pins(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    view = tell()
    mine = sorted(of(view, pages, "n0"))
    plant(fleet[1], pages, mine[:1], ttl_s=600)
    plant(fleet[1], pages, mine[1:2])
    source = alone(fleet[1])
    source.pin(pages.namespace, mine[1:2], 500.0)
    sweep(fleet[0])
    lives, pinned = alone(fleet[0]).stat(pages.namespace, mine[:2])
    assert 0 < lives.ttl_ms <= 600_000
    assert not lives.pin_ttl_ms
    assert 0 < pinned.pin_ttl_ms <= 500_000
    assert not pinned.ttl_ms
    source.unpin(pages.namespace, mine[1:2])
    alone(fleet[0]).unpin(pages.namespace, mine[1:2])


def test_sweep_subtracts_its_delay_from_times_to_live(
    fleet: list[Node],
    tell: Callable[..., View],
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a large sweep minutes pass between the listing of a page and its fetch."""
    mine = sorted(of(tell(), pages, "n0"))[:3]
    plant(fleet[1], pages, mine[:2], ttl_s=100)
    plant(fleet[1], pages, mine[2:], ttl_s=50)
    swept = fleet[0].peers.rebalancer._sweep  # type: ignore[union-attr]
    listed, now_s = swept._missing_pages, int(time.time())

    def long_ago(*arguments: Any) -> Any:
        found = listed(*arguments)
        for node in fleet:
            monkeypatch.setattr(node.tier, "clock_s", lambda: now_s + 60)
        return found

    monkeypatch.setattr(swept, "_missing_pages", long_ago)
    report = sweep_all(fleet[0])
    assert (report.missing, report.fetched) == (3, 2)
    lives = alone(fleet[0]).stat(pages.namespace, mine)
    assert [page.present for page in lives] == [True, True, False]
    assert all(0 < page.ttl_ms <= 40_000 for page in lives[:2])


def test_sweep_rejects_a_damaged_page(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    view = tell()
    mine = sorted(of(view, pages, "n0"))[:4]
    plant(fleet[1], pages, mine)
    pages.flip(fleet[1], mine[2])
    report = sweep(fleet[0])
    assert (report.missing, report.fetched, report.failed) == (4, 3, 1)
    assert there(alone(fleet[0]), pages) == {mine[0], mine[1], mine[3]}


def test_sweep_asks_an_absent_member_again(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebalance, "AGAIN_S", 0.1)
    view = tell()
    mine = sorted(of(view, pages, "n0"))[:4]
    plant(fleet[1], pages, mine)
    gone = replace(view, number=50, members=(*view.members[:2], Member("n2", "127.0.0.1:9")))
    fleet[0].membership.become(gone)
    report = sweep(fleet[0])
    assert (report.fetched, report.away) == (4, ("n2",))
    fleet[0].membership.become(replace(view, number=51))
    wait_until(lambda: fleet[0].peers.rebalancer.report.away == ())


def test_sweep_waits_for_hanging_members_in_parallel(
    start_node: StartNode,
    alone: Callable[[Node], Client],
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.cluster.rebalance.CALL_S", 20.0)
    nodes = [start_node() for _ in range(2)]
    hung = [start_node() for _ in range(3)]
    all_asked = threading.Barrier(len(hung))

    def hang(request: Any, caller: Any) -> Any:
        all_asked.wait(60.0)
        raise Unavailable("it hung")

    for node in hung:
        monkeypatch.setitem(node.service._unary, "list_namespaces", hang)
    view = view_of([*hung, *nodes])
    mine = sorted(of(view, pages, "n4"))[:4]
    plant(nodes[0], pages, mine)
    tell_all([*hung, *nodes], view)
    report = sweep(nodes[1])
    assert (report.fetched, report.away) == (4, ("n0", "n1", "n2"))
    assert not all_asked.broken


def test_sweep_repeats_at_intervals(
    start_node: StartNode, alone: Callable[[Node], Client], pages: Pages
) -> None:
    nodes = [start_node(sweep_s=0.1), start_node(sweep_s=0.0)]
    view = view_of(nodes)
    for number, node in enumerate(nodes):
        node.peers.rebalancer.settle_s = 0.0
        node.membership.become(view, f"n{number}")
    wait_until(lambda: nodes[0].peers.rebalancer.report and nodes[1].peers.rebalancer.report)
    first = nodes[1].peers.rebalancer.report
    mine = of(view, pages, "n0")
    plant(nodes[1], pages, sorted(mine))
    wait_until(lambda: there(alone(nodes[0]), pages) == mine)
    assert nodes[1].peers.rebalancer.report is first  # it sweeps only when the view changes


def older_beside(start_node: StartNode, count: int) -> tuple[list[Node], Pages, list[bytes]]:
    """Return two nodes, their pages, and their keys, oldest first.

    The second node has room for four pages and `count` of its own. The first node has four older
    pages of it.
    """
    large = Pages("large", page_nbytes=1 << 20)
    nodes = [start_node(), start_node(ram_nbytes=4 << 20)]
    view = view_of(nodes)
    mine = [
        k
        for k in large.keys(*range(40))
        if view.owners.owners(large.namespace.digest, [k])[0] == ("n1",)
    ]
    mine = mine[: 4 + count]
    plant(nodes[0], large, mine[:4])
    threading.Event().wait(0.02)
    plant(nodes[1], large, mine[4:])
    tell_all(nodes, view)
    return nodes, large, mine


def test_sweep_evicts_no_newer_page(start_node: StartNode, alone: Callable[[Node], Client]) -> None:
    """The pages to fetch are older than all pages that fill the node."""
    nodes, large, mine = older_beside(start_node, 4)
    report = sweep(nodes[1])
    assert (report.missing, report.fetched, report.full) == (4, 0, 4)
    assert large.get(alone(nodes[1]), mine) == [False] * 4 + [True] * 4
    large.get(alone(nodes[0]), mine[:2])  # now newer than the pages of the full node
    assert sweep(nodes[1]).fetched == 2


def test_sweep_fills_only_free_slots_with_older_pages(
    start_node: StartNode, alone: Callable[[Node], Client]
) -> None:
    """With one free slot a sweep of older pages fetches one, and evicts none."""
    nodes, large, mine = older_beside(start_node, 3)
    report = sweep(nodes[1])
    assert (report.missing, report.fetched, report.full) == (4, 1, 3)
    assert large.get(alone(nodes[1]), mine[4:]) == [True] * 3


@pytest.mark.parametrize(
    "limits", [{"batch_keys_max": 3}, {"batch_nbytes_max": 1 << 16, "extent_nbytes": 1 << 16}]
)
def test_sweep_respects_the_batch_limits_of_other_members(
    start_node: StartNode, alone: Callable[[Node], Client], pages: Pages, limits: Any
) -> None:
    nodes = [start_node(**limits), start_node()]
    view = view_of(nodes)
    mine = [
        k
        for k in pages.keys(*NUMBERS)
        if view.owners.owners(pages.namespace.digest, [k])[0] == ("n1",)
    ]
    assert len(mine) > 3
    assert len(mine) * pages.nbytes > 1 << 16
    plant(nodes[0], pages, mine)
    tell_all(nodes, view)
    assert sweep(nodes[1]).fetched == len(mine)
    assert there(alone(nodes[1]), pages) == set(mine)


def test_dry_sweep_reports_missing_pages(
    fleet: list[Node],
    tell: Callable[..., View],
    connect: Connect,
    alone: Callable[[Node], Client],
    pages: Pages,
) -> None:
    view = tell()
    mine = sorted(of(view, pages, "n0"))
    plant(fleet[1], pages, mine)
    report = alone(fleet[0]).sweep(dry=True)
    assert (report.pages_missing, report.nbytes_missing) == (len(mine), len(mine) * pages.nbytes)
    assert alone(fleet[0]).stat(pages.namespace, mine[:1])[0].present is False
    alone(fleet[0]).sweep()
    wait_until(lambda: there(alone(fleet[0]), pages) == set(mine))


def test_drain_and_sweep_without_a_cluster_are_refused(
    start_node: StartNode, alone: Callable[[Node], Client]
) -> None:
    client = alone(start_node())
    with pytest.raises(
        InvalidRequest, match=r"in no cluster can not be drained; start it with --cluster"
    ):
        client.drain()
    with pytest.raises(InvalidRequest, match="in no cluster can not be filled by others"):
        client.sweep()


def test_drain_of_a_static_member_is_refused(
    fleet: list[Node], tell: Callable[..., View], alone: Callable[[Node], Client]
) -> None:
    tell()
    with pytest.raises(
        InvalidRequest, match="a fixed list stay as they are; n0 can not become DRAINING"
    ):
        alone(fleet[0]).drain()


def test_stop_ends_a_running_sweep(
    start_node: StartNode, alone: Callable[[Node], Client], pages: Pages
) -> None:
    source, node = start_node(), Node(start_node().config)
    view = View(
        "fleet",
        1,
        tuple(Member(f"n{i}", f"127.0.0.1:{n.grpc.port}") for i, n in enumerate((source, node))),
    )
    mine = [
        k
        for k in pages.keys(*range(400))
        if view.owners.owners(pages.namespace.digest, [k])[0] == ("n1",)
    ]
    plant(source, pages, mine)
    node.peers.rebalancer._nbytes_per_s = 1  # the whole sweep would take minutes
    source.membership.become(view, "n0")
    node.membership.become(view, "n1")
    node.start()
    node.peers.rebalancer.schedule_in(0.0)
    wait_until(lambda: node.peers.rebalancer.running and node.tier.visible_count > 0)
    node.stop()
    assert not node.peers.rebalancer.running


def test_node_stops_in_time_during_hanging_sweep_and_drain(
    start_node: StartNode, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = start_node()
    node = Node(replace(start_node().config, drain_s=0.3))
    node.peers.draining.timeouts = DrainTimeouts(pass_pause_s=0.02)
    go_on, asked = threading.Event(), threading.Semaphore(0)

    def hang(request: Any, caller: Any) -> Any:
        asked.release()
        go_on.wait(60.0)
        raise Unavailable("it hung")

    monkeypatch.setitem(hangs.service._unary, "stat", hang)
    monkeypatch.setitem(LONG_CALLS, "stat", 8)  # so that calls of one peer run in parallel
    members = [Member(f"n{i}", f"127.0.0.1:{n.grpc.port}") for i, n in enumerate((hangs, node))]
    hangs.membership.become(View("fleet", 1, tuple(members)), "n0")
    plant(node, pages, pages.keys(*NUMBERS))
    node.start()
    node.membership.become(
        View("fleet", 1, (members[0], replace(members[1], state=State.DRAINING))), "n1"
    )
    node.membership.announce = lambda state: None  # type: ignore[method-assign]
    node.peers.draining.begin()
    assert asked.acquire(timeout=60.0)
    monkeypatch.setitem(hangs.service._unary, "list_namespaces", hang)
    node.peers.rebalancer.schedule_in(0.0)
    assert asked.acquire(timeout=60.0)
    began = time.monotonic()
    node.stop()
    assert time.monotonic() - began < 8.0, "the stop waited for calls that may take 10 s"
    go_on.set()
    wait_until(lambda: not node.peers.rebalancer.running)


def test_page_removed_while_being_written_stays_removed(
    start_node: StartNode, alone: Callable[[Node], Client], pages: Pages
) -> None:
    """The bytes may have left another member before the removal."""
    node, key = start_node(), pages.key(1)
    client = alone(node)
    client.open(pages.namespace)
    reservation = node.tier.reserve(pages.namespace.digest, pages.keys(1, 2), pages.nbytes)
    client.remove(pages.namespace, [key])
    commit(node, pages, reservation)
    assert pages.get(client, pages.keys(1, 2)) == [False, True]
    assert client.put(pages.namespace, [key], [pages.content(key)]) == [PutOutcome.STORED]
