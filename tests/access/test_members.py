"""A cluster with authentication: members and clients identify themselves by tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runner import CliRunner
from fake_etcd import FakeEtcd
from fleets import SMALL, Start, members, peers
from fleets import etcd as etcd
from fleets import fleet as fleet
from people import PAGE_NBYTES, People, namespace, taken_up
from waiting import wait_until

from kvstore import (
    Client,
    ClientConfig,
    ConfigError,
    Keep,
    PutOutcome,
    Unauthenticated,
    Unavailable,
)
from kvstore.cli.commands import build
from kvstore.results import ACK_ALL
from kvstore.security.identities import ALL, read
from node.config import NodeConfig
from node.server import Node

KEYS = [number.to_bytes(32, "big") for number in range(16)]
PAGES = [bytes([number]) * PAGE_NBYTES for number in range(16)]


@pytest.fixture
def crew(tmp_path: Path) -> People:
    people = People(tmp_path / "identities")
    people.join("member", ALL, "node")
    people.join("engine", "team-a", "write")
    people.join("other", "team-b", "write")
    people.join("operator", ALL, "admin")
    return people


def started(fleet: Start, crew: People, name: str, **settings: Any) -> Node:
    return fleet(
        name, identities=str(crew.path), token=crew.tokens["member"], replicas=2, **settings
    )


def client(node: Node, token: str) -> Client:
    config = ClientConfig(
        f"127.0.0.1:{node.grpc.port}", token=token, timeout_s=60.0, connect_timeout_s=30.0
    )
    return Client(config)


def test_reload_reports_credentials_that_can_not_be_read(
    fleet: Start, crew: People, etcd: FakeEtcd, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(crew.tokens["member"])
    node = fleet("n1", identities=str(crew.path), token_file=str(token))
    assert node.reload() == {"identities": "", "credentials for members": ""}
    token.unlink()
    found = node.reload()
    assert (found["identities"], "token_file=" in found["credentials for members"]) == ("", True)


def test_pages_are_replicated_between_members(fleet: Start, crew: People, etcd: FakeEtcd) -> None:
    one, two = started(fleet, crew, "n1"), started(fleet, crew, "n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    wait_until(lambda: all(node.membership.view.settled for node in (one, two)))  # type: ignore[union-attr]
    with client(one, crew.tokens["engine"]) as engine:
        assert engine.view() is not None
        outcomes = engine.put(namespace(), KEYS, PAGES, Keep(ack=ACK_ALL), timeout_s=20.0)
        assert outcomes == [PutOutcome.STORED] * len(KEYS)
        for node in (one, two):
            assert node.tier.lookup(namespace().digest, KEYS, touch=False) == [True] * len(KEYS)
        into = [bytearray(PAGE_NBYTES) for _ in KEYS]
        assert all(engine.get(namespace(), KEYS, into))
        assert [bytes(page) for page in into] == PAGES
    assert peers(one).pages_dropped == peers(two).pages_dropped == 0
    with client(two, crew.tokens["other"]) as other:
        assert other.lookup(namespace("team-b"), KEYS).prefix_pages == 0
        assert [space.tenant for space, _ in other.namespaces()] == ["team-b"]
    with client(two, crew.tokens["operator"]) as operator:
        operator.remove_namespace(namespace())
    wait_until(lambda: not any(node.tier.visible_count for node in (one, two)))


def test_token_file_of_a_member_can_be_changed(fleet: Start, crew: People, tmp_path: Path) -> None:
    file = tmp_path / "member.token"
    file.write_text(crew.tokens["member"] + "\n")
    file.chmod(0o600)
    settings = {"identities": str(crew.path), "token_file": str(file), "replicas": 2}
    one, two = fleet("n1", **settings), fleet("n2", **settings)
    wait_until(lambda: all(node.membership.view.settled for node in (one, two)))  # type: ignore[union-attr]
    with client(one, crew.tokens["engine"]) as engine:
        assert engine.put(namespace(), KEYS, PAGES, Keep(ack=ACK_ALL)) == [PutOutcome.STORED] * len(
            KEYS
        )
        file.write_text(crew.join("renewed", ALL, "node"))
        crew.leave("member")
        for node in (one, two):
            taken_up(node, lambda node=node: node.access.identities.tokens.keys() == known(crew))  # type: ignore[misc]
        space = namespace(salt="after")
        assert engine.put(space, KEYS, PAGES, Keep(ack=ACK_ALL)) == [PutOutcome.STORED] * len(KEYS)
    for node in (one, two):
        assert node.tier.lookup(space.digest, KEYS, touch=False) == [True] * len(KEYS)
    assert peers(one).pages_dropped == peers(two).pages_dropped == 0


def known(crew: People) -> set[bytes]:
    return set(read(crew.path).tokens)


@pytest.mark.parametrize(("mode", "message"), [(None, "can not be read"), (0o644, "chmod o-r")])
def test_unusable_token_file_fails_the_start(
    tmp_path: Path, mode: int | None, message: str
) -> None:
    file = tmp_path / "member.token"
    if mode is not None:
        file.write_text("secret-of-a-member")
        file.chmod(mode)
    with pytest.raises(ConfigError, match=message) as raised:
        Node(NodeConfig(**{**SMALL, "token_file": str(file)}))
    assert "secret-of-a-member" not in str(raised.value)
    with pytest.raises(ConfigError, match="token and token_file are both set"):
        NodeConfig(token="x", token_file=str(file))


def test_node_without_a_member_token_does_not_join(fleet: Start, crew: People) -> None:
    started(fleet, crew, "n1")
    with pytest.raises(ConfigError, match="does not reach itself"):
        fleet("n2", identities=str(crew.path), replicas=2)


@pytest.mark.parametrize(("who", "all_of_it"), [("engine", False), ("operator", True)])
def test_commands_leave_out_values_a_tenant_may_not_see(
    fleet: Start, crew: People, monkeypatch: pytest.MonkeyPatch, who: str, all_of_it: bool
) -> None:
    """The commands leave out values that a tenant may not see, rather than print zeros."""
    one, two = started(fleet, crew, "n1"), started(fleet, crew, "n2")
    wait_until(lambda: members(one) == members(two) == ["n1", "n2"])
    with client(one, crew.tokens["engine"]) as engine:
        engine.put(namespace(), KEYS, PAGES, Keep(ack=ACK_ALL), timeout_s=20.0)
    monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{one.grpc.port}")
    monkeypatch.setenv("KVSTORE_TOKEN", crew.tokens[who])
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "30")
    monkeypatch.setenv("KVSTORE_CONNECT_TIMEOUT_S", "20")
    monkeypatch.setattr("kvstore.cli.top.samples.LOOK_S", 30.0)

    def kvstore(*args: str) -> str:
        ran = CliRunner().invoke(build(), list(args), prog_name="kvstore")
        assert ran.exit_code == 0, ran.stderr
        return str(ran.stdout)

    for command in (("status",), ("cluster",), ("top", "--once", "-i", "0.05")):
        shown = kvstore(*command)
        assert (" pages queued" in shown, "from etcd" in shown, "of 32.0 MiB" in shown) == (
            all_of_it,
        ) * 3
        assert ("shown to identities of all tenants only" in shown) is not all_of_it
    for command in (("status",), ("cluster",)):
        shown = kvstore(*command)
        assert ("rebalanc" in shown, "copies of others' pages" in shown) == (all_of_it, all_of_it)
        shown_statuses = [
            member["status"] for member in json.loads(kvstore(*command, "--json"))["members"]
        ]
        assert all(
            (status["ram"] is None, status["pid"] is None) == (not all_of_it,) * 2
            for status in shown_statuses
        )
        assert all(status["totals"]["pages_put"] == len(KEYS) for status in shown_statuses)
    sample = json.loads(kvstore("top", "--once", "-i", "0.05", "--json"))
    assert all(
        (member["peers"] is None) is not all_of_it
        for member in sample["members"]
        if member["answers"]
    )
    monkeypatch.setenv("KVSTORE_DIRECT", "1")
    alone = kvstore("top", "--once", "-i", "0.05")
    assert ("sessions" in alone, bool(re.search("RAM .* of ", alone))) == (all_of_it, all_of_it)
    assert f"pages {len(KEYS)}" in alone
    assert (json.loads(kvstore("status", "--json"))["ram"] is None) is not all_of_it


def test_view_needs_an_identity(fleet: Start, crew: People) -> None:
    one = started(fleet, crew, "n1")
    with (
        client(one, "") as stranger,
        pytest.raises((Unauthenticated, Unavailable), match="this node requires authentication"),
    ):
        stranger.view()


def test_recover_by_a_tenant_is_refused_and_not_reported_as_needless(
    fleet: Start, crew: People, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: a tenant's status has no disk, and the command said that no disk was stopped."""
    node = started(fleet, crew, "n1", data_dir=str(tmp_path / "n1"), disk_nbytes=16 << 20)
    assert node.disk is not None
    node.disk.stop_after_error("broken by the test")
    monkeypatch.setenv("KVSTORE_ADDRESS", f"127.0.0.1:{node.grpc.port}")
    monkeypatch.setenv("KVSTORE_TOKEN", crew.tokens["engine"])
    ran = CliRunner().invoke(build(), ["recover"], prog_name="kvstore")
    assert ran.exit_code == 2
    assert "recover needs admin" in ran.stderr
    monkeypatch.setenv("KVSTORE_TOKEN", crew.tokens["operator"])
    ran = CliRunner().invoke(build(), ["recover"], prog_name="kvstore")
    assert (ran.exit_code, "in use again" in ran.stdout) == (0, True)
