"""A call returns its share of a limit when it ends, not when its connection closes."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode
from waiting import wait_until

from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from node.server import Node


def test_shared_memory_misses_return_their_share(start_node: StartNode, connect: Connect) -> None:
    """Regression: each miss kept its share of the held bytes, as clients release only hits
    (docs/FORMAT.md), until the process was refused everything.
    """
    node = start_node(batch_nbytes_max=4 << 20, batch_keys_max=16)
    client, pages = connect(node, "shm"), Pages("misses", 1 << 20)
    for number in range(8):
        assert pages.get(client, pages.keys(*range(4 * number, 4 * number + 4))) == [False] * 4
    wait_until(lambda: not node.sessions.held.used)


def test_large_request_returns_its_bytes_when_answered(
    node: Node, connect: Connect, raw: Callable[[Node], Any], pages: Pages
) -> None:
    """Regression: a client with large requests was refused after 256 MiB of them."""
    connect(node, "grpc").open(pages.namespace)
    connection = raw(node)
    for _ in range(2):
        reply = connection.ask(
            lookup=pb.LookupRequest(
                namespace=pages.namespace.digest, prefix_hashes=pages.keys(*range(4096))
            )
        )
        assert not reply.lookup.prefix_pages
    wait_until(lambda: not node.service.requests.used)
    assert connection.ask(node_status=pb.NodeStatusRequest()).node_status.instance_id, (
        "the connection must still serve"
    )


def test_cancelled_grpc_get_stops(
    node: Node, pages: Pages, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the node went on hashing, and kept one of its few transfers."""
    keys = pages.keys(*range(60))
    pages.put(connect(node), keys)
    request = pb.GetRequest(
        namespace=pages.namespace.digest,
        prefix_hashes=keys,
        ranges=[pb.ByteRange(offset=0, nbytes=1)],
    )
    intact, hashed, begun = node.service.content.intact, list[Any](), threading.Event()

    def slow(page: Any, ranges: Any) -> bool:
        hashed.append(page)
        begun.set()
        threading.Event().wait(0.1)
        return intact(page, ranges)

    monkeypatch.setattr(node.service.content, "intact", slow)
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc.port}") as channel:
        call = KVStoreStub(channel).Get(request, timeout=30.0)
        assert begun.wait(60.0)
        call.cancel()
        wait_until(lambda: not node.grpc.calls.transfers.used)
    assert len(hashed) < len(keys)
