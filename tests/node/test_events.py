"""Events of members: recorded once, kept over a restart, and harmless where the disk fails."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_etcd import FakeEtcd
from fleets import Start, kill, members, peers, stop
from known_pages import Pages
from local_nodes import connect
from small_files import SmallFiles
from waiting import wait_until

import kvstore
from kvstore import Keep
from kvstore.cli.members import SAME_EVENT_MS, merge_events
from kvstore.cluster.view import Member, State, View
from kvstore.results import Event, Events
from node.cluster.membership import LostMember, Membership
from node.cluster.peers import MemberEvents, lost_shares
from node.disk.data_dir import SMALL_NBYTES_MAX
from node.events import FILE_NAME, KEPT, KEPT_SAME, TEXT_MAX, EventLog, Kind
from node.server import Node


def texts(log: EventLog) -> list[str]:
    return [event.text for event in log.since()]


def log_in(folder: Path) -> EventLog:
    return EventLog(SmallFiles(folder).open(FILE_NAME))


def kinds(node: Node, member: str) -> list[str]:
    """Return the kinds of the events about a member."""
    return [event.kind for event in node.events.since() if event.member == member]


def test_events_are_bounded_and_newest_last() -> None:
    log = EventLog(member=lambda: "n1")
    for number in range(KEPT + 5):
        log.add(Kind.VIEW, f"n{number % 32 or ''}", f"{number}", unix_ms=1 + number)
    assert len(log.since()) == KEPT
    assert log.since()[-1] == (KEPT + 5, "view", "n4", f"{KEPT + 4}")
    assert [event.text for event in log.since(KEPT + 2, limit=2)] == [f"{KEPT + 3}", f"{KEPT + 4}"]
    assert not log.kept
    log.add(Kind.DISK_STOPPED, "", "x" * 1000)
    assert len(log.since()[-1].text) == TEXT_MAX


def test_events_outlive_a_restart_and_torn_lines(tmp_path: Path) -> None:
    now_ms = time.time_ns() // 1_000_000
    log = log_in(tmp_path)
    log.add(Kind.STARTED, "n1", "first\nrun")
    log.close()
    path = tmp_path / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    odd = [
        b"{",
        b"7",
        b'{"unix_ms": "1"}',
        b"\xff",
        b'{"unix_ms":1,"kind":[],"member":"","text":""}',
    ]
    old = {"unix_ms": now_ms - 40 * 86_400_000, "kind": "view", "member": "", "text": "too old"}
    lines = [*odd, json.dumps(old).encode(), b'{"unix_ms": 1, "kind"']
    path.write_bytes(path.read_bytes() + b"\n".join(lines))
    again = log_in(tmp_path)
    assert texts(again) == ["first\nrun"]
    again.add_once(Kind.STARTED, "n1", "first\nrun")
    again.add(Kind.STARTED, "n1", "second run")
    again.close()
    assert texts(log_in(tmp_path)) == ["first\nrun", "second run"]


def test_member_that_flaps_pushes_no_other_events_out(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.add(Kind.DISK_STOPPED, "n1", "errors")
    for number in range(2 * KEPT):
        log.add(Kind.RETURNED, "n2", f"{number}")
    log.add(Kind.LOST, "n2", "newest")
    log.close()
    newest = [f"{number}" for number in range(2 * KEPT - KEPT_SAME, 2 * KEPT)]
    assert texts(log) == texts(log_in(tmp_path)) == ["errors", *newest, "newest"]


def test_events_file_is_replaced_when_it_is_large(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes((b"{}".ljust(1000) + b"\n") * (SMALL_NBYTES_MAX // 1000))
    log = log_in(tmp_path)
    log.add(Kind.STARTED, "n1", "run")
    log.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 1000
    assert texts(log_in(tmp_path)) == ["run"]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_events_of_a_failing_disk_are_written_when_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_in(tmp_path / "removed")
    with caplog.at_level(logging.WARNING):
        log.add(Kind.VIEW, "", "during the failure")
        wait_until(lambda: "can not be written" in caplog.text)
    (tmp_path / "removed").mkdir()
    log.add(Kind.VIEW, "", "next event")
    log.close()
    both = ["during the failure", "next event"]
    assert texts(log) == texts(log_in(tmp_path / "removed")) == both


def test_events_of_members_are_merged() -> None:
    def reply(*events: tuple[int, str]) -> Events:
        return Events(tuple(Event(at, "lost", "n9", text) for at, text in events))

    late = SAME_EVENT_MS + 1
    told = {"n1": reply((0, "a"), (5, "b")), "n2": reply((9, "c")), "n3": reply((late + 9, "d"))}
    merged = merge_events(told)
    assert [(event["unix_ms"], event["text"], event["seen_by"]) for event in merged] == [
        (0, "a", ["n1"]),
        (5, "b", ["n1", "n2"]),
        (late + 9, "d", ["n3"]),
    ]


def test_members_record_who_joins_is_lost_returns_and_is_drained(
    fleet: Start, etcd: FakeEtcd
) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: kinds(one, "n2") == ["joined", "serving"])
    assert kinds(one, "n1")[0] == "joined"
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n2", b"address"))
    kill(two, etcd)
    wait_until(lambda: "lost" in kinds(one, "n2"))
    assert sorted(kinds(one, "n2")[2:]) == ["lost", "view"]
    two = fleet("n2")
    wait_until(lambda: kinds(one, "n2")[-1] == "serving")
    assert kinds(one, "n2")[4:] == ["returned", "serving"]
    two.peers.draining.begin()
    wait_until(lambda: kinds(one, "n2")[-1] == "draining")
    wait_until(lambda: "drained" in kinds(two, "n2"))
    stop(two)
    wait_until(lambda: kinds(one, "n2")[-1] == "left")
    three = fleet("n3")
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n3", b"address"))
    stop(three)
    # On a busy machine it still hears of its own end
    assert "stopped" in [event.kind for event in three.events.since()]
    wait_until(lambda: kinds(one, "n3")[-1] == "lost")
    with connect(one, "auto", direct=True) as client:
        client.forget_member("n3")
        wait_until(lambda: kinds(one, "n3")[-1] == "forgotten")
        (reply,) = client.events().values()
    assert isinstance(reply, Events)
    assert (reply.member_id, reply.kept) == ("n1", False)
    assert [event.kind for event in reply.events if event.member == "n3"] == kinds(one, "n3")


def test_stopped_disk_and_recovery_are_events(
    start_node: Callable[..., Node], tmp_path: Path
) -> None:
    disk = {"disk_nbytes": 64 << 20, "disk_extent_nbytes": 16 << 20}
    node = start_node(data_dir=str(tmp_path), **disk)
    assert node.disk is not None
    node.disk.stop_after_error("broken: no spare blocks")
    node.disk.recover()
    found = [(event.kind, event.text) for event in node.events.since()]
    assert found == [
        ("started", f"version {kvstore.__version__}"),
        ("disk-stopped", "broken: no spare blocks"),
        ("disk-recovered", "the disk tier serves again"),
    ]


def test_loss_is_recorded_once_over_a_restart(tmp_path: Path) -> None:
    lost = LostMember("n9", "h9:7440", 1.0, int(time.time()) - 3600)
    membership = Membership("static:fleet/n1=h1:7440", "n1")
    for _ in range(2):
        log = log_in(tmp_path)
        MemberEvents(log, membership).on_lost([lost], ())
        log.close()
    assert [(event.kind, event.unix_ms) for event in log.since()] == [("lost", 1000 * lost.lost_s)]


def test_return_is_recorded_once_in_whatever_order_etcd_tells_it() -> None:
    there = tuple(Member(name, f"{name}:7440") for name in ("n1", "n9"))
    for told_first in ("view", "registered"):
        membership, log = Membership("static:fleet/n1=h1:7440", "n1"), EventLog()
        events = MemberEvents(log, membership)
        events.on_view(View("fleet", 1, there[:1], 1))
        events.on_lost([LostMember("n9", "n9:7440", 1.0, 1)], {"n1"})
        steps = [
            lambda events=events: events.on_view(View("fleet", 2, there, 1)),
            lambda events=events: events.on_lost([], {"n1", "n9"}),
        ]
        for step in steps if told_first == "view" else reversed(steps):
            step()
        assert [event.kind for event in log.since()] == ["lost", "returned"], told_first


def test_share_of_a_lost_member_leaves_out_draining_ones() -> None:
    states = {"n1": State.SERVING, "n2": State.DRAINING}
    there = tuple(Member(name, f"{name}:7440", state=state) for name, state in states.items())
    lost = [LostMember("n9", "h9:7440", 1.0, 1)]
    (alone,) = lost_shares(View("fleet", 1, there, 1), lost)
    assert (alone.share, alone.owners_left) == (0.5, 0)
    assert abs(alone.share_alone - 0.5) < 0.1
    (beside,) = lost_shares(View("fleet", 1, there, 2), lost)
    assert (beside.owners_left, beside.share_alone) == (1, 0.0)


def test_pages_of_a_killed_member_get_two_copies_again(fleet: Start, etcd: FakeEtcd) -> None:
    nodes = {name: fleet(name, replicas=2) for name in ("n1", "n2", "n3")}
    wait_until(lambda: all(len(members(node)) == 3 for node in nodes.values()))
    wait_until(lambda: all(node.membership.view.settled for node in nodes.values()))  # type: ignore[union-attr]
    pages = Pages("killed")
    keys = pages.keys(*range(40))
    with connect(nodes["n1"], "auto", near="none") as client:
        client.put(pages.namespace, keys, [pages.content(key) for key in keys], Keep(ack="all"))
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n3", b"address"))
    kill(nodes.pop("n3"), etcd)
    wait_until(lambda: all("repaired" in kinds(node, name) for name, node in nodes.items()))
    for name, node in nodes.items():
        assert kinds(node, name)[-2:] == ["under-replicated", "repaired"]
        with connect(node, "auto", direct=True) as client:
            assert [page.is_copy for page in client.stat(pages.namespace, keys)] == [False] * 40
            assert pages.get(client, keys) == [True] * 40
        assert peers(node).pages_under_replicated == 0
        (lost,) = peers(node).lost
        assert (lost.id, lost.owners_left, lost.share_alone) == ("n3", 1, 0.0)
