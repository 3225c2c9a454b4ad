"""The service `setup` of docker/compose.yaml makes tokens and certificates once, and completely; a
node and its clients work with them.
"""

import importlib.util
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from authorities import ours as ours
from fleets import SMALL
from waiting import PATIENT

from kvstore import (
    Client,
    ClientConfig,
    Forbidden,
    Namespace,
    PutOutcome,
    Unauthenticated,
    Unavailable,
    opaque_layout,
)
from kvstore.cli.authority import Authority, hosts_of
from kvstore.security.identities import read, revoke, token_hash
from node.config import NodeConfig
from node.server import Node

PATH = Path(__file__).parents[2] / "docker" / "first_start.py"
TOKENS = {"operator.token", "member.token", "engine.token"}
KEYS = {"ca.key", "node.key", "client.key"}
PUBLIC = {"ca.pem", "node.pem", "client.pem"}
FILES = 10
KEY, PAGE = b"k" * 32, bytes(range(256)) * 16
SPACE = Namespace("llama", opaque_layout(len(PAGE)))


@pytest.fixture
def first_start() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_start", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def secrets(first_start: ModuleType, tmp_path: Path) -> Path:
    assert first_start.main([str(tmp_path), "node"]) == 0
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_command_makes_all_files_once(tmp_path: Path) -> None:
    command = [sys.executable, str(PATH), str(tmp_path), "node", "10.0.0.5", "[fd00::5]", "node"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before = contents(tmp_path)
    assert set(before) == {*TOKENS, *KEYS, *PUBLIC, "identities"}
    assert "ca.pem" in output
    assert not any(
        token.decode().strip() in output for name, token in before.items() if name in TOKENS
    )
    assert hosts_of(tmp_path / "node.pem") == [
        "node",
        "10.0.0.5",
        "fd00::5",
        "localhost",
        "127.0.0.1",
    ]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == (f"{tmp_path}: all files exist already\n", "")
    assert contents(tmp_path) == before


def test_secret_files_are_readable_by_their_owner_only(secrets: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()}
    assert modes == dict.fromkeys(TOKENS | KEYS, 0o600) | dict.fromkeys(PUBLIC, 0o644) | {
        "identities": 0o640
    }


def test_first_start_creates_the_documented_identities(secrets: Path) -> None:
    found = read(secrets / "identities")
    assert found.problems == []
    known = {some.name: (some.tenant, some.role.name) for some in found.tokens.values()}
    assert known == {
        "operator": ("*", "ADMIN"),
        "member": ("*", "NODE"),
        "engine": ("default", "WRITE"),
    }
    for name in known:
        token = (secrets / f"{name}.token").read_text().strip()
        assert found.tokens[token_hash(token)].name == name


def test_revoked_and_removed_identities_stay_removed(
    first_start: ModuleType, secrets: Path
) -> None:
    revoke(secrets / "identities", "engine")
    (secrets / "operator.token").unlink()
    before = contents(secrets)
    assert first_start.main([str(secrets), "node"]) == 0
    assert contents(secrets) == before


def test_killed_run_is_completed_by_the_next(
    first_start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run after one that was killed at any file completes the files.

    The file that the killed run was writing is left under another name.
    """
    from kvstore.cli import authority

    class Killed(BaseException):
        pass

    write, left = first_start.write_whole, 0

    def until_killed(path: Path, *rest: Any) -> None:
        nonlocal left
        if not left:
            path.with_name(f".{path.name}.killed").write_bytes(b"half of it")
            raise Killed
        left -= 1
        write(path, *rest)

    monkeypatch.setattr(first_start, "write_whole", until_killed)
    monkeypatch.setattr(authority, "write_whole", until_killed)
    for files in range(FILES):
        folder = tmp_path / str(files)
        folder.mkdir()
        left = files
        with pytest.raises(Killed):
            first_start.main([str(folder), "node"])
        there = {
            name: content for name, content in contents(folder).items() if not name.startswith(".")
        }
        assert len(there) == files
        left = FILES
        assert first_start.main([str(folder), "node"]) == 0
        after = contents(folder)
        kept = {name for name, content in there.items() if after[name] == content}
        assert {*there} - kept <= KEYS, "only the key of an incomplete pair may be replaced"
        assert len({*there} - kept) == (files in (1, 3, 5))
        serves(folder)


def serves(folder: Path) -> None:
    """Check that a node with these files serves a client with them."""
    node = Node(NodeConfig(**{**SMALL, **of_node(folder)}))
    try:
        node.start()
        with as_engine(folder, node) as client:
            assert client.put(SPACE, [KEY], [PAGE]) == [PutOutcome.STORED]
    finally:
        node.stop()


def of_node(folder: Path) -> dict[str, str]:
    return {
        "identities": str(folder / "identities"),
        "tls_cert": str(folder / "node.pem"),
        "tls_key": str(folder / "node.key"),
        "tls_client_ca": str(folder / "ca.pem"),
        "shm_trust": "default",
    }


def as_engine(folder: Path, node: Node, **settings: Any) -> Client:
    shown = {"tls_cert": str(folder / "client.pem"), "tls_key": str(folder / "client.key")}
    known = {
        "tls_ca": str(folder / "ca.pem"),
        "token_file": str(folder / "engine.token"),
        **shown,
        **settings,
    }
    return Client(
        ClientConfig(f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0, **known)
    )


@pytest.fixture
def node(secrets: Path) -> Iterator[Node]:
    node = Node(NodeConfig(**{**SMALL, **of_node(secrets)}))
    try:
        node.start()
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("wire", ["grpc", "bulk", "shm"])
def test_node_with_the_files_serves_a_client_with_them(
    node: Node, secrets: Path, wire: str
) -> None:
    with as_engine(secrets, node, wire=wire) as engine:
        assert engine.put(SPACE, [KEY], [PAGE]) == [PutOutcome.STORED]
        into = bytearray(len(PAGE))
        assert engine.get(SPACE, [KEY], [into]) == [True]
        assert into == PAGE
        with pytest.raises(Forbidden):
            engine.flush()
    operator = {"token_file": str(secrets / "operator.token")}
    with as_engine(secrets, node, wire=wire, **operator) as client:
        assert client.lookup(SPACE, [KEY]).prefix_pages == 1
        client.remove_namespace(SPACE)


def test_node_with_the_files_refuses_other_clients(node: Node, secrets: Path) -> None:
    with (
        as_engine(secrets, node, token_file="") as stranger,
        pytest.raises((Unauthenticated, Unavailable)) as raised,
    ):
        stranger.lookup(SPACE, [KEY])
    assert "does not know this certificate, and no token came" in str(raised.value)
    with (
        as_engine(secrets, node, tls_cert="", tls_key="") as stranger,
        pytest.raises(Unavailable) as raised,
    ):
        stranger.lookup(SPACE, [KEY])
    assert "requires client certificates" in str(raised.value)
    plain = ClientConfig(
        f"127.0.0.1:{node.grpc.port}", token_file=str(secrets / "engine.token"), **PATIENT
    )
    with Client(plain) as client, pytest.raises(Unavailable, match="the node uses TLS"):
        client.lookup(SPACE, [KEY])


def test_certificate_for_other_names_is_kept_and_reported(
    first_start: ModuleType, secrets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(secrets)
    assert first_start.main([str(secrets), "node", "10.0.0.5"]) == 0
    assert contents(secrets) == before
    errors = capsys.readouterr().err
    assert "does not name 10.0.0.5" in errors
    assert "kvstore certs node node 10.0.0.5 localhost 127.0.0.1" in errors


def test_existing_token_is_used(first_start: ModuleType, tmp_path: Path) -> None:
    own = tmp_path / "engine.token"
    own.write_text("default.my-own\n")
    own.chmod(0o600)
    assert first_start.main([str(tmp_path), "node"]) == 0
    assert own.read_text() == "default.my-own\n"
    assert read(tmp_path / "identities").tokens[token_hash("default.my-own")].name == "engine"


def test_existing_authority_needs_no_key(
    first_start: ModuleType, tmp_path: Path, ours: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ca.pem", "node.pem", "node.key"):
        shutil.copy2(ours.path.parent / name, tmp_path)
    assert first_start.main([str(tmp_path), "localhost"]) == 0
    assert "clients show one of ca.pem" in capsys.readouterr().err
    for path in ours.client("shown", "anybody", 1, force=True):
        shutil.copy2(path, tmp_path / f"client{path.suffix}")
    for name in (*TOKENS, "identities"):
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    assert first_start.main([str(tmp_path), "localhost"]) == 0
    after = contents(tmp_path)
    assert {*after} - {*before} == {*TOKENS, "identities"}
    assert before.items() <= after.items()
    serves(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "ca.key").unlink(), "make an authority first"),
        (lambda folder: (folder / "engine.token").write_text(""), "is empty; remove it"),
        (lambda folder: (folder / "engine.token").chmod(0o644), "chmod o-r"),
        (shutil.rmtree, "No such file or directory"),
    ],
)
def test_first_start_names_files_that_block_it(
    first_start: ModuleType,
    secrets: Path,
    spoil: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (secrets / "node.pem").unlink()
    (secrets / "identities").unlink()
    spoil(secrets)
    assert first_start.main([str(secrets), "node"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["/secrets"], ["/secrets", ""]])
def test_missing_host_names_are_reported(
    first_start: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_start.main(arguments) == 2
    assert "by which names" in capsys.readouterr().err
