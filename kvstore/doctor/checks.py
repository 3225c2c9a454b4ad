"""Run checks, and hold what they find.

    checks --in parallel--> threads --findings, as they come--> a list in the order of the checks

Each check has its own thread and time limit, so that no check delays another. Checks that may hang
in a driver or a disk run in a process of their own, which is abandoned if it hangs:

    module --one finding per line, as JSON, then an end line--> findings
"""

import enum
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvstore.errors import Forbidden, KVStoreError, ProtocolError, Unauthenticated

log = logging.getLogger(__name__)

ABREAST = 16
STEP_S = 0.05  # seconds between two looks at which checks have ended
END = "end"  # key of the last line: all findings were printed
KILLED_S = 0.5  # a process that hangs in the kernel does not even die then

Tick = Callable[[float], None]


class FindingState(enum.Enum):
    """Enumerate the results of a check."""

    OK = "ok"
    WARN = "warn"  # it works, but not as well as it could, or not for long
    FAIL = "fail"  # it has to be fixed
    SKIPPED = "skipped"  # it could not be checked, or there is nothing to check


class Finding(NamedTuple):
    """Result of a check. `remedy`: what to do; empty: nothing.

    `of`: the node that it is about, where there are several.
    """

    name: str
    state: FindingState
    found: str
    remedy: str = ""
    of: str = ""


def ok(name: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, FindingState.OK, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """Return a warning with its remedy."""
    return Finding(name, FindingState.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """Return a failure with its remedy."""
    return Finding(name, FindingState.FAIL, found, remedy)


def skipped(name: str, why: str, remedy: str = "") -> Finding:
    """Return a check that could not run, and why."""
    return Finding(name, FindingState.SKIPPED, why, remedy)


def remedy_of(error: KVStoreError, otherwise: str = "") -> str:
    """Return the remedy for an error; `otherwise` if its message names none."""
    if isinstance(error, Unauthenticated):
        return (
            "set KVSTORE_TOKEN_FILE, or KVSTORE_TLS_CERT and KVSTORE_TLS_KEY, to a credential of "
            "the node's identities file that has not expired: kvstore tokens list shows them"
        )
    if isinstance(error, Forbidden):
        return "use a token whose role, tenant and models allow it: kvstore tokens list shows them"
    if isinstance(error, ProtocolError):
        return (
            "update the older of both: only adjacent protocol versions work together; or "
            "the peer is no node"
        )
    return otherwise


class Check(NamedTuple):
    """A check that may take `limit_s` seconds.

    A check that takes longer is abandoned and must end by itself. What it yielded by then counts.
    """

    name: str
    find: Callable[[], Iterable[Finding]]
    limit_s: float
    of: str = ""


def one(name: str, find: Callable[[], Finding], limit_s: float) -> Check:
    """Wrap a function that returns one finding."""
    return Check(name, lambda: [find()], limit_s)


class Group(NamedTuple):
    """Checks under a title."""

    title: str
    checks: Sequence[Check]


def run_all(checks: Sequence[Check], tick: Tick = lambda done: None) -> list[Finding]:
    """Run checks in parallel and return their findings in order.

    `tick` is called repeatedly with the number of checks that have ended. If it raises, this call
    ends and abandons running checks.
    """
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
            threading.Thread(
                target=self._run, name=f"kvstore-doctor-{self.check.name}", daemon=True
            ).start()
        except RuntimeError as error:
            self._found.append(
                fail(self.check.name, f"no thread for it: {error}", "raise the limit of processes")
            )
            self.ended.set()

    @property
    def over(self) -> bool:
        return self.ended.is_set() or time.monotonic() >= self._until

    def findings(self) -> list[Finding]:
        found = list(self._found)
        if not self.ended.is_set():
            hung = f"it did not end within {self.check.limit_s:g} s and was abandoned"
            found.append(
                fail(self.check.name, hung, "its target hangs; or allow more time with --timeout")
            )
        return found

    def _run(self) -> None:
        try:
            for finding in self.check.find():
                self._found.append(finding)
        except KVStoreError as error:
            self._found.append(fail(self.check.name, str(error), remedy_of(error)))
        except Exception as error:
            log.debug("%s", self.check.name, exc_info=True)
            text = f"the check itself failed: {type(error).__name__}: {error}"
            self._found.append(
                fail(
                    self.check.name,
                    text,
                    "report this to the maintainers; all other checks are valid",
                )
            )
        finally:
            self.ended.set()


def print_findings(findings: Iterable[Finding]) -> None:
    """Print findings as JSON lines, each as soon as it is known."""
    for finding in findings:
        line = {
            "name": finding.name,
            "state": finding.state.value,
            "found": finding.found,
            "remedy": finding.remedy,
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({END: True}), flush=True)


def ending(status: int) -> str:
    """Describe how a process ended, with the name of a signal."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def probed(
    name: str, module: str, arguments: Sequence[str], limit_s: float, remedy: str
) -> Iterator[Finding]:
    """Yield the findings of `python -m module`.

    `remedy` is for a process that hangs or fails. A process that fails after its end line is only a
    warning.
    """
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, complained = process.communicate(timeout=limit_s)
        hung = False
    except subprocess.TimeoutExpired as late:
        output, complained, hung = late.output or b"", late.stderr or b"", True
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    finally:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    yield from _parsed(output)
    if hung:
        yield fail(name, f"hangs: no end in {limit_s:g} s", remedy)
    elif process.returncode:
        last = complained.decode(errors="replace").strip().splitlines()[-1:] or [
            ending(process.returncode)
        ]
        if _ended(output):
            yield warn(name, f"the checks completed, then their process failed: {last[0]}", remedy)
        else:
            yield fail(name, last[0], remedy)


def _ended(output: bytes) -> bool:
    return json.dumps({END: True}).encode() in output.splitlines()


def _parsed(output: bytes) -> Iterator[Finding]:
    for line in output.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # libraries print lines, too
            record = json.loads(line)
            yield Finding(
                record["name"], FindingState(record["state"]), record["found"], record["remedy"]
            )
