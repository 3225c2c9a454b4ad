"""The cluster and member settings of a node: checked at its start, and sent to clients."""

from typing import Any

import pytest
from local_nodes import StartNode

from kvstore.cluster.view import Member, View
from kvstore.errors import ConfigError
from kvstore.pb import kvstore_pb2 as pb
from node.cluster.membership import Membership

OF_ETCD = [("zone", "z1"), ("weight", 2.0), ("etcd_cert", "x.pem"), ("advertise", "h")]
TEXT = "static:fleet/n1=h1:7440,n2=[::1]:7441@rack-2*2.5, n3=h3"


def test_static_list_becomes_a_view() -> None:
    membership = Membership(TEXT, "n2")
    members = (
        Member("n1", "h1:7440"),
        Member("n2", "[::1]:7441", 2.5, "rack-2"),
        Member("n3", "h3"),
    )
    assert membership.view == View("fleet", 1, members)
    hello = pb.HelloReply()
    membership.add_view(hello)
    assert (hello.member_id, hello.view.cluster, len(hello.view.members)) == ("n2", "fleet", 3)


def test_view_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most members encoding takes milliseconds, and all hellos share one event loop."""
    membership, first, second = Membership(TEXT, "n2"), pb.HelloReply(), pb.HelloReply()
    membership.add_view(first)
    monkeypatch.setattr("kvstore.cluster.view.view_message", None)
    membership.add_view(second)
    assert first == second


def test_replicas_without_a_cluster_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas=2 is set without a cluster; set --cluster"):
        Membership("", "", 2)


def test_hello_without_a_cluster_has_no_view() -> None:
    hello = pb.HelloReply()
    Membership("", "").add_view(hello)
    assert not hello.HasField("view")


def test_static_list_has_at_least_as_many_members_as_replicas() -> None:
    assert Membership(TEXT, "n2", 3).view.replicas == 3  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="replicas=4, but the cluster fleet has 3 members; list more of them"
    ):
        Membership(TEXT, "n2", 4)


@pytest.mark.parametrize(
    ("cluster", "member", "message"),
    [
        (TEXT, "n4", "member='n4' is not of the cluster fleet; its members are n1, n2, n3"),
        (
            TEXT,
            "",
            r"member='' is not of the cluster fleet.* say which of them this node is \(--member\)",
        ),
        ("", "n1", "member=n1 is set without a cluster"),
        (
            "zk://h:2181/fleet",
            "n1",
            r"is neither etcd://HOST:PORT,.../NAME nor static:NAME/ID=HOST:PORT\[@ZONE\]",
        ),
        ("etcd:h:2379/fleet", "n1", "is neither etcd://"),
        ("etcd://h:2379", "n1", "is not etcd://HOST:PORT,.../NAME"),
        ("etcd://h:2379,/fleet", "n1", "is not etcd://HOST:PORT,.../NAME"),
        ("etcd://h:2379/fl/eet", "n1", "the cluster is called 'fl/eet'"),
        ("etcd://h:port/fleet", "n1", "'h:port:2379' is not host:port"),
        ("etcd://h:2379/fleet", "", r"set it with member \(--member\)"),
        ("static:fleet", "n1", "is neither etcd://HOST:PORT,.../NAME nor static:NAME/"),
        ("static:fleet/", "n1", "'' is no member"),
        ("static:fleet/n1", "n1", "'n1' is no member; write ID=HOST:PORT"),
        ("static:fleet/n1=h1*two", "n1", "the weight of n1 is 'two', which is no number"),
        ("static:fleet/n1=h1*0", "n1", "the weight of n1 is 0.0; it must be above 0"),
        ("static:fleet/n1=h1:x", "n1", "'h1:x' is not host:port"),
        ("static:fleet/n1=h1,n1=h2", "n1", "two members of fleet have the id n1"),
        (
            "static:fleet/n1=http://h1:7440",
            "n1",
            "is a URL, not host:port: write h1:7440, without http://",
        ),
        ("etcd://http://h:2379,g/fleet", "n1", "has a URL in it: write etcd://h:2379,g/fleet"),
        ("static:fl/eet/n1=h1", "n1", "a member's id is called 'eet/n1'"),
    ],
)
def test_invalid_cluster_settings_end_the_start(
    start_node: StartNode, cluster: str, member: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_node(cluster=cluster, member=member)


@pytest.mark.parametrize(("name", "value"), OF_ETCD)
def test_fixed_list_excludes_advertised_address_settings(
    start_node: StartNode, name: str, value: Any
) -> None:
    with pytest.raises(
        ConfigError, match=f"{name}={value} is for a cluster on etcd; a fixed list says it of each"
    ):
        start_node(cluster=TEXT, member="n2", **{name: value})


def test_too_few_connections_for_members_are_logged_once(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = start_node(sessions_max=8)
    members = tuple(Member(f"n{number}", f"127.0.0.1:{number + 1}") for number in range(6))
    for number, count in enumerate((4, 5, 6, 4), 1):
        node.membership.become(View("fleet", number, members[:count]), "n0")
    logged = [
        record.getMessage() for record in caplog.records if "sessions_max" in record.getMessage()
    ]
    assert len(logged) == 1
    assert "5 members and sessions_max=8" in logged[0]
    assert "--sessions-max 20" in logged[0]


@pytest.mark.parametrize("address", ["10.0.0.5:7440", "[2001:db8::5]:7440", "10.0.0.5"])
def test_member_on_a_loopback_host_does_not_start(start_node: StartNode, address: str) -> None:
    cluster = f"static:fleet/n1={address},n2=h2"
    with pytest.raises(
        ConfigError, match="it listens for its own host only; name an address to listen on"
    ):
        start_node(cluster=cluster, member="n1", host="127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1:7440", "localhost:7440", "h1"])
def test_member_names_are_resolved(start_node: StartNode, address: str) -> None:
    assert start_node(cluster=f"static:fleet/n1={address},n2=h2", member="n1", host="127.0.0.1")
