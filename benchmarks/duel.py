"""Eviction that learns beside exact LRU, on traces that were made to break it, and what it costs.

The node's own RAM tier without bytes, so that whatever it does under its lock is in the figures: for each request a
lookup, a read of what was found, and a put of the whole chain. `learned` is what `--eviction learned` does: LRU, unless
the duel says otherwise. Aim: never more than 0.001 below LRU.

    python benchmarks/duel.py [--trace TRACE] [--seed 1] [--pages 400000] [--only NAME] [--capacities 1000] [--json]
    python benchmarks/duel.py --cost --trace TRACE [--capacities 1000 5000] [--runs 5] [--json]
"""

import gc
import heapq
import itertools
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from made_traces import Chain, made_traces
from measure import Report, median, parser, progress

from kvstore import Namespace
from kvstore.layout import opaque_layout
from kvstore.measure.trace import read_trace, trace_prefix_hash
from node.ram.namespace import Namespaces
from node.ram.tier import RamTier
from node.slots import SlotAllocator

PAGE_NBYTES = 4096
AIM = 0.001


class Box:
    """A tier of so many pages without bytes."""

    def __init__(self, capacity: int, learns: bool) -> None:
        nbytes = capacity * PAGE_NBYTES
        self.now_ms = 1
        self.tier = RamTier(
            Namespaces(4, nbytes), SlotAllocator(nbytes, nbytes), lambda *_: None, lambda: self.now_ms, learns=learns
        )
        space = Namespace("duel", opaque_layout(PAGE_NBYTES))
        self.tier.open_namespace(space, space.digest)
        self.digest = space.digest
        self.asked = self.hit = 0

    def request(self, keys: list[bytes]) -> None:
        self.now_ms += 1
        here = self.tier.lookup(self.digest, keys, touch=False)
        count = (*here, False).index(False)
        if count:
            acquired = self.tier.acquire(self.digest, keys[:count], True, PAGE_NBYTES)
            self.tier.release([page for page in acquired.pages if page is not None])
        reservation = self.tier.reserve(self.digest, keys, PAGE_NBYTES)
        if reservation.pages:
            self.tier.commit(reservation, [b"checksum"] * len(reservation.pages))
        self.asked += len(keys)
        self.hit += count

    def replay(self, requests: Sequence[list[bytes]], rules: bool | None = None) -> float:
        """Prefix hit rate. `rules`: whether the habits rule whatever the duel says."""
        duel = self.tier.eviction.order.accounts.shared.duel
        if rules is not None and duel is not None:
            duel._rule = lambda learned: None  # type: ignore[method-assign]
            duel.learned_rules = rules
        for keys in requests:
            self.request(keys)
        return self.hit / self.asked


def optimum(chains: Sequence[Sequence[Any]], capacity: int) -> float:
    """Belady's, which knows the future and need not keep what is used now."""
    last = 1 << 60
    uses: dict[Any, list[int]] = {}
    for at, chain in enumerate(chains):
        for page in chain:
            uses.setdefault(page, []).append(at)
    for ats in uses.values():
        ats.append(last)
        ats.reverse()
    here: dict[Any, int] = {}
    latest: list[tuple[int, int, Any]] = []
    asked = hit = 0
    for chain in chains:
        asked += len(chain)
        hit += sum(1 for _ in itertools.takewhile(here.__contains__, chain))
        for depth, page in enumerate(chain):
            uses[page].pop()
            here[page] = uses[page][-1]
            heapq.heappush(latest, (-here[page], -depth, page))
        while len(here) > capacity:
            when, _, page = heapq.heappop(latest)
            if here.get(page) == -when:
                del here[page]
    return hit / asked


def keyed(chains: Sequence[Chain]) -> list[list[bytes]]:
    known: dict[int, bytes] = {}
    return [[known.get(p) or known.setdefault(p, trace_prefix_hash(p)) for p in chain] for chain in chains]


def row(name: str, chains: Sequence[Chain], capacity: int, always: bool, best: bool) -> dict[str, Any]:
    requests = keyed(chains)
    lru = Box(capacity, learns=False).replay(requests)
    box = Box(capacity, learns=True)
    learned = box.replay(requests)
    assert box.tier.check() == []
    return {
        "trace": name,
        "capacity": capacity,
        "LRU": f"{lru:.4f}",
        "learned": f"{learned:.4f}",
        "difference": f"{learned - lru:+.4f}",
        "switches": box.tier.eviction.order.duels.switches,
        "without the duel": f"{Box(capacity, learns=True).replay(requests, rules=True):.4f}" if always else None,
        "optimum": f"{optimum(chains, capacity):.4f}" if best else None,
        f"aim {AIM}": "met" if learned - lru >= -AIM else "missed",
    }


def cpu_us(requests: Sequence[list[bytes]], capacity: int, learns: bool, rules: bool | None) -> float:
    """For each page asked for: of its lookup, read and put."""
    box = Box(capacity, learns)
    gc.collect()
    start = time.thread_time()
    box.replay(requests, rules)
    return (time.thread_time() - start) / box.asked * 1e6


def nbytes(requests: Sequence[list[bytes]], capacity: int, learns: bool) -> float:
    """For each page kept, at the end: all that the tier has beside the arena."""
    gc.collect()
    tracemalloc.start()
    try:
        box = Box(capacity, learns)
        box.replay(requests)
        box.tier.ghosts.forget()  # as many in either case
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / box.tier.visible_count
    finally:
        tracemalloc.stop()


def cost(report: Report, chains: Sequence[Chain], capacities: Sequence[int], runs: int) -> None:
    requests = keyed(chains)
    policies = {"LRU": (False, None), "learned": (True, None), "without the duel": (True, True)}
    with progress(len(capacities) * runs) as tick:
        for capacity in capacities:
            spent: dict[str, list[float]] = {name: [] for name in policies}
            for _ in range(runs):
                for name, (learns, rules) in policies.items():
                    spent[name].append(cpu_us(requests, capacity, learns, rules))
                tick()
            of = {name: nbytes(requests, capacity, name != "LRU") for name in ("LRU", "learned")}
            for name in policies:
                report.rows.append(
                    {
                        "capacity": capacity,
                        "policy": name,
                        "us a page": f"{median(spent[name]):.2f} ({min(spent[name]):.2f}-{max(spent[name]):.2f})",
                        "more than LRU": f"{median(spent[name]) - median(spent['LRU']):.2f}",
                        "bytes a page": round(of[name]) if name in of else None,
                        "more bytes than LRU": round(of[name] - of["LRU"]) if name in of else None,
                    }
                )


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, help="JSONL, one request a line, in place of the made ones")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--pages", type=int, default=400_000, help="asked for, of each made trace")
    options.add_argument("--capacities", type=int, nargs="+", default=[1000, 2000, 5000])
    options.add_argument("--only", help="made traces whose name has this")
    options.add_argument("--cost", action="store_true", help="time and memory, not hits")
    options.add_argument("--runs", type=int, default=5, help="of --cost")
    args = options.parse_args(argv)
    shown = [args.trace.name if args.trace and arg == str(args.trace) else arg for arg in argv]
    report = Report("Eviction that learns beside exact LRU", " ".join(["python benchmarks/duel.py", *shown]))
    if args.trace:
        traces = {args.trace.name: [request.hash_ids for request in read_trace(args.trace)]}
    else:
        traces = made_traces(args.seed, args.pages)
        traces = {name: chains for name, chains in traces.items() if not args.only or args.only in name}
    if args.cost:
        cost(report, next(iter(traces.values())), args.capacities, args.runs)
    else:
        with progress(len(traces) * len(args.capacities)) as tick:
            for name, chains in traces.items():
                for capacity in args.capacities:
                    report.rows.append(row(name, chains, capacity, bool(args.trace), bool(args.trace)))
                    tick()
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
