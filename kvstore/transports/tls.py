"""Send frames over TLS 1.3, configure the client's side, and explain failures in plain words.

    tls_ca, tls_cert, tls_key --> files, checked for each connection --> a context; gRPC: the bytes
    tls_name, or else the host --> the name that the node's certificate must have

Frames and page bytes are encrypted in memory beside the socket:

    send      page bytes --encrypt--> records --> socket     128 KiB, 8 records, per system call
    receive   socket --> records --decrypt--> the memory they are for

Python's own TLS socket ignores the kernel's timeouts and MSG_WAITALL, takes two system calls for
each record of 16 KiB, and returns encrypted bytes as plain ones once another thread has shut it
down. Here the socket stays a plain socket with its deadlines: a thread that shuts it down or checks
it for input need not know of TLS.
"""

import contextlib
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.config import PROTOCOL_VERSION, ClientConfig
from kvstore.errors import ConfigError, Unavailable
from kvstore.security.certificates import PemFiles, Pems
from kvstore.transports.frames import FrameSocket

# Bytes encrypted and sent, or received, at a time. Each connection that has moved pages keeps three
# times as much memory.
STEP_NBYTES = 128 << 10
# The largest TLS record: until pages come, no more is received at a time
RECORD_NBYTES = 17 << 10
# A node at its connection limit sends this instead of a handshake, which would cost what the limit
# saves: a record (alert, TLS 1.2 as in all records, 2 bytes) with a fatal `internal_error`, which
# RFC 8446 defines for a lack of memory.
NO_PLACE = bytes((21, 3, 3, 0, 2, 2, 80))
_NO_PLACE_REASON = "ALERT_INTERNAL_ERROR"  # OpenSSL's name for it


def means_no_place(error: ssl.SSLError) -> bool:
    """Return whether a TLS error is the alert of a node at its connection limit."""
    return _NO_PLACE_REASON in (error.reason or "")


class TlsFrameSocket(FrameSocket):
    """Send and receive frames as a plain socket does, once `handshake` is over.

    Raises ssl.SSLError, an OSError, for bytes that are no TLS, for a certificate that is not
    trusted, and for bytes that were changed on the way.
    """

    is_plain = False

    def __init__(
        self, sock: Any, context: ssl.SSLContext, name: str = "", version: int = PROTOCOL_VERSION
    ) -> None:
        """Wrap a socket in TLS; `name` is the server's, empty if the peer is a client."""
        super().__init__(sock, version)
        self._encrypted, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._encrypted, self._to_send, server_side=not name, server_hostname=name or None
        )
        self._record = memoryview(bytearray(RECORD_NBYTES))

    def handshake(self) -> None:
        """Perform the TLS handshake within the time that was armed."""
        while True:
            try:
                self._tls.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError:
                self._send_alert()
                raise
            self._check_deadline("greet")
            with contextlib.suppress(BlockingIOError):
                self._fetch()

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Return the peer's verified certificate; empty if it has none."""
        return self._tls.getpeercert() or {}

    # ---- sending -------------------------------------------------------------------------

    def send(self, data: bytes | memoryview, at_once: bool = False) -> None:
        """Encrypt and send bytes."""
        view = memoryview(data)
        while view.nbytes:
            self._tls.write(view[:STEP_NBYTES])
            self._flush(at_once)
            view = view[STEP_NBYTES:]

    def _send_some(self, views: list[memoryview]) -> int:
        moved = 0
        for view in views:
            moved += self._tls.write(view[: STEP_NBYTES - moved])
            if moved == STEP_NBYTES:
                break
        self._flush()
        return moved

    def _flush(self, at_once: bool = False) -> None:
        """Send all encrypted bytes; a failure loses the connection."""
        if not self._to_send.pending:
            return
        try:
            super().send(self._to_send.read(), at_once)
        except BaseException:
            self.torn = True
            raise

    def _send_alert(self) -> None:
        """Send the TLS alert that tells the peer why the connection ends."""
        with contextlib.suppress(OSError):
            self._flush()

    # ---- receiving -----------------------------------------------------------------------

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        """Receive from one record, decrypted into the target."""
        fetched = False
        while True:
            try:
                return self._tls.read(view.nbytes, view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if fetched:  # half a record: the rest must arrive within the armed time
                    self._check_deadline("receive")
                self._flush()  # a reply of TLS itself, such as a key update
                fetched = self._fetch(view.nbytes)
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError:
                self._send_alert()
                raise

    def _recv_some(self, views: list[memoryview]) -> int:
        moved = 0
        for view in views:
            self.recv_into(view[: STEP_NBYTES - moved])
            moved += min(view.nbytes, STEP_NBYTES - moved)
            if moved == STEP_NBYTES:
                break
        return moved

    def _fetch(self, wanted_nbytes: int = 0) -> bool:
        """Receive more encrypted bytes. Raises BlockingIOError on timeout.

        BlockingIOError when the socket's timeout passed.
        """
        if wanted_nbytes > self._record.nbytes:
            self._record = memoryview(bytearray(STEP_NBYTES))
        got = self._sock.recv_into(self._record)
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        self._encrypted.write(self._record[:got])
        return True

    @property
    def quiet(self) -> bool:
        """Return whether nothing is waiting, neither in the socket nor decrypted."""
        return super().quiet and not self._tls.pending() and not self._encrypted.pending


# seconds to find out why a node could not be reached over gRPC, whose errors say little
PROBE_S = 0.5

# OpenSSL's reasons, and their meaning for an operator of a client
_MEANINGS = {
    "CERTIFICATE_HAS_EXPIRED": "the node's certificate has expired; renew it, or set this host's "
    "clock",
    "CERTIFICATE_IS_NOT_YET_VALID": "the node's certificate is not valid yet; set this host's "
    "clock, or the node's",
    "MISMATCH": "the node's certificate does not name {name}; call it by a name that it has, or "
    "set tls_name to one",
    "CERTIFICATE_VERIFY_FAILED": "the node's certificate is not from an authority in tls_ca={ca}",
    "ALERT_CERTIFICATE_REQUIRED": "the node requires a client certificate "
    "(--tls-client-ca); set tls_cert and tls_key",
    "ALERT_UNKNOWN_CA": "the node does not know the authority of tls_cert={cert} (its "
    "--tls-client-ca)",
    "ALERT_CERTIFICATE_EXPIRED": "the node says that tls_cert={cert} has expired; renew it, or set "
    "the node's clock",
    "ALERT_(BAD_CERTIFICATE|CERTIFICATE_UNKNOWN|UNSUPPORTED|DECRYPT)": "the node does not "
    "accept tls_cert={cert}",
    "ALERT_PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL": "the peer does not support TLS 1.3",
    "WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH|HTTP_REQUEST": "the peer does not use "
    "TLS; start the node with --tls-cert and --tls-key, or this client without tls_ca",
}
SPEAKS_TLS = "the node uses TLS; name the authority of its certificate with tls_ca (KVSTORE_TLS_CA)"


class ClientTls:
    """Configure TLS for all connections to one host.

    Thread-safe.
    """

    def __init__(self, config: ClientConfig, host: str) -> None:
        self.name = config.tls_name or host
        self.renamed = bool(config.tls_name)
        self._config = config
        self.files = PemFiles(config.tls_ca, config.tls_cert, config.tls_key)
        self._made: tuple[Pems, ssl.SSLContext] | None = None

    def pems(self) -> Pems:
        """Return the files' contents for a new connection.

        Raises Unavailable if they can not be used.
        """
        try:
            return self.files.poll()
        except ConfigError as error:
            raise Unavailable(str(error)) from error

    def context(self) -> ssl.SSLContext:
        """Return a context for a new connection.

        Raises Unavailable if the files can not be used.
        """
        pems, made = self.pems(), self._made
        if made is None or made[0] is not pems:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it verifies certificate and name
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                made = self._made = pems, pems.into(context)
            except OSError as error:
                raise Unavailable(f"TLS: {error}") from error
        return made[1]

    @property
    def explain_hangup(self) -> str:
        """Explain why a node hangs up after a good handshake."""
        cert = self._config.tls_cert
        if not cert:
            return (
                "the node hung up: it requires client certificates (--tls-client-ca); set "
                "tls_cert and tls_key"
            )
        return (
            f"the node hung up: tls_cert={cert} has expired, or is not from an authority in its "
            "--tls-client-ca"
        )

    def explain(self, error: OSError) -> str:
        """Return what an error of TLS means and how to remedy it."""
        said = str(error)
        sign = re.sub("[^A-Z]+", "_", said.upper())
        config = self._config
        told = next((told for reason, told in _MEANINGS.items() if re.search(reason, sign)), "")
        told = told.format(name=self.name, ca=config.tls_ca, cert=config.tls_cert or "(none)")
        return f"{told} ({said})" if told else said


def client_tls(config: ClientConfig, host: str) -> ClientTls | None:
    """Return the TLS settings of a client for a host; None if it uses no TLS."""
    return ClientTls(config, host) if config.tls_ca else None


def check_tls(config: ClientConfig) -> None:
    """Raise ConfigError for TLS files that can never work.

    An expired certificate may be renewed before it is needed.
    """
    tls = client_tls(config, "")
    if tls is not None:
        tls.files.poll()


def explain_unreachable(
    found: Sequence[str], port: int, tls: ClientTls | None, seconds: float
) -> str:
    """Return how TLS explains that a node's gRPC port is unreachable; empty if it does not.

    It tries one handshake with each address, within so many seconds in all.
    """
    for address in found:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), seconds / len(found)) as sock,
        ):
            if said := _explain_plain(sock) if tls is None else explain_handshake(sock, tls):
                return said
    return ""


def fetch_certificate(sock: socket.socket) -> bytes:
    """Return the certificate that a server shows, in PEM form, trusted or not; closes the socket.

    Raises OSError if the server does not use TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # nothing secret is sent to it
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as wrapped:
        return ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b"").encode()


def _explain_plain(sock: socket.socket) -> str:
    """Return a hint if a plain client has been talking to a TLS server."""
    try:
        fetch_certificate(sock)
    except ssl.SSLError as error:
        return SPEAKS_TLS if "ALERT" in str(error.reason) else ""
    return SPEAKS_TLS


def explain_handshake(sock: socket.socket, tls: ClientTls) -> str:
    """Return what prevents a TLS handshake; empty if nothing does. Closes the socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        with tls.pems().into(context).wrap_socket(sock, server_hostname=tls.name) as wrapped:
            # In TLS 1.3 a server rejects our certificate only after the handshake; gRPC's server
            # does so by hanging up.
            return "" if wrapped.recv(1) else tls.explain_hangup
    except TimeoutError:
        return ""
    except (ConnectionResetError, ssl.SSLEOFError):
        return tls.explain_hangup
    except ssl.SSLError as error:
        return tls.explain(error)
