"""Keep a certificate authority in a folder, for development and small deployments.

Keys are on P-256, files in PEM form:

    ca.pem  ca.key        the authority: give ca.pem to everybody, ca.key to nobody
    NAME.pem  NAME.key    a certificate that it signed; only the owner may read the key's file
"""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.errors import ConfigError
from kvstore.security.secrets import write_whole

CA = "ca"
EARLIER = datetime.timedelta(minutes=5)  # certificates are valid from this long ago: clocks differ
NAME_LENGTH_MAX = 64  # X.509's limit for a common name
USAGES = (
    *(
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
    ),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """A certificate authority's certificate and key; `found` makes them and `open` reads them.

    Raises ConfigError for a folder or files that can not be used.
    """

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: Any, file: str = CA
    ) -> None:
        self._folder, self.certificate, self._key = folder, certificate, key
        self.path = folder / f"{file}.pem"

    @classmethod
    def found(
        cls, folder: Path, name: str, days: float, force: bool = False, file: str = CA
    ) -> "Authority":
        """Found a new authority and write its certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = _usage(key_cert_sign=True, crl_sign=True)
        made = (
            _builder(_name(name), _name(name), key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _write(folder, file, made, key, force)
        return cls(folder, made, key, file)

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """Open an authority by its files. Raises ConfigError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / f"{CA}.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; make an authority first: kvstore certs ca"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{folder}: {CA}.pem and {CA}.key are no certificate and key in PEM form"
            ) from error
        if key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder}: {CA}.key is not the key of {CA}.pem")
        return cls(folder, certificate, key)

    def node(
        self,
        file: str,
        hosts: Sequence[str],
        days: float,
        force: bool = False,
        since_days: float = 0.0,
    ) -> tuple[Path, Path]:
        """Issue a node's certificate for these hosts; return (certificate, key) paths.

        The first host is the common name. The certificate also serves as a client certificate, for
        calls to other members. `since_days`: for how long it has been valid already.
        """
        alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
        made = self._issue(hosts[0], days, since_days, [_SERVER, _CLIENT], alternatives)
        return _write(self._folder, file, *made, force)

    def client(self, file: str, name: str, days: float, force: bool = False) -> tuple[Path, Path]:
        """Issue a client's certificate; return (certificate, key) paths."""
        return _write(self._folder, file, *self._issue(name, days, 0.0, [_CLIENT]), force)

    def _issue(
        self,
        name: str,
        days: float,
        since_days: float,
        uses: list[x509.ObjectIdentifier],
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> tuple[x509.Certificate, Any]:
        # Clients would take it for a self-signed certificate and refuse it.
        if _name(name) == self.certificate.subject:
            raise ConfigError(f"{name!r} is the name of the authority itself; choose another")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(name), self.certificate.subject, key.public_key(), days, since_days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256()), key


def hosts_of(path: Path) -> list[str]:
    """Return the names and addresses in a node's certificate. Raises ConfigError."""
    try:
        extensions = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        hosts = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no certificate in PEM form") from error
    return [str(host.value) for host in hosts]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    since_days: float = 0.0,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER - datetime.timedelta(days=since_days))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(**granted: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: granted.get(name, False) for name in USAGES})


def _name(name: str) -> x509.Name:
    if not 0 < len(name) <= NAME_LENGTH_MAX:
        raise ConfigError(
            f"name {name!r} has {len(name)} characters; a certificate's name has 1 to "
            f"{NAME_LENGTH_MAX}"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is neither a host's name in ASCII nor an address") from error


def _write(
    folder: Path, file: str, certificate: x509.Certificate, key: Any, force: bool
) -> tuple[Path, Path]:
    """Write key and certificate; only the owner can ever read the key's file."""
    if not _FILE.fullmatch(file):
        raise ConfigError(f"{file!r} is no name of a file; use letters, digits, '.', '_' and '-'")
    paths = folder / f"{file}.pem", folder / f"{file}.key"
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise ConfigError(f"{there[0]} exists already; --force replaces it")
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(paths[1], secret, 0o600)
        write_whole(paths[0], certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return paths
