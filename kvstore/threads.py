"""Run work on pool threads entirely or not at all, and wait for it whatever happens.

An executor that can start no thread raises, but keeps the work: another thread runs it later, in
buffers that may belong to another call by then. The same happens when an interrupt comes while it
starts the thread.
"""

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from concurrent.futures import Future as AnyFuture

# before 3.11 this is not Python's own TimeoutError
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

from kvstore.sync import Future, LeaseTable, start_thread
from kvstore.tracing import carried

Result = TypeVar("Result")


class ThreadPool(Executor):
    """Run jobs like a `ThreadPoolExecutor`, and stay usable if a signal handler raises in `submit`.

    Each job starts a thread until there are `threads_max`.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[functools.partial[None] | None] = queue.SimpleQueue()
        self._threads: LeaseTable[None] = LeaseTable(threads_max)
        self._closed = False
        self._pid = os.getpid()
        _pools.add(self)

    def submit(
        self, function: Callable[..., Result], /, *arguments: Any, **named: Any
    ) -> "Future[Result]":
        """Submit a job. Raises RuntimeError and drops it if closed, or if no thread starts."""
        done: Future[Result] = Future()
        job = functools.partial(_do, [done], functools.partial(function, *arguments, **named))
        if self._pid != os.getpid():
            raise RuntimeError("the threads of this pool belong to the parent process")
        # Held while a thread starts, too: no other job may rely on a thread that then fails to
        # start
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._grow()
            self._jobs.put(job)
        return done

    def _grow(self) -> None:
        lease = _ThreadLease()
        if not self._threads.acquire(lease, None):
            return
        try:
            start_thread(functools.partial(_work, self._jobs, self._threads, [lease]), self._name)
        except RuntimeError:
            self._threads.release(lease)
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs.

        Submitted jobs run; with `wait` this returns after them. A child of a fork does not have the
        threads: there it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while cancel_futures:
                    job = self._jobs.get_nowait()
                    if job is not None:
                        job.args[0][0].cancel()
            self._jobs.put(None)
        while wait and self._threads.count:
            time.sleep(0.001)

    def __del__(self) -> None:
        self._jobs.put(None)  # its threads end


class _ThreadLease:
    """Count one thread of a pool, until it ends or never started."""


def _work(
    jobs: "queue.SimpleQueue[functools.partial[None] | None]",
    threads: LeaseTable[None],
    lease: list[_ThreadLease],
) -> None:
    """Run jobs until there are no more.

    It does not hold a reference to the pool, which may be dropped without a shutdown.
    """
    while (job := jobs.get()) is not None:
        job()
        del job
    jobs.put(None)  # the next thread ends, too
    threads.release(lease.pop())


def _do(own: "list[Future[Result]]", function: Callable[[], Result]) -> None:
    done = own.pop()
    try:
        if done.set_running_or_notify_cancel():
            done.set_result(function())
    except BaseException as error:  # noqa: BLE001 -- whatever it is, who waits gets it
        done.set_exception(error)
    finally:
        # Its error refers to this frame, and so to the work: both would wait for a garbage
        # collection
        del done


_pools: "weakref.WeakSet[ThreadPool]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for pool in list(_pools):
        pool.shutdown()


def begin(
    done: "AnyFuture[Result]", pool: Executor, function: Callable[..., Result], *arguments: Any
) -> bool:
    """Run a function on a thread of the pool; return False if it will never run.

    `done`, a new future, gets the result. It is cancelled if the function never runs. A caller that
    may be interrupted stores `done` first where `end` finds it.
    """
    own = [done]
    function = carried(function)

    def work() -> None:
        done = own.pop()
        try:
            if done.set_running_or_notify_cancel():
                done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 -- whatever it is, who waits gets it
            done.set_exception(error)
        finally:
            # Its error refers to this frame, and so to the work: both would wait for a garbage
            # collection
            del done

    try:
        pool.submit(work)
    except RuntimeError:  # no thread can be started, or the pool is closed
        return not done.cancel()
    return True


def begun(
    pool: Executor, function: Callable[..., Result], *arguments: Any
) -> "Future[Result] | None":
    """Run a function on a thread; None if no thread takes it. Not for interrupted callers."""
    done: Future[Result] = Future()
    return done if begin(done, pool, function, *arguments) else None


def end(futures: Collection["AnyFuture[Any]"]) -> None:
    """Cancel what has not begun, wait for the rest, and raise an interrupt afterwards."""
    try:
        wait_for([done for done in futures if not done.cancel()])
    except BaseException:
        end(futures)
        raise


def wait_for(futures: Collection["AnyFuture[Any]"], timeout_s: float | None = None) -> None:
    """Wait until all futures have ended, and raise an interrupt afterwards.

    None of them may be cancelled. They are waited for one after the other:
    `concurrent.futures.wait` takes all their locks, and an interrupt would leave these locked. With
    `timeout_s` it waits no longer than that, and an interrupt is raised at once.
    """
    if timeout_s is not None:
        until = time.monotonic() + timeout_s
        for future in futures:
            try:
                future.exception(max(0.0, until - time.monotonic()))
            except Late:
                if not future.done():
                    return
        return
    try:
        for future in futures:
            future.exception()
    except BaseException:
        wait_for(futures)
        raise
