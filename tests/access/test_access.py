"""What is in force while a node runs: tokens revoked, expired and changed under it."""

import io
import json
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
    UnknownNamespace,
)
from kvstore.deadline import Deadline
from kvstore.identities import Role, token_hash
from kvstore.identity_file import new_token, token_line
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.bulk import BulkWire
from kvstore.wires.shm import ShmWire
from node.access.access import Access
from node.access.audit import LINES_AT_ONCE, WHY_LENGTH_MAX, Audit
from node.access.caller import THE_NODE
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


def test_a_file_that_gets_wrong_changes_nothing(access: Access, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "identities"
    path.chmod(0o666)
    for _ in range(3):
        access.look()
    assert access.of_token(TOKEN).name == "ci"
    assert [record.getMessage() for record in caplog.records] == [
        f"identities={path} may be written by everybody; chmod o-w {path}; the identities of before stay in force"
    ]
    path.chmod(0o600)
    path.unlink()
    access.look()
    assert access.of_token(TOKEN).name == "ci"
    path.write_text("nonsense\n" + token_line("new", TOKEN, tenant="team-b", role="read") + "\n")
    access.look()
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
    access.look()
    assert access.of_token(TOKEN).tenant == "team-b"


def soon_changed(path: Path, before: os.stat_result) -> None:
    """The file system's clock has a grain."""

    def later() -> bool:
        path.chmod(before.st_mode & 0o777)
        return path.stat().st_ctime_ns > before.st_ctime_ns

    wait_until(later)


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to itself"])
def test_what_is_no_file_holds_nobody_up(access: Access, tmp_path: Path, kind: str, caplog: Any) -> None:
    path = tmp_path / "identities"
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    looking = threading.Thread(target=access.look, daemon=True)
    looking.start()
    looking.join(30.0)
    assert not looking.is_alive()
    assert "the identities of before stay in force" in caplog.text
    assert access.of_token(TOKEN).name == "ci"


@pytest.mark.parametrize(("mode", "said"), [(0o666, "may be written by everybody"), (None, "can not be read")])
def test_a_node_does_not_start_with_such_a_file(tmp_path: Path, mode: int | None, said: str) -> None:
    path = tmp_path / "identities"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        Access(str(path))


def test_a_token_ends_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "identities"
    path.write_text(token_line("ci", TOKEN, tenant="team-a", role="read", expires="2031-01-01T00:00:00Z") + "\n")
    access = Access(str(path))
    known = access.known_by(TOKEN, ())
    assert known().name == "ci"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 2e9)
        with pytest.raises(Unauthenticated, match="the token of ci has expired"):
            known()
        with pytest.raises(Unauthenticated, match="has expired"):
            access.of_token(TOKEN)
    assert known().name == "ci", "the clock was wrong"


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_a_token_that_is_revoked_ends_what_was_opened_with_it(node: Node, people: People, wire: str) -> None:
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
    with pytest.raises(Unauthenticated, match="connect anew"):
        connection.call("list_namespaces", pb.ListNamespacesRequest(), Deadline(20.0))
    connection.close()


def test_who_may_not_map_the_memory_any_more_goes_on_over_tcp(node: Node, people: People) -> None:
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
def test_a_token_is_changed_under_load_and_no_call_fails(node: Node, people: People, tmp_path: Path, wire: str) -> None:
    """The new one is added, clients are given it, the old one goes."""
    file = tmp_path / "token"
    file.write_text(people.join(f"old-{wire}", "team-a", "write"))
    file.chmod(0o600)
    taken_up(node, lambda: token_hash(file.read_text()) in node.access.identities.tokens)
    config = ClientConfig(f"127.0.0.1:{node.grpc.port}", wire=wire, token_file=str(file), timeout_s=20.0)
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


def test_who_is_refused_at_the_door_does_not_knock_with_each_call(node: Node) -> None:
    with client(node, "team-a." + "y" * 43) as stranger:
        with pytest.raises(Unauthenticated):
            stranger.lookup(namespace(), [KEY])
        said = []
        for _ in range(20):
            with pytest.raises((Unauthenticated, Unavailable), match="does not know this token") as caught:
                stranger.lookup(namespace(), [KEY])
            said.append(caught.type)
        assert Unavailable in said, "it pauses"


def test_another_tenants_namespace_is_not_opened_and_the_remedy_is_told(node: Node, people: People) -> None:
    with client(node, people.tokens["other"]) as other:
        with pytest.raises(Forbidden, match="set KVSTORE_TENANT=team-b"):
            other.lookup(namespace("team-a"), [KEY])
        assert other.lookup(namespace("team-b"), [KEY]).prefix_pages == 0, "its own are there all the same"


def test_the_file_has_no_token_and_the_log_neither(node: Node, people: People, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG), client(node, people.tokens["read"]) as reader:
        with pytest.raises(Forbidden):
            reader.remove(namespace(), [KEY])
        with client(node, people.tokens["wrong"]) as wrong, pytest.raises(Unauthenticated):
            wrong.lookup(namespace(), [KEY])
    said = caplog.text + people.path.read_text() + repr(reader.config)
    assert "forbidden" in said.lower() or "refused" in said
    assert not [name for name, token in people.tokens.items() if token and token in said]


class TestAudit:
    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_a_refusal_and_an_act_are_lines(self, start_node: Any, people: People, tmp_path: Path) -> None:
        path = tmp_path / "audit"
        node = start_node(identities=str(people.path), audit_log=str(path), shm_socket="none")
        space = namespace(salt="audited")
        with client(node, people.tokens["admin"]) as admin:
            admin.put(space, [KEY], [PAGE])
            admin.remove_namespace(space)
        with client(node, people.tokens["read"]) as reader, pytest.raises(Forbidden):
            reader.put(space, [KEY], [PAGE])
        act, refused = self.lines(path)
        assert {name: act[name] for name in ("what", "op", "who", "namespace")} == {
            "what": "act", "op": "remove_namespace", "who": "admin", "namespace": space.digest.hex()[:8],
        }  # fmt: skip
        assert (refused["what"], refused["op"], refused["who"]) == ("refused", "put", "read")
        assert "role read" in refused["why"]
        assert node.service.call("node_status", pb.NodeStatusRequest(), THE_NODE).refused_calls == 1

    def test_who_is_kept_from_the_memory_or_asks_for_what_others_have_is_written_down(
        self, start_node: Any, people: People, tmp_path: Path
    ) -> None:
        path = tmp_path / "audit"
        node = start_node(identities=str(people.path), audit_log=str(path))
        with client(node, people.tokens["write"], wire="bulk") as writer:
            writer.put(namespace(), [KEY], [PAGE])
        wire = ShmWire(node.shm.path, node.service.instance_id, ClientConfig(token=people.tokens["write"]))
        with pytest.raises(Forbidden, match="shm-trust"):
            wire.connect(Deadline(20.0))
        wire.close()
        stranger = BulkWire("127.0.0.1", node.bulk.port, ClientConfig(token=people.tokens["other"]))
        for digest in (namespace().digest, bytes(16)):
            with pytest.raises(UnknownNamespace):
                stranger.call("list", pb.ListRequest(namespace=digest), Deadline(20.0))
        stranger.close()
        kept_out, asked = self.lines(path)
        assert (kept_out["op"], kept_out["who"]) == ("hello", "write")
        assert "shm-trust" in kept_out["why"]
        assert (asked["op"], asked["who"], asked["namespace"]) == ("list", "other", namespace().digest.hex()[:8])

    def test_a_flood_is_counted_and_hides_no_act(self, tmp_path: Path) -> None:
        path, now = tmp_path / "audit", [0.0]
        audit = Audit(str(path), lambda: now[0])
        for _ in range(1000):
            audit.refused("get", "10.0.0.1", "", "nobody")
        audit.acted("drain", "10.0.0.2", "op", object())
        now[0] = 1.0
        audit.refused("get", "10.0.0.1", "", "nobody")
        audit.close()
        lines = self.lines(path)
        assert len(lines) == LINES_AT_ONCE + 2
        assert lines[-2]["op"] == "drain"
        assert lines[-1]["omitted"] == 1000 - LINES_AT_ONCE

    def test_a_file_that_is_moved_away_is_begun_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "audit"
        audit = Audit(str(path))
        audit.refused("get", "a", "", "1")
        os.rename(path, tmp_path / "old")
        audit.refused("get", "a", "", "2")
        audit.close()
        assert [line["why"] for line in self.lines(path)] == ["2"]

    def test_one_whose_directory_goes_costs_lines_and_no_request(self, tmp_path: Path, caplog: Any) -> None:
        folder = tmp_path / "logs"
        folder.mkdir()
        audit = Audit(str(folder / "audit"))
        folder.rename(tmp_path / "moved")
        for _ in range(3):
            audit.refused("get", "a", "", "lost")
        assert caplog.text.count("the audit log can not be written; lines are lost") == 1
        folder.mkdir()
        audit.refused("get", "a", "", "there again")
        audit.close()
        assert [line["why"] for line in self.lines(folder / "audit")] == ["there again"]

    @pytest.mark.parametrize("reader", [False, True])
    def test_a_pipe_in_its_place_that_nobody_reads_holds_nobody_up(self, tmp_path: Path, reader: bool) -> None:
        path = tmp_path / "audit"
        audit = Audit(str(path), lambda: 0.0)
        path.unlink()
        os.mkfifo(path)
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader else -1

        def knocks() -> None:
            for _ in range(2 * int(LINES_AT_ONCE)):
                audit.refused("get", "a", "", "x" * WHY_LENGTH_MAX)
                audit.acted("flush", "a", "x" * 600, object())
            audit.close()

        knocking = threading.Thread(target=knocks, daemon=True)
        knocking.start()
        knocking.join(30.0)
        assert not knocking.is_alive()
        if reader:
            os.close(end)

    def test_a_pipe_that_nobody_reads_ends_the_start(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "audit")
        said: list[str] = []

        def start() -> None:
            try:
                Audit(str(tmp_path / "audit"))
            except ConfigError as error:
                said.append(str(error))

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        starting.join(30.0)
        assert [error.partition("=")[0] for error in said] == ["audit_log"]

    def test_a_full_disk_costs_lines_and_neither_a_request_nor_a_stop(self, caplog: Any) -> None:
        audit = Audit("/dev/full")
        for _ in range(3):
            audit.refused("get", "a", "", "lost")
        audit.close()
        assert caplog.text.count("the audit log can not be written; lines are lost") == 1

    def test_in_the_nodes_log_a_flood_hides_no_act_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The log's own rate knows a statement by its place, and all lines of the audit log come from one."""
        handler, said = logging.StreamHandler(), io.StringIO()
        handler.setStream(said)
        handler.addFilter(LogRate())
        monkeypatch.setattr(logging.getLogger("kvstore.audit"), "handlers", [handler])
        audit = Audit()
        for _ in range(1000):
            audit.refused("get", "10.0.0.1", "", "nobody")
        audit.acted("drain", "10.0.0.2", "op", object())
        lines = [json.loads(line) for line in said.getvalue().splitlines()]
        assert len(lines) >= LINES_AT_ONCE + 1
        assert lines[-1]["op"] == "drain"

    def test_one_that_can_not_be_written_ends_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="audit_log="):
            Audit(str(tmp_path / "none" / "audit"))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "node7"])
def test_a_node_that_others_reach_asks_who_they_are(host: str) -> None:
    with pytest.raises(ConfigError, match="say --insecure by name"):
        NodeConfig(host=host)
    with pytest.raises(ConfigError, match="say --insecure by name"):
        NodeConfig(host=host, identities="x")
    assert "may read, change and remove all" in NodeConfig(host=host, insecure=True).insecurity
    assert "unencrypted" in NodeConfig(host=host, identities="x", insecure=True).insecurity
    assert not NodeConfig(host=host, identities="x", tls_cert="c", tls_key="k").insecurity


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_node_for_its_own_host_need_not(host: str) -> None:
    assert not NodeConfig(host=host).insecurity


def test_trust_is_of_tenants() -> None:
    with pytest.raises(ConfigError, match="which only a node with identities has"):
        NodeConfig(shm_trust="team-a")
    for wrong in ("*", "team-a;team-b", "team-a,team b"):
        with pytest.raises(ConfigError, match="must be tenants' names"):
            NodeConfig(shm_trust=wrong, identities="x")
    assert NodeConfig(shm_trust="team-a, team-b", identities="x").trusted == ("team-a", "team-b")
