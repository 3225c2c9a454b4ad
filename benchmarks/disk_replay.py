"""Replay a trace on a node with little RAM and a disk tier, and measure its hit rate.

Each request counts the leading pages that are stored, loads and verifies them, then stores all its
pages (`kvstore.tools.replay`). Beside it: the same trace with RAM only, and with a cache without
limits. Aim: 0.355 with 5,000 pages of RAM and 50,000 on disk, and no page that differs.

    python benchmarks/disk_replay.py traces/conversation_trace.jsonl [--dir DIR] [--limit N]
        [--json]
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import Report, parser, progress
from workplace import add_dir, file_system, workplace

from kvstore import Client, client_config
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.replay import replay, replay_namespace
from kvstore.tools.trace import TraceRequest, read_trace

RAM_PAGES = 5_000
DISK_PAGES = 50_000
PAGE_NBYTES = 4096
AIM = 0.355
TIMEOUT_S = 60.0


def unbounded(requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Simulate a store without limits."""
    seen: set[int] = set()
    asked = hit = 0
    for request in requests:
        asked += len(request.hash_ids)
        hit += sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
    return row("unbounded, simulated", hit / asked, asked, hit)


def live(
    requests: Sequence[TraceRequest], name: str, flags: Sequence[str], tick: Callable[[], None]
) -> dict[str, Any]:
    """Replay through a node with exactly so many pages in RAM, and a disk."""
    ram = str(RAM_PAGES * PAGE_NBYTES)
    with (
        NodeProcess(
            "--ram-bytes", ram, "--extent-bytes", ram, "--log-level", "WARNING", *flags
        ) as node,
        Client(client_config(address=node.address, timeout_s=TIMEOUT_S)) as client,
    ):
        found = replay(
            client, requests, replay_namespace(PAGE_NBYTES), on_progress=lambda report: tick()
        )
        disk = client.node_status().disk
    line = row(name, found.prefix_hit_rate, found.pages_asked, found.pages_hit)
    line |= {"mismatches": found.mismatches, "seconds": round(found.seconds, 1)}
    if flags:
        line |= {"read from disk": disk.pages_read, "never reached disk": disk.pages_refused}
        line[f"aim {AIM}"] = (
            "met" if found.prefix_hit_rate >= AIM and not found.mismatches else "missed"
        )
    return line


def row(name: str, rate: float, asked: int, hit: int) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "store": name,
        "prefix hit rate": f"{rate:.4f}",
        "pages asked": asked,
        "pages hit": hit,
        "read from disk": None,
        "never reached disk": None,
        "mismatches": None,
        "seconds": None,
        f"aim {AIM}": None,
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    add_dir(options)
    options.add_argument("trace", type=Path, metavar="TRACE", help="JSONL, one request a line")
    options.add_argument("--limit", type=int, help="only so many requests")
    args = options.parse_args(argv)
    title = f"Prefix hit rate of {args.trace.name}, pages of {PAGE_NBYTES} bytes"
    report = Report(title, f"python benchmarks/disk_replay.py {args.trace.name}")
    requests = list(read_trace(args.trace, args.limit))
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(workplace(args.dir, 2 * DISK_PAGES * PAGE_NBYTES))
        tick = stack.enter_context(progress(2 * len(requests)))
        disk = str(DISK_PAGES * PAGE_NBYTES)
        flags = (
            "--data-dir",
            str(directory / "data"),
            "--disk-bytes",
            disk,
            "--disk-extent-bytes",
            disk,
        )
        report.rows.append(live(requests, f"RAM {RAM_PAGES:,} + disk {DISK_PAGES:,}", flags, tick))
        report.rows.append(live(requests, f"RAM {RAM_PAGES:,}", (), tick))
        report.rows.append(unbounded(requests))
        if args.limit:  # the aim holds for the whole trace
            report.rows[0][f"aim {AIM}"] = None
        report.notes.append(
            f"data directory on {file_system(directory)}; requests one after the other"
        )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
