"""Files of certificates: what is wrong with them is said with its remedy, and what was good stays in force."""

import datetime
import ipaddress
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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvstore import Client, ClientConfig, ConfigError, Unavailable
from kvstore.certificates import OutOfDate, PemFiles, names_end_early, validity
from kvstore.cli.authority import Authority
from kvstore.wires.tls import ClientTls


class Placed:
    """Copies of an authority's files, which a test may spoil."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "cert.key"))
        self.place(authority)
        self.files = PemFiles(str(self.ca), str(self.cert), str(self.key))

    def place(self, authority: Authority, name: str = "node") -> None:
        shutil.copy(authority.path, self.ca)
        for source, target in zip(pair(authority, name).values(), (self.cert, self.key), strict=True):
            shutil.copy(source, target)  # with its mode


@pytest.fixture
def placed(tmp_path: Path, ours: Authority) -> Placed:
    return Placed(tmp_path, ours)


@pytest.mark.parametrize("days", [1.0, 365.0 * 40])  # DER has two forms of a time, before 2050 and from then on
def test_when_a_certificate_is_valid(tmp_path: Path, days: float) -> None:
    made = Authority.found(tmp_path, "name", days)
    known = x509.load_pem_x509_certificate(made.path.read_bytes())
    utc = datetime.timezone.utc
    expected = [
        time.replace(tzinfo=utc).timestamp() for time in (known.not_valid_before_utc, known.not_valid_after_utc)
    ]
    assert list(validity(made.path.read_bytes())) == expected


@pytest.mark.parametrize("junk", [b"", b"AAAA", b"MAA=", b"MIIBIg=="])
def test_what_is_no_certificate_has_no_dates(junk: bytes) -> None:
    with pytest.raises(ConfigError, match="can not be read"):
        validity(b"-----BEGIN CERTIFICATE-----\n" + junk + b"\n-----END CERTIFICATE-----\n")


UTF8, BMP, UNIVERSAL = (
    x509.name._ASN1Type.UTF8String,
    x509.name._ASN1Type.BMPString,
    x509.name._ASN1Type.UniversalString,
)


@pytest.mark.parametrize("form", [UTF8, BMP, UNIVERSAL])
@pytest.mark.parametrize(
    ("common", "alternatives", "early"),
    [
        ("admin", [x509.DNSName("admin.example"), x509.IPAddress(ipaddress.ip_address("10.0.0.1"))], False),
        ("admin\0.example", [], True),
        ("admin", [x509.DNSName("admin\0.example")], True),
        ("admin", [x509.UniformResourceIdentifier("spiffe://admin\0.example")], True),
    ],
)
def test_a_name_with_a_nul_is_seen(common: str, alternatives: Any, early: bool, form: Any) -> None:
    key, begins = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(2026, 1, 1)
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common, form)])
    made = x509.CertificateBuilder(named, named, key.public_key(), 1, begins, begins + datetime.timedelta(days=1))
    if alternatives:
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert names_end_early(pem) is early


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
    "no key": (lambda placed, _: placed.key.unlink(), r"tls_key=.*cert\.key can not be read: No such file"),
    "no authority": (lambda placed, _: placed.ca.unlink(), r"tls_ca=.*ca\.pem can not be read: No such file"),
    "a folder": (lambda placed, _: (placed.ca.unlink(), placed.ca.mkdir()), r"tls_ca=.*ca\.pem is no regular file"),
    "another key": (swap_key, r"tls_key=.*cert\.key is not the key of the certificate in tls_cert=.*made together"),
    "half a certificate": (
        lambda placed, _: cut(placed.cert),
        r"tls_cert=.*cert\.pem holds no certificate in PEM form",
    ),
    "half a key": (lambda placed, _: cut(placed.key), r"tls_key=.*cert\.key: no certificates and key in PEM form"),
    "no certificate inside": (lambda placed, _: garble(placed.cert), r"tls_cert=.*|a certificate that can not be read"),
    "key and certificate changed over": (lambda placed, _: os.replace(placed.key, placed.cert), "No such file|PEM"),
    "encrypted": (lambda placed, _: encrypt(placed.key), r"tls_key=.*cert\.key is encrypted, .* write it without"),
    "open": (
        lambda placed, _: placed.key.chmod(0o644),
        r"tls_key=.* is open to others .*mode 0644.*chmod o-r .*key, or, of a Kubernetes secret, defaultMode: 0400",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_and_what_was_good_stays(
    placed: Placed, strangers: Authority, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    good = placed.files.look()
    spoil, said = WRONG[wrong]
    time.sleep(0.02)  # a change within a tick of the file system's clock is none
    spoil(placed, strangers)
    with pytest.raises(ConfigError, match=said) as failed:
        PemFiles(str(placed.ca), str(placed.cert), str(placed.key)).look()
    assert not isinstance(failed.value, OutOfDate)
    for _ in range(3):
        assert placed.files.look() is good
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # said once, not at each look
    assert "what was read before stays in force" in warnings[0].getMessage()
    assert placed.files.problem


def test_nothing_of_a_key_is_in_what_is_said(placed: Placed) -> None:
    secret = placed.key.read_text().splitlines()[1]
    assert secret not in repr(placed.files.look())
    cut(placed.key)
    with pytest.raises(ConfigError) as failed:
        PemFiles(str(placed.ca), str(placed.cert), str(placed.key)).look()
    assert secret[:20] not in str(failed.value)


def test_a_key_that_the_group_can_read_is_warned_of(placed: Placed, caplog: pytest.LogCaptureFixture) -> None:
    placed.key.chmod(0o640)
    placed.files.look()
    assert "is open to its group (mode 0640); chmod 600" in caplog.text


def test_a_key_of_another_user_may_be_lent_to_our_group_for_reading(
    placed: Placed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a secret's files are, root's and mode 0440 by fsGroup: there is no other way to read them."""
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(placed.key).st_uid + 1)
    placed.key.chmod(0o440)
    placed.files.look()
    assert "open to its group" not in caplog.text
    placed.key.chmod(0o460)
    placed.files.look()
    assert "is open to its group (mode 0460)" in caplog.text


def test_files_are_taken_anew_when_they_change_and_not_before(placed: Placed, ours: Authority) -> None:
    first = placed.files.look()
    assert placed.files.look() is first
    placed.place(ours, "client")
    second = placed.files.look()
    assert second.chain != first.chain
    assert placed.files.problem == ""


def test_a_rotation_seen_half_way_is_taken_when_it_is_whole(placed: Placed, ours: Authority) -> None:
    first = placed.files.look()
    certificate, key = pair(ours, "client").values()
    shutil.copy(certificate, placed.cert)
    assert placed.files.look() is first
    shutil.copy(key, placed.key)
    assert placed.files.look().chain != first.chain
    assert placed.files.problem == ""


def test_a_key_made_private_is_taken_although_its_bytes_are_the_same(placed: Placed) -> None:
    placed.key.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        placed.files.look()
    placed.key.chmod(0o600)
    assert placed.files.look().key


def test_certificates_out_of_their_time(placed: Placed, ours: Authority) -> None:
    good = placed.files.look()
    for days, since_days, said in (
        (-1.0, 2.0, "tls_cert=.* expired on .*; renew it, or set this host's clock"),
        (3.0, -2.0, "tls_cert=.* is valid from .* on, and this host's clock says .*; set it"),
    ):
        ours.node("dated", HERE, days, force=True, since_days=since_days)
        placed.place(ours, "dated")
        with pytest.raises(OutOfDate, match=said):
            PemFiles(str(placed.ca), str(placed.cert), str(placed.key)).look()
        assert placed.files.look() is good


def test_the_authority_whose_time_is_up_first_is_told(placed: Placed, tmp_path: Path) -> None:
    short = Authority.found(tmp_path / "short", "short", 1.0)
    placed.ca.write_bytes(b"# names in UTF-8: \xc3\xa9\n" + placed.ca.read_bytes() + short.path.read_bytes())
    pems = placed.files.look()
    assert pems.roots_end == validity(short.path.read_bytes())[1] < pems.ends
    context = pems.into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    assert context.cert_store_stats()["x509_ca"] == 2


def test_the_systems_authorities(ours: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.path))
    assert PemFiles("system", "", "").look().roots.split() == ours.path.read_bytes().split()
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    with pytest.raises(ConfigError, match="tls_ca=system: this host has no file of authorities"):
        PemFiles("system", "", "").look()


def test_a_client_with_files_that_can_not_work_does_not_start(placed: Placed, strangers: Authority) -> None:
    swap_key(placed, strangers)
    settings = {"tls_ca": str(placed.ca), "tls_cert": str(placed.cert), "tls_key": str(placed.key)}
    with pytest.raises(ConfigError, match="made together"):
        Client(ClientConfig(**settings))


def test_an_expired_client_certificate_is_a_miss_and_no_end_of_an_engine(placed: Placed, ours: Authority) -> None:
    ours.node("dated", HERE, -1.0, force=True, since_days=2.0)
    placed.place(ours, "dated")
    config = ClientConfig(tls_ca=str(placed.ca), tls_cert=str(placed.cert), tls_key=str(placed.key))
    with Client(config) as client, pytest.raises(Unavailable, match=r"tls_cert=.* expired on .*; renew it"):
        client.node_status()
    placed.place(ours)
    assert ClientTls(config, "localhost").pems().ends > 0


@pytest.mark.parametrize(
    "settings",
    [{"tls_cert": "a"}, {"tls_key": "a", "tls_ca": "b"}, {"tls_name": "n"}, {"tls_cert": "a", "tls_key": "b"}],
)
def test_settings_that_do_not_go_together(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="tls_cert and tls_key are given together; they and tls_name need tls_ca"):
        ClientConfig(**settings)
