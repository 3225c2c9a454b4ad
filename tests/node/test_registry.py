"""Nodes that register in etcd: which join the view, which are refused, and outages of etcd."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_etcd import FakeEtcd
from fleets import LEASE_S, SMALL, Start, kill, members, peers, stop, value
from known_pages import Pages
from local_nodes import Connect, connect
from waiting import wait_until

from kvstore.cluster.view import MEMBERS_MAX, State
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import ConfigError, InvalidRequest, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE
from node.cluster.etcd import Entry
from node.cluster.membership import LostMember
from node.cluster.registry_state import RegistryState, parse_known
from node.config import NodeConfig
from node.server import Node


def state(node: Node, member: str) -> State | None:
    view = node.membership.view
    return view.by_id[member].state if view and member in view.by_id else None


def registered(etcd: FakeEtcd) -> int:
    return sum("/members/" in name for name in etcd.names())


def test_started_node_is_in_every_view_and_a_stopped_one_is_not(fleet: Start) -> None:
    one = fleet("n1", zone="rack-1", weight=2.0)
    two = fleet("n2", replicas=1)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    for node in (one, two):  # a node has joined once it has checked what it owns
        wait_until(lambda view=node.membership: view.view.settled)  # type: ignore[misc, union-attr]
    assert one.membership.view == two.membership.view, "the views must have the same number, too"
    number = one.membership.view.number  # type: ignore[union-attr]
    about = one.membership.view.by_id["n1"]  # type: ignore[union-attr]
    assert (about.zone, about.weight, about.state) == ("rack-1", 2.0, State.SERVING)
    assert about.address == f"127.0.0.1:{one.grpc.port}"
    assert peers(one).registry == "etcd"
    stop(two)
    wait_until(lambda: members(one) == ["n1"])
    assert one.membership.view.number > number  # type: ignore[union-attr]


def test_stopped_node_revokes_its_lease(fleet: Start, etcd: FakeEtcd) -> None:
    """Even with a long lease, no member waits for its end."""
    one, two = fleet("n1"), fleet("n2", lease_s=300)
    wait_until(lambda: len(members(one)) == 2)
    stop(two)
    assert "/kvstore/fleet/members/n2" not in etcd.names()
    assert [ttl for ttl, _ in etcd.leases.values()] == [LEASE_S]


def test_member_with_an_expired_lease_leaves_and_rejoins(fleet: Start, etcd: FakeEtcd) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: len(members(one)) == 2)
    seen: list[list[str]] = []  # because n2 may be back at once
    one.membership.on_view(lambda view: seen.append([member.id for member in view.members]))
    etcd.delete("/kvstore/fleet/members/n2")
    wait_until(lambda: ["n1"] in seen)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    lost = {*etcd.leases}
    etcd.lose_leases()
    wait_until(lambda: registered(etcd) == 2 and not lost & {*etcd.leases})
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])


def test_member_state_reaches_other_members(fleet: Start) -> None:
    one, two = fleet("n1"), fleet("n2")
    assert two.registry is not None
    two.registry.set_state(State.DRAINING)
    wait_until(lambda: state(one, "n2") is State.DRAINING)


def test_last_view_stays_in_force_while_etcd_is_away(
    fleet: Start, etcd: FakeEtcd, connect: Connect, pages: Pages
) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: len(members(one)) == 2)
    etcd.stop()
    wait_until(lambda: "the last view stays in force" in peers(one).registry)
    client = connect(one)
    pages.put(client, pages.keys(*range(20)))
    assert pages.get(client, pages.keys(*range(20))) == [True] * 20
    time.sleep(1.5 * LEASE_S)
    assert members(one) == members(two) == ["n1", "n2"]
    etcd.start()
    wait_until(lambda: peers(one).registry == peers(two).registry == "etcd")
    assert members(one) == members(two) == ["n1", "n2"]


def test_wiped_etcd_regains_all_members_with_rising_numbers(
    fleet: Start, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fleet("n1", replicas=2, lease_s=4), fleet("n2", lease_s=4)
    for _ in range(5):
        etcd.put("/kvstore/fleet/removed/none", b"{}")
    two.registry.set_state(State.DRAINING)  # type: ignore[union-attr]
    wait_until(lambda: state(one, "n2") is State.DRAINING)
    seen: list[int] = []
    one.membership.on_view(lambda view: seen.append(len(view.members)))
    number = one.membership.view.number  # type: ignore[union-attr]
    register = two.registry._register  # type: ignore[union-attr]
    monkeypatch.setattr(two.registry, "_register", lambda: (time.sleep(1.5), register()))
    etcd.stop()
    etcd.wipe()
    etcd.start()
    wait_until(lambda: registered(etcd) == 2)
    time.sleep(4.5)
    assert set(seen) == {2}, "no view may lack a member"
    assert one.membership.view.replicas == 2  # type: ignore[union-attr]
    two.registry.set_state(State.SERVING)  # type: ignore[union-attr]
    wait_until(lambda: state(one, "n2") is State.SERVING)
    assert one.membership.view.number > number  # type: ignore[union-attr]


def test_lease_of_zero_seconds_is_reported(fleet: Start, etcd: FakeEtcd) -> None:
    node = fleet("n1")
    etcd.granted_s = 0
    etcd.lose_leases()
    wait_until(lambda: "etcd gave a lease of 0 s, asked for 1" in peers(node).registry)
    calls, began = etcd.calls, time.monotonic()
    time.sleep(1.0)
    assert etcd.calls - calls < 20 * (time.monotonic() - began), (
        "the node asks for leases without a pause"
    )
    etcd.granted_s = None
    wait_until(
        lambda: peers(node).registry == "etcd" and "/kvstore/fleet/members/n1" in etcd.names()
    )


def test_slow_etcd_loses_no_lease(fleet: Start, etcd: FakeEtcd) -> None:
    one = fleet("n1", lease_s=3)
    etcd.slow_s, etcd.leases_age = 0.5, True
    time.sleep(4.0)
    assert (members(one), peers(one).registry) == (["n1"], "etcd")


def test_second_node_with_the_same_id_is_refused(
    fleet: Start, etcd: FakeEtcd, tmp_path: Path
) -> None:
    one = fleet("n1")
    with pytest.raises(
        ConfigError,
        match=rf"the id n1 .* is that of another node, at 127.0.0.1:{one.grpc.port}; give",
    ):
        fleet("n1")
    assert members(one) == ["n1"]


def test_node_without_a_directory_rejoins_after_its_lease(fleet: Start, etcd: FakeEtcd) -> None:
    node = fleet("n1")
    kill(node, etcd, expires=False)
    assert "/kvstore/fleet/members/n1" in etcd.names()
    etcd.leases_age = True
    assert members(fleet("n1")) == ["n1"]


def test_restarted_node_takes_over_its_id_at_once(
    fleet: Start, etcd: FakeEtcd, tmp_path: Path
) -> None:
    node = fleet(data_dir=str(tmp_path), disk_nbytes=64 << 20, lease_s=60)
    name = node.membership.member
    kill(node, etcd, expires=False)
    assert f"/kvstore/fleet/members/{name}" in etcd.names()
    began = time.monotonic()
    again = fleet(name, data_dir=str(tmp_path), disk_nbytes=64 << 20, lease_s=60)
    assert (again.membership.member, members(again)) == (name, [name])
    assert time.monotonic() - began < 40.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"replicas": 2},
            "replicas=2, but the cluster fleet has 1: start this node with that or without",
        ),
        (
            {"advertise": "127.0.0.1:9"},
            r"does not reach itself at 127.0.0.1:9: .*set one .* with advertise",
        ),
        ({"advertise": "host:99999"}, "advertise='host:99999' is not host:port"),
        (
            {"advertise": "http://host:1"},
            "advertise='http://host:1' is a URL, not host:port: write host:1",
        ),
        ({"zone": "a/b"}, "zone is called 'a/b'"),
        ({"etcd_ca": "/none.pem"}, r"TLS to etcd \(etcd_ca, etcd_cert, etcd_key\)"),
        ({"etcd_cert": "/none.pem"}, "are given together, and with etcd_ca"),
    ],
)
def test_invalid_cluster_settings_end_the_start(
    fleet: Start, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("node.cluster.membership.TRIED_S", 0.3)
    fleet("n1")
    with pytest.raises(ConfigError, match=message):
        fleet("n2", **settings)


def test_advertised_address_of_another_node_is_refused(fleet: Start) -> None:
    one = fleet("n1")
    with pytest.raises(ConfigError, match="another node answers, not this one"):
        fleet("n2", advertise=f"127.0.0.1:{one.grpc.port}")


def test_start_waits_for_etcd_for_a_limited_time(
    fleet: Start, etcd: FakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.stop()
    with (
        caplog.at_level("INFO"),
        pytest.raises(
            ConfigError,
            match=r"etcd was not reached in 0.3 s \(cluster_wait_s\) at 127.0.0.1:1, 127",
        ),
    ):
        fleet("n1", cluster_wait_s=0.3)
    assert "waiting for etcd" in caplog.text
    assert "draining" not in caplog.text, "a node that never served must not drain"
    later = threading.Timer(1.0, etcd.start)
    later.start()
    assert members(fleet("n1", cluster_wait_s=20.0)) == ["n1"]
    later.join()


def test_start_waiting_for_etcd_can_be_interrupted(etcd: FakeEtcd) -> None:
    etcd.stop()
    began, stop_at = time.monotonic(), time.monotonic() + 0.5

    def pulse() -> None:
        if time.monotonic() > stop_at:
            raise SystemExit(0)

    cluster = f"etcd://{etcd.endpoint}/fleet"
    node = Node(
        NodeConfig(**{**SMALL, "cluster": cluster, "member": "n1", "cluster_wait_s": 60.0}), pulse
    )
    with pytest.raises(SystemExit):
        node.start()
    assert time.monotonic() - began < 40.0


def test_joining_node_refuses_hello_of_clients(fleet: Start) -> None:
    node = fleet("n1")
    node.membership.joining = True
    with pytest.raises(Unavailable, match="is joining its cluster"):
        node.service.call("hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), THE_NODE)
    assert (
        node.service.call("hello", pb.HelloRequest(), THE_NODE).instance_id
        == node.service.instance_id
    )


def test_member_two_versions_away_is_excluded_and_named(fleet: Start, etcd: FakeEtcd) -> None:
    one = fleet("n1")
    for name, version in (("old", PROTOCOL_VERSION - 2), ("near", PROTOCOL_VERSION + 1)):
        about = value(etcd, "members/n1") | {"protocol": version, "address": f"{name}:7440"}
        etcd.put(f"/kvstore/fleet/members/{name}", json.dumps(about).encode())
    etcd.put("/kvstore/fleet/members/odd", b"no JSON")
    etcd.put("/kvstore/fleet/members/\x1b]0;title\x07\nn1", b"no JSON")  # of a terminal
    wait_until(lambda: members(one) == ["n1", "near"])
    named, *apart = sorted(peers(one).apart)
    assert named.startswith(r"\x1b]0;title\x07\nn1: ")
    assert apart[0].startswith("odd: ")
    assert (
        apart[1] == f"old at old:7440 speaks protocol {PROTOCOL_VERSION - 2}; update the older one"
    )


ODD = (
    b'{"address": "odd:7440", "weight": %s, "zone": "", "state": "SERVING", "protocol": %s, '
    b'"token": "t", '
)
ODD += b'"instance": "i"}'
GARBAGE = [
    b"[" * 100_000,
    ODD % (b"1" + b"0" * 400, b"4"),
    ODD % (b"1", b"Infinity"),
    ODD.replace(b"odd", b"o" * 100_000) % (b"1", b"4"),
]


def test_garbage_in_etcd_does_not_exclude_other_members(fleet: Start, etcd: FakeEtcd) -> None:
    one = fleet("n1")
    for number, garbage in enumerate(GARBAGE):
        etcd.put(f"/kvstore/fleet/members/odd{number}", garbage)
        etcd.put(f"/kvstore/fleet/removed/{number:032x}", garbage)
    fleet("n2")
    wait_until(lambda: members(one) == ["n1", "n2"])
    assert sorted(line.partition(":")[0] for line in peers(one).apart) == [
        "odd0",
        "odd1",
        "odd2",
        "odd3",
    ]
    assert all(len(line) < 500 for line in peers(one).apart)


def test_invalid_view_number_is_ignored(fleet: Start, etcd: FakeEtcd) -> None:
    """With it each hello would fail, of new clients and of other members."""
    one = fleet("n1")
    etcd.put("/kvstore/fleet/config", b'{"replicas": 1, "base": 18446744073709551615}')
    wait_until(lambda: "the cluster's config in etcd says" in peers(one).registry)
    assert one.service.call("hello", pb.HelloRequest(), THE_NODE).member_id == "n1"
    etcd.put("/kvstore/fleet/config", b'{"replicas": 1, "base": 0}')
    wait_until(lambda: peers(one).registry == "etcd")


def test_more_replicas_than_members_are_logged(
    fleet: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        node = fleet("n1", replicas=3)
    assert "3 replicas are configured, but there are only 1 members" in caplog.text
    assert node.membership.view.replicas == 3  # type: ignore[union-attr]


def test_user_and_password(fleet: Start) -> None:
    guarded = FakeEtcd(users={"kv": "secret"})
    try:
        cluster = f"etcd://{guarded.endpoint}/fleet"
        with pytest.raises(ConfigError, match="user name is empty; see etcd_user"):
            fleet("n1", cluster=cluster)
        with pytest.raises(ConfigError, match=r"as user kv: .*invalid user ID or password"):
            fleet("n1", cluster=cluster, etcd_user="kv", etcd_password="wrong")
        node = fleet("n1", cluster=cluster, etcd_user="kv", etcd_password="secret")
        assert members(node) == ["n1"]
        assert "secret" not in repr(node.config)
        stop(node)
    finally:
        guarded.stop()


def lost(node: Node) -> dict[str, int]:
    """Return the lost members that a node reports, and since when."""
    return {some.id: some.since_unix_s for some in peers(node).lost}


def test_killed_member_is_lost_until_it_returns(fleet: Start, etcd: FakeEtcd) -> None:
    """Regression: a member that died was forgotten, and every command said that all was well."""
    one, two = fleet("n1"), fleet("n2", weight=3.0)
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n2"))
    assert lost(one) == {}
    kill(two, etcd)
    wait_until(lambda: lost(one).get("n2", 0) > 0)
    assert abs(lost(one)["n2"] - time.time()) < 60
    (report,) = peers(one).lost
    assert (report.id, report.share) == ("n2", 0.75)
    assert report.address == f"127.0.0.1:{two.grpc.port}"
    again = fleet("n2", weight=3.0)
    wait_until(lambda: members(one) == members(again) == ["n1", "n2"])
    assert lost(one) == lost(again) == {}


def test_stopped_member_is_lost_until_it_is_forgotten(fleet: Start, etcd: FakeEtcd) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n2"))
    with connect(one, "auto", direct=True) as client:
        with pytest.raises(InvalidRequest, match="n2 is not lost; lost members are none"):
            client.forget_member("n2")
        stop(two)
        wait_until(lambda: "n2" in lost(one))
        client.forget_member("n2")
        wait_until(lambda: lost(one) == {})
        with pytest.raises(InvalidRequest, match="n2 is not lost"):
            client.forget_member("n2")
    again = fleet("n2")
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n2", b"address"))
    kill(again, etcd)
    wait_until(lambda: "n2" in lost(one))


def test_drained_member_is_not_lost(fleet: Start, etcd: FakeEtcd) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n2"))
    two.membership.announce(State.DRAINING)
    wait_until(lambda: state(one, "n2") is State.DRAINING)
    stop(two)
    wait_until(lambda: members(one) == ["n1"])
    assert lost(one) == {}


def test_member_lost_before_a_start_is_reported_with_its_time(fleet: Start, etcd: FakeEtcd) -> None:
    """The time outlives the nodes: a restarted cluster still misses the member."""
    etcd.put("/kvstore/fleet/known/n9", LostMember("n9", "h9:7440", 1.0, 1234).value())
    etcd.put("/kvstore/fleet/known/odd", b"{")
    for number, lost_s in enumerate((-1, 1 << 38, 10**30)):  # no message could have these
        known = LostMember("n9", "h9:7440", 1.0, lost_s).value()
        etcd.put(f"/kvstore/fleet/known/odd{number}", known)
    one = fleet("n1", zone="east")
    assert lost(one) == {"n9": 1234}
    assert "n9" in {event.member for event in one.events.since()}
    wait_until(lambda: etcd.has("/kvstore/fleet/known/n1", b'"zone": "east"'))


def test_number_of_lost_members_is_limited() -> None:
    """The number of lost members is bounded: each one costs time in every status."""
    state = RegistryState("fleet")
    value = LostMember("n", "h:7440", 1.0, 1234).value()
    state.entries = {state.known_key(f"n{number}"): Entry(value, 1, 0) for number in range(1100)}
    assert len(state.lost()) == MEMBERS_MAX


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan")])
def test_lost_member_that_has_no_place_is_refused(weight: float) -> None:
    """Invalid weights are refused: each status computes shares of the keys from them."""
    with pytest.raises(ConfigError, match="the weight of n9"):
        parse_known("n9", LostMember("n9", "h9:7440", weight).value())
