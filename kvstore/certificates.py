"""PEM files of certificates and keys: read together, checked whole, and read again when they have changed.

authorities    whose certificates of the other side are believed
certificate    what this side shows: its own first, then those between it and its authority
key            of that certificate; nobody but its owner may read it
"""

import datetime
import ipaddress
import logging
import os
import re
import ssl
import stat
import threading
import time
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.guarded_file import look_at, path_of, read_guarded, stamp
from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

FILE_NBYTES_MAX = 16 << 20
NEAR_END_S = 7 * 24 * 3600.0  # so long before a certificate's time is up it is warned of
SYSTEM = "system"  # in place of a file of authorities: those that this host believes
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
PAIR_TRIES, PAIR_S = 5, 0.05
_OTHERS = stat.S_IRWXO
_UTC_TIME = 0x17  # DER's tag of a time with two digits of the year
_VERSION = 0xA0  # and of a field that not every certificate has
_VALIDITY = 3  # place of a certificate's dates among its other fields; the next is whose it is
_EXTENSIONS = 0xA3
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_DNS_NAME, _IP_ADDRESS = 0x82, 0x87
_NO_TEXT = (0x06, 0x87, 0x88, 0xA0, 0xA3, 0xA4, 0xA5)  # in names: identifiers, addresses, what has parts
_WIDE = {0x1C: "utf-32-be", 0x1E: "utf-16-be"}


class OutOfDate(ConfigError):
    """A certificate that was valid, or will be: the files may be all right tomorrow."""


@dataclass(frozen=True)
class Pems:
    """What the files hold; empty: there is no such file. `ends`: of the certificate, `roots_end`: of the authority
    whose time is up first; in seconds of Unix time, 0: unknown."""

    roots: bytes = b""
    chain: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ends: float = 0.0
    roots_end: float = 0.0

    def into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """The context with all of it. Raises OSError for what does not belong together."""
        if self.roots:
            context.load_verify_locations(cadata=self.roots.decode("ascii"))
        if self.chain:
            fd = os.memfd_create("kvstore-certificate", os.MFD_CLOEXEC)  # OpenSSL takes files only
            try:
                with open(fd, "wb", closefd=False) as both:
                    both.write(self.key + b"\n" + self.chain)
                context.load_cert_chain(f"/proc/self/fd/{fd}", password="")  # nobody is asked for one
            finally:
                os.close(fd)
        return context


class _NoPair(ConfigError):
    """A key of another certificate."""


class PemFiles:
    """Of one side of a connection. `settings`: what the paths are called in its configuration. Thread-safe."""

    def __init__(
        self, ca: str, cert: str, key: str, settings: tuple[str, str, str] = ("tls_ca", "tls_cert", "tls_key")
    ) -> None:
        self._ca, self._cert, self._key = (
            f"{setting}={path}" if path else "" for setting, path in zip(settings, (ca, cert, key), strict=True)
        )
        self.problem = ""  # why what the files hold now is not in force
        self._looked_at = [
            file for file in (self._ca, self._cert, self._key) if file and not file.endswith(f"={SYSTEM}")
        ]
        self._lock = threading.Lock()
        self._good: Pems | None = None
        self._seen: list[tuple[int, ...]] | None = None

    def look(self) -> Pems:
        """What is in force: what the files hold, or what they held when they were last good, which the log says.
        Raises ConfigError, OutOfDate among them, if they never were."""
        with self._lock:
            try:
                seen = [stamp(look_at(file)) for file in self._looked_at]
                if self._good is None or seen != self._seen:
                    self._take(self._read() if self._good else self._read_pair())
                    self._seen = seen
            except ConfigError as error:
                self._refuse(error)
            assert self._good is not None
            return self._good

    def _take(self, pems: Pems) -> None:
        if self._good is not None and pems != self._good:
            until = f", valid until {date(pems.ends)}" if pems.ends else ""
            log.info("%s: taken anew%s", ", ".join(filter(None, (self._cert, self._ca))), until)
        self._good, self.problem = pems, ""

    def _refuse(self, error: ConfigError) -> None:
        if self._good is None:
            raise error
        if str(error) != self.problem:
            self.problem = str(error)
            log.warning("%s; what was read before stays in force", error)

    def _read(self) -> Pems:
        roots, chain = self._roots(), self._certificates(self._cert)
        key = self._private() if chain else b""
        begins, ends = validity(chain[0]) if chain else (0.0, 0.0)
        roots_end = min((validity(root)[1] for root in roots), default=0.0) if self._system is False else 0.0
        pems = Pems(b"\n".join(roots), b"\n".join(chain), key, ends, roots_end)
        try:
            pems.into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        except OSError as error:
            wrong = _NoPair if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH" else ConfigError
            raise wrong(self._meaning(error)) from error
        _check_dates(self._cert, begins, ends)
        return pems

    def _read_pair(self) -> Pems:
        """Two files are replaced one after the other: who comes between looks again, a moment later."""
        for _ in range(PAIR_TRIES - 1):
            try:
                return self._read()
            except _NoPair:
                time.sleep(PAIR_S)
        return self._read()

    @property
    def _system(self) -> bool:
        return self._ca.endswith("=" + SYSTEM)

    def _roots(self) -> list[bytes]:
        return system_roots() if self._system else self._certificates(self._ca)

    def _certificates(self, file: str) -> list[bytes]:
        if not file:
            return []
        found: list[bytes] = _CERTIFICATE.findall(read_guarded(file, 0, FILE_NBYTES_MAX))
        if not found:
            raise ConfigError(f"{file} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)")
        return found

    def _private(self) -> bytes:
        key, about = read_guarded(self._key, _OTHERS, FILE_NBYTES_MAX), look_at(self._key)
        mode = stat.S_IMODE(about.st_mode)
        lent = about.st_uid != os.geteuid() and not mode & (stat.S_IWGRP | stat.S_IXGRP)  # a secret's, by fsGroup
        if mode & stat.S_IRWXG and not lent:
            path = path_of(self._key)
            log.warning("%s is open to its group (mode %04o); chmod 600 %s", self._key, mode, path)
        if b"ENCRYPTED" in key:
            raise ConfigError(f"{self._key} is encrypted, and nobody can be asked for its passphrase; write it without")
        return key

    def _meaning(self, error: OSError) -> str:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            return f"{self._key} is not the key of the certificate in {self._cert}; name a pair that was made together"
        files = ", ".join(filter(None, (self._ca, self._cert, self._key)))
        return f"{files}: no certificates and key in PEM form that OpenSSL can use ({error})"


def _check_dates(file: str, begins: float, ends: float) -> None:
    now = time.time()
    if ends and now >= ends:
        raise OutOfDate(f"{file} expired on {date(ends)}; renew it, or set this host's clock, which says {date(now)}")
    if begins and now < begins:
        raise OutOfDate(f"{file} is valid from {date(begins)} on, and this host's clock says {date(now)}; set it")


def date(seconds: float) -> str:
    """1763870000.0 -> '2025-11-23 03:53:20 UTC'."""
    return f"{datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def system_roots() -> list[bytes]:
    """The authorities that this host believes, or SSL_CERT_FILE. Raises ConfigError."""
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    if not found:
        raise ConfigError("tls_ca=system: this host has no file of authorities; install ca-certificates, or name one")
    return [ssl.DER_cert_to_PEM_cert(der).strip().encode() for der in found]


def validity(pem: bytes) -> tuple[float, float]:
    """When a certificate's time begins and ends, in seconds of Unix time. Raises ConfigError for what is none."""
    try:
        begins, ends = (_seconds(tag, content) for tag, content in _parts(_fields(pem)[_VALIDITY][1]))
    except (ValueError, IndexError) as error:
        raise ConfigError(f"a certificate that can not be read: {error}") from error
    return begins, ends


def names_end_early(pem: bytes) -> bool:
    """Whether a name in a certificate has a NUL inside, at which gRPC ends it: `admin\\0.example` would be `admin`."""
    try:
        _, subject, *rest = _fields(pem)[_VALIDITY:]
        named = [pair for _, entry in _parts(subject[1]) for _, some in _parts(entry) for pair in _parts(some)]
        named += _alternatives(rest)
        return any("\0" in content.decode(_WIDE.get(tag, "latin-1")) for tag, content in named if tag not in _NO_TEXT)
    except (ValueError, IndexError):
        return True


def hosts(pem: bytes) -> list[str]:
    """Names and addresses by which the holder of a certificate may be called. Raises ConfigError for what is none."""
    try:
        named = _alternatives(_fields(pem)[_VALIDITY + 2 :])
        return [
            str(ipaddress.ip_address(content)) if tag == _IP_ADDRESS else content.decode("ascii")
            for tag, content in named
            if tag in (_DNS_NAME, _IP_ADDRESS)
        ]
    except (ValueError, IndexError) as error:
        raise ConfigError(f"a certificate that can not be read: {error}") from error


def _alternatives(fields: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The alternative names among what stands behind a certificate's subject."""
    named = []
    for _, extension in (some for tag, all_of_them in fields if tag == _EXTENSIONS for some in _in(all_of_them)):
        (_, kind), *_, (_, value) = _parts(extension)
        named += _in(value) if kind == _ALTERNATIVE_NAMES else []
    return named


def _fields(pem: bytes) -> list[tuple[int, bytes]]:
    """What is signed, from the serial number on."""
    signed = _parts(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))[0][1]
    return [part for part in _parts(_parts(signed)[0][1]) if part[0] != _VERSION]


def _in(der: bytes) -> list[tuple[int, bytes]]:
    """What is in a sequence."""
    return _parts(_parts(der)[0][1])


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of each value of DER that stand one behind the other."""
    found, at = [], 0
    while at < len(der):
        tag, nbytes, at = der[at], der[at + 1], at + 2
        if nbytes & 0x80:  # so many bytes have the length
            width = nbytes & 0x7F
            nbytes, at = int.from_bytes(der[at : at + width], "big"), at + width
        found.append((tag, der[at : at + nbytes]))
        at += nbytes
    return found


def _seconds(tag: int, text: bytes) -> float:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    when = datetime.datetime.strptime(text.decode("ascii"), form)
    if tag == _UTC_TIME and when.year >= 2050:  # X.509 counts them from 1950
        when = when.replace(year=when.year - 100)
    return when.replace(tzinfo=datetime.timezone.utc).timestamp()
