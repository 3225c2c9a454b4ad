"""/health beside /metrics, for a kubelet, which has no token and skips the certificate."""

import http.client
import ssl
from pathlib import Path
from typing import Any

from authorities import pair
from local_nodes import StartNode

from kvstore.cli.authority import Authority
from node.config import NodeConfig
from node.server import Node


def ask(
    port: int, path: str = "/health", tls: bool = False, method: str = "GET"
) -> tuple[int, bytes]:
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: Any = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=20.0, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20.0)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_health_reports_serving_and_draining(
    start_node: StartNode,
) -> None:
    node: Node = start_node()
    assert ask(node.metrics.port) == (200, b"serving\n")
    assert ask(node.metrics.port, method="HEAD") == (200, b"")
    node.grpc.set_serving(False)
    assert ask(node.metrics.port) == (503, b"not serving\n")
    assert ask(node.metrics.port, "/metrics")[0] == 200


def test_health_before_the_start_is_not_serving() -> None:
    node = Node(
        NodeConfig(port=0, bulk_port=0, metrics_port=0, ram_nbytes=16 << 20, shm_socket="none")
    )
    try:
        assert ask(node.metrics.port) == (503, b"not serving\n")
    finally:
        node.stop()


def test_health_needs_no_token_and_metrics_do(
    start_node: StartNode, ours: Authority, tmp_path: Path
) -> None:
    identities = tmp_path / "identities"
    identities.write_text("")
    node: Node = start_node(**pair(ours, "node"), identities=str(identities))
    refused = node.audit.refused_count
    assert ask(node.metrics.port, tls=True) == (200, b"serving\n")
    assert node.audit.refused_count == refused, "a health request must not count as refused"
    assert ask(node.metrics.port, "/", tls=True)[0] == 302, "it leads to the console"
    for path in ("/metrics", "/healthy", "/health/../metrics", "/metrics?/health"):
        assert ask(node.metrics.port, path, tls=True)[0] == 401, path
