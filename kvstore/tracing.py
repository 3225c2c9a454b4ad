"""Which request something is done for: a W3C trace context that goes with it, from the engine through every node.

    engine --> agent --> client --> near node --> owner            each a span of one trace, if somebody records them
                                    near node --> disk

The id of the trace is the request's id in all logs. Without one, which is the normal case, a request costs the look at
a context variable; `tracer` is None unless `kvstore.spans` has found OpenTelemetry, and that it is asked for.
"""

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")

TRACE_NBYTES, SPAN_NBYTES = 16, 8
PACKED_NBYTES = TRACE_NBYTES + SPAN_NBYTES + 1
HEADER = "traceparent"
_FORM = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class Trace(NamedTuple):
    """Of a request, as W3C Trace Context has it. `span_id`: of the step that asks; `sampled`: somebody records it."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @property
    def request_id(self) -> str:
        return self.trace_id.hex()

    def packed(self) -> bytes:
        """For a frame: trace id, span id, flags."""
        return self.trace_id + self.span_id + bytes([self.sampled])

    def header(self) -> str:
        """For metadata of gRPC."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.sampled:02x}"


def packed_now() -> bytes:
    """Of the current trace; nothing without one."""
    trace = current()
    return b"" if trace is None else trace.packed()


def unpacked(packed: bytes) -> Trace | None:
    """None for what is none: nobody is refused for it."""
    if len(packed) != PACKED_NBYTES:
        return None
    return _valid(packed[:TRACE_NBYTES], packed[TRACE_NBYTES:-1], packed[-1])


def parsed(header: str) -> Trace | None:
    found = _FORM.fullmatch(header)
    return _valid(bytes.fromhex(found[1]), bytes.fromhex(found[2]), int(found[3], 16)) if found else None


def _valid(trace_id: bytes, span_id: bytes, flags: int) -> Trace | None:
    return Trace(trace_id, span_id, bool(flags & _SAMPLED)) if any(trace_id) and any(span_id) else None


# ---- the current one -----------------------------------------------------------------------


Span = contextlib.AbstractContextManager[Any]  # one step, around which its trace is the current one


class Tracer(Protocol):
    """Who records spans (`kvstore.spans`)."""

    def span(self, name: str, parent: Trace | None, kind: str, attributes: dict[str, Any]) -> Span: ...

    def active(self) -> Trace | None:
        """That the engine itself is in."""


NOTHING = contextlib.nullcontext()
tracer: Tracer | None = None
_current: ContextVar[Trace | None] = ContextVar("kvstore-trace", default=None)
current = _current.get


@contextlib.contextmanager
def within(trace: Trace | None) -> Iterator[None]:
    """Around what is done for a request."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def request(name: str) -> contextlib.AbstractContextManager[None]:
    """Around what is done for a request that an engine calls so. If the engine traces it, it is that trace; else its id
    follows from the name, so that whoever has the one finds the other, and who records spans may record it."""
    if current() is not None:
        return NOTHING
    return within((tracer.active() if tracer is not None else None) or named(name))


def named(name: str) -> Trace:
    digest = hashlib.sha256(b"kvstore-request\0" + str(name).encode(errors="backslashreplace")).digest()
    return Trace(digest[:TRACE_NBYTES], digest[TRACE_NBYTES : TRACE_NBYTES + SPAN_NBYTES], True)


def span(name: str, kind: str = "internal", **attributes: Any) -> Span:
    """A step of the current request."""
    return NOTHING if tracer is None else tracer.span(name, current(), kind, attributes)


def serving(op: str, trace: Trace | None) -> Span:
    """Around a request that came with a trace, or none."""
    if tracer is not None:
        return tracer.span(f"kvstore.{op}", trace, "server", {})
    return NOTHING if trace is None else within(trace)


def carried(function: Callable[..., Result]) -> Callable[..., Result]:
    """For another thread, which does it for the current request."""
    trace = current()
    if trace is None:
        return function

    def run(*arguments: Any) -> Result:
        with within(trace):
            return function(*arguments)

    return run


class NamesRequest(logging.Filter):
    """For a logger of what an engine's process has: lines say which request they are about. (A node's say it by their
    form, `node.log_lines`.)"""

    def filter(self, record: logging.LogRecord) -> bool:
        trace = current()
        if trace is not None:
            record.msg, record.args = f"{record.getMessage()} [request {trace.request_id}]", None
        return True
