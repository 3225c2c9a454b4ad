"""Fake nodes for the client: a gRPC service and a bulk port whose answers a test chooses."""

import socket
from collections.abc import Iterator

import pytest
from fake_node import BulkPort, FakeNode, ServeBulk, Talk


@pytest.fixture
def fake_node() -> Iterator[FakeNode]:
    fake = FakeNode()
    yield fake
    fake.server.stop(None).wait()


@pytest.fixture
def bulk_port() -> Iterator[ServeBulk]:
    ports: list[BulkPort] = []

    def serve(talk: Talk) -> BulkPort:
        ports.append(BulkPort(talk))
        return ports[-1]

    yield serve
    for port in ports:
        port.close()


@pytest.fixture
def unserved_port() -> Iterator[int]:
    """Yield a port of the loopback interface that refuses connections: bound, not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yield a port that accepts connections, which the kernel does, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]
