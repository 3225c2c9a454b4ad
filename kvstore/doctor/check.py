"""Running checks: some at a time, each in a thread of its own and for so long at most. Whatever one does, the others
go on.

    checks --abreast--> threads --findings, as they come--> a list in the order of the checks
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.doctor.finding import Finding, fail, remedy_of
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

ABREAST = 16
STEP_S = 0.05  # between two looks at who has ended

Tick = Callable[[float], None]


class Check(NamedTuple):
    """`find` is told nothing, may take `limit_s`, and is left alone then: it must end by itself some time. What it
    yielded by then counts."""

    name: str
    find: Callable[[], Iterable[Finding]]
    limit_s: float
    of: str = ""


def one(name: str, find: Callable[[], Finding], limit_s: float) -> Check:
    """Of a function that finds one thing."""
    return Check(name, lambda: [find()], limit_s)


class Group(NamedTuple):
    title: str
    checks: Sequence[Check]


def run_all(checks: Sequence[Check], tick: Tick = lambda done: None) -> list[Finding]:
    """`tick` is told again and again how many have ended; what it raises ends this, and leaves checks alone that are
    under way."""
    runs = [_Run(check) for check in checks]
    waiting, under_way = deque(runs), list[_Run]()
    while waiting or under_way:
        while waiting and len(under_way) < ABREAST:
            under_way.append(waiting.popleft())
            under_way[-1].begin()
        under_way[0].ended.wait(STEP_S)
        under_way = [run for run in under_way if not run.over]
        tick(len(runs) - len(waiting) - len(under_way))
    return [finding._replace(of=run.check.of) for run in runs for finding in run.findings()]


class _Run:
    def __init__(self, check: Check) -> None:
        self.check = check
        self.ended = threading.Event()
        self._found: list[Finding] = []
        self._until = 0.0

    def begin(self) -> None:
        self._until = time.monotonic() + self.check.limit_s
        try:
            threading.Thread(target=self._run, name=f"kvstore-doctor-{self.check.name}", daemon=True).start()
        except RuntimeError as error:
            self._found.append(fail(self.check.name, f"no thread for it: {error}", "raise the limit of processes"))
            self.ended.set()

    @property
    def over(self) -> bool:
        return self.ended.is_set() or time.monotonic() >= self._until

    def findings(self) -> list[Finding]:
        found = list(self._found)
        if not self.ended.is_set():
            hung = f"it has not ended in {self.check.limit_s:g} s; it was left alone"
            found.append(fail(self.check.name, hung, "what it asked hangs, or allow more time with --timeout"))
        return found

    def _run(self) -> None:
        try:
            for finding in self.check.find():
                self._found.append(finding)
        except KVStoreError as error:
            self._found.append(fail(self.check.name, str(error), remedy_of(error)))
        except Exception as error:
            log.debug("%s", self.check.name, exc_info=True)
            said = f"the check itself failed: {type(error).__name__}: {error}"
            self._found.append(fail(self.check.name, said, "tell the maintainers; all other checks hold"))
        finally:
            self.ended.set()
