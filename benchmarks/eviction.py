"""Measure the prefix hit rate of a trace on a live node, beside exact LRU.

Each request counts the leading pages that are stored, loads and verifies them, then stores all its
pages (`kvstore.tools.replay`). The limit is what an exact LRU of the same capacity reaches on the
same trace if a request's pages are used from the tail to the head, simulated here in a few lines.
Aim: within 0.003 of it at every capacity, and no page that differs from what was stored.

    python benchmarks/eviction.py traces/conversation_trace.jsonl [--limit N] [--capacities 5000]
"""

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import Report, parser, progress

from kvstore import Client, client_config
from kvstore.errors import InvalidRequest
from kvstore.tools.replay import ReplayReport, replay, replay_namespace, throwaway_node
from kvstore.tools.trace import TraceRequest, read_trace

CAPACITIES = (30_000, 10_000, 5_000, 1_000)
PAGE_NBYTES = 4096
AIM = 0.003


def exact_lru(chains: Sequence[Sequence[int]], capacity: int) -> float:
    """Simulate exact LRU; return the hit rate."""
    used: OrderedDict[int, None] = OrderedDict()  # oldest first
    asked = hit = 0
    for chain in chains:
        asked += len(chain)
        hit += sum(1 for _ in itertools.takewhile(used.__contains__, chain))
        for page in reversed(chain):
            used[page] = None
            used.move_to_end(page)
            if len(used) > capacity:
                used.popitem(last=False)
    return hit / asked


def live(requests: Sequence[TraceRequest], capacity: int, tick: Callable[[], None]) -> ReplayReport:
    """Replay through a node of exactly this capacity."""
    with (
        throwaway_node(capacity, PAGE_NBYTES) as node,
        Client(client_config(address=node.address, timeout_s=60.0)) as client,
    ):
        return replay(
            client, requests, replay_namespace(PAGE_NBYTES), on_progress=lambda report: tick()
        )


def row(
    requests: Sequence[TraceRequest], capacity: int, name: str, tick: Callable[[], None]
) -> dict[str, Any]:
    """Return a row of the table."""
    limit = exact_lru([request.hash_ids for request in requests], capacity)
    found = live(requests, capacity, tick)
    difference = found.prefix_hit_rate - limit
    met = abs(difference) <= AIM and found.mismatches == 0
    return {
        "capacity, pages": name,
        "exact LRU": f"{limit:.4f}",
        "node": f"{found.prefix_hit_rate:.4f}",
        "difference": f"{difference:+.4f}",
        "pages asked": found.pages_asked,
        "pages hit": found.pages_hit,
        "mismatches": found.mismatches,
        "seconds": round(found.seconds, 1),
        "aim": "met" if met else "missed",
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("trace", type=Path, metavar="TRACE", help="JSONL, one request a line")
    options.add_argument("--limit", type=int, help="only so many requests")
    options.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=CAPACITIES,
        help="pages; unbounded is measured too",
    )
    args = options.parse_args(argv)
    shown = [args.trace.name if arg == str(args.trace) else arg for arg in argv]
    title = f"Prefix hit rate of {args.trace.name}, pages of {PAGE_NBYTES} bytes"
    report = Report(title, " ".join(["python benchmarks/eviction.py", *shown]))
    try:
        requests = list(read_trace(args.trace, args.limit))
    except InvalidRequest as error:
        options.error(str(error))
    distinct = len({page for request in requests for page in request.hash_ids})
    if not distinct:
        options.error(f"{args.trace} holds no request with pages")
    with progress(len(requests) * (1 + len(args.capacities))) as tick:
        report.rows.append(row(requests, distinct, f"unbounded ({distinct})", tick))
        report.rows += [
            row(requests, capacity, str(capacity), tick) for capacity in args.capacities
        ]
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
