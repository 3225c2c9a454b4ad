"""Work for the threads of a pool that is done there or not at all, and is waited for whatever happens.

An executor that can start no thread raises, and keeps what it was given all the same: another thread does it later,
behind its caller's back, in buffers that are somebody else's by then. So is what it was given when an interrupt comes
while it starts the thread.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from kvstore.tracing import carried

Result = TypeVar("Result")


def begin(done: "Future[Result]", pool: Executor, function: Callable[..., Result], *arguments: Any) -> bool:
    """Whether a thread does it and tells `done`, a new future; if not, nobody ever will, and it is cancelled. Who may
    be interrupted puts `done` where `end` finds it before."""
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
            del done  # its error has this frame, and with it what was asked for: they would wait for a collection

    try:
        pool.submit(work)
    except RuntimeError:  # no thread can be started, or the pool is closed
        return not done.cancel()
    return True


def begun(pool: Executor, function: Callable[..., Result], *arguments: Any) -> "Future[Result] | None":
    """The same for who is not interrupted; None: no thread does it."""
    done: Future[Result] = Future()
    return done if begin(done, pool, function, *arguments) else None


def end(futures: Collection["Future[Any]"]) -> None:
    """What has not begun never will, and what has is waited for. An interrupt is raised afterwards."""
    try:
        wait_for([done for done in futures if not done.cancel()])
    except BaseException:
        end(futures)
        raise


def wait_for(futures: Collection["Future[Any]"]) -> None:
    """Until all of them, which nobody has cancelled, have ended. An interrupt is raised afterwards.

    One after the other: `concurrent.futures.wait` takes all their locks, and an interrupt then leaves them taken.
    """
    try:
        for future in futures:
            future.exception()
    except BaseException:
        wait_for(futures)
        raise
