"""Serve HTTP with the standard library's `http.server`, within limits.

Each connection has one thread and carries one request.

    accept ── slot ── thread ── TLS ── head ── body ── respond ── reply or event stream
             (limit)            └──── deadline ────┘             └── deadline ──┘

`ThreadingHTTPServer` starts a thread for every client that connects, and its timeouts are per
`recv`. Here connections are limited in total and per client, and each has deadlines that a
trickling client can not extend. `BaseHTTPRequestHandler` parses the requests.
"""

import contextlib
import http
import io
import ipaddress
import json
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from kvstore.errors import (
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from node.serving.connection import OUT_OF_DESCRIPTORS, SpareDescriptor
from node.serving.limits import (
    HTTP_CONNECTIONS_MAX,
    HTTP_REPLY_S_MAX,
    HTTP_REQUEST_S_MAX,
    ConnectionLimiter,
    ConnectionSlot,
    make_limit,
    peer_of,
)
from node.tls import Certificates, describe_certificate

log = logging.getLogger(__name__)

HEAD_NBYTES_MAX = 8 << 10
BODY_NBYTES_MAX = 4 << 10
BACKLOG = 1024  # a client that meets a full backlog retries after a second
STOP_S = 2.0  # for running requests at a stop
HURRIED_S = 0.25  # for a connection that the accepting thread serves
_DRAINED_NBYTES_MAX = 64 << 10
_DRAIN_S = 1.0

DUPLICATE_HOST = "a request must not have two Host headers"
UNTRUSTED_HOST = (
    "this node has no authentication and refuses this Host because of DNS rebinding: use "
    "its address, a name without a dot, or its name in the cluster"
)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
_STATUS: tuple[tuple[type[KVStoreError], int], ...] = (
    (Unauthenticated, 401),
    (Forbidden, 403),
    (UnknownNamespace, 404),
    (InvalidRequest, 400),
    (Exhausted, 429),
    (Unavailable, 503),
    (DeadlineExceeded, 504),
)


class HttpClient(NamedTuple):
    """The client of a request.

    `names` are those of its TLS certificate.
    """

    peer: str
    names: tuple[str, ...]


class Response(NamedTuple):
    """A whole reply."""

    content_type: str
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


class Disconnected(Exception):
    """The client left, was too slow, or was evicted for another one."""


class HttpConnection:
    """One accepted connection, used by its own thread.

    Other threads may only call `hang_up`. `end` is the deadline of the current request or reply.
    """

    def __init__(
        self, sock: socket.socket, peer: str, seconds: float, hurried: bool = False
    ) -> None:
        """Wrap an accepted socket; a `hurried` one is served briefly by the acceptor."""
        self.sock = sock
        self.peer = peer
        self.hurried = hurried
        self.end = time.monotonic() + seconds
        self.slot: ConnectionSlot | None = None
        self._lock = threading.Lock()
        self._closed = False

    def hang_up(self) -> None:
        """Make all waits of its thread fail at once.

        The socket stays open: its number could be another file's while the thread still uses it.
        """
        with self._lock, contextlib.suppress(OSError):
            if not self._closed:
                # Not the method of an SSLSocket, whose state only its thread may change.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            self.sock.close()
        if self.slot is not None:
            self.slot.close()
            # it refers to this object: a cycle would live until a garbage collection
            self.slot = None

    def has_head(self) -> bool:
        """Return whether a whole head has arrived already, without waiting."""
        if isinstance(self.sock, ssl.SSLSocket):
            return False
        with contextlib.suppress(OSError):
            return b"\r\n\r\n" in self.sock.recv(
                HEAD_NBYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        return False

    def handshake(self) -> HttpClient:
        """Do the TLS handshake if the node uses TLS, and return the client."""
        if not isinstance(self.sock, ssl.SSLSocket):
            return HttpClient(self.peer, ())
        with _disconnects():
            self._limit()
            self.sock.do_handshake()
        shown = describe_certificate(self.sock.getpeercert() or {})
        return HttpClient(self.peer, shown.names if shown else ())

    def receive(self) -> bytes:
        """Receive some bytes."""
        with _disconnects():
            self._limit()
            return self.sock.recv(HEAD_NBYTES_MAX)

    def receive_more(self) -> bytes:
        """Receive; raise Disconnected if the client sends no more."""
        data = self.receive()
        if not data:
            raise Disconnected("the connection was closed before the request was complete")
        return data

    def send(self, data: bytes, seconds: float) -> None:
        """Send all of `data` within this time."""
        self.end = time.monotonic() + seconds
        left = memoryview(data)
        with _disconnects():
            while left.nbytes:
                self._limit()
                left = left[self.sock.send(left) :]

    def start_stream(self, content_type: str, seconds: float) -> None:
        """Send the head of a reply that ends with its connection.

        A client that does not receive is disconnected after `seconds`.
        """
        with _disconnects():
            # The kernel would buffer hours of small events for a client that is gone silently.
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        self.send(_head(200, {"Content-Type": content_type}), seconds)

    def wait(self, seconds: float) -> bool:
        """Return True after `seconds`, or False as soon as the client has left or the server stops.

        A client has nothing to send after its request, so any event of its socket is its end.
        """
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(seconds * 1000)

    def has_left(self) -> bool:
        """Return whether the client has gone."""
        return not self.wait(0.0)

    def drain(self) -> None:
        """Receive the rest of a refused request.

        A close with unread bytes would reset the connection, and the client would not see the
        reply.
        """
        with _disconnects():
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
        self.end = time.monotonic() + _DRAIN_S
        left = _DRAINED_NBYTES_MAX
        while left > 0 and (data := self.receive()):
            left -= len(data)

    def _limit(self) -> None:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the connection's time is over")
        self.sock.settimeout(left_s)


@dataclass(frozen=True)
class Request:
    """A request. `headers` have their names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    client: HttpClient
    connection: HttpConnection = field(repr=False)


# Returns the reply, or None if it has sent one itself, as a stream. Raises KVStoreError.
Respond = Callable[[Request], Response | None]


class _Handler(BaseHTTPRequestHandler):
    """One request and its reply.

    The whole head has arrived before any of it is parsed.
    """

    protocol_version = "HTTP/1.1"
    request: HttpConnection
    server: "HttpServer"  # type: ignore[assignment]

    def setup(self) -> None:
        self.refusal = text("not a request of HTTP/1", 400)

    def finish(self) -> None:
        """Do nothing: the server closes the connection."""

    def handle(self) -> None:
        connection = self.request
        client = connection.handshake()
        data = b""
        while b"\r\n\r\n" not in data and len(data) <= HEAD_NBYTES_MAX:
            data += connection.receive_more()
        head, end, body = data.partition(b"\r\n\r\n")
        with self.server.parsing:
            length = self._parse(head + end)
        if length is None:
            connection.send(_message(self.refusal, self.command != "HEAD"), HTTP_REPLY_S_MAX)
            connection.drain()
            return
        while len(body) < length:
            body += connection.receive_more()
        headers = {name.lower(): value.strip() for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body[:length], client, connection)
        if connection.slot is not None:
            connection.slot.busy()
        response = self.server.answer(request)
        if connection.slot is not None:
            connection.slot.idle()  # a client that receives its reply slowly may be evicted
        if response is not None:
            connection.send(_message(response, self.command != "HEAD"), HTTP_REPLY_S_MAX)

    def _parse(self, head: bytes) -> int | None:
        """Return the length of the body, or None if the request is refused."""
        self.command = ""
        if len(head) > HEAD_NBYTES_MAX or not head.endswith(b"\r\n\r\n"):
            self._refuse(431, f"the request headers exceed {HEAD_NBYTES_MAX} bytes")
            return None
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return None
        # The parser takes the rest of a head for a body after a line that is no header, such as
        # "Host : a". Some proxies accept such a line, so it could hide a Host from the check below
        # (RFC 9112, 5.1).
        if self.request_version == "HTTP/0.9" or self.headers.defects or self.headers.get_payload():
            return None
        hosts = self.headers.get_all("Host", [])
        if len(hosts) > 1:
            self._refuse(400, DUPLICATE_HOST)
            return None
        # Every browser sends a Host; a probe that speaks HTTP/1.0 may send none.
        if hosts and not self.server.trusts_host(hosts[0].strip()):
            self._refuse(403, UNTRUSTED_HOST)
            return None
        return self._body_length()

    def _body_length(self) -> int | None:
        if "Transfer-Encoding" in self.headers:
            self._refuse(411, "a body needs a Content-Length")
            return None
        lengths = self.headers.get_all("Content-Length", ["0"])
        length = lengths[0].strip()
        if len(lengths) > 1 or not (length.isascii() and length.isdigit()):
            self._refuse(400, "the Content-Length is invalid")
            return None
        if len(length) > 9 or int(length) > BODY_NBYTES_MAX:
            self._refuse(413, f"the body exceeds {BODY_NBYTES_MAX} bytes")
            return None
        return int(length)

    def _refuse(self, status: int, why: str) -> None:
        self.refusal = text(why, status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error page without the parser's message, which would repeat the client's text."""
        self._refuse(int(code), http.HTTPStatus(code).phrase)

    def handle_expect_100(self) -> bool:
        """Send no interim reply.

        A body is so small that clients rarely ask.
        """
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: clients choose how often they send requests."""


class HttpServer:
    """The server: it binds in the constructor and serves from then on.

    `stop` ends everything.
    """

    def __init__(
        self,
        host: str,
        port: int,
        respond: Respond,
        certificates: Certificates | None = None,
        trusts_host: Callable[[str], bool] = lambda host: True,
    ) -> None:
        """Listen. Without `certificates` it serves HTTP; `trusts_host` decides on Host headers."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.trusts_host = trusts_host
        # One thread at a time parses, so that many clients get no more of the GIL than one.
        self.parsing = threading.Lock()
        self._respond = respond
        self._certificates = certificates
        self._limiter = ConnectionLimiter(
            make_limit(
                "HTTP connections", HTTP_CONNECTIONS_MAX, "close some pages, or scrape less often"
            )
        )
        self._spare = SpareDescriptor()
        # Needs no descriptor, and waits where `accept` would fail for lack of one.
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._lock = threading.Lock()
        self._threads: dict[HttpConnection, threading.Thread] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and all connections."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._lock:
            threads = dict(self._threads)
        for connection in threads:
            connection.hang_up()
        end = time.monotonic() + STOP_S
        for thread in threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()
        self._spare.close()

    def answer(self, request: Request) -> Response | None:
        """Return the reply to a request, also after any error."""
        try:
            return self._respond(request)
        except KVStoreError as error:
            more = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
            return text(str(error), http_status(error))._replace(headers=more)
        except Disconnected:
            raise
        except Exception as error:
            log.exception("HTTP: a request failed")
            return text(
                f"it failed inside the node ({type(error).__name__}); its log says more", 500
            )

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._poll.poll()
                self._accept()
            except Exception:
                log.exception("HTTP: accepting failed")
                threading.Event().wait(0.1)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                self._serve_without_descriptor()
            return
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            greeted = self._in_tls(sock)  # fails if the client sent no TLS and left
            undo.pop_all()
            self._admit(HttpConnection(greeted, peer_of(address[0]), HTTP_REQUEST_S_MAX))

    def _serve_without_descriptor(self) -> None:
        """Serve one connection with the descriptor in reserve.

        When no descriptor is left, an operator needs the metrics.
        """
        with self._spare.lent(), contextlib.suppress(OSError):
            sock, address = self._listener.accept()
            self._serve(
                HttpConnection(self._in_tls(sock), peer_of(address[0]), HURRIED_S, hurried=True)
            )

    def _in_tls(self, sock: socket.socket) -> socket.socket:
        if self._certificates is None:
            return sock
        context = self._certificates.context
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _admit(self, connection: HttpConnection) -> None:
        try:
            connection.slot = self._limiter.enter(connection.peer, connection.hang_up)
        except Exhausted:
            connection.close()
            return
        # Idle connections are evicted, the oldest first. One whose head has arrived is answered
        # first.
        if not connection.has_head():
            connection.slot.idle()
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="http-request", daemon=True
        )
        with self._lock:
            self._threads[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # this process can start no more threads: metrics show that
            connection.hurried, connection.end = True, time.monotonic() + HURRIED_S
            self._serve(connection)

    def _serve(self, connection: HttpConnection) -> None:
        try:
            _Handler(connection, (connection.peer, 0), self)  # type: ignore[arg-type]
        except Disconnected:
            pass
        except Exception:
            log.exception("HTTP: a connection failed")
        finally:
            connection.close()
            with self._lock:
                self._threads.pop(connection, None)


@contextlib.contextmanager
def _disconnects() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # TLS raises ValueError for a socket that was shut down
        raise Disconnected(str(error)) from None


def text(message: str, status: int = 200) -> Response:
    """Build a text response."""
    return Response("text/plain; charset=utf-8", f"{message}\n".encode(), status)


def json_response(value: Any, status: int = 200) -> Response:
    """Build a JSON response."""
    return Response("application/json", json.dumps(value, allow_nan=False).encode(), status)


def http_status(error: KVStoreError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def is_trusted_host(host: str, own: Collection[str]) -> bool:
    """Return whether a Host header cannot be another site's name (DNS rebinding).

    Trusted are addresses, names without a dot, and the node's own names.
    """
    if host.startswith("["):
        return host.partition("]")[0][1:].count(":") > 1
    name = host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name in own)
    return True


def _message(response: Response, with_body: bool) -> bytes:
    headers = {"Content-Type": response.content_type, "Content-Length": str(len(response.body))}
    head = _head(response.status, headers | dict(response.headers))
    return head + response.body if with_body else head


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (_HEADERS | dict(headers)).items())
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n{lines}\r\n".encode()
