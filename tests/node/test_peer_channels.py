"""Links between members: made when needed, closed when a member leaves."""

import pytest
from fleet import view_of
from local_nodes import StartNode

from kvstore import ConfigError, Unavailable
from kvstore.cluster.view import Member, State, View
from kvstore.deadline import Deadline
from node.cluster.membership import Membership, advertised, check_address
from node.cluster.remote_pages import PeerChannels, peer_credentials
from node.config import NodeConfig

ELSEWHERE = "192.0.2.1:7440"  # of an address range reserved for documentation


def test_links_follow_the_view(start_node: StartNode) -> None:
    nodes = [start_node() for _ in range(3)]
    membership = Membership("", "")
    membership.become(view_of(nodes[:2]), "n0")
    links = PeerChannels(membership)
    link = links.channel("n1")
    link.run(lambda link, limit: None, None, Deadline(5.0))
    assert link.wire_name == "bulk"
    assert links.channel("n1") is link
    for other in ("n0", "n2"):
        with pytest.raises(Unavailable, match=f"{other} is no other member of the cluster"):
            links.channel(other)
    membership.become(view_of(nodes[::2], number=2))
    moved = links.channel("n1")
    assert moved.address == f"127.0.0.1:{nodes[2].grpc.port}"
    with pytest.raises(Unavailable):
        link.run(lambda link, limit: None, None, Deadline(5.0))
    links.close()
    with pytest.raises(Unavailable):
        links.channel("n1")


def test_token_crosses_the_network_unencrypted_only_if_insecure() -> None:
    """Anyone who can write to etcd can name members, and a member's token is valid for all
    tenants.
    """
    config = NodeConfig(token="t" * 43, identities="file")
    membership = Membership("", "")
    there = (
        Member("n0", "127.0.0.1:7440", 1.0, "", State.SERVING),
        Member("n1", ELSEWHERE, 1.0, "", State.SERVING),
    )
    membership.become(View("fleet", 1, there, 1), "n0")
    links = PeerChannels(membership, config)
    with pytest.raises(ConfigError, match="would cross the network unencrypted"):
        links.channel("n1").run(lambda link, limit: None, None, Deadline(1.0))
    links.close()
    with pytest.raises(ConfigError, match="would cross the network unencrypted"):
        check_address(ELSEWHERE, b"", lambda: None, peer_credentials(config))
    assert peer_credentials(NodeConfig(host="0.0.0.0", token="t", insecure=True))["insecure"]


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("10.0.0.5", "10.0.0.5:7440"),
        ("n1.example:7450", "n1.example:7450"),
        ("fd00::5", "[fd00::5]:7440"),
        ("[fd00::5]", "[fd00::5]:7440"),
        ("[fd00::5]:7450", "[fd00::5]:7450"),
    ],
)
def test_advertised_address_without_a_port_gets_the_nodes_port(setting: str, address: str) -> None:
    """A pod knows its address without a port, and an IPv6 one without brackets."""
    assert advertised(setting, "0.0.0.0", 7440, []) == address
