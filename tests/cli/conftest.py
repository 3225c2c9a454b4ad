"""Running `kvstore` commands in this process, against the shared node."""

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
    """Runs a command whose address is that of the shared node unless it names another."""
    gc.collect()  # what a node of an earlier test left says something on stderr when it goes
    gc.freeze()  # the next collection need not look at what this one kept
    monkeypatch.setenv("KVSTORE_ADDRESS", shared_node.address)
    monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "5")
    return run_kvstore


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    """To prepare and inspect what commands work on; one wire is enough for that."""
    with Client(ClientConfig(address=shared_node.address, connect_timeout_s=5.0)) as client:
        yield client


@pytest.fixture
def space() -> Namespace:
    """A namespace that no other test uses; pages of 4 tokens."""
    return Namespace(f"model-{uuid.uuid4().hex}", opaque_layout(PAGE_NBYTES, PAGE_TOKENS))


@pytest.fixture
def hashes(client: Client, space: Namespace) -> list[bytes]:
    """Keys of three stored pages of `space`: of the tokens 100 to 111.

    Page i is full of byte i.
    """
    made = prefix_hashes(range(100, 112), PAGE_TOKENS)
    client.put(space, made, [bytes([i]) * PAGE_NBYTES for i in range(3)])
    return made
