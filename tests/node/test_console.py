"""The console's HTTP server: what it serves, what it refuses, and slow or silent clients."""

import gc
import http.client
import socket
import threading
import urllib.request
import weakref
from typing import Any

import pytest
from local_nodes import StartNode
from visits import OWN, connection, console_of, first, told, visit
from waiting import wait_until

from kvstore.config import split_address
from node.cluster.membership import with_port
from node.console.console import NAMES
from node.server import Node
from node.serving import http_server
from node.serving.http_server import (
    BODY_NBYTES_MAX,
    HEAD_NBYTES_MAX,
    POLICY,
    Response,
    is_trusted_host,
    json_response,
)
from node.serving.limits import CONSOLE_CALLS_MAX, HTTP_CONNECTIONS_MAX

pytestmark = pytest.mark.usefixtures("nothing_is_left_at_the_console")


def test_console_files_come_from_the_node_with_a_strict_policy(node: Node) -> None:
    status, headers, page = visit(node, "/console/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for name in NAMES[1:]:
        status, headers, body = visit(node, f"/console/{name}")
        assert (status, headers["Content-Security-Policy"], len(body)) == (
            200,
            POLICY,
            int(headers["Content-Length"]),
        )
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in body
    assert b"<script>" not in page
    assert b" style=" not in page
    assert b" onclick=" not in page
    assert "unsafe" not in POLICY


def test_console_paths_are_exact_and_metrics_stay(node: Node) -> None:
    assert visit(node, "/console")[0:1] == (308,)
    status, headers, _ = visit(node, "/")
    assert (status, headers["Location"]) == (302, "console/")
    for path in (
        "/console/x",
        "/console/page.html",
        "/console//",
        "/console/../metrics",
        "/console/?a=1",
    ):
        assert visit(node, path)[0] == 404, path
    assert visit(node, "/console/", method="POST")[0] == 405
    assert visit(node, "/console/style.css", method="HEAD")[0] == 405
    assert b"kvstore_serving" in visit(node, "/metrics")[2]
    assert visit(node, "/health")[0] == 200


def test_node_without_a_console_serves_metrics_on_its_paths(start_node: StartNode) -> None:
    node = start_node(console="off")
    for path in ("/console/", "/"):
        assert b"kvstore_serving" in visit(node, path)[2]


def test_console_calls_need_the_header_of_its_script(node: Node) -> None:
    """On a node without authentication another site's page could otherwise act for its visitor."""
    for path in ("events", "look-up", "bytes", "act"):
        status, headers, _ = visit(node, f"/console/{path}", method="POST")
        assert (status, headers["Access-Control-Allow-Origin"]) == (403, None), path
        assert visit(node, f"/console/{path}", {}, method="GET")[0] == 405
        assert visit(node, f"/console/{path}", method="OPTIONS")[0] == 405


def test_console_refuses_unknown_host_names(node: Node) -> None:
    assert visit(node, "/console/", Host="kvstore.example.com:7442")[0] == 403
    assert visit(node, "/console/act", {"act": "flush"}, Host="rebound.example.com")[0] == 403
    for host in ("127.0.0.1:7442", "localhost", "node:7442", "[::1]:7442", "10.0.0.7"):
        assert visit(node, "/console/", Host=host)[0] == 200, host
    assert is_trusted_host("node7.example.com:7442", ["node7.example.com"])
    assert not is_trusted_host("", [])
    assert not is_trusted_host("[evil.example.com]", [])


def test_console_request_too_long_is_refused(node: Node) -> None:
    assert visit(node, "/console/look-up", b"x" * (BODY_NBYTES_MAX + 1))[0] == 413
    assert visit(node, "/console/", X_Long="x" * HEAD_NBYTES_MAX)[0] == 431
    assert visit(node, "/console/look-up", b"{" * BODY_NBYTES_MAX)[0] == 400
    assert visit(node, "/console/look-up", b"[1]")[0] == 400
    assert visit(node, "/console/look-up", {}, Transfer_Encoding="chunked")[0] == 411
    for length in ("-1", "x", "9" * 30):
        there = connection(node)
        there.putrequest("POST", "/console/look-up")
        there.putheader("Content-Length", length)
        there.endheaders()
        assert there.getresponse().status in (400, 413), length
        there.close()


def test_console_request_in_pieces_is_answered(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.metrics.port), 20.0) as sock:
        text = (
            "POST /console/look-up HTTP/1.1\r\nHost: localhost\r\nX-KVStore-Console: "
            "1\r\nContent-Length: 2\r\n\r\n{}"
        )
        for byte in text.encode():
            sock.sendall(bytes((byte,)))
            threading.Event().wait(0.0005)
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


def test_console_request_without_end_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 0.3)
    with socket.create_connection(("127.0.0.1", node.metrics.port), 20.0) as sock:
        sock.sendall(b"GET /console/ HTTP/1.1\r\nX: ")
        assert sock.recv(1) == b""


def test_silent_connections_are_evicted_and_metrics_still_work(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 600.0)
    silent = []
    for _ in range(HTTP_CONNECTIONS_MAX):
        silent.append(socket.create_connection(("127.0.0.1", node.metrics.port), 20.0))
        silent[-1].sendall(b"GET /console/ HTTP/1.1\r\n")
    wait_until(lambda: node.metrics._limiter.count == HTTP_CONNECTIONS_MAX // 2)
    assert visit(node, "/console/")[0] == 200
    assert b"kvstore_serving" in visit(node, "/metrics")[2]
    wait_until(
        lambda: len(node.metrics._threads) <= HTTP_CONNECTIONS_MAX // 2
    )  # the limit of one peer
    for sock in silent:
        sock.close()


# ---- watchers --------------------------------------------------------------------------------


def test_console_without_viewers_has_no_thread_and_stops_with_the_node(
    start_node: StartNode,
) -> None:
    node: Node = start_node()
    console = console_of(node)
    visit(node, "/metrics")
    assert not console._pool._threads
    wait_until(lambda: not node.metrics._threads)
    replies = []
    for there in [connection(node) for _ in range(2)]:
        there.request("POST", "/console/events", b"{}", OWN)
        replies.append(there.getresponse())
        assert replies[-1].readline() == b"event: now\n"
    threads = list(node.metrics._threads.values())
    assert len(threads) == 2
    node.metrics.stop()
    assert not any(thread.is_alive() for thread in threads)
    for reply in replies:
        reply.close()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        visit(node, "/console/")


def test_parallel_lookups_are_limited_per_peer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    go, share = threading.Event(), CONSOLE_CALLS_MAX // 2

    def wait(*_: Any) -> Response:
        go.wait(30.0)
        return json_response({})

    assert node.console is not None
    monkeypatch.setitem(node.console._work, "/console/look-up", wait)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(visit(node, "/console/look-up", {})[0]))
        for _ in range(share)
    ]
    for thread in threads:
        thread.start()
    console = console_of(node)
    wait_until(lambda: console.calls.used == share)
    status, values = told(node, "/console/look-up", {})
    assert status == 429
    assert "console calls" in values["error"]
    go.set()
    for thread in threads:
        thread.join()
    assert found == [200] * share


def test_closed_console_connection_leaves_no_garbage(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: replies of megabytes stayed in memory until the garbage collector ran, which is
    rare.
    """
    met: list[weakref.ref[Any]] = []

    def noted(kind: Any) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            one = kind(*arguments, **named)
            met.append(weakref.ref(one))
            return one

        return make

    monkeypatch.setattr(http_server, "HttpConnection", noted(http_server.HttpConnection))
    monkeypatch.setattr(http_server, "Request", noted(http_server.Request))
    gc.disable()
    try:
        assert [
            visit(node, path)[0] for path in ("/metrics", "/health", "/console/", "/console/x")
        ] == [200] * 3 + [404]
        assert told(node, "/console/look-up", {})[0] == 400
        first(node)
        wait_until(lambda: not any(one() for one in met))
    finally:
        gc.enable()
    assert len(met) == 6 + 6, "expected six connections and six requests"


def test_hanging_reads_do_not_block_lookups_and_actions(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two reads of pages on a hanging disk took both console threads."""
    go, share = threading.Event(), CONSOLE_CALLS_MAX // 2

    def wait(*_: Any) -> Response:
        go.wait(60.0)
        return json_response({})

    assert node.console is not None
    monkeypatch.setitem(node.console._work, "/console/bytes", wait)
    threads = [
        threading.Thread(target=lambda: visit(node, "/console/bytes", {})) for _ in range(share)
    ]
    for thread in threads:
        thread.start()
    console = console_of(node)
    wait_until(lambda: console.reads.used == share)
    assert told(node, "/console/look-up", {"namespace": "ab" * 16, "key": "abcd"})[0] == 404
    assert told(node, "/console/act", {"act": "flush"})[0] == 400, "this node has no disk"
    assert told(node, "/console/bytes", {})[0] == 429
    go.set()
    for thread in threads:
        thread.join()


def test_console_fault_is_logged_and_ends_one_call(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Response:
        raise ZeroDivisionError

    assert node.console is not None
    monkeypatch.setitem(node.console._work, "/console/look-up", broken)
    status, values = told(node, "/console/look-up", {})
    assert status == 500
    assert "ZeroDivisionError" in values["error"]
    assert "console: a call failed" in caplog.text
    monkeypatch.undo()
    assert (
        urllib.request.urlopen(
            f"http://127.0.0.1:{node.metrics.port}/console/", timeout=20.0
        ).status
        == 200
    )


@pytest.mark.parametrize(
    ("advertised", "host"),
    [
        ("node.example", "node.example"),
        ("node.example:7441", "node.example"),
        ("10.0.0.5", "10.0.0.5"),
        ("2001:db8::5", "2001:db8::5"),
        ("[2001:db8::5]:7441", "2001:db8::5"),
    ],
)
def test_advertised_address_needs_no_port(advertised: str, host: str) -> None:
    """Regression: a node with a console did not start when its advertised address had no port."""
    assert split_address(with_port(advertised, 7440))[0] == host
