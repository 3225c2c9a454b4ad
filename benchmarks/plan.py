"""Planning from a trace of a million requests that nobody made: how long each part takes, and in how much memory.

    survey   the one pass: JSON lines to requests, distances, windows of time, intervals
    plan     ten sizes with their bounds, and what is made of them

Chats beside each other (`kvstore.measure.trace.chatting`), pages of 512 tokens. Once the same from one page in ten, and
how far its hit rates and bounds are from the exact ones. Each round is a process of its own, so that memory is its own.
Aim: under a minute. With TRACE: hit rates and bounds of that trace, beside exact LRU page by page.

    python benchmarks/plan.py [--requests N] [--rounds N] [--trace FILE] [--json]
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eviction import exact_lru
from measure import Report, median, parser, progress

from kvstore.measure.trace import chatting, read_trace
from kvstore.plan.pages import PageSize
from kvstore.plan.plan import Plan, Wishes, planned, surveyed
from kvstore.plan.survey import EXACT, Sampling, sampling

PAGE = PageSize(512.0, 64 << 20)
AT_A_TIME = 20_000  # chats
SAMPLED = 10.0
AIM_S = 60.0
CAPACITIES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)


def write(path: Path, requests: int) -> None:
    with path.open("w") as file:
        for request in chatting(requests, at_a_time=AT_A_TIME):
            line = {"timestamp": request.timestamp_ms, "input_length": request.input_length, "output_length": 128}
            file.write(json.dumps({**line, "hash_ids": request.hash_ids}) + "\n")


def timed_plan(path: Path, sample: Sampling) -> tuple[dict[str, float], Plan]:
    """Seconds of each part, MiB at most, and the plan."""
    wishes = Wishes(PAGE, 10_000.0)
    start = time.perf_counter()
    survey = surveyed(read_trace(path), wishes, sample)
    passed = time.perf_counter()
    plan = planned(survey, wishes)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"survey": passed - start, "plan": end - passed, "all": end - start, "peak MiB": peak}, plan


def row(name: str, found: list[dict[str, float]], plan: Plan) -> dict[str, Any]:
    def told(part: str) -> str:
        values = [one[part] for one in found]
        return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})"

    figures = {f"{part}, s": told(part) for part in ("survey", "plan", "all")}
    met = median([one["all"] for one in found]) < AIM_S
    return {
        "": name,
        "uses, million": round(plan.pages_asked / 1e6, 1),
        "distinct, million": round(plan.pages / 1e6, 2),
        **figures,
        "peak MiB": round(max(one["peak MiB"] for one in found)),
        f"aim {AIM_S:g} s": "met" if met else "missed",
    }


def apart(exact: Plan, sampled: Plan) -> str:
    """How far a sample is from all, in points."""
    pairs = [(a, b) for a in exact.rows for b in sampled.rows if a.ram_nbytes == b.ram_nbytes]
    hits = max(abs(a.hit_rate - b.hit_rate) for a, b in pairs)
    bounds = ", ".join(f"{100 * abs(a.bound - b.bound):.2f} at {a.pages:,}" for a, b in pairs)
    errors = max(max(b.hit_rate_error, b.bound_error) for _, b in pairs)
    return (
        f"one page in {SAMPLED:g}, at {len(pairs)} sizes: hit rates at most {100 * hits:.2f} points from the exact, "
        f"bounds {bounds} pages; the largest standard error that it states is {100 * errors:.2f}"
    )


def known(path: Path) -> str:
    """Of a trace that others can compute."""
    requests = list(read_trace(path))
    wishes = Wishes(PageSize(512.0, 4096), 10_000.0, ram=tuple(capacity * 4096 for capacity in CAPACITIES))
    plan = planned(surveyed(requests, wishes), wishes)
    told = []
    for found in plan.rows:
        lru = exact_lru([request.hash_ids for request in requests], found.pages)
        same = "" if lru == found.hit_rate else f" (page by page {lru:.4f})"
        told.append(f"{found.pages:,}: {found.hit_rate:.4f}{same}, bound {found.bound:.4f}")
    return f"{path.name}, hits by pages of capacity: {'; '.join(told)}; never forgets: {plan.endless:.4f}"


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1_000_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--trace", type=Path, help="a trace to compare hit rates on")
    args = options.parse_args(argv)
    shown = [args.trace.name if args.trace and arg == str(args.trace) else arg for arg in argv]
    report = Report(
        f"Planning from a trace of {args.requests:,} requests, medians of {args.rounds} rounds (range)",
        " ".join(["python benchmarks/plan.py", *shown]),
    )
    kinds = {"exact": EXACT, f"one page in {SAMPLED:g}": sampling(SAMPLED)}
    found: dict[str, list[tuple[dict[str, float], Plan]]] = {name: [] for name in kinds}
    alone = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, progress(1 + args.rounds + 1) as tick:
        path = Path(directory) / "trace.jsonl"
        write(path, args.requests)
        start = time.perf_counter()
        count = sum(1 for _ in read_trace(path))
        report.notes.append(f"reading alone: {time.perf_counter() - start:.1f} s for {count:,} requests")
        tick()
        for name in [*kinds, *["exact"] * (args.rounds - 1)]:
            with alone.Pool(1) as pool:
                found[name].append(pool.apply(timed_plan, (path, kinds[name])))
            tick()
    for name, runs in found.items():
        report.rows.append(row(name, [parts for parts, _ in runs], runs[0][1]))
    exact, sampled = (runs[0][1] for runs in found.values())
    report.notes.append(apart(exact, sampled))
    report.notes.append(f"{len(exact.rows)} sizes with their bounds; one process, so one core")
    if args.trace:
        report.notes.append(known(args.trace))
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
