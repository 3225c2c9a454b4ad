"""Tokens that expire, are revoked or change while a node runs."""

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
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import Role, new_token, token_hash, token_line
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


def test_invalid_identities_file_changes_nothing(
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


def test_change_with_equal_size_and_time_is_noticed(access: Access, tmp_path: Path) -> None:
    """A change with equal size and time is noticed, as of `rsync --inplace --times` or `cp -p`."""
    path = tmp_path / "identities"
    before = path.stat()
    with path.open("r+") as file:
        file.write(token_line("ci", TOKEN, tenant="team-b", role="read") + "\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    soon_changed(path, before)
    access.poll()
    assert access.of_token(TOKEN).tenant == "team-b"


def test_incomplete_identities_file_is_not_used(access: Access, tmp_path: Path) -> None:
    """A file that an editor or `scp` is writing in place is not read before it is complete."""
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
        assert len(access.identities.tokens) == 1, "a cut line, which may grant more, was read"
    path.write_text(whole + line)
    access.poll()
    assert len(access.identities.tokens) == 2
    path.write_text(line.rstrip())
    access.poll()
    access.poll()
    assert [who.name for who in access.identities.tokens.values()] == ["narrow"], (
        "a file of constant size, without a last newline, was not read"
    )


def soon_changed(path: Path, before: os.stat_result) -> None:
    """Touch the file until its change time differs, as the file system's clock is coarse."""

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


def test_tenant_has_a_share_beside_other_tenants_or_with_a_quota(
    access: Access, tmp_path: Path
) -> None:
    """A tenant that is alone on a node is not limited to a share of it."""
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


@pytest.mark.parametrize(("mode", "message"), [(0o666, "chmod o-w"), (None, "can not be read")])
def test_writable_or_missing_identities_file_is_refused_at_start(
    tmp_path: Path, mode: int | None, message: str
) -> None:
    path = tmp_path / "identities"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        Access(str(path))


def test_token_is_refused_after_its_expiry(tmp_path: Path) -> None:
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
    assert known().name == "ci", "the token stays refused after the clock was set back"


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_revoked_token_ends_open_connections(node: Node, people: People, wire: str) -> None:
    token = people.join(f"leaver-{wire}", "team-a", "write")
    taken_up(node, lambda: token_hash(token) in node.access.identities.tokens)
    with client(node, token, wire=wire) as leaver:
        assert leaver.put(namespace(salt=wire), [KEY], [PAGE]) == [PutOutcome.STORED]
        people.leave(f"leaver-{wire}")
        taken_up(node, lambda: token_hash(token) not in node.access.identities.tokens)
        with pytest.raises((Unauthenticated, Unavailable), match="does not know this token"):
            leaver.lookup(namespace(salt=wire), [KEY])


@pytest.mark.parametrize("wire", ["bulk", "shm"])
def test_connection_ends_when_its_token_changes_tenant(
    node: Node, people: People, wire: str
) -> None:
    """A connection ends when its token moves to another tenant.

    Its resources are counted for the old tenant, and over shared memory it maps the arena.
    """
    token = people.join(f"mover-{wire}", "team-a", "write")
    taken_up(node, lambda: token_hash(token) in node.access.identities.tokens)
    config = ClientConfig(token=token, timeout_s=60.0, connect_timeout_s=30.0)
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


def test_shm_client_that_lost_its_trust_uses_tcp(node: Node, people: People) -> None:
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
def test_token_rotation_fails_no_call(
    node: Node, people: People, tmp_path: Path, wire: str
) -> None:
    """A token is rotated without a failed call: add the new one, deploy it, revoke the old one."""
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
        errors = []
        for _ in range(20):
            with pytest.raises(
                (Unauthenticated, Unavailable), match="does not know this token"
            ) as caught:
                stranger.lookup(namespace(), [KEY])
            errors.append(caught.type)
        assert Unavailable in errors, "the client connects for each call"


def test_namespace_of_another_tenant_is_refused_with_a_remedy(node: Node, people: People) -> None:
    with client(node, people.tokens["other"]) as other:
        with pytest.raises(Forbidden, match=r"Namespace\(tenant='team-b'\)"):
            other.lookup(namespace("team-a"), [KEY])
        assert other.lookup(namespace("team-b"), [KEY]).prefix_pages == 0, (
            "the tenant's own namespace was refused"
        )


def test_token_is_in_neither_file_nor_log(
    node: Node, people: People, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), client(node, people.tokens["read"]) as reader:
        with pytest.raises(Forbidden):
            reader.remove(namespace(), [KEY])
        with client(node, people.tokens["wrong"]) as wrong, pytest.raises(Unauthenticated):
            wrong.lookup(namespace(), [KEY])
    text = caplog.text + people.path.read_text() + repr(reader.config)
    assert "forbidden" in text.lower() or "refused" in text
    assert not [name for name, token in people.tokens.items() if token and token in text]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "node7"])
def test_node_reachable_by_others_needs_authentication_and_tls(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure if anyone on the network may do everything"):
        NodeConfig(host=host)
    with pytest.raises(ConfigError, match="--insecure if anyone on the network may do everything"):
        NodeConfig(host=host, identities="x")
    assert "may read, change and remove all" in NodeConfig(host=host, insecure=True).insecurity
    assert "unencrypted" in NodeConfig(host=host, identities="x", insecure=True).insecurity
    assert not NodeConfig(host=host, identities="x", tls_cert="c", tls_key="k").insecurity


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_node_needs_no_authentication(host: str) -> None:
    assert not NodeConfig(host=host).insecurity


def test_reachable_grpc_host_needs_authentication_and_tls() -> None:
    """Regression: a loopback node with --grpc-host 0.0.0.0 started without identities."""
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


def test_shm_trust_names_tenants_of_a_node_with_identities() -> None:
    with pytest.raises(ConfigError, match="which only a node with identities has"):
        NodeConfig(shm_trust="team-a")
    for wrong in ("*", "team-a;team-b", "team-a,team b"):
        with pytest.raises(ConfigError, match="must be tenants' names"):
            NodeConfig(shm_trust=wrong, identities="x")
    assert NodeConfig(shm_trust="team-a, team-b", identities="x").trusted == ("team-a", "team-b")
