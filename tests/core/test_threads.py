"""Thread pools: work whose thread cannot start, or that was interrupted, does not run later."""

import concurrent.futures
import os
import signal
import threading
from types import FrameType
from typing import Any

import pytest

from kvstore.threads import ThreadPool, begin, end, wait_for

start_thread = threading.Thread.start


@pytest.fixture
def pool() -> Any:
    with concurrent.futures.ThreadPoolExecutor(2, "kvstore-test") as pool:
        yield pool


def refuse(thread: threading.Thread) -> None:
    """Fail as at the process limit."""
    raise RuntimeError("can't start new thread")


def run_something(pool: concurrent.futures.Executor) -> None:
    """Run tasks in the pool, after any that were queued before."""
    pool.submit(lambda: None).result(60.0)
    pool.submit(lambda: None).result(60.0)


def test_helper_thread_reports_what_it_began(pool: concurrent.futures.Executor) -> None:
    sums: list[concurrent.futures.Future[int]] = [concurrent.futures.Future() for _ in range(5)]
    assert all(begin(done, pool, sum, (number, 1)) for number, done in enumerate(sums))
    wait_for(sums)
    assert [done.result() for done in sums] == [1, 2, 3, 4, 5]
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert begin(failed, pool, int, "no number")
    assert isinstance(failed.exception(10.0), ValueError)


def test_work_without_a_thread_never_runs(
    pool: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[int] = []
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not begin(done, pool, happened.append, 1)
    assert done.cancelled()
    run_something(pool)
    assert happened == []


@pytest.mark.parametrize("runs", [True, False])
def test_interrupt_while_work_begins_leaves_nothing_behind(
    runs: bool, pool: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the thread has begun, the work has ended when `end` returns."""
    gate, happened = threading.Event(), list[str]()

    def work() -> None:
        happened.append("began")
        gate.wait(60.0)
        happened.append("ended")

    def start(thread: threading.Thread) -> None:
        if runs:
            start_thread(thread)
            while not happened:
                gate.wait(0.001)
        signal.raise_signal(signal.SIGINT)

    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            begin(done, pool, work)
    threading.Timer(0.2, gate.set).start()
    end([done])
    assert happened == (["began", "ended"] if runs else [])
    run_something(pool)
    assert len(happened) in (0, 2)


def test_interrupt_is_raised_after_the_work_has_ended(pool: concurrent.futures.Executor) -> None:
    gate = threading.Event()
    done: concurrent.futures.Future[bool] = concurrent.futures.Future()
    assert begin(done, pool, gate.wait, 60.0)

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Interrupt `end`, and let the work end later."""
        while frame is not None and frame.f_code is not end.__code__:
            frame = frame.f_back
        if frame is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            threading.Timer(0.3, gate.set).start()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            end([done])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done.done()


def test_pool_whose_thread_can_not_start_shuts_down_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ThreadPool(1, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError) as refused:
            pool.submit(lambda: None)
    ended = threading.Thread(target=pool.shutdown, daemon=True)
    ended.start()
    ended.join(60)
    assert not ended.is_alive()
    # The error is kept until here, with everything that its frames refer to
    assert refused.value.__traceback__ is not None


def test_shutdown_in_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    """Regression: it waited for ever, because the child has the count but not the threads."""
    pool = ThreadPool(1, "kvstore-test")
    pool.submit(lambda: None).result(60.0)
    child = os.fork()
    if not child:
        signal.alarm(20)
        pool.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.submit(lambda: 7).result(60.0) == 7
    pool.shutdown()
