"""Run a target on one input and watch its result, CPU time and memory.

A target may return, or raise a documented error. Everything else is a finding:

    crash    another exception, an error that the node logged with its traceback, or an
             AssertionError of the target
    hang     more than CPU_S of CPU time
    memory   growth by more than GROWN_NBYTES for one input, or a failed allocation
    state    a problem that the `check` of the target returns after a batch
"""

import logging
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvstore.errors import KVStoreError

CPU_S = 1.0
GROWN_NBYTES = 64 << 20
ROOT = str(Path(__file__).parents[2])


def nothing_wrong() -> list[str]:
    return []


@dataclass(frozen=True)
class Target:
    """A parser to be fuzzed.

    `once` runs one input and may raise; `seeds` returns inputs, of which it accepts at least the
    first. `check` returns the problems after a batch, and resets the state.
    """

    once: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[Exception], ...] = ()
    check: Callable[[], list[str]] = nothing_wrong
    close: Callable[[], None] = lambda: None
    nbytes_max: int = 4096
    batch: int = 2000


@dataclass(frozen=True)
class Found:
    """A finding; two with the same `kind` and `where` count as the same."""

    kind: str
    where: str
    data: bytes
    details: str


class Hang(BaseException):
    """Raised after CPU_S; not an Exception, so that no handler catches it."""


class Watch(logging.Handler):
    """A context in which it is the only log handler and owns the CPU timer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._heard: list[BaseException] = []
        self.peak_nbytes = peak_nbytes()
        self.slowest_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._heard.append(record.exc_info[1])

    def __enter__(self) -> "Watch":
        root = logging.getLogger()
        self._handlers, root.handlers = root.handlers, [self]
        self._before = signal.signal(signal.SIGPROF, _hang)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)
        logging.getLogger().handlers = self._handlers

    def run(self, target: Target, data: bytes) -> Found | None:
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                target.once(data)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except Hang as error:
            return _found("hang", error, data)
        except MemoryError as error:
            return _found("memory", error, data)
        except Exception as error:  # noqa: BLE001 -- any exception that is not allowed is a finding
            if not isinstance(error, (KVStoreError, *target.allowed)) and not self._heard:
                return _found("crash", error, data)
        if self._heard:
            heard, self._heard = self._heard[0], []
            return _found("crash", heard, data)
        self.slowest_s = max(self.slowest_s, time.process_time() - began)
        return self._grown(data)

    def _grown(self, data: bytes) -> Found | None:
        before, self.peak_nbytes = self.peak_nbytes, peak_nbytes()
        if self.peak_nbytes - before > GROWN_NBYTES:
            return Found(
                "memory",
                "grown",
                data,
                f"the process grew by {(self.peak_nbytes - before) >> 20} MiB",
            )
        return None

    def check(self, target: Target, last: bytes) -> Found | None:
        """Check the target after a batch whose last input was `last`."""
        wrong = target.check()
        return Found("state", wrong[0], last, "; ".join(wrong)) if wrong else None


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {CPU_S:g} s of CPU time")


def _found(kind: str, error: BaseException, data: bytes) -> Found:
    """Return a finding whose place is the innermost line of this project's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if frame.filename.startswith(ROOT) and "/tests/fuzz/watched" not in frame.filename
    ]
    last = own[-1] if own else frames[-1]
    where = f"{type(error).__name__} at {last.filename.removeprefix(ROOT + '/')}:{last.lineno}"
    return Found(kind, where, data, "".join(traceback.format_exception(error)))
