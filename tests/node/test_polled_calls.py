"""Small lookups ask all members from one thread, and one member's fault harms no other's answer."""

import gc
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import owners, tell, view_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore import Client
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded
from kvstore.transports import polled_calls
from kvstore.transports.bulk import BulkWire
from kvstore.transports.frames import FrameSocket
from node.server import Node

COUNT = 60


class Cluster:
    """Three members without replicas, a client that is connected to all, and its pages.

    `owner` has the number of each key's member.
    """

    def __init__(self, nodes: list[Node], client: Client, pages: Pages) -> None:
        self.nodes, self.client, self.pages = nodes, client, pages
        self.keys = pages.keys(*range(COUNT))
        self.view = view_of(nodes)
        tell(nodes, self.view)
        pages.put(client, self.keys)
        routes = owners(self.view, pages.namespace, self.keys)
        self.owner = [int(route[0][1:]) for route in routes]
        assert {*self.owner} == {0, 1, 2}
        assert self.lookup() == [True] * COUNT

    def lookup(self, **options: Any) -> list[bool]:
        return list(self.client.lookup(self.pages.namespace, self.keys, **options).present)

    def without(self, number: int) -> list[bool]:
        """Return the answer when a member's keys are misses."""
        return [owner != number for owner in self.owner]

    def wire(self, number: int) -> BulkWire:
        address = self.view.by_id[f"n{number}"].address
        link = self.client._fan_out.nodes.all()[address].connection
        assert link is not None
        assert isinstance(link.wire, BulkWire)
        return link.wire

    def leases(self) -> list[int]:
        return [self.wire(number)._pool._leases.count for number in range(3)]


@pytest.fixture
def cluster(start_node: StartNode, connect: Connect, pages: Pages) -> Iterator[Cluster]:
    """Start the cluster; from now on a call of one thread per member fails the test."""
    nodes = [start_node() for _ in range(3)]
    yield Cluster(nodes, connect(nodes[0]), pages)
    tell(nodes, view_of(nodes, number=2))


@pytest.fixture
def in_threads(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets a number for each call that was left to a thread."""
    counts: list[int] = []
    ask = cluster.client._fan_out._ask_member

    def counted(*arguments: Any) -> Any:
        counts.append(1)
        return ask(*arguments)

    monkeypatch.setattr(cluster.client._fan_out, "_ask_member", counted)
    return counts


def test_lookups_of_connected_members_need_no_thread(
    cluster: Cluster, in_threads: list[int]
) -> None:
    assert cluster.lookup() == [True] * COUNT
    assert cluster.lookup(touch=True) == [True] * COUNT
    missing = cluster.pages.keys(*range(1000, 1010))
    found = cluster.client.lookup(cluster.pages.namespace, [*cluster.keys, *missing])
    assert found.present == (True,) * COUNT + (False,) * 10
    assert found.prefix_pages == COUNT
    assert sum(in_threads) == 0
    assert cluster.leases() == [0, 0, 0]


def test_lookups_leave_no_garbage(cluster: Cluster) -> None:
    """Regression: engines that stop the garbage collector lost memory by each lookup."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            cluster.lookup()
        assert not [
            one for one in gc.get_objects() if isinstance(one, polled_calls.PolledConnection)
        ]
    finally:
        gc.enable()


def test_many_keys_are_left_to_threads(cluster: Cluster, in_threads: list[int]) -> None:
    """A request must fit the socket's buffer, or sending would wait."""
    keys = cluster.pages.keys(*range(2000))
    assert sum(cluster.client.lookup(cluster.pages.namespace, keys).present) == COUNT
    assert sum(in_threads) == 3


@pytest.fixture
def hang(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let one member hang in lookups until the event is set."""
    go_on = threading.Event()
    serve = cluster.nodes[1].service._unary["lookup"]

    def late(*arguments: Any) -> Any:
        go_on.wait(60.0)
        return serve(*arguments)

    monkeypatch.setitem(cluster.nodes[1].service._unary, "lookup", late)
    yield go_on
    go_on.set()


def test_member_that_hangs_costs_only_its_own_keys(cluster: Cluster, hang: threading.Event) -> None:
    began = time.monotonic()
    assert cluster.lookup(timeout_s=3.0) == cluster.without(1)
    assert time.monotonic() - began >= 2.9
    hang.set()
    wait_until(lambda: cluster.leases() == [0, 0, 0])  # a thread looks whether the member lives
    wait_until(lambda: cluster.lookup() == [True] * COUNT)  # the circuit breaker pauses


@pytest.mark.parametrize("noticed", [True, False])
def test_call_that_needs_a_thread_does_not_wait_for_member_that_hangs(
    cluster: Cluster, hang: threading.Event, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """Regression: a closed connection was made again only after the others had answered."""
    for connection in cluster.wire(2)._pool._idle:
        connection._sock.shutdown(socket.SHUT_RDWR)
    if not noticed:
        monkeypatch.setattr(FrameSocket, "quiet", True)
    assert cluster.lookup(timeout_s=4.0) == cluster.without(1)


def test_replies_that_are_there_at_the_deadline_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a member that stalls within a reply would cost the answers of all others."""

    def late(limit: Deadline) -> int:
        time.sleep(max(0.0, limit.left()) + 0.1)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(polled_calls, "_left_ms", late)
        assert cluster.lookup(timeout_s=3.0) == [True] * COUNT


def test_deadline_that_ends_at_a_look_at_it_costs_no_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was looked at twice in a row; the second look raised."""

    def late(limit: Deadline) -> int:
        time.sleep(max(0.0, limit.left()))
        with monkeypatch.context() as patch:
            patch.setattr(Deadline, "passed", False)
            return left_ms(limit)

    left_ms = polled_calls._left_ms
    monkeypatch.setattr(polled_calls, "_left_ms", late)
    assert cluster.lookup(timeout_s=3.0) == [True] * COUNT


def test_request_after_the_deadline_closes_no_connection(cluster: Cluster) -> None:
    """Regression: a connection was taken, and closed because it could not be armed."""
    pool = cluster.wire(0)._pool
    idle = list(pool._idle)
    with pytest.raises(DeadlineExceeded):
        pool.attempt_now(Deadline(0.0))
    assert pool._idle == idle


def test_longest_deadlines_are_no_error(cluster: Cluster, in_threads: list[int]) -> None:
    """Regression: `poll` refused deadlines of 25 days and more."""
    assert cluster.lookup(timeout_s=1e8) == [True] * COUNT
    assert not in_threads


@pytest.mark.parametrize("noticed", [True, False])
def test_closed_connection_is_made_again(
    cluster: Cluster, in_threads: list[int], monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """It may be closed before the call, or between the look at it and the request."""
    for connection in cluster.wire(2)._pool._idle:
        connection._sock.shutdown(socket.SHUT_RDWR)
    if not noticed:
        monkeypatch.setattr(FrameSocket, "quiet", True)
    assert cluster.lookup() == [True] * COUNT
    assert sum(in_threads) == 1
    assert cluster.lookup() == [True] * COUNT
    assert sum(in_threads) == 1


def test_namespace_that_a_member_forgot_is_opened_again(
    cluster: Cluster, connect: Connect, in_threads: list[int]
) -> None:
    connect(cluster.nodes[0], direct=True).remove_namespace(cluster.pages.namespace)
    assert cluster.lookup() == cluster.without(0)
    assert sum(in_threads) == 1
    assert cluster.lookup() == cluster.without(0)
    assert sum(in_threads) == 1


def test_interrupt_leaves_no_connection_out_of_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(limit: Deadline) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(polled_calls, "_left_ms", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cluster.lookup()
    assert cluster.leases() == [0, 0, 0]
    assert [len(cluster.wire(number)._pool._idle) for number in range(3)] == [0, 0, 0]
    assert cluster.lookup() == [True] * COUNT


def test_steps_that_an_interrupt_drops_cause_no_warning(cluster: Cluster) -> None:
    """Regression: each printed that a coroutine was never awaited, and lost a further interrupt."""
    address = cluster.view.by_id["n0"].address
    channel = cluster.client._fan_out.nodes.all()[address]
    assert channel.connection is not None
    ask: Any = lambda link, limit: iter(())  # noqa: E731
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        polled_calls._connect(channel)(Deadline(1.0))
        polled_calls._work(ask)(channel.connection, Deadline(1.0))
        gc.collect()
    assert not [one for one in shown if issubclass(one.category, RuntimeWarning)]
