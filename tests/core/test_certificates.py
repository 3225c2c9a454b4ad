"""Certificate files: an error names the cause and the remedy, and good content stays in force."""

import logging
import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authorities import HERE, pair

from kvstore import Client, ClientConfig, ConfigError
from kvstore.cli.authority import Authority
from kvstore.security.certificates import PemFiles, Pems
from kvstore.security.x509 import first_expiry, validity


class Placed:
    """Copies of an authority's files, which a test may damage."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.ca, self.cert, self.key = (
            folder / name for name in ("ca.pem", "cert.pem", "cert.key")
        )
        self.place(authority)
        self.files = PemFiles(str(self.ca), str(self.cert), str(self.key))

    def place(self, authority: Authority, name: str = "node") -> None:
        shutil.copy(authority.path, self.ca)
        for source, target in zip(
            pair(authority, name).values(), (self.cert, self.key), strict=True
        ):
            shutil.copy(source, target)  # with its mode


@pytest.fixture
def placed(tmp_path: Path, ours: Authority) -> Placed:
    return Placed(tmp_path, ours)


def swap_key(placed: Placed, strangers: Authority) -> None:
    shutil.copy(pair(strangers, "node")["tls_key"], placed.key)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def encrypt(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"PRIVATE KEY", b"ENCRYPTED PRIVATE KEY"))


def garble(path: Path) -> None:
    path.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


WRONG: dict[str, tuple[Callable[[Placed, Authority], object], str]] = {
    "no certificate": (
        lambda placed, _: placed.cert.unlink(),
        r"tls_cert=.*cert\.pem can not be read: No such file",
    ),
    "no key": (
        lambda placed, _: placed.key.unlink(),
        r"tls_key=.*cert\.key can not be read: No such file",
    ),
    "no authority": (
        lambda placed, _: placed.ca.unlink(),
        r"tls_ca=.*ca\.pem can not be read: No such file",
    ),
    "a folder": (
        lambda placed, _: (placed.ca.unlink(), placed.ca.mkdir()),
        r"tls_ca=.*ca\.pem is no regular file",
    ),
    "another key": (
        swap_key,
        r"tls_key=.*cert\.key is not the key of the certificate in tls_cert=.*made together",
    ),
    "half a certificate": (
        lambda placed, _: cut(placed.cert),
        r"tls_cert=.*cert\.pem holds no certificate in PEM form",
    ),
    "half a key": (
        lambda placed, _: cut(placed.key),
        r"tls_key=.*cert\.key: no certificates and key in PEM form",
    ),
    "no certificate inside": (
        lambda placed, _: garble(placed.cert),
        r"tls_cert=.*|a certificate that can not be read",
    ),
    "key and certificate changed over": (
        lambda placed, _: os.replace(placed.key, placed.cert),
        "No such file|PEM",
    ),
    "encrypted": (
        lambda placed, _: encrypt(placed.key),
        r"tls_key=.*cert\.key is encrypted, .* write it without",
    ),
    "open": (
        lambda placed, _: placed.key.chmod(0o644),
        r"tls_key=.* is open to others .*mode 0644.*chmod o-r .*key, or, of a Kubernetes secret, "
        r"defaultMode: 0400",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_certificate_is_reported_and_the_old_one_stays(
    placed: Placed, strangers: Authority, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    good = placed.files.poll()
    spoil, message = WRONG[wrong]
    time.sleep(0.02)  # a change within a tick of the file system's clock is not seen
    spoil(placed, strangers)
    with pytest.raises(ConfigError, match=message):
        PemFiles(str(placed.ca), str(placed.cert), str(placed.key)).poll()
    for _ in range(3):
        assert placed.files.poll() is good
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # logged once, not at each poll
    assert "the previous content stays in force" in warnings[0].getMessage()
    assert placed.files.problem


def test_private_key_is_not_in_messages(placed: Placed) -> None:
    secret = placed.key.read_text().splitlines()[1]
    assert secret not in repr(placed.files.poll())
    cut(placed.key)
    with pytest.raises(ConfigError) as failed:
        PemFiles(str(placed.ca), str(placed.cert), str(placed.key)).poll()
    assert secret[:20] not in str(failed.value)


def test_group_readable_key_is_logged(placed: Placed, caplog: pytest.LogCaptureFixture) -> None:
    placed.key.chmod(0o640)
    placed.files.poll()
    assert "is open to its group (mode 0640); chmod 600" in caplog.text


def test_group_readable_key_of_another_user_is_accepted(
    placed: Placed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes secrets belong to root with mode 0440 by fsGroup, and can be read only so."""
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(placed.key).st_uid + 1)
    placed.key.chmod(0o440)
    placed.files.poll()
    assert "open to its group" not in caplog.text
    placed.key.chmod(0o460)
    placed.files.poll()
    assert "is open to its group (mode 0460)" in caplog.text


def test_files_are_read_again_only_when_they_change(placed: Placed, ours: Authority) -> None:
    first = placed.files.poll()
    assert placed.files.poll() is first
    placed.place(ours, "client")
    second = placed.files.poll()
    assert second.chain != first.chain
    assert placed.files.problem == ""


def test_half_done_rotation_is_used_once_complete(placed: Placed, ours: Authority) -> None:
    first = placed.files.poll()
    certificate, key = pair(ours, "client").values()
    shutil.copy(certificate, placed.cert)
    assert placed.files.poll() is first
    shutil.copy(key, placed.key)
    assert placed.files.poll().chain != first.chain
    assert placed.files.problem == ""


def test_key_is_read_again_when_only_its_mode_changed(placed: Placed) -> None:
    placed.key.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        placed.files.poll()
    placed.key.chmod(0o600)
    assert placed.files.poll().key


def test_content_that_fails_the_check_is_not_used(placed: Placed, ours: Authority) -> None:
    shown = list[bytes]()

    def check(pems: Pems) -> None:
        shown.append(pems.chain)
        if len(shown) > 1:
            raise ConfigError("the second is refused")

    files = PemFiles(str(placed.ca), str(placed.cert), str(placed.key), check=check)
    good = files.poll()
    placed.place(ours, "client")
    assert files.poll() is good
    assert files.problem == "the second is refused"
    assert shown[0] == good.chain != shown[1]


def test_several_authorities_are_all_trusted(placed: Placed, tmp_path: Path) -> None:
    other = Authority.found(tmp_path / "other", "other", 1.0)
    placed.ca.write_bytes(
        b"# names in UTF-8: \xc3\xa9\n" + placed.ca.read_bytes() + other.path.read_bytes()
    )
    pems = placed.files.poll()
    assert (
        first_expiry(pems.roots) == validity(other.path.read_bytes())[1] < validity(pems.chain)[1]
    )
    context = pems.into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    assert context.cert_store_stats()["x509_ca"] == 2


def test_system_authorities_are_used(
    ours: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.path))
    assert PemFiles("system", "", "").poll().roots.split() == ours.path.read_bytes().split()
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    with pytest.raises(ConfigError, match="tls_ca=system: this host has no file of authorities"):
        PemFiles("system", "", "").poll()


def test_client_with_mismatched_files_does_not_start(placed: Placed, strangers: Authority) -> None:
    swap_key(placed, strangers)
    settings: dict[str, Any] = {
        "tls_ca": str(placed.ca),
        "tls_cert": str(placed.cert),
        "tls_key": str(placed.key),
    }
    with pytest.raises(ConfigError, match="made together"):
        Client(ClientConfig(**settings))


def test_client_starts_with_an_expired_certificate(placed: Placed, ours: Authority) -> None:
    """The node refuses the certificate at a call, and it may be renewed before."""
    ours.node("dated", HERE, -1.0, force=True, since_days=2.0)
    placed.place(ours, "dated")
    with Client(
        ClientConfig(tls_ca=str(placed.ca), tls_cert=str(placed.cert), tls_key=str(placed.key))
    ):
        pass


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_cert": "a"},
        {"tls_key": "a", "tls_ca": "b"},
        {"tls_name": "n"},
        {"tls_cert": "a", "tls_key": "b"},
    ],
)
def test_conflicting_tls_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="tls_cert and tls_key are given together; they and tls_name need tls_ca"
    ):
        ClientConfig(**settings)
