"""Answer queries over HTTP, in the shape of Mooncake's Conductor.

    POST /query           {"model", "block_size", "token_ids"}   -> {tenant: {instance: {...}}}
    POST /query_by_hash   {"model", "block_size", "seq_hashes"}     hashes in hex

The instance with the pool's name is the whole store; the others are its nodes, by address.
"""

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, ClassVar, NamedTuple

from kvstore.client import Client
from kvstore.errors import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    Unauthenticated,
    Unavailable,
)
from kvstore.log_rate import LogRate
from kvstore.results import HostBlocks, QueryResult
from kvstore.tools.prompts import Hashing, query_tokens

log = logging.getLogger(__name__)
log.addFilter(LogRate())

BODY_NBYTES_MAX = 4 << 20  # half a million tokens
DRAINED_NBYTES_MAX = 64 << 20
ANSWERS_MAX = 4  # requests that are parsed and answered at a time
CONNECTIONS_MAX = 64
REQUEST_S_MAX = 10.0  # for a request to come, and between two of a connection
_STATUS: dict[type[KVStoreError], HTTPStatus] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    Forbidden: HTTPStatus.FORBIDDEN,
    Unauthenticated: HTTPStatus.FORBIDDEN,
    Exhausted: HTTPStatus.SERVICE_UNAVAILABLE,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.SERVICE_UNAVAILABLE,
}
# They change the hashes in a way of the engine's own
_NOT_HASHED = ("lora_name", "lora_id", "cache_salt")


class Queries(NamedTuple):
    """Answers the requests. `tenant`: without `tenant_id`. `pool`: the store's name."""

    client: Client
    tenant: str
    pool: str
    hashing: Hashing = Hashing()

    def answer(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. Raises InvalidRequest, and the errors of the call."""
        model, tenant = _text(asked, "model"), _text(asked, "tenant_id", "") or self.tenant
        size = asked.get("block_size")
        if type(size) is not int or size < 1:
            raise InvalidRequest("block_size must be a positive number: tokens of a block")
        if path == "/query":
            given = [name for name in _NOT_HASHED if asked.get(name) not in (None, "", 0, -1)]
            if given:
                raise InvalidRequest(f"tokens with {given[0]} are not hashed here: send seq_hashes")
            tokens = _list(asked, "token_ids", int)
            found = []
            if len(tokens) >= size:  # a shorter prompt fills no block: a router's usual question
                found = query_tokens(self.client, model, tokens, size, self.hashing, tenant)
        else:
            name = "seq_hashes" if "seq_hashes" in asked else "block_hash"
            hashes = [_hash(text) for text in _list(asked, name, str)]
            found = self.client.query(model, hashes, tenant)
        kv = _text(asked, "kv", "")
        found = [
            result
            for result in found
            if result.model.page_tokens == size and result.model.id.hex().startswith(kv)
        ]
        return {tenant: self._instances(found, size, _text(asked, "instance_id", ""))}

    def _instances(self, found: Sequence[QueryResult], size: int, only: str) -> dict[str, Any]:
        longest: dict[str, HostBlocks] = {}
        for result in found:
            whole = HostBlocks(self.pool, result.blocks, result.ram, result.disk)
            for one in (whole, *result.hosts):
                if only in ("", one.host) and one.blocks:
                    longest[one.host] = max(longest.get(one.host, one), one, key=_blocks)
        return {
            name: {
                "longest_matched": one.blocks * size,
                "GPU": 0,
                "CPU": one.ram * size,
                "DISK": one.disk * size,
            }
            for name, one in longest.items()
        }


def _blocks(one: HostBlocks) -> int:
    return one.blocks


def _text(asked: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = asked.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text")
    return value


def _list(asked: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = asked.get(name)
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        what = "numbers" if kind is int else "text: whole hashes in hex digits"
        raise InvalidRequest(f"{name} must be a list of {what}")
    return values


def _hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequest(f"{text[:40]!r} is no hash in hex digits") from error


def _listen_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise ConfigError(f"{listen[:80]!r} is no address to listen at: [HOST:]PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


class _Timed(io.RawIOBase):
    """Reads from a socket until `end_s`, however steadily a client trickles."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.end_s = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come in time")
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a reply's body would wait for the ACK of its head: 40 ms
    server: "QueryServer"
    paths: ClassVar[tuple[str, ...]] = ("/query", "/query_by_hash")

    def setup(self) -> None:
        """Read with a time limit of the request."""
        super().setup()
        self._timed = _Timed(self.connection)
        self.rfile = io.BufferedReader(self._timed)

    def handle_one_request(self) -> None:
        """Read a request, and answer it."""
        self._timed.end_s = time.monotonic() + REQUEST_S_MAX
        super().handle_one_request()

    def do_POST(self) -> None:
        """Answer a query."""
        if self.path not in self.paths:
            return self._fail(HTTPStatus.NOT_FOUND, f"post to {' or '.join(self.paths)}")
        if "Origin" in self.headers:  # a page could read the answer by DNS rebinding
            return self._fail(HTTPStatus.FORBIDDEN, "pages in browsers may not ask")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            return self._fail(HTTPStatus.LENGTH_REQUIRED, "send Content-Length")
        if len(length) > 12 or int(length) > BODY_NBYTES_MAX:
            self._fail(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {BODY_NBYTES_MAX} bytes"
            )
            return self._skip(DRAINED_NBYTES_MAX if len(length) > 12 else int(length))
        try:
            body = self.rfile.read(int(length))
            with self.server.answers:
                asked = json.loads(body)
                if not isinstance(asked, dict):
                    raise InvalidRequest("the body must be a JSON object")
                answer = self.server.queries.answer(self.path, asked)
        except (ValueError, RecursionError) as error:
            return self._fail(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}")
        except KVStoreError as error:
            return self._fail(_STATUS.get(type(error), HTTPStatus.BAD_GATEWAY), str(error))
        self._send(HTTPStatus.OK, answer)

    def do_GET(self) -> None:
        """Say that queries are posted."""
        self._fail(HTTPStatus.NOT_FOUND, f"post to {' or '.join(self.paths)}")

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # the body may not have been read
        self._send(status, {"error": text})

    def _skip(self, nbytes: int) -> None:
        """Read what was refused: a close before that loses the reply."""
        left = min(nbytes, DRAINED_NBYTES_MAX)
        while left > 0 and (data := self.rfile.read1(min(left, 64 << 10))):
            left -= len(data)

    def _send(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.connection.settimeout(REQUEST_S_MAX)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing of a request."""


class QueryServer(ThreadingHTTPServer):
    """Listens, with a thread for each of at most 64 connections."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = CONNECTIONS_MAX  # whoever meets a full queue tries again after a second

    def __init__(self, listen: str, queries: Queries) -> None:
        """Listen at [HOST:]PORT, by default on this host only. Raises ConfigError."""
        self.queries = queries
        host, port = _listen_address(listen)
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.answers = threading.BoundedSemaphore(ANSWERS_MAX)
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"can not listen at {listen}: {error}") from error

    def start(self) -> str:
        """Serve in a thread; return the address."""
        threading.Thread(target=self.serve_forever, daemon=True, name="kvstore-http").start()
        host = str(self.server_address[0])
        return f"{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind without asking DNS for this host's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, or close it if there are too many."""
        if not self._places.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no more threads can be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a connection ended with, unless it left or was slow."""
        log.debug("a connection of %s ended", client_address, exc_info=True)
