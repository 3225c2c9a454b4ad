"""Fixtures that record spans with OpenTelemetry's SDK, as an engine's or node's provider would."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import otel, tracing

SETTINGS = {"OTEL_TRACES_EXPORTER": "otlp"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the in-memory exporter of a provider that is this process's during the test."""
    trace = pytest.importorskip("opentelemetry.trace", reason="pip install opentelemetry-sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "tracer", None)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    otel.set_up()
    yield exporter
    provider.shutdown()
