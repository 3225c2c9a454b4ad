"""A gateway's connections to its node, without gRPC: callers that share one, and its end."""

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import small_nodes
from stopping import stop
from waiting import wait_until

from kvstore.errors import Unauthenticated
from kvstore.messages import delimited
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import add, new_token, revoke, token_line
from kvstore.transports.frames import FIXED_NBYTES, pack_fixed, unpack_fixed
from node.gateway import upstream
from node.gateway.upstream import Upstream, on_behalf_of
from node.server import Node
from node.serving.limits import ON_BEHALF_NBYTES_MAX, REQUEST_NBYTES_FREE

HELLO = pb.HelloRequest().SerializeToString()
PART_NBYTES = 100_000
WHOLE_NBYTES = 4 << 20
NAMES = tuple(f"name{number}.example.org" for number in range(4000))  # in one certificate
RECEIVER = f"""
import socket, sys
from node.gateway.upstream import _received
sock = socket.socket(fileno=int(sys.argv[1]))
print("begins", flush=True)
print(len(_received(sock, {WHOLE_NBYTES})), flush=True)
"""


class People:
    """An identities file with one administrator each of team-a and team-b."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = {tenant: new_token(tenant) for tenant in ("team-a", "team-b")}
        for tenant, token in self.tokens.items():
            add(path, token_line(tenant, token, tenant=tenant, role="admin"))

    def on_behalf(self, tenant: str) -> bytes:
        return on_behalf_of("10.0.0.1:1", f"Bearer {self.tokens[tenant]}", None)


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path / "identities")


@pytest.fixture
def node(people: People) -> Iterator[Node]:
    with small_nodes() as start:
        yield start(identities=str(people.path))


@pytest.fixture
def door(node: Node) -> Iterator[socket.socket]:
    """Yield the gateway's end of a door, the socket over which it sends connections to a node."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = node.grpc.open_door("probe", theirs)
    made.start()
    with ours:
        ours.setblocking(False)
        yield ours
    made.stop(5.0)


def frame(op: str, request: bytes) -> bytes:
    header = delimited(pb.BulkRequest.DESCRIPTOR.fields_by_name[op].number, request)
    return pack_fixed(len(header), 0) + header


def answer(sock: socket.socket) -> Any:
    """Return the next reply, or None if the connection was closed."""
    try:
        fixed = sock.recv(FIXED_NBYTES, socket.MSG_WAITALL)
    except ConnectionResetError:  # closed before the node had received all
        return None
    if not fixed:
        return None
    header_nbytes, _ = unpack_fixed(fixed, REQUEST_NBYTES_FREE)
    return pb.BulkReply.FromString(sock.recv(header_nbytes, socket.MSG_WAITALL))


@contextlib.contextmanager
def connected(door: socket.socket) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        ours.settimeout(20.0)
        with theirs:
            socket.send_fds(door, [b"c"], [theirs.fileno()])
        yield ours


def test_request_after_a_refused_caller_is_not_served_for_the_previous_one(
    door: socket.socket, people: People
) -> None:
    """A request after a refused caller gets one error, and is not served for the previous caller.

    A second reply would be taken for that of the next caller's request.
    """
    with connected(door) as ours:
        ours.sendall(frame("on_behalf", people.on_behalf("team-a")) + frame("hello", HELLO))
        assert answer(ours).hello.tenant == "team-a"
        ours.sendall(
            frame("on_behalf", on_behalf_of("10.0.0.2:1", "", NAMES)) + frame("hello", HELLO)
        )
        refused = answer(ours)
        assert refused.error.last
        assert "the caller is not understood" in refused.error.message
        assert answer(ours) is None


def test_caller_with_too_many_names_is_refused_alone(door: socket.socket, people: People) -> None:
    too_long = on_behalf_of("10.0.0.2:1", "", NAMES)
    assert len(too_long) > ON_BEHALF_NBYTES_MAX

    async def hello(made: Upstream, on_behalf: bytes) -> str:
        with made.lease(on_behalf) as connection:
            return pb.HelloReply.FromString(bytes(await connection.exchange("hello", HELLO))).tenant

    async def run() -> None:
        made = Upstream(door, 1)
        for tenant in ("team-a", "team-b") * 2:
            with pytest.raises(Unauthenticated, match="the names in this certificate"):
                await hello(made, too_long)
            assert await hello(made, people.on_behalf(tenant)) == tenant
        made.close()

    asyncio.run(run())


@pytest.mark.parametrize("becomes", ["revoked", "team-b"])
def test_memory_of_a_large_request_is_freed_when_its_caller_changes(
    node: Node, door: socket.socket, people: People, becomes: str
) -> None:
    requests, access = node.service.requests, node.service.authorizer.access
    before, large = (
        access.identities,
        pb.LookupRequest(namespace=bytes(16), prefix_hashes=[bytes(32)] * 3000),
    )
    asked = frame("lookup", large.SerializeToString())
    with connected(door) as ours:
        ours.sendall(frame("on_behalf", people.on_behalf("team-a")) + asked[:PART_NBYTES])
        wait_until(lambda: requests.used > 0)
        revoke(people.path, "team-a")
        if becomes != "revoked":
            add(
                people.path,
                token_line("team-a", people.tokens["team-a"], tenant=becomes, role="admin"),
            )
        wait_until(lambda: (access.poll(), access.identities is not before)[1])
        ours.sendall(asked[PART_NBYTES:])
        assert answer(ours).error.message
        wait_until(lambda: requests.used == 0)
        ours.sendall(frame("hello", HELLO))
        assert answer(ours).WhichOneof("op") == ("error" if becomes == "revoked" else "hello")
    for peer in ("10.0.0.1", "tenant team-a", "tenant team-b"):
        requests.take(peer, requests.cap.per_peer)  # the whole share is free
        requests.give(peer, requests.cap.per_peer)


def test_traced_request_of_any_size_is_understood(door: socket.socket, people: People) -> None:
    """A request of any size near the limit is understood with a trace.

    A frame of more than 64 KiB holds one operation and no trace.
    """
    trace, request = bytes(25), pb.LookupRequest(namespace=bytes(16)).SerializeToString()

    async def run() -> None:
        made = Upstream(door, 1)
        for nbytes in range(REQUEST_NBYTES_FREE - 64, REQUEST_NBYTES_FREE + 8):
            unknown = delimited(15, bytes(nbytes - len(request) - 4))
            with made.lease(people.on_behalf("team-a")) as connection:
                with pytest.raises(upstream.Refused, match="is not open here"):
                    await connection.exchange("lookup", request + unknown, trace)
                assert connection.clean
        made.close()

    asyncio.run(run())


def silent_node(run: Callable[[Upstream], Awaitable[None]]) -> None:
    """Run `run` with the connections to a node that reads nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)

        async def running() -> None:
            await run(Upstream(ours, 1))

        asyncio.run(running())


def test_connection_may_reuse_the_number_of_a_cancelled_one() -> None:
    """A call may reuse the descriptor number of a cancelled put whose bytes were not read."""

    async def run(made: Upstream) -> None:
        numbers = []

        async def put(full: asyncio.Event) -> None:
            with made.lease(b"") as connection:
                connection.clean = False
                numbers.append(connection._sock.fileno())
                piece = memoryview(bytes(upstream.INLINE_NBYTES_MAX - 1))
                while True:
                    sending = asyncio.ensure_future(connection.send_payload(piece))
                    try:
                        await asyncio.sleep(0)
                        if not sending.done():
                            full.set()
                            await asyncio.sleep(60.0)
                    finally:
                        sending.cancel()

        async def call() -> None:
            with made.lease(b"") as connection:
                connection.clean = False
                numbers.append(connection._sock.fileno())

        full = asyncio.Event()
        putting = asyncio.ensure_future(put(full))
        await full.wait()
        putting.cancel()
        await asyncio.gather(putting, call(), return_exceptions=True)
        await call()
        assert numbers[0] == numbers[1], "the test needs the same number"
        assert len(numbers) == 3
        assert made.count == 0

    silent_node(run)


def test_page_bytes_arrive_complete_at_a_suspended_gateway() -> None:
    """Page bytes arrive complete at a gateway that was suspended.

    The system cuts a receive short when a process is suspended, which is no end of the connection.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", RECEIVER, str(theirs.fileno())]
    with (
        ours,
        subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        ) as receiver,
    ):
        theirs.close()
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "begins\n"
        ours.sendall(bytes(PART_NBYTES))
        wait_until(lambda: unread(ours) == 0)
        # Let the receiver wait in the kernel for the rest; if it does not yet, the test is weaker
        time.sleep(0.05)
        stop(receiver.pid)
        os.kill(receiver.pid, signal.SIGCONT)
        ours.sendall(bytes(WHOLE_NBYTES - PART_NBYTES))
        assert receiver.stdout.readline() == f"{WHOLE_NBYTES}\n"


def unread(sock: socket.socket) -> int:
    """Bytes sent that the peer has not received yet."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, count)
    return count[0]
