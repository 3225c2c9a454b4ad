"""Fixtures shared by all tests: a real node in a child process, and a client of it."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from kvstore import Client, ClientConfig
from kvstore.measure.node_process import NodeProcess


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[str]:
    """Where nodes put their Unix sockets; short, because the paths of sockets must be."""
    directory = tempfile.mkdtemp(prefix="kvstore-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[NodeProcess]:
    """One node for all tests that neither stop it nor fill it. Use namespaces of your own."""
    with NodeProcess("--ram-bytes", "256MiB", "--extent-bytes", "16MiB") as node:
        yield node


@pytest.fixture(params=["shm", "bulk", "grpc"])
def client(request: pytest.FixtureRequest, shared_node: NodeProcess) -> Iterator[Client]:
    """A client of the shared node, once over each wire."""
    with Client(ClientConfig(address=shared_node.address, wire=request.param)) as client:
        yield client


@pytest.fixture
def seed() -> int:
    """Printed, so that a failure can be repeated with KVSTORE_SEED."""
    chosen = int(os.environ.get("KVSTORE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVSTORE_SEED={chosen}")
    return chosen
