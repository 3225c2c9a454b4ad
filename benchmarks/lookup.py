"""Measure `Lookup` of 64 keys, beside Redis `EXISTS` of 64 keys.

Both over one loopback TCP connection, with the same 48-byte keys, once all stored and once none.
The operations differ: Redis counts the keys it has in a loop of C; the node answers for each key,
checks the request against its limits, and counts hits and the reason of each miss. The contenders
take turns of 50 calls.
Aim: p50 of the bulk wire at most 2 times that of Redis.

    python benchmarks/lookup.py [--rounds 120] [--json]
"""

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable
from typing import Any

from measure import Report, Samples, parser, percentile, progress, redis_client, rounds, timed

from kvstore import Client, Namespace, client_config
from kvstore.layout import opaque_layout
from kvstore.tools.node_process import NodeProcess

KEYS = 64
PAGE_NBYTES = 4096
CALLS = 50  # of one turn
WARMUPS = 3
AIM = 2.0
NODE_FLAGS = ("--ram-bytes", "64MiB", "--log-level", "WARNING")


class Subject:
    """The keys that are stored and those that are not."""

    def __init__(self) -> None:
        self.namespace = Namespace(model="benchmark", layout=opaque_layout(PAGE_NBYTES))
        self.stored = [secrets.token_bytes(32) for _ in range(KEYS)]
        self.absent = [secrets.token_bytes(32) for _ in range(KEYS)]

    def turn(self, lookup: Callable[[list[bytes]], int]) -> Samples:
        """Return the seconds of each call of `lookup`, which returns how many keys were found."""
        assert (lookup(self.stored), lookup(self.absent)) == (KEYS, 0)
        return {
            "hit": [timed(functools.partial(lookup, self.stored)) for _ in range(CALLS)],
            "miss": [timed(functools.partial(lookup, self.absent)) for _ in range(CALLS)],
        }

    def ours(self, client: Client) -> Samples:
        """Time our lookup."""
        return self.turn(lambda hashes: client.lookup(self.namespace, hashes).prefix_pages)

    def rival(self, client: Any) -> Samples:
        """Time Redis."""
        keys = {
            id(hashes): [self.namespace.digest + h for h in hashes]
            for hashes in (self.stored, self.absent)
        }
        return self.turn(lambda hashes: client.exists(*keys[id(hashes)]))

    def store(self, client: Client, redis: Any) -> None:
        """Store the keys."""
        pages = [bytes(PAGE_NBYTES)] * KEYS
        client.put(self.namespace, self.stored, pages)
        if redis is not None:
            redis.mset(
                {
                    self.namespace.digest + h: page
                    for h, page in zip(self.stored, pages, strict=True)
                }
            )


def rows(samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """Return the table's rows."""
    found = []
    for op in ("hit", "miss"):
        rival = percentile(samples["Redis EXISTS"][op], 50) if "Redis EXISTS" in samples else None
        for name, ops in samples.items():
            p50, p99 = (percentile(ops[op], percent) for percent in (50, 99))
            ratio = None if rival is None else round(p50 / rival, 2)
            verdict = None
            if ratio is not None and name == "Lookup, bulk":
                verdict = "met" if ratio <= AIM else "missed"
            found.append(
                {
                    "keys": f"{KEYS}, all {op}",
                    "contender": name,
                    "calls": len(ops[op]),
                    "p50 µs": round(p50 * 1e6, 1),
                    "p99 µs": round(p99 * 1e6, 1),
                    "p50 to Redis": ratio,
                    f"aim {AIM:g}": verdict,
                }
            )
    return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=120, help=f"turns of {CALLS} calls each (%(default)s)"
    )
    args = options.parse_args(argv)
    report = Report(f"Lookup of {KEYS} keys", " ".join(["python benchmarks/lookup.py", *argv]))
    subject = Subject()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        bulk, grpc = (
            stack.enter_context(Client(client_config(address=node.address, wire=wire)))
            for wire in ("bulk", "grpc")
        )
        redis = stack.enter_context(redis_client(report.notes))
        subject.store(bulk, redis)
        contenders = {
            "Lookup, bulk": functools.partial(subject.ours, bulk),
            "Lookup, gRPC": functools.partial(subject.ours, grpc),
        }
        if redis is not None:
            contenders["Redis EXISTS"] = functools.partial(subject.rival, redis)
        tick = stack.enter_context(progress(args.rounds + WARMUPS))
        report.rows = rows(rounds(contenders, args.rounds, WARMUPS, tick))
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
