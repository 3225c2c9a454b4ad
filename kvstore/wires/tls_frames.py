"""A `FrameSocket` over TLS 1.3: frames and page bytes, encrypted in memory beside the socket.

    send      page bytes --encrypt--> records --> socket          128 KiB at a time, 8 records in one system call
    receive   socket --> records --decrypt--> the memory they are for

Python's own TLS socket knows neither the kernel's timeouts nor MSG_WAITALL, takes two system calls for each record of
16 KiB, and reads what is still encrypted as if it were not once another thread has shut it down. Here the socket stays
the plain one that it was, with its deadlines, and whoever shuts it down or looks whether it is quiet knows of no TLS.
"""

import contextlib
import ssl
from collections.abc import Mapping
from typing import Any

from kvstore.config import PROTOCOL_VERSION
from kvstore.wires.frames import FrameSocket

# Encrypted and sent, or received, at a time. Each connection that has moved pages keeps three times as much memory.
STEP_NBYTES = 128 << 10
RECORD_NBYTES = 17 << 10  # the largest record of TLS: until pages come, no more is received at a time
# What a node without a place says in place of its part of a handshake, which would cost what the limit saves: a record
# (alert, TLS 1.2 as in all records, 2 bytes) with a fatal `internal_error`, which RFC 8446 has for a lack of memory.
NO_PLACE = bytes((21, 3, 3, 0, 2, 2, 80))
_NO_PLACE_REASON = "ALERT_INTERNAL_ERROR"  # as OpenSSL calls it


def means_no_place(error: ssl.SSLError) -> bool:
    return _NO_PLACE_REASON in (error.reason or "")


class TlsFrameSocket(FrameSocket):
    """Used like a plain one, once `handshake` is over. Raises ssl.SSLError, an OSError, for what is no TLS, for a
    certificate that is not believed, and for bytes that were changed on the way."""

    def __init__(self, sock: Any, context: ssl.SSLContext, name: str = "", version: int = PROTOCOL_VERSION) -> None:
        """`name`: that the peer's certificate must have; none: the peer is the client."""
        super().__init__(sock, version)
        self._encrypted, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._encrypted, self._to_send, server_side=not name, server_hostname=name or None)
        self._record = memoryview(bytearray(RECORD_NBYTES))

    def handshake(self) -> None:
        """By the time that was armed."""
        while True:
            try:
                self._tls.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError:
                self._tell()
                raise
            self._check_deadline("greet")
            with contextlib.suppress(BlockingIOError):
                self._fetch()

    @property
    def certificate(self) -> Mapping[str, Any]:
        return self._tls.getpeercert() or {}

    # ---- sending -------------------------------------------------------------------------

    def send(self, data: bytes | memoryview, at_once: bool = False) -> None:
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
        """What was encrypted is on its way, or the connection is lost: nobody could go on in the middle of it."""
        if not self._to_send.pending:
            return
        try:
            super().send(self._to_send.read(), at_once)
        except BaseException:
            self.torn = True
            raise

    def _tell(self) -> None:
        """The peer, why this ends."""
        with contextlib.suppress(OSError):
            self._flush()

    # ---- receiving -----------------------------------------------------------------------

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        """Of one record, which is decrypted to where it is wanted."""
        fetched = False
        while True:
            try:
                return self._tls.read(view.nbytes, view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if fetched:  # half a record: its end has no more time than was armed
                    self._check_deadline("receive")
                self._flush()  # an answer of TLS's own, such as a new key's
                fetched = self._fetch(view.nbytes)
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError:
                self._tell()
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
        """More of what is encrypted. BlockingIOError when the socket's timeout passed."""
        if wanted_nbytes > self._record.nbytes:
            self._record = memoryview(bytearray(STEP_NBYTES))
        got = self._sock.recv_into(self._record)
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        self._encrypted.write(self._record[:got])
        return True

    @property
    def quiet(self) -> bool:
        """What is decrypted and was not asked for is no quiet either."""
        return super().quiet and not self._tls.pending() and not self._encrypted.pending
