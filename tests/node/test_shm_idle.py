"""Connections over shared memory that the node lets go while nobody uses them."""

from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from node.server import Node


def test_idle_connections_that_had_to_leave_are_no_failure(
    node: Node, connect: Connect, pages: Pages
) -> None:
    """Over bulk the call would be said again in any case; here the link was dropped, and
    made anew.
    """
    client, shm = connect(node, "shm"), node.shm
    assert shm is not None
    pages.put(client, pages.keys(1))
    connects = client._fan_out.nodes.only.connect_count
    for _ in range(3):
        wait_until(shm._places.drop_idle)  # once it has done with what was asked last
        wait_until(lambda: not shm.count)
        assert pages.get(client, pages.keys(1)) == [True]
    assert (client._fan_out.nodes.only.connect_count, client._fan_out.nodes.only.failure_count) == (
        connects,
        0,
    )
