"""Compute what a change of a large cluster moves, and how long that takes on given links.

Computed with the real views and placement for a sample of pages; nothing is sent.

    join      one more member       it fetches its share from the owners before
    leave     one is lost           its pages are copied from the other owners, or lost with one
                                    replica
    drain     one leaves            its pages go to their owners in the view without it
    zone      all of a zone lost    as leave

A page goes to each new owner that did not have it, from any reachable member that has it. Time is
that of the busiest link: of the one member that takes or gives all, else of the mean of those that
do, as the placement is even.

    python benchmarks/cluster_moves.py      six minutes
"""

import argparse
import collections
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from measure import Report, progress

from kvstore.cluster.view import Member, Placement, State, View

NAMESPACE = bytes(16)
LINKS_GBIT = (25, 100)
AT_ONCE = 256  # pages placed between two updates of the progress bar


def cluster(members: int, zones: int, replicas: int) -> View:
    """Return a view of many members."""
    known = [
        Member(f"m{number}", f"host-{number}:7440", 1.0, f"z{number % zones}")
        for number in range(members)
    ]
    return View("fleet", 1, tuple(known), replicas)


def changes(view: View) -> Iterator[tuple[str, View, set[str]]]:
    """Yield (name, view after, lost members) of each change."""
    members = view.members
    joining = Member("new", "host-new:7440", 1.0, "z-new", State.JOINING)
    yield "join", replace(view, members=(*members, joining)), set()
    yield "leave", replace(view, members=members[1:]), {members[0].id}
    drained = replace(members[0], state=State.DRAINING)
    yield "drain", replace(view, members=(drained, *members[1:])), set()
    zone = [member for member in members if member.zone == members[0].zone]
    left = tuple(member for member in members if member not in zone)
    yield "zone", replace(view, members=left), {member.id for member in zone}


def owners(placement: Placement, keys: list[bytes], tick: Any) -> list[tuple[str, ...]]:
    """Return the owners of many keys."""
    found: list[tuple[str, ...]] = []
    for start in range(0, len(keys), AT_ONCE):
        found += placement.owners(NAMESPACE, keys[start : start + AT_ONCE])
        tick()
    return found


class Moved:
    """Count the sample's pages that members give and take, and those that are lost."""

    def __init__(
        self, before: list[tuple[str, ...]], after: list[tuple[str, ...]], lost: set[str]
    ) -> None:
        drawn = random.Random(1)
        self.given: collections.Counter[str] = collections.Counter()
        self.taken: collections.Counter[str] = collections.Counter()
        self.lost = 0
        for had, wanted in zip(before, after, strict=True):
            have = [member for member in had if member not in lost]
            if not have:
                self.lost += 1
                continue
            for member in wanted:
                if member not in had:
                    self.given[drawn.choice(have)] += 1
                    self.taken[member] += 1

    @property
    def count(self) -> int:
        """Return the pages that moved."""
        return sum(self.taken.values())

    @property
    def busiest(self) -> float:
        """Return the pages over the busiest link."""
        return max(_busiest(self.given), _busiest(self.taken))


def _busiest(counts: "collections.Counter[str]") -> float:
    if not counts:
        return 0.0
    most, total = max(counts.values()), sum(counts.values())
    # Among many members, the sample's maximum is mostly noise
    return most if most > total / 2 else total / len(counts)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return the table's rows."""
    drawn = random.Random(2)
    keys = [drawn.randbytes(32) for _ in range(args.sample)]
    scale, page_nbytes = args.pages / args.sample, args.page_mib * (1 << 20)
    total = 2 * 5 * -(-args.sample // AT_ONCE)
    with progress(total) as advance:
        for replicas in (1, 2):
            view = cluster(args.members, args.zones, replicas)
            before = owners(view.owners, keys, advance)
            for name, changed, lost in changes(view):
                moved = Moved(before, owners(changed.owners, keys, advance), lost)
                link_nbytes = moved.busiest * scale * page_nbytes
                yield {
                    "replicas": replicas,
                    "change": name,
                    "moved, TB": f"{moved.count * scale * page_nbytes / 1e12:.2f}",
                    "of all bytes": f"{moved.count / len(keys) / replicas:.4f}",
                    "pages lost": f"{moved.lost / len(keys):.4f}",
                    "busiest link, GB": f"{link_nbytes / 1e9:.1f}",
                    **{
                        f"at {gbit} Gbit/s, s": f"{link_nbytes * 8 / gbit / 1e9:.0f}"
                        for gbit in LINKS_GBIT
                    },
                }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--members", type=int, default=1000)
    options.add_argument("--zones", type=int, default=20)
    options.add_argument("--pages", type=float, default=1e8)
    options.add_argument("--page-mib", type=float, default=1.0)
    options.add_argument("--sample", type=int, default=1 << 15)
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    report = Report("What a change of the cluster moves", "python benchmarks/cluster_moves.py")
    report.rows = list(rows(args))
    report.notes.append(
        f"{args.members:,} members in {args.zones} zones, {args.pages:,.0f} pages of "
        f"{args.page_mib:g} MiB, "
        f"computed for {args.sample:,} of them: a share p is right within 2·sqrt(p/{args.sample})"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
