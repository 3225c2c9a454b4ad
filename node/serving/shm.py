"""Serve shared memory, node side: requests over a Unix socket; clients map the arena.

    put      request -> statuses, offsets        the client writes in place
    commit   checksums -> reply
    get      request -> hits, checksums, offsets the client reads in place, without a time limit
    release  no reply: aborts an uncommitted put, releases pages of a get

A client that disconnects without a release may still be writing: other threads, a GPU's copy
engine. Its slots are kept until its process has ended, which the descriptor sent with its hello
shows.
"""

import contextlib
import os
import select
import socket
import threading
from typing import Any

from kvstore.config import runtime_dir
from kvstore.errors import ProtocolError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Principal
from kvstore.transports.unix_sockets import (
    DescriptorSocket,
    check_path,
    private_directory,
    remove_stale,
)
from node.auth.access import Caller
from node.memory.arena import Arena
from node.serving.acceptor import BACKLOG, ConnectionServer
from node.serving.connection import Connection, Transfer, caller_at, ready
from node.serving.limits import make_limit
from node.serving.service import Service
from node.serving.session import Session
from node.serving.status import clamp_to_field

# The file of a Unix socket: for its owner only, replaced if its node is dead, removed at the end.


def default_path(port: int) -> str:
    """Return a socket path in a directory of this user alone. Raises OSError or ConfigError."""
    path = f"{runtime_dir()}/{port}.sock"
    check_path(path, "shm_socket=auto, which is")
    private_directory()
    return path


def listen_on(path: str, backlog: int) -> socket.socket:
    """Listen on a socket that only its owner and root can connect to.

    Raises OSError, also if a process listens there already.
    """
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # no client can connect before `listen`
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


class ShmServer(ConnectionServer):
    """The server of the Unix socket. It listens once constructed; `start` begins to serve."""

    def __init__(
        self, path: str, arena: Arena, service: Service, stall_s: float, connections_max: int
    ) -> None:
        what = make_limit(
            "shared-memory connections",
            connections_max,
            "use fewer per process, or raise sessions_max",
        )
        super().__init__("shm", listen_on(path, BACKLOG), stall_s, what)
        self.path = path
        self._file = os.lstat(path)
        self.arena_fd = arena.fd
        self._service = service
        self._lock = threading.Lock()
        self._orphan_pages: dict[ShmConnection, int] = {}
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def connection(self, sock: socket.socket, address: Any) -> Connection:
        """Make a connection."""
        frames = DescriptorSocket(sock)
        # Process 0: all containers whose processes can not be seen from here.
        caller = caller_at(sock, f"pid {frames.peer.pid}", "shm")
        return ShmConnection(frames, caller, self._service, self._stall_s, self)

    def status(self) -> pb.ShmStatus:
        """Return the status of shared memory."""
        with self._lock:
            orphans = list(self._orphan_pages.values())
        return clamp_to_field(
            pb.ShmStatus,
            socket=self.path,
            client_count=self.count - len(orphans),
            orphan_count=len(orphans),
            orphan_page_count=sum(orphans),
        )

    def wait_gone(self, connection: "ShmConnection", process_fd: int, pages: int) -> bool:
        """Return True when the process has ended, or False when this server stops."""
        with self._lock:
            self._orphan_pages[connection] = pages
        try:
            poll = select.poll()
            poll.register(process_fd, select.POLLIN)
            poll.register(self._stop_fd, select.POLLIN)
            return any(fd == process_fd for fd, _ in poll.poll())
        finally:
            with self._lock:
                del self._orphan_pages[connection]

    def stop(self, drain_s: float) -> None:
        """Stop; slots of processes that may still write are not waited for."""
        with contextlib.suppress(OSError):
            # Where somebody removed it, another node may listen already
            if os.path.samestat(os.lstat(self.path), self._file):
                os.unlink(self.path)
        os.eventfd_write(self._stop_fd, 1)
        super().stop(drain_s)
        if not self.count:
            os.close(self._stop_fd)


class ShmConnection(Connection):
    """A reservation or a hold may last: no time limit while the client works on its slots."""

    maps_arena = True
    socket: DescriptorSocket

    def __init__(
        self,
        sock: DescriptorSocket,
        caller: Caller,
        service: Service,
        stall_s: float,
        server: ShmServer,
    ) -> None:
        super().__init__(sock, caller.peer, caller, service, stall_s)
        self._server = server
        self._process_fd: int | None = None

    def greet(self) -> tuple[bytes, int]:
        """Receive the first request, which brings a pidfd along."""
        header, payload_nbytes, self._process_fd = self.socket.recv_frame_with(
            self.first_nbytes_max
        )
        peer = self.socket.peer
        if peer.uid not in (os.geteuid(), 0):
            raise Unavailable(
                f"the memory of this node is for uid {os.geteuid()} and root, not for uid "
                f"{peer.uid}"
            )
        if self._process_fd is None or _process_of(self._process_fd) != peer.pid:
            raise ProtocolError("the first frame must bring a pidfd of the process that connects")
        return header, payload_nbytes

    @property
    def may_loop(self) -> bool:
        """Return whether the request loop may serve it."""
        return True

    def refusal(self, principal: Principal) -> str:
        """Return why a principal may not map the arena."""
        return self.service.authorizer.access.why_no_arena(principal)

    def transfer(self, op: str) -> Transfer | None:
        """Return the handler of an operation on mapped pages."""
        if op == "put":
            return self._put
        if op == "get":
            return self._get
        if op == "commit":
            return self._commit
        if op == "release":
            return self._release
        return self._hello if op == "hello" else None

    def _hello(self, session: Session, request: pb.HelloRequest) -> None:
        self.socket.arm(self.stall_s)
        hello = pb.BulkReply(hello=self.service.call("hello", request, self.caller))
        self.socket.send_frame_with(self._server.arena_fd, hello.SerializeToString())

    def _put(self, session: Session, request: pb.PutRequest) -> None:
        if session.reserved:
            raise ProtocolError("a put while the previous one is not committed or released")
        reply, _ = self.service.begin_put(session, request)
        try:
            self.send("put", reply)
        except OSError:
            session.abort()  # a client without the whole reply does not know the slots
            raise

    def _commit(self, session: Session, request: pb.CommitRequest) -> None:
        if not session.reserved:
            raise ProtocolError("a commit without a put before it")
        self.send("commit", self.service.commit_put(session, request))

    def _release(self, session: Session, request: object) -> None:
        session.abort()
        session.release()

    def _get(self, session: Session, request: pb.GetRequest) -> None:
        if session.held:
            raise ProtocolError("a get while the previous one is not released")
        parts = 0

        def send_part(reply: pb.GetReply) -> None:
            nonlocal parts
            parts += 1
            self.send_soon("get", reply)

        part = send_part if request.in_parts else None
        _, reply, _ = self.service.begin_get(session, request, part)
        try:
            self.send("get", reply)
        except OSError:
            session.release()
            raise
        if not (reply.offsets or parts):
            session.release()

    def unfinished(self, session: Session) -> bool:
        """Return whether the client still uses slots."""
        return bool(session.reserved or session.held)

    def abandoned(self) -> bool:
        """Return whether the process has ended though a forked child keeps its socket open."""
        assert self._process_fd is not None
        return ready(self._process_fd, select.POLLIN)

    def end(self, session: Session) -> None:
        """Free the client's slots when its process has ended, never before.

        The client learns at once that this connection has ended.
        """
        self.socket.shutdown()
        pages = len(session.reserved) + len(session.held)
        assert self._process_fd is not None
        if not pages or self._server.wait_gone(self, self._process_fd, pages):
            session.close()

    def close(self) -> None:
        """Close socket and pidfd."""
        super().close()
        if self._process_fd is not None:
            os.close(self._process_fd)


def _process_of(fd: int) -> int:
    """Return a pidfd's process id, 0 if it is invisible here, -1 if it has ended."""
    with open(f"/proc/self/fdinfo/{fd}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return -1
