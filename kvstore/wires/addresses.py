"""IP addresses of a node's name, under a deadline: the system's resolver knows none and may keep a caller for
half a minute."""

import logging
import socket
import threading
from collections.abc import Sequence

from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.sync import Event, start_thread

log = logging.getLogger(__name__)

# Where an earlier answer is known, a new one is waited for so long; then the old one is tried.
FRESH_S = 0.1


class Addresses:
    """Of one host. Thread-safe. Asked anew for each connection to the node, so that a name may move.

    The resolver is asked by a thread of its own, one at a time, which many callers may wait for; one that hangs
    costs its callers their deadline and the process this one thread.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._numeric = _is_numeric(host)
        self._lock = threading.Lock()
        self._question: _Question | None = None
        self._known: tuple[str, ...] = (host,) if self._numeric else ()

    def resolve(self, deadline: Deadline) -> tuple[str, ...]:
        """In the order in which they are to be tried. Raises Unavailable or DeadlineExceeded."""
        if self._numeric:
            return self._known
        with self._lock:
            if self._question is None or self._question.answered.is_set():
                self._question = _Question(self._host)
            question = self._question
        question.answered.wait(min(FRESH_S, deadline.remaining()) if self._known else deadline.remaining())
        if question.found:
            self._known = question.found
        elif not self._known:
            if question.error:
                raise Unavailable(f"{self._host} can not be resolved: {question.error}") from question.error
            raise DeadlineExceeded(f"{self._host} was not resolved in {deadline.seconds:.3g} s: the resolver hangs")
        else:
            why = question.error or f"no answer in {FRESH_S:g} s"
            log.info("%s: %s; trying the addresses known from before", self._host, why)
        return self._known


def grpc_target(found: Sequence[str], port: int) -> str:
    """Resolved addresses as gRPC takes them, so that its own resolver has nothing to do. One list holds one family:
    IPv4 beside IPv6 is written as IPv6."""
    if not any(":" in address for address in found):
        return "ipv4:" + ",".join(f"{address}:{port}" for address in found)
    six = [address if ":" in address else f"::ffff:{address}" for address in found]
    return "ipv6:" + ",".join(f"[{address.replace('%', '%25')}]:{port}" for address in six)


class _Question:
    """One call of the resolver, in a daemon thread: the process may end while it hangs."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.answered = Event()
        self.found: tuple[str, ...] = ()
        self.error: Exception | None = None
        try:
            start_thread(self._ask, f"kvstore-resolve-{host}")
        except RuntimeError as error:  # no more threads can be had
            self.error = error
            self.answered.set()

    def _ask(self) -> None:
        try:
            answers = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            self.found = tuple(dict.fromkeys(str(address[0]) for *_, address in answers))
        except (OSError, UnicodeError) as error:  # such as a name that is too long
            self.error = error
        finally:
            self.answered.set()


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True
