"""TLS of a client: whom it believes, what it shows, and in plain words why a node could not be greeted.

tls_ca, tls_cert, tls_key --> files --looked at for each connection--> bulk: a context; gRPC: the same bytes
tls_name, or else the host --> the name that the node's certificate must have
"""

import contextlib
import re
import socket
import ssl
from collections.abc import Sequence

from kvstore.certificates import PemFiles, Pems
from kvstore.config import ClientConfig
from kvstore.errors import ConfigError, Unavailable

PROBE_S = 0.5  # to find out why a node could not be reached over gRPC, which says little

# Of OpenSSL's reasons, and what they mean to who runs a client.
_MEANINGS = {
    "CERTIFICATE_HAS_EXPIRED": "the node's certificate has expired; renew it, or set this host's clock",
    "CERTIFICATE_IS_NOT_YET_VALID": "the node's certificate is not valid yet; set this host's clock, or the node's",
    "MISMATCH": "the node's certificate does not name {name}; call it by a name that it has, or set tls_name to one",
    "CERTIFICATE_VERIFY_FAILED": "the node's certificate is not from an authority in tls_ca={ca}",
    "ALERT_CERTIFICATE_REQUIRED": "the node asks for a client certificate (--tls-client-ca); set tls_cert and tls_key",
    "ALERT_UNKNOWN_CA": "the node does not know the authority of tls_cert={cert} (its --tls-client-ca)",
    "ALERT_CERTIFICATE_EXPIRED": "the node says that tls_cert={cert} has expired; renew it, or set the node's clock",
    "ALERT_(BAD_CERTIFICATE|CERTIFICATE_UNKNOWN|UNSUPPORTED|DECRYPT)": "the node does not take tls_cert={cert}",
    "ALERT_PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL": "the other side speaks no TLS 1.3",
    "WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH|HTTP_REQUEST": "the other side speaks no TLS; start the "
    "node with --tls-cert and --tls-key, or this client without tls_ca",
}
SPEAKS_TLS = "the node speaks TLS; name the authority of its certificate with tls_ca (KVSTORE_TLS_CA)"


class ClientTls:
    """Of all connections to one host. Thread-safe."""

    def __init__(self, config: ClientConfig, host: str) -> None:
        self.name = config.tls_name or host
        self.renamed = bool(config.tls_name)
        self._config = config
        self.files = PemFiles(config.tls_ca, config.tls_cert, config.tls_key)
        self._made: tuple[Pems, ssl.SSLContext] | None = None

    def pems(self) -> Pems:
        """For a new connection. Raises Unavailable: without them there is none, and there is no other way."""
        try:
            return self.files.look()
        except ConfigError as error:
            raise Unavailable(str(error)) from error

    def context(self) -> ssl.SSLContext:
        """For a new connection of ours. Raises Unavailable."""
        pems, made = self.pems(), self._made
        if made is None or made[0] is not pems:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which verifies certificate and name
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                made = self._made = pems, pems.into(context)
            except OSError as error:
                raise Unavailable(f"TLS: {error}") from error
        return made[1]

    @property
    def refused(self) -> str:
        """What it means when the node hangs up on who has greeted it well."""
        cert = self._config.tls_cert
        if not cert:
            return "the node hung up: it asks for client certificates (--tls-client-ca); set tls_cert and tls_key"
        return f"the node hung up: tls_cert={cert} has expired, or is not from an authority in its --tls-client-ca"

    def meaning(self, error: OSError) -> str:
        """What is wrong, and its remedy."""
        said = str(error)
        sign = re.sub("[^A-Z]+", "_", said.upper())
        config = self._config
        told = next((told for reason, told in _MEANINGS.items() if re.search(reason, sign)), "")
        told = told.format(name=self.name, ca=config.tls_ca, cert=config.tls_cert or "(none)")
        return f"{told} ({said})" if told else said


def client_tls(config: ClientConfig, host: str) -> ClientTls | None:
    """None: this client speaks plainly."""
    return ClientTls(config, host) if config.tls_ca else None


def check_tls(config: ClientConfig) -> None:
    """Raises ConfigError for files that can never work. An expired certificate may be renewed before it is needed."""
    tls = client_tls(config, "")
    if tls is not None:
        tls.files.look()


def why_not(found: Sequence[str], port: int, tls: ClientTls | None, seconds: float) -> str:
    """What TLS has to do with it that the gRPC port of a node could not be reached; empty: nothing. One handshake with
    each address, of at most so many seconds in all."""
    for address in found:
        with contextlib.suppress(OSError), socket.create_connection((address, port), seconds / len(found)) as sock:
            if said := _plain(sock) if tls is None else greeted(sock, tls):
                return said
    return ""


def shown(sock: socket.socket) -> bytes:
    """The certificate that is shown to anybody, in PEM form, believed or not; it takes the socket. Raises OSError for
    who speaks no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
    with context.wrap_socket(sock) as wrapped:
        return ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b"").encode()


def _plain(sock: socket.socket) -> str:
    """Whether a TLS server is there that a plain client was talking to."""
    try:
        shown(sock)
    except ssl.SSLError as error:
        return SPEAKS_TLS if "ALERT" in str(error.reason) else ""
    return SPEAKS_TLS


def greeted(sock: socket.socket, tls: ClientTls) -> str:
    """What keeps a client from greeting the node at the other end; empty: nothing. It takes the socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        with tls.pems().into(context).wrap_socket(sock, server_hostname=tls.name) as greeted:
            # Of TLS 1.3 a server says only then what it thinks of our certificate; gRPC's says it by hanging up.
            return "" if greeted.recv(1) else tls.refused
    except TimeoutError:
        return ""
    except (ConnectionResetError, ssl.SSLEOFError):
        return tls.refused
    except ssl.SSLError as error:
        return tls.meaning(error)
