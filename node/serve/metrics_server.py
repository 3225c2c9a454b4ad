"""HTTP server of /metrics and /health: one thread that waits for nobody, a few connections, each with its time.

Scrapes answer from one text, made anew when it is older than ten times what making it took: however often
somebody asks, the node spends no more than a tenth of one core on it. /health says to everybody what the health
service of gRPC says, for who can ask it only over HTTP: a kubelet, which neither speaks TLS over gRPC nor has a token.
A connection whose head asks for the console is handed over to that, which has a thread of its own.
"""

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from kvstore.errors import KVStoreError, Unauthenticated
from node.serve.descriptors import OUT_OF_DESCRIPTORS, SpareDescriptor
from node.serve.http_host import DUPLICATE_HOST, UNTRUSTED_HOST, host_count
from node.serve.http_status import http_status
from node.serve.limits import SCRAPE_S_MAX, SCRAPES_MAX, Place, Places, cap, peer_of
from node.tls import Certificates, shown_by

log = logging.getLogger(__name__)

_HEAD_NBYTES_MAX = 8 << 10
_BACKLOG = 1024  # those for whom it has no room would try again after a second, a kubelet among them
_ACCEPTED_MAX = 64  # before those are heard again who are there
_AGE_FACTOR = 10
_CACHED_MAX = 64
HEALTH_PATH = "/health"
CONSOLE_PATH = "/console"


class Answer(NamedTuple):
    """`scope`: who is told the same."""

    content_type: str
    scope: Hashable
    body: Callable[[], bytes]


class Asker(NamedTuple):
    """`names`: of its certificate."""

    peer: str
    names: tuple[str, ...]


# From the head of a request, and who sent it. It and the body raise KVStoreError.
Choose = Callable[[Mapping[str, str], Asker], Answer]
# Takes a connection over, and what it has sent so far.
Console = Callable[[socket.socket, Asker, bytes], None]


class _Scrape:
    """One connection: reads a head, writes one answer, closes."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.head = b""
        self.answer = memoryview(b"")
        self.end = time.monotonic() + SCRAPE_S_MAX
        self.over = False
        self.is_consoles = False  # and over here
        self.greeted = False  # in TLS
        self.place: Place | None = None

    def leave(self) -> None:
        self.over = True

    def close(self) -> None:
        self.sock.close()
        self.give_up_place()

    def give_up_place(self) -> None:
        if self.place is not None:
            self.place.close()
            self.place = None  # which knows this one: together they would keep a text until a collection


class MetricsServer:
    """Binds in the constructor and serves from then on."""

    def __init__(
        self,
        host: str,
        port: int,
        choose: Choose,
        serving: Callable[[], bool],
        certificates: Certificates | None = None,
        console: Console | None = None,
        trusts_host: Callable[[str], bool] = lambda host: True,
    ) -> None:
        """`serving`: what /health tells. `certificates`: None: HTTP, and no HTTPS. `console`: None: there is none.
        `trusts_host`: whether a request with this Host is answered."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._choose = choose
        self._serving = serving
        self._cached: dict[Hashable, tuple[float, bytes]] = {}  # by content type and scope: good until, answer
        self._certificates = certificates
        self._console = console
        self._trusts_host = trusts_host
        self._places = Places(cap("scrapes", SCRAPES_MAX, "scrape less often"))
        self._spare = SpareDescriptor()
        self._poll = select.poll()  # which needs no descriptor
        self._poll.register(self._listener, select.POLLIN)
        self._scrapes: dict[int, _Scrape] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for scrape in self._scrapes.values():
            scrape.close()
        self._listener.close()
        self._spare.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                log.exception("metrics: serving failed")
                threading.Event().wait(0.1)

    def _turn(self) -> None:
        first = min((scrape.end for scrape in self._scrapes.values()), default=None)
        wait_s = None if first is None else max(0.0, first - time.monotonic())
        for fd, _ in self._poll.poll(None if wait_s is None else wait_s * 1000 + 1):
            if fd == self._listener.fileno():
                self._accept_all()
            elif fd in self._scrapes:
                self._step(self._scrapes[fd], self._poll)
        self._part()

    def _part(self) -> None:
        """From those who are over."""
        now = time.monotonic()
        for fd, scrape in list(self._scrapes.items()):
            if scrape.over or scrape.end <= now:
                self._poll.unregister(fd)
                del self._scrapes[fd]
                self._end(scrape)

    def _end(self, scrape: _Scrape) -> None:
        if scrape.is_consoles and self._console is not None:
            scrape.give_up_place()
            self._console(scrape.sock, Asker(scrape.peer, _names(scrape.sock)), scrape.head)
        else:
            scrape.close()

    def _accept_all(self) -> None:
        """Who waits, as long as it is not too many."""
        for _ in range(_ACCEPTED_MAX):
            if not self._accept():
                return
            if len(self._scrapes) > SCRAPES_MAX:
                self._part()

    def _accept(self) -> bool:
        """Whether there may be another one."""
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                self._serve_at_once()
            return False
        self._admit(sock, address[0])
        return True

    def _serve_at_once(self) -> None:
        """When there is no descriptor left this is what somebody wants to see: the one in reserve is used, for
        one connection that gets a moment."""
        with self._spare.lent(), contextlib.suppress(OSError):
            sock, address = self._listener.accept()
            scrape = self._scrape(sock, peer_of(address[0]))
            end = time.monotonic() + 0.25
            waiting = select.poll()
            waiting.register(scrape.sock, select.POLLIN)
            while not scrape.over and (left_s := end - time.monotonic()) > 0:
                if waiting.poll(left_s * 1000):
                    self._step(scrape, waiting)
            scrape.close()

    def _admit(self, sock: socket.socket, host: str) -> None:
        try:
            scrape = self._scrape(sock, peer_of(host))
        except OSError:  # it sent something that is no TLS and hung up
            sock.close()
            return
        scrape.place = self._places.enter(scrape.peer, scrape.leave)
        scrape.place.idle()  # all of them may be asked to leave: the oldest does if too many come
        self._scrapes[scrape.sock.fileno()] = scrape
        self._poll.register(scrape.sock, select.POLLIN)
        self._step(scrape, self._poll)  # what it has sent meanwhile is answered before the next one can take its place

    def _scrape(self, sock: socket.socket, peer: str) -> _Scrape:
        sock.setblocking(False)
        if self._certificates is None:
            return _Scrape(sock, peer)
        greeted = self._certificates.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return _Scrape(greeted, peer)

    def _step(self, scrape: _Scrape, poll: "select.poll") -> None:
        """What can be done without waiting."""
        try:
            if isinstance(scrape.sock, ssl.SSLSocket) and not scrape.greeted:
                scrape.sock.do_handshake()
                scrape.greeted = True
            if not scrape.answer.nbytes:
                self._read(scrape)
            if scrape.answer.nbytes:
                poll.modify(scrape.sock, select.POLLOUT)
                self._write(scrape)
        except BlockingIOError:
            return
        except ssl.SSLWantReadError:
            poll.modify(scrape.sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poll.modify(scrape.sock, select.POLLOUT)
        except OSError:
            scrape.over = True

    def _read(self, scrape: _Scrape) -> None:
        data = scrape.sock.recv(_HEAD_NBYTES_MAX)
        scrape.head += data
        if self._console is not None and _asks_for_console(scrape.head):
            scrape.is_consoles = scrape.over = True
        elif b"\r\n\r\n" in scrape.head:
            scrape.answer = memoryview(self._answer(scrape.head, Asker(scrape.peer, _names(scrape.sock))))
        elif not data or len(scrape.head) > _HEAD_NBYTES_MAX:
            scrape.over = True

    def _write(self, scrape: _Scrape) -> None:
        scrape.answer = scrape.answer[scrape.sock.send(scrape.answer) :]
        scrape.over = not scrape.answer.nbytes

    def _answer(self, head: bytes, asker: Asker) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        if method not in ("GET", "HEAD"):
            return _http("405 Method Not Allowed", "text/plain", b"GET or HEAD\n")
        if host_count(lines[1:]) > 1:
            return _http("400 Bad Request", "text/plain", f"{DUPLICATE_HOST}\n".encode())
        named = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, colon, value in named if colon}
        # Every browser sends a Host; a probe that speaks HTTP/1.0 may send none.
        if "host" in headers and not self._trusts_host(headers["host"]):
            return _http("403 Forbidden", "text/plain", f"{UNTRUSTED_HOST}\n".encode())
        if rest.partition(" ")[0] == HEALTH_PATH:
            return _health(self._serving())
        try:
            text = self._text(self._choose(headers, asker))
        except KVStoreError as error:
            more = "WWW-Authenticate: Bearer\r\n" if isinstance(error, Unauthenticated) else ""
            return _http(http_status(error), "text/plain", f"{error}\n".encode(), more)
        except Exception as error:
            log.exception("metrics: a scrape failed")
            why = f"it failed inside the node ({type(error).__name__}); its log says more\n"
            return _http("500 Internal Server Error", "text/plain", why.encode())
        return text[: text.index(b"\r\n\r\n") + 4] if method == "HEAD" else text

    def _text(self, answer: Answer) -> bytes:
        key = (answer.content_type, answer.scope)
        good_until, text = self._cached.get(key, (0.0, b""))
        began = time.monotonic()
        if began >= good_until:
            text = _http("200 OK", answer.content_type, answer.body())
            now = time.monotonic()
            if len(self._cached) >= _CACHED_MAX:
                self._cached.clear()
            self._cached[key] = (now + _AGE_FACTOR * (now - began), text)
        return text


def _asks_for_console(head: bytes) -> bool:
    """Its first line is enough, and the rest may be more than a scrape's."""
    line, end, _ = head.partition(b"\r\n")
    path = line.split(b" ")[1:2]
    return bool(end) and path != [] and (path[0] + b"/").startswith(f"{CONSOLE_PATH}/".encode())


def _names(sock: socket.socket) -> tuple[str, ...]:
    shown = shown_by(sock.getpeercert() or {}) if isinstance(sock, ssl.SSLSocket) else None
    return shown.names if shown else ()


def _health(serving: bool) -> bytes:
    if serving:
        return _http("200 OK", "text/plain", b"serving\n")
    return _http("503 Service Unavailable", "text/plain", b"not serving\n")


def _http(status: str, content_type: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.0 {status}\r\n{more}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
