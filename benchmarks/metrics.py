"""What a node's metrics cost: lookups and gets beside a node of another checkout, such as the commit before they came.

Lookups of 8 and of 64 keys over bulk TCP; gets of one page and of 16 pages of 64 KiB from RAM, over bulk TCP and in
shared memory. One client thread; the nodes take turns of 50 calls. Microseconds: medians of all calls, and the ratio of
the medians of each round, its median and its range.
Aim: a ratio of at most 1.02.

    git worktree add /tmp/before COMMIT
    python benchmarks/metrics.py /tmp/before [--rounds 60] [--json]
"""

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable
from typing import Any

from measure import Report, Samples, median, parser, percentile, progress, rounds, timed

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.measure.node_process import NodeProcess

PAGE_NBYTES = 64 << 10
PAGES = 64
CALLS = 50  # of one turn
WARMUPS = 3
AIM = 1.02
NODE_FLAGS = ("--ram-bytes", "64MiB", "--log-level", "WARNING")
OPS = {  # by wire: (what, pages)
    "bulk": (("lookup", 8), ("lookup", 64), ("get", 1), ("get", 16)),
    "shm": (("get", 1), ("get", 16)),
}


class Subject:
    """Pages that both nodes have."""

    def __init__(self) -> None:
        self.namespace = Namespace(model="benchmark", layout=opaque_layout(PAGE_NBYTES))
        self.keys = [secrets.token_bytes(32) for _ in range(PAGES)]
        self.buffers = [bytearray(PAGE_NBYTES) for _ in range(PAGES)]

    def store(self, client: Client) -> None:
        client.put(self.namespace, self.keys, self.buffers)

    def call(self, client: Client, what: str, pages: int) -> Callable[[], object]:
        keys = self.keys[:pages]
        if what == "lookup":
            return functools.partial(client.lookup, self.namespace, keys)
        return functools.partial(client.get, self.namespace, keys, self.buffers[:pages])

    def turn(self, client: Client, wire: str) -> Samples:
        """Seconds of each call, by what it does."""
        assert all(client.get(self.namespace, self.keys, self.buffers))
        assert client.wire_name == wire
        calls = {f"{what} {pages}": self.call(client, what, pages) for what, pages in OPS[wire]}
        return {name: [timed(call) for _ in range(CALLS)] for name, call in calls.items()}


def rows(samples: dict[str, Samples]) -> list[dict[str, Any]]:
    found = []
    for wire in OPS:
        before, after = samples[f"{wire}, before"], samples[f"{wire}, now"]
        for op in before:
            ratios = [median(b) / median(a) for a, b in zip(turns(before[op]), turns(after[op]), strict=True)]
            low, high = percentile(ratios, 5), percentile(ratios, 95)
            found.append(
                {
                    "wire": wire,
                    "op, pages": op,
                    "calls": len(after[op]),
                    "before µs": round(median(before[op]) * 1e6, 1),
                    "now µs": round(median(after[op]) * 1e6, 1),
                    "ratio": round(median(ratios), 3),
                    "90 % of rounds": f"{low:.2f}-{high:.2f}",
                    f"aim {AIM:g}": "met" if median(ratios) <= AIM else "missed",
                }
            )
    return found


def turns(seconds: list[float]) -> list[list[float]]:
    return [seconds[start : start + CALLS] for start in range(0, len(seconds), CALLS)]


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("before", help="folder of the checkout whose node is the one beside")
    options.add_argument("--rounds", type=int, default=60, help=f"turns of {CALLS} calls each (%(default)s)")
    args = options.parse_args(argv)
    report = Report("What metrics cost", " ".join(["python benchmarks/metrics.py", *argv]))
    subject = Subject()
    with contextlib.ExitStack() as stack:
        nodes = {
            "before": NodeProcess(*NODE_FLAGS, inside=("env", f"--chdir={args.before}")),
            "now": NodeProcess(*NODE_FLAGS),
        }
        contenders = {}
        for name, node in nodes.items():
            stack.enter_context(node)
            for wire in OPS:
                client = stack.enter_context(Client(client_config(address=node.address, wire=wire)))
                subject.store(client)
                contenders[f"{wire}, {name}"] = functools.partial(subject.turn, client, wire)
        tick = stack.enter_context(progress(args.rounds + WARMUPS))
        report.rows = rows(rounds(contenders, args.rounds, WARMUPS, tick))
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
