"""The operator's key: permissions of its file, accepted forms, and the directory it opens."""

import os
import threading
from pathlib import Path

import pytest
from disk_nodes import Nodes, Pages
from locked import KEY, OTHER_KEY, key_file

from kvstore.errors import ConfigError, InvalidRequest
from node.config import NodeConfig
from node.disk import encryption
from node.disk.encryption import EncryptedVault, open_vault


@pytest.mark.parametrize("form", ["hex", "base64"])
def test_key_is_read_from_a_file_and_from_a_command(tmp_path: Path, form: str) -> None:
    path = key_file(tmp_path / "a key", form=form)
    assert (
        open_vault(path, "").mark
        == open_vault("", f"cat '{path}'").mark
        == EncryptedVault(KEY).mark
    )
    assert open_vault("", "").mark == ""


def test_wrapped_key_opens_only_with_its_key_and_row() -> None:
    vault = EncryptedVault(KEY)
    page_key = vault.new_key()
    wrapped = vault.wrap(b"N\0\1", page_key, b"a description")
    assert vault.unwrap(b"N\0\1", wrapped) == (page_key, b"a description")
    assert b"a description" not in wrapped
    damaged = [(vault, b"N\0\2", wrapped), (EncryptedVault(OTHER_KEY), b"N\0\1", wrapped)]
    damaged += [(vault, b"N\0\1", wrapped[:cut]) for cut in (0, 11, 12, 27, len(wrapped) - 1)]
    damaged += [
        (vault, b"N\0\1", wrapped[:at] + b"\0\1\2" + wrapped[at + 3 :])
        for at in range(0, len(wrapped) - 3, 7)
    ]
    for other, row_key, value in damaged:
        with pytest.raises(InvalidRequest, match="damaged"):
            other.unwrap(row_key, value)


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [(0o644, "o-r"), (0o604, "o-r"), (0o602, "o-w"), (0o420, "g-w"), (0o666, "g-w,o-rw")],
)
def test_key_file_open_to_others_is_refused(tmp_path: Path, mode: int, remedy: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"encrypt_key_file=.* is open to others .*{mode:04o}\); chmod {remedy} /",
    ):
        open_vault(key_file(tmp_path / "key", mode=mode), "")


def test_pipe_as_key_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    messages: list[str] = []

    def opening() -> None:
        try:
            open_vault(str(tmp_path / "pipe"), "")
        except ConfigError as error:
            messages.append(str(error))

    thread = threading.Thread(target=opening, daemon=True)
    thread.start()
    thread.join(30.0)
    assert messages == [f"encrypt_key_file={tmp_path}/pipe is no regular file"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a key of 0 bytes"),
        ("no key at all!", "neither hex nor base64"),
        (KEY.hex()[2:], "a key of 31 bytes"),
        (KEY.hex() + "00", "a key of 33 bytes"),
        ("00" * 32, "one byte again and again"),
        ("ab" * 10_000, "has more than 4096 bytes|neither hex nor base64"),
    ],
)
def test_invalid_key_is_refused_and_not_shown(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    for refused in ((str(path), ""), ("", f"cat {path}")):
        with pytest.raises(ConfigError, match=why) as raised:
            open_vault(*refused)
        assert not text or text not in str(raised.value)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("false", "ended with status 1"),
        ("sleep 30", "did not end in 0.2 s"),
        ("/no/such/command", "can not be run"),
        ("cat 'unclosed", "can not be run"),
        ("true", "a key of 0 bytes"),
    ],
)
def test_failing_command_is_reported_without_its_output(
    monkeypatch: pytest.MonkeyPatch, command: str, why: str
) -> None:
    monkeypatch.setattr(encryption, "COMMAND_S", 0.2 if "sleep" in command else 30.0)
    with pytest.raises(ConfigError, match=why):
        open_vault("", command)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can not be read: No such file"):
        open_vault(str(tmp_path / "none"), "")


def test_two_keys_or_a_key_without_directory_are_refused() -> None:
    with pytest.raises(ConfigError, match="both given"):
        NodeConfig(data_dir="x", encrypt_key_file="a", encrypt_key_command="b")
    with pytest.raises(ConfigError, match="data_dir is empty"):
        NodeConfig(encrypt_key_file="a")


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (KEY, None, "is encrypted with key .*encrypt_key_file"),
        (None, KEY, "was made without encryption; start without"),
        (KEY, OTHER_KEY, "is encrypted with key .*, the key given is"),
    ],
)
def test_directory_opens_only_with_its_own_key(
    nodes: Nodes, pages: Pages, tmp_path: Path, first: bytes | None, then: bytes | None, why: str
) -> None:
    def settings(key: bytes | None) -> dict[str, str]:
        return {"encrypt_key_file": key_file(tmp_path / "key", key)} if key else {}

    node = nodes.start(**settings(first))
    pages.put(nodes.connect(node), pages.keys(1, 2), durable=True)
    nodes.stop(node)
    with pytest.raises(ConfigError, match=f"data_dir {why}"):
        nodes.start(**settings(then))
    node = nodes.start(**settings(first))
    assert pages.get(nodes.connect(node), pages.keys(1, 2)) == [True, True]


@pytest.mark.parametrize("command", ["yes", "cat /dev/zero"])
def test_command_with_endless_output_is_killed_at_once(command: str) -> None:
    """Regression: its output was read without a limit for 30 s."""
    with pytest.raises(ConfigError, match="has more than 4096 bytes"):
        open_vault("", command)
