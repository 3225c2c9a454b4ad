"""Attackers that open and maintain an attack's connections, and a sink that discards all data.

    python strangers.py attack NAME HOST:PORT [--sources FIRST-LAST] [--tls] [--connections N]
    python strangers.py sink [--cert FILE --key FILE [--client-ca FILE]]

Each runs until its standard input ends, then prints its counts as one JSON object. Attackers print
`begun` at their first connection; a sink prints its port. Both use only the standard library. On
Linux, all of 127.0.0.0/8 is this host, so one host can attack from many addresses.
"""

import argparse
import collections
import contextlib
import errno
import ipaddress
import itertools
import json
import os
import resource
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from attacks import ATTACKS, WAIT, Attack, Inbox

BIND_ADDRESS_NO_PORT = 24  # Linux IP option: each pair of addresses can use all ports
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: no port stays in TIME_WAIT
CONNECT_S_MAX = 3.0  # a packet filter drops connections without an answer
RETRY_S = 0.05  # after a refused connection
LOOK_S = 0.5  # between checks for unanswered connections
SEND_NBYTES = 1 << 18
IN, OUT, GONE = (
    select.EPOLLIN,
    select.EPOLLOUT,
    select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP,
)
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stranger:
    """One connection at a time, with a new one after each.

    `rude`: it reads nothing and ends with a reset, so that the peer's kernel discards unread data.
    """

    def __init__(
        self, attack: Attack, source: str, rude: bool, counts: "collections.Counter[str]"
    ) -> None:
        self._attack, self._source, self._rude, self._counts = attack, source, rude, counts
        self._sock: socket.socket | None = None
        self.next_s = 0.0  # when to connect, or to give up connecting
        self.state = "away"  # connecting, greeting (TLS), talking

    def connect(self, address: tuple[str, int], tls: ssl.SSLContext | None) -> int:
        """Begin to connect, and return the file descriptor.

        Raises OSError.
        """
        sock = socket.socket()
        try:
            sock.setblocking(False)
            if self._rude or not self._attack.mixed:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            sock.setsockopt(socket.IPPROTO_IP, BIND_ADDRESS_NO_PORT, 1)
            sock.bind((self._source, 0))
            status = sock.connect_ex(address)
            if status not in (0, errno.EINPROGRESS):
                raise OSError(status, os.strerror(status))
            if tls is not None and self._attack.tls:
                sock = tls.wrap_socket(
                    sock, do_handshake_on_connect=False, server_hostname="localhost"
                )
        except BaseException:
            sock.close()
            raise
        self._sock, self.state = sock, "connecting"
        self.next_s = time.monotonic() + CONNECT_S_MAX
        self._inbox, self._pending, self._waiting = Inbox(), memoryview(b""), False
        self._talk = self._attack.conversation(self._inbox)
        return sock.fileno()

    @property
    def events(self) -> int:
        """Return the events that epoll should watch."""
        takes = IN if not self._rude or self.state == "greeting" else 0
        return GONE | takes | (0 if self._waiting or self.state == "greeting" else OUT)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self.state = None, "away"

    def step(self, events: int) -> None:
        """Continue the conversation.

        Raises OSError if the peer hung up, and StopIteration at the end of the conversation.
        """
        assert self._sock is not None
        if self.state == "connecting":
            status = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                raise OSError(status, os.strerror(status))
            if not self._counts["connections"]:
                print("begun", flush=True)
            self._counts["connections"] += 1
            self.state = "greeting" if isinstance(self._sock, ssl.SSLSocket) else "talking"
        if self.state == "greeting":
            try:
                self._sock.do_handshake()  # type: ignore[attr-defined]
            except AGAIN:
                return
            self._counts["handshakes"] += 1
            self.state = "talking"
        if events & IN and not self._rude:
            self._receive()
        elif events & GONE:
            raise ConnectionResetError
        if not self._waiting:
            self._send()

    def _receive(self) -> None:
        assert self._sock is not None
        with contextlib.suppress(*AGAIN):
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            if self._attack.parses:
                self._inbox.take(data)
            else:
                self._inbox.heard += len(data)
            self._waiting = False

    def _send(self) -> None:
        assert self._sock is not None
        if not self._pending:
            piece = next(self._talk)
            if piece is WAIT or not piece:
                self._waiting = True
                return
            self._pending = memoryview(piece)
        with contextlib.suppress(*AGAIN):
            sent = self._sock.send(self._pending[:SEND_NBYTES])
            self._counts["bytes"] += sent
            self._pending = self._pending[sent:]


class Crowd:
    """All attackers of one process, on one event loop."""

    def __init__(
        self, attack: Attack, address: tuple[str, int], sources: list[str], tls: bool
    ) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._address, self._epoll = address, select.epoll()
        self._tls = _client_context() if tls else None
        froms = itertools.islice(itertools.cycle(sources), attack.connections)
        self._away = collections.deque(
            Stranger(attack, source, attack.mixed and number % 2 == 1, self.counts)
            for number, source in enumerate(froms)
        )
        self._there: dict[int, Stranger] = {}
        self._looked = time.monotonic()

    def run(self, over: int) -> None:
        """Run until the descriptor becomes readable, which is the end of the input."""
        self._epoll.register(over, IN)
        while True:
            self._dial()
            for fd, events in self._epoll.poll(0.02):
                if fd == over:
                    return
                self._step(fd, events)

    def _dial(self) -> None:
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            self._give_up(now)
        for _ in range(min(len(self._away), 256)):  # then connected attackers get their turn
            stranger = self._away.popleft()
            if stranger.next_s > now:
                self._away.append(stranger)
                continue
            try:
                fd = stranger.connect(self._address, self._tls)
            except OSError:
                self._later(stranger)
                continue
            self._there[fd] = stranger
            self._epoll.register(fd, stranger.events)

    def _give_up(self, now: float) -> None:
        """Close connections that the peer does not answer."""
        for fd, stranger in list(self._there.items()):
            if stranger.state == "connecting" and stranger.next_s < now:
                self.counts["unanswered"] += 1
                self._lose(fd, stranger)

    def _later(self, stranger: Stranger) -> None:
        self.counts["refused"] += 1
        stranger.next_s = time.monotonic() + RETRY_S
        self._away.append(stranger)

    def _lose(self, fd: int, stranger: Stranger) -> None:
        self._epoll.unregister(fd)
        del self._there[fd]
        stranger.close()
        stranger.next_s = 0.0
        self._away.append(stranger)

    def _step(self, fd: int, events: int) -> None:
        stranger, connecting = self._there[fd], self._there[fd].state == "connecting"
        before = stranger.events
        try:
            stranger.step(events)
        except StopIteration:
            self._lose(fd, stranger)
        except OSError:
            self._lose(fd, stranger)
            if connecting:
                self._away.pop()
                self._later(stranger)
            else:
                self.counts["hung up on"] += 1
        else:
            if stranger.events != before:
                self._epoll.modify(fd, stranger.events)


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


# ---- the sink ----------------------------------------------------------------------------


class Sink:
    """A server that accepts and discards data: the same load for the machine, none for a node."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._context, self._epoll = context, select.epoll()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self._buffer = bytearray(1 << 18)
        self._socks: dict[int, tuple[socket.socket, Iterator[None]]] = {}

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def run(self, over: int) -> None:
        for fd in (over, self._listener.fileno()):
            self._epoll.register(fd, IN)
        while True:
            for fd, _ in self._epoll.poll():
                if fd == over:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                    continue
                try:
                    next(self._socks[fd][1])
                except (StopIteration, OSError):
                    self._epoll.unregister(fd)
                    self._socks.pop(fd)[0].close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(256):
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                if self._context:
                    sock = self._context.wrap_socket(
                        sock, server_side=True, do_handshake_on_connect=False
                    )
                self._socks[sock.fileno()] = sock, self._serve(sock)
                self._epoll.register(sock.fileno(), IN)
                self.counts["connections"] += 1

    def _serve(self, sock: Any) -> Iterator[None]:
        while isinstance(sock, ssl.SSLSocket):
            try:
                sock.do_handshake()
                break
            except AGAIN:
                yield
        while True:
            try:
                nbytes = sock.recv_into(self._buffer)
            except AGAIN:
                yield
                continue
            if not nbytes:
                return
            self.counts["bytes"] += nbytes
            yield


def _server_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    if not args.cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(args.cert, args.key)
    context.set_alpn_protocols(["h2"])
    if args.client_ca:
        context.load_verify_locations(args.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def sources_of(text: str) -> list[str]:
    """Return the addresses of a range such as '127.0.0.2-127.0.0.200'."""
    first, _, last = text.partition("-")
    low, high = int(ipaddress.ip_address(first)), int(ipaddress.ip_address(last or first))
    return [str(ipaddress.ip_address(number)) for number in range(low, high + 1)]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = options.add_subparsers(dest="kind", required=True)
    attacking, sinking = kinds.add_parser("attack"), kinds.add_parser("sink")
    attacking.add_argument("name", choices=ATTACKS)
    attacking.add_argument("address")
    attacking.add_argument("--sources", default="127.0.0.2")
    attacking.add_argument("--tls", action="store_true")
    attacking.add_argument(
        "--connections", type=int, default=0, help="0: as many as the attack has"
    )
    for flag in ("--cert", "--key", "--client-ca"):
        sinking.add_argument(flag, default="")
    args = options.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    start = time.monotonic()
    if args.kind == "sink":
        sink = Sink(_server_context(args))
        print(sink.port, flush=True)
        sink.run(sys.stdin.fileno())
        counts = sink.counts
    else:
        host, _, port = args.address.rpartition(":")
        attack = ATTACKS[args.name]
        if args.connections:
            attack = attack._replace(connections=args.connections)
        crowd = Crowd(attack, (host, int(port)), sources_of(args.sources), args.tls)
        crowd.run(sys.stdin.fileno())
        counts = crowd.counts
    taken = os.times()
    about = {
        "seconds": round(time.monotonic() - start, 2),
        "cpu_s": round(taken.user + taken.system, 2),
    }
    print(json.dumps({**counts, **about}), flush=True)
    os._exit(0)  # faster than closing thousands of sockets


if __name__ == "__main__":
    main()
