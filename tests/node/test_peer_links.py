"""Links between members: made when needed, gone with who left."""

import pytest
from fleet import view_of
from local_nodes import StartNode

from kvstore import ConfigError, Unavailable
from kvstore.cluster.view import Member, State, View
from kvstore.deadline import Deadline
from node.cluster.membership import Membership, advertised, check_address
from node.cluster.remote_pages import PeerLinks, peer_credentials
from node.config import NodeConfig

ELSEWHERE = "192.0.2.1:7440"  # of an address range that nobody has


def test_links_follow_the_view(start_node: StartNode) -> None:
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


def test_a_token_leaves_the_host_in_plain_text_only_if_the_node_was_told_to_be_insecure() -> None:
    """Whoever may write to etcd says where members are, and a member's token is good for all
    tenants.
    """
    config = NodeConfig(token="t" * 43, identities="file")
    membership = Membership("", "")
    there = (
        Member("n0", "127.0.0.1:7440", 1.0, "", State.SERVING),
        Member("n1", ELSEWHERE, 1.0, "", State.SERVING),
    )
    membership.become(View("fleet", 1, there, 1), "n0")
    links = PeerLinks(membership, config)
    with pytest.raises(ConfigError, match="would cross the network unencrypted"):
        links.link("n1").run(lambda link, limit: None, None, Deadline(1.0))
    links.close()
    with pytest.raises(ConfigError, match="would cross the network unencrypted"):
        check_address(ELSEWHERE, b"", lambda: None, peer_credentials(config))
    assert peer_credentials(NodeConfig(host="0.0.0.0", token="t", insecure=True))["insecure"]


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ("10.0.0.5", "10.0.0.5:7440"),
        ("n1.example:7450", "n1.example:7450"),
        ("fd00::5", "[fd00::5]:7440"),
        ("[fd00::5]", "[fd00::5]:7440"),
        ("[fd00::5]:7450", "[fd00::5]:7450"),
    ],
)
def test_an_address_that_names_no_port_has_the_nodes_own(told: str, address: str) -> None:
    """A pod is told its own address without one, and IPv6 without brackets."""
    assert advertised(told, "0.0.0.0", 7440, []) == address
