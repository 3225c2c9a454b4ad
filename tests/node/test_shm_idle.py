"""Idle shared-memory connections that the node evicts."""

from known_pages import Pages
from local_nodes import Connect
from waiting import wait_until

from node.server import Node


def test_evicted_idle_connections_are_no_failure(
    node: Node, connect: Connect, pages: Pages
) -> None:
    """Regression: the client dropped the link and reconnected; bulk connections repeat the call."""
    client, shm = connect(node, "shm"), node.shm
    assert shm is not None
    pages.put(client, pages.keys(1))
    connects = client._fan_out.nodes.only.connect_count
    for _ in range(3):
        wait_until(shm._limiter.drop_idle)  # once the connection is idle
        wait_until(lambda: not shm.count)
        assert pages.get(client, pages.keys(1)) == [True]
    assert (client._fan_out.nodes.only.connect_count, client._fan_out.nodes.only.failure_count) == (
        connects,
        0,
    )
