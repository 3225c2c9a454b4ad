"""A client with a near node, while owners or the near node fail, hang or send wrong bytes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fleet import KB16, MB, NUMBERS, copies, owned, owners, plant, present, tell, view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect, StartNode, settle
from waiting import wait_until

from kvstore import (
    DeadlineExceeded,
    Forbidden,
    KVStoreError,
    PutOutcome,
    Unauthenticated,
    Unavailable,
)
from kvstore.checksum import leaves
from kvstore.deadline import Deadline
from kvstore.transports.bulk import Arrived, BulkWire
from node.config import NodeConfig
from node.server import Node
from node.serving.connection import Connection


def test_get_works_after_the_near_node_died(
    start_node: StartNode, far: ClusterClient, connect: Connect, pages: Pages
) -> None:
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
    dies = Node(NodeConfig(**settings, ram_nbytes=16 << 20, drain_s=0.1))
    dies.start()
    nodes = [dies, start_node(), start_node()]
    tell(nodes, view_of(nodes))
    keys = pages.keys(*NUMBERS)
    pages.put(far(nodes), keys)
    client = connect(nodes[1], "auto", near="n0")
    client.open(pages.namespace)
    assert client.maps_arena
    dies.stop()
    lost = owned(view_of(nodes), pages, keys, "n0")
    assert pages.get(client, keys) == [key not in lost for key in keys]
    assert not client.maps_arena
    assert client.lookup(pages.namespace, keys).present.count(True) == len(keys) - len(lost)


@contextlib.contextmanager
def hanging() -> Iterator[str]:
    """Listen as a member that accepts connections and never answers; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_hanging_owner_costs_only_its_pages(
    cluster: list[Node], far: ClusterClient, connect: Connect, pages: Pages
) -> None:
    view, keys = view_of(cluster), pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    with hanging() as address:
        hung = replace(view.members[1], address=address)
        tell(cluster, replace(view, number=2, members=(view.members[0], hung, view.members[2])))
        client = connect(cluster[0], "auto", near="n0", timeout_s=8.0, connect_timeout_s=3.0)
        client.open(pages.namespace)
        began = time.monotonic()
        hits = pages.get(client, keys)
        assert time.monotonic() - began < 24.0
    assert hits == [key not in owned(view, pages, keys, "n1") for key in keys]
    assert client.stats.failures == 0  # must not count as a failure of the near node


def test_owner_hanging_in_a_get_costs_only_its_pages(
    cluster: list[Node],
    far: ClusterClient,
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages of the other members are hits, and the call keeps its deadline."""
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    go_on = threading.Event()
    begin = cluster[1].service.begin_get
    monkeypatch.setattr(
        cluster[1].service, "begin_get", lambda *arguments: (go_on.wait(60.0), begin(*arguments))[1]
    )
    client = connect(cluster[0], "auto", near="n0", timeout_s=8.0)
    client.open(pages.namespace)
    began = time.monotonic()
    hits = pages.get(client, keys)
    assert time.monotonic() - began < 24.0
    go_on.set()
    assert hits == [key not in owned(view_of(cluster), pages, keys, "n1") for key in keys]
    assert client.stats.failures == 0


def test_hanging_near_node_leaves_time_for_the_owners(
    cluster: list[Node],
    far: ClusterClient,
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    client = connect(cluster[0], "auto", near="n0", timeout_s=8.0)
    client.open(pages.namespace)
    go_on = threading.Event()
    begin = cluster[0].service.begin_get
    monkeypatch.setattr(
        cluster[0].service, "begin_get", lambda *arguments: (go_on.wait(60.0), begin(*arguments))[1]
    )
    began = time.monotonic()
    hits = pages.get(client, keys)
    assert time.monotonic() - began < 24.0
    go_on.set()
    assert hits == [key not in owned(view_of(cluster), pages, keys, "n0") for key in keys]


@pytest.mark.parametrize(("op", "opened"), [("begin_get", "open_get"), ("begin_put", "open_put")])
def test_hanging_near_node_leaves_time_for_the_owners_in_place(
    cluster: list[Node],
    connect: Connect,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    opened: str,
) -> None:
    keys = owned(view_of(cluster), pages, pages.keys(*NUMBERS), "n1")
    client = connect(cluster[0], "auto", near="n0")
    client.open(pages.namespace)
    go_on, begin = threading.Event(), getattr(cluster[0].service, op)
    monkeypatch.setattr(
        cluster[0].service, op, lambda *arguments: (go_on.wait(30.0), begin(*arguments))[1]
    )
    monkeypatch.setattr(cluster[0].service, "_unary", {})  # it answers no call
    asked = getattr(client, opened)(pages.namespace, keys, timeout_s=4.0)
    with pytest.raises(DeadlineExceeded, match=r"in (1\.\d+|2) s"), asked:
        pass
    assert not client.maps_arena  # the next call must not ask it
    assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
    go_on.set()


def test_commit_in_place_has_the_whole_timeout(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    keys = owned(view_of(cluster), pages, pages.keys(*NUMBERS), "n0")[:1]
    client = connect(cluster[0], "auto", near="n0")
    client.open(pages.namespace)
    with client.open_put(pages.namespace, keys, timeout_s=20.0) as slots:
        slots.pages[0][:] = pages.content(keys[0])
        assert slots._deadline.seconds == 20.0
        slots.commit([leaves(pages.content(keys[0]))])
    assert pages.get(client, keys) == [True]


def test_fetched_wrong_bytes_are_a_miss_and_dropped(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    (bad, *_) = owned(view_of(cluster), pages, keys, "n1")
    pages.flip(cluster[1], bad)
    before = cluster[1].tier.visible_count
    client = near(cluster)
    assert pages.get(client, keys) == [key != bad for key in keys]
    assert cluster[1].tier.visible_count == before - 1
    assert client.stats.corrupt_pages == 0  # no wrong byte must reach the client
    assert cluster[0].peers.remote_pages.pages_fetch_failed == 1


def test_damaged_pages_are_fetched_from_the_other_replica(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    view, keys = view_of(cluster, 3, 2), pages.keys(*NUMBERS)
    tell(cluster, view)
    for node in cluster[1:]:
        plant(node, pages, keys)
    for key in keys[:10]:
        pages.flip(cluster[1], key)
    assert pages.get(connect(cluster[0], "shm", near="n0"), keys) == [True] * len(keys)


class Refusing:
    """A member that answers some operations with an error."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ops: tuple[str, ...] = ()
        self.error: KVStoreError = Unauthenticated("a token that this member does not know")
        serve = Connection.serve_request

        def refusing(one: Connection, session: Any, op: str, request: Any) -> None:
            if one.service is node.service and op in self.ops:
                one.send_error(self.error)
            else:
                serve(one, session, op, request)

        monkeypatch.setattr(Connection, "serve_request", refusing)


@pytest.mark.parametrize("error", [Unauthenticated("other token"), Forbidden("no right")])
def test_member_that_refuses_costs_only_its_pages(
    cluster: list[Node],
    far: ClusterClient,
    near: ClusterClient,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: KVStoreError,
) -> None:
    """Regression: the pages of all other members were misses, too, and no log said why."""
    keys, client, refusing = pages.keys(*NUMBERS), near(cluster), Refusing(cluster[1], monkeypatch)
    pages.put(far(cluster), keys)
    refusing.ops, refusing.error = ("lookup", "get"), error
    theirs = owned(view_of(cluster), pages, keys, "n1")
    expected = [key not in theirs for key in keys]
    assert list(client.lookup(pages.namespace, keys).present) == expected
    assert pages.get(client, keys) == expected
    assert f"n1: {error}" in caplog.text


def test_pages_of_a_member_that_refuses_come_from_the_other_replica(
    cluster: list[Node], near: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, client, refusing = (
        view_of(cluster, 2, 2),
        near(cluster),
        Refusing(cluster[1], monkeypatch),
    )
    tell(cluster, view)
    every = pages.keys(*NUMBERS)
    both = zip(every, owners(view, pages.namespace, every), strict=True)
    keys = [key for key, some in both if "n0" not in some]
    for node in cluster[1:]:
        plant(node, pages, keys)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    refusing.ops = ("lookup", "get")
    assert pages.get(client, keys) == [True] * len(keys)


def test_share_of_a_fetch_that_fails_is_asked_for_again_alone(
    cluster: list[Node],
    far: ClusterClient,
    near: ClusterClient,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came over the other connections may be evicted, and its slots reused, by then."""
    keys = owned(view_of(cluster), pages, pages.keys(*NUMBERS), "n1")
    pages.put(far(cluster), keys)
    client, get, asked = near(cluster), BulkWire._get, list[list[bytes]]()
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)

    def failing(wire: BulkWire, request: Any, *more: Any) -> list[Arrived | None]:
        asked.append(request.prefix_hashes[:])
        if keys[1] in asked[-1] and len(asked) <= 3:
            raise Unavailable("the connection is cut")
        return get(wire, request, *more)

    monkeypatch.setattr("kvstore.transports.bulk.stream_count", lambda count, _: min(count, 3))
    monkeypatch.setattr(BulkWire, "_get", failing)
    assert pages.get(client, keys) == [True] * len(keys)
    assert sorted(key for some in asked[3:] for key in some) == keys[1::3]
    assert cluster[0].peers.remote_pages.pages_fetched == len(keys)


class Slow:
    """A block of all fetches that lasts until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.count = 0
        fetch = BulkWire.fetch

        def slow(wire: BulkWire, *arguments: Any, **named: Any) -> list[Arrived | None]:
            self.count += 1
            self.waiting.release()
            assert self.go_on.wait(60.0)
            return fetch(wire, *arguments, **named)

        monkeypatch.setattr(BulkWire, "fetch", slow)


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    return thread, made


@pytest.fixture
def fetching(
    cluster: list[Node],
    far: ClusterClient,
    near: ClusterClient,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[list[bytes], Slow, tuple[threading.Thread, list[Any]]]]:
    """Start a slow fetch of pages of n1 by n0 for one reader.

    Yields the keys, the block, and the reading thread with its hits.
    """
    keys = owned(view_of(cluster), pages, pages.keys(*NUMBERS), "n1")
    pages.put(far(cluster), keys)
    client = near(cluster)
    client.open(pages.namespace)
    slow = Slow(monkeypatch)
    reading = beside(lambda: pages.get(client, keys))
    assert slow.waiting.acquire(timeout=60.0)
    yield keys, slow, reading
    slow.go_on.set()
    reading[0].join()


def test_two_readers_share_one_fetch(
    fetching: Any, cluster: list[Node], near: ClusterClient, pages: Pages
) -> None:
    keys, slow, (first, hits) = fetching
    second, others = beside(lambda: pages.get(near(cluster), keys))
    assert not slow.waiting.acquire(timeout=0.5)
    slow.go_on.set()
    first.join()
    second.join()
    assert hits == others == [[True] * len(keys)]
    assert slow.count == 1
    assert cluster[0].peers.remote_pages.pages_fetched == len(keys)


def test_reader_that_left_does_not_make_owners_look_failed(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    """Regression: the owners' circuit breakers opened, and others got misses for a while."""
    node, keys = cluster[0], pages.keys(*range(24))
    pages.put(far(cluster), keys)
    deadline = Deadline(30.0)
    near(cluster).open(pages.namespace)
    acquired = node.tier.acquire(pages.namespace.digest, keys, False, 1, None, deadline)
    assert acquired.loads
    came = node.tier.promotion.read(acquired, lambda: True)
    assert came.count(None) == len(acquired.loads)
    node.tier.release([page for page in acquired.pages if page is not None])
    assert not any(node.peers.channels.failing().values())
    assert pages.get(near(cluster), keys) == [True] * len(keys)


def test_page_removed_during_its_fetch_does_not_stay(
    fetching: Any, cluster: list[Node], pages: Pages
) -> None:
    keys, slow, (reading, hits) = fetching
    cluster[0].tier.remove(pages.namespace.digest, keys[:2])
    slow.go_on.set()
    reading.join()
    assert hits == [[True] * len(keys)]  # for the reader that asked before the removal
    wait_until(lambda: copies(cluster[0])[0] == len(keys) - 2)  # once they are released
    assert cluster[0].tier.lookup(pages.namespace.digest, keys[:2], False) == [False, False]


def test_fetch_survives_a_view_change(
    fetching: Any, cluster: list[Node], near: ClusterClient, pages: Pages
) -> None:
    keys, slow, (reading, hits) = fetching
    view = view_of(cluster)
    tell(cluster, replace(view, number=2, members=(view.members[0], view.members[2])))
    slow.go_on.set()
    reading.join()
    assert len(hits[0]) == len(keys)
    # Fetched pages are at n0, the others at no member of the new view
    assert pages.get(near(cluster), keys) == hits[0]


def test_page_being_written_here_comes_from_others(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    """The writer may be a sweep, another member that replicates the page, or a slow client."""
    view, tier = view_of(cluster), cluster[0].tier
    keys = [key for name in ("n1", "n2") for key in owned(view, pages, pages.keys(*NUMBERS), name)]
    pages.put(far(cluster), keys)
    client = near(cluster)
    client.open(pages.namespace)
    reservation = tier.reserve(pages.namespace.digest, keys[:8], pages.nbytes)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    assert pages.get(client, [*keys, keys[0]]) == [True] * (len(keys) + 1)
    wait_until(lambda: not tier.held_count)
    assert tier.visible_count == len(keys) - 8
    tier.abort(reservation)
    assert pages.get(client, keys) == [True] * len(keys)
    wait_until(lambda: not tier.held_count)
    assert tier.visible_count == len(keys)
    assert tier.check() == []


def test_near_node_holds_nothing_after_a_fetch(
    fetching: Any, cluster: list[Node], pages: Pages
) -> None:
    _, slow, (reading, _) = fetching
    slow.go_on.set()
    reading.join()
    settle(cluster[0], sessions=None)


def test_puts_and_near_gets_in_a_small_node_stay_correct(
    pair: list[Node], far: ClusterClient, near: ClusterClient, connect: Connect
) -> None:
    """Random puts and near gets under memory pressure return no wrong byte and leave no damage."""
    nodes = pair
    pages, own = Pages("fetched", KB16), Pages("own", KB16)
    theirs = owned(view_of(nodes), pages, pages.keys(*range(600)), "n1")
    mine = owned(view_of(nodes), own, own.keys(*range(1200)), "n0")
    pages.put(far(nodes), theirs)
    clients = [near(nodes) for _ in range(3)]
    stop = time.monotonic() + 2.0
    remote, broken = nodes[0].peers.remote_pages, list[BaseException]()

    def storm(number: int) -> None:
        try:
            at = 0
            while time.monotonic() < stop or (
                remote.pages_fetched <= 100 and time.monotonic() < stop + 60.0
            ):
                at += 7
                if number < 2:
                    some = [theirs[(at * (number + 1) + i) % len(theirs)] for i in range(12)]
                    pages.get(clients[number], some)
                else:
                    own.put(clients[number], mine[at % 500 : at % 500 + 12])
                assert copies(nodes[0])[1] <= MB
        except BaseException as error:  # noqa: BLE001 -- reported by the test
            broken.append(error)

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []
    assert remote.pages_fetched > 100
    assert nodes[0].check() == []


def test_node_without_a_cluster_makes_no_near_copies(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    node = start_node()
    client = connect(node, "shm")
    pages.put(client, pages.keys(1, 2))
    assert pages.get(client, pages.keys(1, 2, 3)) == [True, True, False]
    assert copies(node) == (0, 0)
    assert not client.node_status().peers


def test_held_near_copies_are_not_evicted(
    pair: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    nodes = pair
    pages = Pages("held", KB16)
    keys = owned(view_of(nodes), pages, pages.keys(*range(400)), "n1")
    pages.put(far(nodes), keys)
    client = near(nodes)
    with client.open_get(pages.namespace, keys[:32]) as held:
        assert held.hits == [True] * 32
        for start in range(32, len(keys), 16):
            assert all(pages.get(client, keys[start : start + 16]))
        assert [bytes(page) for page in held.pages] == [pages.content(key) for key in keys[:32]]
        assert nodes[0].check() == []


def test_removal_holds_over_two_hops(
    cluster: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n0 replicates pages to n1 after n1 was asked to remove them, and n2 fetches them from n1
    before n1 is asked again.
    """
    view = view_of(cluster)
    keys = [
        key
        for key, own in zip(
            pages.keys(*range(60)),
            owners(view, pages.namespace, pages.keys(*range(60))),
            strict=True,
        )
        if own == ("n1",)
    ]
    writer, reader = connect(cluster[0], "auto", near="n0"), connect(cluster[2], "auto", near="n2")
    writer.open(pages.namespace)
    reader.open(pages.namespace)
    asked, carry, rounds = threading.Event(), cluster[0].peers.replicator._send, [0, 0, 0]

    def late(batch: Any) -> list[bytes]:
        assert asked.wait(30.0)
        return carry(batch)

    monkeypatch.setattr(cluster[0].peers.replicator, "_send", late)

    def delayed(number: int) -> Callable[[Any, Any], Any]:
        remove = cluster[number].service._unary["remove"]

        def removed(request: Any, caller: Any) -> Any:
            rounds[number] += 1
            if (number, rounds[number]) == (0, 1):
                assert cluster[0].peers.replicator.wait_empty(30.0)
            if (number, rounds[number]) == (1, 2):
                wait_until(lambda: rounds[2] == 2)
                assert all(pages.get(reader, keys))
            reply = remove(request, caller)
            if number == 1:
                asked.set()
            return reply

        return removed

    for number, node in enumerate(cluster):
        monkeypatch.setitem(node.service._unary, "remove", delayed(number))
    pages.put(writer, keys)
    assert writer.remove(pages.namespace, keys) == [True] * len(keys)
    assert [any(present(node, pages.namespace, keys)) for node in cluster] == [False] * 3
    assert pages.get(reader, keys) == [False] * len(keys)


def test_removal_with_a_hanging_member_reports_the_others(
    cluster: list[Node], far: ClusterClient, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys, over = far(cluster), pages.keys(*NUMBERS), threading.Event()
    pages.put(client, keys)
    remove = cluster[1].service._unary["remove"]
    monkeypatch.setitem(
        cluster[1].service._unary,
        "remove",
        lambda request, caller: over.wait(60.0) and remove(request, caller),
    )
    away: dict[str, Any] = {}
    mine = owned(view_of(cluster), pages, keys, "n1")
    try:
        removed = client.remove(pages.namespace, keys, timeout_s=6.0, away=away)
    finally:
        over.set()
    assert list(away) == ["n1"]
    assert removed == [key not in mine for key in keys]
