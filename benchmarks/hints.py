"""Measure what hints of sessions add to the hit rate, on a live node and simulated.

Without a trace, generated agents that call tools (`kvstore.tools.sessions.agents`). A client tells
only what it knows: its chain comes back after about its usual pause, or the session is over. A
session's end is known in generated requests, and in a trace that says `ended`. Beside the node are
exact LRU (no hints), the simulation that `kvstore plan` shows, and the optimum, which knows the
future. Aim: no page that differs from what was stored, and with hints at least the node without.

    python benchmarks/hints.py [TRACE] [--limit 4000] [--capacities 500 1000 2000] [--speed 20]
"""

import argparse
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eviction import PAGE_NBYTES, exact_lru
from measure import Report, parser, progress

from kvstore import Client, client_config
from kvstore.tools.hit_curve import Intervals, Stack
from kvstore.tools.replay import ReplayReport, replay, replay_namespace, throwaway_node
from kvstore.tools.sessions import agents, hit_rate, with_sessions
from kvstore.tools.trace import TraceRequest, read_trace

CAPACITIES = (500, 1000, 2000)
LIMIT, SPEED = 4000, 20.0


def live(
    requests: Sequence[TraceRequest],
    capacity: int,
    speed: float | None,
    tick: Callable[[], None],
) -> ReplayReport:
    """Replay through a node of this capacity; with a speed, sessions tell what they know."""
    with (
        throwaway_node(capacity, PAGE_NBYTES) as node,
        Client(client_config(address=node.address, timeout_s=60.0)) as client,
    ):
        return replay(
            client,
            requests,
            replay_namespace(PAGE_NBYTES),
            speed,
            lambda report: tick(),
            hints=speed is not None,
        )


def optimum(requests: Sequence[TraceRequest], capacity: int) -> float:
    """Return the most that any policy could hit."""
    stack, intervals = Stack(), Intervals()
    for number, request in enumerate(requests):
        for reuse in stack.use(array("Q", request.hash_ids).tobytes()):
            intervals.add(reuse.last, number, reuse.pages)
    asked = sum(len(request.hash_ids) for request in requests)
    return intervals.by_start().most_hits(capacity) / asked


def row(
    requests: Sequence[TraceRequest], capacity: int, speed: float, tick: Callable[[], None]
) -> dict[str, Any]:
    """Return a row of the table."""
    plain, hinted = live(requests, capacity, None, tick), live(requests, capacity, speed, tick)
    wrong = plain.mismatches + hinted.mismatches
    gained = hinted.prefix_hit_rate - plain.prefix_hit_rate
    return {
        "capacity, pages": capacity,
        "exact LRU": f"{exact_lru([each.hash_ids for each in requests], capacity):.4f}",
        "node": f"{plain.prefix_hit_rate:.4f}",
        "node with hints": f"{hinted.prefix_hit_rate:.4f}",
        "simulated with hints": f"{hit_rate(requests, capacity, hinted=True):.4f}",
        "optimum": f"{optimum(requests, capacity):.4f}",
        "gained": f"{gained:+.4f}",
        "pages asked": plain.pages_asked,
        "mismatches": wrong,
        "seconds": round(hinted.seconds, 1),
        "aim": "met" if gained >= 0 and not wrong else "missed",
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="JSONL")
    options.add_argument("--limit", type=int, default=LIMIT, help="requests")
    options.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, help="pages")
    options.add_argument("--speed", type=float, default=SPEED, help="times the trace's pace")
    args = options.parse_args(argv)
    requests = (
        list(with_sessions(read_trace(args.trace, args.limit)))
        if args.trace
        else agents(args.limit)
    )
    name = args.trace.name if args.trace else "generated agents"
    shown = [args.trace.name if arg == str(args.trace) else arg for arg in argv]
    title = f"Hints of sessions, {name}, {len(requests):,} requests"
    report = Report(title, " ".join(["python benchmarks/hints.py", *shown]))
    with progress(2 * len(requests) * len(args.capacities)) as tick:
        report.rows += [row(requests, each, args.speed, tick) for each in args.capacities]
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
