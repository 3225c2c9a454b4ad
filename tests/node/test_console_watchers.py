"""Clients that watch the console: which events they get, and what happens to slow ones."""

import socket
import time
from typing import Any

import pytest
from visits import OWN, connection, console_of, first, told, visit, watching
from waiting import wait_until

from kvstore import Namespace, opaque_layout
from kvstore.messages import namespace_message
from node.console import console as console_module
from node.console.history import KEPT
from node.console.snapshot import HOT_MAX
from node.server import Node
from node.serving.hot_prefixes import HotPrefix
from node.serving.limits import HTTP_CONNECTIONS_MAX, WATCHERS_MAX

pytestmark = pytest.mark.usefixtures("nothing_is_left_at_the_console")


def test_watcher_gets_an_event_at_once_and_later_ones(node: Node) -> None:
    with watching(node) as events:
        name, values = next(events)
        assert (name, values["state"], values["who"]["role"]) == ("now", "SERVING", "admin")
        # One that took long to make is sent more than once
        name, later = next(event for event in events if event[1]["uptime_ms"] > values["uptime_ms"])
        assert name == "now"
        assert "who" not in later


def test_watchers_with_the_same_view_share_one_status(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status made within `EVERY_S` is sent to all of them."""
    asked = []
    call, snapshots = node.service.call, console_of(node)._snapshots
    monkeypatch.setattr(
        node.service, "call", lambda op, *rest: (asked.append(op), call(op, *rest))[1]
    )
    monkeypatch.setattr("node.console.snapshot.EVERY_S", 600.0)
    monkeypatch.setattr(console_module, "EVERY_S", 0.01)
    monkeypatch.setattr(snapshots, "_made", {})  # without what earlier tests left
    monkeypatch.setattr(snapshots, "_found", {})
    with watching(node) as one, watching(node) as other:
        next(one), next(other)
        shown = [next(events)[1] for events in (one, one, other, other)]
    assert all(values == shown[0] for values in shown)
    assert sorted(asked) == ["events", "node_status"]


def test_snapshot_lists_the_largest_tenants_namespaces_and_prefixes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = node.service.call

    def call_with_many(op: str, *rest: Any) -> Any:
        status = call(op, *rest)
        if op != "node_status":
            return status
        for number in range(80):
            status.tenants.add(
                tenant=f"t{number}", ram_nbytes=number, disk_nbytes=number % 2 * 1000
            )
            described = namespace_message(Namespace(f"m{number}", opaque_layout(2)))
            space = status.namespaces.add(
                digest=number.to_bytes(16, "big"), namespace=described, page_nbytes=2
            )
            space.page_count, space.disk_page_count = number, number % 2 * 1000
        return status

    heat = [
        HotPrefix(number.to_bytes(16, "big"), b"12345678", 80 - number, 0, 1.0)
        for number in range(80)
    ]
    monkeypatch.setattr(node.service, "call", call_with_many)
    monkeypatch.setattr(node.service.hot_prefixes, "hottest", lambda: heat)
    assert node.console is not None
    # findings of earlier tests are cached for some seconds
    node.console._snapshots._found.clear()
    with watching(node) as events:
        values = next(values for _, values in events if values["tenant_count"] == 80)
    largest = [*range(79, 0, -2), *range(78, 58, -2)]
    assert [use["tenant"] for use in values["tenants"]] == [f"t{number}" for number in largest]
    assert [int(space["digest"], 16) for space in values["namespaces"]] == largest
    assert [hot["lookups"] for hot in values["hot"]] == list(range(80, 80 - HOT_MAX, -1))


def test_watchers_over_the_limit_are_refused(node: Node) -> None:
    share = -(-WATCHERS_MAX // 2)
    streams = [watching(node) for _ in range(share)]
    for stream in streams:
        next(stream.__enter__())
    status, values = told(node, "/console/events", {})
    assert status == 429
    assert "console watchers" in values["error"]
    for stream in streams:
        stream.__exit__(None, None, None)
    wait_until(lambda: not console_of(node).watchers.used)
    assert first(node)["state"] == "SERVING"


def test_reopened_page_reuses_the_cached_history(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each opening rebuilt the history, which took 10 ms, even for refused watchers."""
    assert node.console is not None
    history = node.console._snapshots._history
    history._take(history._clock() + 1.0), history._take(history._clock() + 2.0)
    asked, told_of = [], history.visible_to
    monkeypatch.setattr(history, "poll", lambda: None)
    monkeypatch.setattr(
        history,
        "visible_to",
        lambda who, most=KEPT, *day: (asked.append(most), told_of(who, most, *day))[1],
    )
    hours = [first(node)["history"] for _ in range(5)]
    assert all(hour == hours[0] for hour in hours)
    assert hours[0]["recent"]["count"] >= 1
    assert asked.count(KEPT) == 1
    watchers = console_of(node).watchers
    monkeypatch.setattr(
        node.console._snapshots, "first", lambda *_: pytest.fail("a refused watcher got a snapshot")
    )
    wait_until(lambda: not watchers.used)
    with watchers.lent("127.0.0.1", -(-WATCHERS_MAX // 2)):
        assert told(node, "/console/events", {})[0] == 429


def test_snapshot_fault_ends_the_stream_with_an_error(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: pages froze while they showed themselves as live, and new ones got no answer."""

    def broken(*_: Any) -> str:
        raise ZeroDivisionError

    assert node.console is not None
    with watching(node) as events:
        next(events)
        monkeypatch.setattr(node.console._snapshots, "next", broken)
        name, values = next(event for event in events if event[0] != "now")
        assert (name, "ZeroDivisionError" in values["error"]) == ("end", True)
    monkeypatch.setattr(node.console._snapshots, "first", broken)
    assert told(node, "/console/events", {})[0] == 500
    assert "console: a call failed" in caplog.text
    monkeypatch.undo()
    assert first(node)["state"] == "SERVING"


def test_slow_watcher_gets_whole_events(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.console is not None
    large = '{"big":"%s"}' % ("x" * (32 << 20))
    monkeypatch.setattr(node.console._snapshots, "first", lambda *_: large)
    monkeypatch.setattr(console_module, "EVERY_S", 0.02)
    slow, console = connection(node), console_of(node)
    slow.request("POST", "/console/events", b"{}", OWN)
    wait_until(lambda: console.watchers.used == 1)
    time.sleep(0.1)  # some events become due
    reply = slow.getresponse()
    assert reply.readline() == b"event: now\n"
    assert reply.readline() == f"data: {large}\n".encode()
    assert [reply.readline() for _ in range(2)] == [b"\n", b"event: now\n"]
    reply.close()
    slow.close()


def test_watcher_is_not_evicted_by_other_connections(node: Node) -> None:
    silent = list[socket.socket]()

    def is_full() -> bool:
        silent.append(socket.create_connection(("127.0.0.1", node.metrics.port), 20.0))
        silent[-1].sendall(b"GET /console/ HTTP/1.1\r\n")
        return node.metrics._limiter.count == HTTP_CONNECTIONS_MAX // 2

    with watching(node) as events:
        next(events)
        wait_until(is_full)
        assert visit(node, "/console/")[0] == 200
        assert [next(events)[0] for _ in range(2)] == ["now", "now"]
        for sock in silent:
            sock.close()


def test_watcher_that_does_not_read_is_disconnected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other watchers get their events as before."""
    monkeypatch.setattr(console_module, "STALL_S", 0.5)
    assert node.console is not None
    monkeypatch.setattr(
        node.console._snapshots, "first", lambda *_: '{"big":"%s"}' % ("x" * (32 << 20))
    )
    slow = connection(node)
    slow.connect()
    slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    slow.request("POST", "/console/events", b"{}", OWN)
    console = console_of(node)
    wait_until(lambda: console.watchers.used == 1)
    monkeypatch.undo()
    monkeypatch.setattr(console_module, "STALL_S", 0.5)
    with watching(node) as events:
        next(events), next(events)
    wait_until(lambda: not console.watchers.used)
    slow.close()


def test_watcher_with_full_kernel_buffers_is_disconnected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a watcher that was gone kept its place, as the kernel buffered hours of
    events.
    """
    monkeypatch.setattr(console_module, "STALL_S", 0.5)
    assert node.console is not None
    monkeypatch.setattr(
        node.console._snapshots, "first", lambda *_: '{"some":"%s"}' % ("x" * (16 << 10))
    )
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 11)
        deaf.connect(("127.0.0.1", node.metrics.port))
        deaf.sendall(
            b"POST /console/events HTTP/1.1\r\nHost: localhost\r\nX-KVStore-Console: 1\r\n\r\n"
        )
        console = console_of(node)
        wait_until(lambda: console.watchers.used == 1)
        wait_until(lambda: not console.watchers.used)
