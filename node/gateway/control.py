"""Exchange state between a node and a gateway: lines of JSON over an inherited socket.

Calls go another way.

node -> gateway   settings, pems, health, view, serve, beat, stop
gateway -> node   ready | failed, beat
"""

import base64
import json
import select
import socket
import threading
import time
from typing import Any

from kvstore.certificates import Pems
from kvstore.errors import ProtocolError
from kvstore.pb import kvstore_pb2 as pb

BEAT_S = 0.5  # each tells the other that it lives
SEND_NBYTES = 4 << 20  # asked of the system for lines that wait; it gives what its own limit allows
RECEIVE_NBYTES = 64 << 10  # of a gateway at a time, and of one line at most
BEAT = {"rss_nbytes", "call_count"}
COUNT_MAX = 1 << 62  # in a beat
STEP_S_MAX = (
    1.0  # between two looks at what is silent: more is a pause of this process, or of the machine
)
EXIT_MEMORY = 86  # with this status a gateway's process ends when it has more memory than it may
LINE_NBYTES_MAX = 16 << 20


class Control:
    """The node's end of the control socket.

    Any thread may send; one thread receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")  # of a line that has begun
        self._next: dict[str, Any] = {}  # what is told behind it, of each kind the newest
        self._sent_nbytes, self._seen_nbytes = 0, 0
        self._rest = b""

    def send(self, **message: Any) -> None:
        """Send a message without waiting; what the gateway does not take now, `flush` sends.

        Raise OSError if the gateway is gone.
        """
        with self._lock:
            self._next |= message
            self._flush()

    def flush(self) -> bool:
        """Tell what waits.

        Return whether the gateway takes something, or has all. Raises OSError if it is gone.
        """
        with self._lock:
            self._flush()
            takes = not self._unsent or self._sent_nbytes > self._seen_nbytes
            self._seen_nbytes = self._sent_nbytes
            return takes

    def _flush(self) -> None:
        while self._unsent or self._next:
            if not self._unsent:
                self._unsent, self._next = memoryview(line(self._next)), {}
            try:
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._sent_nbytes += sent
            self._unsent = self._unsent[sent:]

    def receive(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Return the messages that have come, perhaps none; None: the gateway has closed its end.

        Raise ProtocolError for what no gateway says.
        """
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if not waiting.poll(timeout_s * 1000):
            return []
        try:
            data = self._sock.recv(RECEIVE_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > RECEIVE_NBYTES:
            raise ProtocolError("a line that does not end")
        return [_parse(one) for one in lines]


class SilenceTimer:
    """For how long nothing was heard, looked at now and then.

    Time in which nobody looked counts little: then this process did not run, and perhaps nobody
    did.
    """

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def poll(self, heard: bool) -> float:
        """Return for how many seconds the other side has been silent."""
        now = time.monotonic()
        passed_s, self._looked_s = now - self._looked_s, now
        self._silent_s = 0.0 if heard else self._silent_s + min(passed_s, STEP_S_MAX)
        return self._silent_s


def _parse(text: bytes) -> dict[str, Any]:
    """Parse a gateway's message, which may be forged if the gateway was taken over.

    It may be anybody's by now: what it says is believed only as far as it goes here.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no line of JSON ({type(error).__name__})") from error
    if not isinstance(message, dict) or not isinstance(message.get("failed", ""), str):
        raise ProtocolError("no message of a gateway")
    if "beat" in message:
        beat = message["beat"]
        if (
            not isinstance(beat, dict)
            or set(beat) != BEAT
            or not all(map(_is_count, beat.values()))
        ):
            raise ProtocolError("a beat that is none")
    return message


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < COUNT_MAX


def line(message: dict[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def pems_value(pems: Pems | None) -> dict[str, str] | None:
    """Return the node's certificates as JSON values; None: the node speaks without TLS."""
    if pems is None:
        return None
    return {"roots": pems.roots.decode(), "chain": pems.chain.decode(), "key": pems.key.decode()}


def pems_of(value: dict[str, str]) -> Pems:
    """Return the certificates from their JSON values."""
    return Pems(value["roots"].encode(), value["chain"].encode(), value["key"].encode())


def view_value(view: pb.View | None, alone: bool) -> dict[str, Any]:
    """Return a view as JSON values.

    `view` None: there is none yet; `alone`: the node is in no cluster.
    """
    message = None if view is None else base64.b64encode(view.SerializeToString()).decode()
    return {"message": message, "alone": alone}


def view_of(value: dict[str, Any]) -> tuple[pb.View | None, bool]:
    """Return (view, alone) from their JSON values."""
    message = value["message"]
    return message and pb.View.FromString(base64.b64decode(message)), value["alone"]
