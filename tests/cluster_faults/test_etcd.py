"""Clusters on etcd: etcd is lost and comes back, members come and go, two nodes have one id."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from network_hosts import Hosts
from node_fleet import EtcdProcess, Fleet, Place

from kvstore.errors import ConfigError, Unavailable
from kvstore.tools.node_process import NodeProcess

CALM_S = 2.0
FAULT_S = 8.0  # longer than a member's lease
LEASE_S = 3
VIEW_S = 15.0


@pytest.fixture
def etcd(hosts: Hosts) -> Iterator[EtcdProcess]:
    try:
        started = EtcdProcess(hosts.places[4])
    except ConfigError as error:
        pytest.skip(str(error))
    yield started
    started.close()


@pytest.fixture(params=[1, 2])
def fleet(
    request: pytest.FixtureRequest, etcd: EtcdProcess, hosts: Hosts, flags: tuple[str, ...]
) -> Iterator[Fleet]:
    lease = ("--lease-s", str(LEASE_S))
    with Fleet(hosts.places[:3], *flags, *lease, replicas=request.param, etcd=etcd) as started:
        yield started


def members(fleet: Fleet, at: str) -> set[str]:
    """Return the ids of the members in the view of node `at`."""
    with fleet.client(address=fleet.addresses[at]) as client:
        view = client.view(5.0)
    return {member.id for member in view.members} if view else set()


def await_members(fleet: Fleet, *wanted: str, at: str = "n1") -> None:
    end = time.monotonic() + VIEW_S
    while (found := members(fleet, at)) != set(wanted) and time.monotonic() < end:
        time.sleep(0.2)
    assert found == set(wanted)


def test_etcd_is_lost_and_comes_back(
    fleet: Fleet, etcd: EtcdProcess, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        engines.run(CALM_S)
        etcd.kill()
        engines.run(FAULT_S)
        assert members(fleet, "n1") == {"n1", "n2", "n3"}
        etcd.start()
        engines.run(FAULT_S)
        await_members(fleet, "n1", "n2", "n3", at="n2")
    engines.check()
    settled(fleet)


def test_killed_member_leaves_view_and_rejoins(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        engines.run(CALM_S)
        fleet.nodes["n3"].kill()
        await_members(fleet, "n1", "n2")
        engines.run(CALM_S)
        fleet.start("n3")
        await_members(fleet, "n1", "n2", "n3")
        engines.run(CALM_S)
    engines.check()
    settled(fleet)


def test_member_paused_beyond_lease_rejoins(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        engines.run(CALM_S)
        fleet.nodes["n2"].pause()
        await_members(fleet, "n1", "n3")
        fleet.nodes["n2"].resume()
        await_members(fleet, "n1", "n2", "n3")
        engines.run(CALM_S)
    engines.check()
    settled(fleet)


def test_member_without_etcd_keeps_last_view(
    fleet: Fleet, etcd: EtcdProcess, hosts: Hosts, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        engines.run(CALM_S)
        hosts.cut(hosts.places[1], etcd.address.partition(":")[0])
        await_members(fleet, "n1", "n3")
        assert members(fleet, "n2") == {"n1", "n2", "n3"}  # the last view that it received
        engines.run(CALM_S)
        hosts.heal(hosts.places[1])
        await_members(fleet, "n1", "n2", "n3")
    engines.check()
    settled(fleet)


def test_view_changing_every_second_causes_no_errors(
    fleet: Fleet, hosts: Hosts, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        engines.run(CALM_S)
        joining = fleet.join(hosts.places[3])
        for _ in range(5):
            engines.run(1.0)
            assert fleet.nodes[joining].stop() == 0
            engines.run(1.0)
            fleet.start(joining)
        await_members(fleet, "n1", "n2", "n3", joining)
    engines.check()
    settled(fleet)


def test_rolling_restart_causes_no_errors(
    fleet: Fleet, load: Any, settled: Callable[[Fleet], None]
) -> None:
    with load(fleet) as engines:
        for member in list(fleet.nodes):
            engines.run(CALM_S)
            assert fleet.nodes[member].stop() == 0
            fleet.start(member)
        await_members(fleet, *fleet.nodes)
    engines.check()
    settled(fleet)


def test_second_node_with_same_id_is_refused(
    fleet: Fleet, etcd: EtcdProcess, hosts: Hosts, settled: Callable[[Fleet], None]
) -> None:
    other: Place = hosts.places[3]
    words = (
        "--member",
        "n1",
        "--cluster",
        f"etcd://{etcd.address}/fleet",
        "--cluster-wait-s",
        "5",
        "--insecure",
    )
    with pytest.raises(Unavailable, match="n1"):
        NodeProcess(
            "--ram-bytes",
            "64MiB",
            *words,
            "--host",
            other.host,
            "--port",
            "7440",
            inside=other.inside,
        )
    assert members(fleet, "n2") == {"n1", "n2", "n3"}
    settled(fleet)
