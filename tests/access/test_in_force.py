"""What a running node does by itself: it takes up its files, and says what strangers may do."""

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
from kvstore.cli.commands import app
from node.auth import access
from node.auth.access import FileReloader
from node.config import NodeConfig
from node.server import Node

KEYS = [b"k" * 32]


@pytest.fixture
def open_node() -> Iterator[Node]:
    """One that everybody may reach."""
    node = Node(NodeConfig(**{**SMALL, "host": "0.0.0.0"}, insecure=True))
    yield node
    node.stop()


def test_a_node_takes_up_who_joined_and_who_left_by_itself(
    start_node: StartNode, people: People
) -> None:
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


def test_a_file_that_breaks_its_reader_keeps_no_other_from_being_read(
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


def test_a_node_that_is_open_to_all_says_so(
    open_node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_node.start()
    said = "anyone who reaches 0.0.0.0 may read, change and remove all"
    assert f"insecure: {said}" in caplog.text
    status = CliRunner().invoke(app, ["status", "-a", f"127.0.0.1:{open_node.grpc.port}"])
    assert f"INSECURE: {said}" in " ".join(status.stdout.split())
    assert "kvstore_insecure 1.0" in metrics(open_node)


def test_a_node_for_its_own_host_is_not_insecure(start_node: StartNode) -> None:
    node = start_node()
    assert (
        "INSECURE"
        not in CliRunner().invoke(app, ["status", "-a", f"127.0.0.1:{node.grpc.port}"]).stdout
    )
    assert "kvstore_insecure 0.0" in metrics(node)


def metrics(node: Node) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{node.metrics.port}/metrics", timeout=20.0
    ) as reply:
        return str(reply.read().decode())
