"""The log of slow requests: which calls it keeps, and what they waited for."""

import threading
import time
from time import monotonic_ns

import pytest
from local_nodes import Connect
from waiting import wait_until

from kvstore import Exhausted, Namespace, opaque_layout
from kvstore.pb import kvstore_pb2 as pb
from node.server import Node
from node.serving.limits import PerPeerQueue
from node.serving.request_metrics import (
    DISK,
    KEPT,
    LONG,
    RECEIVE,
    SEND,
    SLOW_NS,
    STEPS_MAX,
    RequestMetrics,
    SlowCall,
    SlowCalls,
    Subject,
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
    (waited,) = call.spans
    assert waited.name == DISK
    assert waited.at_ms >= 200.0
    assert 20.0 <= waited.took_ms <= (left_ns - entered_ns) / 1e6


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
    assert len(traffic.slow.newest()[0].spans) == STEPS_MAX


def test_newest_slow_calls_are_kept_without_long_operations() -> None:
    slow = SlowCalls()
    for number in range(KEPT + 5):
        slow.ended("get", str(number), 0, SLOW_NS)
    for op in LONG:
        slow.ended(op, "bulk", 0, SLOW_NS)
    assert [call.wire for call in slow.newest()] == [
        str(number) for number in range(KEPT + 4, 4, -1)
    ]


@pytest.fixture
def slow(node: Node, monkeypatch: pytest.MonkeyPatch) -> SlowCalls:
    """Return the slow calls of a node to which every call is slow."""
    monkeypatch.setattr("node.serving.request_metrics.SLOW_NS", 0)
    monkeypatch.setattr("node.serving.bulk.SOCKET_STEP_S", 0.0)
    slow = node.service.traffic.slow
    slow._calls.clear()
    return slow


def by_op(slow: SlowCalls) -> dict[str, SlowCall]:
    return {call.op: call for call in slow.newest()}


@pytest.mark.parametrize("wire", ["bulk", "grpc", "shm"])
def test_slow_calls_say_what_they_are_about(
    node: Node, connect: Connect, slow: SlowCalls, wire: str
) -> None:
    space = Namespace(f"slow-{wire}", opaque_layout(4096), "team-a")
    keys = [bytes([number]) * 32 for number in range(1, 4)]
    client = connect(node, wire)
    client.put(space, keys, [bytes(4096)] * 3)
    client.get(space, keys, [bytearray(4096) for _ in keys])
    client.lookup(space, keys)
    about = Subject(space.digest, "team-a", space.model, keys[0], 3, 3 * 4096)
    wait_until(lambda: {"put", "get", "lookup"} <= by_op(slow).keys())
    calls = by_op(slow)
    assert [calls[op].subject for op in ("put", "get")] == [about, about]
    assert calls["lookup"].subject == about._replace(nbytes=0)
    ranges = [pb.ByteRange(nbytes=5)] * 2
    parts = pb.GetRequest(namespace=space.digest, prefix_hashes=keys, ranges=ranges)
    assert slow.describe(None, parts) == about._replace(nbytes=3 * 10)
    assert {calls[op].wire for op in ("put", "get")} == {wire}
    if wire == "shm":
        assert calls["commit"].subject == about, "a commit has no keys of its own"
    else:
        assert [span.name for span in calls["put"].spans] == [RECEIVE]
        assert [span.name for span in calls["get"].spans] == [SEND]


def test_failed_slow_calls_are_kept_with_their_error() -> None:
    traffic = RequestMetrics()
    edge = traffic.of_wire("bulk")
    edge.failed("put", Exhausted("full"), monotonic_ns() - 2 * SLOW_NS)
    edge.failed("put", Exhausted("full"), monotonic_ns())
    edge.failed("follow", Exhausted("full"))
    assert [(call.op, call.error) for call in traffic.slow.newest()] == [
        ("put", "resource_exhausted")
    ]


def test_wait_for_other_calls_of_a_peer_is_a_step() -> None:
    queue, waits = PerPeerQueue(), list[int]()
    assert queue.begin("one") == 0
    began_ns = monotonic_ns()
    thread = threading.Thread(target=lambda: waits.append(queue.begin("one")))
    thread.start()
    wait_until(lambda: queue.waiting_count == 1)
    queue.end("one")
    thread.join()
    assert began_ns < waits[0] < monotonic_ns()
