"""Traces of requests: created, passed on and logged. Without telemetry, OpenTelemetry is not
imported.
"""

import concurrent.futures
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from kvstore import tracing
from kvstore.config import Telemetry, telemetry
from kvstore.pb import kvstore_pb2 as pb
from kvstore.threads import begun
from kvstore.tracing import (
    NamesRequest,
    Trace,
    carried,
    current,
    named,
    packed_now,
    parsed,
    request,
    unpacked,
    unpacked_all,
    within,
)
from kvstore.transports.connections import TRACED_NBYTES_MAX, request_header
from node.process import formatter

TRACE = Trace(bytes(range(16)), bytes(range(1, 9)), True)


def test_trace_is_written_in_the_standard_format() -> None:
    header = "00-000102030405060708090a0b0c0d0e0f-0102030405060708-01"
    assert TRACE.header() == header
    assert parsed(header) == TRACE
    assert unpacked(TRACE.packed()) == TRACE
    silent = TRACE._replace(sampled=False)
    assert parsed(header[:-1] + "0") == parsed(header[:-2] + "fe") == silent, (
        "other flags were not ignored"
    )
    assert (silent.header(), unpacked(silent.packed())) == (header[:-1] + "0", silent), (
        "a trace that is not sampled became sampled"
    )


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        "00-" + "0" * 32 + "-0102030405060708-01",
        "00-000102030405060708090a0b0c0d0e0f-" + "0" * 16 + "-01",
        "00-000102030405060708090A0B0C0D0E0F-0102030405060708-01",
        "00-000102030405060708090a0b0c0d0e0f-0102030405060708-01\n",
    ],
)
def test_invalid_trace_context_is_ignored(header: str) -> None:
    assert parsed(header) is None
    assert unpacked(header.encode()) is None
    assert unpacked(bytes(tracing.PACKED_NBYTES)) is None


def test_request_of_an_engine_has_one_id() -> None:
    assert current() is None
    with request("cmpl-7"):
        assert current() == named("cmpl-7")
        with request("another"):
            assert current() == named("cmpl-7"), "an inner request replaced the outer one"
    assert current() is None
    assert named("cmpl-7") != named("cmpl-8")


def test_span_of_a_batch_links_all_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("tests.tracing.several")
    log.addFilter(NamesRequest())
    with request("a", None, "b", "", "c"):
        trace, packed = current(), packed_now()
        log.warning("3 pages")
    assert trace is not None
    assert trace == named("a")._replace(others=(named("b"), named("c")))
    assert caplog.messages == [
        f"3 pages [request {', '.join(named(name).request_id for name in 'abc')}]"
    ]
    assert unpacked_all(packed) == trace
    assert trace.packed() == named("a").packed(), "more than one request is sent to a node"
    with request(*map(str, range(100))):
        trace = current()
    assert trace is not None
    assert len(trace.others) == tracing.REQUESTS_MAX - 1


def test_each_call_without_a_name_has_its_own_id() -> None:
    seen = set()
    for names in ((), (None,), ("",)):
        with request(*names):
            trace = current()
            assert trace is not None
            with request():
                assert current() == trace
        assert parsed(trace.header()) == trace
        seen.add(trace.trace_id)
    assert len(seen) == 3
    assert current() is None


def test_invalid_utf8_names_have_ids() -> None:
    assert named("\ud800") != named("\ud801"), "names that are invalid in UTF-8 got one id"


def test_threads_inherit_the_request_of_their_work() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with within(TRACE):
            done = begun(pool, current)
            direct = pool.submit(carried(current))
        assert done is not None
        assert (done.result(), direct.result()) == (TRACE, TRACE)
        after = begun(pool, current)
        assert after is not None
        assert after.result() is None


def test_frame_has_a_trace_after_its_request_unless_it_is_large() -> None:
    small, large = (
        pb.LookupRequest(prefix_hashes=[b"k" * 32]),
        pb.LookupRequest(prefix_hashes=[b"k" * 64] * 1000),
    )
    plain = request_header("lookup", small)
    assert packed_now() == b""
    with within(TRACE):
        assert pb.BulkRequest.FromString(request_header("lookup", small)) == pb.BulkRequest(
            lookup=small, trace=TRACE.packed()
        )
        assert request_header("lookup", small).startswith(plain), (
            "a node that does not know traces can not parse the request"
        )
        header = request_header("lookup", large)
    assert len(header) > TRACED_NBYTES_MAX
    assert pb.BulkRequest.FromString(header) == pb.BulkRequest(lookup=large)


# ---- logs ----------------------------------------------------------------------------------


def line(form: str, error: Any = None) -> str:
    record = logging.LogRecord(
        "node.serving", logging.ERROR, "file", 1, "%s failed", ("get",), error
    )
    return formatter(form).format(record)


def test_log_lines_of_a_node_name_the_request() -> None:
    assert line("text").endswith("ERROR node.serving: get failed")
    assert set(json.loads(line("json"))) == {"time", "level", "logger", "message"}
    with within(TRACE):
        assert line("text").endswith(f"get failed [request {TRACE.request_id}]")
        found = json.loads(line("json"))
    assert (found["message"], found["request"], found["span"]) == (
        "get failed",
        TRACE.request_id,
        "0102030405060708",
    )
    assert (found["level"], found["logger"]) == ("ERROR", "node.serving")
    assert found["time"].endswith("Z")


def test_traceback_is_one_line_of_json() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logged_line = line("json", sys.exc_info())
    assert "\n" not in logged_line
    assert "ValueError: two\nlines" in json.loads(logged_line)["error"]


def test_log_lines_in_an_engine_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("tests.tracing")
    log.addFilter(NamesRequest())
    with request("cmpl-7"):
        log.warning("%d pages", 3)
    log.warning("%d pages", 4)
    assert caplog.messages == [f"3 pages [request {named('cmpl-7').request_id}]", "4 pages"]


# ---- telemetry settings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "n"}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, None),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, Telemetry((), "")),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318", "OTEL_SERVICE_NAME": "n"},
            Telemetry((), "n"),
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, Telemetry(("otlp", "console"), "")),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            Telemetry(("otlp",), "", "grpc"),
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            Telemetry((), "", "http/protobuf"),
        ),
    ],
)
def test_standard_variables_enable_telemetry(
    environ: dict[str, str], wanted: Telemetry | None
) -> None:
    assert telemetry(environ) == wanted


@pytest.mark.parametrize(
    "settings", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "otlp"}]
)
def test_opentelemetry_is_optional_and_not_imported_without_telemetry(
    settings: dict[str, str],
) -> None:
    """OpenTelemetry is not imported unless telemetry is on, and is not needed if it is missing.

    In the last case, telemetry is on and OpenTelemetry is hidden.
    """
    code = """
import sys
from importlib.abc import MetaPathFinder

if sys.argv[1] == "otlp":
    class Hide(MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname.partition(".")[0] == "opentelemetry":
                raise ModuleNotFoundError(f"hidden: {fullname}", name=fullname)
    sys.meta_path.insert(0, Hide())
from kvstore import Client, ClientConfig, tracing
Client(ClientConfig("127.0.0.1:1")).close()
assert tracing.tracer is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    logged_line = settings.get("OTEL_TRACES_EXPORTER", "")
    environ = {"PYTHONPATH": ":".join(sys.path), **settings}
    done = subprocess.run([sys.executable, "-c", code, logged_line], env=environ, check=False)
    assert done.returncode == 0
