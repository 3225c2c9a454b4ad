"""Run saves or loads on a few threads, with a limit on pending bytes and a page buffer per job.

submit --- refused (result at once) <--- pending_nbytes_max, closed
   |
queue ---> worker + buffer ---> result          stopped: queued jobs end without running
"""

import atexit
import concurrent.futures
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from kvstore.log_rate import LogRate
from kvstore.sync import Event, Future
from kvstore.threads import ThreadPool, wait_for
from kvstore.tracing import NamesRequest, carried, span

log = logging.getLogger(__name__)
log.addFilter(LogRate())
log.addFilter(NamesRequest())
Result = TypeVar("Result")


class BoundedExecutor(Generic[Result]):
    """A bounded queue and its threads.

    Thread-safe.

    `submit` never blocks and never raises; its future always gets a result. `failed(reason,
    nbytes)` makes the result of a job that was refused, cancelled, or broke.
    """

    def __init__(
        self, name: str, workers: int, buffer_shape: tuple[int, int], pending_nbytes_max: int
    ) -> None:
        self._name = name
        self._workers = workers
        self._pending_nbytes_max = pending_nbytes_max
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        # One buffer per running job; written once, so that the memory is allocated
        for _ in range(workers):
            self._buffers.put(torch.empty(buffer_shape, dtype=torch.uint8).zero_())
        self._executor = ThreadPool(workers, f"kvstore-{name}")
        self._lock = threading.Lock()
        # Page bytes of each job, by its future
        self._active: dict[concurrent.futures.Future[Result], int] = {}
        self._pending_nbytes = 0  # their sum, because there may be thousands
        self._running = 0
        self._closed = False
        self._pid = os.getpid()
        self.stopping = Event()  # set: jobs end at their next chunk
        _executors.add(self)

    def submit(
        self, nbytes: int, work: Callable[[torch.Tensor], Result], failed: Callable[[str], Result]
    ) -> concurrent.futures.Future[Result]:
        """Run `work(buffer)` later.

        `nbytes`: bytes that the job counts against the limit.
        """
        done: concurrent.futures.Future[Result] = Future()
        done.set_running_or_notify_cancel()  # from here on only this class can cancel it
        with self._lock:
            reason = self._refusal(nbytes)
            if not reason:
                reason = self._begun(done, nbytes, work, failed)
        if reason:
            done.set_result(failed(reason))
        return done

    def _refusal(self, nbytes: int) -> str:
        if self._closed:
            return "the agent is closed"
        if os.getpid() != self._pid:  # a child of a fork, where its threads are missing
            return "the agent was made before a fork; make one in each process"
        pending = self._pending_nbytes
        if pending + nbytes > self._pending_nbytes_max:
            return (
                f"{pending} bytes are pending and {nbytes} more exceed "
                f"pending_nbytes_max={self._pending_nbytes_max}"
            )
        return ""

    def _begun(
        self,
        done: concurrent.futures.Future[Result],
        nbytes: int,
        work: Callable[[torch.Tensor], Result],
        failed: Callable[[str], Result],
    ) -> str:
        """Start a job; return the reason if no thread can be started or the interpreter ends.

        Python has queued the job then. `_run` finds that it is not active.
        """
        self._active[done] = nbytes
        self._pending_nbytes += nbytes
        try:
            self._executor.submit(carried(self._run), done, work, failed)
        except RuntimeError as error:
            self._pending_nbytes -= self._active.pop(done)
            return str(error)
        except BaseException:  # an interrupt of the caller: nothing will use the result
            self._pending_nbytes -= self._active.pop(done, 0)
            raise
        return ""

    def _run(
        self,
        done: concurrent.futures.Future[Result],
        work: Callable[[torch.Tensor], Result],
        failed: Callable[[str], Result],
    ) -> None:
        with self._lock:
            if done not in self._active:
                return
            self._running += 1
            buffer = self._buffers.get_nowait()
        try:
            with span(f"kvstore.{self._name}"):
                result = failed("the agent is closed") if self.stopping.is_set() else work(buffer)
        except Exception as error:  # the engine needs a result after any error
            log.exception("a %s job failed", self._name)
            result = failed(f"internal error: {error!r}")
        with self._lock:
            self._buffers.put(buffer)
            self._running -= 1
            self._pending_nbytes -= self._active.pop(done)
        done.set_result(result)

    def close(self, timeout_s: float) -> None:
        """Take no more work, wait for pending jobs for `timeout_s`, then stop the others.

        A job in the middle of a call ends with that call, so this returns at most one call's
        deadline later. A child of a fork does not have the jobs: there it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            active = list(self._active)
        wait_for(active, timeout_s)
        self.stopping.set()
        self._executor.shutdown(wait=True)

    @property
    def pending_nbytes(self) -> int:
        """Return the page bytes of jobs that are accepted and not done."""
        with self._lock:
            return self._pending_nbytes

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""
        with self._lock:
            found = []
            free, pending = self._buffers.qsize(), self._pending_nbytes
            if pending != sum(self._active.values()):
                found.append(
                    f"{self._name}: {pending} bytes pending, but {sum(self._active.values())} of "
                    "known jobs"
                )
            if free + self._running != self._workers:
                found.append(
                    f"{self._name}: {free} free and {self._running} used buffers, expected "
                    f"{self._workers} in all"
                )
            if pending > self._pending_nbytes_max:
                found.append(
                    f"{self._name}: {pending} bytes pending, over "
                    f"pending_nbytes_max={self._pending_nbytes_max}"
                )
            if self._running > len(self._active):
                found.append(
                    f"{self._name}: {self._running} jobs run, only {len(self._active)} are known"
                )
            if any(done.done() for done in self._active):
                found.append(f"{self._name}: a finished job still counts as pending")
            return found


_executors: "weakref.WeakSet[BoundedExecutor[Any]]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop jobs at the interpreter's exit, before it waits for their threads.

    An engine that never closes its agents would otherwise wait for all queued saves.
    """
    for executor in list(_executors):
        executor.stopping.set()
