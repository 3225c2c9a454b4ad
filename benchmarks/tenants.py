"""Measure a well-behaved tenant, alone and beside one that floods the node.

The node has two tenants with half of the RAM each; with --disk also of the disk. The well-behaved
one replays a trace of chains by popularity: a lookup, a get of the hits, a put of the misses, a
pause. The other's processes attack without end. They have the lowest priority, because they share
the cores with the node and the measuring client; on few cores they still take time from both. A
third kind of turn measures that: the same attack on another node of this machine. The three take
turns; each begins with an empty node, and its first third is not measured. Aim: a hit rate within
0.01 and a p99 within 2 times of the tenant alone; with few cores, of the attack on the other node.

    python benchmarks/tenants.py [--rounds 3] [--attacks flood,pins] [--limits none,quotas,rates]
        [--disk] [--json]
"""

import contextlib
import dataclasses
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import Report, parser, percentile, progress, timed

from kvstore import Client, Exhausted, KVStoreError, Namespace, client_config, opaque_layout
from kvstore.security.identities import new_token, token_line
from kvstore.tools.node_process import NodeProcess

PAGE_NBYTES = 64 << 10
CHAIN_PAGES = 8
CHAINS = 400  # 200 MiB; the quota holds 64
STEPS = 900
WARMUP_STEPS = 300
PAUSE_S = 0.002
QUIET = Namespace("m", opaque_layout(PAGE_NBYTES), "quiet")
LOUD = Namespace("m", opaque_layout(PAGE_NBYTES), "loud")
QUOTA = "ram=64MiB disk=512MiB"
LIMITS = {
    "none": [],
    "quotas": [f"tenant quiet {QUOTA}", f"tenant loud {QUOTA} pins=1000 connections=32"],
    "rates": [
        f"tenant quiet {QUOTA}",
        f"tenant loud {QUOTA} pins=1000 connections=32 requests=200/s bytes=64MiB/s",
    ],
}
NODE_FLAGS = (
    "--ram-bytes",
    "128MiB",
    "--extent-bytes",
    "4MiB",
    "--disk-bytes",
    "1GiB",
    "--log-level",
    "ERROR",
)
WHO = ["alone", "elsewhere", "beside"]
ATTACKERS = 2  # processes, of THREADS each
THREADS = 4


# ---- attackers ---------------------------------------------------------------------------------


def keys_of(rng: random.Random, count: int) -> list[bytes]:
    """Return random keys."""
    return [rng.randbytes(32) for _ in range(count)]


def flood(client: Client, rng: random.Random) -> None:
    """Put and get as fast as possible."""
    some = keys_of(rng, 16)
    client.put(LOUD, some, [bytes(PAGE_NBYTES)] * 16)
    client.get(LOUD, some, [bytearray(PAGE_NBYTES) for _ in some])


def pins(client: Client, rng: random.Random) -> None:
    """Put and pin pages."""
    some = keys_of(rng, 16)
    client.put(LOUD, some, [bytes(PAGE_NBYTES)] * 16)
    client.pin(LOUD, some, 3600.0)


def sizes(client: Client, rng: random.Random) -> None:
    """Put pages of random sizes."""
    nbytes = rng.randrange(1, 200) * 2500
    client.put(
        dataclasses.replace(LOUD, layout=opaque_layout(nbytes)),
        keys_of(rng, 4),
        [bytes(nbytes)] * 4,
    )


def descriptions(client: Client, rng: random.Random) -> None:
    """Open namespaces with long descriptions."""
    space = dataclasses.replace(LOUD, salt=rng.randbytes(450).hex(), revision="r" * 1000)
    client.put(space, keys_of(rng, 1), [bytes(PAGE_NBYTES)])


def scrubs(client: Client, rng: random.Random) -> None:
    """Scrub and look up many pages."""
    with contextlib.suppress(KVStoreError):
        client.scrub()
    client.lookup(LOUD, keys_of(rng, 2000))
    client.stat(LOUD, keys_of(rng, 500))


def silence(client: Client, rng: random.Random) -> None:
    """Open connections that send half a frame."""
    host, _, port = client.config.address.partition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            sock = stack.enter_context(socket.create_connection((host, int(port)), 5.0))
            sock.sendall(rng.randbytes(9))
        threading.Event().wait(0.2)


ATTACKS = {each.__name__: each for each in (flood, pins, sizes, descriptions, scrubs, silence)}


def attack(name: str, address: str, token: str) -> None:
    """Attack until killed."""
    os.nice(19)

    def run(number: int) -> None:
        rng = random.Random()
        wire = "grpc" if number % 4 == 3 else "bulk"
        with Client(
            client_config(address=address, wire=wire, token=token, backoff_s_max=0.1)
        ) as client:
            while True:
                with contextlib.suppress(Exhausted, KVStoreError, OSError):
                    ATTACKS[name](client, rng)

    for number in range(THREADS):
        threading.Thread(target=run, args=(number,)).start()


@contextlib.contextmanager
def attacked(name: str, address: str, token: str) -> Iterator[None]:
    """Run an attack within the block; "alone" runs none."""
    command = [sys.executable, __file__, "--attack", name, "--address", address]
    environment = {**os.environ, "KVSTORE_TOKEN": token}
    count = 0 if name == "alone" else ATTACKERS
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(count)
    ]
    try:
        threading.Event().wait(1.0 if count else 0.0)
        yield
        assert all(process.poll() is None for process in processes), "an attacker gave up"
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---- the well-behaved tenant -------------------------------------------------------------------


def turn(client: Client) -> dict[str, Any]:
    """Return hits, requested pages, and the seconds of each call, by operation."""
    rng = random.Random(7)
    chains = [keys_of(rng, CHAIN_PAGES) for _ in range(CHAINS)]
    buffers = [bytearray(PAGE_NBYTES) for _ in range(CHAIN_PAGES)]
    pages = [bytes(PAGE_NBYTES)] * CHAIN_PAGES
    seconds: dict[str, list[float]] = {"lookup": [], "get": []}
    hits, pause = 0, threading.Event()
    for step in range(STEPS):
        chain = chains[min(rng.randrange(CHAINS), rng.randrange(CHAINS), rng.randrange(CHAINS))]
        began = time.perf_counter()
        there = client.lookup(QUIET, chain).prefix_pages
        lookup_s = time.perf_counter() - began
        get_s = None
        if there:
            get_s = timed(partial(client.get, QUIET, chain[:there], buffers[:there]))
        if there < CHAIN_PAGES:
            client.put(QUIET, chain[there:], pages[there:])
        pause.wait(PAUSE_S)
        if step >= WARMUP_STEPS:
            hits += there
            seconds["lookup"].append(lookup_s)
            if get_s is not None:
                seconds["get"].append(get_s)
    return {"hit rate": hits / (STEPS - WARMUP_STEPS) / CHAIN_PAGES, **seconds}


def cleared(operator: Client) -> None:
    """Remove all namespaces."""
    for space, _ in operator.namespaces():
        operator.remove_namespace(space)


# ---- the table ---------------------------------------------------------------------------


def row(limits: str, name: str, turns: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return a row of medians over rounds, with ranges."""
    alone, beside = turns["alone"], turns["beside"]
    worst = max(abs(a["hit rate"] - b["hit rate"]) for a, b in zip(alone, beside, strict=True))
    found: dict[str, Any] = {
        "limits": limits,
        "attack": name,
        "hit rate alone": round(statistics.median(one["hit rate"] for one in alone), 3),
        "beside": round(statistics.median(one["hit rate"] for one in beside), 3),
        "apart at most": round(worst, 3),
    }
    for op in ("lookup", "get"):
        for percent in (50, 99):
            ms = {
                who: [percentile(one[op], percent) * 1e3 for one in of] for who, of in turns.items()
            }
            what = f"{op} p{percent}"
            found[f"{what} ms"] = " / ".join(f"{statistics.median(ms[who]):.2f}" for who in WHO)
            for other in WHO[:-1] if percent == 99 else ():
                ratios = sorted(b / a for a, b in zip(ms[other], ms["beside"], strict=True))
                found[f"{what} x {other}"] = (
                    f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f})"
                )
    return found


@contextlib.contextmanager
def node_of(tokens: Mapping[str, str], limits: str, disk: bool) -> Iterator[NodeProcess]:
    """Start a node."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            token_line(name, tokens[name], tenant=name, role="write") for name in ("quiet", "loud")
        ]
        lines.append(token_line("operator", tokens["operator"], tenant="*", role="admin"))
        (folder / "identities").write_text("\n".join([*lines, *LIMITS[limits]]) + "\n")
        data_dir = ("--data-dir", str(folder / "data")) if disk else ()
        with NodeProcess(
            *NODE_FLAGS, "--identities", str(folder / "identities"), *data_dir
        ) as node:
            yield node


def measured(
    limits: str, attacks: Sequence[str], count: int, disk: bool, tick: Any
) -> list[dict[str, Any]]:
    """Measure all attacks."""
    tokens = {name: new_token(name) for name in ("quiet", "loud")} | {"operator": new_token("all")}
    with contextlib.ExitStack() as stack:
        here, elsewhere = (
            stack.enter_context(node_of(tokens, limits, disk)).address for _ in range(2)
        )
        clients = {
            name: stack.enter_context(Client(client_config(address=here, wire="bulk", token=token)))
            for name, token in tokens.items()
        }
        other = stack.enter_context(
            Client(client_config(address=elsewhere, wire="bulk", token=tokens["operator"]))
        )
        found: list[dict[str, Any]] = []
        for name in attacks:
            turns: dict[str, list[dict[str, Any]]] = {who: [] for who in WHO}
            for number in range(count):
                for who in WHO[number % 3 :] + WHO[: number % 3]:
                    cleared(clients["operator"])
                    cleared(other)
                    target = elsewhere if who == "elsewhere" else here
                    with attacked("alone" if who == "alone" else name, target, tokens["loud"]):
                        turns[who].append(turn(clients["quiet"]))
                    tick()
            found.append(row(limits, name, turns))
        return found


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=3, help="turns alone and beside each attack (%(default)s)"
    )
    options.add_argument("--attacks", default=",".join(ATTACKS), help="%(default)s")
    options.add_argument(
        "--limits",
        default="none,quotas,rates",
        help="what the node has for its tenants (%(default)s)",
    )
    options.add_argument("--disk", action="store_true", help="a node with a disk tier")
    options.add_argument(
        "--attack", help="one attack, without end, at --address: what this does to itself"
    )
    options.add_argument("--address", default="")
    args = options.parse_args(argv)
    if args.attack:
        attack(args.attack, args.address, os.environ["KVSTORE_TOKEN"])
        return
    report = Report(
        "A tenant beside another that attacks", " ".join(["python benchmarks/tenants.py", *argv])
    )
    limits, attacks = args.limits.split(","), args.attacks.split(",")
    with progress(3 * len(limits) * len(attacks) * args.rounds) as tick:
        for each in limits:
            report.rows += measured(each, attacks, args.rounds, args.disk, tick)
    report.notes.append(
        f"{ATTACKERS} processes of {THREADS} threads attack at the lowest priority; three values: "
        "alone / beside the "
        "attack elsewhere / beside it; ratios, of the last to one of the others: median "
        "(least-greatest) of the rounds"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
