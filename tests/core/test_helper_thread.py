"""Work in a helper thread: it never goes on after its caller, interrupted or not."""

import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

import kvstore.sync
import kvstore.threads
import kvstore.transports.parallel
from kvstore.sync import NoThread, run_in_helper_thread
from kvstore.transports.parallel import ParallelTransfer

start = start_new_thread


class Work:
    """Work that uses a caller's buffer until it is stopped."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.began, self.stopped, self.ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._seconds = seconds

    def do(self) -> None:
        self.began.set()
        self.stopped.wait(self._seconds)
        time.sleep(0.05)  # a caller that does not wait would return first
        self.ended.set()


@pytest.fixture
def interrupt_at_hand_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work | None], None]:
    """Return a function that raises in the call that gives work to the helper thread.

    The handler of a signal is likely to run there.
    """

    def interrupt(begun: Work | None) -> None:
        class Interrupted(SimpleQueue[Any]):
            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                if item is None or seen:
                    return super().put(item)
                seen.append(1)
                if begun is not None:  # the work runs; otherwise it never arrives
                    super().put(item)
                    begun.began.wait(60.0)
                raise KeyboardInterrupt

        seen: list[int] = []
        monkeypatch.setattr(kvstore.sync, "SimpleQueue", Interrupted)
        monkeypatch.setattr(kvstore.sync, "_idle", [])

    return interrupt


def test_interrupt_after_the_hand_over_waits_for_the_work(
    interrupt_at_hand_over: Callable[[Work | None], None],
) -> None:
    work = Work()
    interrupt_at_hand_over(work)
    with pytest.raises(KeyboardInterrupt):
        run_in_helper_thread(work.do, work.stopped.set)
    assert work.ended.is_set()


def test_interrupt_before_the_hand_over_cancels_the_work(
    interrupt_at_hand_over: Callable[[Work | None], None],
) -> None:
    work = Work()
    interrupt_at_hand_over(None)
    with pytest.raises(KeyboardInterrupt):
        run_in_helper_thread(work.do, work.stopped.set)
    assert not work.began.is_set()


def test_interrupted_cancellation_does_not_wait_for_ever(
    interrupt_at_hand_over: Callable[[Work | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second interrupt comes after the work was cancelled, before the caller has noted it."""
    work, seen = Work(), list[int]()
    interrupt_at_hand_over(None)

    class Decided(dict[str, str]):
        def setdefault(self, key: str, default: str = "") -> str:
            found = super().setdefault(key, default)
            seen.append(1)
            if len(seen) == 1:
                raise KeyboardInterrupt
            return found

    made = kvstore.sync._Task.__init__

    def init(task: Any, *arguments: Any) -> None:
        made(task, *arguments)
        task._decided = Decided()

    monkeypatch.setattr(kvstore.sync._Task, "__init__", init)
    outcome: list[BaseException] = []

    def call() -> None:
        try:
            run_in_helper_thread(work.do, work.stopped.set)
        except KeyboardInterrupt as error:
            outcome.append(error)

    monkeypatch.setattr(kvstore.sync, "in_main_thread", lambda: True)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(60.0)
    assert len(outcome) == 1
    assert not work.began.is_set()


def test_work_is_awaited_when_no_thread_can_stop_it(
    interrupt_at_hand_over: Callable[[Work | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, started = Work(0.2), list[int]()

    def limited(run: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(start(run, arguments))
        return started[0]

    interrupt_at_hand_over(work)
    monkeypatch.setattr(kvstore.sync, "start_new_thread", limited)
    with pytest.raises(KeyboardInterrupt):
        run_in_helper_thread(work.do, work.stopped.set)
    assert work.ended.is_set()


def test_work_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(run: Callable[[], None], arguments: tuple[()]) -> int:
        raise RuntimeError("can't start new thread")

    work = Work()
    monkeypatch.setattr(kvstore.sync, "_idle", [])
    monkeypatch.setattr(kvstore.sync, "start_new_thread", none)
    with pytest.raises(NoThread):
        run_in_helper_thread(work.do, work.stopped.set)
    assert not work.began.is_set()


def test_second_interrupt_still_waits_for_parallel_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, ended, calls = Work(0.2), kvstore.threads.end, list[int]()

    def end(futures: list[object]) -> None:
        calls.append(len(futures))
        if len(calls) == 1:
            raise KeyboardInterrupt
        ended(futures)  # type: ignore[arg-type]

    def interrupted() -> None:
        work.began.wait(60.0)
        raise KeyboardInterrupt

    def either() -> None:
        interrupted() if threading.current_thread() is threading.main_thread() else work.do()

    monkeypatch.setattr(kvstore.transports.parallel, "end", end)
    abreast = ParallelTransfer()
    try:
        with pytest.raises(KeyboardInterrupt):
            abreast.run([either, either])
        assert work.ended.is_set()
    finally:
        abreast.close()
