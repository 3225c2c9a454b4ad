"""Unusual headers: a caller's identity comes from the first authorization header, and no header is
logged.
"""

import base64
import logging
import socket
from collections.abc import Iterator

import http2
import pytest
from fleets import checked_nodes

from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import add, new_token, token_line
from kvstore.transports.status import Code
from node.server import Node

TOKEN = new_token("team-a")
GOOD = b"Bearer " + TOKEN.encode()
METHOD = f"/{pb.DESCRIPTOR.services_by_name['KVStore'].full_name}/NodeStatus"
STATUS = b"grpc-status"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = tmp_path_factory.mktemp("headers") / "identities"
    add(path, token_line("reader", TOKEN, tenant="team-a", role="read"))
    with checked_nodes() as start:
        yield start(identities=str(path))


def field(name: bytes, value: bytes) -> bytes:
    return b"\x00" + http2.length(len(name)) + name + http2.length(len(value)) + value


def status(node: Node, *headers: tuple[bytes, bytes]) -> int:
    """Return the status code of a call with these headers."""
    block = http2.block(http2.call_fields(METHOD)) + b"".join(field(*header) for header in headers)
    call = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block) + http2.data_frames(
        1, http2.message(b"")
    )
    with socket.create_connection(("127.0.0.1", node.grpc.port), 20.0) as sock:
        sock.sendall(http2.GREETING + call)
        data = b""
        while STATUS not in data or len(data) < data.index(STATUS) + len(STATUS) + 3:
            received = sock.recv(1 << 16)
            assert received, data
            data += received
    at = data.index(STATUS) + len(STATUS)
    return int(data[at + 1 : at + 1 + data[at]])


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], Code.UNAUTHENTICATED),
        ([(b"authorization", GOOD)], 0),
        ([(b"authorization", GOOD), (b"authorization", b"Bearer x")], 0),
        ([(b"authorization", b"Bearer x"), (b"authorization", GOOD)], Code.UNAUTHENTICATED),
        ([(b"authorization", b""), (b"authorization", GOOD)], Code.UNAUTHENTICATED),
        ([(b"authorization-bin", base64.b64encode(GOOD))], Code.UNAUTHENTICATED),
        ([(b"authorization", b"Bearer x, " + GOOD)], Code.UNAUTHENTICATED),
        ([(b"authorization", b"Bearer x\r\nauthorization: " + GOOD)], Code.UNAUTHENTICATED),
        ([(b"authorization", GOOD + b"\x00")], Code.UNAUTHENTICATED),
        ([(b"authorization", GOOD + "é".encode())], Code.UNAUTHENTICATED),
        ([(b"authorization", b"Bearer " + b"x" * 7000)], Code.UNAUTHENTICATED),
        (
            [(b"x509_common_name", b"reader"), (b"forwarded", b"for=192.0.2.1")],
            Code.UNAUTHENTICATED,
        ),
        ([(b"authorization", GOOD), (b"traceparent", b"\xff" * 55)], 0),
    ],
)
def test_caller_identity_is_that_of_the_first_authorization_header(
    node: Node, headers: list[tuple[bytes, bytes]], code: int
) -> None:
    assert status(node, *headers) == code


def test_header_that_is_not_text_is_refused_and_not_logged(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A header that is not text is refused without a log line; gRPC would log it with the token."""
    with caplog.at_level(logging.DEBUG):
        assert status(node, (b"authorization", GOOD + b"\xff")) == Code.UNAUTHENTICATED
    assert TOKEN not in caplog.text
    assert "Traceback" not in caplog.text
