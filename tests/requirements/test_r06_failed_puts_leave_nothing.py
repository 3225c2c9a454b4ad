"""R6: a failed or aborted put leaves nothing visible."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import KVStoreError
from node.auth.access import Caller
from node.memory.inventory import Inventory


@pytest.mark.parametrize("fails_after", [0, 1, 3])
def test_r06_writer_that_fails_during_a_put_leaves_nothing(
    start_node: StartNode,
    connect: Connect,
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
    fails_after: int,
) -> None:
    """A writer that fails during a put leaves no visible page.

    All pages of a batch become visible together, by the commit.
    """
    node = start_node(ram_nbytes=16 << 20, extent_nbytes=4 << 20)
    client = connect(node, wire)
    chain = Pages("large", 1 << 20)
    keys = chain.keys(*range(4))
    calls = 0

    def failing(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > fails_after:
                raise MemoryError("this process is in trouble")
            return make(*arguments)

        return run

    with monkeypatch.context() as patch:
        name = (
            "kvstore.transports.grpc_wire.joined_leaves"
            if wire == "grpc"
            else f"kvstore.transports.{wire}.Leaves"
        )
        module, _, attribute = name.rpartition(".")
        original = getattr(__import__(module, fromlist=[attribute]), attribute)
        patch.setattr(name, failing(original))
        with pytest.raises((MemoryError, KVStoreError)):
            chain.put(client, keys)
    assert client.lookup(chain.namespace, keys).present == (False,) * 4
    assert chain.get(client, keys) == [False] * 4
    assert list(client.list_pages(chain.namespace)) == []
    while node.tier.writing_count:
        threading.Event().wait(0.01)
    assert node.tier.slots.used_nbytes == 0
    assert [outcome.name for outcome in chain.put(client, keys)] == ["STORED"] * 4
    assert chain.get(client, keys) == [True] * 4


def test_r06_pages_being_written_are_not_visible(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    node = start_node()
    client = connect(node, wire)
    client.open(chain.namespace)
    keys = chain.keys(0, 1)
    with node.sessions.open(Caller("test")) as session:
        session.reserve(chain.namespace.digest, keys, chain.nbytes)
        assert client.lookup(chain.namespace, keys).present == (False, False)
        assert chain.get(client, keys) == [False, False]
        assert list(client.list_pages(chain.namespace)) == []
        assert [(page.present, page.writing) for page in client.stat(chain.namespace, keys)] == [
            (False, True)
        ] * 2
        assert client.pin(chain.namespace, keys, 1.0) == [False, False]
        assert client.remove(chain.namespace, keys) == [False, False]
        assert [outcome.name for outcome in chain.put(client, keys)] == ["BUSY", "BUSY"]
    assert [outcome.name for outcome in chain.put(client, keys)] == ["STORED", "STORED"]


def test_r06_listing_goes_on_past_pages_being_written(
    start_node: StartNode, connect: Connect, chain: Pages, wire: str
) -> None:
    """A page that is being written does not end a listing."""
    node = start_node()
    client = connect(node, wire)
    stored = chain.keys(*range(0, 60, 2))
    chain.put(client, stored)
    with node.sessions.open(Caller("test")) as session:
        session.reserve(chain.namespace.digest, chain.keys(*range(1, 60, 2)), chain.nbytes)
        request_limit = 7
        pieces, token = [], b""
        while True:
            infos, token = Inventory(node.tier).list_pages(
                chain.namespace.digest, b"", token, request_limit
            )
            pieces += [info.prefix_hash for info in infos]
            if not token:
                break
        assert pieces == stored
        assert [page.prefix_hash for page in client.list_pages(chain.namespace, limit=5)] == stored[
            :5
        ]
