"""Spans that are recorded here, as an engine's provider or a node's would, by OpenTelemetry's own
SDK.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import otel, tracing

SETTINGS = {"OTEL_TRACES_EXPORTER": "otlp"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The exporter in memory of a provider that is this process's as long as the test runs."""
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
