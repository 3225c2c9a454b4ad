"""The hello by frames of a new client: protocol versions and unexpected answers."""

import contextlib
from collections.abc import Callable

import pytest
from fake_node import ServeBulk

from kvstore import Client, ClientConfig, Namespace, ProtocolError, opaque_layout
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.frames import FrameSocket
from kvstore.transports.status import Code

SPACE = Namespace("m", opaque_layout(4096))
LIMITS = pb.Limits(batch_keys_max=16, batch_nbytes_max=1 << 20, page_nbytes_max=1 << 20)
KEY = b"k" * 32


def node_of(
    version: int, seen: list[int], limits: pb.Limits = LIMITS
) -> Callable[[FrameSocket], None]:
    """Return a fake node that refuses every version but its own, also in a frame, and closes."""

    def talk(connection: FrameSocket) -> None:
        while True:
            request = pb.BulkRequest.FromString(connection.recv_frame(1 << 20)[0])
            seen.append(connection.version)
            refused = connection.version != version
            connection.version = version
            if refused:
                error = pb.Error(code=Code.UNIMPLEMENTED, message=f"this side speaks {version}")
                connection.send_frame(pb.BulkReply(error=error).SerializeToString())
                return connection.shutdown()
            hello = pb.HelloReply(protocol_version=version, instance_id=b"an older", limits=limits)
            known = {
                "hello": pb.BulkReply(hello=hello),
                "open_namespace": pb.BulkReply(
                    open_namespace=pb.OpenNamespaceReply(page_nbytes=4096)
                ),
                "lookup": pb.BulkReply(lookup=pb.LookupReply(prefix_pages=1, present=[True])),
            }
            connection.send_frame(known[str(request.WhichOneof("op"))].SerializeToString())

    return talk


def ignoring_tls(talk: Callable[[FrameSocket], None]) -> Callable[[FrameSocket], None]:
    """Make the server survive the TLS handshake that a client tries after an unknown answer."""

    def patient(connection: FrameSocket) -> None:
        with contextlib.suppress(ProtocolError):
            talk(connection)
        connection.shutdown()

    return patient


def client(port: int) -> Client:
    return Client(ClientConfig(f"bulk://127.0.0.1:{port}", timeout_s=60.0, connect_timeout_s=30.0))


def test_older_node_gets_its_own_version(bulk_port: ServeBulk) -> None:
    seen: list[int] = []
    port = bulk_port(node_of(PROTOCOL_VERSION - 1, seen)).port
    with client(port) as older:
        assert older.lookup(SPACE, [KEY]).present == (True,)
    assert seen == [PROTOCOL_VERSION, *[PROTOCOL_VERSION - 1] * 3]


def test_node_two_versions_away_is_refused(bulk_port: ServeBulk) -> None:
    port = bulk_port(ignoring_tls(node_of(PROTOCOL_VERSION - 2, []))).port
    with client(port) as far, pytest.raises(ProtocolError, match="the peer speaks protocol 2"):
        far.lookup(SPACE, [KEY])


def test_node_that_accepts_no_keys_is_refused(bulk_port: ServeBulk) -> None:
    port = bulk_port(node_of(PROTOCOL_VERSION, [], pb.Limits()))
    with client(port.port) as odd, pytest.raises(ProtocolError, match="accepts no keys at all"):
        odd.lookup(SPACE, [KEY])


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x50" * 4]
)
def test_server_that_is_no_node_raises_our_error(bulk_port: ServeBulk, answer: bytes) -> None:
    def talk(connection: FrameSocket) -> None:
        connection.recv_frame(1 << 20)
        connection.send(answer)

    with (
        client(bulk_port(ignoring_tls(talk)).port) as lost,
        pytest.raises(ProtocolError, match="not a kvstore bulk frame"),
    ):
        lost.lookup(SPACE, [KEY])


def test_node_that_does_not_wait_is_not_polled(bulk_port: ServeBulk) -> None:
    """The node answers at once that there is no view, so the next member is asked after a pause."""
    asked: list[int] = []

    def talk(connection: FrameSocket) -> None:
        connection.recv_frame(1 << 20)
        connection.send_frame(
            pb.BulkReply(hello=pb.HelloReply(instance_id=b"hurried!")).SerializeToString()
        )
        while True:
            connection.recv_frame(1 << 20)
            asked.append(1)
            connection.send_frame(pb.BulkReply(follow=pb.View()).SerializeToString())

    wire = BulkWire("127.0.0.1", bulk_port(talk).port, ClientConfig(connect_timeout_s=5.0))
    views = wire.follow(1, 30.0, Deadline(20.0))
    with pytest.raises(ProtocolError, match="did not wait"):
        next(iter(views))
    assert len(asked) == 2
    wire.close()
