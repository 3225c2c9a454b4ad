"""A client of several nodes: which node has which page, and what a lost member costs."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fleet import tell, view_of
from known_pages import Pages
from local_nodes import Connect, StartNode
from log_windows import one_window

from kvstore import InvalidRequest, ProtocolError, PutOutcome, Unavailable, admin
from kvstore.cluster import fan_out
from kvstore.cluster.view import State, View, static_view
from kvstore.log_rate import LINES
from node.config import NodeConfig
from node.server import Node

NUMBERS = range(48)


@pytest.fixture
def cluster(start_node: StartNode) -> list[Node]:
    nodes = [start_node() for _ in range(3)]
    tell(nodes, view_of(nodes))
    return nodes


def owned(view: View, pages: Pages, numbers: Sequence[int], member: str) -> list[int]:
    owners = view.owners.owners(pages.namespace.digest, pages.keys(*numbers))
    return [number for number, some in zip(numbers, owners, strict=True) if some[0] == member]


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_pages_are_stored_at_owners_and_returned_in_order(
    cluster: list[Node], connect: Connect, pages: Pages, wire: str
) -> None:
    client, keys = connect(cluster[0], wire, near="none"), pages.keys(*NUMBERS)
    assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
    assert pages.put(client, keys) == [PutOutcome.EXISTS] * len(keys)
    assert pages.get(client, keys) == [True] * len(keys)
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys)
    view = view_of(cluster)
    for number, node in enumerate(cluster):
        mine = owned(view, pages, NUMBERS, f"n{number}")
        assert 0 < len(mine) == node.tier.visible_count
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(keys)
    assert [page.prefix_hash for page in client.list_pages(pages.namespace, limit=5)] == sorted(
        keys
    )[:5]
    ((_, info),) = [found for found in client.namespaces() if found[0] == pages.namespace]
    assert (info.page_count, info.counters.pages_put) == (len(keys), len(keys))
    assert all(page.present for page in client.stat(pages.namespace, keys))
    assert (
        client.pin(pages.namespace, keys, 5.0)
        == client.unpin(pages.namespace, keys)
        == [True] * len(keys)
    )
    assert client.verify(pages.namespace, keys) == (len(keys), 0, 0)
    assert client.remove(pages.namespace, keys[:7]) == [True] * 7
    assert client.remove_namespace(pages.namespace) == len(keys) - 7
    assert [node.tier.visible_count for node in cluster] == [0, 0, 0]


def test_prefix_ends_at_the_first_missing_page(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    client, keys = connect(cluster[1]), pages.keys(*NUMBERS)
    pages.put(client, keys[:20] + keys[21:])
    buffers = [bytearray(pages.nbytes) for _ in keys]
    assert client.get(pages.namespace, keys, buffers, prefix=True) == [True] * 20 + [False] * 28
    found = client.lookup(pages.namespace, keys)
    assert (found.prefix_pages, found.present.count(True)) == (20, 47)


def test_dead_member_costs_only_its_own_pages(
    cluster: list[Node], start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    client, keys = connect(cluster[2]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    lost = owned(view_of(cluster), pages, NUMBERS, "n0")
    dead = replace(view_of(cluster).members[0], address="127.0.0.1:9")
    tell(
        cluster, replace(view_of(cluster), number=2, members=(dead, *view_of(cluster).members[1:]))
    )
    other = connect(cluster[1])
    hits = pages.get(other, keys)
    assert [number for number, hit in zip(NUMBERS, hits, strict=True) if not hit] == lost
    outcomes = pages.put(other, keys)
    assert [
        number for number, some in zip(NUMBERS, outcomes, strict=True) if some is PutOutcome.AWAY
    ] == lost
    # An engine that pins what it finds loses only those pages, too
    pinned = other.pin(pages.namespace, keys, 5.0)
    assert [number for number, some in zip(NUMBERS, pinned, strict=True) if not some] == lost
    with pytest.raises(Unavailable):
        other.remove(pages.namespace, keys)  # the dead member may still have a copy
    answers = other.statuses()
    assert [isinstance(answer, Unavailable) for answer in answers.values()] == [True, False, False]


def test_call_for_pages_of_a_dead_member_only_is_a_miss(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    mine = pages.keys(*owned(view_of(cluster), pages, NUMBERS, "n0"))
    dead = replace(view_of(cluster).members[0], address="127.0.0.1:9")
    tell(
        cluster, replace(view_of(cluster), number=2, members=(dead, *view_of(cluster).members[1:]))
    )
    client = connect(cluster[1], "bulk", near="none")
    assert pages.get(client, mine) == [False] * len(mine)
    assert pages.put(client, mine) == [PutOutcome.AWAY] * len(mine)
    assert client.lookup(pages.namespace, mine).prefix_pages == 0


def test_cluster_without_any_answer_raises(
    connect: Connect, cluster: list[Node], pages: Pages
) -> None:
    members = tuple(
        replace(member, address=f"127.0.0.1:{9 + i}")
        for i, member in enumerate(view_of(cluster).members)
    )
    tell(cluster, View("fleet", 3, members))
    client = connect(cluster[0])
    with pytest.raises(Unavailable):
        pages.get(client, pages.keys(1, 2))


def test_pages_of_a_joining_member_are_found_at_former_owners(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    view, keys = view_of(cluster), pages.keys(*NUMBERS)
    tell(cluster, replace(view, members=view.members[:2]))
    pages.put(connect(cluster[0]), keys)
    assert cluster[2].tier.visible_count == 0
    tell(cluster, replace(view_of(cluster, n2=State.JOINING), number=2))
    client = connect(cluster[0])
    assert pages.get(client, keys) == [True] * len(keys)
    assert cluster[2].service.sessions.count > 0  # the client asked it first
    more = [number + 100 for number in NUMBERS]
    pages.put(client, pages.keys(*more))
    assert cluster[2].tier.visible_count == len(owned(view, pages, more, "n2")) > 0


def test_draining_member_gets_no_puts_and_serves_gets(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(connect(cluster[0]), keys)
    before = cluster[1].tier.visible_count
    tell(cluster, replace(view_of(cluster, n1=State.DRAINING), number=2))
    client = connect(cluster[0])
    assert pages.get(client, keys) == [True] * len(keys)
    pages.put(client, pages.keys(*(number + 100 for number in NUMBERS)))
    assert cluster[1].tier.visible_count == before
    assert client.remove(pages.namespace, keys) == [True] * len(keys)
    assert cluster[1].tier.visible_count == 0


def test_single_node_calls_are_refused_for_a_cluster(cluster: list[Node], connect: Connect) -> None:
    client = connect(cluster[0])
    for call in (client.node_status, client.scrub, client.recover):
        with pytest.raises(InvalidRequest, match="needs one node"):
            call()


def test_nodes_of_two_clusters(cluster: list[Node], connect: Connect, pages: Pages) -> None:
    other = replace(view_of(cluster), cluster="other", number=9)
    cluster[1].membership.become(other)
    client = connect(cluster[0])
    with pytest.raises(ProtocolError, match="belongs to the cluster other, the others to fleet"):
        client.remove(pages.namespace, pages.keys(*NUMBERS))


def test_several_addresses_of_separate_nodes_are_refused(
    start_node: StartNode, connect: Connect
) -> None:
    one, two = start_node(), start_node()
    client = connect(one, address=f"127.0.0.1:{one.grpc.port},127.0.0.1:{two.grpc.port}")
    for _ in range(2):  # the first node alone must not serve a later call
        with pytest.raises(ProtocolError, match="is in no cluster, but 2 addresses were given"):
            client.node_status()


def test_page_at_two_members_is_listed_once(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    """While members join or leave, two of them may have the same page."""
    keys = pages.keys(*range(6))
    pages.put(connect(cluster[0], direct=True), keys[:4])
    pages.put(connect(cluster[1], direct=True), keys[2:])
    client = connect(cluster[2])
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == keys
    assert [page.prefix_hash for page in client.list_pages(pages.namespace, limit=4)] == keys[:4]
    assert [page.prefix_hash for page in client.list_pages(pages.namespace, after=keys[2])] == keys[
        3:
    ]


def test_hanging_address_leaves_time_for_the_next(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]},127.0.0.1:{cluster[1].grpc.port}"
        client = connect(cluster[1], address=address, timeout_s=4.0, connect_timeout_s=4.0)
        assert pages.put(client, pages.keys(1)) == [PutOutcome.STORED]


def test_dead_first_address_is_skipped(cluster: list[Node], connect: Connect, pages: Pages) -> None:
    client = connect(cluster[1], address=f"127.0.0.1:9, 127.0.0.1:{cluster[1].grpc.port}")
    assert pages.put(client, pages.keys(1, 2, 3)) == [PutOutcome.STORED] * 3


def test_client_learns_new_members_when_it_reconnects(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    named = [f"n{number}=127.0.0.1:{node.grpc.port}" for number, node in enumerate(cluster)]
    tell(cluster, static_view(f"static:fleet/{','.join(named[:2])}"))
    client, keys = connect(cluster[0], "grpc"), pages.keys(*NUMBERS)
    pages.put(client, keys)
    tell(cluster, static_view(f"static:fleet/{','.join(named)}"))
    for link in client._fan_out.nodes.all().values():
        if link._connection:  # there is no connection yet to a new member
            link._drop(link._connection)  # as after a restart
    pages.get(client, keys)
    pages.put(client, keys)
    assert cluster[2].tier.visible_count == len(owned(view_of(cluster), pages, NUMBERS, "n2"))


def test_get_survives_a_member_leaving_after_routing(
    cluster: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = connect(cluster[0]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    routes = fan_out.routes

    def shrunk(*arguments: Any) -> Any:
        found = routes(*arguments)
        client._fan_out.nodes._view = replace(
            view_of(cluster), number=2, members=view_of(cluster).members[:2]
        )
        return found

    monkeypatch.setattr(fan_out, "routes", shrunk)
    assert pages.get(client, keys) == [True] * len(keys)


def test_list_skips_a_dead_member(start_node: StartNode, connect: Connect, pages: Pages) -> None:
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "bulk_port": 0, "metrics_port": 0}
    dies = Node(NodeConfig(**settings, ram_nbytes=16 << 20, drain_s=0.1))
    dies.start()
    nodes = [start_node(), dies]
    tell(nodes, view_of(nodes))
    client = connect(nodes[0])
    pages.put(client, pages.keys(*NUMBERS))
    dies.stop()
    mine = owned(view_of(nodes), pages, NUMBERS, "n0")
    assert [page.prefix_hash for page in client.list_pages(pages.namespace)] == sorted(
        pages.keys(*mine)
    )


def test_full_member_reports_full_and_not_away(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    nodes = [start_node(copies_share=1.0) for _ in range(2)]
    tell(nodes, view_of(nodes))
    client, other, large = (
        connect(nodes[0]),
        connect(nodes[1], "shm", direct=True),
        Pages("large", 1 << 18),
    )
    with contextlib.ExitStack() as held:
        for start in range(0, 16, 4):  # all of its RAM
            held.enter_context(
                other.open_put(large.namespace, large.keys(*range(start, start + 4)))
            )
        outcomes = pages.put(client, pages.keys(*NUMBERS))
    refused = [
        number for number, some in zip(NUMBERS, outcomes, strict=True) if some is PutOutcome.FULL
    ]
    assert refused == owned(view_of(nodes), pages, NUMBERS, "n1")
    assert PutOutcome.AWAY not in outcomes


def test_dead_member_does_not_flood_the_log(
    cluster: list[Node],
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_window(admin.log, monkeypatch)
    view = view_of(cluster)
    tell(
        cluster,
        replace(view, members=(replace(view.members[0], address="127.0.0.1:9"), *view.members[1:])),
    )
    client = connect(cluster[1])
    for _ in range(2 * LINES):  # LMCache asks ten times a second
        client.namespaces()
    assert 0 < [record.name for record in caplog.records].count(admin.log.name) <= LINES
