"""Run `make demo-operate`: a day in the life of a cluster, in three minutes.

It starts etcd and three nodes with TLS and tokens, and clients that verify every byte. Then it does
what an operator does, with the commands that an operator types: a node is killed and missed, comes
back, has a full disk, gets a new certificate and new tokens, is restarted, drained and added again,
and a tenant gets a quota. After each step the clients must have had no error.

It needs etcd. With Prometheus it waits for the alerts; otherwise it reads the metrics behind them.
Exit status 0 only if each step showed what it should, and no call failed or returned a wrong byte.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import status_of
from measure import Console
from node_fleet import EtcdProcess
from operated_cluster import (
    HOST,
    MEMBERS,
    Alerts,
    Cluster,
    Load,
    Operator,
    StepFailed,
    in_private_mounts,
    private_mounts,
    small_disk,
    until,
)

from kvstore import KVStoreError

DISK_NBYTES = 384 << 20
QUOTA_NBYTES = 2 << 20
CALM_S = 2.0
# What a step may raise; the report shows it, and the demo ends.
FAULTS = (StepFailed, KVStoreError, OSError, subprocess.SubprocessError, AssertionError)


@dataclass
class Step:
    """A finished step: what was seen, and how long it took."""

    name: str
    seen: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failed: str = ""


@dataclass
class Day:
    """Values that the steps share."""

    operator: Operator
    cluster: Cluster
    pictures: Path | None
    disk_is_small: bool
    alerts: Alerts | None = None
    load: Load | None = None

    def close(self) -> None:
        """End the clients and Prometheus."""
        if self.load:
            self.load.kill()
        if self.alerts:
            self.alerts.close()

    def members(self, *, expect: int | None = 0) -> Any:
        """Return the output of `kvstore cluster --json`."""
        return self.operator.type("kvstore cluster --json", expect=expect).as_json()

    def status(self, member: str) -> Any:
        """Return the output of `kvstore status --json` of one member."""
        port = self.cluster.ports[member][0]
        return self.operator.type(
            f"kvstore status --json --address {HOST}:{port}", KVSTORE_DIRECT="1"
        ).as_json()


# ---- the steps -------------------------------------------------------------------------------


def make_secrets(day: Day) -> list[str]:
    """Make an authority, a certificate for each node, and tokens."""
    type_ = day.operator.type
    type_("kvstore certs ca")
    for member in MEMBERS:
        type_(f"kvstore certs node {HOST} localhost --file {member}")
    for name, tenant, role in (
        ("member", "*", "node"),
        ("engine", "team-a", "write"),
        ("operator", "*", "admin"),
        ("prometheus", "*", "read"),
    ):
        add_token(day, name, tenant, role)
    return [f"certificates for {len(MEMBERS)} nodes, 4 tokens"]


def add_token(day: Day, name: str, tenant: str, role: str) -> None:
    """Add an identity, and write its token to a private file."""
    done = day.operator.type(
        f"kvstore tokens add {name} --tenant {tenant} --role {role} -f identities"
    )
    file = day.operator.folder / f"{name}.token"
    file.touch(mode=0o600)
    file.write_text(done.output)


def start_nodes(day: Day) -> list[str]:
    """Start the members, and look at the cluster."""
    for member in MEMBERS:
        day.cluster.start(member)
    day.operator.export(
        KVSTORE_ADDRESS=day.cluster.addresses,
        KVSTORE_TLS_CA="certs/ca.pem",
        KVSTORE_TOKEN_FILE="operator.token",
    )
    settle(day)
    if program := shutil.which("prometheus"):
        day.alerts = Alerts(day.cluster, program)
    return ["kvstore cluster: 3 members serve, exit status 0"]


def settle(day: Day, members: int = len(MEMBERS)) -> None:
    """Wait until so many members are there, none is lost, and none rebalances."""

    def settled() -> bool:
        done = day.operator.type("kvstore cluster --json", expect=None)
        if done.status:
            return False
        statuses = [member["status"] for member in done.as_json()["members"]]
        return len(statuses) == members and not any(one["peers"]["sweeping"] for one in statuses)

    until("all members serve, and none rebalances", settled)


def start_clients(day: Day) -> list[str]:
    """Start the clients, and wait for hits."""
    day.load = load = Load(day.operator, "engine.token")
    until("the clients hit", lambda: load.sums.get("pages_hit", 0) > 100)
    return ["chats of team-a load, verify and store pages until the end"]


def kill_node(day: Day) -> list[str]:
    """Kill a member, and see it missed in all places."""
    node = day.cluster.nodes["n2"]
    day.operator.note(f"kill -9 {node.pid}")
    node.kill()

    def lost() -> bool:
        done = day.operator.type("kvstore cluster --json", expect=None)
        return done.status == 3 and [one["id"] for one in done.as_json()["lost"]] == ["n2"]

    until("kvstore cluster says that n2 is lost", lost)
    events = day.operator.type("kvstore cluster events --json --since 1h").as_json()["events"]
    if ("lost", "n2") not in {(event["kind"], event["member"]) for event in events}:
        raise StepFailed("kvstore cluster events does not say that n2 is lost")
    return [
        "kvstore cluster: n2 is LOST, exit status 3; kvstore cluster events has it",
        see_metric(day, "kvstore_peers_lost", 1.0),
        see_console(day),
        see_alert(day, "KVStoreMemberLost"),
    ]


def see_metric(day: Day, name: str, value: float) -> str:
    """Wait until a metric of n1 has this value in one of its series."""
    until(f"{name} is {value:g}", lambda: value in day.cluster.metrics("n1", name).values())
    return f"metrics: {name} {value:g}"


def see_console(day: Day) -> str:
    """Wait until the console names the lost member, and take a picture if that was asked for."""

    def named() -> str:
        findings = day.cluster.console("n1")["findings"]
        return next((text for text in map(json.dumps, findings) if "n2" in text), "")

    until("the console says that n2 is lost", named)
    return f"console: its findings name n2{take_picture(day)}"


def take_picture(day: Day) -> str:
    """Take a picture of n1's console, where a folder was given; return its path."""
    if day.pictures is None:
        return ""
    path = day.pictures / "console-lost-member.png"
    day.pictures.mkdir(parents=True, exist_ok=True)
    taken = day.cluster.take_picture("n1", path)
    return f"; picture: {path}" if taken else "; no picture: Chromium is not installed"


def see_alert(day: Day, name: str) -> str:
    """Wait until Prometheus fires an alert."""
    alerts = day.alerts
    if alerts is None:
        return f"alert: {name} not seen, Prometheus is not installed"
    until(f"alert {name}", lambda: name in alerts.firing())
    return f"alert: {name} fires"


def start_node(day: Day) -> list[str]:
    """Start the lost member again, and wait until it serves and has its pages."""
    day.cluster.start("n2")
    settle(day)
    see_metric(day, "kvstore_peers_lost", 0.0)
    return ["kvstore cluster: 3 members serve, none is lost, exit status 0"]


def fill_disk(day: Day) -> list[str]:
    """Fill the file system of n3 with another file, see the node go on, and remove the file."""
    if not day.disk_is_small:
        return ["left out: the system allows no private mount (run it as root)"]
    usable_nbytes = day.status("n3")["disk"]["usable_nbytes"]
    ballast = day.operator.folder / "data" / "n3" / "ballast"
    day.operator.note("dd if=/dev/zero of=data/n3/ballast")
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))

    def disk() -> dict[str, Any]:
        found: dict[str, Any] = day.status("n3")["disk"]
        if found["state"] != "SERVING":
            raise StepFailed(f"the disk of n3 is {found['state']}: {found['reason']}")
        return found

    full = until("n3 uses less", lambda: (now := disk())["usable_nbytes"] < usable_nbytes and now)
    ballast.unlink()
    day.operator.note("rm data/n3/ballast")
    day.operator.type("kvstore recover")
    until("n3 uses more again", lambda: disk()["usable_nbytes"] > full["usable_nbytes"])
    day.operator.type("kvstore flush")
    return [
        f"kvstore status: DISK LIMITED: {full['limit']}",
        "kvstore recover: n3 uses the free space again; kvstore flush: exit status 0",
    ]


def rotate_certificate(day: Day) -> list[str]:
    """Give n1 a new certificate while it runs."""
    name, pid = "kvstore_certificate_expiry_seconds", day.cluster.nodes["n1"].pid

    def expiry() -> float:
        return min(day.cluster.metrics("n1", name).values())

    before = expiry()
    day.operator.type(f"kvstore certs node {HOST} localhost --file n1 --days 90 --force")
    until("n1 serves its new certificate", lambda: expiry() < before)
    assert day.cluster.nodes["n1"].running
    return [f"n1 (process {pid}) serves the new certificate, without a restart"]


def hang_up(day: Day) -> list[str]:
    """Revoke a token, and send SIGHUP."""
    add_token(day, "guest", "team-a", "read")
    day.operator.type("kvstore tokens revoke guest -f identities")
    for node in day.cluster.nodes.values():
        day.operator.note(f"kill -HUP {node.pid}")
        os.kill(node.pid, signal.SIGHUP)
    nodes = day.cluster.nodes.values()
    until("each node reloaded", lambda: all("SIGHUP: reloaded" in one.log_text for one in nodes))
    done = day.operator.type("kvstore status", expect=None, KVSTORE_TOKEN_FILE="guest.token")
    if "does not know this token" not in done.errors:
        raise StepFailed(f"a revoked token: exit status {done.status}: {done.errors}")
    settle(day)
    return ["all nodes reload, serve on, and refuse the revoked token"]


def restart_all(day: Day) -> list[str]:
    """Restart one member after the other, as for a new version."""
    for member in MEMBERS:
        day.cluster.stop(member)
        day.cluster.start(member)
        settle(day)
    return ["each node stopped with status 0, and came back with its pages"]


def drain_node(day: Day) -> list[str]:
    """Drain a member, stop it, and add it again."""
    done = day.operator.type("kvstore cluster drain n3")
    day.cluster.stop("n3")
    settle(day, len(MEMBERS) - 1)
    day.operator.type("kvstore cluster", expect=0)
    day.cluster.start("n3")
    settle(day)
    last = done.output.strip().splitlines()[-1]
    return [f"kvstore cluster drain: {last}", "kvstore cluster: 2 members, none lost; then 3"]


def add_tenant(day: Day) -> list[str]:
    """Add a tenant with a quota, and let it store more than that."""
    add_token(day, "newcomer", "team-b", "write")
    quota = f"{QUOTA_NBYTES >> 20}MiB"
    day.operator.type(f"kvstore tenants quota team-b --ram {quota} --disk {quota} -f identities")
    time.sleep(CALM_S)
    load = Load(day.operator, "newcomer.token", "--requests", "80", "--pause-s", "0")
    sums = load.wait()
    stored_nbytes = (sums["pages_asked"] - sums["pages_hit"]) * (16 << 10)
    if sums["errors"] or sums["pages_wrong"]:
        raise StepFailed(f"the client of team-b: {sums}")
    used = {
        member: tenant["ram_nbytes"]
        for member in MEMBERS
        for tenant in day.status(member)["tenants"]
        if tenant["tenant"] == "team-b"
    }
    day.operator.type("kvstore tenants list")
    if max(used.values()) > QUOTA_NBYTES:
        raise StepFailed(f"team-b uses {used} bytes, above its quota of {QUOTA_NBYTES}")
    return [
        f"team-b stored {stored_nbytes >> 20} MiB; it keeps at most "
        f"{max(used.values()) / (1 << 20):.1f} MiB of 2 MiB at a node"
    ]


STEPS: tuple[tuple[str, Callable[[Day], list[str]]], ...] = (
    ("make certificates and tokens", make_secrets),
    ("start three nodes", start_nodes),
    ("start clients", start_clients),
    ("kill -9 a node", kill_node),
    ("start it again", start_node),
    ("fill a disk", fill_disk),
    ("rotate a certificate", rotate_certificate),
    ("send SIGHUP", hang_up),
    ("restart one node after the other", restart_all),
    ("drain a node, and add it again", drain_node),
    ("add a tenant with a quota", add_tenant),
)


# ---- the run ---------------------------------------------------------------------------------


def run_steps(day: Day, progress: Callable[[str], None]) -> Iterator[Step]:
    """Run the steps in order, and yield each; the first that fails is the last."""
    for name, act in STEPS:
        progress(name)
        step, start = Step(name), time.monotonic()
        try:
            step.seen = act(day)
            if day.load:
                check_load(day.load)
        except FAULTS as error:
            step.failed = f"{type(error).__name__}: {error}"
        step.seconds = time.monotonic() - start
        yield step
        if step.failed:
            return


def check_load(load: Load) -> None:
    """Raise StepFailed if a call of the clients failed or a byte was wrong."""
    sums = load.sums
    if sums.get("errors") or sums.get("pages_wrong"):
        raise StepFailed(
            f"the clients had {sums['errors']} errors and {sums['pages_wrong']} wrong pages: "
            f"{sums['last_error']}"
        )


@contextlib.contextmanager
def shown() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield two functions: to show the running step, and a command; both only on a terminal."""
    if Console is None or not sys.stderr.isatty():
        yield lambda _: None, lambda _: None
        return
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def progress(name: str) -> None:
            console.print(name, style="bold")
            status.update(name)

        yield progress, lambda words: console.print(f"  $ {words}", style="dim", markup=False)


def table(steps: list[Step], load: dict[str, Any]) -> None:
    """Print the steps, and the sums of the clients."""
    for number, step in enumerate(steps, 1):
        print(f"{number:3}  {step.name:44} {step.seconds:6.1f} s")
        for line in step.seen:
            print(f"       {line}")
        if step.failed:
            print(f"       FAILED: {step.failed}")
    if load:
        rate = load["pages_hit"] / max(1, load["pages_asked"])
        print(
            f"\n     clients: {load['requests']:,} requests, {rate:.0%} of {load['pages_asked']:,} "
            f"pages hit, slowest call {load['late_s']:.2f} s\n"
            f"     errors {load['errors']}, wrong pages {load['pages_wrong']}"
        )


def demo(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    private, steps = private_mounts(), []
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        del os.environ[name]  # the settings of this user are not those of the demo
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        progress, show = stack.enter_context(shown())
        operator = Operator(folder, show)
        cluster = Cluster(operator, EtcdProcess(program=args.etcd))
        small = private and stack.enter_context(small_disk(folder / "data" / "n3", DISK_NBYTES))
        stack.callback(cluster.close)
        day = Day(operator, cluster, args.pictures, small)
        stack.callback(day.close)
        for step in run_steps(day, progress):
            steps.append(step)
        load = day.load.stop() if day.load else {}
    good = not any(step.failed for step in steps) and not load["errors"] + load["pages_wrong"]
    if args.json:
        found = {
            "good": good,
            "seconds": round(time.monotonic() - start, 1),
            "steps": [vars(step) for step in steps],
            "load": load,
            "commands": [command.words for command in operator.commands],
        }
        print(json.dumps(found))
    else:
        table(steps, load)
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--etcd", default="etcd", help="the program (%(default)s)")
    found.add_argument(
        "--pictures", type=Path, help="folder for a picture of the console; needs Chromium"
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def main(argv: list[str]) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    in_private_mounts()
    return status_of(lambda: demo(args), "demo-operate")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
