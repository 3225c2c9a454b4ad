"""Carry a W3C trace context from the engine through every node.

    engine --> agent --> client --> near node --> owner     each a span of one trace
                                    near node --> disk

The trace's id is the request's id in all logs. Without a trace, the normal case, a request costs
one look at a context variable; `tracer` is None unless `kvstore.otel` has found and enabled
OpenTelemetry.
"""

import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())
Result = TypeVar("Result")

TRACE_NBYTES, SPAN_NBYTES = 16, 8
PACKED_NBYTES = TRACE_NBYTES + SPAN_NBYTES + 1
KNOWN_MAX = 256  # characters kept of a request name, which the engine's client may choose
REQUESTS_MAX = 8  # requests listed for one job: a save may have blocks of hundreds
HEADER = "traceparent"
_FORM = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class Trace(NamedTuple):
    """Trace of a request, as W3C Trace Context defines it.

    `span_id`: of the calling step; `sampled`: it is recorded; `others`: for a job of several
    requests at once, the other requests. Nodes do not receive those.
    """

    trace_id: bytes
    span_id: bytes
    sampled: bool
    others: tuple["Trace", ...] = ()

    @property
    def request_id(self) -> str:
        """Return the request id: the trace id in hex."""
        return self.trace_id.hex()

    @property
    def request_ids(self) -> str:
        """Return the request ids of all traces, for a log line."""
        return ", ".join(trace.request_id for trace in (self, *self.others))

    def packed(self) -> bytes:
        """Pack trace id, span id and flags for a frame."""
        return self.trace_id + self.span_id + bytes([self.sampled])

    def header(self) -> str:
        """Return the traceparent header for gRPC's metadata."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.sampled:02x}"


def packed_now() -> bytes:
    """Pack the current trace and those linked to it for another process of the engine."""
    trace = current()
    return b"" if trace is None else b"".join(one.packed() for one in (trace, *trace.others))


def unpacked(packed: bytes) -> Trace | None:
    """Unpack a trace; return None for anything invalid, which is never an error."""
    if len(packed) != PACKED_NBYTES:
        return None
    return _valid(packed[:TRACE_NBYTES], packed[TRACE_NBYTES:-1], packed[-1])


def unpacked_all(packed: bytes) -> Trace | None:
    """Unpack what `packed_now` made."""
    found = [
        unpacked(packed[at : at + PACKED_NBYTES]) for at in range(0, len(packed), PACKED_NBYTES)
    ]
    first, *others = filter(None, found) if found else (None,)
    return first and first._replace(others=tuple(others))


def parsed(header: str) -> Trace | None:
    """Parse a traceparent header; None if it is invalid."""
    found = _FORM.fullmatch(header)
    return (
        _valid(bytes.fromhex(found[1]), bytes.fromhex(found[2]), int(found[3], 16))
        if found
        else None
    )


def _valid(trace_id: bytes, span_id: bytes, flags: int) -> Trace | None:
    return (
        Trace(trace_id, span_id, bool(flags & _SAMPLED)) if any(trace_id) and any(span_id) else None
    )


# ---- the current one -----------------------------------------------------------------------


Span = contextlib.AbstractContextManager[Any]  # one step, within which its trace is current


NOTHING = contextlib.nullcontext()
tracer: "Tracer | None" = None
_current: ContextVar[Trace | None] = ContextVar("kvstore-trace", default=None)
current = _current.get


@contextlib.contextmanager
def within(trace: Trace | None) -> Iterator[None]:
    """Make a trace the current one within the block."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def request(*names: str | None) -> Span:
    """Begin the request that an engine names, or several at once.

    If the engine traces it, that trace is used. Otherwise the id is derived from the name, so that
    log lines of both sides can be matched, and a span recorder may record it. Without a name, each
    call gets a new id.
    """
    if current() is not None:
        return NOTHING
    active = tracer.active() if tracer is not None else None
    if active is not None:
        return within(active)
    traces = [named(name) for name in names[:REQUESTS_MAX] if name]
    if traces:
        return within(traces[0]._replace(others=tuple(traces[1:])) if traces[1:] else traces[0])
    if tracer is not None:
        return tracer.span("kvstore.request", None, "internal", {})
    return within(Trace(os.urandom(TRACE_NBYTES), os.urandom(SPAN_NBYTES), True))


def named(name: str) -> Trace:
    """Return the trace of a name that an engine gave; any value is a name."""
    name = str(name)
    return _known(name) if len(name) <= KNOWN_MAX else _made(name)


def _made(name: str) -> Trace:
    digest = hashlib.sha256(b"kvstore-request\0" + name.encode(errors="backslashreplace")).digest()
    return Trace(digest[:TRACE_NBYTES], digest[TRACE_NBYTES : TRACE_NBYTES + SPAN_NBYTES], True)


# An engine's steps name the same requests again and again
_known = functools.lru_cache(1024)(_made)


def span(name: str, kind: str = "internal", **attributes: Any) -> Span:
    """Record a step of the current request as a span."""
    return NOTHING if tracer is None else tracer.span(name, current(), kind, attributes)


def serving(op: str, trace: Trace | None) -> Span:
    """Serve a request within the trace that came with it, if one did."""
    if tracer is not None:
        return tracer.span(f"kvstore.{op}", trace, "server", {})
    return NOTHING if trace is None else within(trace)


def carried(function: Callable[..., Result]) -> Callable[..., Result]:
    """Bind a function to the current trace, for another thread."""
    trace = current()
    if trace is None:
        return function

    def run(*arguments: Any) -> Result:
        with within(trace):
            return function(*arguments)

    return run


# ---- spans of OpenTelemetry ----------------------------------------------------------------


class Tracer:
    """Record spans by OpenTelemetry, which `kvstore.otel` imports and passes in.

    This file imports none of it.
    """

    def __init__(self, trace: Any) -> None:
        """Take `trace`, the module `opentelemetry.trace`."""
        self._api = trace
        self._tracer = trace.get_tracer("kvstore")

    def span(
        self, name: str, parent: Trace | None, kind: str, attributes: dict[str, Any]
    ) -> "_Span":
        """Start a span below a parent, linked to the other traces of its request."""
        api = self._api
        context, links = None, []
        if parent is not None:
            context = api.set_span_in_context(api.NonRecordingSpan(self._remote(parent)))
            links = [api.Link(self._remote(other)) for other in parent.others]
        try:
            started = self._tracer.start_span(
                name, context, api.SpanKind[kind.upper()], attributes, links
            )
        except Exception:  # a foreign sampler or processor failed: the work goes on untraced
            log.exception("the step %s is not recorded", name)
            started = api.INVALID_SPAN
        return _Span(api, started, parent)

    def _remote(self, trace: Trace) -> Any:
        return self._api.SpanContext(
            int.from_bytes(trace.trace_id, "big"),
            int.from_bytes(trace.span_id, "big"),
            is_remote=True,
            trace_flags=self._api.TraceFlags(trace.sampled),
        )

    def active(self) -> Trace | None:
        """Return the trace that the engine itself is in, or None."""
        return _trace_of(self._api.get_current_span())


def _trace_of(span: Any) -> Trace | None:
    of = span.get_span_context()
    if not of.is_valid:
        return None
    return Trace(
        of.trace_id.to_bytes(16, "big"), of.span_id.to_bytes(8, "big"), bool(of.trace_flags.sampled)
    )


class _Span(contextlib.AbstractContextManager[Any]):
    """Make a started span the current one, as a context, and end it."""

    def __init__(self, api: Any, started: Any, parent: Trace | None) -> None:
        self._api = api
        self._started = started
        trace = _trace_of(started)
        self._within = within(
            trace._replace(others=parent.others) if trace and parent else trace or parent
        )

    def __enter__(self) -> Any:
        self._within.__enter__()
        return self._started

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._within.__exit__(None, None, None)
        try:
            if error is not None:
                said = f"{type(error).__name__}: {error}"
                self._started.set_status(self._api.Status(self._api.StatusCode.ERROR, said))
            self._started.end()
        except Exception:  # foreign code
            log.exception("a step is not recorded")


class NamesRequest(logging.Filter):
    """Add the request id to log lines in an engine's process.

    (A node adds it in its log format, `node.process`.)
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Append the current request id to a log line."""
        trace = current()
        if trace is not None:
            record.msg, record.args = f"{record.getMessage()} [request {trace.request_ids}]", None
        return True
