"""Calls that took long: which are kept, and what they waited for."""

import threading
from time import monotonic_ns

from node.serve.slow import KEPT, LONG, SLOW_NS, SlowCalls
from node.serve.traffic import DISK, Traffic


def test_only_calls_that_took_long_are_kept() -> None:
    traffic = Traffic()
    edge = traffic.edge("bulk")
    edge.answered("get", monotonic_ns())
    assert traffic.slow.newest() == []
    edge.answered("get", monotonic_ns() - 2 * SLOW_NS)
    (call,) = traffic.slow.newest()
    assert (call.op, call.wire, call.spans) == ("get", "bulk", ())
    assert call.took_ms >= 200.0


def test_what_it_waited_for_is_told_in_its_place() -> None:
    traffic, began_ns = Traffic(), monotonic_ns() - 2 * SLOW_NS
    with traffic.waiting(DISK):
        threading.Event().wait(0.02)
    traffic.edge("shm").answered("get", began_ns)
    (call,) = traffic.slow.newest()
    waited, rest = call.spans
    assert waited.name == "pages come from the disk"
    assert waited.at_ms >= 200.0
    assert waited.took_ms >= 20.0
    assert rest.at_ms == waited.at_ms + waited.took_ms
    assert abs(rest.at_ms + rest.took_ms - call.took_ms) < 1e-3


def test_what_others_waited_for_is_none_of_its() -> None:
    traffic = Traffic()
    with traffic.waiting(DISK):
        pass  # of a call before
    began_ns = monotonic_ns()

    def other() -> None:
        with traffic.waiting(DISK):
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    traffic.slow.ended("get", "bulk", began_ns, SLOW_NS)
    assert traffic.slow.newest()[0].spans == ()


def test_the_newest_are_kept_and_none_that_is_meant_to_take_long() -> None:
    slow = SlowCalls()
    for number in range(KEPT + 5):
        slow.ended("get", str(number), 0, SLOW_NS)
    for op in LONG:
        slow.ended(op, "bulk", 0, SLOW_NS)
    assert [call.wire for call in slow.newest()] == [str(number) for number in range(KEPT + 4, 4, -1)]
