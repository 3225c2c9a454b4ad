"""What is in force while a node runs: tokens revoked, expired and changed under it."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from people import PAGE_NBYTES, People, client, namespace, taken_up
from waiting import wait_until

from kvstore import (
    Client,
    ClientConfig,
    ConfigError,
    Forbidden,
    PutOutcome,
    Unauthenticated,
    Unavailable,
)
from kvstore.deadline import Deadline
from kvstore.identities import Role, new_token, token_hash, token_line
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.shm import ShmWire
from node.auth.access import Access
from node.config import NodeConfig
from node.server import Node

KEY = b"k" * 32
PAGE = bytes(range(256)) * (PAGE_NBYTES // 256)


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "identities"
    path.write_text(token_line("ci", TOKEN, tenant="team-a", role="read") + "\n")
    return Access(str(path))


TOKEN = new_token("team-a")


def test_a_file_that_gets_wrong_changes_nothing(
    access: Access, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "identities"
    path.chmod(0o666)
    for _ in range(3):
        access.poll()
    assert access.of_token(TOKEN).name == "ci"
    assert [record.getMessage() for record in caplog.records] == [
        f"identities={path} is open to others (mode 0666); chmod o-w {path}, or, of a "
        "Kubernetes secret, defaultMode: 0400; the previous identities stay in force"
    ]
    path.chmod(0o600)
    path.unlink()
    access.poll()
    assert access.of_token(TOKEN).name == "ci"
    path.write_text("nonsense\n" + token_line("new", TOKEN, tenant="team-b", role="read") + "\n")
    access.poll()
    assert (access.of_token(TOKEN).name, access.of_token(TOKEN).tenant) == ("new", "team-b")
    assert "line 1: begin it with token" in caplog.text


def test_a_change_that_keeps_size_and_time_is_taken(access: Access, tmp_path: Path) -> None:
    """As `rsync --inplace --times` and `cp -p` write it."""
    path = tmp_path / "identities"
    before = path.stat()
    with path.open("r+") as file:
        file.write(token_line("ci", TOKEN, tenant="team-b", role="read") + "\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    soon_changed(path, before)
    access.poll()
    assert access.of_token(TOKEN).tenant == "team-b"


def test_a_file_that_is_being_written_keeps_nobody_out(access: Access, tmp_path: Path) -> None:
    """As editors and `scp` write it, in its place."""
    path = tmp_path / "identities"
    whole = path.read_text()
    line = (
        token_line("narrow", new_token("team-a"), tenant="team-a", role="read", models="qwen-*")
        + "\n"
    )
    for text in ("", whole[:40], whole + line[: -len(" models=qwen-*\n")]):
        path.write_text(text)
        access.poll()
        assert access.of_token(TOKEN).name == "ci"
        assert len(access.identities.tokens) == 1, "half a line may say more than all of it"
    path.write_text(whole + line)
    access.poll()
    assert len(access.identities.tokens) == 2
    path.write_text(line.rstrip())
    access.poll()
    access.poll()
    assert [who.name for who in access.identities.tokens.values()] == ["narrow"], (
        "it is as long as it will be"
    )


def soon_changed(path: Path, before: os.stat_result) -> None:
    """The file system's clock has a grain."""

    def later() -> bool:
        path.chmod(before.st_mode & 0o777)
        return path.stat().st_ctime_ns > before.st_ctime_ns

    wait_until(later)


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to itself"])
def test_identities_file_not_regular_blocks_no_request(
    access: Access, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "identities"
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    looking = threading.Thread(target=access.poll, daemon=True)
    looking.start()
    looking.join(30.0)
    assert not looking.is_alive()
    assert "the previous identities stay in force" in caplog.text
    assert access.of_token(TOKEN).name == "ci"


def test_a_tenant_is_a_peer_where_there_are_several_or_it_has_a_quota(
    access: Access, tmp_path: Path
) -> None:
    """One that has the node alone is not held to half of it."""
    path = tmp_path / "identities"
    alone = path.read_text()
    operator = token_line("op", new_token("*"), tenant="*", role="admin") + "\n"
    for more, share in (
        (operator, ""),
        ("tenant team-a pins=1\n", "tenant team-a"),
        (
            token_line("b", new_token("team-b"), tenant="team-b", role="read") + "\n",
            "tenant team-a",
        ),
    ):
        path.write_text(alone + more)
        access.poll()
        assert access.share(access.of_token(TOKEN)) == share


@pytest.mark.parametrize(("mode", "said"), [(0o666, "chmod o-w"), (None, "can not be read")])
def test_a_node_does_not_start_with_such_a_file(
    tmp_path: Path, mode: int | None, said: str
) -> None:
    path = tmp_path / "identities"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        Access(str(path))


def test_a_token_ends_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "identities"
    path.write_text(
        token_line("ci", TOKEN, tenant="team-a", role="read", expires="2031-01-01T00:00:00Z") + "\n"
    )
    access = Access(str(path))
    known = access.credential(TOKEN, ())
    assert known().name == "ci"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 2e9)
        with pytest.raises(Unauthenticated, match="the token of ci has expired"):
            known()
        with pytest.raises(Unauthenticated, match="has expired"):
            access.of_token(TOKEN)
    assert known().name == "ci", "the clock was wrong"


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_a_token_that_is_revoked_ends_what_was_opened_with_it(
    node: Node, people: People, wire: str
) -> None:
    token = people.join(f"leaver-{wire}", "team-a", "write")
    taken_up(node, lambda: token_hash(token) in node.access.identities.tokens)
    with client(node, token, wire=wire) as leaver:
        assert leaver.put(namespace(salt=wire), [KEY], [PAGE]) == [PutOutcome.STORED]
        people.leave(f"leaver-{wire}")
        taken_up(node, lambda: token_hash(token) not in node.access.identities.tokens)
        with pytest.raises((Unauthenticated, Unavailable), match="does not know this token"):
            leaver.lookup(namespace(salt=wire), [KEY])


@pytest.mark.parametrize("wire", ["bulk", "shm"])
def test_a_connection_is_of_one_tenant(node: Node, people: People, wire: str) -> None:
    """It counts to its tenant, and over shared memory maps what that tenant is trusted with."""
    token = people.join(f"mover-{wire}", "team-a", "write")
    taken_up(node, lambda: token_hash(token) in node.access.identities.tokens)
    config = ClientConfig(token=token, connect_timeout_s=5.0)
    assert node.shm is not None
    connection: Any = (
        ShmWire(node.shm.path, node.service.instance_id, config)
        if wire == "shm"
        else BulkWire("127.0.0.1", node.bulk.port, config)
    )
    connection.call("list_namespaces", pb.ListNamespacesRequest(), Deadline(20.0))
    people.change(f"mover-{wire}", "team-b", "write")
    taken_up(node, lambda: node.access.of_token(token).tenant == "team-b")
    with pytest.raises(Unauthenticated, match="connect again"):
        connection.call("list_namespaces", pb.ListNamespacesRequest(), Deadline(20.0))
    connection.close()


def test_shm_client_without_trust_any_more_uses_tcp(node: Node, people: People) -> None:
    token = people.join("lowered", "team-a", "write")
    taken_up(node, lambda: token_hash(token) in node.access.identities.tokens)
    with client(node, token) as lowered:
        lowered.put(namespace(salt="lowered"), [KEY], [PAGE])
        assert lowered.wire_name == "shm"
        people.change("lowered", "team-a", "read")
        taken_up(node, lambda: node.access.of_token(token).role is Role.READ)
        into = bytearray(PAGE_NBYTES)
        assert lowered.get(namespace(salt="lowered"), [KEY], [into]) == [True]
        assert lowered.wire_name == "bulk"


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_a_token_is_changed_under_load_and_no_call_fails(
    node: Node, people: People, tmp_path: Path, wire: str
) -> None:
    """The new one is added, clients are given it, the old one goes."""
    file = tmp_path / "token"
    file.write_text(people.join(f"old-{wire}", "team-a", "write"))
    file.chmod(0o600)
    taken_up(node, lambda: token_hash(file.read_text()) in node.access.identities.tokens)
    config = ClientConfig(
        f"127.0.0.1:{node.grpc.port}", wire=wire, token_file=str(file), timeout_s=20.0
    )
    with Client(config) as moving:
        space = namespace(salt=f"rotated {wire}")
        moving.put(space, [KEY], [PAGE])
        old = file.read_text()
        file.write_text(people.join(f"new-{wire}", "team-a", "write"))
        taken_up(node, lambda: token_hash(file.read_text()) in node.access.identities.tokens)
        people.leave(f"old-{wire}")
        taken_up(node, lambda: token_hash(old) not in node.access.identities.tokens)
        for _ in range(3):
            into = bytearray(PAGE_NBYTES)
            assert moving.get(space, [KEY], [into]) == [True]
            assert into == PAGE
        assert moving.wire_name == wire


def test_refused_client_does_not_connect_for_each_call(node: Node) -> None:
    with client(node, "team-a." + "y" * 43) as stranger:
        with pytest.raises(Unauthenticated):
            stranger.lookup(namespace(), [KEY])
        said = []
        for _ in range(20):
            with pytest.raises(
                (Unauthenticated, Unavailable), match="does not know this token"
            ) as caught:
                stranger.lookup(namespace(), [KEY])
            said.append(caught.type)
        assert Unavailable in said, "it pauses"


def test_another_tenants_namespace_is_not_opened_and_the_remedy_is_told(
    node: Node, people: People
) -> None:
    with client(node, people.tokens["other"]) as other:
        with pytest.raises(Forbidden, match="set KVSTORE_TENANT=team-b"):
            other.lookup(namespace("team-a"), [KEY])
        assert other.lookup(namespace("team-b"), [KEY]).prefix_pages == 0, (
            "its own are there all the same"
        )


def test_the_file_has_no_token_and_the_log_neither(
    node: Node, people: People, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), client(node, people.tokens["read"]) as reader:
        with pytest.raises(Forbidden):
            reader.remove(namespace(), [KEY])
        with client(node, people.tokens["wrong"]) as wrong, pytest.raises(Unauthenticated):
            wrong.lookup(namespace(), [KEY])
    said = caplog.text + people.path.read_text() + repr(reader.config)
    assert "forbidden" in said.lower() or "refused" in said
    assert not [name for name, token in people.tokens.items() if token and token in said]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "node7"])
def test_a_node_that_others_reach_asks_who_they_are(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure if anyone on the network may do everything"):
        NodeConfig(host=host)
    with pytest.raises(ConfigError, match="--insecure if anyone on the network may do everything"):
        NodeConfig(host=host, identities="x")
    assert "may read, change and remove all" in NodeConfig(host=host, insecure=True).insecurity
    assert "unencrypted" in NodeConfig(host=host, identities="x", insecure=True).insecurity
    assert not NodeConfig(host=host, identities="x", tls_cert="c", tls_key="k").insecurity


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_node_for_its_own_host_need_not(host: str) -> None:
    assert not NodeConfig(host=host).insecurity


def test_an_interface_of_grpc_alone_that_others_reach_counts_as_well() -> None:
    """A node on loopback with --grpc-host 0.0.0.0 and without identities let everybody do
    everything, unasked.
    """
    with pytest.raises(ConfigError, match=r"grpc_host=0\.0\.0\.0, lets others reach this node"):
        NodeConfig(grpc_host="0.0.0.0")
    with pytest.raises(ConfigError, match="--insecure if anyone on the network may do everything"):
        NodeConfig(grpc_host="10.0.0.5", identities="x")
    assert (
        "who reaches 10.0.0.5 may read"
        in NodeConfig(grpc_host="10.0.0.5", insecure=True).insecurity
    )
    assert (
        "reaches ::2 and 10.0.0.5"
        in NodeConfig(host="::2", grpc_host="10.0.0.5", insecure=True).insecurity
    )
    assert not NodeConfig(
        grpc_host="10.0.0.5", identities="x", tls_cert="c", tls_key="k"
    ).insecurity
    assert not NodeConfig(grpc_host="none").insecurity
    assert not NodeConfig(grpc_host="127.0.0.2").insecurity


def test_trust_is_of_tenants() -> None:
    with pytest.raises(ConfigError, match="which only a node with identities has"):
        NodeConfig(shm_trust="team-a")
    for wrong in ("*", "team-a;team-b", "team-a,team b"):
        with pytest.raises(ConfigError, match="must be tenants' names"):
            NodeConfig(shm_trust=wrong, identities="x")
    assert NodeConfig(shm_trust="team-a, team-b", identities="x").trusted == ("team-a", "team-b")
