"""Synchronise threads so that a signal handler may raise at any time, as Ctrl-C's does.

Python runs signal handlers in the main thread, after a call or at a jump of its byte code.
`threading.Condition` takes and frees its lock in Python methods. A handler that raises there leaves
the lock taken for ever (bpo-29988), and every other thread that needs it hangs. Semaphores, events,
`Thread.start`, futures, executors and gRPC's channels contain such a condition. Code that may run
in a caller's thread uses this module instead:

- `with lock` of a plain `threading.Lock`, which is implemented in C,
- `Condition`, `Event` and `Future`, whose lock is taken by C,
- `LeaseTable`, whose leases end when their holder is collected, wherever an interrupt came,
- `run_in_helper_thread` and `start_thread`, which leave the work to a thread in which no handler
  runs.
"""

import concurrent.futures
import contextlib
import contextvars
import os
import threading
import time
import weakref
from _thread import RLock, allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

Result = TypeVar("Result")
Thing = TypeVar("Thing")

# A waiting thread checks its condition at least this often: an interrupt may have swallowed its
# wake-up.
LOOK_S = 0.05


class Condition(RLock):  # type: ignore[misc,valid-type,unused-ignore]
    """A condition variable whose `with` is implemented in C.

    A thread enters it once, never twice.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `notify_all`, at most `timeout` seconds.

        Return False on timeout.
        """
        wakeup = allocate_lock()
        wakeup.acquire()
        self._waiting.append(wakeup)
        state = (1, get_ident())  # the value of _release_save, which an interrupt could swallow
        try:
            self._release_save()  # type: ignore[attr-defined]
            return wakeup.acquire(True, -1.0 if timeout is None else max(0.0, timeout))
        finally:
            # First, and never interrupted: `with` frees the lock next.
            self._acquire_restore(state)  # type: ignore[attr-defined]
            with contextlib.suppress(ValueError):
                self._waiting.remove(wakeup)

    def wait_for(self, holds: Callable[[], Result], timeout: float | None = None) -> Result:
        """Wait until `holds()` is true, at most `timeout` seconds.

        Return its last value.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not (held := holds()):
            left_s = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left_s <= 0:
                break
            self.wait(left_s)  # an interrupt may have swallowed the wake-up
        return held

    def notify_all(self) -> None:
        """Wake all waiting threads.

        They remove themselves from the list, so that an interrupt here loses none of them.
        """
        for wakeup in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # woken already
                wakeup.release()


class Event:
    """A flag to wait for.

    An interrupted `set` takes effect once it has begun.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[Any] = deque()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._set

    def set(self) -> None:
        """Set the flag and wake all waiting threads."""
        self._set = True
        for wakeup in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):
                wakeup.release()

    def clear(self) -> None:
        """Reset the flag."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds.

        Return whether it is set.
        """
        if self._set:
            return True
        end = None if timeout is None else time.monotonic() + timeout
        wakeup = allocate_lock()
        wakeup.acquire()
        self._waiting.append(wakeup)
        try:
            while not self._set:
                left_s = 1.0 if end is None else min(1.0, end - time.monotonic())
                if left_s <= 0:
                    break
                wakeup.acquire(True, left_s)
            return self._set
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(wakeup)


class Future(concurrent.futures.Future[Result]):
    """A future that the main thread may wait for, query and cancel."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class LeaseTable(Generic[Thing]):
    """Grant at most `count_max` leases at a time, each to a holder and with a resource.

    Thread-safe.

    A holder ends its lease with `release`. If an interrupt prevents that, the lease ends when the
    holder is collected, and the next `acquire` calls `end` with the resource. So an interrupt never
    loses a lease.
    """

    def __init__(
        self, count_max: float = float("inf"), end: Callable[[Thing], object] = lambda thing: None
    ) -> None:
        self._count_max = count_max
        self._end = end
        self._lock = threading.Lock()
        # Not keyed by id(): a new holder may have the same id before this resource was ended.
        self._held: dict[weakref.ref[Any], Thing] = {}
        self._collected: deque[weakref.ref[Any]] = deque()
        self._waiting: deque[Any] = deque()

    def acquire(self, holder: object, thing: Thing, timeout_s: float = 0.0) -> bool:
        """Grant `holder` a lease.

        Return False if none became free within `timeout_s` seconds.
        """
        if self._collected:
            self.reclaim()
        # The callback is C code: no signal handler runs in it
        reference = weakref.ref(holder, self._collected.append)
        with self._lock:
            if len(self._held) < self._count_max:
                self._held[reference] = thing
                return True
        if timeout_s <= 0:
            return False
        end = time.monotonic() + timeout_s
        wakeup = allocate_lock()
        wakeup.acquire()
        self._waiting.append(wakeup)
        try:
            while not self.acquire(holder, thing):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                wakeup.acquire(True, min(left_s, LOOK_S))
            return True
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(wakeup)

    def release(self, holder: object) -> None:
        """End the lease of `holder`, if it has one, and wake a thread that waits for one."""
        with self._lock:
            self._held.pop(weakref.ref(holder), None)
        if self._waiting:
            for wakeup in tuple(self._waiting):
                with contextlib.suppress(RuntimeError):
                    wakeup.release()
                    break

    @property
    def count(self) -> int:
        """Return the number of leases whose holder is alive."""
        with self._lock:
            return sum(reference() is not None for reference in self._held)

    def reclaim(self) -> None:
        """Call `end` with the resources of collected holders, and free their leases.

        If an interrupt comes, the next caller repeats the call that was cut short.
        """
        with self._lock:
            while self._collected:
                reference = self._collected[0]
                # The key is missing if the lease was refused. A reference that was never hashed can
                # not be looked up.
                with contextlib.suppress(KeyError, TypeError):
                    self._end(self._held[reference])
                    del self._held[reference]
                self._collected.popleft()


class NoThread(RuntimeError):
    """This process can start no more threads."""


def in_main_thread() -> bool:
    """Return whether signal handlers run in this thread."""
    return get_ident() == threading.main_thread().ident


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread.

    Raises RuntimeError if none can be started.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    run_in_helper_thread(thread.start)  # `start` waits for an Event of the new thread


class _Task:
    """Work for a helper thread, and its result.

    Only that thread writes the result.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.handed_over = False
        self.stopping = False
        # Decides whether the work begins: the first to ask wins, and an interrupted caller may ask
        # again.
        self._decided: dict[str, str] = {}
        self._end = allocate_lock()
        self._end.acquire()

    def run(self) -> None:
        """Run the work, unless `cancel` came first."""
        try:
            if self._decided.setdefault("by", "helper") == "helper":
                self.result = self.context.run(self.work)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, who waits gets it
            self.set_exception(error)
        finally:
            self.ended = True

    def set_exception(self, error: BaseException) -> None:
        self.error = error

    def cancel(self) -> None:
        """Keep the work from beginning, if it has not begun."""
        if self._decided.setdefault("by", "caller") == "caller":
            self.ended = True

    def wait(self) -> None:
        with self._end:
            pass

    def wake(self) -> None:
        """Make `wait` return."""
        self._end.release()


class _Interrupts:
    """Keep the first exception of a signal handler during a wait, to raise it afterwards."""

    first: BaseException | None = None

    def set_exception(self, error: BaseException) -> None:
        if self.first is None:
            self.first = error

    def throw(self) -> NoReturn:
        assert self.first is not None
        error, self.first = self.first, None
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


class _Helper:
    """A thread that waits for tasks.

    The thread ends when this object is collected, so an interrupt leaks none.
    """

    __slots__ = ("__weakref__", "tasks")

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[_Helper, _Task] | None] = SimpleQueue()
        # The callback is C code: no signal handler runs in it
        collected = weakref.ref(self, partial(self.tasks.put, None))
        start_new_thread(_serve, (self.tasks, collected))


# Kept from call to call: starting a thread costs more than the rest of a short gRPC call.
_idle: list[_Helper] = []
IDLE_MAX = 2
os.register_at_fork(after_in_child=_idle.clear)


def _serve(tasks: "SimpleQueue[tuple[_Helper, _Task] | None]", _collected: object) -> None:
    while (job := tasks.get()) is not None:
        helper, task = job
        task.run()
        _leave_no_dummy()
        if len(_idle) < IDLE_MAX:
            _idle.append(helper)
        del job, helper  # a helper that is not kept is collected here
        task.wake()
        del task


def _hand_over(task: _Task) -> None:
    try:
        helper = _idle.pop()
    except IndexError:
        try:
            helper = _Helper()
        except RuntimeError as error:
            raise NoThread(str(error)) from error
    task.handed_over = True
    helper.tasks.put((helper, task))


def run_in_helper_thread(
    work: Callable[[], Result], stop: Callable[[], object] | None = None
) -> Result:
    """Run `work` where no signal handler can interrupt it; return its result or raise its error.

    In the main thread a helper thread runs it; other threads run it themselves. If a signal handler
    raises while the main thread waits, `work` continues unattended. With `stop`, the main thread
    calls `stop`, which makes `work` end soon, and waits for that: `work` may use the caller's
    buffers. Raises NoThread if no thread can be started.
    """
    if not in_main_thread():
        return work()
    task = _Task(work)
    if stop is None:
        _hand_over(task)
        task.wait()
    else:
        interrupts = _Interrupts()
        _wait_uninterrupted(task, stop, interrupts)
        if interrupts.first is not None:
            interrupts.throw()
    error, task.error = task.error, None  # its traceback refers to the task, and to this frame
    if error is not None:
        try:
            raise error
        finally:
            del error
    return task.result  # type: ignore[no-any-return]


# More signals than these, each while the previous one's handler raises, would end the wait for a
# caller's buffers.
LEVELS = 8


def _wait_uninterrupted(
    task: _Task, stop: Callable[[], object], interrupts: _Interrupts, levels: int = LEVELS
) -> None:
    """Wait until the task has ended or cannot begin any more, however many interrupts arrive.

    A handler may also raise where an `except` ends or a loop jumps back, which no `try` of this
    call covers. The `try` of the recursion level above does.
    """
    while not task.ended:
        try:
            if levels:
                _wait_uninterrupted(task, stop, interrupts, levels - 1)
            elif interrupts.first is not None:
                _stop(task, stop)
            else:
                _hand_over(task)
                task.wait()
        # `run_in_helper_thread` raises the first one.
        except BaseException as error:  # noqa: BLE001
            interrupts.set_exception(error)
            if isinstance(error, NoThread) and not task.handed_over:
                task.ended = True


def _stop(task: _Task, stop: Callable[[], object]) -> None:
    task.cancel()
    if task.ended:
        return
    if not task.stopping:
        task.stopping = True
        # If no thread can be started for it, the work ends by its deadline.
        with contextlib.suppress(RuntimeError):
            start_new_thread(stop, ())
    task.wait()


def _leave_no_dummy() -> None:
    """Forget the object that `threading` made for this thread if it logged something.

    Before Python 3.13 it would be among `threading.enumerate()` for ever.
    """
    threads = getattr(threading, "_active", {})
    if isinstance(threads.get(get_ident()), getattr(threading, "_DummyThread", ())):
        threads.pop(get_ident(), None)
