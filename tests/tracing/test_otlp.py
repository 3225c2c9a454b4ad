"""A node with OpenTelemetry's exporters and a collector that takes spans, refuses them or hangs.

The exporters are not in our development environment, as they need a newer protobuf than our pin
(docs/decisions/0035).
"""

import concurrent.futures
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from traced_nodes import ask, traced_node

from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named

reason = (
    "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http "
    "opentelemetry-exporter-otlp-proto-grpc"
)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=reason)
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason=reason)
service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=reason
)

PROTOCOLS = ("http/protobuf", "grpc")
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
# The exporters wait up to ten minutes for the collector, and send spans after 10 ms
PATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_BSP_SCHEDULE_DELAY": "10"}


class Collector:
    """A collector that "takes" spans, "refuses" them or "hangs", as `manner` says."""

    def __init__(self, protocol: str, manner: str) -> None:
        self.manner = manner
        self.asked = threading.Event()
        self.ended = threading.Event()
        self.spans: list[tuple[str, str, str]] = []  # name, trace, service
        self._server = _http(self) if protocol == "http/protobuf" else _grpc(self)
        self.environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }

    def take(self, body: bytes) -> bool:
        self.asked.set()
        if self.manner == "hangs":
            self.ended.wait()
        if self.manner != "takes":
            return False
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            (of,) = [
                fact.value.string_value
                for fact in resource.resource.attributes
                if fact.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.spans += [(span.name, span.trace_id.hex(), of) for span in scope.spans]
        return True

    def close(self) -> None:
        self.ended.set()
        self._server.close()


class _Http(http.server.ThreadingHTTPServer):
    daemon_threads = True
    collector: Collector

    @property
    def port(self) -> int:
        return self.server_address[1]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Posts(http.server.BaseHTTPRequestHandler):
    server: _Http

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        taken = self.path == "/v1/traces" and self.server.collector.take(body)
        try:
            self.send_response(200 if taken else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:  # the node has ended meanwhile
            pass

    def log_message(self, *_: Any) -> None:
        return


def _http(collector: Collector) -> Any:
    server = _Http(("127.0.0.1", 0), _Posts)
    server.collector = collector
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _grpc(collector: Collector) -> Any:
    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        if not collector.take(body):
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return b""

    class Server:
        def __init__(self) -> None:
            method = grpc.unary_unary_rpc_method_handler(export)
            name, _, function = EXPORT.strip("/").partition("/")
            self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(name, {function: method}),)
            )
            self.port = self._server.add_insecure_port("127.0.0.1:0")
            self._server.start()

        def close(self) -> None:
            self._server.stop(None).wait()

    return Server()


@pytest.fixture
def collect() -> Iterator[Callable[..., Collector]]:
    collectors: list[Collector] = []

    def started(protocol: str, manner: str) -> Collector:
        collectors.append(Collector(protocol, manner))
        return collectors[-1]

    yield started
    for collector in collectors:
        collector.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def started(**environ: str) -> NodeProcess:
        nodes.append(traced_node(tmp_path, **environ))
        return nodes[-1]

    yield started
    for node in nodes:
        node.kill()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_of_a_node_reach_the_collector(
    start: Callable[..., NodeProcess], collect: Callable[..., Collector], protocol: str
) -> None:
    collector = collect(protocol, "takes")
    node = start(**collector.environ)
    ask(node, 700)
    assert node.stop() == 0
    assert (
        collector.spans.count(("kvstore.lookup", named("cmpl-7").request_id, "kvstore-node")) == 700
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("manner", ["refuses", "hangs"])
def test_refusing_or_hanging_collector_does_not_delay_a_node(
    start: Callable[..., NodeProcess], collect: Callable[..., Collector], protocol: str, manner: str
) -> None:
    collector = collect(protocol, manner)
    node = start(**collector.environ, **PATIENT)
    ask(node, 3000)
    assert collector.asked.wait(60.0)
    began = time.monotonic()
    assert node.stop(timeout_s=60.0) == 0
    print(f"{protocol} {manner}: ended after {time.monotonic() - began:.1f} s")
    assert "the last spans could not be sent" in node.log_text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_missing_collector_does_not_delay_a_node(
    start: Callable[..., NodeProcess], collect: Callable[..., Collector], protocol: str
) -> None:
    collector = collect(protocol, "takes")
    collector.close()
    node = start(**collector.environ, **PATIENT)
    ask(node, 3000)
    began = time.monotonic()
    assert node.stop(timeout_s=60.0) == 0
    print(f"{protocol} away: ended after {time.monotonic() - began:.1f} s")
