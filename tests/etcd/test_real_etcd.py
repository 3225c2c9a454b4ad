"""Nodes on a real etcd: it must behave as the fake one in tests/helpers does."""

import shutil
import signal
import time

import pytest
from fleets import members, stop
from local_nodes import StartNode
from real_etcd import LEASE_S, RealEtcd
from stopping import stop as pause
from waiting import wait_until

from kvstore import Client, ClientConfig, Namespace, opaque_layout
from kvstore.cluster.view import State
from kvstore.errors import ConfigError
from node.server import Node

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)"
)


def registry(node: Node) -> str:
    status = node.peers.status()
    return status.registry if status else ""


def test_nodes_join_leave_and_conflicting_ones_are_refused(
    fleet: StartNode, etcd: RealEtcd
) -> None:
    one, two = fleet("n1", replicas=2), fleet("n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    assert one.membership.view == two.membership.view
    with pytest.raises(ConfigError, match="the id n1 in the cluster fleet is that of another node"):
        fleet("n1")
    with pytest.raises(ConfigError, match="replicas=3, but the cluster fleet has 2"):
        fleet("n3", replicas=3)
    two.registry.set_state(State.DRAINING)  # type: ignore[union-attr]
    wait_until(lambda: one.membership.view.by_id["n2"].state is State.DRAINING)  # type: ignore[union-attr]
    assert '"address"' in etcd.ctl("get", "--prefix", "/kvstore/fleet/members/")
    stop(two)
    wait_until(lambda: members(one) == ["n1"])


def test_revoked_lease_is_renewed(fleet: StartNode, etcd: RealEtcd) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: len(members(one)) == 2)
    lease, number = two.registry._lease, one.membership.view.number  # type: ignore[union-attr]
    etcd.ctl("lease", "revoke", f"{lease:x}")
    wait_until(lambda: one.membership.view.number > number)  # type: ignore[union-attr]
    wait_until(lambda: two.registry._lease not in (0, lease))  # type: ignore[union-attr]
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])


@pytest.mark.parametrize("how", ["killed", "paused", "wiped"])
def test_etcd_outage_keeps_the_last_view(fleet: StartNode, etcd: RealEtcd, how: str) -> None:
    one, two = fleet("n1", replicas=2), fleet("n2")
    wait_until(lambda: len(members(one)) == len(members(two)) == 2)
    number, seen = one.membership.view.number, []  # type: ignore[union-attr]
    one.membership.on_view(lambda view: seen.append(len(view.members)))
    if how == "paused":
        pause(etcd.process.pid)
    else:
        etcd.kill()
    wait_until(lambda: "the last view stays in force" in registry(one), 30.0)
    space = Namespace(model=how, layout=opaque_layout(4096))
    with Client(
        ClientConfig(address=f"127.0.0.1:{one.grpc.port}", connect_timeout_s=5.0)
    ) as client:
        client.put(space, [bytes(32)], [bytes(4096)])
        assert client.lookup(space, [bytes(32)]).present == (True,)
    time.sleep(1.5 * LEASE_S)
    assert members(one) == members(two) == ["n1", "n2"]
    if how == "wiped":
        etcd.wipe()
    if how == "paused":
        etcd.process.send_signal(signal.SIGCONT)
    else:
        etcd.start()
    wait_until(lambda: registry(one) == registry(two) == "etcd", 30.0)
    two.registry.set_state(State.DRAINING)  # type: ignore[union-attr]
    wait_until(lambda: one.membership.view.by_id["n2"].state is State.DRAINING, 30.0)  # type: ignore[union-attr]
    assert one.membership.view.number > number  # type: ignore[union-attr]
    assert one.membership.view.replicas == 2  # type: ignore[union-attr]
    if how != "paused":  # after an unnoticed pause members may vanish for a moment
        assert set(seen) == {2}


def test_etcd_user_without_rights_gets_the_reason(etcd: RealEtcd, fleet: StartNode) -> None:
    etcd.ctl("user", "add", "root:pass")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    with pytest.raises(ConfigError, match="see etcd_user, etcd_password"):
        fleet("n1")
    with pytest.raises(ConfigError, match="see etcd_user, etcd_password"):
        fleet("n1", etcd_user="root", etcd_password="wrong")
    assert members(fleet("n1", etcd_user="root", etcd_password="pass")) == ["n1"]
