"""Exchange state between a node and a gateway: lines of JSON over an inherited socket.

gRPC calls use other sockets.

    node -> gateway   settings, pems, health, view, log_level, serve, beat, stop
    gateway -> node   ready | failed, beat
"""

import base64
import json
import select
import socket
import threading
import time
from typing import Any

from kvstore.errors import ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.certificates import Pems

BEAT_S = 0.5  # interval of heartbeats in both directions
SEND_NBYTES = 4 << 20  # requested socket buffer for waiting lines; the system may grant less
RECEIVE_NBYTES = 64 << 10  # received from a gateway at a time, and the longest line
BEAT = {"rss_nbytes", "call_count"}
COUNT_MAX = 1 << 62  # of a number in a heartbeat
# between two checks of a silent side: a longer pause is this process's or the machine's
STEP_S_MAX = 1.0
EXIT_MEMORY = 86  # exit status of a gateway that exceeds its memory limit
LINE_NBYTES_MAX = 16 << 20


class Control:
    """The node's end of the control socket.

    Any thread may send; one thread receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")  # rest of a line that is partly sent
        self._next: dict[str, Any] = {}  # messages behind it, of each kind the newest
        self._sent_nbytes, self._seen_nbytes = 0, 0
        self._rest = b""

    def send(self, **message: Any) -> None:
        """Send a message without waiting; `flush` sends bytes that the gateway does not take now.

        Raises OSError if the gateway is gone.
        """
        with self._lock:
            self._next |= message
            self._flush()

    def flush(self) -> bool:
        """Send waiting messages.

        Return whether progress was made or nothing waits. Raises OSError if the gateway is gone.
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
        """Return the messages that have arrived, perhaps none; None if the gateway closed its end.

        Raises ProtocolError for an invalid message.
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
    """Measure how long the other side has been silent, checked periodically.

    Time between checks counts little: if this process did not run, perhaps the other side did not
    either.
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

    So every field is checked here, and nothing else is used.
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
    """Return the node's certificates as JSON values; None without TLS."""
    if pems is None:
        return None
    return {"roots": pems.roots.decode(), "chain": pems.chain.decode(), "key": pems.key.decode()}


def pems_of(value: dict[str, str]) -> Pems:
    """Return the certificates from their JSON values."""
    return Pems(value["roots"].encode(), value["chain"].encode(), value["key"].encode())


def view_value(view: pb.View | None, alone: bool) -> dict[str, Any]:
    """Return a view as JSON values.

    `view` None: there is none yet; `alone`: the node has no cluster.
    """
    message = None if view is None else base64.b64encode(view.SerializeToString()).decode()
    return {"message": message, "alone": alone}


def view_of(value: dict[str, Any]) -> tuple[pb.View | None, bool]:
    """Return (view, alone) from their JSON values."""
    message = value["message"]
    return message and pb.View.FromString(base64.b64decode(message)), value["alone"]
