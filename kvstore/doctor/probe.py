"""Checks in a process of their own, which may hang in a driver or a disk and be left there.

module --one finding per line, as JSON, then an end line--> findings
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from kvstore.doctor.finding import Finding, State, fail, warn

END = "end"  # of the last line: all findings were printed
KILLED_S = 0.5  # one that hangs in the kernel does not even end then


def tell(findings: Iterable[Finding]) -> None:
    """What such a module does: each as soon as it is there."""
    for finding in findings:
        said = {"name": finding.name, "state": finding.state.value, "found": finding.found, "remedy": finding.remedy}
        print(json.dumps(said), flush=True)
    print(json.dumps({END: True}), flush=True)


def ending(status: int) -> str:
    """Describe how a process ended, with the name of a signal."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def probed(name: str, module: str, arguments: Sequence[str], limit_s: float, remedy: str) -> Iterator[Finding]:
    """Yield the findings of `python -m module`.

    `remedy` is for a process that hangs or fails. One that fails after its end line is a warning only.
    """
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, complained = process.communicate(timeout=limit_s)
        hung = False
    except subprocess.TimeoutExpired as late:
        said, complained, hung = late.output or b"", late.stderr or b"", True
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    finally:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    yield from _parsed(said)
    if hung:
        yield fail(name, f"hangs: no end in {limit_s:g} s", remedy)
    elif process.returncode:
        last = complained.decode(errors="replace").strip().splitlines()[-1:] or [ending(process.returncode)]
        if _ended(said):
            yield warn(name, f"the checks completed, then their process failed: {last[0]}", remedy)
        else:
            yield fail(name, last[0], remedy)


def _ended(said: bytes) -> bool:
    return json.dumps({END: True}).encode() in said.splitlines()


def _parsed(said: bytes) -> Iterator[Finding]:
    for line in said.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # libraries talk, too
            told = json.loads(line)
            yield Finding(told["name"], State(told["state"]), told["found"], told["remedy"])
