"""The JSON fields that each command prints, such as `ram.used_nbytes` or `namespaces[].digest`."""

import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import CliRunner

from kvstore import Client, Namespace, client_config, opaque_layout
from kvstore.cli.commands import build
from kvstore.cluster.view import Member, View
from kvstore.security.identities import ALL, add, new_token, token_line
from node.cluster.membership import LostMember
from node.config import NodeConfig
from node.server import Node

PAGE_NBYTES = 4096
KEY = "ab" * 32
TRACE = [{"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]}] * 2
SMALL: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "ram_nbytes": 32 << 20,
}
DISK: dict[str, Any] = {
    "disk_nbytes": 64 << 20,
    "disk_extent_nbytes": 16 << 20,
    "scrub_nbytes_per_s": 0,
}
Run = Callable[..., None]


def told(work: Path) -> dict[str, list[str]]:
    """Run each command against temporary nodes, and return its sorted fields."""
    found: dict[str, list[str]] = {}

    def run(command: str, *arguments: str, of: str = "", status: int | None = 0) -> None:
        name = f"{command} of {of}" if of else command
        ran = CliRunner().invoke(
            build(), [*command.split(), *arguments, "--json"], prog_name="kvstore"
        )
        assert status in (None, ran.exit_code), f"{name}: {ran.exit_code}, {ran.output}"
        values = [json.loads(line) for line in (ran.stdout or ran.stderr).splitlines()]
        found[name] = sorted(
            set(found.get(name, ())) | {path for value in values for path in fields(value)}
        )

    with _nodes(work) as nodes:
        _of_one(run, work)
        _of_a_cluster(run, nodes)
    _of_identities(run, work)
    _of_files(run, work)
    return found


def fields(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        yield f"{path}[]"
        for inner in value:
            yield from fields(inner, f"{path}[]")
    elif path:
        yield path


@contextlib.contextmanager
def _nodes(work: Path) -> Iterator[list[Node]]:
    """Start two nodes without a cluster; commands go to the first."""
    with contextlib.ExitStack() as ends, pytest.MonkeyPatch.context() as environment:
        nodes = [
            Node(NodeConfig(**SMALL, **DISK, data_dir=str(work / name))) for name in ("n0", "n1")
        ]
        for node in nodes:
            node.start()
            ends.callback(node.stop)
        environment.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{nodes[0].grpc.port}")
        environment.setenv("KVSTORE_CONNECT_TIMEOUT_S", "20")
        environment.setenv("KVSTORE_TIMEOUT_S", "60")
        yield nodes


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Look up a page repeatedly in a thread."""
    over = threading.Event()

    def ask() -> None:
        with Client(client_config(wire="bulk")) as client:
            while not over.wait(0.02):
                client.lookup(Namespace("m", opaque_layout(PAGE_NBYTES)), [bytes.fromhex(KEY)])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
            asking.result(60.0)


def _of_one(run: Run, work: Path) -> None:
    page, trace = work / "page", work / "trace.jsonl"
    page.write_bytes(bytes(PAGE_NBYTES))
    trace.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    run("put", str(page), KEY, "--create-opaque", "m", "--durable")
    for command in ("status", "ls", "flush", "scrub", "recover", "cluster events", "tenants list"):
        run(command)
    run("top", "--interval", "0.05", "--once")
    run("ls", "--model", "m")
    run("verify", "--model", "m", "--all")
    run("feed", "--snapshot")
    run("query", "--model", "m", KEY)
    for command in ("stat", "lookup", "pin", "unpin"):
        run(command, "--model", "m", KEY)
    run("get", "--model", "m", KEY, "--decode")
    run("get", "--model", "m", KEY, "--output", str(work / "back"))
    run("rm", "--model", "m", KEY)
    run("bench", "--seconds", "0.02", "--page-nbytes", "4KiB", "--batch", "2")
    run("replay", str(trace))
    run("plan", str(trace))
    run("doctor", "--timeout", "30", status=None)  # it may warn about a busy machine
    with _asking():
        run("record", "--seconds", "1", "--output", str(work / "recorded.jsonl"))
    run("stat", "--model", "nothing of this name", KEY, of="what is not there", status=1)
    run("put", str(page), KEY, "--create-opaque", "m")
    run("forget", "--tenant", "default", "--yes")
    run("put", str(page), KEY, "--create-opaque", "m")


def _of_a_cluster(run: Run, nodes: list[Node]) -> None:
    members = [
        Member(f"n{number}", f"127.0.0.1:{node.grpc.port}") for number, node in enumerate(nodes)
    ]

    def tell(number: int, *view: Member) -> None:
        for place, node in enumerate(nodes):
            node.membership.become(View("fleet", number, view), f"n{place}")

    tell(1, *members)
    nodes[1].membership.announcer = lambda state: tell(
        2, members[0], dataclasses.replace(members[1], state=state)
    )
    for command in ("status", "flush", "scrub", "recover", "ls"):
        run(command, of="a cluster")
    run("top", "--interval", "0.05", "--once", of="a cluster")
    run("verify", "--model", "m", "--all", of="a cluster")
    run("cluster")
    run("cluster events", of="a cluster")
    run("cluster owners", KEY)
    run("cluster rebalance", "--dry-run")
    run("forget", "--tenant", "default", "--yes", of="a cluster")
    run("cluster drain", "n1")
    for node in nodes:
        node.membership.lost = lambda: [LostMember("n9", "h9:7440", 1.0)]
        node.membership.forget_lost = lambda member: None
    run("cluster", of="a lost member", status=3)
    run("cluster forget-member", "n9")


def _of_identities(run: Run, work: Path) -> None:
    file, token = work / "people", new_token(ALL)
    add(file, token_line("operator", token, tenant=ALL, role="admin"))
    node = Node(NodeConfig(**SMALL, identities=str(file), identities_writable=True))
    with contextlib.ExitStack() as ends, pytest.MonkeyPatch.context() as environment:
        ends.callback(node.stop)
        node.start()
        environment.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{node.grpc.port}")
        environment.setenv("KVSTORE_TOKEN", token)
        run("identities push", str(file))


def _of_files(run: Run, work: Path) -> None:
    identities, certificates = str(work / "identities"), ("--dir", str(work / "certs"))
    run("tokens add", "engines", "--tenant", "t", "-f", identities)
    run("tenants quota", "t", "--ram", "1GiB", "-f", identities)
    run("tokens list", "-f", identities)
    run("tokens revoke", "engines", "-f", identities)
    run("certs ca", *certificates)
    run("certs node", "node1", *certificates)
    run("certs client", "team-a", *certificates)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CONFIG_HOME", str(work))
        run("context add", "prod", "-a", "n1:7440", "--token-file", "token")
        run("context use", "prod")
        run("context list")
        run("context show")
        run("context remove", "prod")
