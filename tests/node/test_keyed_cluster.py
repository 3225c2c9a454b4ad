"""Pages of a keyed namespace in a cluster with a lying member."""

import pytest
from fleet import NUMBERS, owned, owners, present, tell, view_of, wait_replicated
from forging import SECRET, forge, key_id
from known_pages import Pages
from local_nodes import ClusterClient, Connect

from node.server import Node

NBYTES = 4096


def flip(data: bytearray) -> None:
    data[7] ^= 1


@pytest.fixture
def keyed(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.node.name, NBYTES, key_id=key_id())


@pytest.fixture
def replicated(cluster: list[Node]) -> list[Node]:
    tell(cluster, view_of(cluster, 2, 2))
    return cluster


def lie(nodes: list[Node], keyed: Pages, keys: list[bytes], replicas: int) -> list[bytes]:
    """Change all pages whose first owner is n1, at n1; return their keys."""
    mine = owned(view_of(nodes, replicas), keyed, keys, "n1")
    assert mine
    for key in mine:
        forge(nodes[1], keyed, key, flip)
    return mine


def test_page_changed_at_one_owner_comes_from_the_other(
    replicated: list[Node], connect: Connect, keyed: Pages
) -> None:
    client, keys = connect(replicated[0], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(client, keys)
    wait_replicated(replicated)
    mine = lie(replicated, keyed, keys, 2)
    assert keyed.get(client, keys) == [True] * len(keys)
    assert client.stats.forged_pages >= len(mine)
    assert present(replicated[1], keyed.namespace, mine) == [False] * len(mine)


def test_replicas_of_signed_pages_are_whole(
    replicated: list[Node], connect: Connect, keyed: Pages
) -> None:
    """The first owner replicates pages with their HMACs."""
    client, keys = connect(replicated[0], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(client, keys)
    wait_replicated(replicated)
    for key, (first, _) in zip(
        keys, owners(view_of(replicated, 2), keyed.namespace, keys), strict=True
    ):
        replicated[int(first[1])].tier.remove(keyed.namespace.digest, [key])
    assert keyed.get(client, keys) == [True] * len(keys)
    assert client.stats.forged_pages == 0


@pytest.mark.parametrize("wire", ["shm", "bulk"])
def test_page_forged_by_its_only_owner_is_a_miss_at_a_near_node(
    cluster: list[Node], far: ClusterClient, connect: Connect, keyed: Pages, wire: str
) -> None:
    """The near node keeps no copy of a forged page."""
    client = connect(cluster[0], wire, near="n0", page_key=SECRET)
    writer, keys = connect(cluster[-1], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(writer, keys)
    mine = lie(cluster, keyed, keys, 1)
    assert keyed.get(client, keys) == [key not in mine for key in keys]
    assert client.stats.forged_pages >= len(mine)
    assert present(cluster[0], keyed.namespace, mine) == [False] * len(mine)
    keyed.put(client, keys)
    assert keyed.get(client, keys) == [True] * len(keys)


def test_page_forged_by_one_owner_comes_from_the_other_by_a_near_node(
    replicated: list[Node], connect: Connect, keyed: Pages
) -> None:
    client = connect(replicated[0], "auto", near="n0", page_key=SECRET)
    writer, keys = connect(replicated[-1], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(writer, keys)
    wait_replicated(replicated)
    mine = lie(replicated, keyed, keys, 2)
    assert keyed.get(client, keys) == [True] * len(keys)
    found = owners(view_of(replicated, 2), keyed.namespace, mine)
    at_near = [key for key, some in zip(mine, found, strict=True) if "n0" in some]
    assert client.stats.forged_pages >= len(mine) - len(at_near)


def test_page_forged_by_a_near_node_comes_from_an_owner(
    replicated: list[Node], connect: Connect, keyed: Pages
) -> None:
    client = connect(replicated[1], "auto", near="n1", page_key=SECRET)
    keys = keyed.keys(*NUMBERS)
    keyed.put(client, keys)
    wait_replicated(replicated)
    mine = lie(replicated, keyed, keys, 2)
    assert keyed.get(client, keys) == [True] * len(keys)
    assert client.stats.forged_pages == len(mine)


def test_sweep_copies_pages_with_their_hmacs(
    cluster: list[Node], connect: Connect, keyed: Pages
) -> None:
    """The sweep moves the pages to their new owner."""
    tell(cluster, view_of(cluster[:2], number=2))
    writer, keys = connect(cluster[0], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(writer, keys)
    tell(cluster, view_of(cluster, number=3))
    cluster[2].peers.rebalancer._sweep.run(view_of(cluster, number=3), "n2")
    mine = owned(view_of(cluster), keyed, keys, "n2")
    assert present(cluster[2], keyed.namespace, mine) == [True] * len(mine)
    for node in cluster[:2]:
        node.tier.remove(keyed.namespace.digest, mine)
    reader = connect(cluster[2], near="none", page_key=SECRET)  # this client knows the newest view
    assert keyed.get(reader, keys) == [True] * len(keys)
