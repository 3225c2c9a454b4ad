"""Commands on pages of a keyed namespace, with and without its key."""

from pathlib import Path

import pytest
from cli_runner import Kvstore

from kvstore import Client, ClientConfig, Namespace
from kvstore.tools.node_process import NodeProcess

SECRET = "3c" * 32
TOKENS = ("--tokens", "7,8,9")


@pytest.fixture
def stored(
    kvstore: Kvstore, tmp_path: Path, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> bytes:
    """Store a page in a new namespace while a page key is set; return the page's bytes."""
    path = tmp_path / "pages.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("KVSTORE_PAGE_KEY_FILE", str(path))
    data = bytes(range(256)) * 40
    ran = kvstore("put", "-", "--create-opaque", space.model, *TOKENS, "--json", stdin=data)
    assert (ran.code, ran.json["stored"], ran.json["page_nbytes"]) == (0, 1, len(data))
    return data


def test_pages_are_read_and_decoded_with_the_key(
    kvstore: Kvstore, space: Namespace, stored: bytes
) -> None:
    assert kvstore("get", "-m", space.model, *TOKENS).data == stored
    assert kvstore("get", "-m", space.model, *TOKENS, "--layer", "0").data == stored
    (page,) = kvstore("get", "-m", space.model, *TOKENS, "--decode", "--json").json["pages"]
    assert (page["nbytes"], page["planes"][0]["count"]) == (len(stored), len(stored))
    with_key = ClientConfig(page_key=SECRET)
    with Client(with_key) as client:
        (listed,) = [
            some
            for some in kvstore("ls", "--json").json["namespaces"]
            if some["model"] == space.model
        ]
        assert listed["key_id"] == client.key_id


def test_commands_without_the_key_report_its_lack(
    kvstore: Kvstore, space: Namespace, stored: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_PAGE_KEY_FILE")
    for command in (("get", *TOKENS), ("get", *TOKENS, "--decode"), ("put", "-", *TOKENS)):
        ran = kvstore(command[0], *command[1:], "-m", space.model, stdin=stored)
        assert ran.code != 0
        assert "is keyed: its pages are signed with the key" in ran.stderr
        assert ran.data == b""
    for asked in (("lookup", *TOKENS), ("stat", *TOKENS), ("verify", "--all")):
        assert kvstore(asked[0], *asked[1:], "-m", space.model).code == 0


def test_forged_page_exits_5(
    kvstore: Kvstore,
    space: Namespace,
    stored: bytes,
    shared_node: NodeProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Client(
        ClientConfig(
            address=shared_node.address, timeout_s=60.0, connect_timeout_s=30.0, page_key="4d" * 32
        )
    ) as stranger:
        ((named, _),) = [some for some in stranger.namespaces() if some[0].model == space.model]
        (page,) = stranger.list_pages(named)
        assert stranger._page_keys is not None
        stranger._page_keys.key_id = named.key_id  # pretends to have the right key
        stranger.remove(named, [page.prefix_hash])
        stranger.put(named, [page.prefix_hash], [stored])
    ran = kvstore("get", "-m", space.model, *TOKENS)
    assert ran.code == 5
    assert "was made or changed without its key" in ran.stderr
