"""Nodes on a real etcd: it must behave as the fake one in tests/helpers does."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from fleets import members, stop
from known_pages import Pages
from local_nodes import StartNode
from real_etcd import LEASE_S, RealEtcd
from stopping import stop as pause
from waiting import PATIENT, wait_until

from kvstore import Client, ClientConfig, Keep, Namespace, opaque_layout
from kvstore.cluster.view import State
from kvstore.errors import ConfigError
from kvstore.results import Events
from kvstore.tools.node_process import NodeProcess
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
    wait_until(lambda: one.membership.view == two.membership.view)
    with pytest.raises(ConfigError, match="the id n1 in the cluster fleet is that of another node"):
        fleet("n1")
    with pytest.raises(ConfigError, match="replicas=3, but the cluster fleet has 2"):
        fleet("n3", replicas=3)
    two.registry.set_state(State.DRAINING)  # type: ignore[union-attr]
    wait_until(lambda: one.membership.view.by_id["n2"].state is State.DRAINING)  # type: ignore[union-attr]
    assert '"address"' in etcd.ctl("get", "--prefix", "/kvstore/fleet/members/")
    stop(two)
    wait_until(lambda: members(one) == ["n1"])


@pytest.mark.long
def test_revoked_lease_is_renewed(fleet: StartNode, etcd: RealEtcd) -> None:
    one, two = fleet("n1"), fleet("n2")
    wait_until(lambda: len(members(one)) == 2)
    lease, number = two.registry._lease, one.membership.view.number  # type: ignore[union-attr]
    etcd.ctl("lease", "revoke", f"{lease:x}")
    wait_until(lambda: one.membership.view.number > number)  # type: ignore[union-attr]
    wait_until(lambda: two.registry._lease not in (0, lease))  # type: ignore[union-attr]
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])


@pytest.mark.parametrize(
    "how", ["killed", *(pytest.param(how, marks=pytest.mark.long) for how in ("paused", "wiped"))]
)
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
        ClientConfig(address=f"127.0.0.1:{one.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0)
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


@pytest.mark.long
def test_etcd_user_without_rights_gets_the_reason(etcd: RealEtcd, fleet: StartNode) -> None:
    etcd.ctl("user", "add", "root:pass")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    with pytest.raises(ConfigError, match="see etcd_user, etcd_password"):
        fleet("n1")
    with pytest.raises(ConfigError, match="see etcd_user, etcd_password"):
        fleet("n1", etcd_user="root", etcd_password="wrong")
    assert members(fleet("n1", etcd_user="root", etcd_password="pass")) == ["n1"]


@pytest.mark.long
def test_killed_member_is_lost_and_its_pages_get_two_copies_again(
    etcd: RealEtcd, tmp_path: Path
) -> None:
    """Kill -9 of processes: loss, repair and return are events, also after a restart."""
    cluster = ("--cluster", f"etcd://{etcd.endpoint}/fleet", "--lease-s", f"{LEASE_S}")

    def start(name: str, *flags: str) -> NodeProcess:
        flags = (*cluster, "--member", name, "--ram-bytes", "16MiB", "--replicas", "2", *flags)
        return NodeProcess(*flags)

    disk = ("--data-dir", str(tmp_path / "n1"), "--disk-bytes", "128MiB")
    pages, keys = Pages("killed"), [bytes([number] * 32) for number in range(60)]
    with start("n1", *disk) as one, start("n2") as two, start("n3") as three:

        def kinds(node: NodeProcess, member: str) -> list[str]:
            with Client(ClientConfig(node.address, direct=True, **PATIENT)) as client:
                (reply,) = client.events().values()
            assert isinstance(reply, Events)
            return [event.kind for event in reply.events if event.member == member]

        wait_until(lambda: all(kinds(one, name)[-1:] for name in ("n1", "n2", "n3")), 30.0)
        wait_until(lambda: "serving" in kinds(one, "n3"), 30.0)
        with Client(ClientConfig(one.address, near="none", **PATIENT)) as client:
            client.put(pages.namespace, keys, [pages.content(key) for key in keys], Keep(ack="all"))
        three.kill()
        for node, name in ((one, "n1"), (two, "n2")):
            wait_until(lambda node=node: "lost" in kinds(node, "n3"), 30.0)  # type: ignore[misc]
            wait_until(lambda node=node, name=name: "repaired" in kinds(node, name), 30.0)  # type: ignore[misc]
            with Client(ClientConfig(node.address, direct=True, **PATIENT)) as client:
                assert pages.get(client, keys) == [True] * len(keys)
                peers = client.node_status().peers
            assert peers.pages_under_replicated == 0
            assert [(lost.id, lost.owners_left) for lost in peers.lost] == [("n3", 1)]
        before = kinds(one, "n3")
        one.kill()
        with start("n1", *disk) as again, start("n3"):
            assert kinds(again, "n3")[: len(before)] == before
            wait_until(lambda: "returned" in kinds(again, "n3") + kinds(two, "n3"), 30.0)
