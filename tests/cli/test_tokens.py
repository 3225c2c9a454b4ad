"""`kvstore tokens`: making tokens, using them with a node that has authentication, and errors."""

import signal
from pathlib import Path

import pytest
from cli_runner import Kvstore

from kvstore.tools.node_process import NodeProcess


def test_token_gives_access_to_pages_of_its_tenant(
    kvstore: Kvstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, page = tmp_path / "identities", tmp_path / "page"
    page.write_bytes(b"x" * 4096)
    token = kvstore(
        "tokens", "add", "engines", "--tenant", "team-a", "-f", str(file)
    ).stdout.strip()
    reader = kvstore(
        "tokens", "add", "eyes", "--tenant", "team-b", "--role", "read", "-f", str(file), "--json"
    ).json
    key = "ab" * 32
    with NodeProcess("--identities", str(file), "--ram-bytes", "64MiB") as node:
        at = ("-a", node.address)
        refused = kvstore("status", *at)
        assert (refused.code, "set token_file (KVSTORE_TOKEN_FILE)" in refused.stderr) == (2, True)
        before = signal.getsignal(signal.SIGTERM)
        bridge = kvstore("events", "--model", "m", "--endpoint", "none", "--http", "0", *at)
        signal.signal(signal.SIGTERM, before)
        assert (bridge.code, "set token_file" in bridge.stderr) == (2, True)
        monkeypatch.setenv("KVSTORE_TOKEN", token)
        put = kvstore("put", str(page), key, "--create-opaque", "m", *at)
        assert put.code == 0, put.stderr
        assert kvstore("status", *at).code == 0
        assert "m" in kvstore("ls", *at).stdout
        flush = kvstore("flush", *at)
        assert (
            flush.code,
            "needs an identity of all tenants" in flush.stderr
            or "has the role write" in flush.stderr,
        ) == (2, True)
        monkeypatch.setenv("KVSTORE_TOKEN", reader["token"])
        assert kvstore("ls", *at, "--json").json == {"namespaces": []}
        status = kvstore("status", *at, "--json").json
        assert status["namespaces"] == []


def test_tokens_are_listed_and_revoked(kvstore: Kvstore, tmp_path: Path) -> None:
    file = tmp_path / "identities"
    token = kvstore(
        "tokens", "add", "a", "--tenant", "*", "--role", "admin", "--days", "1", "-f", str(file)
    ).stdout
    kvstore(
        "tokens",
        "add",
        "gpu-7",
        "--certificate",
        "--tenant",
        "t",
        "--models",
        "m-*",
        "-f",
        str(file),
    )
    with file.open("a") as more:
        more.write("token broken\n")
    listed = kvstore("tokens", "list", "-f", str(file))
    assert "line 3: " in listed.stderr
    assert token.strip() not in listed.stdout + file.read_text()
    found = kvstore("tokens", "list", "-f", str(file), "--json").json
    assert [(some["name"], some["kind"], some["state"]) for some in found["identities"]] == [
        ("a", "token", "valid"),
        ("gpu-7", "certificate", "valid"),
    ]
    assert kvstore("tokens", "revoke", "a", "-f", str(file)).code == 0
    assert kvstore("tokens", "revoke", "a", "-f", str(file)).code == 1


def test_file_that_has_no_identities_is_reported(kvstore: Kvstore, tmp_path: Path) -> None:
    missing = kvstore("tokens", "revoke", "a", "-f", str(tmp_path / "typo"))
    assert (missing.code, "typo can not be read" in missing.stderr) == (2, True)
    other = tmp_path / "page"
    other.write_text("not an identity\n" * 1000)
    listed = kvstore("tokens", "list", "-f", str(other))
    assert len(listed.stderr.splitlines()) < 20
    assert "992 more" in listed.stderr


def test_existing_name_is_refused_and_no_token_printed(kvstore: Kvstore, tmp_path: Path) -> None:
    add = ("tokens", "add", "a", "--tenant", "t", "-f", str(tmp_path / "identities"))
    assert kvstore(*add).code == 0
    before = (tmp_path / "identities").read_bytes()
    again = kvstore(*add)
    assert (again.code, again.stdout) == (2, "")
    assert "has a token named a already" in again.stderr
    assert (tmp_path / "identities").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "king"), "role must be one of"),
        (("--tenant", "a/b"), "a tenant's name"),
        (("--days", "0"), "must be above 0"),
        (("-f", "/nowhere/identities"), "/nowhere can not be opened"),
    ],
)
def test_invalid_flags_are_refused(
    kvstore: Kvstore, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    ran = kvstore("tokens", "add", "a", "--tenant", "t", "-f", str(tmp_path / "identities"), *flags)
    assert (ran.code, message in ran.stderr) == (2, True), ran.stderr
    assert not (tmp_path / "identities").exists()
