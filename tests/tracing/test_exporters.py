"""A hanging or broken span exporter neither delays nor stops a node; one that can not be created
fails its start.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from traced_nodes import ask, traced_node

from kvstore import otel, tracing
from kvstore.errors import ConfigError, Unavailable
from kvstore.tools.node_process import NodeProcess
from kvstore.tracing import named

pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")

# A small queue, so that 17 spans that wait for the exporter overflow it
SMALL = {
    "OTEL_BSP_SCHEDULE_DELAY": "10",
    "OTEL_BSP_MAX_QUEUE_SIZE": "16",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
}
CODE = """
import os, threading
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

class Exporter(SpanExporter):
    def __init__(self):
        if os.environ["EXPORTER_IS"] == "unusable":
            raise FileNotFoundError("no such certificate")

    def export(self, spans):
        is_ = os.environ["EXPORTER_IS"]
        if is_ == "hanging":
            threading.Event().wait()
        if is_ == "broken":
            raise RuntimeError("the collector is on fire")
        with open(os.environ["EXPORTER_FILE"], "a") as file:
            for span in spans:
                service = span.resource.attributes['service.name']
                file.write(f"{span.name} {span.context.trace_id:032x} {service}\\n")
        return SpanExportResult.SUCCESS
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Return a folder with an installed exporter, under several names."""
    (tmp_path / "of_the_tests.py").write_text(CODE)
    facts = tmp_path / "of_the_tests-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-tests\nVersion: 1\n")
    names = ("of_the_tests", "otlp_proto_grpc", "otlp_proto_http")
    points = "".join(f"{name} = of_the_tests:Exporter\n" for name in names)
    (facts / "entry_points.txt").write_text(f"[opentelemetry_traces_exporter]\n{points}")
    return tmp_path


@pytest.fixture
def start(modules: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Yield a function that starts a node whose exporter behaves as its first argument says."""
    nodes: list[NodeProcess] = []

    def started(exporter_is: str, **environ: str) -> NodeProcess:
        environ = {
            "OTEL_TRACES_EXPORTER": "of_the_tests",
            "EXPORTER_IS": exporter_is,
            **SMALL,
            **environ,
        }
        nodes.append(traced_node(modules, EXPORTER_FILE=str(modules / "spans"), **environ))
        return nodes[-1]

    yield started
    for node in nodes:
        node.kill()


def test_last_spans_of_a_node_are_sent_at_its_end(
    start: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    node = start("well", OTEL_BSP_SCHEDULE_DELAY="3600000")
    ask(node, 3)
    assert node.stop() == 0
    lines = (tmp_path / "spans").read_text().splitlines()
    assert lines.count(f"kvstore.lookup {named('cmpl-7').request_id} kvstore-node") == 3


@pytest.mark.parametrize("exporter_is", ["hanging", pytest.param("broken", marks=pytest.mark.long)])
def test_node_serves_and_ends_with_a_hanging_or_broken_exporter(
    start: Callable[..., NodeProcess], exporter_is: str
) -> None:
    node = start(exporter_is)
    ask(node, 64)
    assert node.stop(timeout_s=60.0) == 0
    assert ("the last spans could not be sent" in node.log_text) == (exporter_is == "hanging")


def test_exporter_that_can_not_be_created_fails_the_start(
    start: Callable[..., NodeProcess],
) -> None:
    with pytest.raises(Unavailable, match="FileNotFoundError: no such certificate"):
        start("unusable")


@pytest.mark.parametrize(
    ("name", "protocol", "used"),
    [
        ("otlp", "", "otlp_proto_grpc"),
        ("otlp", "grpc", "otlp_proto_grpc"),
        ("otlp", "http/protobuf", "otlp_proto_http"),
        ("of_the_tests", "http/protobuf", "of_the_tests"),
    ],
)
def test_otlp_uses_the_exporter_of_its_protocol(
    modules: Path, monkeypatch: pytest.MonkeyPatch, name: str, protocol: str, used: str
) -> None:
    monkeypatch.syspath_prepend(modules)
    assert otel._point(name, protocol).name == used


def test_otlp_without_a_protocol_uses_the_installed_exporter(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = modules / "of_the_tests-1.dist-info" / "entry_points.txt"
    facts.write_text(facts.read_text().replace("otlp_proto_grpc", "otlp_proto_pigeons"))
    monkeypatch.setattr("sys.path", [str(modules)])
    assert otel._point("otlp", "").name == "otlp_proto_http"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "pigeons"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=pigeons must be one of grpc, http",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "nobodys"},
            "OTEL_TRACES_EXPORTER=nobodys: nobodys is not installed",
        ),
    ],
)
def test_missing_exporter_package_is_named(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(tracing, "tracer", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        otel.set_up("kvstore-node")
    assert tracing.tracer is None
