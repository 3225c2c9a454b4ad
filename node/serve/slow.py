"""Calls that took long, and what they waited for: the newest of them. It says nothing of who asked, nor for what."""

import threading
import time
from collections import deque
from time import monotonic_ns
from typing import NamedTuple

SLOW_NS = 100_000_000
KEPT = 32
STEPS_MAX = 8  # of one thread that are remembered
# They are meant to take long.
LONG = frozenset(("flush", "scrub", "recover", "drain", "sweep", "forget", "remove_namespace", "record"))


class Span(NamedTuple):
    """A part of a call, from `at_ms` on after its begin."""

    name: str
    at_ms: float
    took_ms: float


class SlowCall(NamedTuple):
    op: str
    wire: str
    unix_s: float
    took_ms: float
    spans: tuple[Span, ...]


class SlowCalls:
    """Thread-safe. Steps belong to the call that their own thread is at."""

    def __init__(self) -> None:
        self._calls: deque[SlowCall] = deque(maxlen=KEPT)
        self._of_thread = threading.local()

    def step(self, name: str, began_ns: int) -> None:
        """Of the call that this thread is at, and over now."""
        steps = getattr(self._of_thread, "steps", None)
        if steps is None:
            steps = self._of_thread.steps = deque(maxlen=STEPS_MAX)
        steps.append((name, began_ns, monotonic_ns()))

    def ended(self, op: str, wire: str, began_ns: int, ns: int) -> None:
        if op in LONG:
            return
        steps = [step for step in getattr(self._of_thread, "steps", ()) if step[1] >= began_ns]
        spans = [Span(name, (began - began_ns) / 1e6, (end - began) / 1e6) for name, began, end in steps]
        if spans:
            end_ms = max(span.at_ms + span.took_ms for span in spans)
            spans.append(Span("to the end of its answer", end_ms, ns / 1e6 - end_ms))
        self._calls.appendleft(SlowCall(op, wire, time.time() - ns / 1e9, ns / 1e6, tuple(spans)))

    def newest(self) -> list[SlowCall]:
        return list(self._calls)
