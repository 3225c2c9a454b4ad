"""Synchronisation that stays usable when a signal handler raises, as Ctrl-C's does.

Python runs signal handlers in the main thread, after a call or at a jump of its byte code. `threading.Condition` takes
and frees its lock in methods that are written in Python: a handler that raises there leaves the lock taken for ever
(bpo-29988), and whoever comes next hangs, in any thread. Semaphores, events, `Thread.start`, futures, executors and
gRPC's channels all have such a condition inside. Code that may run in a caller's thread uses this module instead:

- `with lock` of a plain `threading.Lock`, which is C from beginning to end,
- `Condition`, `Event` and `Future`, whose lock is taken by C,
- `Turns`, which are given back when their holder is collected, wherever an interrupt came,
- `aside` and `start_thread`, which leave the work to a thread in which no handler runs.
"""

import concurrent.futures
import contextlib
import contextvars
import threading
import time
import weakref
from _thread import RLock, allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Thing = TypeVar("Thing")

# How long a waiting thread sleeps at most before it looks again: an interrupt may have swallowed its wake-up.
LOOK_S = 0.05


class Condition(RLock):  # type: ignore[misc,valid-type,unused-ignore]
    """A condition variable of which `with` is C. Entered once by a thread, never twice."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `notify_all`, at most `timeout` seconds. Return False if nobody called it."""
        told = allocate_lock()
        told.acquire()
        self._waiting.append(told)
        state = (1, get_ident())  # what _release_save returns, which an interrupt could swallow
        try:
            self._release_save()  # type: ignore[attr-defined]
            return told.acquire(True, -1.0 if timeout is None else max(0.0, timeout))
        finally:
            # First, and never interrupted: `with` frees the lock next.
            self._acquire_restore(state)  # type: ignore[attr-defined]
            with contextlib.suppress(ValueError):
                self._waiting.remove(told)

    def wait_for(self, holds: Callable[[], Result], timeout: float | None = None) -> Result:
        """Wait until `holds()` is true, at most `timeout` seconds. Return what it returned last."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (held := holds()):
            left_s = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left_s <= 0:
                break
            self.wait(left_s)  # an interrupt may have swallowed the wake-up
        return held

    def notify_all(self) -> None:
        """Wake all that wait. They leave the list themselves, so that an interrupt here loses none of them."""
        for told in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # told already
                told.release()


class Event:
    """A flag to wait for. An interrupted `set` counts once it has begun."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[Any] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for told in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):
                told.release()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds. Return whether it is."""
        if self._set:
            return True
        end = None if timeout is None else time.monotonic() + timeout
        told = allocate_lock()
        told.acquire()
        self._waiting.append(told)
        try:
            while not self._set:
                left_s = 1.0 if end is None else min(1.0, end - time.monotonic())
                if left_s <= 0:
                    break
                told.acquire(True, left_s)
            return self._set
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(told)


class Future(concurrent.futures.Future[Result]):
    """A future that the main thread may wait for, ask and cancel."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class Turns(Generic[Thing]):
    """At most so many holders at a time, each with a thing of its own. Thread-safe.

    A holder gives its turn back with `give`. One that an interrupt kept from that has no turn any more when it is
    collected; what it had is then among the `abandoned`. So no interrupt loses a turn, wherever it comes.
    """

    def __init__(self, count_max: float = float("inf")) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        self._held: dict[int, tuple[weakref.ref[Any], Thing]] = {}
        self._lost: deque[weakref.ref[Any]] = deque()
        self._waiting: deque[Any] = deque()

    def take(self, holder: object, thing: Thing, timeout_s: float = 0.0) -> bool:
        """Give `holder` a turn. Return False if none came free for `timeout_s` seconds."""
        reference = weakref.ref(holder, self._lost.append)  # called from C: no handler runs in it
        with self._lock:
            if len(self._held) < self._count_max:
                self._held[id(holder)] = reference, thing
                return True
        if timeout_s <= 0:
            return False
        end = time.monotonic() + timeout_s
        told = allocate_lock()
        told.acquire()
        self._waiting.append(told)
        try:
            while not self.take(holder, thing):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                told.acquire(True, min(left_s, LOOK_S))
            return True
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(told)

    def give(self, holder: object) -> None:
        """End the turn of `holder`, if it has one."""
        with self._lock:
            self._held.pop(id(holder), None)
        if self._waiting:
            for told in tuple(self._waiting):
                with contextlib.suppress(RuntimeError):
                    told.release()
                    break

    @property
    def count(self) -> int:
        """Holders that have a turn."""
        with self._lock:
            return sum(reference() is not None for reference, _ in self._held.values())

    @property
    def have_abandoned(self) -> bool:
        """Whether `abandon` has something to do, or may have: cheap enough for every call."""
        return bool(self._lost) or len(self._held) >= self._count_max

    def abandon(self, end: Callable[[Thing], None]) -> None:
        """Let `end` do with each abandoned thing what its holder did not; then its turn is free.

        If an interrupt comes the next caller does it, perhaps again.
        """
        with self._lock:
            dead = [(key, held[1]) for key, held in self._held.items() if held[0]() is None]
            for key, thing in dead:
                end(thing)
                del self._held[key]
            self._lost.clear()


class NoThread(RuntimeError):
    """This process can have no more threads."""


def in_main_thread() -> bool:
    """Whether signal handlers run in this thread."""
    return get_ident() == threading.main_thread().ident


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread. Raise RuntimeError if none can be had."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    aside(thread.start)  # it waits for an Event of the new thread's


class _Outcome:
    """Of work that another thread does: written by it alone, read when it has ended."""

    result: Any = None
    failed: BaseException | None = None

    def set_exception(self, error: BaseException) -> None:
        self.failed = error


def aside(work: Callable[[], Result], stop: Callable[[], object] | None = None) -> Result:
    """Return what `work` returns, or raise what it raises, without signal handlers in between.

    In the main thread another thread does it. If a handler raises while that is waited for, `work` goes on to its own
    end and is not waited for. With `stop`, which makes it end soon, it is: it may use buffers of the caller's.
    """
    if not in_main_thread():
        return work()
    outcome, claims = _Outcome(), dict[str, str]()
    ended = allocate_lock()
    ended.acquire()
    context = contextvars.copy_context()

    def run() -> None:
        if _claimed(claims, _HELPER) != _HELPER:
            return
        try:
            outcome.result = context.run(work)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, who waits gets it
            outcome.set_exception(error)
        finally:
            _leave_no_dummy()
            ended.release()

    try:
        try:
            start_new_thread(run, ())
        except RuntimeError as error:
            raise NoThread(str(error)) from error
        with ended:
            pass
    except BaseException:  # perhaps of a handler that ran before the thread was started, or right behind that
        if stop is not None:
            try:
                _stopped(claims, stop, ended)
            except BaseException:  # one that came before its first line
                _stopped(claims, stop, ended)
                raise
        raise
    if outcome.failed is not None:
        try:
            raise outcome.failed
        finally:
            del outcome  # the error's traceback has this frame
    return outcome.result  # type: ignore[no-any-return]


_CALLER, _HELPER = "caller", "helper"


def _claimed(claims: dict[str, str], by: str) -> str:
    """Return who has the work: whoever asked first. It may be asked again, as after an interrupt."""
    return claims.setdefault("work", by)


def _stopped(claims: dict[str, str], stop: Callable[[], object], ended: Any) -> None:
    """Return when the work has ended or will never begin, however many interrupts come meanwhile."""
    try:
        if _claimed(claims, _CALLER) == _CALLER:
            return
        with contextlib.suppress(RuntimeError):  # without a thread for it the work ends by its own deadline
            start_new_thread(stop, ())
        with ended:
            pass
    except BaseException:
        _stopped(claims, stop, ended)
        raise


def _leave_no_dummy() -> None:
    """Forget the object that `threading` made for this thread if it logged something. Before Python 3.13 it would be
    among `threading.enumerate()` for ever."""
    threads = getattr(threading, "_active", {})
    if isinstance(threads.get(get_ident()), getattr(threading, "_DummyThread", ())):
        threads.pop(get_ident(), None)
