"""Whose keys: how long it takes, how even it is, and what moves when a member joins.

python benchmarks/placement.py            two minutes, most of it a million keys at 64 members
"""

import argparse
import collections
import random
import sys
import time
from typing import Any

from measure import Report, median

from kvstore.cluster.placement import Candidate, Placement

NAMESPACE = bytes(16)
CALL_KEYS = 1024
REPEATS = 9


def members(weights: tuple[float, ...]) -> list[Candidate]:
    return [Candidate(f"node-{number}", weight) for number, weight in enumerate(weights)]


def some_keys(count: int) -> list[bytes]:
    drawn = random.Random(1)
    return [drawn.randbytes(32) for _ in range(count)]


def seconds(placement: Placement, keys: list[bytes]) -> float:
    begun = time.perf_counter()
    placement.owners(NAMESPACE, keys)
    return time.perf_counter() - begun


def row(name: str, weights: tuple[float, ...], keys: list[bytes], replicas: int = 2) -> dict[str, Any]:
    placement, call = Placement(members(weights), replicas), keys[:CALL_KEYS]
    first = seconds(placement, call)
    again = median([seconds(placement, call) for _ in range(REPEATS)])
    before = placement.owners(NAMESPACE, keys)
    counts = collections.Counter(found[0] for found in before)
    fullest = max(counts[member.id] * sum(weights) / member.weight / len(keys) for member in members(weights))
    after = Placement(members((*weights, 1.0)), replicas).owners(NAMESPACE, keys)
    moved = sum(old[0] != new[0] for old, new in zip(before, after, strict=True)) / len(keys)
    share = 1.0 / (sum(weights) + 1.0)
    return {
        "members": name,
        "1,024 keys first, ms": f"{first * 1e3:.1f}",
        "again, ms": f"{again * 1e3:.2f}",
        "fullest of its share": f"{fullest:.3f}",
        "a join of weight 1 moves": f"{moved:.4f}",
        "of its share": f"{moved / share:.3f}",
    }


def main(argv: list[str]) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keys", type=int, default=1_000_000)
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    keys = some_keys(args.keys)
    report = Report("Whose keys", "python benchmarks/placement.py")
    report.rows = [
        row("3", (1.0,) * 3, keys),
        row("weights 1, 2, 4", (1.0, 2.0, 4.0), keys),
        row("16", (1.0,) * 16, keys),
        row("64", (1.0,) * 64, keys),
    ]
    report.notes.append(
        f"{args.keys:,} keys, two owners each; 'first' works out the slots of a view's first {CALL_KEYS:,} keys, "
        f"'again' is the median of {REPEATS}"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
