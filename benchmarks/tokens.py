"""Lookups at a node that asks who you are, beside one that asks nobody.

Both nodes are processes of their own on this machine; the identities are a file of 1,000 tokens. The contenders take
turns of 50 calls, and each turn's median is set against that of the open node beside it.
Aim: at most 5 % more time.

    python benchmarks/tokens.py [--rounds 60] [--json]
"""

import contextlib
import secrets
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measure import Report, Samples, parser, percentile, progress, rounds, timed

from kvstore import Client, Namespace, client_config, opaque_layout
from kvstore.identity_file import new_token, token_line
from kvstore.measure.node_process import NodeProcess

PAGE_NBYTES = 4096
CALLS = 50
WARMUPS = 3
KEYS = (1, 64, 256)
TOKENS = 1000
TENANT = "team-a"
AIM = 1.05
NODE_FLAGS = ("--ram-bytes", "64MiB", "--log-level", "WARNING")


def identities(directory: str) -> tuple[str, str]:
    """(the file, a token in it)."""
    token = new_token(TENANT)
    lines = [token_line(f"other-{number}", new_token(TENANT), tenant=TENANT, role="read") for number in range(TOKENS)]
    lines.append(token_line("ours", token, tenant=TENANT, role="write"))
    path = Path(directory) / "identities"
    path.write_text("\n".join(lines) + "\n")
    return str(path), token


def turn(client: Client, namespace: Namespace, keys: list[bytes]) -> Samples:
    return {
        str(count): [timed(partial(client.lookup, namespace, keys[:count])) for _ in range(CALLS)] for count in KEYS
    }


def rows(wire: str, samples: dict[str, Samples]) -> list[dict[str, Any]]:
    found = []
    for count in map(str, KEYS):
        by_round = {
            name: [percentile(ops[count][at : at + CALLS], 50) for at in range(0, len(ops[count]), CALLS)]
            for name, ops in samples.items()
        }
        ratios = sorted(a / b for a, b in zip(by_round["asks"], by_round["open"], strict=True))
        ratio = statistics.median(ratios)
        found.append(
            {
                "wire": wire,
                "keys": int(count),
                "open, p50 µs": round(percentile(samples["open"][count], 50) * 1e6, 1),
                "asks, p50 µs": round(percentile(samples["asks"][count], 50) * 1e6, 1),
                "ratio": round(ratio, 3),
                "quarter to three quarters": f"{percentile(ratios, 25):.3f}-{percentile(ratios, 75):.3f}",
                f"aim {AIM:g}": "met" if ratio <= AIM else "missed",
            }
        )
    return found


def main(argv: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60, help=f"turns of {CALLS} calls each (%(default)s)")
    args = options.parse_args(argv)
    report = Report("Lookups with a token", " ".join(["python benchmarks/tokens.py", *argv]))
    with contextlib.ExitStack() as stack:
        path, token = identities(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = {
            "open": stack.enter_context(NodeProcess(*NODE_FLAGS)).address,
            "asks": stack.enter_context(NodeProcess(*NODE_FLAGS, "--identities", path)).address,
        }
        namespace = Namespace("benchmark", opaque_layout(PAGE_NBYTES), TENANT)
        keys = [secrets.token_bytes(32) for _ in range(max(KEYS))]
        wires = ("bulk", "grpc")
        tick = stack.enter_context(progress(len(wires) * (args.rounds + WARMUPS)))
        for wire in wires:
            clients = {
                name: stack.enter_context(Client(client_config(address=address, wire=wire, token=token)))
                for name, address in nodes.items()
            }
            for client in clients.values():
                client.put(namespace, keys, [bytes(PAGE_NBYTES)] * len(keys))
            contenders = {name: partial(turn, client, namespace, keys) for name, client in clients.items()}
            report.rows += rows(wire, rounds(contenders, args.rounds, WARMUPS, tick))
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
