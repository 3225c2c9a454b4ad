"""The `Host` of a request on the HTTP port: an open node answers only to names that no other site
can point at it.
"""

import socket
from pathlib import Path

import pytest
from local_nodes import StartNode

from node.server import Node


@pytest.fixture(scope="module", params=["on", "off"])
def node(request: pytest.FixtureRequest, start_node: StartNode) -> Node:
    """With a console and without.

    Only a member of a cluster has a name with dots, so it is added here.
    """
    node = start_node(console=request.param)
    node._own_hosts.append("node7.example.com")
    return node


def status(port: int, path: str, *hosts: str, header: str = "Host: ") -> str:
    with socket.create_connection(("127.0.0.1", port), 20.0) as sock:
        lines = "".join(f"{header}{host}\r\n" for host in hosts)
        sock.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        said = b""
        while some := sock.recv(1 << 16):
            said += some
    return said.split(b" ")[1].decode()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/any"])
def test_metrics_of_an_open_node_refuse_a_host_that_a_stranger_may_own(
    node: Node, path: str
) -> None:
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
def test_scrapes_and_probes_by_address_service_or_own_name_are_served(
    node: Node, path: str
) -> None:
    """A kubelet and Prometheus' discovery call pods by address, a compose file names its
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
    assert status(node.metrics.port, path) == "200", "a probe of HTTP/1.0 names no host"


@pytest.mark.parametrize("header", ["Host: ", "host:", "HOST : "])
@pytest.mark.parametrize("path", ["/metrics", "/health", "/console/"])
def test_two_hosts_are_refused(node: Node, path: str, header: str) -> None:
    assert (
        status(node.metrics.port, path, "127.0.0.1", "rebound.example.com", header=header) == "400"
    )
    assert status(node.metrics.port, path, "127.0.0.1", "127.0.0.1", header=header) == "400"
    # A name with a space before its colon is no header, and what follows it may be one to others
    # (RFC 9112, 5.1).
    assert status(node.metrics.port, path, "127.0.0.1", header=header) == (
        "400" if " :" in header else "200"
    )


def test_a_node_with_identities_answers_to_any_host_with_a_token(
    start_node: StartNode, tmp_path: Path
) -> None:
    """Its figures need a token, which a page of another site has not, and it may be scraped by any
    name.
    """
    (tmp_path / "identities").write_text("")
    (tmp_path / "identities").chmod(0o600)
    node = start_node(identities=str(tmp_path / "identities"))
    assert status(node.metrics.port, "/metrics", "node7.cluster.example.com:7442") == "401"
    assert status(node.metrics.port, "/health", "node7.cluster.example.com:7442") == "200"
