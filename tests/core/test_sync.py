"""`kvstore.sync` and its pools: interrupts, missing threads and forks leave no lock taken.

A longer run: INTERRUPTS=20000 python -m pytest tests/core/test_sync.py
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

import kvstore.sync as sync
from kvstore.sync import LeaseTable, NoThread, run_in_helper_thread
from kvstore.threads import ThreadPool

INTERRUPTS = int(os.environ.get("INTERRUPTS", "100"))
WAIT_S = 60.0  # far more than a busy machine needs


class Holder:
    """An object that can be garbage collected."""


class Abort(BaseException):
    """The exception that signal handlers raise here."""


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def test_leases_of_collected_holders_are_free_at_once() -> None:
    ended: list[str] = []
    table = LeaseTable(1, ended.append)
    assert table.acquire(Holder(), "first")  # collected without a release
    holder = Holder()
    assert table.acquire(holder, "second")
    assert ended == ["first"]
    table.release(holder)
    assert table.count == 0


def test_new_holder_at_a_reused_address_does_not_hide_a_lease() -> None:
    ended: list[int] = []
    table = LeaseTable[int](end=ended.append)
    kept = []
    for number in range(100):
        holder = Holder()
        table.acquire(holder, number)
        if number % 2:
            table.release(holder)
            kept.append(holder)
    del holder
    gc.collect()
    table.reclaim()
    assert sorted(ended) == list(range(0, 100, 2))


def test_pool_starts_a_thread_after_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ThreadPool(2, "kvstore-test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="start new thread"):
                pool.submit(int)
    assert pool.submit(int).result(WAIT_S) == 0
    pool.shutdown()


def test_pool_in_a_forked_child_refuses_work() -> None:
    pool = ThreadPool(1, "kvstore-test")
    pool.submit(int).result(WAIT_S)
    pid = os.fork()
    if not pid:
        try:
            pool.submit(int)
            os._exit(1)
        except RuntimeError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pool.shutdown()


@pytest.fixture
def interrupt_soon() -> Any:
    before = signal.getsignal(signal.SIGALRM)

    def abort(*_: object) -> None:
        raise Abort

    signal.signal(signal.SIGALRM, abort)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupted_call_waits_when_no_thread_can_stop_its_work(
    monkeypatch: pytest.MonkeyPatch, interrupt_soon: Callable[[float], object]
) -> None:
    run_in_helper_thread(int)  # starts the helper thread
    started, may_end, ended = threading.Lock(), threading.Lock(), list[int]()
    may_end.acquire()

    def work() -> None:
        started.acquire()
        may_end.acquire(True, 1.0)
        ended.append(1)

    monkeypatch.setattr(sync, "start_new_thread", no_thread)

    def interrupted() -> None:
        interrupt_soon(0.2)
        run_in_helper_thread(work, lambda: None)

    with pytest.raises(Abort):
        interrupted()
    assert ended == [1] or not started.locked()


def test_main_thread_calls_share_one_helper_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_helper_thread(int)
    monkeypatch.setattr(sync, "start_new_thread", no_thread)
    for _ in range(1000):
        assert run_in_helper_thread(lambda: 1) == 1
    monkeypatch.setattr(sync, "_idle", [])
    for stop in (None, lambda: None):
        with pytest.raises(NoThread):
            run_in_helper_thread(int, stop)


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, timeout=300
    ).stdout


def test_rapid_interrupts_leave_no_work_running() -> None:
    """Three signals come within a few microseconds, anywhere in the call."""
    assert run(STORM, INTERRUPTS) == "calm\n"


STORM = """
    import os, random, signal, sys, threading
    from kvstore.sync import run_in_helper_thread
    sys.setswitchinterval(1e-4)
    rng, left = random.Random(1), [0]
    class Abort(BaseException): pass
    def interrupt(*_):
        if left[0] > 0:
            left[0] -= 1
            if left[0]:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 6e-5))
            raise Abort
    signal.signal(signal.SIGALRM, interrupt)
    def one():
        stopped, began, ended = threading.Lock(), [], []
        stopped.acquire()
        def work():
            began.append(1)
            stopped.acquire(True, 0.05)
            for _ in range(100):
                os.stat(".")
            ended.append(1)
        def stop():
            if stopped.locked():
                stopped.release()
        try:
            left[0] = 3
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))
            run_in_helper_thread(work, stop)
            left[0] = 0
        except Abort:
            left[0] = 0
            assert len(ended) == len(began), "work goes on after the call"
            return 1
        return 0
    count = 0
    while count < int(sys.argv[1]):
        try:
            count += one()
        except Abort:
            left[0] = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    threads = len(os.listdir("/proc/self/task"))
    assert threads <= 6, threads
    print("calm", flush=True)
"""


def test_exception_in_a_fork_hook_leaves_grpc_usable() -> None:
    """It raises in each line of kvstore that runs around a fork in the parent, one per fork."""
    program = """
        import os, sys
        import kvstore.transports.grpc_process as forks
        sys.unraisablehook = lambda _: None
        class Abort(BaseException): pass
        lines = 0
        for raising in range(1, 60):
            lines = 0
            def trace(frame, event, argument):
                global lines
                if frame.f_code.co_filename != forks.__file__:
                    return None
                if event == "line":
                    lines += 1
                    if lines == raising:
                        raise Abort
                return trace
            sys.settrace(trace)
            pid = os.fork()
            sys.settrace(None)
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            done = []
            import threading
            threading.Thread(target=lambda: done.append(forks.gate.run(int)), daemon=True).start()
            import time
            end = time.monotonic() + 60
            while not done and time.monotonic() < end:
                time.sleep(0.001)
            assert done == [0], f"closed by an exception in line {raising}"
        print("open", flush=True)
        os._exit(0)
    """
    assert run(program) == "open\n"
