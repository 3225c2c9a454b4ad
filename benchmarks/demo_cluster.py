"""Run `make demo-cluster`: kill, stop and add nodes of a cluster while a trace is replayed.

It starts etcd and three nodes, then replays a trace: each request looks up its pages, loads the
leading hits, verifies every byte and stores the other pages. Meanwhile

    n1 is killed, and started again later
    n2 is stopped for 5 s (SIGSTOP) and continues
    n4 joins (with etcd only)

Without etcd, or with --static, the members are a fixed list. Exit status 0 only if no call raised,
none returned later than its deadline + 0.1 s and the measured lateness of a sleep, and no byte was
wrong.
"""

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import status_of
from measure import progress
from node_fleet import HERE, EtcdProcess, Fleet
from trial import Event, Second, Trial, plot

from kvstore.tools.replay import ReplayReport, replay_namespace
from kvstore.tools.trace import TraceRequest, conversations, read_trace

NODES = 3
PAUSE_S = 5.0
LATE_S_MAX = 0.1
COLUMNS = 64  # of the plot
NODE_FLAGS = ("--log-level", "ERROR")


def events(fleet: Fleet, joins: bool) -> list[Event]:
    """Return the events of the demo."""

    def paused() -> None:
        fleet.nodes["n2"].pause()
        time.sleep(PAUSE_S)
        fleet.nodes["n2"].resume()

    found = [
        Event(0.2, "n1 killed", fleet.nodes["n1"].kill),
        Event(0.4, "n1 back", lambda: fleet.start("n1")),
        Event(0.6, f"n2 stopped for {PAUSE_S:g} s", paused),
    ]
    return [*found, Event(0.8, "n4 joins", fleet.join)] if joins else found


def show(trial: Trial, report: ReplayReport) -> None:
    """Plot the run over time and print the sums."""
    share = -(-len(trial.seconds) // COLUMNS)  # seconds that one column stands for
    columns = [
        merged(trial.seconds[start : start + share])
        for start in range(0, len(trial.seconds), share)
    ]
    speeds = [column.nbytes / share / 1e6 for column in columns]
    print(f"\n  one column: {share} s, {len(trial.seconds)} s in all\n")
    print(f"  MB/s    {plot(speeds, max(speeds))}  at most {max(speeds):.0f}")
    rates = [column.hit / column.asked if column.asked else None for column in columns]
    print(f"  hits    {plot(rates, 1.0)}  1.0 would be all pages")
    print(
        f"  errors  {''.join('!' if column.errors else '.' for column in columns)}  "
        f"{trial.errors.total()}"
    )
    for second, name in trial.events:
        print(f"          {' ' * (second // share)}^ {name}")
    print()
    for name, value in rows(trial, report):
        print(f"  {name:28}  {value}")
    for said, count in trial.errors.most_common(5):
        print(f"  {count} x {said}")


def merged(seconds: Sequence[Second]) -> Second:
    """Add up seconds."""
    fields = ("asked", "hit", "nbytes", "errors")
    return Second(*(sum(getattr(second, field) for second in seconds) for field in fields))


def rows(trial: Trial, report: ReplayReport) -> list[tuple[str, str]]:
    """Return the table's rows."""
    return [
        (
            "requests",
            f"{report.requests:,} in {report.seconds:.1f} s, pages of {report.page_nbytes >> 10} "
            "KiB",
        ),
        (
            "pages hit",
            f"{report.pages_hit:,} of {report.pages_asked:,}: {report.prefix_hit_rate:.3f}",
        ),
        (
            "loaded and verified",
            f"{report.verified_nbytes / 1e6:,.0f} MB, {report.mismatches} pages wrong",
        ),
        ("calls that raised", str(trial.errors.total())),
        (
            "latest after its deadline",
            f"{max(0.0, trial.late_s) * 1e3:.0f} ms (a sleep: {trial.lag_s * 1e3:.0f} ms)",
        ),
    ]


def good(trial: Trial, report: ReplayReport) -> bool:
    """Return whether there were no errors, wrong pages or late calls."""
    return not trial.errors and not report.mismatches and trial.overdue_s <= LATE_S_MAX


def etcd_here(args: argparse.Namespace) -> EtcdProcess | None:
    """Start etcd; return None and print the reason without it."""
    if not args.static and shutil.which(args.etcd):
        return EtcdProcess(program=args.etcd)
    why = (
        "as you asked"
        if args.static
        else f"there is no {args.etcd} here (Debian: apt-get install etcd-server)"
    )
    print(f"  without etcd, {why}: a fixed list of members, nobody joins", file=sys.stderr)
    return None


def demo(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    requests: list[TraceRequest] = conversations(args.requests)
    if args.trace:
        requests = list(read_trace(args.trace, args.requests))
    with contextlib.ExitStack() as stack:
        if etcd := etcd_here(args):
            stack.callback(etcd.close)
        flags = ("--ram-bytes", args.ram_bytes, *NODE_FLAGS)
        fleet = stack.enter_context(
            Fleet([HERE] * NODES, *flags, replicas=args.replicas, etcd=etcd)
        )
        client = stack.enter_context(
            fleet.client(timeout_s=args.timeout_s, connect_timeout_s=args.timeout_s)
        )
        print(
            f"  {NODES} nodes, {args.replicas} of them for each page: {client.config.address}",
            file=sys.stderr,
        )
        tick = stack.enter_context(progress(len(requests)))
        trial = Trial(
            client, replay_namespace(args.page_kib << 10), events(fleet, etcd is not None), tick
        )
        report = trial.run(requests)
    if args.json:
        found: dict[str, Any] = report.as_dict() | {
            "errors": dict(trial.errors),
            "overdue_s": trial.overdue_s,
        }
        print(json.dumps(found | {"good": good(trial, report)}))
    else:
        show(trial, report)
    return 0 if good(trial, report) else 1


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--trace", type=Path, help="JSONL, one request a line; default: chats that nobody had"
    )
    found.add_argument("--requests", type=int, default=2000, help="so many of them (%(default)s)")
    found.add_argument("--page-kib", type=int, default=16, help="size of each page (%(default)s)")
    found.add_argument("--ram-bytes", default="1GiB", help="of each node (%(default)s)")
    found.add_argument(
        "--replicas", type=int, default=2, help="nodes that have each page (%(default)s)"
    )
    found.add_argument(
        "--timeout-s", type=float, default=1.0, help="deadline of each call (%(default)s)"
    )
    found.add_argument("--etcd", default="etcd", help="the program (%(default)s)")
    found.add_argument(
        "--static", action="store_true", help="a fixed list of members, without etcd"
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def main(argv: list[str]) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    return status_of(lambda: demo(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
