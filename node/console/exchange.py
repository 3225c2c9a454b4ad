"""What a browser sends and is sent: one request and one answer a connection, all of HTTP that the console speaks."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstore.errors import InvalidRequest, KVStoreError
from node.serve.http_host import DUPLICATE_HOST, host_count
from node.serve.http_status import http_status

HEAD_NBYTES_MAX = 8 << 10
BODY_NBYTES_MAX = 4 << 10
# Only a script of the console's own origin can send it: a browser asks a server before it sends such a header for
# another site's page, and nobody here says yes.
OWN_HEADER = "x-kvstore-console"
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


class Request(NamedTuple):
    """`headers`: by name in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Work(NamedTuple):
    """An answer that takes a moment, for a thread beside: `do` is told how to find out that nobody waits any more.
    `reads`: from the disk, which may never answer; all else ends."""

    peer: str
    do: Callable[[Callable[[], bool]], bytes]
    reads: bool = False


class Watch(NamedTuple):
    """An answer that goes on: events, of which `begin` makes the first and `go_on` each later one; both raise
    KVStoreError when there are no more for him."""

    peer: str
    begin: Callable[[], bytes]
    go_on: Callable[[], bytes]


Answer = bytes | Work | Watch


class Refused(Exception):
    """What is no request for the console; `answer` says so."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.answer = reply("text/plain; charset=utf-8", f"{why}\n".encode(), status)


def parse(data: bytes) -> Request | None:
    """None: not all of it is there. Raises Refused."""
    head, end, body = data.partition(b"\r\n\r\n")
    if len(head) > HEAD_NBYTES_MAX:
        raise Refused("431 Request Header Fields Too Large", f"a head has {HEAD_NBYTES_MAX} bytes at most")
    if not end:
        return None
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused("400 Bad Request", "not a request of HTTP/1")
    if host_count(lines[1:]) > 1:
        raise Refused("400 Bad Request", DUPLICATE_HOST)
    named = (line.partition(":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, colon, value in named if colon}
    length = _length(headers)
    return Request(words[0], words[1], headers, body[:length]) if len(body) >= length else None


def _length(headers: Mapping[str, str]) -> int:
    """Of the body."""
    if "transfer-encoding" in headers:
        raise Refused("411 Length Required", "a body comes with its length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise Refused("400 Bad Request", "the length of the body is no number")
    if len(text) > 9 or int(text) > BODY_NBYTES_MAX:
        raise Refused("413 Content Too Large", f"a body has {BODY_NBYTES_MAX} bytes at most")
    return int(text)


def fields(request: Request) -> dict[str, Any]:
    """The object that its body is. Raises InvalidRequest."""
    try:
        values = json.loads(request.body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is no JSON") from error
    if not isinstance(values, dict):
        raise InvalidRequest("the body is no object of JSON")
    return values


def reply(content_type: str, body: bytes, status: str = "200 OK", more: Mapping[str, str] | None = None) -> bytes:
    return _head(status, {"Content-Type": content_type, "Content-Length": str(len(body)), **(more or {})}) + body


def json_reply(value: Any) -> bytes:
    return reply("application/json", json.dumps(value, allow_nan=False).encode())


def error_reply(error: KVStoreError) -> bytes:
    return reply("application/json", json.dumps({"error": str(error)}).encode(), http_status(error))


def stream_head() -> bytes:
    """Of an answer that ends with its connection."""
    return _head("200 OK", {"Content-Type": "text/event-stream"})


def event(name: str, data: str) -> bytes:
    """`data`: JSON, on one line."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def _head(status: str, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (_HEADERS | dict(headers)).items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode()
