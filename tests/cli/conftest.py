"""Fixtures that run `kvstore` commands in this process, against the shared node."""

import gc
import uuid
from collections.abc import Iterator

import pytest
from cli_runner import Kvstore, run_kvstore

from kvstore import Client, ClientConfig, Namespace, opaque_layout, prefix_hashes
from kvstore.tools.node_process import NodeProcess

PAGE_NBYTES = 512
PAGE_TOKENS = 4


@pytest.fixture
def kvstore(shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Kvstore:
    """Return a function that runs a command, by default at the address of the shared node."""
    gc.collect()  # leftovers of a node of an earlier test write to stderr when they are freed
    gc.freeze()  # keeps the next collection fast
    monkeypatch.setenv("KVSTORE_ADDRESS", shared_node.address)
    monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "5")
    return run_kvstore


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    """Yield a client to prepare and inspect pages of the shared node."""
    with Client(
        ClientConfig(address=shared_node.address, timeout_s=60.0, connect_timeout_s=30.0)
    ) as client:
        yield client


@pytest.fixture
def space() -> Namespace:
    """Return a namespace that no other test uses, with pages of 4 tokens."""
    return Namespace(f"model-{uuid.uuid4().hex}", opaque_layout(PAGE_NBYTES, PAGE_TOKENS))


@pytest.fixture
def hashes(client: Client, space: Namespace) -> list[bytes]:
    """Store three pages of `space` for the tokens 100 to 111; return their keys.

    All bytes of page i are i.
    """
    made = prefix_hashes(range(100, 112), PAGE_TOKENS)
    client.put(space, made, [bytes([i]) * PAGE_NBYTES for i in range(3)])
    return made
