"""The audit log of refused calls and administrators' actions, even when it can not be written."""

import io
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from local_nodes import StartNode
from people import PAGE_NBYTES, People, client, namespace

from kvstore import ClientConfig, ConfigError, Forbidden, UnknownNamespace
from kvstore.deadline import Deadline
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkWire
from kvstore.transports.shm import ShmWire
from node.auth.access import THE_NODE
from node.auth.audit import LINES_AT_ONCE, WHY_LENGTH_MAX, Audit

KEY = b"k" * 32
PAGE = bytes(range(256)) * (PAGE_NBYTES // 256)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusal_and_action_are_audit_lines(
    start_node: StartNode, people: People, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    node = start_node(identities=str(people.path), audit_log=str(path), shm_socket="none")
    space = namespace(salt="audited")
    with client(node, people.tokens["admin"]) as admin:
        admin.put(space, [KEY], [PAGE])
        admin.remove_namespace(space)
    with client(node, people.tokens["read"]) as reader, pytest.raises(Forbidden):
        reader.put(space, [KEY], [PAGE])
    act, refused = lines_of(path)
    assert {name: act[name] for name in ("what", "op", "who", "namespace")} == {
        "what": "act", "op": "remove_namespace", "who": "admin",
        "namespace": space.digest.hex()[:8],
    }  # fmt: skip
    assert (refused["what"], refused["op"], refused["who"]) == ("refused", "put", "read")
    assert refused["peer"] == act["peer"] == "127.0.0.1", "the peer is not an address"
    assert "role read" in refused["why"]
    assert node.service.call("node_status", pb.NodeStatusRequest(), THE_NODE).refused_calls == 1


def test_audit_records_refused_memory_and_foreign_pages(
    start_node: StartNode, people: People, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    node = start_node(identities=str(people.path), audit_log=str(path))
    with client(node, people.tokens["write"], wire="bulk") as writer:
        writer.put(namespace(), [KEY], [PAGE])
    wire = ShmWire(
        node.shm.path, node.service.instance_id, ClientConfig(token=people.tokens["write"])
    )
    with pytest.raises(Forbidden, match="shm-trust"):
        wire.connect(Deadline(20.0))
    wire.close()
    stranger = BulkWire("127.0.0.1", node.bulk.port, ClientConfig(token=people.tokens["other"]))
    for digest in (namespace().digest, bytes(16)):
        with pytest.raises(UnknownNamespace):
            stranger.call("list", pb.ListRequest(namespace=digest), Deadline(20.0))
    stranger.close()
    kept_out, asked = lines_of(path)
    assert (kept_out["op"], kept_out["who"]) == ("hello", "write")
    assert "shm-trust" in kept_out["why"]
    assert (asked["op"], asked["who"], asked["namespace"]) == (
        "list",
        "other",
        namespace().digest.hex()[:8],
    )


def test_push_of_identities_is_named_by_its_digest(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "audit"))
    for flags in ({"check": True}, {}, {"force": True}):
        request = pb.PushIdentitiesRequest(content=b"token x\n", **flags)
        audit.acted("push_identities", "127.0.0.1", "operator", request)
    audit.close()
    found = [(line["mode"], line["identities"]) for line in lines_of(tmp_path / "audit")]
    assert found == [(mode, "50a367e9f9d0") for mode in ("check", "push", "force")]


def test_flood_of_refusals_is_counted_and_hides_no_action(tmp_path: Path) -> None:
    path, now = tmp_path / "audit", [0.0]
    audit = Audit(str(path), lambda: now[0])
    for _ in range(1000):
        audit.refused("get", "10.0.0.1", "", "nobody")
    audit.acted("drain", "10.0.0.2", "op", object())
    now[0] = 1.0
    audit.refused("get", "10.0.0.1", "", "nobody")
    audit.close()
    lines = lines_of(path)
    assert len(lines) == LINES_AT_ONCE + 2
    assert lines[-2]["op"] == "drain"
    assert lines[-1]["omitted"] == 1000 - LINES_AT_ONCE


def test_moved_audit_log_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(str(path))
    audit.refused("get", "a", "", "1")
    os.rename(path, tmp_path / "old")
    audit.refused("get", "a", "", "2")
    audit.close()
    assert [line["why"] for line in lines_of(path)] == ["2"]


def test_audit_log_without_its_directory_loses_lines_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert [line["why"] for line in lines_of(folder / "audit")] == ["there again"]


@pytest.mark.parametrize("reader", [False, True])
def test_pipe_in_place_of_the_audit_log_blocks_no_request(tmp_path: Path, reader: bool) -> None:
    path = tmp_path / "audit"
    audit = Audit(str(path), lambda: 0.0)
    path.unlink()
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader else -1

    def write_lines() -> None:
        for _ in range(2 * int(LINES_AT_ONCE)):
            audit.refused("get", "a", "", "x" * WHY_LENGTH_MAX)
            audit.acted("flush", "a", "x" * 600, object())
        audit.close()

    writing = threading.Thread(target=write_lines, daemon=True)
    writing.start()
    writing.join(30.0)
    assert not writing.is_alive()
    if reader:
        os.close(end)


def test_pipe_without_reader_as_audit_log_fails_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit")
    errors: list[str] = []

    def start() -> None:
        try:
            Audit(str(tmp_path / "audit"))
        except ConfigError as error:
            errors.append(str(error))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(30.0)
    assert [error.partition("=")[0] for error in errors] == ["audit_log"]


def test_full_disk_loses_audit_lines_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = Audit("/dev/full")
    for _ in range(3):
        audit.refused("get", "a", "", "lost")
    audit.close()
    assert caplog.text.count("the audit log can not be written; lines are lost") == 1


def test_flood_hides_no_action_in_the_log_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate limit of the node's log, which counts per statement, does not drop audit lines.

    All audit lines come from one statement.
    """
    handler, output = logging.StreamHandler(), io.StringIO()
    handler.setStream(output)
    handler.addFilter(LogRate())
    monkeypatch.setattr(logging.getLogger("kvstore.audit"), "handlers", [handler])
    audit = Audit()
    for _ in range(1000):
        audit.refused("get", "10.0.0.1", "", "nobody")
    audit.acted("drain", "10.0.0.2", "op", object())
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert len(lines) >= LINES_AT_ONCE + 1
    assert lines[-1]["op"] == "drain"


def test_unwritable_audit_log_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_log="):
        Audit(str(tmp_path / "none" / "audit"))
