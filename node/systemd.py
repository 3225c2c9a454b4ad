"""Report the node's state to systemd, or to another supervisor that sets NOTIFY_SOCKET.

    READY=1  RELOADING=1  STOPPING=1  STATUS=...  EXTEND_TIMEOUT_USEC=...  WATCHDOG=1

Each message is a datagram of lines (sd_notify(3)). Without NOTIFY_SOCKET nothing is sent.
"""

import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

SEND_S = 1.0  # longest wait for a supervisor that does not read
START_STEP_S = 10.0  # between two messages of a long start
START_MORE_S = 60.0  # the time that each of them asks for
PROBE_S_MAX = 10.0  # longest wait for an answer of the node's own HTTP port
HEALTH_PATH = "/health"


class Notifier:
    """Send the node's state. Thread-safe; a supervisor that is away is logged, not raised."""

    def __init__(self, path: str) -> None:
        """Take the value of NOTIFY_SOCKET: a path, or `@` and an abstract name; empty: none."""
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._extended_s = time.monotonic()

    def send(self, **states: object) -> None:
        """Send states, for example `send(READY=1, STATUS="serves")`."""
        if not self._address:
            return
        values = {name: " ".join(str(value).split("\n")) for name, value in states.items()}
        text = "\n".join(f"{name}={value}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_S)
                sock.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("NOTIFY_SOCKET does not take %s: %s", next(iter(states)), error)

    def starting(self) -> None:
        """Ask for more time now and then, for a start that restores many pages."""
        if time.monotonic() - self._extended_s >= START_STEP_S:
            self._extended_s = time.monotonic()
            self.send(EXTEND_TIMEOUT_USEC=int(START_MORE_S * 1e6), STATUS="starting")

    def reloading(self) -> None:
        """Send the begin of a reload; `send(READY=1)` ends it."""
        self.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)


class Watchdog:
    """A thread that feeds the supervisor's watchdog while `answers` returns True.

    `answers` may hang or raise: then nothing is sent, and the supervisor restarts the node.
    """

    def __init__(
        self, notifier: Notifier, limit_s: float, answers: Callable[[float], bool]
    ) -> None:
        """Take the watchdog's limit in seconds; 0: no watchdog, no thread."""
        self._notifier = notifier
        self._interval_s = limit_s / 4
        self._answers = answers
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if limit_s:
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                if self._answers(min(PROBE_S_MAX, 2 * self._interval_s)):
                    self._notifier.send(WATCHDOG=1)
                else:
                    log.error("the node does not answer: its watchdog is not fed")
            except Exception:
                log.exception("the node can not be checked: its watchdog is not fed")
            self._stopped.wait(max(0.0, self._interval_s - (time.monotonic() - began)))

    def stop(self) -> None:
        """End the thread, without waiting for an answer that hangs."""
        self._stopped.set()


def http_answers(host: str, port: int, tls: bool, timeout_s: float) -> bool:
    """Return whether the node's HTTP port reacts to a request for /health, in whatever way.

    It may end the connection, because it is full or requires client certificates.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((host, port), timeout_s) as plain:
            plain.settimeout(timeout_s)
            connection = http.client.HTTPConnection(host, port)
            connection.sock = _any_certificate().wrap_socket(plain) if tls else plain
            connection.request("HEAD", HEALTH_PATH)
            connection.getresponse().read()
            connection.close()
    except (TimeoutError, ConnectionRefusedError):
        return False
    except (OSError, http.client.HTTPException):
        pass
    return True


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
