"""`kvstore context`, and commands that take their connection from a context."""

import json
import os
import threading
from pathlib import Path

import pytest
from cli_runner import Kvstore, run_kvstore

from kvstore.tools.node_process import NodeProcess

NOWHERE = "127.0.0.1:9"  # nothing listens on the port of `discard`


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the commands an empty home, and no address in the environment."""
    for name in ("KVSTORE_ADDRESS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def node(kvstore: Kvstore, home: Path, shared_node: NodeProcess) -> NodeProcess:
    """Store contexts: `here` of the shared node, `away` of none."""
    kvstore("context", "add", "here", "-a", shared_node.address)
    kvstore("context", "add", "away", "-a", NOWHERE, "--wire", "grpc")
    return shared_node


def file_of(home: Path) -> Path:
    return home / ".config" / "kvstore" / "contexts.json"


def test_context_is_stored_with_absolute_paths_and_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = home / "token"
    token.write_text("team.secret")
    monkeypatch.chdir(home)
    ran = run_kvstore("context", "add", "prod", "-a", "n1:7440", "--token-file", "token", "--json")
    assert ran.json == {"name": "prod", "file": str(file_of(home)), "replaced": False}
    assert json.loads(file_of(home).read_text()) == {
        "current": None,
        "contexts": {"prod": {"address": "n1:7440", "token_file": str(token)}},
    }
    assert file_of(home).stat().st_mode & 0o777 == 0o600
    assert file_of(home).parent.stat().st_mode & 0o777 == 0o700
    shown = run_kvstore("context", "show", "prod", "--json").json
    assert (shown["address"], shown["token_file"], shown["tls_ca"]) == ("n1:7440", str(token), None)


def test_option_overrides_variable_overrides_context(
    kvstore: Kvstore, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address(*options: str) -> str:
        return str(kvstore(*options, "status", "--json").json["address"])

    kvstore("context", "use", "away")
    refused = kvstore("status", "--json", "--timeout", "1")
    assert refused.code == 3
    assert refused.error["error"].startswith(f"context away: node {NOWHERE} is unavailable")
    assert address("--context", "here") == node.address
    assert kvstore("status", "--context", "here").code == 0  # behind the command as well
    assert address("--address", node.address) == node.address
    monkeypatch.setenv("KVSTORE_ADDRESS", node.address)
    assert address() == node.address
    monkeypatch.delenv("KVSTORE_ADDRESS")
    monkeypatch.setenv("KVSTORE_CONTEXT", "here")
    assert address() == node.address
    assert kvstore(
        "--context", "none", "status", "-a", NOWHERE, "--timeout", "1"
    ).stderr.startswith("kvstore: node")


def test_secret_in_the_environment_replaces_the_file_of_the_context(
    kvstore: Kvstore, node: NodeProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvstore("context", "add", "gone", "-a", node.address, "--token-file", str(home / "no token"))
    refused = kvstore("--context", "gone", "status")
    assert refused.code == 2
    assert "context gone: token_file=" in refused.stderr
    monkeypatch.setenv("KVSTORE_TOKEN", "t.x")
    assert kvstore("--context", "gone", "status").code == 0
    assert "token_file=" in kvstore("status", "--token-file", str(home / "no")).stderr


def test_replay_does_not_load_the_node_of_the_current_context(
    kvstore: Kvstore, node: NodeProcess, home: Path
) -> None:
    trace = home / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":8,"output_length":1,"hash_ids":[1]}\n')
    kvstore("context", "use", "away")
    assert kvstore("replay", str(trace), "--json").code == 0
    assert kvstore("--context", "away", "replay", str(trace), "--timeout", "1").code == 3


def test_add_refuses_what_can_not_work(home: Path) -> None:
    for arguments, message in (
        (["prod"], "give at least one connection option"),
        (["none", "-a", "n1"], "'none' can not name a context"),
        (["a b", "-a", "n1"], "can not name a context"),
        (["prod", "-a", "http://n1"], "is a URL, not host:port"),
        (["prod", "--tls-cert", "c.pem"], "tls_cert and tls_key are given together"),
        (["prod", "--direct", "-a", "n1"], "a context can not have --direct"),
    ):
        ran = run_kvstore("context", "add", *arguments)
        assert (ran.code, message in ran.stderr) == (2, True), ran.stderr
    assert not file_of(home).exists()
    run_kvstore("context", "add", "prod", "-a", "n1")
    assert "--force replaces it" in run_kvstore("context", "add", "prod", "-a", "n2").stderr
    assert run_kvstore("context", "add", "prod", "-a", "n2", "--force", "--json").json["replaced"]


def test_remove_of_the_current_context_leaves_none(home: Path) -> None:
    assert run_kvstore("context", "list").code == 1
    run_kvstore("context", "add", "prod", "-a", "n1")
    run_kvstore("context", "use", "prod")
    assert run_kvstore("context", "list", "--json").json["current"] == "prod"
    run_kvstore("context", "remove", "prod")
    assert run_kvstore("context", "list", "--json").json == {"current": None, "contexts": []}
    unknown = run_kvstore("context", "use", "prod")
    assert (unknown.code, "there is no context 'prod'" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"contexts": {"a": {"token": "x"}}}',
        '{"contexts": {"a": {"insecure": "no"}}}',
        "\x00\xff",
    ],
)
def test_broken_file_stops_only_commands_that_name_a_context(
    kvstore: Kvstore, shared_node: NodeProcess, home: Path, text: str
) -> None:
    file_of(home).parent.mkdir(parents=True)
    file_of(home).write_text(text)
    ran = kvstore("status", "-a", shared_node.address)
    assert ran.code == 0
    assert f"no context is used: {file_of(home)} is no valid file of contexts" in ran.stderr
    named = kvstore("--context", "a", "status", "-a", shared_node.address)
    assert (named.code, "is no valid file of contexts" in named.stderr) == (2, True)
    assert kvstore("context", "add", "b", "-a", "n1").code == 2
    assert file_of(home).read_text() == text


def test_file_that_others_may_write_is_refused(home: Path) -> None:
    run_kvstore("context", "add", "prod", "-a", "n1")
    file_of(home).chmod(0o622)
    ran = run_kvstore("context", "list")
    assert (ran.code, "chmod g-w,o-w" in ran.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_file_of_another_user_is_refused(home: Path) -> None:
    """The file decides where a token is sent, and `sudo -E` keeps the home of a user."""
    run_kvstore("context", "add", "prod", "-a", "n1:7440")
    os.chown(file_of(home), 65534, -1)
    ran = run_kvstore("context", "list")
    assert (ran.code, "belongs to another user (uid 65534)" in ran.stderr) == (2, True), ran.stderr


def test_unusable_home_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".config").write_text("a file, where a directory belongs")
    ran = run_kvstore("context", "add", "prod", "-a", "n1")
    assert (ran.code, "can not be written" in ran.stderr) == (2, True)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no home
    ran = run_kvstore("context", "add", "prod", "-a", "n1")
    assert (ran.code, "set HOME or XDG_CONFIG_HOME" in ran.stderr) == (2, True)


def test_two_writers_lose_no_context(home: Path) -> None:
    from kvstore.cli.contexts import store

    def add(name: str) -> None:
        with store.changed() as contexts:
            contexts.by_name[name] = {"address": name}

    threads = [threading.Thread(target=add, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read().by_name) == 8


def test_help_lists_the_connection_options_in_a_section_of_their_own() -> None:
    for command in (["ls"], ["cluster", "drain"], ["tokens", "list"], []):
        text = run_kvstore(*command, "--help").stdout
        own, connection = text.split("\nConnection:\n")
        for flag in (
            "--tls-ca",
            "--tls-cert",
            "--tls-key",
            "--token-file",
            "--tenant",
            "--context",
        ):
            assert f"  {flag} " in connection, (command, flag)
            assert f"  {flag} " not in own
        assert "--json" in own
        assert max(map(len, text.splitlines())) <= 80
