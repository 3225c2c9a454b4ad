"""A compromised gateway, which sends arbitrary data on its two sockets to the node."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fleets import SMALL

from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from node.config import NodeConfig
from node.gateway.supervisor import Gateways
from node.server import Node

TALK_S = 20.0
HEADER_NBYTES_MAX = 1 << 20


class Rogue:
    """One life of the gateway, with the interface of `Runner`."""

    pid = 4242

    def __init__(self, control: socket.socket, door: socket.socket) -> None:
        self.control, self.door = control.dup(), door.dup()
        self.control.settimeout(TALK_S)
        self.door.settimeout(TALK_S)
        self._ended = threading.Event()
        self.say(ready=1)

    def wait(self, seconds: float) -> str | None:
        return "killed" if self._ended.wait(seconds) else None

    def kill(self) -> None:
        self._ended.set()
        self.control.close()
        self.door.close()

    @property
    def is_killed(self) -> bool:
        return self._ended.is_set()

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def give(self, fd: int) -> None:
        """Send the node a file descriptor as one end of a new connection."""
        socket.send_fds(self.door, [b"c"], [fd])

    @contextlib.contextmanager
    def connection(self, **on_behalf: Any) -> Iterator[FrameSocket]:
        ours, theirs = socket.socketpair()
        with theirs:
            self.give(theirs.fileno())
        frames = FrameSocket(ours)
        frames.arm(TALK_S)
        with contextlib.closing(frames):
            if on_behalf:
                frames.send_frame(
                    pb.BulkRequest(on_behalf=pb.OnBehalfRequest(**on_behalf)).SerializeToString()
                )
            yield frames


def asked(frames: FrameSocket, **request: Any) -> pb.BulkReply:
    frames.send_frame(pb.BulkRequest(**request).SerializeToString())
    reply: pb.BulkReply = pb.BulkReply.FromString(frames.recv_frame(HEADER_NBYTES_MAX)[0])
    return reply


@contextlib.contextmanager
def rogue_node(**settings: Any) -> Iterator[tuple[Node, list[Rogue]]]:
    """Yield a node whose gateway is a Rogue, and the list of its Rogues so far."""
    rogues: list[Rogue] = []

    def run(gateways: Gateways, control: socket.socket, door: socket.socket) -> Rogue:
        rogues.append(Rogue(control, door))
        return rogues[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gateways, "run", run)
        patch.setattr("node.gateway.supervisor.SILENT_S_MAX", 600.0)  # rogues send no heartbeat
        node = Node(NodeConfig(**{**SMALL, **settings}))
        node.start()
        try:
            yield node, rogues
        finally:
            rogues[-1].kill()
            assert node.check() == []
            node.stop()
