"""Links between members: made when needed, gone with who left."""

from typing import Any

import pytest
from fleet import view_of

from kvstore import Unavailable
from kvstore.deadline import Deadline
from node.peers.links import PeerLinks
from node.peers.membership import Membership


def test_links_follow_the_view(start_node: Any) -> None:
    nodes = [start_node() for _ in range(3)]
    membership = Membership("", "")
    membership.become(view_of(nodes[:2]), "n0")
    links = PeerLinks(membership)
    link = links.link("n1")
    link.run(lambda link, limit: None, None, Deadline(5.0))
    assert link.wire_name == "bulk"
    assert links.link("n1") is link
    for other in ("n0", "n2"):
        with pytest.raises(Unavailable, match=f"{other} is no other member of the cluster"):
            links.link(other)
    membership.become(view_of(nodes[::2], number=2))
    moved = links.link("n1")
    assert moved.address == f"127.0.0.1:{nodes[2].grpc.port}"
    with pytest.raises(Unavailable):
        link.run(lambda link, limit: None, None, Deadline(5.0))
    links.close()
    with pytest.raises(Unavailable):
        links.link("n1")
