"""Shared-memory calls whose deadline passes during a copy stop before the next page."""

import threading
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect

from kvstore import Client, DeadlineExceeded
from kvstore.transports import shm
from node.server import Node

SECONDS = 1.0


@pytest.fixture
def client(node: Node, connect: Connect, pages: Pages) -> Client:
    """Connect and open the namespace in advance, so that a call uses its time only for itself."""
    client = connect(node, "shm")
    client.open(pages.namespace)
    return client


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Make each copy slower than the call's timeout; return the list of copies."""
    copy, copies = getattr(shm, name), list[Any]()

    def counted(*args: Any) -> Any:
        copies.append(args)
        threading.Event().wait(SECONDS + 0.1)
        return copy(*args)

    monkeypatch.setattr(shm, name, counted)
    return copies


def test_put_stops_between_pages_at_its_deadline(
    client: Client, node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = pages.keys(1, 2, 3)
    with monkeypatch.context() as patch:
        copies = slow(patch, "_write_page")
        with pytest.raises(DeadlineExceeded):
            client.put(
                pages.namespace, keys, [pages.content(key) for key in keys], timeout_s=SECONDS
            )
    assert len(copies) <= 1
    assert pages.get(connect(node), keys) == [False] * 3


def test_get_stops_between_pages_at_its_deadline(
    client: Client, node: Node, connect: Connect, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = pages.keys(1, 2, 3)
    pages.put(client, keys)
    with monkeypatch.context() as patch:
        copies = slow(patch, "_read_page")
        with pytest.raises(DeadlineExceeded):
            client.get(
                pages.namespace, keys, [bytearray(pages.nbytes) for _ in keys], timeout_s=SECONDS
            )
    assert len(copies) <= 1
    assert pages.get(connect(node), keys) == [True] * 3
