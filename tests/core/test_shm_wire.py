"""The shared-memory wire against a misbehaving or restarted node: a kvstore error each time.

It never touches a byte outside the map, nor another node's memory.
"""

import errno
import fcntl
import gc
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest
from fake_node import FakeNode
from ports import free_port
from waiting import PATIENT, OthersRun

from kvstore import (
    Client,
    ClientConfig,
    Exhausted,
    Namespace,
    ProtocolError,
    PutOutcome,
    Unavailable,
    opaque_layout,
)
from kvstore.buffers import HELD_NBYTES_MAX
from kvstore.checksum import checksum, root
from kvstore.config import PROTOCOL_VERSION
from kvstore.deadline import Deadline
from kvstore.pb import kvstore_pb2 as pb
from kvstore.sync import Event
from kvstore.tools.node_process import NodeProcess
from kvstore.transports.mapped_memory import ArenaMap
from kvstore.transports.negotiation import Negotiation
from kvstore.transports.shm import STEP_NBYTES, ShmWire, _read_page, _write_page
from kvstore.transports.unix_sockets import DescriptorSocket, Peer

ARENA = 1 << 20
PAGE = 4096
KEYS = [b"a" * 32, b"b" * 32]
PUT = pb.PutRequest(namespace=b"n" * 16, prefix_hashes=KEYS, page_nbytes=PAGE)
GET = pb.GetRequest(namespace=b"n" * 16, prefix_hashes=KEYS)
PARTS = pb.GetRequest(namespace=b"n" * 16, prefix_hashes=KEYS, in_parts=True)
NAMESPACE = Namespace("shm", opaque_layout(PAGE))


def arena_fd(nbytes: int = ARENA, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class UnixNode:
    """A fake node that greets with a reply and a descriptor, then sends one answer per request."""

    def __init__(
        self, path: str, hello: pb.HelloReply, fd: int | None, answers: list[pb.BulkReply]
    ) -> None:
        self.received: list[str | None] = []
        self._hello, self._fd, self._answers = hello, fd, answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            connection = DescriptorSocket(sock)
            connection.arm(5.0)
            try:
                self._talk(connection)
            except ConnectionError:
                pass
            finally:
                connection.close()

    def _talk(self, connection: DescriptorSocket) -> None:
        _, _, pidfd = connection.recv_frame_with(1 << 20)
        assert pidfd is not None
        os.close(pidfd)
        header = pb.BulkReply(hello=self._hello).SerializeToString()
        if self._fd is None:
            connection.send_frame(header)
        else:
            connection.send_frame_with(self._fd, header)
        while True:
            request = pb.BulkRequest.FromString(connection.recv_frame(1 << 20)[0])
            self.received.append(request.WhichOneof("op"))
            if self.received[-1] != "release":
                connection.send_frame(self._answers.pop(0).SerializeToString())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        if self._fd is not None:
            os.close(self._fd)


HELLO = pb.HelloReply(
    protocol_version=PROTOCOL_VERSION, instance_id=b"fakenode", arena_nbytes=ARENA
)
NO_FD = -1


ServeShm = Callable[..., tuple[UnixNode, ShmWire]]


@pytest.fixture
def unix_node() -> Iterator[ServeShm]:
    """Return a function that starts a fake node on a Unix socket, and makes a wire to it."""
    made: list[tuple[UnixNode, ShmWire]] = []
    with tempfile.TemporaryDirectory() as directory:

        def make(
            *answers: pb.BulkReply, hello: pb.HelloReply = HELLO, fd: int = 0
        ) -> tuple[UnixNode, ShmWire]:
            path = f"{directory}/{len(made)}.sock"
            node = UnixNode(path, hello, None if fd == NO_FD else fd or arena_fd(), list(answers))
            made.append(
                (
                    node,
                    ShmWire(
                        path, b"fakenode", ClientConfig(timeout_s=20.0, connect_timeout_s=20.0)
                    ),
                )
            )
            return made[-1]

        yield make
        for node, wire in made:
            wire.close()
            node.close()


@pytest.mark.parametrize(
    ("make_fd", "message"),
    [
        (
            lambda: arena_fd(ARENA // 2),
            f"an arena of {ARENA // 2} bytes, but announced {ARENA}",
        ),
        (lambda: arena_fd(ARENA * 2), f"an arena of {ARENA * 2} bytes"),
        (lambda: arena_fd(seals=fcntl.F_SEAL_GROW), "could shrink"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "an arena of 0 bytes"),
        (lambda: NO_FD, "passed no arena"),
    ],
)
def test_arena_that_differs_from_the_hello_is_not_mapped(
    unix_node: ServeShm, make_fd: Callable[[], int], message: str
) -> None:
    _, wire = unix_node(fd=make_fd())
    with pytest.raises(ProtocolError, match=message):
        wire.connect(Deadline(20))


def test_unsealable_file_is_no_arena() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(ARENA)
        with pytest.raises(ProtocolError, match="no arena"):
            ArenaMap(file.fileno(), ARENA)


WRITE, EXISTS = pb.WRITE, pb.EXISTS
WRONG: dict[str, tuple[str, pb.BulkReply]] = {
    "a slot that ends behind the arena": (
        "put",
        pb.BulkReply(put=pb.PutReply(verdicts=[WRITE, EXISTS], offsets=[ARENA - PAGE + 1])),
    ),
    "a slot at 2^64-1": (
        "put",
        pb.BulkReply(put=pb.PutReply(verdicts=[WRITE, EXISTS], offsets=[(1 << 64) - 1])),
    ),
    "no slot for a WRITE": (
        "put",
        pb.BulkReply(put=pb.PutReply(verdicts=[WRITE, WRITE], offsets=[0])),
    ),
    "one verdict for two": ("put", pb.BulkReply(put=pb.PutReply(verdicts=[WRITE], offsets=[0]))),
    "a hit outside the arena": (
        "get",
        pb.BulkReply(get=pb.GetReply(hits=[True, False], checksums=[b"c" * 16], offsets=[ARENA])),
    ),
    "a hit without a slot": (
        "get",
        pb.BulkReply(get=pb.GetReply(hits=[True, False], checksums=[b"c" * 16])),
    ),
    "a hit without a checksum": (
        "get",
        pb.BulkReply(get=pb.GetReply(hits=[True, False], offsets=[0])),
    ),
    "one hit for two": ("get", pb.BulkReply(get=pb.GetReply(hits=[False]))),
    "a part of a reply that was to be whole": (
        "get",
        pb.BulkReply(get=pb.GetReply(hits=[False], more=True)),
    ),
    "a part about no key": ("parts", pb.BulkReply(get=pb.GetReply(more=True))),
    "a part about all keys": (
        "parts",
        pb.BulkReply(get=pb.GetReply(hits=[False, False], more=True)),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_answer_touches_nothing_and_releases(unix_node: ServeShm, what: str) -> None:
    op, answer = WRONG[what]
    node, wire = unix_node(answer)
    pages = [(memoryview(bytearray(b"1" * PAGE)),) for _ in KEYS]
    get = PARTS if op == "parts" else GET
    with pytest.raises(ProtocolError):
        wire.put(PUT, pages, Deadline(20)) if op == "put" else wire.get(
            get, pages, [0, 1], Deadline(20)
        )
    while "release" not in node.received:
        threading.Event().wait(0.03)
    assert wire.arena.memory == bytes(ARENA)


def test_put_and_get_copy_to_the_offsets_and_check_the_copy(unix_node: ServeShm) -> None:
    page, other = os.urandom(PAGE), os.urandom(PAGE)
    good = [checksum(page, 0), checksum(other, 1)]
    node, wire = unix_node(
        pb.BulkReply(put=pb.PutReply(verdicts=[WRITE, WRITE], offsets=[PAGE, 3 * PAGE])),
        pb.BulkReply(commit=pb.CommitReply(stored=2)),
        pb.BulkReply(
            get=pb.GetReply(
                hits=[True, True], checksums=[good[0], good[0]], offsets=[PAGE, 3 * PAGE]
            )
        ),
    )
    assert wire.put(PUT, [(memoryview(page),), (memoryview(other),)], Deadline(20)) == [
        WRITE,
        WRITE,
    ]
    assert wire.arena.memory[: 5 * PAGE] == bytes(PAGE) + page + bytes(PAGE) + other + bytes(PAGE)
    buffers = [bytearray(PAGE), bytearray(PAGE)]
    assert wire.get(GET, [(memoryview(buffer),) for buffer in buffers], [0, 1], Deadline(20)) == (
        [True, False],
        [1],
    )
    assert buffers[0] == page
    while node.received != ["put", "commit", "get", "release"]:
        threading.Event().wait(0.03)


@pytest.mark.parametrize(
    "nbytes",
    [
        1,
        HELD_NBYTES_MAX,
        HELD_NBYTES_MAX + 1,
        STEP_NBYTES,
        2 * STEP_NBYTES + 7,
        9 * STEP_NBYTES + 1,
    ],
)
def test_pages_of_many_steps_and_parts_are_copied_and_hashed_exactly(nbytes: int) -> None:
    page = memoryview(os.urandom(nbytes))
    slot, buffer = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    assert root(_write_page(slot, (page,)), 5) == checksum(page, 5)
    assert root(_read_page((buffer,), [slot.toreadonly()]), 5) == checksum(page, 5)
    assert slot == page == buffer
    third = nbytes // 3
    parted = root(_read_page((buffer,), [slot[third:], slot[:third]]), 5)
    assert parted == checksum(bytes(page[third:]) + bytes(page[:third]), 5)
    assert bytes(buffer) == bytes(page[third:]) + bytes(page[:third])


def test_threads_run_while_pages_are_copied(
    others_run: OthersRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only copies are tested, as checksums release the GIL anyway.

    Sources may be read-only views.
    """

    class NoChecksum:
        def __init__(self, page_nbytes: int) -> None: ...

        def update(self, chunk: memoryview) -> None: ...

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr("kvstore.transports.shm.Leaves", NoChecksum)
    page, buffer = memoryview(bytearray(8 << 20)), memoryview(bytearray(8 << 20))
    assert others_run(lambda: _read_page((buffer,), [page.toreadonly()]))
    assert others_run(lambda: _write_page(buffer, (page.toreadonly(),)))


def test_threads_run_while_an_arena_is_populated(
    others_run: OthersRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Populating takes one step here, because other threads run between steps anyway."""
    monkeypatch.setattr("kvstore.transports.mapped_memory._POPULATE_STEP_NBYTES", 1 << 30)
    fd, stop = arena_fd(64 << 20), Event()
    stop.set()
    # The iterator keeps the maps, because other threads run while one is unmapped
    maps = iter([ArenaMap(fd, 64 << 20) for _ in range(50)])
    assert others_run(lambda: next(maps).populate(stop))
    os.close(fd)


def test_socket_of_another_node_is_ignored(
    fake_node: FakeNode, unix_node: ServeShm, caplog: pytest.LogCaptureFixture
) -> None:
    """Each host of a cluster may have its own node at the default path.

    Nothing is wrong, so nothing is logged as a warning, and there are no retries.
    """
    other, wire = unix_node(
        hello=pb.HelloReply(
            protocol_version=PROTOCOL_VERSION, instance_id=b"another!", arena_nbytes=ARENA
        )
    )
    fake_node.shm_socket = wire._path
    refused = pytest.raises(Unavailable, match="belongs to another node")
    with Client(ClientConfig(address=fake_node.address, wire="shm")) as client, refused:
        client.open(NAMESPACE)
    settings = ClientConfig(address=fake_node.address, timeout_s=60.0, connect_timeout_s=20.0)
    with Client(settings) as client, caplog.at_level(logging.INFO):
        client.open(NAMESPACE)
        assert client.wire_name == "grpc"
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["using gRPC"]
    assert other.received == []


def test_failing_local_socket_is_logged(
    fake_node: FakeNode, unix_node: ServeShm, caplog: pytest.LogCaptureFixture
) -> None:
    _, wire = unix_node(fd=arena_fd(ARENA // 2))
    fake_node.shm_socket = wire._path
    with (
        Client(ClientConfig(address=fake_node.address)) as client,
        caplog.at_level(logging.WARNING),
    ):
        client.open(NAMESPACE)
        assert client.wire_name == "grpc"
    assert any(
        "no shared memory, which is slower" in record.getMessage() for record in caplog.records
    )


def test_node_that_refuses_a_shared_memory_session_is_used_by_another_wire(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: every call failed while the node had no descriptors for a better wire."""

    def refuse(*_: object) -> None:
        raise Exhausted("the node has no descriptors left")

    monkeypatch.setattr(Negotiation, "_shm", refuse)
    with Client(ClientConfig(address=fake_node.address)) as client:
        client.open(NAMESPACE)
        assert client.wire_name == "grpc"
    assert "no descriptors left" in caplog.text
    with (
        Client(ClientConfig(address=fake_node.address, wire="shm")) as client,
        pytest.raises(Exhausted),
    ):
        client.open(NAMESPACE)


def test_client_of_an_address_takes_other_settings_from_the_environment(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "17")
    monkeypatch.setenv("KVSTORE_TENANT", "team-a")
    with Client(fake_node.address) as client:
        client.open(NAMESPACE)
        assert (client.config.timeout_s, client.tenant) == (17.0, "team-a")


# ---- nodes that stop and restart ---------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def run(port: int = 0) -> NodeProcess:
        flags = ("--ram-bytes", "16MiB", "--extent-bytes", "1MiB", "--drain-s", "0.2")
        # No ephemeral port: between two starts, an outgoing connection could take it
        nodes.append(NodeProcess(*flags, "--port", str(port or free_port())))
        return nodes[-1]

    yield run
    for node in nodes:
        if node.running:
            node.kill()


def store(client: Client, content: bytes) -> None:
    assert client.put(NAMESPACE, KEYS[:1], [content]) == [PutOutcome.STORED]


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_restarted_node_is_mapped_again(start: Callable[..., NodeProcess], how: str) -> None:
    """The new node replaces the socket file that a killed one leaves behind.

    A reader of the old map still reads its old bytes.
    """
    node = start()
    port = int(node.address.rpartition(":")[2])
    with Client(
        ClientConfig(address=node.address, wire="shm", backoff_s_max=0.01, **PATIENT)
    ) as client:
        store(client, b"1" * PAGE)
        with client.open_get(NAMESPACE, KEYS[:1]) as held:
            old = held.arena
            getattr(node, how)()
            assert held.pages[0] == b"1" * PAGE
            with pytest.raises(Unavailable):
                client.lookup(NAMESPACE, KEYS)
            start(port)
            end = Deadline(60.0)
            while client.wire_name == "none" or client.stats.connects < 2:
                end.remaining()
                try:
                    assert client.lookup(NAMESPACE, KEYS).prefix_pages == 0
                except Unavailable:
                    threading.Event().wait(0.02)
            store(client, b"2" * PAGE)
            assert held.pages[0] == b"1" * PAGE
        with client.open_get(NAMESPACE, KEYS[:1]) as held:
            assert held.pages[0] == b"2" * PAGE
            assert held.arena is not old


def test_commit_to_a_dead_node_is_unavailable(start: Callable[..., NodeProcess]) -> None:
    node = start()
    with Client(ClientConfig(address=node.address, wire="shm", **PATIENT)) as client:
        dead = pytest.raises(Unavailable)
        with dead, client.open_put(NAMESPACE, KEYS) as slots:
            node.kill()
            for view in slots.pages:
                view[:] = b"3" * PAGE  # the memory exists while it is mapped
            slots.commit([b"c" * 16] * 2)
        with pytest.raises(Unavailable):
            client.put(NAMESPACE, KEYS, [bytes(PAGE)] * 2)


def maps_of_arenas() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:kvstore-arena" in line for line in file)


def test_closed_clients_map_is_unmapped_with_its_last_view(
    start: Callable[..., NodeProcess],
) -> None:
    gc.collect()
    before = maps_of_arenas()
    node = start()
    client = Client(ClientConfig(address=node.address, wire="shm", **PATIENT))
    store(client, b"4" * PAGE)
    with client.open_get(NAMESPACE, KEYS[:1]) as held:
        view = held.pages[0][:10]
        client.close()
        assert bytes(view) == b"4" * 10
        assert maps_of_arenas() == before + 1
    del held, client
    while maps_of_arenas() != before + 1:  # the populating thread may still run
        threading.Event().wait(0.03)
    assert bytes(view) == b"4" * 10
    del view
    gc.collect()
    end = Deadline(60.0)
    while maps_of_arenas() != before:
        end.remaining()
        threading.Event().wait(0.03)


def entered_nbytes() -> int:
    """Return the bytes of arenas in this process's page table."""
    entered = 0
    with open("/proc/self/smaps") as file:
        arena = False
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                arena = "memfd:kvstore-arena" in line
            elif arena and line.startswith("Rss:"):
                entered += int(line.split()[1]) << 10
    return entered


def test_closed_clients_map_is_emptied_before_it_is_unmapped(
    start: Callable[..., NodeProcess],
) -> None:
    """Unmapping holds the GIL while the map has pages: seconds for a large arena.

    Kept views keep their bytes.
    """
    gc.collect()
    node = start()
    client = Client(ClientConfig(address=node.address, wire="shm", **PATIENT))
    store(client, b"5" * PAGE)
    end = Deadline(60.0)
    while entered_nbytes() < 16 << 20:
        end.remaining()
        threading.Event().wait(0.03)
    with client.open_get(NAMESPACE, KEYS[:1]) as held:
        client.close()
        while entered_nbytes() > PAGE:
            end.remaining()
            threading.Event().wait(0.03)
        assert held.pages[0] == b"5" * PAGE


def test_socket_of_another_user_needs_shm_dir(
    unix_node: ServeShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a user who can place a socket at the node's path would receive our pages."""
    monkeypatch.setattr("kvstore.transports.unix_sockets.peer_of", lambda sock: Peer(1, 10001))
    _, wire = unix_node()
    with pytest.raises(Unavailable, match="is served by uid 10001; set shm_dir"):
        wire.connect(Deadline(20))
    named = ShmWire(wire._path, b"fakenode", ClientConfig(shm_dir=os.path.dirname(wire._path)))
    named.connect(Deadline(20))
    named.close()
    monkeypatch.setattr("kvstore.transports.shm.os.pidfd_open", refuse)
    with pytest.raises(Unavailable, match="shared memory needs pidfd_open"):
        ShmWire(wire._path, b"fakenode", ClientConfig(shm_dir=os.path.dirname(wire._path))).connect(
            Deadline(20)
        )


def refuse(pid: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
