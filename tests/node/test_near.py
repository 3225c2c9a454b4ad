"""A client of the near node, on its own host: what that node fetches and keeps as near copies."""

import time
from pathlib import Path
from typing import Any

import pytest
from fleet import KB16, MB, NUMBERS, copies, owned, plant, present, tell, view_of
from known_pages import Pages
from local_nodes import ClusterClient, Connect, StartNode
from waiting import wait_until

from kvstore import ByteRange, InvalidRequest, Keep, PutOutcome
from kvstore.cluster.view import Member, State, View
from kvstore.pb import kvstore_pb2 as pb
from kvstore.results import Tier
from kvstore.transports.bulk import BulkWire
from node.auth.access import THE_NODE, Caller
from node.server import Node

# ---- fetched pages -----------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_near_miss_is_fetched_once(
    cluster: list[Node], far: ClusterClient, connect: Connect, pages: Pages, wire: str
) -> None:
    keys, view = pages.keys(*NUMBERS), view_of(cluster)
    pages.put(far(cluster), keys)
    mine = owned(view, pages, keys, "n0")
    client = connect(cluster[0], wire, near="n0")
    before = counters_of(cluster[0])
    found = client.lookup(pages.namespace, keys)
    assert found.prefix_pages == len(keys)
    assert found.tiers == bytes(Tier.RAM if key in mine else Tier.PEER for key in keys)
    assert copies(cluster[0])[0] == 0  # a lookup fetches nothing
    now = counters_of(cluster[0])
    assert now.pages_hit - before.pages_hit == len(mine)
    assert now.pages_hit_peer - before.pages_hit_peer == len(keys) - len(mine)
    for _ in range(2):
        assert pages.get(client, keys) == [True] * len(keys)
        assert copies(cluster[0])[0] == len(keys) - len(mine)
        assert cluster[0].peers.remote_pages.pages_fetched == len(keys) - len(mine)
    status = cluster[0].service.call("node_status", pb.NodeStatusRequest(), THE_NODE).peers
    assert (status.copy_count, status.pages_fetched) == (len(keys) - len(mine),) * 2
    assert (status.pages_fetch_failed, status.view_number) == (0, 1)
    assert [node.peers.remote_pages.pages_fetched for node in cluster[1:]] == [0, 0]


def counters_of(node: Node) -> Any:
    return node.service.call("node_status", pb.NodeStatusRequest(), THE_NODE).totals


def test_chain_fetched_in_batches_loses_its_end_first(
    pair: list[Node], near: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its owner evicted the head, without which the rest is of no use."""
    monkeypatch.setattr("node.cluster.remote_pages.FETCHED_NBYTES", 4 * KB16)
    chain, others, owner = Pages("a chain", KB16), Pages("others", KB16), pair[1]
    keys = owned(view_of(pair), chain, chain.keys(*range(100)), "n1")[:24]
    plant(owner, chain, keys)
    assert chain.get(near(pair), keys) == [True] * 24
    room = owner.tier.slots.region_nbytes // KB16
    plant(owner, others, others.keys(*range(room - 12)))
    left = present(owner, chain.namespace, keys)
    assert left == [True] * left.count(True) + [False] * left.count(False)
    assert 0 < left.count(True) < 24


def test_use_of_a_chain_that_came_in_parts_restores_its_order_at_its_owner(
    pair: list[Node], near: ClusterClient
) -> None:
    """Regression: the near node had copies of all pages, and told nobody of their use."""
    chain, others, owner, client = Pages("used", KB16), Pages("others", KB16), pair[1], near(pair)
    keys = owned(view_of(pair), chain, chain.keys(*range(100)), "n1")[:24]
    plant(owner, chain, keys)
    for start in range(0, 24, 4):  # as an engine's agent loads them
        assert chain.get(client, keys[start : start + 4]) == [True] * 4
    assert client.lookup(chain.namespace, keys, touch=True).prefix_pages == 24
    room = owner.tier.slots.region_nbytes // KB16
    plant(owner, others, others.keys(*range(room - 12)))
    left = present(owner, chain.namespace, keys)
    assert left == [True] * left.count(True) + [False] * left.count(False)
    assert 0 < left.count(True) < 24


def test_page_missing_everywhere_is_a_miss_and_ends_a_prefix(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys[:20] + keys[21:])
    client = near(cluster)
    found = client.lookup(pages.namespace, keys)
    assert (found.prefix_pages, found.present.count(True)) == (20, 47)
    buffers = [bytearray(pages.nbytes) for _ in keys]
    assert client.get(pages.namespace, keys, buffers, prefix=True) == [True] * 20 + [False] * 28
    assert pages.get(client, keys) == [True] * 20 + [False] + [True] * 27


def test_near_node_serves_ranges_of_pages_at_other_members(
    cluster: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    large = Pages("ranges", MB)
    keys = large.keys(*range(6))
    large.put(far(cluster), keys)
    buffers = [bytearray(100) for _ in keys]
    hits = near(cluster).get_ranges(
        large.namespace, keys, [ByteRange(5, 60), ByteRange(9000, 40)], buffers
    )
    assert hits == [True] * 6
    for key, buffer in zip(keys, buffers, strict=True):
        content = large.content(key)
        assert buffer == content[5:65] + content[9000:9040]


def test_in_place(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    client = near(cluster)
    client.open(pages.namespace)
    assert client.maps_arena
    assert client.batch_pages_max(pages.namespace) >= len(keys)
    with client.open_get(pages.namespace, keys) as slots:
        assert slots.hits == [True] * len(keys)
        assert [bytes(page) for page in slots.pages] == [pages.content(key) for key in keys]
    with (
        pytest.raises(InvalidRequest, match="needs one node"),
        far(cluster).open_get(pages.namespace, keys),
    ):
        pass


def test_near_copy_has_the_time_to_live_of_its_page(
    cluster: list[Node], far: ClusterClient, near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    contents = [pages.content(key) for key in keys]
    far(cluster).put(pages.namespace, keys, contents, keep=Keep(ttl_s=60.0))
    pages.get(near(cluster), keys)
    kept = list(cluster[0].tier.namespace(pages.namespace.digest).pages.values())
    assert len(kept) == len(keys)
    assert all(50 < page.expiry_s - time.time() <= 60 for page in kept)


def test_near_node_is_found_automatically_and_can_be_disabled(
    cluster: list[Node], far: ClusterClient, connect: Connect, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(far(cluster), keys)
    client = connect(cluster[1], "auto")
    pages.get(client, keys)
    assert client.maps_arena
    assert [copies(node)[0] > 0 for node in cluster] == [
        False,
        True,
        False,
    ]
    other = connect(cluster[2], "auto", near="none")
    pages.get(other, keys)
    assert not other.maps_arena
    assert copies(cluster[2]) == (0, 0)
    assert connect(cluster[2], "auto", near="n7").lookup(pages.namespace, keys).prefix_pages == len(
        keys
    )


def test_near_nodes_do_not_forward_lookups_in_circles(
    cluster: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are near nodes, and none has the pages: each asks the two others once."""
    asked: list[Any] = []
    call = BulkWire.call

    def recorded(self: BulkWire, op: str, request: Any, deadline: Any) -> Any:
        asked.append(request)
        return call(self, op, request, deadline)

    monkeypatch.setattr(BulkWire, "call", recorded)
    for number, node in enumerate(cluster):
        client = connect(node, "shm", near=f"n{number}")
        assert pages.get(client, pages.keys(*NUMBERS)) == [False] * len(NUMBERS)
    lookups = [request for request in asked if isinstance(request, pb.LookupRequest)]
    assert len(lookups) == 6  # each of three nodes asks the two others
    assert not any(request.near for request in lookups)


def test_near_owner_without_a_page_fetches_it_as_its_own(
    cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    """After a wiped disk, for example, a page that the node owns is no near copy."""
    tell(cluster, view_of(cluster, 3, 2))
    keys = pages.keys(*NUMBERS)
    plant(cluster[1], pages, keys)
    assert pages.get(connect(cluster[0], "shm", near="n0"), keys) == [True] * len(keys)
    assert copies(cluster[0]) == (0, 0)
    assert cluster[0].tier.visible_count == len(keys)


# ---- copies ------------------------------------------------------------------------------


def test_put_at_a_near_node_leaves_a_near_copy(
    cluster: list[Node], near: ClusterClient, pages: Pages
) -> None:
    keys = pages.keys(*NUMBERS)
    client = near(cluster)
    assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
    others = len(keys) - len(owned(view_of(cluster), pages, keys, "n0"))
    assert copies(cluster[0])[0] == others > 0
    assert pages.get(client, keys) == [True] * len(keys)


def test_replicated_page_is_no_near_copy(
    cluster: list[Node], pages: Pages, connect: Connect
) -> None:
    keys = pages.keys(*NUMBERS)
    pages.put(connect(cluster[0], direct=True), keys)
    assert copies(cluster[0])[0] > 0
    request = pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=pages.nbytes
    )
    request.forwarded_by = "n1"
    with cluster[0].sessions.open(Caller("n1")) as session:
        reply, _ = cluster[0].service.begin_put(session, request)
    assert set(reply.verdicts) == {pb.EXISTS}
    assert copies(cluster[0]) == (0, 0)


def test_near_copies_have_a_limit_and_are_evicted_first(
    pair: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    nodes = pair
    pages = Pages("share", KB16)
    keys = pages.keys(*range(400))
    theirs, mine = (
        owned(view_of(nodes), pages, keys, "n1"),
        owned(view_of(nodes), pages, keys, "n0"),
    )
    pages.put(far(nodes), mine[:150] + theirs)
    client = near(nodes)
    for start in range(0, len(theirs), 16):
        assert all(pages.get(client, theirs[start : start + 16]))
        assert copies(nodes[0])[1] <= MB
    assert copies(nodes[0]) == (64, MB)
    assert nodes[0].check() == []
    assert all(pages.get(client, mine[:150]))
    before = nodes[0].tier.visible_count
    more = Pages("more", KB16)
    wanted = owned(view_of(nodes), more, more.keys(*range(200)), "n0")[:80]
    more.put(far(nodes), wanted)  # 4 MiB hold 256 pages: copies are evicted, and no own page is
    assert nodes[0].tier.visible_count == 256 > before
    assert all(pages.get(far(nodes), mine[:150]))
    totals = nodes[0].service.call("node_status", pb.NodeStatusRequest(), THE_NODE).totals
    assert totals.pages_evicted == 0  # evicted copies do not count
    assert nodes[0].check() == []


def test_small_copies_are_evicted_for_large_ones(
    pair: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    nodes = pair
    small, large = Pages("small", KB16), Pages("large", 8 * KB16)
    client = near(nodes)
    for pages, count in ((small, 64), (large, 8), (small, 64)):
        keys = owned(view_of(nodes), pages, pages.keys(*range(4 * count)), "n1")[:count]
        pages.put(far(nodes), keys)
        assert all(pages.get(client, keys))
        assert copies(nodes[0])[1] <= MB
        assert nodes[0].check() == []


def test_near_copies_over_the_limit_are_misses(
    pair: list[Node], far: ClusterClient, near: ClusterClient
) -> None:
    nodes = pair
    pages = Pages("many", KB16)
    keys = owned(view_of(nodes), pages, pages.keys(*range(400)), "n1")[:100]
    pages.put(far(nodes), keys)
    client = near(nodes)
    with client.open_get(pages.namespace, keys[:40]) as held:
        assert held.hits == [True] * 40
        assert pages.get(client, keys[40:]).count(True) == 24
    assert all(pages.get(client, keys[40:]))
    assert nodes[0].check() == []


def test_copies_do_not_go_to_disk(
    start_node: StartNode, far: ClusterClient, near: ClusterClient, pages: Pages, tmp_path: Path
) -> None:
    nodes = [start_node(data_dir=str(tmp_path / f"{i}"), disk_nbytes=64 * MB) for i in range(2)]
    tell(nodes, view_of(nodes))
    keys = pages.keys(*NUMBERS)
    client = near(nodes)
    pages.put(far(nodes), keys[:24])
    pages.get(client, keys[:24])
    pages.put(client, keys[24:])
    far(nodes).flush()
    mine = owned(view_of(nodes), pages, keys, "n0")
    assert nodes[0].disk is not None
    assert (
        nodes[0].disk.records.count
        == len(mine)
        == nodes[0].tier.visible_count - copies(nodes[0])[0]
    )


def test_fetched_page_of_an_owner_goes_to_disk(
    start_node: StartNode, connect: Connect, pages: Pages, tmp_path: Path
) -> None:
    nodes = [start_node(data_dir=str(tmp_path), disk_nbytes=16 << 20), start_node()]
    view, keys = view_of(nodes, replicas=2), pages.keys(*NUMBERS)
    nodes[1].membership.become(View("fleet", 1, view.members[1:]), "n1")
    pages.put(connect(nodes[1]), keys)
    tell(nodes, view)
    assert pages.get(connect(nodes[0], near="n0"), keys) == [True] * len(keys)
    assert nodes[0].peers.remote_pages.pages_fetched == len(keys)
    disk = nodes[0].disk
    assert disk is not None
    wait_until(lambda: disk.records.count == len(keys))


def test_draining_member_is_not_near(cluster: list[Node], connect: Connect, pages: Pages) -> None:
    """This holds even if the client already uses the member's shared memory."""
    tell(cluster, view_of(cluster, number=2, n0=State.DRAINING))
    client = connect(cluster[0], "auto")
    client.open(pages.namespace)
    near = client._fan_out.nodes.local_channel
    assert near is not None
    assert near.wire_name == "shm"
    assert near.address != f"127.0.0.1:{cluster[0].grpc.port}"


def test_near_node_is_searched_at_addresses_of_this_host(
    start_node: StartNode, cluster: list[Node], connect: Connect, pages: Pages
) -> None:
    """The member that the client was given has no shared memory here."""
    nodes = [start_node(shm_socket="none"), *cluster]
    tell(nodes, view_of(nodes))
    client = connect(nodes[0], "auto")
    client.open(pages.namespace)
    assert client.maps_arena
    assert pages.get(client, pages.keys(*NUMBERS)) == [False] * len(NUMBERS)
    remote_client = connect(nodes[0], "auto")
    # The client must not connect to these
    far_away = [Member(f"n{number}", f"203.0.113.{number}:7440") for number in range(1, 9)]
    tell(nodes[:1], View("fleet", 2, (view_of(nodes).members[0], *far_away)))
    remote_client.open(pages.namespace)
    assert not remote_client.maps_arena
