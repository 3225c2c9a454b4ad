"""Clients that connect by frames: at bulk:// and unix: addresses, and to nodes known from
before.
"""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from authorities import of_client, of_node, pair
from fleet import tell, view_of, wait_replicated
from fleets import Start
from known_pages import Pages
from local_nodes import Connect, StartNode
from ports import free_ports
from waiting import wait_until

from kvstore import ClientConfig, ConfigError, KVStoreError, Unavailable
from kvstore.cli.authority import Authority
from kvstore.cluster.view import Member, View, static_view
from kvstore.deadline import Deadline
from kvstore.transports.channel import NodeChannel
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.negotiation import member_name
from node.config import NodeConfig
from node.server import Node

PATIENT: dict[str, Any] = {"timeout_s": 30.0, "connect_timeout_s": 20.0}


def drop(link: NodeChannel) -> None:
    """Drop the connection of `link`, so that the next call reconnects."""
    assert link._connection is not None
    link._drop(link._connection)


def by_frames(node: Node) -> str:
    return f"bulk://127.0.0.1:{node.bulk.port}"


def by_socket(node: Node) -> str:
    assert node.shm is not None
    return f"unix://{node.shm.path}"


@pytest.fixture
def no_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a client uses gRPC."""

    def call(*_: Any) -> Any:
        raise AssertionError("this client called over gRPC")

    monkeypatch.setattr(GrpcWire, "__init__", call)


@pytest.mark.usefixtures("no_grpc")
@pytest.mark.parametrize(
    ("address", "wire", "taken"),
    [
        (by_frames, "auto", "shm"),
        (by_frames, "bulk", "bulk"),
        (by_frames, "shm", "shm"),
        (by_socket, "auto", "shm"),
        (by_socket, "shm", "shm"),
    ],
)
def test_frame_address_leads_to_the_best_wire(
    node: Node, connect: Connect, pages: Pages, address: Any, wire: str, taken: str
) -> None:
    client, keys = connect(node, wire, address=address(node)), pages.keys(*range(4))
    pages.put(client, keys)
    assert pages.get(client, keys) == [True] * 4
    assert client.wire_name == taken
    assert client.node_status().instance_id == node.service.instance_id
    assert client.stats.connects == 1


def test_frame_address_without_shared_memory_uses_tcp(
    start_node: StartNode, connect: Connect, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    node = start_node(shm_socket="none")
    client = connect(node, "auto", address=by_frames(node))
    pages.put(client, pages.keys(1))
    assert client.wire_name == "bulk"
    assert not [record for record in caplog.records if record.levelname == "WARNING"], (
        "a node without shared memory must cause no warning"
    )


def test_restart_is_noticed_at_a_frame_address(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    first = start_node()
    client = connect(first, "bulk", address=by_frames(first), backoff_s_max=0.05)
    pages.put(client, pages.keys(1))
    port = first.bulk.port
    first.bulk.stop(0.0)
    first.bulk.stop = lambda drain_s: None
    second = start_node(bulk_port=port)
    assert pages.get(client, pages.keys(1)) == [False], (
        "the next call must reach the new, empty node"
    )
    assert client.node_status().instance_id == second.service.instance_id


@pytest.mark.usefixtures("no_grpc")
def test_frame_address_works_with_tls(
    start_node: StartNode, connect: Connect, pages: Pages, ours: Authority
) -> None:
    node = start_node(**of_node(ours))
    client = connect(node, "bulk", address=by_frames(node), **of_client(ours))
    pages.put(client, pages.keys(1))
    assert pages.get(client, pages.keys(1)) == [True]
    with pytest.raises(Unavailable, match="the node requires a client certificate"):
        connect(node, "bulk", address=by_frames(node), tls_ca=str(ours.path)).node_status()


def test_tls_errors_are_named_at_a_bulk_address(
    start_node: StartNode, connect: Connect, node: Node, ours: Authority
) -> None:
    secured = start_node(**pair(ours, "node"))
    with pytest.raises(Unavailable, match="the node uses TLS; name the authority"):
        connect(secured, "bulk", address=by_frames(secured)).node_status()
    with pytest.raises(Unavailable, match="the peer does not use TLS"):
        connect(node, "bulk", address=by_frames(node), tls_ca=str(ours.path)).node_status()


def test_missing_unix_socket_is_named(node: Node, connect: Connect) -> None:
    with pytest.raises(Unavailable, match=r"socket /tmp/nobody\.sock does not exist here"):
        connect(node, "auto", address="unix:/tmp/nobody.sock").node_status()


def test_server_without_frames_is_named(node: Node, connect: Connect) -> None:
    with pytest.raises(KVStoreError):
        connect(
            node, "bulk", address=f"bulk://127.0.0.1:{node.metrics.port}", timeout_s=3.0
        ).node_status()


# ---- nodes known from before -------------------------------------------------------------


@contextlib.contextmanager
def grpc_down(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make every gRPC call fail, as at a flooded gateway; yield the operations that were tried."""
    tried: list[str] = []

    def call(self: Any, op: str, *_: Any) -> Any:
        tried.append(op)
        raise Unavailable("the gateway is down")

    with monkeypatch.context() as patch:
        patch.setattr(GrpcWire, "call", call)
        yield tried


def test_bulk_port_used_as_grpc_port_is_named(node: Node, connect: Connect) -> None:
    with pytest.raises(Unavailable, match=f"bulk://127.0.0.1:{node.bulk.port}"):
        connect(node, address=f"127.0.0.1:{node.bulk.port}").node_status()


@pytest.mark.parametrize("wire", ["bulk", "shm", "auto"])
def test_known_node_is_reconnected_without_grpc(
    node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    client = connect(node, wire)
    pages.put(client, pages.keys(1))
    link = client._fan_out.nodes.only
    with grpc_down(monkeypatch) as tried:
        drop(link)
        assert pages.get(client, pages.keys(1)) == [True]
        assert client.stats.connects == 2
        assert tried == []


def test_unknown_node_without_grpc_is_refused(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with grpc_down(monkeypatch), pytest.raises(Unavailable, match="gateway is down"):
        connect(node).node_status()


def test_known_port_of_another_node_falls_back_to_grpc(
    start_node: StartNode, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next connection another node may use the known port."""
    node, stranger = start_node(), start_node()
    client = connect(node)
    pages.put(client, pages.keys(1))
    link = client._fan_out.nodes.only
    link._negotiation._known = link._negotiation._known._replace(bulk_port=stranger.bulk.port)
    drop(link)
    assert client.node_status().instance_id == node.service.instance_id
    assert link._negotiation._known.bulk_port == node.bulk.port, (
        "the right port must be known again"
    )
    link._negotiation._known = link._negotiation._known._replace(bulk_port=stranger.bulk.port)
    drop(link)
    with grpc_down(monkeypatch), pytest.raises(Unavailable, match="gateway is down"):
        client.node_status()


def test_silent_bulk_port_leaves_time_to_ask_over_grpc(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(node, "shm", connect_timeout_s=4.0)
    assert client.node_status().instance_id
    link = client._fan_out.nodes.only
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        known = link._negotiation._known
        link._negotiation._known = known._replace(bulk_port=silent.getsockname()[1])
        drop(link)
        assert client.node_status().instance_id == node.service.instance_id
        assert link._negotiation._known is None, "the next connection must not try the silent port"


def test_grpc_client_says_hello_over_grpc(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(node, "grpc")
    client.node_status()
    link = client._fan_out.nodes.only
    link.expect(node.bulk.port, "")
    drop(link)
    monkeypatch.setattr(
        "kvstore.transports.bulk.BulkWire.greet", lambda *_: pytest.fail("the hello went by frames")
    )
    assert client.node_status().instance_id


# ---- members -----------------------------------------------------------------------------


def listed(numbers: range, ports: list[int]) -> str:
    return "static:fleet/" + ",".join(
        f"n{i}=bulk://127.0.0.1:{ports[i]}@z{i}*{i + 1}" for i in numbers
    )


def test_static_list_accepts_bulk_addresses() -> None:
    view = static_view(listed(range(2), [1, 2]))
    assert view.members == (
        Member("n0", "bulk://127.0.0.1:1", 1.0, "z0"),
        Member("n1", "bulk://127.0.0.1:2", 2.0, "z1"),
    )
    with pytest.raises(ConfigError, match="Unix socket"):
        static_view("static:fleet/a=unix:/run/x.sock")


@pytest.mark.usefixtures("no_grpc")
def test_cluster_works_by_frames_only(
    start_node: StartNode, connect: Connect, pages: Pages
) -> None:
    ports = free_ports(2)
    cluster = listed(range(2), ports)
    nodes = [
        start_node(cluster=cluster, member=f"n{i}", bulk_port=ports[i], replicas=2)
        for i in range(2)
    ]
    client = connect(
        nodes[0], "bulk", address=f"bulk://127.0.0.1:{ports[1]},{by_frames(nodes[0])}", near="none"
    )
    keys = pages.keys(*range(12))
    pages.put(client, keys)
    wait_replicated(nodes)
    assert pages.get(client, keys) == [True] * 12
    for node in nodes:
        alone = connect(node, "bulk", address=by_frames(node), direct=True)
        assert pages.get(alone, keys) == [True] * 12, "replicas must arrive by frames"


def test_static_member_announces_its_own_bulk_port(start_node: StartNode, connect: Connect) -> None:
    ports = free_ports(2)
    cluster = "static:fleet/" + ",".join(f"n{i}=127.0.0.1:{port}" for i, port in enumerate(ports))
    nodes = [start_node(cluster=cluster, member=f"n{i}", port=ports[i]) for i in range(2)]
    client = connect(nodes[0])
    announced = {member.id: member.bulk_port for member in client.view().members}
    assert announced == {"n0": nodes[0].bulk.port, "n1": 0}
    for link in client._fan_out.nodes.all().values():
        link.run(lambda link, limit: None, None, Deadline(30.0))
    both = {member.id: member.bulk_port for member in client._fan_out.nodes.view.members}
    assert both == {"n0": nodes[0].bulk.port, "n1": nodes[1].bulk.port}, (
        "the ports from all members must be merged"
    )
    again = client._fan_out.nodes.view
    client._fan_out.nodes._take(nodes[0].membership.view.message)
    assert client._fan_out.nodes.view is again, "an equal view must not replace the merged one"


def test_member_with_a_known_bulk_port_is_reached_without_grpc(
    start_node: StartNode, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [start_node() for _ in range(2)]
    view = view_of(nodes)
    ports = [node.bulk.port for node in nodes]
    members = tuple(
        Member(m.id, m.address, bulk_port=port) for m, port in zip(view.members, ports, strict=True)
    )
    tell(nodes, View(view.cluster, 1, members))
    client = connect(nodes[0], "bulk", near="none")
    assert client.view() is not None
    keys = pages.keys(*range(40))
    with grpc_down(monkeypatch) as tried:
        pages.put(client, keys)
        assert pages.get(client, keys) == [True] * 40
        assert client.stats.connects == 2
        assert tried == []
        link = nodes[0].peers.channels.channel("n1")
        link.run(lambda link, limit: None, None, Deadline(30.0))
        assert tried == [], "links between members must not use gRPC either"


def test_other_member_at_a_known_port_is_not_used(start_node: StartNode) -> None:
    nodes = [start_node() for _ in range(2)]
    tell(nodes, view_of(nodes))
    link = NodeChannel(f"127.0.0.1:{nodes[0].grpc.port}", ClientConfig(wire="bulk", **PATIENT))
    link.expect(nodes[1].bulk.port, member_name("fleet", "n0"))
    hello = link.run(lambda link, limit: link.negotiated.hello, None, Deadline(30.0))
    assert hello.member_id == "n0"
    link.close()


def test_registered_members_announce_their_bulk_ports(fleet: Start, connect: Connect) -> None:
    nodes = [fleet(f"n{i}") for i in range(2)]
    wait_until(lambda: all(len(node.membership.view.members) == 2 for node in nodes))
    client = connect(nodes[0])
    assert {m.id: m.bulk_port for m in client.view().members} == {
        node.membership.member: node.bulk.port for node in nodes
    }


@pytest.mark.usefixtures("no_grpc")
def test_member_can_register_a_bulk_address(fleet: Start, connect: Connect, pages: Pages) -> None:
    (port,) = free_ports(1)
    node = fleet("n0", bulk_port=port, advertise=f"bulk://127.0.0.1:{port}")
    assert node.membership.view.by_id["n0"].address == f"bulk://127.0.0.1:{port}"
    client = connect(node, "bulk", address=by_frames(node), near="none")
    pages.put(client, pages.keys(1))
    assert pages.get(client, pages.keys(1)) == [True]


@pytest.mark.parametrize("advertise", ["", "127.0.0.1"])
def test_member_with_private_grpc_registers_its_bulk_port(
    fleet: Start, connect: Connect, pages: Pages, advertise: str
) -> None:
    """Members reach a node by its bulk port when its gRPC is off, or for administrators only."""
    node = fleet("n0", grpc_host="none", advertise=advertise)
    assert node.membership.view.by_id["n0"].address == by_frames(node)
    client = connect(node, "bulk", address=by_frames(node), near="none")
    pages.put(client, pages.keys(1))
    assert pages.get(client, pages.keys(1)) == [True]


def test_node_without_tcp_serves_by_its_unix_socket_only(
    start_node: StartNode, connect: Connect, pages: Pages, tmp_path: Path
) -> None:
    node = start_node(host="none", shm_socket=str(tmp_path / "socket"))
    client = connect(node, "shm", address=f"unix:{tmp_path}/socket")
    pages.put(client, pages.keys(1))
    assert pages.get(client, pages.keys(1)) == [True]
    assert (node.bulk, node.metrics, node.grpc.port) == (None, None, 0)
    assert node.answers(60.0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "shm_socket=auto names no file"),
        ({"shm_socket": "none"}, "shm_socket=none names no file"),
        ({"shm_socket": "/s", "grpc_host": "127.0.0.1"}, "for a single node without TCP"),
        ({"shm_socket": "/s", "cluster": "static:c/a=h:1"}, "for a single node without TCP"),
    ],
)
def test_node_without_tcp_needs_a_socket_and_no_cluster(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        NodeConfig(host="none", **settings)


# ---- processes without gRPC --------------------------------------------------------------

WITHOUT = """
import sys, time

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "grpc":
            raise ImportError("this process has no grpc")

sys.meta_path.insert(0, Refusing())
from kvstore import Client, ClientConfig, Namespace, opaque_layout

space = Namespace("without grpc", opaque_layout(4096))
keys = [bytes([number]) * 32 for number in range(6)]
times = {"timeout_s": 30.0, "connect_timeout_s": 20.0}
with Client(ClientConfig(address=sys.argv[1], wire=sys.argv[2], **times)) as client:
    client.put(space, keys, [bytes([number]) * 4096 for number in range(6)])
    buffers = [bytearray(4096) for _ in keys]
    assert client.get(space, keys, buffers) == [True] * 6
    assert buffers == [bytes([number]) * 4096 for number in range(6)]
    assert client.lookup(space, keys).prefix_pages == 6
    assert client.pin(space, keys[:1], 5.0) == [True]
    assert client.remove(space, keys[1:2]) == [True]
    assert [page.prefix_hash for page in client.list_pages(space)] == [keys[0], *keys[2:]]
    assert client.wire_name == sys.argv[3]
    while client.view().number == 2:
        time.sleep(0.01)
    assert client.stats.failures == 0
assert "grpc" not in sys.modules
"""


@pytest.mark.parametrize(
    ("address", "wire", "taken"),
    [(by_frames, "bulk", "bulk"), (by_frames, "auto", "shm"), (by_socket, "auto", "shm")],
)
def test_frame_client_works_without_grpc(
    start_node: StartNode, address: Any, wire: str, taken: str
) -> None:
    """In a cluster, the client also follows the view by frames."""
    one = start_node()
    tell([one], view_of([one]))
    members = tuple(
        Member(m.id, m.address, bulk_port=one.bulk.port) for m in view_of([one]).members
    )
    tell([one], View("fleet", 2, members))
    newer = View("fleet", 3, members)
    command = [sys.executable, "-c", WITHOUT, address(one), wire, taken]
    threading.Thread(
        target=lambda: (wait_until(lambda: one.service.followers.count), tell([one], newer))
    ).start()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_kvstore_imports_no_grpc() -> None:
    code = "import sys, kvstore; assert 'grpc' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60.0, check=False).returncode == 0
