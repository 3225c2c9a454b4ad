"""Unix connections that break the rules, and the file of the socket.

A bad client gets one error or is closed, and other clients are not disturbed. No slot, hold,
session or descriptor leaks.
"""

import array
import os
import pathlib
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from known_pages import Pages
from local_nodes import Bystander, Connect, StartNode, settle

from kvstore import ConfigError, Unavailable
from kvstore.config import PROTOCOL_VERSION
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed
from kvstore.transports.unix_sockets import DescriptorSocket
from node.config import NodeConfig
from node.server import Node

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]
HELLO = pb.BulkRequest(hello=pb.HelloRequest(protocol_version=PROTOCOL_VERSION)).SerializeToString()


@pytest.fixture(scope="module")
def node(start_node: StartNode) -> Node:
    """Return a node that soon ends transfers that stall."""
    return start_node(ram_nbytes=16 << 20, stall_s=0.8)


class Raw(DescriptorSocket):
    """A connection to the Unix socket that sends anything."""

    def __init__(self, node: Node) -> None:
        assert node.shm is not None
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(node.shm.path)
        super().__init__(self.sock)
        self.arm(5.0)

    def greet(self) -> pb.HelloReply:
        """Send a valid hello, and close the received arena descriptor."""
        pidfd = os.pidfd_open(os.getpid())
        self.send_frame_with(pidfd, HELLO)
        os.close(pidfd)
        header, _, fd = self.recv_frame_with(1 << 20)
        assert fd is not None
        os.close(fd)
        return pb.BulkReply.FromString(header).hello

    def send_request(self, **op: Any) -> None:
        self.send_frame(pb.BulkRequest(**op).SerializeToString())

    def reply(self) -> pb.BulkReply:
        return pb.BulkReply.FromString(self.recv_frame(1 << 22)[0])

    def ask(self, **op: Any) -> pb.BulkReply:
        self.send_request(**op)
        return self.reply()

    def ending(self) -> pb.Error:
        """Return the error that the node sends before it closes the connection."""
        reply = self.reply()
        assert reply.WhichOneof("op") == "error", reply
        with pytest.raises(ConnectionError):
            self.reply()
        return reply.error


@pytest.fixture
def raw() -> Iterator[Callable[[Node], Raw]]:
    connections: list[Raw] = []

    def to(node: Node) -> Raw:
        connections.append(Raw(node))
        return connections[-1]

    yield to
    for connection in connections:
        connection.close()


@pytest.fixture
def pages(request: pytest.FixtureRequest, node: Node, connect: Connect) -> Pages:
    """Return a namespace with pages 0 to 3 stored."""
    pages = Pages(request.node.name)
    client = connect(node, "bulk")
    pages.put(client, pages.keys(0, 1, 2, 3))
    client.close()
    return pages


def put_of(pages: Pages, *numbers: int) -> pb.PutRequest:
    keys = pages.keys(*numbers)
    return pb.PutRequest(
        namespace=pages.namespace.digest, prefix_hashes=keys, page_nbytes=pages.nbytes
    )


def get_of(pages: Pages, *numbers: int) -> pb.GetRequest:
    return pb.GetRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(*numbers))


def test_client_must_send_its_own_pidfd(node: Node, raw: Callable[[Node], Raw]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        foreign = os.pidfd_open(other.pid)
        plain = os.open("/dev/null", os.O_RDONLY)
        for fd in (None, plain, foreign):
            connection = raw(node)
            if fd is None:
                connection.send_frame(HELLO)
            else:
                connection.send_frame_with(fd, HELLO)
            error = connection.ending()
            assert (error.code, "must bring a pidfd" in error.message) == (UNIMPLEMENTED, True)
        os.close(foreign)
        os.close(plain)
        other.kill()
    settle(node)


def test_extra_descriptors_are_closed(node: Node, raw: Callable[[Node], Raw]) -> None:
    connection = raw(node)
    there = len(os.listdir("/proc/self/fd"))  # includes those of other tests' nodes
    pidfd = os.pidfd_open(os.getpid())
    many = array.array("i", [pidfd] * 100)
    frame = pack_fixed(len(HELLO), 0) + HELLO
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)]
    connection.sock.sendmsg([frame], rights)
    header, _, fd = connection.recv_frame_with(1 << 20)
    assert pb.BulkReply.FromString(header).hello.arena_nbytes == node.arena.nbytes
    # For the connection, one pidfd at the node and the arena here
    before = len(os.listdir("/proc/self/fd"))
    assert before < there + 100
    for _ in range(10):
        connection.sock.sendmsg([pack_fixed(len(HELLO), 0) + HELLO], rights)
        assert connection.reply().hello.version
    assert len(os.listdir("/proc/self/fd")) <= before
    assert fd is not None
    os.close(fd)
    os.close(pidfd)
    connection.close()
    settle(node)


OUT_OF_ORDER = """
import os, socket, sys
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.unix_sockets import DescriptorSocket
for line in sys.stdin:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    connection = DescriptorSocket(sock)
    connection.arm(5.0)
    hello = pb.BulkRequest(hello=pb.HelloRequest()).SerializeToString()
    connection.send_frame_with(os.pidfd_open(os.getpid()), hello)
    connection.recv_frame_with(1 << 20)
    for request in line.split():
        connection.send_frame(bytes.fromhex(request))
        reply = pb.BulkReply.FromString(connection.recv_frame(1 << 20)[0])
    print(reply.error.code, reply.error.message, flush=True)
"""


def test_one_put_and_one_get_at_a_time(node: Node, pages: Pages) -> None:
    """A client that breaks this rule may still be writing, so its slots are kept while it lives."""
    lookup = pb.LookupRequest(namespace=pages.namespace.digest, prefix_hashes=pages.keys(1))
    requests: dict[str, Any] = {
        "put": put_of(pages, 10),
        "get": get_of(pages, 1),
        "lookup": lookup,
        "commit": pb.CommitRequest(),
    }
    assert node.shm is not None
    command = [sys.executable, "-c", OUT_OF_ORDER, node.shm.path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for first, second, wrong, counts in (
            ("put", "put", "a put while the previous one", (0, 1)),
            ("get", "get", "a get while the previous one", (1, 1)),
            ("lookup", "commit", "a commit without a put", (1, 1)),
            # The same page, which is held twice
            (
                "get",
                "commit",
                "a commit without a put",
                (1, 1),
            ),
        ):
            words = [
                pb.BulkRequest(**{op: requests[op]}).SerializeToString().hex()
                for op in (first, second)
            ]
            orphans = node.shm.status().orphan_count
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
            code, _, message = process.stdout.readline().partition(" ")
            assert (int(code), wrong in message) == (UNIMPLEMENTED, True)
            while first != "lookup" and node.shm.status().orphan_count == orphans:
                threading.Event().wait(0.005)
            assert (node.tier.held_count, node.tier.writing_count) == counts
        process.kill()
    settle(node)


def test_idle_connection_stays_with_high_descriptor_numbers(
    node: Node, raw: Callable[[Node], Raw], pages: Pages
) -> None:
    """Regression: `select` takes no descriptor above 1,023, so idle connections to nodes with many
    extents were closed.
    """
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] < 1024:
        taken.append(os.dup(taken[0]))
    try:
        connection = raw(node)
        connection.greet()
    finally:
        for fd in taken:
            os.close(fd)
    assert list(connection.ask(get=get_of(pages, 1)).get.hits) == [True]
    threading.Event().wait(2 * node.config.stall_s)
    connection.send_request(release=pb.ReleaseRequest())
    assert list(connection.ask(get=get_of(pages, 2)).get.hits) == [True]
    connection.send_request(release=pb.ReleaseRequest())
    connection.close()
    settle(node)


def test_connection_closes_at_once_although_its_slots_are_kept(
    make_node: Callable[..., Node], raw: Callable[[Node], Raw], connect: Connect
) -> None:
    node, pages = make_node(), Pages("kept")
    pages.put(connect(node), pages.keys(1))
    connection = raw(node)
    connection.greet()
    assert list(connection.ask(get=get_of(pages, 1)).get.hits) == [True]
    connection.send_request(get=get_of(pages, 1))
    assert "a get while the previous one" in connection.ending().message
    assert node.tier.held_count == 1, "this process may still read the page"


def test_empty_release_and_empty_answer_hold_nothing(
    node: Node, raw: Callable[[Node], Raw], pages: Pages
) -> None:
    connection = raw(node)
    connection.greet()
    connection.send_request(release=pb.ReleaseRequest())
    assert not any(connection.ask(get=get_of(pages, 50, 51)).get.hits)
    assert list(connection.ask(put=put_of(pages, 1, 2)).put.offsets) == []
    assert list(connection.ask(get=get_of(pages, 1, 50)).get.hits) == [True, False]
    connection.send_request(release=pb.ReleaseRequest())
    assert list(connection.ask(get=get_of(pages, 1, 2)).get.hits) == [True, True]
    connection.send_request(release=pb.ReleaseRequest())
    connection.close()
    settle(node)


def test_release_before_the_close_is_processed(
    node: Node, raw: Callable[[Node], Raw], pages: Pages
) -> None:
    """A client whose deadline has passed sends a release, and reads no answer."""
    for request in ({"get": get_of(pages, 1, 2)}, {"put": put_of(pages, 20, 21)}):
        connection = raw(node)
        connection.greet()
        connection.send_request(**request)
        connection.send_request(release=pb.ReleaseRequest())
        connection.close()
        settle(node)


def test_random_bytes_get_an_error_or_a_close(
    node: Node, raw: Callable[[Node], Raw], pages: Pages, seed: int
) -> None:
    chance = random.Random(seed)
    with Bystander(node):
        for _ in range(60):
            connection = raw(node)
            if chance.random() < 0.7:
                connection.greet()
            data = chance.randbytes(chance.randrange(1, 64))
            try:
                connection.send(
                    pack_fixed(len(data), chance.choice([0, 0, 7])) + data
                    if chance.random() < 0.6
                    else data
                )
                connection.sock.shutdown(socket.SHUT_WR)
                while connection.sock.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
            connection.close()
    settle(node, sessions=None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_uid(node: Node) -> None:
    """The mode of the socket file keeps other users out; if it is opened, the node checks
    the uid.
    """
    assert node.shm is not None
    path = pathlib.Path(node.shm.path)
    parents = [path.parent, path.parent.parent]
    modes = [os.stat(parent).st_mode for parent in parents]
    for parent in parents:
        os.chmod(parent, 0o755)
    script = f"""
import os, socket
from kvstore import ClientConfig, Unavailable
from kvstore.deadline import Deadline
from kvstore.transports.shm import ShmWire
from node.server import Node
os.setuid(12345)
config = ClientConfig(shm_dir={str(path.parent)!r})
wire = ShmWire({str(path)!r}, {node.service.instance_id!r}, config)
while input():
    try:
        wire.connect(Deadline(5))
    except Unavailable as error:
        print(error, flush=True)
"""
    messages = [
        "Permission denied",
        f"the memory of this node is for uid {os.geteuid()} and root, not for uid 12345",
    ]
    try:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
            for mode, expected in zip((0o600, 0o666), messages, strict=True):
                os.chmod(path, mode)
                process.stdin.write("connect\n")
                process.stdin.flush()
                assert expected in process.stdout.readline()
            process.kill()
    finally:
        os.chmod(path, 0o600)
        for parent, mode in zip(parents, modes, strict=True):
            os.chmod(parent, mode)
    settle(node, sessions=None)


# ---- the file ----------------------------------------------------------------------------


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**settings: Any) -> Node:
        ports = {
            "host": "127.0.0.1",
            "port": 0,
            "bulk_port": 0,
            "metrics_port": 0,
            "ram_nbytes": 16 << 20,
        }
        nodes.append(Node(NodeConfig(**{**ports, "drain_s": 0.1, **settings})))
        nodes[-1].start()
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


def test_socket_is_private_and_removed_with_the_node(runtime_dir: str, connect: Connect) -> None:
    node = Node(
        NodeConfig(
            host="127.0.0.1", port=0, bulk_port=0, metrics_port=0, ram_nbytes=16 << 20, drain_s=0.1
        )
    )
    assert node.shm is not None
    assert node.shm.path == f"{runtime_dir}/kvstore/{node.grpc.port}.sock"
    assert stat.S_IMODE(os.stat(node.shm.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{runtime_dir}/kvstore").st_mode) == 0o700
    node.start()
    node.stop()
    assert not os.path.exists(node.shm.path)


def test_stale_socket_is_replaced_and_a_live_one_is_not(
    make_node: Callable[..., Node], runtime_dir: str, connect: Connect
) -> None:
    path = f"{runtime_dir}/shared/node.sock"
    os.mkdir(os.path.dirname(path))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    node = make_node(shm_socket=path)
    client, pages = connect(node, "shm"), Pages("stale")
    pages.put(client, pages.keys(1))
    with pytest.raises(ConfigError, match="another process listens on"):
        make_node(shm_socket=path)
    assert pages.get(client, pages.keys(1)) == [True]
    moved = f"{runtime_dir}/moved"
    os.rename(os.path.dirname(path), moved)  # as if the volume were mounted elsewhere
    with pytest.raises(Unavailable, match="does not exist here"):
        connect(node, "shm").node_status()
    assert connect(node, "shm", shm_dir=moved).node_status().shm.socket == path
    os.rename(moved, os.path.dirname(path))


def test_end_of_a_node_leaves_the_socket_of_its_successor(
    make_node: Callable[..., Node], runtime_dir: str
) -> None:
    path = f"{runtime_dir}/followed.sock"
    first = Node(NodeConfig(host="none", shm_socket=path, ram_nbytes=16 << 20, drain_s=0.1))
    first.start()
    os.unlink(path)
    make_node(shm_socket=path)
    first.stop()
    assert os.path.exists(path)


def test_invalid_socket_path_ends_the_start(
    make_node: Callable[..., Node], runtime_dir: str
) -> None:
    plain = pathlib.Path(runtime_dir, "plain")
    plain.write_text("not a socket")
    for path, expected in (
        (str(plain), "is no socket"),
        (f"{plain}/node.sock", "File exists"),
        (f"/tmp/{'x' * 103}", "has 108 bytes; a Unix socket's path has at most 107"),
        ("node.sock", "must be an absolute path"),
    ):
        with pytest.raises(ConfigError, match=expected):
            make_node(shm_socket=path)
    assert plain.read_text() == "not a socket"


@pytest.mark.parametrize("trouble", ["none", "writable by others", "too long", "not there"])
def test_node_serves_without_a_place_for_its_socket(
    make_node: Callable[..., Node],
    connect: Connect,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    settings = {"shm_socket": "none"} if trouble == "none" else {}
    place = {"too long": tmp_path / ("x" * 100), "not there": tmp_path / "absent"}.get(
        trouble, tmp_path
    )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    if trouble == "writable by others":
        (tmp_path / "kvstore").mkdir()
        (tmp_path / "kvstore").chmod(0o777)
    node = make_node(**settings)
    assert node.shm is None
    client, pages = connect(node, "auto"), Pages(trouble)
    pages.put(client, pages.keys(1))
    assert client.wire_name == "bulk"
    assert not client.node_status().shm
    with pytest.raises(Unavailable, match="serves no shared memory"):
        connect(node, "shm").node_status()
