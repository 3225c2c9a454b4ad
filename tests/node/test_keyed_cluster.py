"""Pages of a keyed namespace where one member of a cluster lies."""

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
    """n1 changes all that it is the first owner of; those keys."""
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


def test_replicas_of_sealed_pages_are_whole(
    replicated: list[Node], connect: Connect, keyed: Pages
) -> None:
    """Handed on by their first owner, seal and all."""
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
def test_an_owner_lies_to_a_near_node(
    cluster: list[Node], far: ClusterClient, connect: Connect, keyed: Pages, wire: str
) -> None:
    """With one owner that is a miss; nothing of it stays at the near node."""
    client = connect(cluster[0], wire, near="n0", page_key=SECRET)
    writer, keys = connect(cluster[-1], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(writer, keys)
    mine = lie(cluster, keyed, keys, 1)
    assert keyed.get(client, keys) == [key not in mine for key in keys]
    assert client.stats.forged_pages >= len(mine)
    assert present(cluster[0], keyed.namespace, mine) == [False] * len(mine)
    keyed.put(client, keys)
    assert keyed.get(client, keys) == [True] * len(keys)


def test_an_owner_lies_to_a_near_node_and_another_has_the_page(
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


def test_a_near_node_lies(replicated: list[Node], connect: Connect, keyed: Pages) -> None:
    client = connect(replicated[1], "auto", near="n1", page_key=SECRET)
    keys = keyed.keys(*NUMBERS)
    keyed.put(client, keys)
    wait_replicated(replicated)
    mine = lie(replicated, keyed, keys, 2)
    assert keyed.get(client, keys) == [True] * len(keys)
    assert client.stats.forged_pages == len(mine)


def test_a_sweep_brings_sealed_pages(cluster: list[Node], connect: Connect, keyed: Pages) -> None:
    """To a member that owns them now."""
    tell(cluster, view_of(cluster[:2], number=2))
    writer, keys = connect(cluster[0], near="none", page_key=SECRET), keyed.keys(*NUMBERS)
    keyed.put(writer, keys)
    tell(cluster, view_of(cluster, number=3))
    cluster[2].peers.rebalancer._sweep.run(view_of(cluster, number=3), "n2")
    mine = owned(view_of(cluster), keyed, keys, "n2")
    assert present(cluster[2], keyed.namespace, mine) == [True] * len(mine)
    for node in cluster[:2]:
        node.tier.remove(keyed.namespace.digest, mine)
    reader = connect(cluster[2], near="none", page_key=SECRET)  # it knows the newest view
    assert keyed.get(reader, keys) == [True] * len(keys)
