"""Guarded files, such as keys: required modes and types, checked on the opened file."""

import os
import stat
from pathlib import Path

import pytest

from kvstore.config import ClientConfig
from kvstore.errors import ConfigError
from kvstore.security.secrets import (
    check_stays_private,
    checked_stat,
    read_guarded,
    stamp,
    token_of,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a=file"
    made.write_bytes(b"12345678")
    made.chmod(0o640)
    return made


def test_file_over_the_limit_is_refused(path: Path) -> None:
    assert read_guarded(f"setting={path}", stat.S_IRWXO, 8) == b"12345678"
    with pytest.raises(ConfigError, match=r"^setting=.*/a=file has more than 7 bytes$"):
        read_guarded(f"setting={path}", stat.S_IRWXO, 7)


@pytest.mark.parametrize(
    ("mode", "forbidden", "message"),
    [
        (0o644, stat.S_IROTH, r"\(mode 0644\); chmod o-r /.*/a=file, or"),
        (0o777, stat.S_IWOTH, r"\(mode 0777\); chmod o-w /"),
        (0o467, stat.S_IRWXO | stat.S_IWGRP, r"\(mode 0467\); chmod g-w,o-rwx /"),
    ],
)
def test_file_readable_for_others_is_refused_with_the_remedy(
    path: Path, mode: int, forbidden: int, message: str
) -> None:
    path.chmod(mode)
    for look in (
        lambda: checked_stat(f"setting={path}", forbidden),
        lambda: read_guarded(f"setting={path}", forbidden, 8),
    ):
        with pytest.raises(ConfigError, match=f"^setting=.* is open to others {message}"):
            look()


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe with a writer could be read; without one, opening it could block for ever."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        os.write(writer, b"secret")
        for file in (f"setting={tmp_path}/pipe", "setting=/dev/zero"):
            with pytest.raises(ConfigError, match=f"^{file} is no regular file$"):
                read_guarded(file, stat.S_IXOTH, 8)
    finally:
        os.close(writer)
    for file, message in (
        (f"setting={tmp_path}", "Is a directory"),
        (f"setting={tmp_path}/none", "No such file"),
    ):
        with pytest.raises(ConfigError, match=f"^{file} can not be read: {message}"):
            read_guarded(file, 0, 8)


def test_stamp_changes_when_the_file_is_replaced(path: Path) -> None:
    def now() -> tuple[int, ...]:
        return stamp(checked_stat(f"setting={path}"))

    before = now()
    assert now() == before
    os.replace(path, path.with_name("b"))
    path.write_bytes(b"12345678")
    assert now() != before


def test_token_file_readable_for_others_is_refused(path: Path) -> None:
    assert token_of(ClientConfig(token_file=str(path))) == "12345678"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        token_of(ClientConfig(token_file=str(path)))


def test_token_leaves_this_host_only_encrypted_by_every_address() -> None:
    """A name may have an address of this host and another one."""
    check_stays_private("t", ClientConfig(), ["127.0.0.1", "::1"])
    for addresses in (["127.0.0.1", "10.0.0.5"], ["10.0.0.5"]):
        with pytest.raises(ConfigError, match="unencrypted"):
            check_stays_private("t", ClientConfig(), addresses)
        check_stays_private("t", ClientConfig(insecure=True), addresses)
    check_stays_private("", ClientConfig(), ["10.0.0.5"])
