"""Failures of commands: each is one line on stderr and an exit code."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Client, Namespace
from kvstore.cli import payload
from kvstore.cli.commands import build
from kvstore.cli.selection import read_input
from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.results import ClientStats, VerifyResult

Kvstore = Callable[..., Any]
NOBODY = "127.0.0.1:1"  # nothing listens on port 1


def one_line(ran: Any) -> str:
    """Return stderr, which must be one line that begins with the program's name, without stdout."""
    assert ran.stdout == ""
    assert ran.stderr.startswith("kvstore: ")
    assert ran.stderr.count("\n") == 1
    return str(ran.stderr)


@pytest.mark.parametrize("place", ["before", "after", "environment"])
def test_command_without_a_running_node_exits_3(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "environment":
        monkeypatch.setenv("KVSTORE_ADDRESS", NOBODY)
    arguments = {
        "before": ["-a", NOBODY, "ls"],
        "after": ["ls", "-a", NOBODY],
        "environment": ["ls"],
    }[place]
    ran = kvstore(*arguments)
    assert ran.code == 3
    assert f"node {NOBODY} is unavailable" in one_line(ran)
    assert "--address" in ran.stderr


def test_command_says_who_starts_the_local_node(kvstore: Kvstore) -> None:
    ran = kvstore("ls", "-a", "local")
    assert ran.code == 3
    assert "engines of this user with KVSTORE_ADDRESS=local start it" in one_line(ran)


@pytest.mark.parametrize(
    ("said", "remedies"),
    [
        ("connection refused", ("is kvstore-node running there?", "--address")),
        ("the node uses TLS; name its authority with tls_ca (KVSTORE_TLS_CA)", ()),
        ("it requires client certificates (--tls-client-ca)", ()),
        ("not from an authority in tls_ca=ca.pem", ()),
        ("it answers, but not over gRPC; write bulk://localhost:7441", ()),
    ],
)
def test_error_with_a_remedy_gets_no_other(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch, said: str, remedies: tuple[str, ...]
) -> None:
    """A node that asks for TLS is running, so nobody shall look whether it runs."""

    def fail(*_: Any, **__: Any) -> None:
        raise Unavailable(said)

    monkeypatch.setattr(Client, "node_status", fail)
    told = one_line(kvstore("status"))
    assert said in told
    assert [some in told for some in ("is kvstore-node running there?", "--address")] == [
        some in remedies for some in ("is kvstore-node running there?", "--address")
    ]


def test_address_is_named_once(
    kvstore: Kvstore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = client.config.address

    def fail(*_: Any, **__: Any) -> None:
        raise Unavailable(f"{address}: it is away")

    monkeypatch.setattr(Client, "node_status", fail)
    told = one_line(kvstore("status", "-a", address))
    assert told.startswith(f"kvstore: node {address} is unavailable: it is away; ")


def test_address_option_overrides_the_environment(
    kvstore: Kvstore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", NOBODY)
    assert kvstore("status", "-a", client.config.address).code == 0
    assert kvstore("-a", client.config.address, "status").code == 0


def test_every_command_that_needs_a_node_exits_3_without_one(
    kvstore: Kvstore, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    page.write_bytes(b"x")
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    positional = {
        "put": [str(page), "ab" * 16],
        "replay": [str(trace)],
        "forget": ["--tenant", "t", "--yes"],
        "rm": ["ab" * 16],
        "verify": ["ab" * 16],
    }
    positional["record"] = ["-o", str(tmp_path / "recorded")]
    positional["query"] = ["--model", "m", "ab" * 16]
    # Plan calls no node; doctor reports it as a finding; feed and events wait for it
    others = ("plan", "doctor", "feed", "events")
    for command in (some for some in build().registered_commands if some.name not in others):
        ran = kvstore(
            str(command.name), *positional.get(str(command.name), []), "-a", NOBODY, "--json"
        )
        assert (ran.code, ran.stdout, ran.error["kind"]) == (3, "", "Unavailable"), command.name


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing command"),
        (["stauts"], 2, "Did you mean 'status'"),
        (["get", "--nonsense"], 2, "--nonsense"),
        (["put"], 2, "FILE"),
        (["ls", "--limit", "x"], 2, "--limit"),
        (["ls", "--limit", "-1"], 2, "--limit -1"),
        (["ls", "-n", "xyz"], 2, "'xyz' is not hexadecimal"),
        (["ls", "--prefix", "ab"], 2, "--prefix needs a namespace"),
        (["ls", "-n", "00000000000000000000000000000000"], 1, "kvstore ls"),
        (["ls", "-m", "no such model"], 1, "no namespace with model 'no such model'"),
        (["get", "-m", "no such model", "ab"], 1, "no namespace"),
        (["status", "-a", "host:port"], 2, "host:port"),
        (["status", "--timeout", "0"], 2, "timeout_s"),
        (["top", "--interval", "0"], 2, "--interval"),
        (["top", "--count", "-1"], 2, "--count"),
        (["bench", "--threads", "0"], 2, "threads=0"),
        (["bench", "--page-nbytes", "big"], 2, "--page-nbytes 'big'"),
        (["bench", "--page-nbytes", "64MiB", "--batch", "1"], 2, "extent_nbytes"),
        (["bench", "--wire", "carrier-pigeon"], 2, "auto, bulk, grpc"),
        (["replay", "/no/such/trace"], 2, "/no/such/trace"),
        (["replay", "/dev/null", "--limit", "0"], 2, "--limit 0"),
        (["replay", "/dev/null", "--speed", "0"], 2, "--speed 0"),
        (["replay", "/dev/null", "--page-bytes", "0"], 2, "page size 0"),
        (["put", "/no/such/page", "ab" * 16], 2, "/no/such/page"),
        (["put", "-", "--tokens-file", "-"], 2, "stdin"),
        (["put", "/dev/null", "ab" * 16], 2, "/dev/null is empty"),
        (["put", "/dev/zero"], 2, "KEY or by --tokens"),
        (["put", "/dev/null", "ab", "-m", "m", "--create-opaque", "n"], 2, "--create-opaque names"),
        (["rm", "--all", "ab"], 2, "not both"),
        (["rm", "--all", "--tokens", "1"], 2, "not both"),
        (["rm"], 2, "KEY or by --tokens/--tokens-file, or all by --all"),
        (["verify"], 2, "KEY or by --tokens/--tokens-file, or all by --all"),
        (["put", "/dev/null", "--tokens", ""], 2, "--tokens has no token ids"),
        (["query", "--model", "m", "--tokens-file", "/dev/null"], 2, "/dev/null has no token ids"),
        (["pin", "ab", "--ttl", "soon"], 2, "'soon' is not a duration"),
        (["statuss"], 2, "No such command 'statuss'. Did you mean 'status', 'stat'? See kvstore"),
        (["tenants", "quota", "t", "--pins", "1", "-f", "/no/such/f"], 2, "no file /no/such/f; "),
    ],
)
def test_invalid_usage_is_reported_in_one_line(
    kvstore: Kvstore, arguments: list[str], code: int, message: str
) -> None:
    ran = kvstore(*arguments)
    assert ran.code == code
    assert message in one_line(ran)
    ran = kvstore(*arguments, "--json")
    assert (ran.code, ran.stdout, set(ran.error)) == (code, "", {"error", "kind"})
    assert message in ran.error["error"]


def test_group_without_a_command_is_reported_in_one_line(kvstore: Kvstore) -> None:
    """Regression: the error was the whole help of the group, folded into one line."""
    assert one_line(kvstore("context")) == "kvstore: Missing command; see kvstore context --help\n"


@pytest.mark.parametrize(
    ("key", "code", "message"),
    [
        ("xyz", 2, "key 'xyz' is not hexadecimal"),
        ("ab" * 65, 2, "at most 128"),
        ("00", 1, "no page of namespace"),
        ("00" * 32, 1, "not stored"),
    ],
)
def test_key_without_a_page_is_reported(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], key: str, code: int, message: str
) -> None:
    ran = kvstore("get", "-m", space.model, key)
    assert ran.code == code
    assert message in one_line(ran)


def test_common_start_of_two_keys_is_ambiguous(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    keys = [b"\xab" * 20 + bytes([i]) for i in range(2)]
    client.put(space, keys, [bytes(space.layout.page_nbytes)] * 2)
    ran = kvstore("get", "-m", space.model, "abab")
    assert ran.code == 2
    assert "several keys start with abab" in one_line(ran)
    assert kvstore("get", "-m", space.model, keys[1].hex()).code == 0


def test_model_with_two_namespaces_is_ambiguous(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    other = Namespace(space.model, space.layout, revision="2")
    client.open(space)
    client.open(other)
    ran = kvstore("ls", "-m", space.model)
    assert ran.code == 2
    assert "2 namespaces fit" in one_line(ran)
    # Found, but empty
    assert kvstore("ls", "-m", space.model, "-n", other.digest.hex()[:12]).code == 1


def test_unwritable_output_file_is_reported(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], tmp_path: Path
) -> None:
    ran = kvstore("get", "-m", space.model, hashes[0].hex(), "-o", str(tmp_path / "no" / "file"))
    assert ran.code == 2
    assert "can not write" in one_line(ran)


def test_malformed_trace_is_reported_by_line(kvstore: Kvstore, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n{"timestamp": '
        "0}\n"
    )
    ran = kvstore("replay", str(path))
    assert ran.code == 2
    assert f"{path}, line 2: input_length is missing" in one_line(ran)


def test_wrong_bytes_exit_5(
    kvstore: Kvstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n' * 2
    )

    def get_nothing(
        self: Client, namespace: Namespace, keys: list[bytes], *_: Any, **__: Any
    ) -> list[bool]:
        return [True] * len(keys)

    monkeypatch.setattr(Client, "get", get_nothing)
    ran = kvstore("replay", str(path), "--json")
    assert (ran.code, ran.json["mismatches"], ran.json["verified_nbytes"]) == (5, 1, 0)
    ran = kvstore("bench", "--seconds", "0.05", "--page-nbytes", "512", "--json")
    assert ran.code == 5
    assert ran.json["mismatches"] > 0


@pytest.mark.parametrize(
    ("corrupt", "code", "message"),
    [(1, 5, "checksum"), (0, 1, "evicted, removed, or found damaged meanwhile")],
)
def test_get_of_a_corrupt_or_evicted_page_fails(
    kvstore: Kvstore,
    space: Namespace,
    hashes: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    corrupt: int,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(Client, "get", lambda *_: [False])
    monkeypatch.setattr(Client, "stats", property(lambda _: ClientStats(1, 0, corrupt)))
    ran = kvstore("get", "-m", space.model, hashes[0].hex())
    assert ran.code == code
    assert message in one_line(ran)


def test_verify_of_a_corrupt_page_exits_5(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Client, "verify", lambda *_, **__: VerifyResult(intact=2, dropped=1, absent=0)
    )
    ran = kvstore("verify", "-m", space.model, "--all", "--json")
    assert (ran.code, ran.json["dropped"]) == (5, 1)


def test_put_to_a_full_node_exits_4(
    kvstore: Kvstore, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise Exhausted("no slot can be freed")

    monkeypatch.setattr(Client, "put", full)
    ran = kvstore("put", "-", "ab" * 16, "--create-opaque", space.model, stdin=b"page")
    assert ran.code == 4
    assert "no slot can be freed" in one_line(ran)


def test_oversized_input_is_refused_before_it_is_read_in_full(
    kvstore: Kvstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "INPUT_NBYTES_MAX", 1 << 16)
    ran = kvstore("put", "/dev/zero", "ab" * 16)
    assert ran.code == 2
    assert "/dev/zero has more than 65536 bytes" in one_line(ran)


def test_input_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one read of up to 4 GiB reserved that much memory for any page."""

    class Input(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert 0 < size <= 4 << 20
            return super().read(size)

    for data in (b"", bytes(5 << 20)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Input(data)))
        assert read_input(Path("-"), 8 << 20) == data
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Input(bytes(9 << 20))))
    with pytest.raises(InvalidRequest, match="more than 8388608 bytes"):
        read_input(Path("-"), 8 << 20)


@pytest.mark.parametrize("command", ["list", "add"])
def test_identities_from_a_pipe_are_refused_at_once(
    kvstore: Kvstore, tmp_path: Path, command: str
) -> None:
    """Regression: the command waited for ever, or read /dev/zero until memory was used up."""
    os.mkfifo(tmp_path / "pipe")
    arguments = ["x", "--tenant", "a"] if command == "add" else []
    for file in (str(tmp_path / "pipe"), "/dev/zero"):
        ran = kvstore("tokens", command, *arguments, "-f", file)
        assert ran.code == 2
        assert "is no regular file" in one_line(ran)
