"""Measure what a lost member costs: a trace against three nodes, with and without faults.

    killed           n1 is killed for good after a fifth of the requests
    stopped 5 s      n1 is stopped (SIGSTOP) and continues
    cut off 5 s      n1 neither receives nor sends, as behind a failed switch
    deaf 5 s         n1 does not receive, but what it sends arrives
    all in turn      n1 killed and started again after 5 s, empty; n2 stopped; n3 cut off; 10 s
                     between them, to recover
    ... on etcd      the same, but n1 is killed for good

Every loaded byte is verified. `found of undisturbed`: pages that were stored when a request asked
for them, from the fault on, as a share of what the undisturbed replay found from there on; `share`:
of the keys, that n1 owns alone. Aims: no errors, no wrong page, no call later than its deadline +
0.1 s and the measured lateness of a sleep; with R=2 a hit rate within 0.01 of the undisturbed.

    python benchmarks/cluster_faults.py [TRACE] [--requests N] [--replicas 1,2] [--faults F,...]
        [--json]

A node can be cut off only if each is on a host of its own, a network namespace, which needs root;
else those rows are left out, and so is the one on etcd without etcd. A replay that ends before its
faults do has too few requests.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import Report, parser, progress
from network_hosts import Hosts, missing
from node_fleet import HERE, EtcdProcess, Fleet, Place
from trial import Event, Trial

from kvstore.keys import Namespace
from kvstore.tools.replay import ReplayReport, replay_namespace
from kvstore.tools.trace import TraceRequest, conversations, read_trace, trace_prefix_hash

NODES = 3
PAGE_NBYTES = 4096
FAULT_S = 5.0
HEAL_S = 10.0  # until the next fault: more than a lease and a sweep
AT = 0.2  # share of the requests before the fault
TIMEOUT_S = 1.0
READY_S = 10.0
ON_ETCD = "all in turn, on etcd"
LATE_S_MAX = 0.1
HIT_RATE_AIM = 0.01
NODE_FLAGS = ("--ram-bytes", "1GiB", "--log-level", "ERROR")
Script = Callable[[Fleet], Callable[[], object]]


def stopped(fleet: Fleet, member: str) -> Callable[[], None]:
    """Return a fault that stops a member for a while."""

    def run() -> None:
        fleet.nodes[member].pause()
        time.sleep(FAULT_S)
        fleet.nodes[member].resume()

    return run


def cut(hosts: Hosts, place: Place, speaks: bool) -> Callable[[], None]:
    """Return a fault that cuts a host off."""

    def run() -> None:
        hosts.cut(place, speaks=speaks)
        time.sleep(FAULT_S)
        hosts.heal(place)

    return run


def in_turn(fleet: Fleet, hosts: Hosts, returns: bool) -> Callable[[], None]:
    """Return all faults in turn."""

    def run() -> None:
        fleet.nodes["n1"].kill()
        time.sleep(FAULT_S)
        if returns:
            fleet.start("n1")
        for fault in (stopped(fleet, "n2"), cut(hosts, hosts.places[2], speaks=False)):
            time.sleep(HEAL_S)
            fault()

    return run


def scripts(hosts: Hosts | None) -> dict[str, Script]:
    """Return the scripts of faults by name."""
    found: dict[str, Script] = {
        "none": lambda fleet: lambda: None,
        "n1 killed": lambda fleet: fleet.nodes["n1"].kill,
        "n1 stopped 5 s": lambda fleet: stopped(fleet, "n1"),
    }
    if hosts:
        here = hosts
        found["n1 cut off 5 s"] = lambda fleet: cut(here, here.places[0], speaks=False)
        found["n1 deaf 5 s"] = lambda fleet: cut(here, here.places[0], speaks=True)
        found["all in turn"] = lambda fleet: in_turn(fleet, here, returns=True)
        if shutil.which("etcd"):
            found[ON_ETCD] = lambda fleet: in_turn(fleet, here, returns=False)
    return found


def trial(
    script: Script,
    replicas: int,
    hosts: Hosts | None,
    etcd: bool,
    requests: Sequence[TraceRequest],
    tick: Callable[[], None],
) -> tuple[Trial, ReplayReport, float]:
    """Run one trial with new nodes; return also the share of pages that n1 owns alone."""
    *places, beside = hosts.places if hosts else [HERE] * (NODES + 1)
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(contextlib.closing(EtcdProcess(beside))) if etcd else None
        fleet = stack.enter_context(Fleet(places, *NODE_FLAGS, replicas=replicas, etcd=registry))
        client = stack.enter_context(fleet.client(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S))
        namespace = replay_namespace(PAGE_NBYTES)
        client.open(namespace, timeout_s=READY_S)  # the first call of a new node takes long
        owned = share(fleet, namespace, requests)
        events = [Event(AT, "begins", script(fleet)), Event(AT, "over", lambda: None)]
        found = Trial(client, namespace, events, tick)
        report = found.run(requests)
    if found.events[-1][0] >= report.seconds:
        raise SystemExit(f"{len(requests)} requests were over before the faults were: --requests")
    return found, report, owned


def share(fleet: Fleet, namespace: Namespace, requests: Sequence[TraceRequest]) -> float:
    """Return the share of the requested pages that only n1 owns."""
    with fleet.client() as client:
        view = client.view(TIMEOUT_S)
    assert view is not None
    ids = [hash_id for request in requests for hash_id in request.hash_ids]
    owners = view.owners.owners(namespace.digest, [trace_prefix_hash(hash_id) for hash_id in ids])
    return owners.count(("n1",)) / len(ids)


def rows(
    names: Sequence[str],
    replicas: int,
    hosts: Hosts | None,
    requests: Sequence[TraceRequest],
    tick: Callable[[], None],
) -> list[dict[str, Any]]:
    """Return the table's rows."""
    shown: list[dict[str, Any]] = []
    calm = (0.0, 0)
    begins = int(AT * len(requests))
    for name in names:
        found, report, owned = trial(
            scripts(hosts)[name], replicas, hosts, name == ON_ETCD, requests, tick
        )
        here = (report.prefix_hit_rate, sum(found.found[begins:]))
        calm = here if name == "none" else calm
        met = not found.errors and not report.mismatches and found.overdue_s <= LATE_S_MAX
        met = met and (replicas == 1 or abs(here[0] - calm[0]) <= HIT_RATE_AIM)
        shown.append(
            {
                "R": replicas,
                "fault": name,
                "hit rate": f"{here[0]:.4f}",
                "beside none": f"{here[0] - calm[0]:+.4f}",
                "found of undisturbed": round(here[1] / calm[1], 3),
                "share": round(owned, 3),
                "errors": found.errors.total(),
                "wrong pages": report.mismatches,
                "MB verified": round(report.verified_nbytes / 1e6),
                "late ms": round(max(0.0, found.late_s) * 1e3),
                "a sleep": round(found.lag_s * 1e3),
                "seconds": round(report.seconds, 1),
                "aim": "met" if met else "missed",
            }
        )
    return shown


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument(
        "trace", type=Path, nargs="?", help="JSONL, one request a line; default: chats nobody had"
    )
    options.add_argument("--requests", type=int, default=6000, help="so many of them (%(default)s)")
    options.add_argument(
        "--replicas", default="1,2", help="owners of each key, one run for each (%(default)s)"
    )
    options.add_argument(
        "--faults", default="", help="those whose names begin so, beside none; default: all"
    )
    args = options.parse_args(argv)
    requests = (
        list(read_trace(args.trace, args.requests)) if args.trace else conversations(args.requests)
    )
    name = args.trace.name if args.trace else "made-up chats"
    report = Report(
        f"Faults: {name} on {NODES} nodes, pages of {PAGE_NBYTES} bytes",
        "python benchmarks/cluster_faults.py",
    )
    report.command += "".join(
        f" {Path(word).name if word == str(args.trace) else word}" for word in argv
    )
    with contextlib.ExitStack() as stack:
        hosts = None if missing() else stack.enter_context(Hosts(NODES + 1))
        if hosts is None:
            report.notes.append(f"rows of nodes that are cut off are left out: {missing()}")
        wanted = ("none", *args.faults.split(","))
        names = [name for name in scripts(hosts) if name.startswith(wanted)]
        counts = [int(count) for count in args.replicas.split(",")]
        tick = stack.enter_context(progress(len(counts) * len(names) * len(requests)))
        for replicas in counts:
            report.rows += rows(names, replicas, hosts, requests, tick)
    report.notes.append(
        f"{len(requests):,} requests one after the other; deadline of each call {TIMEOUT_S:g} s"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
