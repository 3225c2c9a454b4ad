"""Ctrl-C takes effect at a safe point."""

import signal
from collections.abc import Callable, Iterator

import pytest

from kvstore.cli.output import deferred_interrupt
from kvstore.errors import Unavailable

Body = Callable[[Callable[[], None]], None]


def run_deferred(body: Body) -> None:
    with deferred_interrupt() as safe_point:
        body(safe_point)


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    """Set Python's handler of Ctrl-C, which is ignored if a shell runs the tests in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_safe_point() -> None:
    passed = []

    def body(safe_point: Callable[[], None]) -> None:
        safe_point()
        press_ctrl_c()
        passed.append("after the signal")
        safe_point()
        passed.append("after the safe point")

    with pytest.raises(KeyboardInterrupt):
        run_deferred(body)
    assert passed == ["after the signal"]


def test_second_ctrl_c_interrupts_at_once() -> None:
    def body(safe_point: Callable[[], None]) -> None:
        press_ctrl_c()
        press_ctrl_c()
        raise AssertionError("the second Ctrl-C was ignored")

    with pytest.raises(KeyboardInterrupt):
        run_deferred(body)


def test_error_after_ctrl_c_is_an_interrupt() -> None:
    def body(safe_point: Callable[[], None]) -> None:
        press_ctrl_c()
        fail(safe_point)

    def fail(safe_point: Callable[[], None]) -> None:
        raise Unavailable("the node got the Ctrl-C as well")

    with pytest.raises(KeyboardInterrupt):
        run_deferred(body)
    with pytest.raises(Unavailable):
        run_deferred(fail)


def test_previous_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
