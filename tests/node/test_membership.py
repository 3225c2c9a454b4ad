"""Which member of which cluster a node is: said at its start, told to clients, refused when it can not be."""

from typing import Any

import pytest

from kvstore.cluster.view import Member, View
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb
from node.peers.membership import Membership

TEXT = "static:fleet/n1=h1:7440,n2=[::1]:7441@rack-2*2.5, n3=h3"


def test_a_static_list() -> None:
    membership = Membership(TEXT, "n2")
    members = (Member("n1", "h1:7440"), Member("n2", "[::1]:7441", 2.5, "rack-2"), Member("n3", "h3"))
    assert membership.view == View("fleet", 1, members)
    hello = pb.HelloReply()
    membership.tell(hello)
    assert (hello.member_id, hello.view.cluster, len(hello.view.members)) == ("n2", "fleet", 3)


def test_a_view_is_put_into_words_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most members that takes milliseconds, and every hello waits in the one event loop."""
    membership, first, second = Membership(TEXT, "n2"), pb.HelloReply(), pb.HelloReply()
    membership.tell(first)
    monkeypatch.setattr("kvstore.cluster.view.view_message", None)
    membership.tell(second)
    assert first == second


def test_a_node_that_is_alone_tells_nothing() -> None:
    hello = pb.HelloReply()
    Membership("", "").tell(hello)
    assert not hello.HasField("view")


@pytest.mark.parametrize(
    ("cluster", "member", "said"),
    [
        (TEXT, "n4", "member='n4' is not of the cluster fleet; its members are n1, n2, n3"),
        (TEXT, "", "member='' is not of the cluster fleet"),
        ("", "n1", "member=n1 is named, but no cluster"),
        ("etcd://h:2379/fleet", "n1", r"is not static:NAME/ID=HOST:PORT\[@ZONE\]"),
        ("static:fleet", "n1", "is not static:NAME/"),
        ("static:fleet/", "n1", "'' is no member"),
        ("static:fleet/n1", "n1", "'n1' is no member; write ID=HOST:PORT"),
        ("static:fleet/n1=h1*two", "n1", "the weight of n1 is 'two', which is no number"),
        ("static:fleet/n1=h1*0", "n1", "the weight of n1 is 0.0; it must be above 0"),
        ("static:fleet/n1=h1:x", "n1", "'h1:x' is not host:port"),
        ("static:fleet/n1=h1,n1=h2", "n1", "two members of fleet have the id n1"),
        ("static:fl/eet/n1=h1", "n1", "a member's id is called 'eet/n1'"),
    ],
)
def test_what_ends_the_start(start_node: Any, cluster: str, member: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start_node(cluster=cluster, member=member)
