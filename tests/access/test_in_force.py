"""A running node reloads its files by itself, and warns if it is insecure."""

import logging
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from cli_runner import CliRunner
from fleets import SMALL
from local_nodes import StartNode
from people import People, client, namespace
from waiting import wait_until

from kvstore import Unauthenticated, Unavailable
from kvstore.cli.commands import build
from node.auth import access
from node.auth.access import FileReloader
from node.config import NodeConfig
from node.server import Node

KEYS = [b"k" * 32]


@pytest.fixture
def open_node() -> Iterator[Node]:
    """Yield an insecure node on all interfaces."""
    node = Node(NodeConfig(**{**SMALL, "host": "0.0.0.0"}, insecure=True))
    yield node
    node.stop()


def test_node_reloads_added_and_revoked_identities(start_node: StartNode, people: People) -> None:
    node = start_node(identities=str(people.path), shm_socket="none")
    token = people.join("by-itself", "team-a", "read")
    wait_until(lambda: "by-itself" in {who.name for who in node.access.identities.tokens.values()})
    with client(node, token) as newcomer:
        newcomer.lookup(namespace(), KEYS)
        people.leave("by-itself")

        def is_refused() -> bool:
            try:
                newcomer.lookup(namespace(), KEYS)
            except (Unauthenticated, Unavailable):
                return True
            return False

        wait_until(is_refused)


def test_failing_reload_of_one_file_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "EVERY_S", 0.01)
    looked = threading.Semaphore(0)

    def broken() -> None:
        raise ZeroDivisionError

    watching = FileReloader([broken, looked.release])
    watching.start()
    assert all(looked.acquire(timeout=60.0) for _ in range(3))
    watching.stop()
    assert "a file could not be polled" in caplog.text


def test_insecure_node_warns_in_log_status_and_metrics(
    open_node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_node.start()
    warning = "anyone who reaches 0.0.0.0 may read, change and remove all"
    assert f"insecure: {warning}" in caplog.text
    status = CliRunner().invoke(build(), ["status", "-a", f"127.0.0.1:{open_node.grpc.port}"])
    assert f"INSECURE: {warning}" in " ".join(status.stdout.split())
    assert "kvstore_insecure 1.0" in metrics(open_node)


def test_loopback_node_is_not_insecure(start_node: StartNode) -> None:
    node = start_node()
    assert (
        "INSECURE"
        not in CliRunner().invoke(build(), ["status", "-a", f"127.0.0.1:{node.grpc.port}"]).stdout
    )
    assert "kvstore_insecure 0.0" in metrics(node)


def metrics(node: Node) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{node.metrics.port}/metrics", timeout=20.0
    ) as reply:
        return str(reply.read().decode())
