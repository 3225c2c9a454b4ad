"""The circuit breaker on a fake clock."""

from typing import Any

import pytest
from fake_node import FakeNode

from kvstore import ClientConfig, DeadlineExceeded, Unavailable
from kvstore.deadline import Deadline
from kvstore.transports.channel import PAUSE_S_MIN, CircuitBreaker, NodeChannel


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker("node-1", 10.0, clock, lambda: 0.0)


def pause_s(breaker: CircuitBreaker, clock: Clock) -> float:
    """Return how long the breaker refuses calls from now on.

    Afterwards it is half open, with the trial taken.
    """
    start = clock.now
    while True:
        try:
            breaker.enter()
        except Unavailable:
            clock.now += PAUSE_S_MIN / 4
        else:
            return clock.now - start


def test_call_after_a_failure_is_refused_with_the_cause(breaker: CircuitBreaker) -> None:
    breaker.enter()
    breaker.failure(TimeoutError("no answer"))
    with pytest.raises(
        Unavailable, match=r"node-1 failed 1 times, next try in 0\.1 s; last: no answer"
    ):
        breaker.enter()


def test_one_call_may_try_after_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    with pytest.raises(Unavailable):
        breaker.enter()


def test_pauses_of_clients_are_random(clock: Clock) -> None:
    """Clients that lost a node at the same time must not all return at the same time."""
    pauses = set()
    for _ in range(8):
        breaker = CircuitBreaker("node-1", 10.0, clock)
        breaker.failure(OSError(), cost_s=5.0)
        pauses.add(breaker._open_until - clock.now)
    assert len(pauses) > 4
    assert all(7.5 <= pause <= 10.0 for pause in pauses)


def test_success_closes_the_breaker(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    breaker.success()
    for _ in range(3):
        breaker.enter()
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)


def test_pause_doubles_up_to_its_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    pauses = []
    for _ in range(10):
        pauses.append(pause_s(breaker, clock))
        breaker.failure(OSError())
    expected = [min(10.0, PAUSE_S_MIN * 2**n) for n in range(10)]
    assert pauses == pytest.approx(expected, abs=PAUSE_S_MIN / 2)


def test_trial_without_a_result_allows_another(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    clock.now += PAUSE_S_MIN
    breaker.enter()


def test_simultaneous_failures_count_as_one(breaker: CircuitBreaker, clock: Clock) -> None:
    """If eight threads lose their node together, the pause must not be that of eight outages."""
    for _ in range(8):
        breaker.enter()
    for _ in range(8):
        breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(2 * PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)


def test_slow_failure_makes_a_longer_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    """With pauses that only double from 0.1 s callers would mostly wait for a hanging node."""
    for cost_s, paused_s in ((1.0, 4.0), (5.0, 10.0)):
        breaker.failure(TimeoutError(), cost_s)
        assert pause_s(breaker, clock) == pytest.approx(paused_s, abs=PAUSE_S_MIN / 2)
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(0.4, abs=PAUSE_S_MIN / 2)


def test_pause_after_a_hang_exceeds_its_cost(fake_node: FakeNode, clock: Clock) -> None:
    link = NodeChannel(
        fake_node.address, ClientConfig(address=fake_node.address, wire="grpc"), clock
    )

    link.run(lambda link, deadline: None, None, Deadline(5))
    fake_node.version += 1  # so that the liveness check fails, too

    def hang(link: Any, deadline: Deadline) -> Any:
        clock.now += 2
        raise DeadlineExceeded("hangs")

    with pytest.raises(DeadlineExceeded):
        link.run(hang, None, Deadline(5))
    clock.now += 5.9
    with pytest.raises(Unavailable, match=r"next try in [0-2]\.\d s; last: hangs"):
        link.run(hang, None, Deadline(5))
    clock.now += 2.2
    with pytest.raises(DeadlineExceeded):
        link.run(hang, None, Deadline(5))
    link.close()
