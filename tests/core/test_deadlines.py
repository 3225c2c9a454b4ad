"""A call returns by its deadline wherever the node or the network hangs.

Each stage hangs in turn, and all stages stay just below their own limits.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_node import FakeNode, ServeBulk

from kvstore import (
    Client,
    ClientConfig,
    DeadlineExceeded,
    KVStoreError,
    Namespace,
    Unavailable,
    opaque_layout,
)
from kvstore.checksum import CHUNK_NBYTES
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.channel import EVIDENCE_S, NodeChannel
from kvstore.transports.frames import FrameSocket, pack_fixed
from kvstore.transports.grpc_wire import GrpcWire
from kvstore.transports.negotiation import Negotiation
from kvstore.transports.shm import ShmWire
from kvstore.transports.unix_sockets import DescriptorSocket

DEADLINE_S = 0.6
PAGE = 8 * CHUNK_NBYTES
KEYS = [b"k" * 32]
NAMESPACE = Namespace("deadlines", opaque_layout(PAGE))
PUT = pb.PutRequest(namespace=b"n" * 16, prefix_hashes=KEYS, page_nbytes=PAGE)
GET = pb.GetRequest(namespace=b"n" * 16, prefix_hashes=KEYS)
LOOKUP = pb.LookupRequest(namespace=b"n" * 16, prefix_hashes=KEYS)
CONFIG = ClientConfig(timeout_s=60.0, connect_timeout_s=30.0)
OPS = ("lookup", "put", "get")


def calling(wire: Any, op: str) -> Callable[[], object]:
    def call() -> object:
        deadline = Deadline(DEADLINE_S)
        if op == "put":
            return wire.put(PUT, [(memoryview(bytes(PAGE)),)], deadline)
        if op == "get":
            return wire.get(GET, [(memoryview(bytearray(PAGE)),)], [0], deadline)
        return wire.call("lookup", LOOKUP, deadline)

    return call


@pytest.fixture
def unix_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield f"{directory}/node.sock"


def test_connecting_over_bulk(
    swallowing_port: int, silent_port: int, by_deadline: Callable[..., None]
) -> None:
    ports = {"swallows": swallowing_port, "silent": silent_port}
    wires = {name: BulkWire("127.0.0.1", port, CONFIG) for name, port in ports.items()}
    wires["many addresses"] = BulkWire("node", swallowing_port, CONFIG, ["127.0.0.1"] * 5)
    by_deadline(wires, DEADLINE_S, lambda name: calling(wires[name], "lookup"))


def test_connecting_over_grpc(
    swallowing_port: int, silent_port: int, by_deadline: Callable[..., None]
) -> None:
    wires = {str(port): GrpcWire(f"127.0.0.1:{port}") for port in (swallowing_port, silent_port)}
    names = [f"{port} {op}" for port in wires for op in OPS]
    by_deadline(names, DEADLINE_S, lambda name: calling(wires[name.split()[0]], name.split()[1]))
    for wire in wires.values():
        wire.close()


@pytest.mark.parametrize("backlog", ["full", "silent"])
def test_connecting_over_shared_memory(
    unix_path: str, by_deadline: Callable[..., None], backlog: str
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(unix_path)
        listener.listen(64 if backlog == "silent" else 0)
        waiting.connect(unix_path)
        wire = ShmWire(unix_path, b"fakenode", CONFIG)
        by_deadline(["lookup"], DEADLINE_S, lambda name: calling(wire, name))


def test_full_unix_backlog_is_retried(unix_path: str) -> None:
    """After its start a node accepts its many waiting clients one after the other."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(unix_path)
        listener.listen(0)
        waiting.connect(unix_path)

        def take_one() -> None:
            listener.accept()[0].close()

        timer = threading.Timer(0.1, take_one)
        timer.start()
        wire = ShmWire(unix_path, b"fakenode", CONFIG)
        with pytest.raises(Unavailable, match="accepts connections but does not answer"):
            wire.call("lookup", LOOKUP, Deadline(2.0))
        timer.join()


def test_connect_and_hello_share_one_deadline(
    silent_port: int, by_deadline: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow connect leaves the hello only the rest of the time."""

    connect = socket.create_connection

    def slow(*args: Any, **options: Any) -> socket.socket:
        time.sleep(DEADLINE_S * 0.9)
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", slow)
    wire = BulkWire("127.0.0.1", silent_port, CONFIG)
    by_deadline(["lookup"], DEADLINE_S, lambda name: calling(wire, name))


def reply(payload_nbytes: int = 0, **op: Any) -> bytes:
    header = pb.BulkReply(**op).SerializeToString()
    return pack_fixed(len(header), payload_nbytes) + header


HELLO = reply(hello=pb.HelloReply(protocol_version=PROTOCOL_VERSION))
GOT = reply(PAGE, get=pb.GetReply(hits=[True], checksums=[b"c" * 16]))
RESERVED = reply(put=pb.PutReply(verdicts=[pb.WRITE]))
MANY = reply(lookup=pb.LookupReply(present=[True] * 100_000))


def trickle(connection: FrameSocket, data: bytes, piece_nbytes: int) -> None:
    """Send the data in pieces, each within the timeout of a receive call."""
    for start in range(0, len(data), piece_nbytes):
        connection.send(data[start : start + piece_nbytes])
        time.sleep(DEADLINE_S * 0.4)


def swallow(connection: FrameSocket, piece_nbytes: int) -> None:
    while True:
        connection.recv_into(memoryview(bytearray(piece_nbytes)))
        time.sleep(DEADLINE_S * 0.4)


HALTS: dict[str, tuple[str, Callable[[FrameSocket], object]]] = {
    "no answer": ("lookup", lambda connection: None),
    "half of a frame's start": ("lookup", lambda connection: connection.send(MANY[:7])),
    "half of a header": ("lookup", lambda connection: connection.send(MANY[:5000])),
    "a header that trickles": ("lookup", lambda connection: trickle(connection, MANY, 20_000)),
    "no payload": ("get", lambda connection: connection.send(GOT)),
    "half of the payload": ("get", lambda connection: connection.send(GOT + bytes(PAGE // 2))),
    "a payload in chunks that take long": (
        "get",
        lambda connection: trickle(connection, GOT + bytes(PAGE), CHUNK_NBYTES),
    ),
    "a payload nobody reads": ("put", lambda connection: connection.send(RESERVED)),
    "a payload read in chunks that take long": (
        "put",
        lambda connection: (connection.send(RESERVED), swallow(connection, CHUNK_NBYTES)),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_bulk_call_ends_by_its_deadline_wherever_the_node_halts(
    bulk_port: ServeBulk, by_deadline: Callable[..., None]
) -> None:
    over = threading.Event()

    def prepare(name: str) -> Callable[[], object]:
        op, halt = HALTS[name]

        def talk(connection: FrameSocket) -> None:
            small_buffers(connection)
            connection.recv_frame(1 << 20)
            connection.send(HELLO)
            connection.recv_frame(1 << 20)
            halt(connection)
            over.wait(60.0)

        wire = BulkWire("127.0.0.1", bulk_port(talk).port, CONFIG)
        wire.connect(Deadline(10))
        return calling(wire, op)

    by_deadline(HALTS, DEADLINE_S, prepare)
    over.set()


def small_buffers(connection: FrameSocket) -> None:
    """Shrink the socket buffers, so that the kernel does not take a page in place of the peer."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        connection._sock.setsockopt(socket.SOL_SOCKET, option, 64 << 10)


def test_large_request_to_a_node_that_does_not_read_ends_in_time(
    unix_path: str, by_deadline: Callable[..., None]
) -> None:
    """The call stops amid the request.

    It sends no release, which the node would take for the rest of the request.
    """
    large = pb.GetRequest(
        namespace=b"n" * 16, prefix_hashes=[i.to_bytes(32, "big") for i in range(50_000)]
    )
    buffers = [(memoryview(bytearray(1)),)] * 50_000
    hello = pb.HelloReply(
        protocol_version=PROTOCOL_VERSION, instance_id=b"fakenode", arena_nbytes=1 << 20
    )
    arena = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(arena, 1 << 20)
    fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    connections: list[DescriptorSocket] = []

    def prepare(name: str) -> Callable[[], object]:
        wire = ShmWire(unix_path, b"fakenode", CONFIG)
        greeting = threading.Thread(target=wire.connect, args=(Deadline(10),))
        greeting.start()
        connections.append(connection := DescriptorSocket(listener.accept()[0]))
        connection.arm(10.0)
        _, _, fd = connection.recv_frame_with(1 << 20)
        assert fd is not None
        os.close(fd)
        connection.send_frame_with(arena, pb.BulkReply(hello=hello).SerializeToString())
        greeting.join()
        return lambda: wire.get(large, buffers, [], Deadline(DEADLINE_S))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(unix_path)
        listener.listen()
        by_deadline(["get"], DEADLINE_S, prepare)
    os.close(arena)
    for connection in connections:
        sent = b""
        while more := connection._sock.recv(1 << 20):
            sent += more
        connection.close()
        assert 0 < len(sent) < large.ByteSize()
        assert sent[-64:] in large.SerializeToString()


def test_hanging_bulk_wire_leaves_time_for_grpc(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(
        _: Negotiation, hello: pb.HelloReply, found: tuple[str, ...], deadline: Deadline
    ) -> BulkWire:
        time.sleep(deadline.remaining())
        raise Unavailable("after all")

    monkeypatch.setattr(Negotiation, "_bulk", hang)
    with Client(
        ClientConfig(address=fake_node.address, timeout_s=3.0, connect_timeout_s=3.0)
    ) as client:
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
        assert client.wire_name == "grpc"


def test_very_short_timeout_does_not_open_the_breaker(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one call with too little time would block all others of its client."""
    monkeypatch.setattr(NodeChannel, "_check_liveness", lambda link: None)
    with Client(ClientConfig(address=fake_node.address, wire="grpc", timeout_s=10.0)) as client:
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1
        hold = fake_node.hold = threading.Event()
        with pytest.raises(DeadlineExceeded):
            client.lookup(NAMESPACE, KEYS, timeout_s=EVIDENCE_S / 2)
        hold.set()
        assert client.lookup(NAMESPACE, KEYS).prefix_pages == 1


@pytest.mark.parametrize("stage", ["resolver", "grpc", "bulk"])
def test_close_does_not_wait_for_a_hanging_call(
    stage: str, fake_node: FakeNode, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_node.bulk_port = silent_port
    hold = fake_node.hold = threading.Event()
    address = {"resolver": "node.example:1", "grpc": fake_node.address, "bulk": fake_node.address}[
        stage
    ]
    system = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host == "node.example" and not options.get("flags"):
            hold.wait(30.0)
        return system(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    settings = ClientConfig(
        address=address, wire="bulk" if stage == "bulk" else "grpc", timeout_s=30.0
    )
    client = Client(settings)

    def call() -> None:
        with contextlib.suppress(KVStoreError):
            client.lookup(NAMESPACE, KEYS, timeout_s=25.0)

    calls = threading.Thread(target=call)
    calls.start()
    time.sleep(0.3)
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    hold.set()
    calls.join()
