"""The log of slow requests: which calls it keeps, and what they waited for."""

import threading
import time
from time import monotonic_ns

from node.serving.request_metrics import (
    DISK,
    KEPT,
    LONG,
    SLOW_NS,
    STEPS_MAX,
    RequestMetrics,
    SlowCalls,
)


def test_only_slow_calls_are_kept() -> None:
    traffic = RequestMetrics()
    edge = traffic.of_wire("bulk")
    edge.answered("get", monotonic_ns())
    assert traffic.slow.newest() == []
    edge.answered("get", monotonic_ns() - 2 * SLOW_NS)
    (call,) = traffic.slow.newest()
    assert (call.op, call.wire, call.spans) == ("get", "bulk", ())
    assert call.took_ms >= 200.0


def test_slow_request_log_names_its_waits() -> None:
    traffic, began_ns = RequestMetrics(), monotonic_ns() - 2 * SLOW_NS
    entered_ns = monotonic_ns()
    with traffic.waiting(DISK):
        threading.Event().wait(0.02)
    left_ns = monotonic_ns()
    traffic.of_wire("shm").answered("get", began_ns)
    (call,) = traffic.slow.newest()
    waited, rest = call.spans
    assert waited.name == "pages come from the disk"
    assert waited.at_ms >= 200.0
    assert 20.0 <= waited.took_ms <= (left_ns - entered_ns) / 1e6
    assert rest.at_ms == waited.at_ms + waited.took_ms
    assert abs(rest.at_ms + rest.took_ms - call.took_ms) < 1e-3


def test_slow_request_log_excludes_waits_of_others() -> None:
    traffic = RequestMetrics()
    with traffic.waiting(DISK):
        pass  # belongs to an earlier call
    began_ns = monotonic_ns()

    def other() -> None:
        with traffic.waiting(DISK):
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    traffic.slow.ended("get", "bulk", began_ns, SLOW_NS)
    assert traffic.slow.newest()[0].spans == ()


def test_slow_request_log_has_the_start_time() -> None:
    slow, took_ns = SlowCalls(), 3_600_000_000_000
    slow.ended("get", "bulk", monotonic_ns() - took_ns, took_ns)
    (call,) = slow.newest()
    assert call.took_ms == 3_600_000.0
    assert abs(time.time() - 3600 - call.unix_s) < 600


def test_last_steps_of_a_long_call_are_kept() -> None:
    traffic, began_ns = RequestMetrics(), monotonic_ns()
    for _ in range(3 * STEPS_MAX):
        with traffic.waiting(DISK):
            pass
    traffic.slow.ended("get", "bulk", began_ns, SLOW_NS)
    *steps, rest = traffic.slow.newest()[0].spans
    assert (len(steps), rest.name) == (STEPS_MAX, "to the end of its answer")


def test_newest_slow_calls_are_kept_without_long_operations() -> None:
    slow = SlowCalls()
    for number in range(KEPT + 5):
        slow.ended("get", str(number), 0, SLOW_NS)
    for op in LONG:
        slow.ended(op, "bulk", 0, SLOW_NS)
    assert [call.wire for call in slow.newest()] == [
        str(number) for number in range(KEPT + 4, 4, -1)
    ]
