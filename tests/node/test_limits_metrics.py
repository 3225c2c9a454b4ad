"""The metrics server: few connections, time limits, and service without descriptors or threads."""

import contextlib
import errno
import http.client
import os
import pathlib
import resource
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from known_pages import Pages
from local_nodes import connect
from waiting import wait_until

from kvstore import Client, ClientConfig, Exhausted, KVStoreError, Unavailable
from kvstore.tools.node_process import NodeProcess
from node.server import DESCRIPTORS_OF_SESSION, Node
from node.serving.acceptor import DESCRIPTORS_LEFT_MIN
from node.serving.gateway import connections_max
from node.serving.http_server import HEAD_NBYTES_MAX, HttpClient
from node.serving.limits import HTTP_CONNECTIONS_MAX, HTTP_REQUEST_S_MAX, REQUEST_S_MAX
from node.serving.metrics import _CACHED_MAX, Answer, MetricsServer

T = TypeVar("T")


@pytest.fixture
def dial() -> Iterator[Callable[[int], socket.socket]]:
    sockets: list[socket.socket] = []

    def to(port: int) -> socket.socket:
        sockets.append(socket.create_connection(("127.0.0.1", port), 20.0))
        return sockets[-1]

    yield to
    for sock in sockets:
        sock.close()


def scrape(port: int, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request(method, "/metrics")
        reply = connection.getresponse()
        return reply.status, reply.getheader("Content-Type") or "", reply.read()
    finally:
        connection.close()


def trickle(sock: socket.socket, data: bytes, pause_s: float) -> None:
    for _ in range(400):
        sock.sendall(data)
        threading.Event().wait(pause_s)


def test_silent_scrapes_use_few_threads_and_do_not_block_others(
    node: Node, dial: Callable[[int], socket.socket]
) -> None:
    before = threading.active_count()
    for _ in range(60):
        dial(node.metrics.port).sendall(b"GET /metrics HT")
        threading.Event().wait(0.001)  # lets the listener accept; a full backlog costs a second
    status, content_type, text = scrape(node.metrics.port)
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    assert b"kvstore_serving 1.0" in text
    share = HTTP_CONNECTIONS_MAX // 2  # the other connections were closed
    wait_until(lambda: len(node.metrics._threads) <= share)
    wait_until(lambda: threading.active_count() <= before + share)


def test_scrape_without_end_is_closed(
    node: Node, dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 0.3)
    silent, trickling = dial(node.metrics.port), dial(node.metrics.port)
    assert silent.recv(1) == b""
    with pytest.raises(ConnectionError):
        trickle(trickling, b"x", 0.05)


def test_metrics_request_cut_in_its_head_is_closed_at_once(
    node: Node, dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server must not read again and again from a connection that has ended."""
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 3600.0)
    half = dial(node.metrics.port)
    half.sendall(b"GET /metr")
    half.shutdown(socket.SHUT_WR)
    assert half.recv(1) == b""


def test_every_http_request_returns_its_connection_slot(node: Node) -> None:
    for path in ("/metrics", "/health", "/console/"):
        with urllib.request.urlopen(
            f"http://127.0.0.1:{node.metrics.port}{path}", timeout=20.0
        ) as reply:
            reply.read()
    wait_until(lambda: not node.metrics._limiter.count)


def test_cached_texts_are_limited_and_head_has_no_body(node: Node) -> None:
    for scope in range(3 * _CACHED_MAX):
        node.metrics._text(Answer("text/plain", scope, lambda: b"of his"))
        assert len(node.metrics._cached) <= _CACHED_MAX
    node.metrics._cached.clear()
    with socket.create_connection(("127.0.0.1", node.metrics.port), 20.0) as sock:
        sock.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
        with sock.makefile("rb") as replied_head:
            assert replied_head.read().endswith(b"\r\n\r\n"), "a reply to HEAD must have no body"


def test_long_head_and_other_methods_are_refused(
    node: Node, dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.http_server.HTTP_REQUEST_S_MAX", 60.0)
    long = dial(node.metrics.port)
    long.sendall(b"x" * (HEAD_NBYTES_MAX + 1))
    assert long.recv(100).startswith(b"HTTP/1.1 431 ")
    with pytest.raises(ConnectionError):
        trickle(long, b"x" * 1000, 0.01)
    assert scrape(node.metrics.port, "POST")[0] == 405
    status, _, text = scrape(node.metrics.port, "HEAD")
    assert (status, text) == (200, b"")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /health", 400),
        ("GET /health HTTP/2.0", 505),
        ("GET /health a HTTP/1.1", 400),
        ("", 400),
        ("GET /health HTTP/1.1\r\nno header", 400),
        ("GET /health HTTP/1.1\r\n a: b", 400),
        ("GET /health HTTP/1.1" + 101 * "\r\na: b", 431),
        ("GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        ("GET /health HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        ("PUT /health HTTP/1.1", 405),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/1.1\r\nExpect: 100-continue", 200),
    ],
)
def test_malformed_request_gets_one_reply_and_ends(
    node: Node, dial: Callable[[int], socket.socket], request_: str, status: int
) -> None:
    sock = dial(node.metrics.port)
    sock.sendall(f"{request_}\r\n\r\n".encode())
    with sock.makefile("rb") as replied:
        reply = replied.read()
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert reply.count(b"HTTP/1.1") == 1


def test_accept_versions_share_two_cached_texts(node: Node) -> None:
    """Regression: each version made a text of its own, which stayed in memory."""
    for kind in ("text/plain", "application/openmetrics-text"):
        for number in range(8):
            accept = f"{kind}; version=1.{number}.0; escaping=values"
            request = urllib.request.Request(
                f"http://127.0.0.1:{node.metrics.port}/metrics", headers={"Accept": accept}
            )
            with urllib.request.urlopen(request, timeout=10.0) as reply:
                assert reply.headers["Content-Type"].startswith(kind)
                assert b"kvstore_serving 1" in reply.read()
    assert len(node.metrics._cached) == 2


def test_frequent_scrapes_share_a_cached_text(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of many namespaces takes tens of milliseconds, in which no other Python code
    runs.
    """
    made = []
    choose = node.metrics._choose

    def slowly(headers: Any, asker: HttpClient) -> Answer:
        def body() -> bytes:
            made.append(1)
            threading.Event().wait(0.1)
            return b"text\n"

        return choose(headers, asker)._replace(body=body)

    monkeypatch.setattr(node.metrics, "_choose", slowly)
    node.metrics._cached.clear()
    began = time.monotonic()
    while time.monotonic() < began + 0.4:
        assert scrape(node.metrics.port)[2] == b"text\n"
    assert len(made) <= 1 + (time.monotonic() - began) / 1.0


class Idle(MetricsServer):
    """A metrics server that accepts only when its test calls `_accept`."""

    def _run(self) -> None: ...


def idle() -> Idle:
    return Idle(
        "127.0.0.1",
        0,
        lambda headers, asker: Answer("text/plain", 0, lambda: b"text"),
        lambda: True,
    )


def test_probe_amid_many_connections_is_answered(
    dial: Callable[[int], socket.socket],
) -> None:
    """Regression: a kubelet's probe met a full backlog, waited a second for each packet, and was
    closed as the oldest of its host before its request was read.
    """
    server = idle()
    silent = [dial(server.port) for _ in range(2 * HTTP_CONNECTIONS_MAX)]
    probe = dial(server.port)
    probe.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    silent += [dial(server.port) for _ in range(2 * HTTP_CONNECTIONS_MAX)]
    for _ in range(len(silent) + 1):
        server._accept()
    assert probe.recv(100).startswith(b"HTTP/1.1 200 ")
    # Evicted connections have ended
    wait_until(lambda: len(server._threads) <= HTTP_CONNECTIONS_MAX // 2)
    server.stop()


@pytest.mark.parametrize(
    ("error", "status"),
    [(Exhausted("not so often"), 429), (Unavailable("it stops"), 503), (ZeroDivisionError(), 500)],
)
def test_failing_metrics_text_fails_one_scrape_only(
    dial: Callable[[int], socket.socket],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
) -> None:
    """Regression: a scrape of a tenant over its request quota got no reply, and delayed all others
    by 0.1 s, also probes.
    """

    def body() -> bytes:
        raise error

    server = MetricsServer(
        "127.0.0.1", 0, lambda headers, asker: Answer("text/plain", 0, body), lambda: True
    )
    found, _, text = scrape(server.port)
    assert found == status
    assert text.strip()
    assert "a connection failed" not in caplog.text
    assert ("a request failed" in caplog.text) == (status == 500)
    server.stop()


def test_scrape_without_a_free_descriptor_is_answered(
    dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, accept = [OSError(errno.EMFILE, "no descriptor left")], socket.socket.accept

    def fail_once(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    server = idle()
    waiting = dial(server.port)
    waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    server._accept()
    assert waiting.recv(1 << 16).endswith(b"text")
    server.stop()


def test_scrape_without_a_free_thread_is_answered(
    dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = idle()
    waiting = dial(server.port)
    waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    monkeypatch.setattr(threading.Thread, "start", fail)
    server._accept()
    assert waiting.recv(1 << 16).endswith(b"text")
    silent = dial(server.port)
    began = time.monotonic()
    server._accept()
    assert time.monotonic() - began < HTTP_REQUEST_S_MAX / 2, (
        "a silent connection must get a short time only"
    )
    assert silent.recv(1) == b""
    assert not server._threads
    server.stop()


def test_slow_metrics_reader_has_a_total_deadline(
    dial: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads a few bytes now and then cannot keep its connection for ever."""
    monkeypatch.setattr("node.serving.http_server.HTTP_REPLY_S_MAX", 0.5)
    large = Answer("text/plain", 0, lambda: bytes(64 << 20))
    server = MetricsServer("127.0.0.1", 0, lambda headers, asker: large, lambda: True)
    slow = dial(server.port)
    slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    taken = 0
    with contextlib.suppress(ConnectionError):
        while some := slow.recv(64 << 10):
            taken += len(some)
            threading.Event().wait(0.02)
    assert taken < 64 << 20, "the reply was sent whole"
    wait_until(lambda: not server._threads)
    server.stop()


def test_node_raises_its_descriptor_limit(tmp_path: pathlib.Path) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -Sn 64\nexec {sys.executable} "$@"\n')
    limited.chmod(0o700)
    flags = (
        "--ram-bytes",
        "1MiB",
        "--sessions-max",
        "100",
        "--grpc-threads",
        "8",
        "--grpc-processes",
        "2",
    )
    with NodeProcess(*flags, python=str(limited)) as process:
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 64 + 100 * DESCRIPTORS_OF_SESSION + 2 * connections_max(8))


@pytest.fixture
def starved_node() -> Iterator[NodeProcess]:
    """Start a node that may open only 60 descriptors more than it has."""
    process = NodeProcess("--ram-bytes", "16MiB", "--stall-s", "5", "--log-level", "ERROR")
    with connect(process.address, "auto") as client:
        client.node_status()
    allowed = max(int(name) for name in os.listdir(f"/proc/{process.pid}/fd")) + 60
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (allowed, allowed))
    yield process
    process.kill()


def cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def soon(call: Callable[[], T]) -> T:
    """Repeat the call until it succeeds, which it does once silent connections are evicted."""
    end = time.monotonic() + 60.0
    while True:
        try:
            return call()
        except KVStoreError:
            assert time.monotonic() < end
            threading.Event().wait(0.2)


def test_node_without_descriptors_evicts_connections_and_serves(
    starved_node: NodeProcess, dial: Callable[[int], socket.socket], pages: Pages
) -> None:
    """Regression: connections waited, acceptors used a whole core, metrics and health did not
    answer.
    """
    with Client(
        ClientConfig(
            address=starved_node.address, wire="bulk", timeout_s=60.0, connect_timeout_s=30.0
        )
    ) as known:
        assert pages.put(known, pages.keys(1))
        host, _, port = starved_node.address.rpartition(":")
        for where in [starved_node.bulk_port, int(port)] * 100:
            dial(where)
        before, began = cpu_s(starved_node.pid), time.monotonic()
        status = soon(
            known.node_status
        )  # its connection may have been evicted after the silent ones
        assert status.state == "SERVING"
        assert pages.get(known, pages.keys(1)) == [True]
        assert scrape(status.metrics_port)[0] == 200
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest(), timeout=15.0, wait_for_ready=True).status
        threading.Event().wait(1.0)
        assert cpu_s(starved_node.pid) - before < 0.5 * (time.monotonic() - began)

    def late() -> list[bool]:
        with Client(
            ClientConfig(address=starved_node.address, wire="bulk", connect_timeout_s=0.5)
        ) as late:
            found: list[bool] = pages.get(late, pages.keys(1))
            return found

    assert soon(late) == [True]


def test_silent_connections_leave_descriptors_to_others(
    starved_node: NodeProcess, dial: Callable[[int], socket.socket]
) -> None:
    """Regression: one descriptor was left, as a connection that reused a low number counted as if
    all higher ones were free.
    """
    (_, allowed), end = (
        resource.prlimit(starved_node.pid, resource.RLIMIT_NOFILE),
        time.monotonic() + 0.8 * REQUEST_S_MAX,
    )
    for _ in range(100):
        dial(starved_node.bulk_port)
    with Client(
        ClientConfig(
            address=starved_node.address, wire="bulk", timeout_s=60.0, connect_timeout_s=30.0
        )
    ) as late:
        assert late.node_status().session_count
    while allowed - len(os.listdir(f"/proc/{starved_node.pid}/fd")) < DESCRIPTORS_LEFT_MIN // 2:
        assert time.monotonic() < end, "all descriptors are taken"
        threading.Event().wait(0.05)
