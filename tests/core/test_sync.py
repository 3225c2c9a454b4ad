"""Work that is left to another thread: when its caller goes on, interrupted or not, nothing of it goes on."""

import signal
import threading
import time
from collections.abc import Callable

import pytest

import kvstore.sync
import kvstore.wires.abreast
from kvstore.sync import NoThread, aside
from kvstore.wires.abreast import Abreast

start = kvstore.sync.start_new_thread


class Work:
    """Fills a caller's buffer until it is stopped."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.began, self.stopped, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._seconds = seconds

    def do(self) -> None:
        self.began.set()
        self.stopped.wait(self._seconds)
        time.sleep(0.05)  # one who does not wait for it is there first
        self.ended.set()


def test_an_interrupt_right_behind_the_start_of_the_thread_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is likely: its handler runs when the call that starts the thread returns."""
    work, seen = Work(), list[int]()

    def interrupted(run: Callable[[], None], arguments: tuple[()]) -> int:
        seen.append(start(run, arguments))
        if len(seen) == 1:
            work.began.wait(10.0)
            signal.raise_signal(signal.SIGINT)
        return seen[-1]

    monkeypatch.setattr(kvstore.sync, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        aside(work.do, work.stopped.set)
    assert work.ended.is_set()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_before_the_thread_runs_keeps_the_work_from_being_done(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also if the thread was made and comes to run when its caller is gone."""
    work, held = Work(), list[Callable[[], None]]()

    def interrupted(run: Callable[[], None], arguments: tuple[()]) -> int:
        held.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvstore.sync, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        aside(work.do, work.stopped.set)
    if late:
        held[0]()
    assert not work.began.is_set()


def test_work_that_no_thread_can_stop_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    work, started = Work(0.2), list[int]()

    def limited(run: Callable[[], None], arguments: tuple[()]) -> int:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(start(run, arguments))
        work.began.wait(10.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvstore.sync, "start_new_thread", limited)
    with pytest.raises(KeyboardInterrupt):
        aside(work.do, work.stopped.set)
    assert work.ended.is_set()


def test_without_any_thread_the_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(run: Callable[[], None], arguments: tuple[()]) -> int:
        raise RuntimeError("can't start new thread")

    work = Work()
    monkeypatch.setattr(kvstore.sync, "start_new_thread", none)
    with pytest.raises(NoThread):
        aside(work.do, work.stopped.set)
    assert not work.began.is_set()


def test_a_second_interrupt_before_the_wait_for_abreast_calls_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work, ended, calls = Work(0.2), kvstore.wires.abreast.end, list[int]()

    def end(futures: list[object]) -> None:
        calls.append(len(futures))
        if len(calls) == 1:
            raise KeyboardInterrupt
        ended(futures)  # type: ignore[arg-type]

    def interrupted() -> None:
        work.began.wait(10.0)
        raise KeyboardInterrupt

    def either() -> None:
        interrupted() if threading.current_thread() is threading.main_thread() else work.do()

    monkeypatch.setattr(kvstore.wires.abreast, "end", end)
    abreast = Abreast()
    try:
        with pytest.raises(KeyboardInterrupt):
            abreast.run([either, either])
        assert work.ended.is_set()
    finally:
        abreast.close()
