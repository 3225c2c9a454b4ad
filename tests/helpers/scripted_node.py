"""A fake node at the other end of a gateway's connections.

Each answer names the request and the caller that it belongs to.
"""

import contextlib
import random
import socket
import threading
from collections import Counter
from typing import Any

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.messages import FRAME_NBYTES, chunk_frame, delimited
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket, pack_fixed

CHUNK_NBYTES = 1 << 20
# Sizes of pages
SIZES = (
    1,
    300,
    70_000,
    CHUNK_NBYTES - 1,
    CHUNK_NBYTES,
    CHUNK_NBYTES + 1,
    2 * CHUNK_NBYTES,
)
REPLY_NBYTES = (10, 5_000, 70_000, 300_000)
WAIT_S = 60.0
NOT_FOUND = 5


class Plan:
    """The plan for the call of this number, the same at both ends."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        self.number = number
        self.name = b"%08d" % number
        self.caller = f"10.0.0.{number % 3}:1"
        self.nbytes = rng.choice(SIZES)
        self.reply_nbytes = rng.choice(REPLY_NBYTES)
        self.miss = rng.random() < 0.1
        # The node's fault: an error, an error before it hangs up, or hanging up without an error
        self.fault = rng.choices(("", "error", "last", "hangs up"), (8, 2, 1, 1))[0]
        # The fault comes during page bytes, or instead of the answer to a commit
        self.late = rng.random() < 0.5
        self.unread = rng.random() < 0.3  # the fault comes before the page bytes are read

    @property
    def page(self) -> bytes:
        return random.Random(self.number).randbytes(self.nbytes)

    @property
    def said(self) -> bytes:
        return (self.name + self.caller.encode()).ljust(self.reply_nbytes, b".")


def framed(page: bytes) -> bytes:
    pieces = (page[at : at + CHUNK_NBYTES] for at in range(0, len(page), CHUNK_NBYTES))
    return b"".join(chunk_frame([memoryview(piece)]) for piece in pieces)


assert len(framed(bytes(CHUNK_NBYTES))) == FRAME_NBYTES


class HungUp(Exception):
    """The connection has ended."""


class ScriptedNode:
    """The fake node; `wrong` lists requests for the wrong caller and damaged ones."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def join(self) -> None:
        """Wait for the threads, after the gateway has exited."""
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._door, 1, 1)
            if not data:
                return
            self._threads.append(
                threading.Thread(target=self._serve, args=(socket.socket(fileno=fds[0]),))
            )
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError, HungUp):
            talk = _Talk(self, sock)
            while True:
                talk.next()


class _Talk:
    def __init__(self, node: ScriptedNode, sock: socket.socket) -> None:
        self._node, self._sock, self._frames = node, sock, FrameSocket(sock)
        self._caller = ""

    def next(self) -> None:
        op, request = self._request()
        if op == "on_behalf":
            self._caller = request.address
            return
        plan = Plan(int(request.namespace))
        if plan.caller != self._caller:
            self._node.wrong.append(f"{plan.number} is requested for {self._caller}")
        self._node.done[op] += 1
        late = plan.late and op == "put" and not plan.miss
        if not late and self._fault(plan):
            return
        if op == "get":
            page = b"" if plan.miss else framed(plan.page)
            self._send(op, pb.GetReply(checksums=[plan.said]), page)
        elif op == "put":
            self._put(plan)
        else:
            self._sock.sendall(_frame(op, plan.said))

    def _put(self, plan: Plan) -> None:
        self._send("put", pb.PutReply(verdicts=[pb.EXISTS if plan.miss else pb.WRITE]))
        if plan.miss:
            return
        self._frames.arm(WAIT_S)
        header, nbytes = self._frames.recv_frame(MESSAGE_NBYTES_MAX)
        if header or nbytes != plan.nbytes:
            self._node.wrong.append(
                f"{plan.number}: a frame of {len(header)}+{nbytes} instead of page bytes"
            )
        if plan.unread and plan.fault in ("last", "hangs up"):
            self._fault(plan)  # before it has received them
        page = bytearray(nbytes)
        self._frames.recv_into(memoryview(page))
        if page != plan.page:
            self._node.wrong.append(f"{plan.number}: wrong page bytes")
        op, commit = self._request()
        if op != "commit" or list(commit.leaves) != [plan.name]:
            self._node.wrong.append(f"{plan.number}: {op} instead of its commit")
        if not self._fault(plan):
            self._send("commit", pb.CommitReply(stored=plan.number))

    def _fault(self, plan: Plan) -> bool:
        """Send the planned fault; return whether an error was the answer."""
        if plan.fault in ("error", "last"):
            error = pb.Error(code=NOT_FOUND, message=plan.name.decode(), last=plan.fault == "last")
            self._sock.sendall(_frame("error", error))
        if plan.fault in ("last", "hangs up"):
            raise HungUp
        return plan.fault == "error"

    def _request(self) -> tuple[str, Any]:
        self._frames.arm(WAIT_S)
        header, payload_nbytes = self._frames.recv_frame(MESSAGE_NBYTES_MAX)
        request = pb.BulkRequest.FromString(header)
        op = request.WhichOneof("op")
        if payload_nbytes or op is None:
            self._node.wrong.append(
                f"a frame of {len(header)}+{payload_nbytes} instead of a request"
            )
            raise HungUp
        return op, getattr(request, op)

    def _send(self, op: str, reply: Any, payload: bytes = b"") -> None:
        self._sock.sendall(_frame(op, reply, len(payload)) + payload)


def _frame(op: str, reply: Any, payload_nbytes: int = 0) -> bytes:
    data = reply if isinstance(reply, bytes) else reply.SerializeToString()
    header = delimited(pb.BulkReply.DESCRIPTOR.fields_by_name[op].number, data)
    return pack_fixed(len(header), payload_nbytes) + header
