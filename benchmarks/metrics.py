"""What a node's metrics cost: lookups and gets beside a node of another checkout, such as the commit before they came.

Lookups of 8 and of 64 keys over bulk TCP; gets of one page and of 16 pages of 64 KiB from RAM, over bulk TCP and in
shared memory. One client thread; the nodes take turns of 50 calls. Two processes of the same code differ by some
hundredths, so both are started several times. Microseconds of a call, and of the node's processor time for it, which
other work on the machine moves less: the median of the starts' medians, and of their ratios, with the range of these.
Aim: a ratio of at most 1.02.

    git worktree add /tmp/before COMMIT
    python benchmarks/metrics.py /tmp/before [--starts 9] [--rounds 15] [--json]
"""

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Report, Samples, median, parser, progress, rounds, timed

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

    def turn(self, client: Client, wire: str, pid: int) -> Samples:
        """Seconds of each call, by what it does; and of the node's processor time, once for all of them."""
        assert all(client.get(self.namespace, self.keys, self.buffers))
        assert client.wire_name == wire
        calls = {f"{what} {pages}": self.call(client, what, pages) for what, pages in OPS[wire]}
        samples: Samples = {}
        for name, call in calls.items():
            before = processor_s(pid)
            samples[name] = [timed(call) for _ in range(CALLS)]
            samples[f"{name}, node"] = [(processor_s(pid) - before) / CALLS]
        return samples


def processor_s(pid: int) -> float:
    """Of a process, all its threads, so far."""
    ran = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, ran)) / 1e9


def rows(starts: list[dict[str, Samples]]) -> list[dict[str, Any]]:
    found = []
    for wire in OPS:
        before, after = ([start[f"{wire}, {name}"] for start in starts] for name in ("before", "now"))
        for op in (name for name in before[0] if not name.endswith("node")):
            row: dict[str, Any] = {"wire": wire, "op, pages": op}
            for what, key in (("call", op), ("node", f"{op}, node")):
                one, two = ([median(start[key]) for start in some] for some in (before, after))
                ratios = [b / a for a, b in zip(one, two, strict=True)]
                row[f"{what} before µs"] = round(median(one) * 1e6, 1)
                row[f"{what} now µs"] = round(median(two) * 1e6, 1)
                row[f"{what} ratio"] = f"{median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"
                row[f"{what}, aim {AIM:g}"] = "met" if median(ratios) <= AIM else "missed"
            found.append(row)
    return found


def start(before: str, subject: Subject, count: int, tick: Callable[[], None]) -> dict[str, Samples]:
    """Samples of two nodes that are started for them."""
    with contextlib.ExitStack() as stack:
        nodes = {
            "before": NodeProcess(*NODE_FLAGS, inside=("env", f"--chdir={before}")),
            "now": NodeProcess(*NODE_FLAGS),
        }
        contenders = {}
        for name, node in nodes.items():
            stack.enter_context(node)
            for wire in OPS:
                client = stack.enter_context(Client(client_config(address=node.address, wire=wire)))
                subject.store(client)
                contenders[f"{wire}, {name}"] = functools.partial(subject.turn, client, wire, node.pid)
        return rounds(contenders, count, WARMUPS, tick)


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("before", help="folder of the checkout whose node is the one beside")
    options.add_argument("--starts", type=int, default=9, help="how often both nodes are started (%(default)s)")
    options.add_argument("--rounds", type=int, default=15, help=f"turns of {CALLS} calls of each start (%(default)s)")
    args = options.parse_args(argv)
    report = Report("What metrics cost", " ".join(["python benchmarks/metrics.py", *argv]))
    subject = Subject()
    with progress(args.starts * (args.rounds + WARMUPS)) as tick:
        report.rows = rows([start(args.before, subject, args.rounds, tick) for _ in range(args.starts)])
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
