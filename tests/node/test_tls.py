"""A node with TLS on all ports: right bytes over every wire, client identities, and status."""

import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import client_context, of_client, of_node, pair
from fleets import Start
from known_pages import Pages
from local_nodes import Connect, StartNode
from ports import free_ports
from waiting import wait_until

from kvstore import Client, ConfigError, Namespace, opaque_layout
from kvstore.cli.authority import Authority
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from node.config import NodeConfig
from node.gateway.call import Call, certificate_names
from node.server import Node
from node.serving.bulk import BulkConnection
from node.tls import Certificates, Shown, certificates_of

WIRES = ("bulk", "grpc", "shm")
SPACE = Namespace(model="anything", layout=opaque_layout(4096))


@pytest.fixture(scope="module")
def node(start_node: StartNode, ours: Authority) -> Node:
    """Start a node that requires client certificates."""
    return start_node(**of_node(ours), ram_nbytes=16 << 20)


@pytest.fixture(scope="module")
def open_node(start_node: StartNode, ours: Authority) -> Node:
    return start_node(**pair(ours, "node"), ram_nbytes=16 << 20)


@pytest.fixture
def known(connect: Connect, ours: Authority) -> Callable[..., Client]:
    return lambda node, wire="bulk", **settings: connect(
        node, wire, **{**of_client(ours), **settings}
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("page_nbytes", [4096, 300_000])
def test_pages_are_intact_over_tls(
    node: Node,
    known: Callable[..., Client],
    request: pytest.FixtureRequest,
    wire: str,
    page_nbytes: int,
) -> None:
    pages = Pages(request.node.name, page_nbytes)
    client, keys = known(node, wire), pages.keys(*range(20))
    pages.put(client, keys)
    assert pages.get(client, [*keys, pages.key(99)]) == [True] * 20 + [False]
    assert client.lookup(pages.namespace, keys).prefix_pages == 20
    assert client.wire_name == wire


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_parallel_pages_are_intact_over_tls(
    open_node: Node, connect: Connect, ours: Authority, wire: str
) -> None:
    """The node asks for no client certificate, and its name is verified as `tls_name`, not by
    address.
    """
    client = connect(
        open_node,
        wire,
        tls_ca=str(ours.path),
        tls_name="localhost",
        address=f"127.0.0.1:{open_node.grpc.port}",
    )
    pages = Pages(f"ranges over {wire}", 1 << 20)
    keys = pages.keys(*range(6))
    pages.put(client, keys)
    pages.flip(open_node, keys[3])
    assert pages.get(client, keys) == [True, True, True, False, True, True]


def test_every_port_uses_tls_1_3(node: Node, ours: Authority) -> None:
    context = client_context(ours, **pair(ours, "client"))
    context.set_alpn_protocols(["h2"])
    for port in (node.grpc.port, node.bulk.port, node.metrics.port):
        sock = socket.create_connection(("127.0.0.1", port))
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as greeted:
            assert greeted.version() == "TLSv1.3"


@pytest.mark.parametrize("port", ["bulk", "metrics"])
def test_tls_older_than_1_3_is_refused(node: Node, ours: Authority, port: str) -> None:
    context = client_context(ours, **pair(ours, "client"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", getattr(node, port).port)) as sock,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


def shown_at_bulk(connect: Connect, node: Node, monkeypatch: pytest.MonkeyPatch) -> Shown | None:
    found: list[Shown | None] = []
    transfer = BulkConnection.transfer

    def spy(self: BulkConnection, op: str) -> Any:
        found.append(self.client_certificate)
        return transfer(self, op)

    monkeypatch.setattr(BulkConnection, "transfer", spy)
    connect(node, "bulk").open(SPACE)
    return found[-1]


def shown_at_grpc(connect: Connect, node: Node, monkeypatch: pytest.MonkeyPatch) -> Shown | None:
    found: list[Shown | None] = []
    enter = Call.__enter__

    def spy(self: Call) -> Call:
        names = certificate_names(self.context.auth_context())
        found.append(None if names is None else Shown(names[0], names[1:]))
        return enter(self)

    monkeypatch.setattr(Call, "__enter__", spy)
    connect(node, "grpc").open(SPACE)
    return found[-1]


@pytest.mark.parametrize("shown", [shown_at_bulk, shown_at_grpc])
def test_node_knows_the_name_in_a_client_certificate(
    node: Node,
    open_node: Node,
    connect: Connect,
    known: Callable[..., Client],
    ours: Authority,
    monkeypatch: pytest.MonkeyPatch,
    shown: Any,
) -> None:
    assert shown(known, node, monkeypatch) == Shown("team-a", ())
    as_node = {**pair(ours, "node"), "tls_ca": str(ours.path)}
    seen = shown(lambda node, wire: connect(node, wire, **as_node), node, monkeypatch)
    assert seen.common_name == "localhost"
    assert set(seen.alternatives) >= {"localhost", "127.0.0.1"}
    assert shown(known, open_node, monkeypatch) is None


def scrape(node: Node, ours: Authority) -> str:
    url, context = (
        f"https://127.0.0.1:{node.metrics.port}/metrics",
        client_context(ours, **pair(ours, "client")),
    )
    with urllib.request.urlopen(url, context=context, timeout=20) as answer:
        return str(answer.read().decode())


def test_metrics_report_the_expiry_of_certificates(node: Node, ours: Authority) -> None:
    lines = dict(
        line.rsplit(" ", 1) for line in scrape(node, ours).splitlines() if not line.startswith("#")
    )
    assert lines["kvstore_tls"] == "1.0"
    left_s = float(lines['kvstore_certificate_expiry_seconds{setting="tls_cert"}']) - time.time()
    assert 9 * 86400 < left_s < 11 * 86400
    assert 'kvstore_certificate_expiry_seconds{setting="tls_client_ca"}' in lines


def test_status_describes_tls(
    node: Node, open_node: Node, known: Callable[..., Client], connect: Connect, ours: Authority
) -> None:
    tls = known(node).node_status().tls
    assert tls.client_certificates
    assert [one.setting for one in tls.certificates] == ["tls_cert", "tls_client_ca"]
    assert not connect(open_node, tls_ca=str(ours.path)).node_status().tls.client_certificates


def test_status_without_tls_has_no_tls_field(start_node: StartNode, connect: Connect) -> None:
    assert not connect(start_node()).node_status().tls


def test_expiring_certificate_is_logged(
    ours: Authority, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ours.node("soon", ["localhost"], 2.0, force=True)
    certificates = Certificates(NodeConfig(**pair(ours, "soon")))
    certificates.poll()
    assert caplog.text.count("the certificate in tls_cert is valid until") == 1


def test_expiring_certificate_is_an_event(ours: Authority, start_node: StartNode) -> None:
    ours.node("soon", ["localhost"], 2.0, force=True)
    node = start_node(**pair(ours, "soon"))

    def found() -> list[str]:
        return [event.text for event in node.events.since() if event.kind == "certificate"]

    wait_until(lambda: found() != [])
    node._look_at_certificates()
    (said,) = found()
    assert said.startswith("tls_cert expires on 2")


def test_reload_reports_certificates_that_can_not_be_used(
    ours: Authority, start_node: StartNode
) -> None:
    ours.node("reloaded", ["localhost"], 9.0, force=True)
    node = start_node(**pair(ours, "reloaded"))
    assert node.reload() == {"certificates": ""}
    Path(pair(ours, "reloaded")["tls_key"]).write_text("no key")
    assert "tls_key" in node.reload()["certificates"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_cert": "a"}, "tls_cert and tls_key are given together"),
        ({"tls_client_ca": "a"}, "tls_client_ca and tls_ca need tls_cert and tls_key"),
        ({"tls_ca": "a"}, "tls_client_ca and tls_ca need tls_cert and tls_key"),
        (
            {"tls_cert": "a", "tls_key": "b", "cluster": "static:c/n1=h:1", "member": "n1"},
            "a node of a cluster with tls_cert needs tls_ca",
        ),
    ],
)
def test_conflicting_tls_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        certificates_of(NodeConfig(**settings))


def test_node_with_a_wrong_key_does_not_start(ours: Authority, strangers: Authority) -> None:
    config = NodeConfig(
        tls_cert=pair(ours, "node")["tls_cert"], tls_key=pair(strangers, "node")["tls_key"]
    )
    with pytest.raises(
        ConfigError, match=r"tls_key=.* is not the key of the certificate in tls_cert="
    ):
        Node(config)


def test_health_service_uses_tls(node: Node, ours: Authority) -> None:
    files = [ours.path, *reversed(pair(ours, "client").values())]
    credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in files))
    with grpc.secure_channel(f"localhost:{node.grpc.port}", credentials) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=20) == b"\x08\x01"  # SERVING


def test_cluster_members_use_tls_with_each_other(
    start_node: StartNode, known: Callable[..., Client], ours: Authority
) -> None:
    """Each member connects to the other over bulk with TLS."""
    ports = free_ports(2)
    members = ",".join(f"n{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
    nodes = [
        start_node(**of_node(ours), cluster=f"static:tls/{members}", member=f"n{number}", port=port)
        for number, port in enumerate(ports)
    ]
    links = [node.peers.channels.channel(f"n{1 - number}") for number, node in enumerate(nodes)]
    request = pb.HelloRequest()
    for link, other in zip(links, reversed(nodes), strict=True):
        reply = link.run(
            lambda one, deadline: one.wire.call("hello", request, deadline), None, Deadline(20.0)
        )
        assert reply.instance_id == other.service.instance_id
        assert link.wire_name == "bulk"


def test_advertised_address_must_be_in_the_certificate(fleet: Start, ours: Authority) -> None:
    node = fleet("n1", **of_node(ours))
    assert node.membership.view.members[0].id == "n1"
    ours.node("elsewhere", ["elsewhere.example.org"], 10, force=True)
    with pytest.raises(
        ConfigError,
        match=r"does not reach itself at 127.0.0.1:\d+: the node's certificate does not name",
    ):
        fleet("n2", **{**of_node(ours), **pair(ours, "elsewhere")})


@pytest.mark.parametrize("wire", ["bulk", "grpc"])
def test_tls_name_replaces_the_address_in_the_check(
    start_node: StartNode, connect: Connect, tmp_path: Path, wire: str
) -> None:
    """Nodes with changing addresses need it, and gRPC derives the name of a call in its own way."""
    authority = Authority.found(tmp_path, "ours", 10)
    certificate, key = authority.node("node", ["fleet.example"], 10)
    node = start_node(tls_cert=str(certificate), tls_key=str(key))
    client = connect(node, wire, tls_ca=str(authority.path), tls_name="fleet.example")
    pages = Pages(f"by another name over {wire}")
    keys = pages.keys(1, 2)
    pages.put(client, keys)
    assert pages.get(client, keys) == [True, True]
