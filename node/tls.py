"""Serve a node's certificate on all ports; reload it within a second of a change.

    tls_cert, tls_key, tls_client_ca --each second--> new handshakes of gRPC, bulk and metrics
                                                      status, a metric and warnings: their expiry

Open connections stay as they are. Invalid files are not used: the previous ones stay in force.
"""

import contextlib
import ipaddress
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.errors import ConfigError
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.certificates import NEAR_END_S, SYSTEM, PemFiles, Pems, date
from node.config import NodeConfig

log = logging.getLogger(__name__)
log.addFilter(LogRate())

WARN_AGAIN_S = 6 * 3600.0
SETTINGS = ("tls_client_ca", "tls_cert", "tls_key")


@dataclass(frozen=True)
class Shown:
    """A verified client certificate: its common name and its alternative names.

    Alternative names are DNS names, addresses, URIs and mail addresses.
    """

    common_name: str
    alternatives: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names."""
        return tuple(filter(None, (self.common_name, *self.alternatives)))


class _InForce(NamedTuple):
    """The certificates in force, and when they expire in Unix time.

    `ends` is the certificate's expiry, `roots_end` that of the first authority, 0 for the host's.
    """

    pems: Pems
    context: ssl.SSLContext
    ends: float
    roots_end: float


class Certificates:
    """A node's certificates. Thread-safe.

    The constructor raises ConfigError for files that can not be used.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._files = PemFiles(
            config.tls_client_ca, config.tls_cert, config.tls_key, SETTINGS, self._check
        )
        self._in_force = self._made(self._files.poll())
        self._warned_s = -WARN_AGAIN_S
        self._warn()

    @property
    def pems(self) -> Pems:
        """Return the certificates in force."""
        return self._in_force.pems

    @property
    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._in_force.context

    @property
    def problem(self) -> str:
        """Return why the files' content is not in force; empty if it is."""
        return self._files.problem

    def poll(self) -> None:
        """Put valid new files into force."""
        pems = self._files.poll()
        if pems is not self.pems:
            self._in_force = self._made(pems)
        self._warn()

    def status(self) -> pb.TlsStatus:
        """Return the certificates' part of the status."""
        in_force = self._in_force
        ends = {"tls_cert": in_force.ends, "tls_client_ca": in_force.roots_end}
        return pb.TlsStatus(
            certificates=[
                pb.CertificateStatus(setting=name, ends_unix_s=int(end))
                for name, end in ends.items()
                if end
            ],
            client_certificates=bool(in_force.pems.roots),
            problem=self.problem,
        )

    def _check(self, pems: Pems) -> None:
        from kvstore.security import x509  # takes long to import: only nodes with TLS

        x509.check_dates(f"tls_cert={self._config.tls_cert}", pems.chain)

    def _made(self, pems: Pems) -> _InForce:
        from kvstore.security import x509

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # sessions are not resumed; and a ticket would be data on a connection that must be quiet
        context.num_tickets = 0
        if pems.roots:
            context.verify_mode = ssl.CERT_REQUIRED
        has_files = pems.roots and self._config.tls_client_ca != SYSTEM
        roots_end = x509.first_expiry(pems.roots) if has_files else 0.0
        return _InForce(pems, pems.into(context), x509.validity(pems.chain)[1], roots_end)

    def _warn(self) -> None:
        ends, now = self._in_force.ends, time.monotonic()
        if ends - time.time() < NEAR_END_S and now - self._warned_s >= WARN_AGAIN_S:
            self._warned_s = now
            log.warning("the certificate in tls_cert is valid until %s; renew it", date(ends))


def certificates_of(config: NodeConfig) -> Certificates | None:
    """Return the node's certificates; None without TLS.

    Raises ConfigError for settings that do not fit together, or unusable files.
    """
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("tls_cert and tls_key are given together")
    if not config.tls_cert:
        if config.members_ca:
            raise ConfigError("tls_client_ca and tls_ca need tls_cert and tls_key")
        if config.tls_name:
            raise ConfigError(
                "tls_name, of the other members' certificates, needs tls_cert and tls_key"
            )
        return None
    if config.cluster and not config.members_ca:
        raise ConfigError(
            "a node of a cluster with tls_cert needs tls_ca, the authority of the others' "
            "certificates"
        )
    return Certificates(config)


def describe_certificate(certificate: Mapping[str, Any]) -> Shown | None:
    """Return the names of a client's certificate; None if it showed none."""
    if not certificate:
        return None
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    common = next((value for kind, value in subject if kind == "commonName"), "")
    named = certificate.get("subjectAltName", ())
    return Shown(
        common,
        tuple(_as_grpc_has_it(value) if kind == "IP Address" else value for kind, value in named),
    )


def _as_grpc_has_it(address: str) -> str:
    """Shorten an IPv6 address as gRPC writes it."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address.strip()))
    return address
