"""TLS failures name the cause and the remedy on every wire; no call falls back to plain text."""

import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from authorities import HERE, client_context, of_client, of_node, pair
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore import Client, ClientConfig, ConfigError, Exhausted, Unavailable
from kvstore.cli.authority import Authority
from kvstore.deadline import Deadline
from kvstore.security.x509 import validity
from kvstore.transports.bulk import BulkWire
from kvstore.transports.tls import NO_PLACE
from node.config import NodeConfig
from node.server import Node
from node.tls import Certificates

WIRES = ("bulk", "grpc", "auto")


@pytest.fixture(scope="module")
def node(start_node: StartNode, ours: Authority) -> Node:
    return start_node(**of_node(ours))


@pytest.fixture(scope="module")
def plain(start_node: StartNode) -> Node:
    return start_node()


def error_of(connect: Connect, node: Node, wire: str, **settings: Any) -> str:
    """Return the error message of a failing call."""
    client = connect(node, wire, **settings)
    with pytest.raises(Unavailable) as failed:
        client.node_status()
    return str(failed.value)


@pytest.mark.parametrize("wire", WIRES)
def test_plain_client_is_told_that_the_node_uses_tls(
    node: Node, connect: Connect, wire: str
) -> None:
    assert "the node uses TLS; name the authority of its certificate with tls_ca" in error_of(
        connect, node, wire
    )


@pytest.mark.parametrize("wire", WIRES)
def test_tls_client_refuses_a_plain_node(
    plain: Node, connect: Connect, ours: Authority, wire: str
) -> None:
    message = error_of(connect, plain, wire, **of_client(ours))
    assert "the peer does not use TLS; start the node with --tls-cert and --tls-key" in message


def test_bulk_wire_with_tls_refuses_a_plain_node(plain: Node, ours: Authority) -> None:
    wire = BulkWire("127.0.0.1", plain.bulk.port, ClientConfig(**of_client(ours)))
    with pytest.raises(Unavailable, match="the peer does not use TLS"):
        wire.connect(Deadline(20.0))
    wire.close()


@pytest.mark.parametrize("wire", WIRES)
def test_client_names_an_untrusted_node_certificate(
    node: Node, connect: Connect, ours: Authority, strangers: Authority, wire: str
) -> None:
    message = error_of(connect, node, wire, **pair(ours, "client"), tls_ca=str(strangers.path))
    assert f"the node's certificate is not from an authority in tls_ca={strangers.path}" in message


@pytest.mark.parametrize("wire", WIRES)
def test_client_names_a_wrong_host_name(
    node: Node, connect: Connect, ours: Authority, wire: str
) -> None:
    message = error_of(connect, node, wire, **of_client(ours), tls_name="elsewhere")
    assert (
        "the node's certificate does not name elsewhere; call it by a name that it has, or set "
        "tls_name" in message
    )


@pytest.mark.parametrize("wire", WIRES)
def test_client_without_a_certificate_is_refused(
    node: Node, connect: Connect, ours: Authority, wire: str
) -> None:
    assert "requires client certificates (--tls-client-ca); set tls_cert and tls_key" in error_of(
        connect, node, wire, tls_ca=str(ours.path)
    )


@pytest.mark.parametrize("wire", WIRES)
def test_client_with_an_untrusted_certificate_is_refused(
    node: Node, connect: Connect, ours: Authority, strangers: Authority, wire: str
) -> None:
    message = error_of(connect, node, wire, **pair(strangers, "client"), tls_ca=str(ours.path))
    assert (
        f"tls_cert={pair(strangers, 'client')['tls_cert']} has expired, or is not from an "
        "authority in its" in message
    )


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ("nothing", "the node requires a client certificate"),
        ("strange", "the node does not know the authority of tls_cert="),
    ],
)
def test_bulk_wire_alone_names_a_refused_certificate(
    node: Node, ours: Authority, strangers: Authority, shown: str, message: str
) -> None:
    files = pair(strangers, "client") if shown == "strange" else {}
    wire = BulkWire("127.0.0.1", node.bulk.port, ClientConfig(tls_ca=str(ours.path), **files))
    with pytest.raises(Unavailable, match=message):
        wire.connect(Deadline(20.0))
    wire.close()


@pytest.mark.parametrize("wire", WIRES)
def test_client_names_an_expired_node_certificate(
    start_node: StartNode,
    connect: Connect,
    ours: Authority,
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node cannot start with an expired certificate, but one may expire while it runs."""
    ours.node("old", HERE, -0.5, force=True, since_days=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.security.x509.check_dates", lambda *_: None)
        node = start_node(**pair(ours, "old"))
        message = error_of(connect, node, wire, tls_ca=str(ours.path))
    assert "the node's certificate has expired; renew it, or set this host's clock" in message


@pytest.mark.parametrize("wire", WIRES)
def test_expired_client_certificate_is_refused_until_renewed(
    node: Node, connect: Connect, ours: Authority, tmp_path: Path, wire: str
) -> None:
    """A client does not check its own dates. The node names the cause, and the next call uses new
    files.
    """
    ours.node("spent", HERE, -0.5, force=True, since_days=1.0)
    files: dict[str, Any] = {name: str(tmp_path / name) for name in ("tls_cert", "tls_key")}

    def place(name: str) -> None:
        for setting, source in pair(ours, name).items():
            shutil.copy(source, files[setting])

    place("spent")
    client = connect(node, wire, tls_ca=str(ours.path), backoff_s_max=0.01, **files)
    with pytest.raises(Unavailable, match=f"tls_cert={files['tls_cert']} has expired"):
        client.node_status()
    place("client")
    wait_until(lambda: serves(client), 30.0)


def test_node_does_not_load_an_expired_certificate(ours: Authority, tmp_path: Path) -> None:
    files: dict[str, Any] = {name: str(tmp_path / name) for name in ("tls_cert", "tls_key")}

    def place(name: str) -> None:
        for setting, source in pair(ours, name).items():
            shutil.copy(source, files[setting])

    place("node")
    config = NodeConfig(tls_client_ca=str(ours.path), **files)
    certificates = Certificates(config)
    good, before = certificates.pems, certificates.status()
    for days, since_days, problem in ((-0.5, 1.0, "expired on"), (3.0, -2.0, "is valid from")):
        ours.node("dated", HERE, days, force=True, since_days=since_days)
        place("dated")
        certificates.poll()
        assert certificates.pems is good
        assert f"tls_cert={files['tls_cert']} {problem}" in certificates.status().problem
        with pytest.raises(ConfigError, match=problem):
            Certificates(config)
    assert certificates.status().certificates == before.certificates
    assert {one.setting: one.ends_unix_s for one in before.certificates} == {
        "tls_cert": int(validity(good.chain)[1]),
        "tls_client_ca": int(validity(ours.path.read_bytes())[1]),
    }


def serves(client: Client) -> bool:
    try:
        return client.node_status().state == "SERVING"
    except Unavailable:
        return False


GREETINGS = {
    "nothing": b"",
    "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "plain frames": b"KV\x04\x00" + bytes(60),
    "HTTP": b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n",
    "garbage": bytes(range(256)) * 8,
    "a record of wrong length": b"\x16\x03\x03\xff\xff" + bytes(2000),
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_unfinished_handshakes_do_not_block_others(
    node: Node, connect: Connect, ours: Authority, greeting: str
) -> None:
    """With 100 of them on all three ports, valid clients are served over new connections."""
    ports = [node.bulk.port, node.grpc.port, node.metrics.port]
    hanging = [socket.create_connection(("127.0.0.1", ports[number % 3])) for number in range(100)]
    try:
        for sock in hanging:
            sock.sendall(GREETINGS[greeting])
        pages = Pages(f"after {greeting}")
        for wire in ("bulk", "grpc"):
            client = connect(node, wire, **of_client(ours))
            pages.put(client, pages.keys(1, 2))
            assert all(pages.get(client, pages.keys(1, 2)))
        context = client_context(ours, **pair(ours, "client"))
        with context.wrap_socket(
            socket.create_connection(("127.0.0.1", node.metrics.port)), server_hostname="localhost"
        ) as scrape:
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert scrape.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        for sock in hanging:
            sock.close()
    wait_until(lambda: node.bulk.count <= 2)


def test_silent_connection_is_evicted_for_others(
    start_node: StartNode, ours: Authority, connect: Connect
) -> None:
    node = start_node(**of_node(ours), sessions_max=8)
    context = client_context(ours, **pair(ours, "client"))
    silent = [
        context.wrap_socket(
            socket.create_connection(("127.0.0.1", node.bulk.port)), server_hostname="localhost"
        )
        for _ in range(20)
    ]
    pages = Pages("among the silent")
    pages.put(connect(node, "bulk", **of_client(ours)), pages.keys(1))
    for sock in silent:
        sock.close()


def test_full_node_refuses_before_the_handshake(
    start_node: StartNode, ours: Authority, connect: Connect
) -> None:
    """Silent connections get the refusal, too, so that the node does not wait for them.

    A client takes it as an answer, as it does without TLS.
    """
    node = start_node(**of_node(ours), sessions_max=2)
    pages = Pages("full")
    client = connect(node, "bulk", **of_client(ours))
    busy = node.bulk._limiter.enter("127.0.0.1", lambda: None)
    for _ in range(3):
        with pytest.raises(
            Exhausted, match=r"refuses one more connection; most likely .* raise its sessions_max"
        ):
            client.lookup(pages.namespace, pages.keys(1))
        with socket.create_connection(("127.0.0.1", node.bulk.port)) as silent:
            silent.settimeout(20.0)
            assert (silent.recv(64), silent.recv(64)) == (NO_PLACE, b"")
    busy.close()
    # No pause, because a refusal is no failure of the node
    assert client.lookup(pages.namespace, pages.keys(1)).prefix_pages == 0


def test_slow_handshake_does_not_delay_other_connections(
    node: Node, ours: Authority, connect: Connect
) -> None:
    """Each connection has its own thread for the handshake."""
    slow = socket.create_connection(("127.0.0.1", node.bulk.port))
    stop = threading.Event()

    def trickle() -> None:
        for byte in GREETINGS["half a handshake"]:
            slow.sendall(bytes([byte]))
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        assert connect(node, "bulk", **of_client(ours)).node_status().state == "SERVING"
    finally:
        stop.set()
        thread.join()
        slow.close()
