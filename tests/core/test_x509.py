"""Fields of certificates: dates, names, and unreadable certificates."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from authorities import HERE, pair
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvstore import ConfigError
from kvstore.cli.authority import Authority
from kvstore.security.x509 import check_dates, first_expiry, hosts, names_end_early, validity

UTF8, BMP, UNIVERSAL = (
    x509.name._ASN1Type.UTF8String,
    x509.name._ASN1Type.BMPString,
    x509.name._ASN1Type.UniversalString,
)
BEGINS = datetime.datetime(2026, 1, 1)


def made(
    common: str = "name",
    alternatives: Sequence[x509.GeneralName] = (),
    form: Any = UTF8,
    ends: datetime.datetime = BEGINS + datetime.timedelta(days=1),
    extra: x509.ExtensionType | None = None,
) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common, form)])
    builder = x509.CertificateBuilder(named, named, key.public_key(), 1, BEGINS, ends)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    if extra is not None:
        builder = builder.add_extension(extra, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# DER has two time formats: one before 2050, another from then on
@pytest.mark.parametrize("year", [2049, 2050])
def test_dates_are_seconds_of_unix_time(year: int) -> None:
    utc = datetime.timezone.utc
    ends = datetime.datetime(year, 12, 31, 23, 59, 58)
    assert validity(made(ends=ends)) == (
        BEGINS.replace(tzinfo=utc).timestamp(),
        ends.replace(tzinfo=utc).timestamp(),
    )


def test_validity_of_a_chain_is_that_of_its_first_certificate() -> None:
    later, sooner = (
        made(ends=datetime.datetime(2040, 1, 1)),
        made(ends=datetime.datetime(2030, 1, 1)),
    )
    assert validity(later + sooner) == validity(later)
    assert first_expiry(later + sooner) == validity(sooner)[1]


def test_certificate_outside_its_dates_is_refused_with_the_remedy(ours: Authority) -> None:
    for days, since_days, message in (
        (-1.0, 2.0, "tls_cert=x expired on .*; renew it, or set this host's clock, which says "),
        (3.0, -2.0, "tls_cert=x is valid from .* on, and this host's clock says .*; set it"),
    ):
        ours.node("dated", HERE, days, force=True, since_days=since_days)
        with pytest.raises(ConfigError, match=message):
            check_dates("tls_cert=x", Path(pair(ours, "dated")["tls_cert"]).read_bytes())
    check_dates("tls_cert=x", Path(pair(ours, "node")["tls_cert"]).read_bytes())


@pytest.mark.parametrize("junk", [b"", b"AAAA", b"MAA=", b"MIIBIg=="])
def test_invalid_certificate_has_neither_dates_nor_names(junk: bytes) -> None:
    pem = b"-----BEGIN CERTIFICATE-----\n" + junk + b"\n-----END CERTIFICATE-----\n"
    for read in (validity, first_expiry, hosts):
        with pytest.raises(ConfigError, match="can not be read"):
            read(pem)
    assert names_end_early(pem)


def test_unreadable_alternative_names_are_refused() -> None:
    garbage = x509.UnrecognizedExtension(x509.OID_SUBJECT_ALTERNATIVE_NAME, b"\x30\x03\x82\x7fx")
    pem = made(extra=garbage)
    assert names_end_early(pem)
    with pytest.raises(ConfigError, match="can not be read"):
        hosts(pem)


@pytest.mark.parametrize("form", [UTF8, BMP, UNIVERSAL])
@pytest.mark.parametrize(
    ("common", "alternatives", "early"),
    [
        (
            "admin",
            [x509.DNSName("admin.example"), x509.IPAddress(ipaddress.ip_address("10.0.0.1"))],
            False,
        ),
        ("admin\0.example", [], True),
        ("admin", [x509.DNSName("admin\0.example")], True),
        ("admin", [x509.UniformResourceIdentifier("spiffe://admin\0.example")], True),
        (
            "admin",
            [x509.RegisteredID(x509.NameOID.COMMON_NAME), x509.RFC822Name("admin\0@example")],
            True,
        ),
        (
            "admin",
            [x509.OtherName(x509.NameOID.COMMON_NAME, b"\x0c\x01\0"), x509.DNSName("admin")],
            False,
        ),
    ],
)
def test_name_with_a_nul_is_detected(
    common: str, alternatives: Any, early: bool, form: Any
) -> None:
    assert names_end_early(made(common, alternatives, form)) is early


def test_names_of_certificates(ours: Authority) -> None:
    assert hosts(Path(pair(ours, "node")["tls_cert"]).read_bytes()) == [
        "localhost",
        "127.0.0.1",
        "::1",
    ]
    assert hosts(ours.path.read_bytes()) == []
