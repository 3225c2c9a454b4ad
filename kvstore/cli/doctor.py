"""Run `kvstore doctor`: find what is wrong with a deployment, and say how to fix it."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvstore.cli.exits import ExitCode
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import console, emit, printable, progress
from kvstore.doctor.checks import Finding, FindingState

STYLES = {
    FindingState.OK: "green",
    FindingState.WARN: "yellow",
    FindingState.FAIL: "bold red",
    FindingState.SKIPPED: "dim",
}
WORD = max(len(state.value) for state in FindingState)


def doctor(
    run: Invocation,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Also look at a node's data directory, on the node's host.",
        ),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also look at what an agent on a GPU needs, on its host.")
    ] = False,
) -> int:
    """Check this host, the connection to each node, and test pages.

    Says what to do about each failure. Puts a few pages of 16 KiB into a namespace of its own, gets
    them over each wire that works, and removes them. Checks that hang time out. --wire names one
    that has to work. Exit 1 if a check failed.

    \b
    Examples:
      kvstore doctor
      kvstore doctor -a node1:7440,node2:7440 --json | jq '.checks[] | select(.state == "fail")'
      kvstore doctor --wire shm --gpu
      kvstore doctor --data-dir /var/lib/kvstore
    """
    # Imports `cryptography`, which takes 20 ms that other commands need not pay.
    from kvstore.doctor.checks import run_all
    from kvstore.doctor.runner import Runner, Wanted

    runner = Runner(run.config("auto"), Wanted(data_dir, gpu))
    found: list[tuple[str, Finding]] = []
    out = console()
    with contextlib.closing(runner.groups()) as groups:
        for group in groups:
            with progress(group.title, len(group.checks)) as report:
                findings = run_all(group.checks, report)
            found += [(group.title, finding) for finding in findings]
            if not run.as_json:
                _show(out, group.title, findings)
    if run.as_json:
        emit(_json(run.config("auto").address, found))
    else:
        _show_sum(out, [finding for _, finding in found])
    return (
        ExitCode.MISS
        if any(finding.state is FindingState.FAIL for _, finding in found)
        else ExitCode.OK
    )


def _show(out: Console, title: str, findings: Sequence[Finding]) -> None:
    names = [_name(finding) for finding in findings]
    width = max(map(len, names), default=0)
    out.print(title, markup=False, style="bold")
    for name, finding in zip(names, findings, strict=True):
        state = (finding.state.value.ljust(WORD), STYLES[finding.state])
        out.print(
            Text.assemble("  ", state, f"  {name.ljust(width)}  {_line(finding.found)}"),
            soft_wrap=True,
        )
        if finding.remedy:
            out.print(Text(f"  {' ' * WORD}  -> {_line(finding.remedy)}"), soft_wrap=True)


def _show_sum(out: Console, findings: Sequence[Finding]) -> None:
    counts = _counts(findings)
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    failed = ", ".join(_name(finding) for finding in findings if finding.state is FindingState.FAIL)
    out.print(f"{said}{': failed ' * bool(failed)}{failed}", markup=False, soft_wrap=True)


def _json(address: str, found: Sequence[tuple[str, Finding]]) -> dict[str, Any]:
    checks = [
        {
            "group": title,
            "of": finding.of,
            "name": finding.name,
            "state": finding.state.value,
            "found": finding.found,
            "remedy": finding.remedy,
        }
        for title, finding in found
    ]
    return {"address": address, **_counts([finding for _, finding in found]), "checks": checks}


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counted = Counter(finding.state for finding in findings)
    return {state.value: counted[state] for state in FindingState}


def _name(finding: Finding) -> str:
    return f"{finding.of} {finding.name}".strip()


def _line(text: str) -> str:
    return printable(" ".join(text.split()))
