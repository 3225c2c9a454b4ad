"""Reads and removals of pages that several members have."""

import socket
import time

import pytest
from fleet import hang_gets, owners, plant, present, tell, view_of, wait_replicated
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import PutOutcome
from node.server import Node

NUMBERS = range(24)


@pytest.fixture
def trio(start_node: StartNode) -> list[Node]:
    nodes = [start_node() for _ in range(3)]
    tell(nodes, view_of(nodes, 2))
    return nodes


def first_of(nodes: list[Node], pages: Pages, keys: list[bytes], member: int) -> list[bytes]:
    """Return the keys whose first owner is the member."""
    routes = owners(view_of(nodes, 2), pages.namespace, keys)
    return [key for key, some in zip(keys, routes, strict=True) if some[0] == f"n{member}"]


def test_lost_member_costs_no_page(trio: list[Node], connect: Connect, pages: Pages) -> None:
    client, keys = connect(trio[0]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(trio)
    tell(trio, view_of(trio, 2, 2, elsewhere={1: "127.0.0.1:9"}))
    other = connect(trio[0])
    assert pages.get(other, keys) == [True] * len(keys)
    assert other.lookup(pages.namespace, keys).prefix_pages == len(keys)
    more = pages.keys(*(number + 100 for number in NUMBERS))
    assert pages.put(other, more) == [PutOutcome.STORED] * len(more)
    assert pages.get(other, more) == [True] * len(more)
    tell(trio, view_of(trio, 2, 3))
    wait_replicated(trio)
    mine = first_of(trio, pages, more, 1)
    assert mine
    assert present(trio[1], pages.namespace, mine) == [True] * len(mine), (
        "pages were not replicated after the member returned"
    )


def test_prefix_is_merged_from_replicas(trio: list[Node], connect: Connect, pages: Pages) -> None:
    """A page missing at one member does not end the prefix, as another member may have it."""
    client, keys = connect(trio[0]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(trio)
    # Of each two pages one is only at its first owner, and the other only at its second
    for number, node in enumerate(trio):
        mine = first_of(trio, pages, keys, number)
        node.tier.remove(pages.namespace.digest, mine[::2])
        for other in trio:
            if other is not node:
                other.tier.remove(pages.namespace.digest, mine[1::2])
    for node in trio:
        node.tier.remove(pages.namespace.digest, keys[-3:])
    buffers = [bytearray(pages.nbytes) for _ in keys]
    wanted = [True] * (len(keys) - 3) + [False] * 3
    assert client.get(pages.namespace, keys, buffers, prefix=True) == wanted
    assert [bytes(buffer) for buffer in buffers[:-3]] == [pages.content(key) for key in keys[:-3]]
    assert client.lookup(pages.namespace, keys).prefix_pages == len(keys) - 3
    for node in trio:
        node.tier.remove(pages.namespace.digest, keys[5:6])
    assert client.get(pages.namespace, keys, buffers, prefix=True) == [True] * 5 + [False] * (
        len(keys) - 5
    )


def test_slow_owner_costs_half_of_the_timeout(
    trio: list[Node], connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = connect(trio[0], timeout_s=3.0), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(trio)
    go = hang_gets(trio[1], monkeypatch)
    began = time.monotonic()
    assert pages.get(client, keys) == [True] * len(keys)
    assert 1.4 < time.monotonic() - began < 30.0
    go.set()


def test_page_damaged_at_its_first_owner_comes_from_the_next(
    trio: list[Node], connect: Connect, pages: Pages
) -> None:
    client, keys = connect(trio[0]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(trio)
    mine = first_of(trio, pages, keys, 1)
    pages.flip(trio[1], mine[0])
    assert pages.get(client, keys) == [True] * len(keys)
    assert client.stats.corrupt_pages == 1
    assert present(trio[1], pages.namespace, mine[:1]) == [False]


def test_all_copies_are_verified(trio: list[Node], connect: Connect, pages: Pages) -> None:
    client, keys = connect(trio[0]), pages.keys(*NUMBERS)
    pages.put(client, keys)
    wait_replicated(trio)
    routes = owners(view_of(trio, 2), pages.namespace, keys)
    pages.flip(trio[int(routes[3][1][1])], keys[3])
    assert client.verify(pages.namespace, [*keys, pages.key(99)]) == (len(keys) - 1, 1, 1)
    assert client.verify(pages.namespace, keys) == (len(keys), 0, 0)


def test_removal_reaches_a_member_of_a_newer_view(
    trio: list[Node], connect: Connect, pages: Pages
) -> None:
    """The new member may have fetched the pages before they were removed."""
    tell(trio, view_of(trio, number=2, n2=None))
    client, keys = connect(trio[0]), pages.keys(1, 2)
    assert client.remove(pages.namespace, keys) == [False, False]
    client._fan_out.nodes._follower.close()
    tell(trio, view_of(trio, number=3))
    plant(trio[2], pages, keys)
    assert client.remove(pages.namespace, keys) == [True, True]
    assert present(trio[2], pages.namespace, keys) == [False, False]


def test_removal_includes_copies_at_other_members(
    trio: list[Node], connect: Connect, pages: Pages
) -> None:
    """A member that does not own the page, such as a near node, may have a copy."""
    key = pages.key(1)
    (route,) = owners(view_of(trio, 2), pages.namespace, [key])
    (stranger,) = [node for number, node in enumerate(trio) if f"n{number}" not in route]
    direct, client = connect(stranger, direct=True), connect(trio[0])
    pages.put(direct, [key])
    wait_replicated(trio)
    assert present(stranger, pages.namespace, [key]) == [True]
    assert client.remove(pages.namespace, [key, pages.key(2)]) == [True, False]
    assert [present(node, pages.namespace, [key]) for node in trio] == [[False]] * 3


def test_put_goes_to_the_next_owner_when_the_first_hangs(
    trio: list[Node], connect: Connect, pages: Pages
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        view = view_of(trio, 2, 2, elsewhere={1: f"127.0.0.1:{hung.getsockname()[1]}"})
        tell(trio, view)
        client, keys = connect(trio[0], timeout_s=4.0), pages.keys(*NUMBERS)
        assert pages.put(client, keys) == [PutOutcome.STORED] * len(keys)
        tell(trio, view_of(trio, 2, 3))
        wait_replicated(trio)
