"""Read PEM files of certificates and keys, check them as a set, and reload them when they change.

authorities    certificates of the authorities that sign the peer's certificate
certificate    this side's own certificate, then its intermediate certificates
key            the key of that certificate; only its owner may read it
"""

import datetime
import logging
import os
import re
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.log_rate import LogRate
from kvstore.security.secrets import checked_stat, path_of, read_guarded, stamp

log = logging.getLogger(__name__)
log.addFilter(LogRate())

FILE_NBYTES_MAX = 16 << 20
LAST_S = 253_402_300_799  # the end of the year 9999, the last that datetime knows
NEAR_END_S = 7 * 24 * 3600.0  # expiry is logged from this long before the end of a certificate
SYSTEM = "system"  # instead of a file of authorities: those that this host trusts
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
PAIR_TRIES, PAIR_S = 5, 0.05
_OTHERS = stat.S_IRWXO


@dataclass(frozen=True)
class Pems:
    """Content of the files; empty for a file that does not exist."""

    roots: bytes = b""
    chain: bytes = b""
    key: bytes = field(default=b"", repr=False)

    def into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Load the authorities, the certificate and the key into a context and return it.

        Raises OSError if they do not belong together.
        """
        if self.roots:
            context.load_verify_locations(cadata=self.roots.decode("ascii"))
        if self.chain:
            fd = os.memfd_create("kvstore-certificate", os.MFD_CLOEXEC)  # OpenSSL takes files only
            try:
                with open(fd, "wb", closefd=False) as both:
                    both.write(self.key + b"\n" + self.chain)
                # An empty password, so that OpenSSL does not prompt for one.
                context.load_cert_chain(f"/proc/self/fd/{fd}", password="")
            finally:
                os.close(fd)
        return context


class _NoPair(ConfigError):
    """The key belongs to another certificate."""


class PemFiles:
    """Read the files of one side of a connection.

    Thread-safe.

    `settings`: names of the paths in the configuration. `check` raises ConfigError for content that
    must not be used. A client has no check: the standard library does not read validity dates, and
    the node checks them.
    """

    def __init__(
        self,
        ca: str,
        cert: str,
        key: str,
        settings: tuple[str, str, str] = ("tls_ca", "tls_cert", "tls_key"),
        check: Callable[[Pems], None] | None = None,
    ) -> None:
        self._check = check
        self._ca, self._cert, self._key = (
            f"{setting}={path}" if path else ""
            for setting, path in zip(settings, (ca, cert, key), strict=True)
        )
        self.problem = ""  # why the current content of the files is not used
        self._looked_at = [
            file
            for file in (self._ca, self._cert, self._key)
            if file and not file.endswith(f"={SYSTEM}")
        ]
        self._lock = threading.Lock()
        self._good: Pems | None = None
        self._seen: list[tuple[int, ...]] | None = None

    def poll(self) -> Pems:
        """Return the certificates in force: those in the files, or the last valid ones.

        Invalid files are logged. Raises ConfigError if they were never valid.
        """
        with self._lock:
            try:
                seen = [stamp(checked_stat(file)) for file in self._looked_at]
                if self._good is None or seen != self._seen:
                    self._take(self._read() if self._good else self._read_pair())
                    self._seen = seen
            except ConfigError as error:
                self._refuse(error)
            assert self._good is not None
            return self._good

    def _take(self, pems: Pems) -> None:
        if self._good is not None and pems != self._good:
            log.info("%s: reloaded", ", ".join(filter(None, (self._cert, self._ca))))
        self._good, self.problem = pems, ""

    def _refuse(self, error: ConfigError) -> None:
        if self._good is None:
            raise error
        if str(error) != self.problem:
            self.problem = str(error)
            log.warning("%s; the previous content stays in force", error)

    def _read(self) -> Pems:
        roots, chain = self._roots(), self._certificates(self._cert)
        key = self._private() if chain else b""
        pems = Pems(b"\n".join(roots), b"\n".join(chain), key)
        try:
            pems.into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        except OSError as error:
            wrong = (
                _NoPair if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH" else ConfigError
            )
            raise wrong(self._meaning(error)) from error
        if self._check is not None:
            self._check(pems)
        return pems

    def _read_pair(self) -> Pems:
        """Read the certificate and its key; retry if one of the files was just replaced."""
        for _ in range(PAIR_TRIES - 1):
            try:
                return self._read()
            except _NoPair:
                time.sleep(PAIR_S)
        return self._read()

    def _roots(self) -> list[bytes]:
        return system_roots() if self._ca.endswith(f"={SYSTEM}") else self._certificates(self._ca)

    def _certificates(self, file: str) -> list[bytes]:
        if not file:
            return []
        found: list[bytes] = _CERTIFICATE.findall(read_guarded(file, 0, FILE_NBYTES_MAX))
        if not found:
            raise ConfigError(
                f"{file} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
            )
        return found

    def _private(self) -> bytes:
        key, about = read_guarded(self._key, _OTHERS, FILE_NBYTES_MAX), checked_stat(self._key)
        mode = stat.S_IMODE(about.st_mode)
        # A Kubernetes secret that fsGroup makes readable.
        lent = about.st_uid != os.geteuid() and not mode & (stat.S_IWGRP | stat.S_IXGRP)
        if mode & stat.S_IRWXG and not lent:
            path = path_of(self._key)
            log.warning("%s is open to its group (mode %04o); chmod 600 %s", self._key, mode, path)
        if b"ENCRYPTED" in key:
            raise ConfigError(
                f"{self._key} is encrypted, and nobody can be asked for its passphrase; write it "
                "without"
            )
        return key

    def _meaning(self, error: OSError) -> str:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            return (
                f"{self._key} is not the key of the certificate in {self._cert}; name a pair "
                "that was made together"
            )
        files = ", ".join(filter(None, (self._ca, self._cert, self._key)))
        return f"{files}: no certificates and key in PEM form that OpenSSL can use ({error})"


def date(seconds: float) -> str:
    """Format seconds since 1970 as '2025-11-23 03:53:20 UTC', at most the end of the year 9999."""
    when = datetime.datetime.fromtimestamp(min(int(seconds), LAST_S), datetime.timezone.utc)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def system_roots() -> list[bytes]:
    """Return the authorities of this host, or those of SSL_CERT_FILE. Raises ConfigError."""
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    if not found:
        raise ConfigError(
            "tls_ca=system: this host has no file of authorities; install ca-certificates, or name "
            "one"
        )
    return [ssl.DER_cert_to_PEM_cert(der).strip().encode() for der in found]
