"""Export spans by OpenTelemetry, where it is installed and its variables enable it.

The only file that imports it.

In an engine's process, the engine or its operator sets the provider up; in our own processes this
file does. Without configuration nothing is imported.
"""

import logging
import threading
from typing import TYPE_CHECKING, Any

import kvstore.tracing as tracing
from kvstore.config import Telemetry, telemetry
from kvstore.errors import ConfigError
from kvstore.log_rate import LogRate

if TYPE_CHECKING:
    import importlib.metadata

log = logging.getLogger(__name__)
log.addFilter(LogRate())
# entry points of this group are OpenTelemetry's exporters
EXPORTERS = "opentelemetry_traces_exporter"
OTLP = "otlp"  # the default; it stands for one exporter per protocol
PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
FLUSH_S = 3.0
_provider: Any = None  # this process's own provider, if any


def set_up(service: str = "") -> None:
    """Set tracing up before the first request of a process.

    `service` names one of our processes, which gets a provider; in an engine's process, the
    engine's own is used. Raises ConfigError in one of our processes for a missing or unusable
    exporter. Nothing connects here.
    """
    wanted = telemetry()
    if wanted is None or tracing.tracer is not None:
        return
    try:
        from opentelemetry import trace
    except ImportError:
        log.info("OTEL_* asks for traces, and there are none: pip install opentelemetry-sdk")
        return
    except Exception:  # foreign code: an engine must start without traces, too
        log.exception("OTEL_* asks for traces, and OpenTelemetry can not be used")
        return
    if service:
        _provide(trace, service, wanted)
    try:
        tracing.tracer = tracing.Tracer(trace)
    except Exception:  # as above
        log.exception("OTEL_* asks for traces, and its provider can not be used")


def _provide(trace: Any, service: str, wanted: Telemetry) -> None:
    """Install the tracer provider that the variables name, unless the process has one already.

    `opentelemetry-instrument` installs one.
    """
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"OTEL_* asks for traces: pip install opentelemetry-sdk ({error})"
        ) from error
    points = [_point(name, wanted.protocol) for name in wanted.exporters or (OTLP,)]
    try:  # `flush` ends it; its own limit at exit would be 30 s
        resource = Resource.create({"service.name": wanted.service or service})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for point in points:
            provider.add_span_processor(BatchSpanProcessor(point.load()()))
    except Exception as error:  # foreign code, with settings that it reads itself
        raise ConfigError(
            f"OTEL_*: traces can not be set up: {type(error).__name__}: {error}"
        ) from error
    trace.set_tracer_provider(provider)
    global _provider
    _provider = provider
    log.info("traces go to %s", ", ".join(point.name for point in points))


def _point(name: str, protocol: str) -> "importlib.metadata.EntryPoint":
    """Return the entry point of the exporter with this name. Raises ConfigError."""
    import importlib.metadata  # takes 30 ms

    names = [name]
    if name == OTLP:
        if protocol and protocol not in PROTOCOLS:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} must be one of {', '.join(PROTOCOLS)}"
            )
        names = [PROTOCOLS[protocol]] if protocol else [*PROTOCOLS.values()]
    for known in names:
        for point in importlib.metadata.entry_points(group=EXPORTERS, name=known):
            return point
    raise ConfigError(
        f"OTEL_TRACES_EXPORTER={name}: {' or '.join(names)} is not installed; for otlp "
        "pip install opentelemetry-exporter-otlp-proto-http, or set it to none"
    )


def flush() -> None:
    """Send waiting spans, for at most FLUSH_S, at the end of a process.

    The SDK's `force_flush` does not keep its time limit: with a hanging collector it waits 10 s for
    each 512 spans.
    """
    if _provider is None:
        return
    flushing = threading.Thread(target=_provider.force_flush, name="kvstore-flush", daemon=True)
    try:
        flushing.start()
    except RuntimeError:  # no thread can be started
        return
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        log.warning("the last spans could not be sent within %g s", FLUSH_S)
