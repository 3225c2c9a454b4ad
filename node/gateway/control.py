"""Exchange state between a node and a gateway: lines of JSON over an inherited socket. Calls go another way.

node -> gateway   settings, pems, health, view, serve, beat, stop
gateway -> node   ready | failed, beat
"""

import base64
import contextlib
import json
import select
import socket
import threading
from typing import Any

from kvstore.certificates import Pems
from kvstore.pb import kvstore_pb2 as pb

BEAT_S = 0.5  # each tells the other that it lives
SEND_NBYTES = 4 << 20  # asked of the system for lines that wait; a gateway that leaves as much hangs
RECEIVE_NBYTES = 64 << 10
EXIT_MEMORY = 86  # with this status a gateway's process ends when it has more memory than it may
LINE_NBYTES_MAX = 16 << 20
HEARD_NBYTES_MAX = 4 << 10  # of a line that a gateway says; who has taken one over says anything


class Control:
    """The node's end of the control socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
        self._sock = sock
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, **message: Any) -> None:
        """Send a message without waiting. Raise OSError if the gateway is gone, or hangs and reads nothing.

        After a failure nothing more is sent: a gateway that has lost a part of a line must end.
        """
        data = line(message)
        with self._lock:
            try:
                if self._sock.send(data, socket.MSG_DONTWAIT) < len(data):
                    raise BlockingIOError("the gateway does not take what it is told")
            except OSError:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
                raise

    def receive(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Return the messages that have come, perhaps none; None: the gateway has closed its end.

        Raise ValueError for a line that is too long or no JSON object.
        """
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
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
        if len(self._rest) > HEARD_NBYTES_MAX:
            raise ValueError(f"a line of more than {HEARD_NBYTES_MAX} bytes")
        return [_heard(one) for one in lines]

    def close(self) -> None:
        self._sock.close()


def _heard(line: bytes) -> dict[str, Any]:
    """Return the message in a line. Raise ValueError if it is no JSON object."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a line that is nested deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a line that is no object")
    return message


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
    """Return a view as JSON values. `view` None: there is none yet; `alone`: the node is in no cluster."""
    message = None if view is None else base64.b64encode(view.SerializeToString()).decode()
    return {"message": message, "alone": alone}


def view_of(value: dict[str, Any]) -> tuple[pb.View | None, bool]:
    """Return (view, alone) from their JSON values."""
    message = value["message"]
    return message and pb.View.FromString(base64.b64decode(message)), value["alone"]
