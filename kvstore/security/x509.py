"""Read fields of certificates: dates and names.

For nodes and the command line. An engine's environment has no `cryptography`: `import kvstore` and
the transports must not import this file.
"""

import time

from cryptography import x509

from kvstore.errors import ConfigError
from kvstore.security.certificates import date

_UNREADABLE = (
    ValueError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


def check_dates(file: str, pem: bytes) -> None:
    """Raise ConfigError if the first of the certificates has expired or is not valid yet.

    `file`: its name in the error.
    """
    (begins, ends), now = validity(pem), time.time()
    if now >= ends:
        raise ConfigError(
            f"{file} expired on {date(ends)}; renew it, or set this host's clock, which says "
            f"{date(now)}"
        )
    if now < begins:
        raise ConfigError(
            f"{file} is valid from {date(begins)} on, and this host's clock says {date(now)}; set "
            "it"
        )


def validity(pem: bytes) -> tuple[float, float]:
    """Return when the last of the certificates becomes valid and the first expires, in Unix time.

    Raises ConfigError.
    """
    return _validity(_parsed(pem))


def first_expiry(pem: bytes) -> float:
    """Return when the first of several certificates expires, in seconds of Unix time.

    Raises ConfigError.
    """
    try:
        return min(
            _validity(certificate)[1] for certificate in x509.load_pem_x509_certificates(pem)
        )
    except _UNREADABLE as error:
        raise ConfigError(f"a certificate that can not be read: {error}") from error


def hosts(pem: bytes) -> list[str]:
    """Return the DNS names and addresses that a certificate is for.

    Raises ConfigError.
    """
    named = (x509.DNSName, x509.IPAddress)
    try:
        return [str(name.value) for name in _alternatives(_parsed(pem)) if isinstance(name, named)]
    except _UNREADABLE as error:
        raise ConfigError(f"a certificate that can not be read: {error}") from error


def names_end_early(pem: bytes) -> bool:
    r"""Return whether a name in a certificate contains a NUL.

    gRPC ends a name there: `admin\0.example` would be `admin`. True also for a certificate that
    can not be read.
    """
    try:
        certificate = _parsed(pem)
        fields = [*certificate.subject, *_alternatives(certificate)]
    except (*_UNREADABLE, ConfigError):
        return True
    return any(isinstance(field.value, str) and "\0" in field.value for field in fields)


def _parsed(pem: bytes) -> x509.Certificate:
    """Parse the first certificate.

    Raises ConfigError.
    """
    try:
        return x509.load_pem_x509_certificate(pem)
    except _UNREADABLE as error:
        raise ConfigError(f"a certificate that can not be read: {error}") from error


def _validity(certificate: x509.Certificate) -> tuple[float, float]:
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def _alternatives(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the alternative names.

    Raises what is in `_UNREADABLE`.
    """
    try:
        return list(
            certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except x509.ExtensionNotFound:
        return []
