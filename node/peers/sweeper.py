"""When a member sweeps: after each change of the view, now and then, and when it is asked to.

A member that joins serves when its first sweep is over. Those beside a member that is drained sweep, because they own
now what it had. One that comes back without its pages, or that was away when pages were put, sweeps when it starts.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvstore.cluster.view import State, View
from node.peers.membership import Membership
from node.peers.sweep import MISSING_MAX, Report, Sweep

log = logging.getLogger(__name__)

SETTLE_S = 1.0  # after a change of the view: several members often come or go together
AGAIN_S = 10.0  # after a sweep that did not get all


class Sweeper:
    """`make(pause)` gives the sweep."""

    def __init__(
        self,
        membership: Membership,
        make: Callable[[Callable[[int], bool]], Sweep],
        nbytes_per_s: int,
        period_s: float,
    ) -> None:
        self._membership = membership
        self._sweep = make(self._pause)
        self._nbytes_per_s = nbytes_per_s
        self._period_s = period_s
        self._turn = threading.Condition()
        self._due_s = float("inf")  # when to sweep, in the clock's time
        self._stopped = False
        self._began_s = self._moved_nbytes = 0.0
        self.settle_s = SETTLE_S
        self.running = False
        self.report: Report | None = None  # of the last one
        self.ended_s = 0.0  # when that was over, in the clock's time
        self._so_far: Report | None = None  # of the one that runs, when it knows what is missing
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._membership.on_view(lambda view: self.sweep_in(self.settle_s))
        self._thread.start()

    def sweep_in(self, seconds: float) -> None:
        """Unless one is due before."""
        with self._turn:
            self._due_s = min(self._due_s, time.monotonic() + seconds)
            self._turn.notify()

    @property
    def progress(self) -> Report | None:
        """Of the sweep that runs, or else of the last one."""
        return self._so_far if self.running else self.report

    def dry(self) -> Report:
        """What a sweep would fetch."""
        view = self._membership.view
        return self._sweep.run(view, self._membership.member, dry=True) if view else Report(0, 0)

    def _run(self) -> None:
        while self._wait():
            view = self._membership.view
            if view is None or self._membership.member not in view.by_id:
                continue
            self._so_far, self.running = None, True
            try:
                self._once(view)
            except Exception:  # of a sweep; the next one may do better
                log.exception("a sweep failed")
                self.sweep_in(AGAIN_S)
            finally:
                self.running = False

    def _wait(self) -> bool:
        """Until a sweep is due. False: the node stops."""
        with self._turn:
            while not self._stopped and (left_s := self._due_s - time.monotonic()) > 0:
                self._turn.wait(min(left_s, threading.TIMEOUT_MAX))
            self._due_s = time.monotonic() + self._period_s if self._period_s else float("inf")
            return not self._stopped

    def _once(self, view: View) -> None:
        self._began_s, self._moved_nbytes = time.monotonic(), 0
        report = self._sweep.run(view, self._membership.member, told=self._hear)
        if self._stopped:
            return
        self.report, self.ended_s = report, time.monotonic()
        if report.missing or report.away:
            log.info("swept: %s", report)
        if report.away or report.failed or report.missing == MISSING_MAX:
            self.sweep_in(AGAIN_S)
        if view.by_id[self._membership.member].state is State.JOINING:
            self._membership.joined()

    def _hear(self, report: Report) -> None:
        self._so_far = report

    def _pause(self, nbytes: int) -> bool:
        """For as long as so many bytes are to take. False ends the sweep."""
        self._moved_nbytes += nbytes
        with self._turn:
            if self._nbytes_per_s and nbytes:
                end_s = self._began_s + self._moved_nbytes / self._nbytes_per_s
                self._turn.wait_for(lambda: self._stopped, max(0.0, end_s - time.monotonic()))
            return not self._stopped

    def stop(self, timeout_s: float = 0.0) -> None:
        """It ends with the call that it is in, for which nobody waits longer than so: whom it asks may hang."""
        with self._turn:
            self._stopped = True
            self._turn.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
