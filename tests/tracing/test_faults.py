"""Broken tracing of an engine does not affect the traced work, nor the start of the engine."""

import logging
import sys
from typing import Any

import pytest

from kvstore import otel, tracing
from kvstore.tracing import Trace, current, named, request, within

TRACE = Trace(bytes(range(16)), bytes(range(1, 9)), True)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not our fault")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a provider the engine's."""
    trace = pytest.importorskip("opentelemetry.trace", reason="pip install opentelemetry-sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setattr(tracing, "tracer", None)

    def begin(provider: Any) -> None:
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        otel.set_up()
        assert tracing.tracer is not None

    return begin


@pytest.mark.parametrize("which", ["on_start", "on_end"])
def test_raising_processor_does_not_affect_the_work(
    traced: Any, which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    processor, provider = SpanProcessor(), TracerProvider()
    monkeypatch.setattr(processor, which, broken)
    provider.add_span_processor(processor)
    traced(provider)
    with within(TRACE):
        with tracing.span("kvstore.call", "client", address="node"):
            inside = current()
        assert current() == TRACE
    assert inside is not None
    assert inside.trace_id == TRACE.trace_id, "the trace ends at a step that was not recorded"
    assert "not recorded" in caplog.text


def test_raising_sampler_does_not_affect_the_work(traced: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    class Broken(type(ALWAYS_ON)):  # type: ignore[misc]
        should_sample = broken

    traced(TracerProvider(sampler=Broken(ALWAYS_ON._decision)))
    with tracing.serving("lookup", TRACE):
        assert current() == TRACE
    with tracing.serving("lookup", None):
        assert current() is None


@pytest.mark.parametrize("what", ["import", "provider"])
def test_engine_starts_without_unusable_tracing(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="pip install opentelemetry-sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setattr(tracing, "tracer", None)
    if what == "provider":
        monkeypatch.setattr(trace, "get_tracer", broken)
    else:

        class Finder:
            find_spec = staticmethod(broken)

        for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Finder])
    with caplog.at_level(logging.INFO):
        otel.set_up()
    assert tracing.tracer is None
    assert "can not be used" in caplog.text


@pytest.mark.parametrize("name", ["\ud800", "", None, 7, b"cmpl-7", ("a", 1)])
def test_any_request_name_is_traced(name: Any) -> None:
    with request(name):
        now = current()
    assert now is not None
    if name:
        assert now == named(str(name))
    assert current() is None


def test_long_names_are_not_kept_in_memory() -> None:
    name = "cmpl-" * 1000
    before = sys.getrefcount(name)
    with request(name):
        assert current() == named(name)
    assert sys.getrefcount(name) == before
