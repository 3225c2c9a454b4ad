"""Queries: leading blocks over ranks and groups, by medium and host, of a node and of a cluster."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from fleet import tell, view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect, StartNode
from people import MODEL, People, client, namespace

from kvstore import Client, InvalidRequest
from kvstore.cluster.query import COPY, DISK, RAM, combined
from kvstore.cluster.view import Member, View
from kvstore.keys import block_part, part_of
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import HostBlocks, QueryResult
from node.server import Node


def only(results: Sequence[QueryResult]) -> QueryResult:
    assert len(results) == 1
    return results[0]


@pytest.mark.parametrize("wire", ["bulk", "shm", "grpc"])
def test_query_finds_leading_blocks(node: Node, connect: Connect, pages: Pages, wire: str) -> None:
    client, keys = connect(node, wire), pages.keys(*range(8))
    pages.put(client, [*keys[:3], keys[5]])
    before = client.node_status().totals
    found = only(client.query(pages.namespace.model, keys))
    assert (found.blocks, found.ram, found.disk) == (3, 3, 0)
    assert [(host.blocks, host.ram) for host in found.hosts] == [(3, 3)]
    assert found.model.model == pages.namespace.model
    assert client.node_status().totals == before, "neither a use nor a lookup"
    assert client.query(pages.namespace.model, keys[3:]) == []
    assert client.query("another", keys) == []


def test_block_counts_when_all_ranks_and_groups_have_it(node: Node, connect: Connect) -> None:
    client = connect(node)
    parts = [
        Pages("q", 4096, part=part_of("c", 0, 2)),
        *(Pages("q", 8192, tp_rank=rank, tp_size=2, part=part_of("c", 1, 2)) for rank in range(2)),
    ]
    keys = parts[0].keys(*range(5))
    for part, count in zip(parts, (5, 4, 2), strict=True):
        assert client.query("q", keys) == []
        part.put(client, keys[:count])
    assert only(client.query("q", keys)).blocks == 2
    other = Pages("q", 4096, revision="other")  # another KV of this name
    other.put(client, keys[:3])
    assert sorted(result.blocks for result in client.query("q", keys)) == [2, 3]


def test_query_tells_what_is_on_disk(
    start_node: StartNode, connect: Connect, tmp_path: Path
) -> None:
    node = start_node(data_dir=str(tmp_path / "d"), disk_nbytes=1 << 25, ram_nbytes=1 << 20)
    client, pages = connect(node), Pages("spills", 64 << 10)
    keys = pages.keys(*range(24))
    for key in keys:  # more than RAM holds
        pages.put(client, [key], durable=True)
    found = only(client.query("spills", keys))
    assert (found.blocks, found.disk) == (24, 24)
    assert found.ram < 24


def test_query_of_a_cluster_asks_all_members(cluster: list[Node], far: ClusterClient) -> None:
    tell(cluster, view_of(cluster))
    client, parts = far(cluster), [Pages("c", tp_rank=rank, tp_size=2) for rank in range(2)]
    keys = parts[0].keys(*range(24))
    for part in parts:
        part.put(client, keys)
    found = only(client.query("c", keys))
    assert found.blocks == 24
    assert all(host.blocks < 24 for host in found.hosts), "no member has all"
    client.remove(parts[1].namespace, keys[7:8])
    assert only(client.query("c", keys)).blocks == 7


def test_near_copies_count_for_their_host_only() -> None:
    keys, space = Pages("n").keys(*range(3)), Pages("n").namespace
    about = pb.FeedModel(id=space.digest, blocks=b"k" * 16, model="n", groups=1, ranks=1)
    reply = pb.QueryReply(
        parts=[pb.QueryPart(about=about, places=bytes([RAM | DISK, RAM | COPY, 0]))]
    )
    alone = only(combined({"h:1": reply}, None, keys))
    assert alone.hosts == (HostBlocks("h:1", 2, 2, 1),)
    members = (Member("n0", "h:1"), Member("n1", "h:2"))
    view = View("fleet", 1, members, replicas=2)
    (found,) = combined({"h:1": reply, "h:2": pb.QueryReply()}, view, keys)
    assert (found.blocks, found.hosts) == (1, alone.hosts), "others do not find the copy"


@pytest.mark.parametrize("first", [0, 1])
def test_member_that_knows_more_tells_what_a_block_needs(first: int) -> None:
    """A member's row may be older than the part that the engine has named since."""
    keys, space = Pages("n").keys(*range(3)), Pages("n", part=part_of("c", 0, 2)).namespace
    known, digest = block_part(space), space.digest
    older = pb.FeedModel(id=digest, blocks=b"k" * 16, model="n", groups=1, ranks=1)
    newer = pb.FeedModel(id=digest, blocks=known.id, model="n", groups=2, ranks=1)
    parts = [pb.QueryPart(about=about, places=bytes([RAM] * 3)) for about in (older, newer)]
    replies = {"h:1": parts[first], "h:2": parts[1 - first]}
    view = View("fleet", 1, (Member("n0", "h:1"), Member("n1", "h:2")), replicas=2)
    found = {address: pb.QueryReply(parts=[part]) for address, part in replies.items()}
    assert combined(found, view, keys) == [], "the other group has no page"


def test_places_that_nobody_asked_for_are_ignored() -> None:
    keys, space = Pages("n").keys(0), Pages("n").namespace
    about = pb.FeedModel(id=space.digest, blocks=b"k" * 16, model="n", groups=1, ranks=1)
    reply = pb.QueryReply(parts=[pb.QueryPart(about=about, places=bytes([RAM] * 9))])
    view = View("fleet", 1, (Member("n0", "h:1"),), replicas=1)
    assert only(combined({"h:1": reply}, view, keys)).blocks == 1


def test_tenants_are_told_of_their_own(start_node: StartNode, tmp_path: Path) -> None:
    people, key = People(tmp_path / "identities"), [b"a" * 32]
    for name, tenant in (("a", "team-a"), ("b", "team-b"), ("everybody's", "*")):
        people.join(name, tenant, "write")
    node = start_node(identities=str(people.path))
    with client(node, people.tokens["a"]) as one:
        one.put(namespace("team-a"), key, [bytes(4096)])
    for name, tenant, count in (
        ("a", "", 1),
        ("b", "", 0),
        ("b", "team-a", 0),
        ("everybody's", "team-a", 1),
        ("everybody's", "team-b", 0),
    ):
        with client(node, people.tokens[name]) as one:
            assert len(one.query(MODEL, key, tenant)) == count


@pytest.mark.parametrize(("model", "count"), [("", 1), ("m" * 2000, 1), ("m", 0)])
def test_wrong_queries_are_refused(node: Node, connect: Connect, model: str, count: int) -> None:
    client: Client = connect(node)
    with pytest.raises(InvalidRequest):
        client.query(model, Pages("m").keys(*range(count)))
