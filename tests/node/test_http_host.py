"""The `Host` header on the HTTP port: an open node refuses names that another site could own."""

import socket
from pathlib import Path

import pytest
from local_nodes import StartNode

from node.server import Node


@pytest.fixture(scope="module", params=["on", "off"])
def node(request: pytest.FixtureRequest, start_node: StartNode) -> Node:
    """Start a node with a console, or without one.

    Only a member of a cluster has a name with dots, so one is added here.
    """
    node = start_node(console=request.param)
    node._own_hosts.append("node7.example.com")
    return node


def status(port: int, path: str, *hosts: str, header: str = "Host: ") -> str:
    with socket.create_connection(("127.0.0.1", port), 20.0) as sock:
        lines = "".join(f"{header}{host}\r\n" for host in hosts)
        sock.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        reply = b""
        while some := sock.recv(1 << 16):
            reply += some
    return reply.split(b" ")[1].decode()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/any"])
def test_open_node_refuses_foreign_host_names(node: Node, path: str) -> None:
    for host in (
        "rebound.example.com",
        "rebound.example.com:7442",
        "[rebound.example.com]",
        "[rebound.example.com:7442]",
        "localhost.",
        "",
    ):
        assert status(node.metrics.port, path, host) == "403", host


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_open_node_serves_addresses_service_names_and_its_own_name(node: Node, path: str) -> None:
    """A kubelet and Prometheus use the addresses of pods, and a compose file the names of
    services.
    """
    for host in (
        "127.0.0.1:7442",
        "10.0.0.7:7442",
        "[fd00::7]:7442",
        "localhost",
        "node:7442",
        "n1:7442",
    ):
        assert status(node.metrics.port, path, host) == "200", host
    assert status(node.metrics.port, path, "node7.example.com:7442") == "200"
    assert status(node.metrics.port, path) == "200", "an HTTP/1.0 probe sends no host"


@pytest.mark.parametrize("header", ["Host: ", "host:", "HOST : "])
@pytest.mark.parametrize("path", ["/metrics", "/health", "/console/"])
def test_two_host_headers_are_refused(node: Node, path: str, header: str) -> None:
    assert (
        status(node.metrics.port, path, "127.0.0.1", "rebound.example.com", header=header) == "400"
    )
    assert status(node.metrics.port, path, "127.0.0.1", "127.0.0.1", header=header) == "400"
    # A space before the colon makes a header invalid, but other servers may accept it (RFC 9112,
    # 5.1).
    assert status(node.metrics.port, path, "127.0.0.1", header=header) == (
        "400" if " :" in header else "200"
    )


def test_node_with_identities_accepts_any_host(start_node: StartNode, tmp_path: Path) -> None:
    """Metrics need a token, which the page of another site does not have."""
    (tmp_path / "identities").write_text("")
    (tmp_path / "identities").chmod(0o600)
    node = start_node(identities=str(tmp_path / "identities"))
    assert status(node.metrics.port, "/metrics", "node7.cluster.example.com:7442") == "401"
    assert status(node.metrics.port, "/health", "node7.cluster.example.com:7442") == "200"
