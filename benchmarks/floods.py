"""Flood a node's gRPC port and measure how its other clients are served.

For each way of authentication, each attack and each number of addresses, a new node is started, and
clients look up 16 keys and get a page of 1 MiB over the bulk wire, shared memory and gRPC, each in
a process of its own. They are measured

    quiet      alone
    control    while the same attackers flood another process of this machine, which reads all
    attack     while the attackers flood the node's gRPC port

The node must stay inside the memory that docs/operations.md documents. Where a control group can be
made, the kernel enforces that; else the memory is watched, and the attack ends when it is exceeded.

Aims: the node's private memory grows by at most 16 MiB. Over bulk and shared memory no call fails,
and the p99 is at most 2 times the higher one of quiet and control. Over gRPC a client is served
again within 2 s of the attack's end, and with client certificates (mtls) no call fails during it.
The node is not restarted.

    python benchmarks/floods.py [--modes open,token,mtls] [--attacks continuation-12,...]
        [--sources one,many] [--seconds 60] [--quiet-seconds 10] [--attackers 1]
        [--node-flags ...] [--json]
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import Report, parser, percentile, progress

from kvstore import Client, KVStoreError, client_config

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
from attacks import ATTACKS
from besieged import (
    LIMIT_NBYTES,
    MODES,
    SOURCES,
    Attackers,
    MemoryGroup,
    Mode,
    Watch,
    mode_of,
    sink,
    start_node,
)
from innocents import Call

INNOCENT = Path(__file__).parent.parent / "tests" / "helpers" / "innocents.py"
WIRES = ("bulk", "shm", "grpc")
OPS = ("lookup", "get")
GROWTH_AIM_NBYTES = 16 << 20
P99_AIM = 2.0
AGAIN_AIM_S = 2.0
AGAIN_S_MAX = 30.0
GRPC_TIMEOUT_S = 2.0  # of the client over gRPC; the others have their default, 5 s
WARM_S = 1.0
POLL_S = 0.02
Calls = dict[str, list[Call]]


class Innocents:
    """A process for each wire; see tests/helpers/innocents.py."""

    def __init__(self, address: str, mode: Mode) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for wire in WIRES:
            settings: dict[str, Any] = {"address": address, "wire": wire, **mode.client}
            if wire == "grpc":
                settings["timeout_s"] = GRPC_TIMEOUT_S
            command = [sys.executable, str(INNOCENT), json.dumps(settings)]
            self._processes[wire] = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def __enter__(self) -> "Innocents":
        for wire, process in self._processes.items():
            if _pipe(process.stdout).readline() != "ready\n":
                self.__exit__()
                raise RuntimeError(f"the client over {wire} did not start")
        return self

    def take(self) -> Calls:
        """Return the calls since the last time, by wire."""
        for process in self._processes.values():
            _pipe(process.stdin).write("\n")
            _pipe(process.stdin).flush()
        answers = {
            wire: json.loads(_pipe(process.stdout).readline())
            for wire, process in self._processes.items()
        }
        return {wire: [Call(*call) for call in calls] for wire, calls in answers.items()}

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            _pipe(process.stdin).close()
        for process in self._processes.values():
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()


def _pipe(pipe: Any) -> Any:
    assert pipe is not None
    return pipe


# ---- one case ------------------------------------------------------------------------------


def during(seconds: float, stop: Callable[[], bool] = lambda: False) -> float:
    """Wait so long, or until `stop`; return how long that was."""
    began = time.monotonic()
    while time.monotonic() - began < seconds and not stop():
        time.sleep(POLL_S)
    return time.monotonic() - began


def latencies(calls: Calls) -> dict[str, dict[str, float | int | None]]:
    """Return the latencies in ms of successful calls, by transport and operation."""
    found: dict[str, dict[str, float | int | None]] = {}
    for wire in WIRES:
        for op in OPS:
            seconds = [call.seconds for call in calls[wire] if call.op == op and not call.error]
            p50, p99 = (
                round(percentile(seconds, p) * 1e3, 3) if seconds else None for p in (50, 99)
            )
            found[f"{wire} {op}"] = {"calls": len(seconds), "p50 ms": p50, "p99 ms": p99}
    return found


def failures(calls: Calls) -> dict[str, int]:
    """Count failed calls by transport."""
    return {wire: sum(bool(call.error) for call in calls[wire]) for wire in WIRES}


def status_of(address: str, mode: Mode) -> tuple[int, bytes] | None:
    """Return (pid, instance) as a new gRPC connection sees it; None without service."""
    settings = {"timeout_s": GRPC_TIMEOUT_S, "connect_timeout_s": GRPC_TIMEOUT_S, **mode.client}
    try:
        with Client(client_config(address=address, wire="grpc", **settings)) as client:
            status = client.node_status()
    except KVStoreError:
        return None
    return status.pid, status.instance_id


def served_again(
    address: str, mode: Mode, since: float
) -> tuple[float | None, tuple[int, bytes] | None]:
    """Return the seconds until a new gRPC connection is served, and by whom."""
    while time.monotonic() - since < AGAIN_S_MAX:
        status = status_of(address, mode)
        if status is not None:
            return round(time.monotonic() - since, 2), status
        time.sleep(POLL_S)
    return None, None


def known_again(calls: Calls, since: float) -> float | None:
    """Return the seconds until the first success of the earlier client."""
    ends = [call.began + call.seconds for call in calls["grpc"] if not call.error]
    after = [end for end in ends if end >= since]
    return round(min(after) - since, 2) if after else None


def case(mode: Mode, attack: str, sources: str, args: Any) -> dict[str, Any]:
    """Measure one attack on a new node."""
    found: dict[str, Any] = {"mode": mode.name, "attack": attack, "from": sources}
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(MemoryGroup(LIMIT_NBYTES))
        node = stack.enter_context(start_node(mode, *args.node_flags.split(), inside=group.inside))
        watch = stack.enter_context(Watch(node.pid))
        innocents = stack.enter_context(Innocents(node.address, mode))
        during(WARM_S)
        innocents.take()
        before = status_of(node.address, mode)
        watch.begin()
        during(args.quiet_seconds)
        found["quiet"] = latencies(innocents.take())
        quiet_private, quiet_gateways = watch.private, watch.gateways
        with sink(mode) as other, _attackers(attack, other, sources, mode, args) as elsewhere:
            during(args.quiet_seconds)
            found["control"] = latencies(innocents.take())
        watch.begin()
        innocents.take()
        attackers = _attackers(attack, node.address, sources, mode, args)
        with attackers:
            attacked_s = during(args.seconds, lambda: bool(watch.exceeded_at) or not node.running)
            calls = innocents.take()
        again_s, after = served_again(node.address, mode, attackers.ended_at)
        rest_s = during(max(1.0, AGAIN_AIM_S + 1.0 - (time.monotonic() - attackers.ended_at)))
        late = innocents.take()
        found |= {
            "attacked": latencies(calls),
            "attacked s": round(attacked_s, 1),
            "failed": failures(calls),
            "failed later": failures(late),
            "errors": sorted(
                {f"{wire}: {c.error[:120]}" for wire in WIRES for c in calls[wire] if c.error}
            )[:8],
            "again s": again_s,
            "known again s": known_again(late, attackers.ended_at),
            "watched after s": round(rest_s, 1),
            "sent": dict(attackers.counts),
            "sent to the sink": dict(elsewhere.counts),
            "node quiet MiB": quiet_private >> 20,
            "node highest MiB": watch.private >> 20,
            "node growth nbytes": watch.private - quiet_private,
            "shared MiB": watch.shared >> 20,
            "gateways quiet MiB": quiet_gateways >> 20,
            "gateways highest MiB": watch.gateways >> 20,
            "gateway ends": watch.ends,
            "highest MiB": watch.highest >> 20,
            "limit": "control group" if group.inside else "watched",
            "over the limit": bool(watch.exceeded_at) or group.kills > 0,
            "log": node.log_text.splitlines()[-20:],
            "same node": node.running and before is not None and (after is None or after == before),
        }
        _stop(node)
    found["missed"] = missed(found)
    return found


def _attackers(attack: str, address: str, sources: str, mode: Mode, args: Any) -> Attackers:
    return Attackers(attack, address, SOURCES[sources], mode.tls, args.attackers)


def _stop(node: Any) -> None:
    """Stop a node that may not end by itself."""
    with contextlib.suppress(Exception):
        node.stop(20.0)


def missed(found: dict[str, Any]) -> list[str]:
    """Return the aims that were missed."""
    wrong = []
    if not found["same node"]:
        wrong.append("node restarted")
    if found["over the limit"]:
        wrong.append("memory limit")
    if found["node growth nbytes"] > GROWTH_AIM_NBYTES:
        wrong.append(f"node +{found['node growth nbytes'] >> 20} MiB")
    for wire in ("bulk", "shm"):
        if failed := found["failed"][wire] + found["failed later"][wire]:
            wrong.append(f"{wire}: {failed} failed")
        for op in OPS:
            name = f"{wire} {op}"
            p99 = found["attacked"][name]["p99 ms"]
            base = max(found[phase][name]["p99 ms"] or 0.0 for phase in ("quiet", "control"))
            if p99 is None or p99 > P99_AIM * base:
                wrong.append(f"{name} p99 {p99} ms > {P99_AIM:g} × {base}")
    if found["again s"] is None or found["again s"] > AGAIN_AIM_S:
        wrong.append(f"gRPC again after {found['again s']} s")
    if found["mode"] == "mtls" and found["failed"]["grpc"]:
        wrong.append(f"gRPC: {found['failed']['grpc']} failed")
    return wrong


# ---- the table -----------------------------------------------------------------------------

COLUMNS = (
    "node MiB, quiet → highest",
    "gateways MiB",
    "ends",
    *(f"{wire} {op} ms" for wire in WIRES for op in OPS),
)
COLUMNS += ("failed b/s/g", "again s", "aims")


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the table."""
    row: dict[str, Any] = {name: found[name] for name in ("mode", "attack", "from")}
    if "limit" not in found:  # not measured
        return row | dict.fromkeys(COLUMNS) | {"aims": "; ".join(found["missed"])}
    row["node MiB, quiet → highest"] = f"{found['node quiet MiB']} → {found['node highest MiB']}"
    row["gateways MiB"] = f"{found['gateways quiet MiB']} → {found['gateways highest MiB']}"
    row["ends"] = found["gateway ends"]
    for name in (f"{wire} {op}" for wire in WIRES for op in OPS):
        values = [found[phase][name] for phase in ("quiet", "control", "attacked")]
        row[f"{name} ms"] = " · ".join(f"{_ms(v['p50 ms'])}/{_ms(v['p99 ms'])}" for v in values)
    row["failed b/s/g"] = "/".join(str(found["failed"][wire]) for wire in WIRES)
    row["again s"] = found["again s"]
    row["aims"] = "met" if not found["missed"] else "missed: " + "; ".join(found["missed"])
    return row


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def cases(args: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the cases to run."""
    for mode in args.modes.split(","):
        for attack in args.attacks.split(","):
            if mode == "open" and not ATTACKS[attack].tls:
                continue  # a case about TLS
            for sources in args.sources.split(","):
                yield mode, attack, sources


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = parser(__doc__)
    options.add_argument("--modes", default=",".join(MODES), help="(%(default)s)")
    options.add_argument("--attacks", default=",".join(ATTACKS), help="(%(default)s)")
    options.add_argument(
        "--sources", default=",".join(SOURCES), help="strangers' addresses (%(default)s)"
    )
    options.add_argument("--seconds", type=float, default=60.0, help="of each attack (%(default)s)")
    options.add_argument(
        "--quiet-seconds", type=float, default=10.0, help="of quiet and of control (%(default)s)"
    )
    options.add_argument(
        "--attackers", type=int, default=1, help="processes that attack (%(default)s)"
    )
    options.add_argument("--node-flags", default="", help="more flags of the node, in one argument")
    args = options.parse_args(argv)
    report = Report(
        f"Floods of {args.seconds:g} s", " ".join(["python benchmarks/floods.py", *argv])
    )
    all_cases = list(cases(args))
    whole = []
    with tempfile.TemporaryDirectory() as folder, progress(len(all_cases)) as tick:
        modes: dict[str, Mode] = {}
        for mode, attack, sources in all_cases:
            if mode not in modes:
                (Path(folder) / mode).mkdir()
                modes[mode] = mode_of(mode, Path(folder) / mode)
            try:
                whole.append(case(modes[mode], attack, sources, args))
            except (
                KVStoreError,
                RuntimeError,
                OSError,
            ) as error:  # the other cases are still worth running
                why = f"not measured: {type(error).__name__}: {error}"
                whole.append({"mode": mode, "attack": attack, "from": sources, "missed": [why]})
            print(
                f"{mode} {attack} {sources}: {whole[-1]['missed'] or 'met'}",
                file=sys.stderr,
                flush=True,
            )
            tick()
    report.rows = whole if args.json else list(map(shown, whole))
    report.notes.append(
        f"memory limit {LIMIT_NBYTES >> 20} MiB: {whole[0]['limit']}; private memory, without the "
        "arena"
    )
    report.notes.append(
        "ms: p50/p99 of the calls that succeeded, quiet · control · attack; failed over "
        "bulk/shm/gRPC"
    )
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
