"""The circuit breaker with a clock moved by hand."""

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
    """How long it refuses from now on; ends half open, with the trial taken."""
    start = clock.now
    while True:
        try:
            breaker.enter()
        except Unavailable:
            clock.now += PAUSE_S_MIN / 4
        else:
            return clock.now - start


def test_a_failure_is_refused_at_once_with_its_cause(breaker: CircuitBreaker) -> None:
    breaker.enter()
    breaker.failure(TimeoutError("no answer"))
    with pytest.raises(
        Unavailable, match=r"node-1 failed 1 times, next try in 0\.1 s; last: no answer"
    ):
        breaker.enter()


def test_after_the_pause_one_call_may_try(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    with pytest.raises(Unavailable):
        breaker.enter()


def test_pauses_of_many_clients_are_unlike(clock: Clock) -> None:
    """They lost one node at once: they must not all come back at once."""
    pauses = set()
    for _ in range(8):
        breaker = CircuitBreaker("node-1", 10.0, clock)
        breaker.failure(OSError(), cost_s=5.0)
        pauses.add(breaker._open_until - clock.now)
    assert len(pauses) > 4
    assert all(7.5 <= pause <= 10.0 for pause in pauses)


def test_success_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    breaker.success()
    for _ in range(3):
        breaker.enter()
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)


def test_the_pause_doubles_up_to_its_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failure(OSError())
    pauses = []
    for _ in range(10):
        pauses.append(pause_s(breaker, clock))
        breaker.failure(OSError())
    expected = [min(10.0, PAUSE_S_MIN * 2**n) for n in range(10)]
    assert pauses == pytest.approx(expected, abs=PAUSE_S_MIN / 2)


def test_a_trial_that_never_reports_does_not_keep_it_open(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    breaker.failure(OSError())
    clock.now += PAUSE_S_MIN
    breaker.enter()
    clock.now += PAUSE_S_MIN
    breaker.enter()


def test_calls_that_fail_together_are_one_outage(breaker: CircuitBreaker, clock: Clock) -> None:
    """Eight threads lose their node at once: the pause must not be that of eight outages."""
    for _ in range(8):
        breaker.enter()
    for _ in range(8):
        breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(2 * PAUSE_S_MIN, abs=PAUSE_S_MIN / 2)


def test_a_failure_that_took_long_is_followed_by_a_pause_that_takes_longer(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    """Doubling from 0.1 s alone, callers of a node that hangs would wait for it most of
    the time.
    """
    for cost_s, paused_s in ((1.0, 4.0), (5.0, 10.0)):
        breaker.failure(TimeoutError(), cost_s)
        assert pause_s(breaker, clock) == pytest.approx(paused_s, abs=PAUSE_S_MIN / 2)
    breaker.failure(OSError())
    assert pause_s(breaker, clock) == pytest.approx(0.4, abs=PAUSE_S_MIN / 2)


def test_a_node_that_hangs_is_left_alone_for_longer_than_it_cost(
    fake_node: FakeNode, clock: Clock
) -> None:
    link = NodeChannel(
        fake_node.address, ClientConfig(address=fake_node.address, wire="grpc"), clock
    )

    link.run(lambda link, deadline: None, None, Deadline(5))
    fake_node.version += 1  # nor does it say that it lives

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
