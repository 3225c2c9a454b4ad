"""The bulk TCP wire, node side: page bytes straight between socket and arena.

put   request -> verdicts -> page bytes -> commit -> reply       (reserved until commit)
get   request -> reply + page bytes                              (held until sent)
"""

import socket
from typing import Any

from kvstore.checksum import CHUNK_NBYTES
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.errors import ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.wires.frames import FrameSocket
from node.serve.connections import BACKLOG, Connection, ConnectionServer
from node.serve.service import Service
from node.serve.session import Session


class BulkServer(ConnectionServer):
    """Listens from the constructor on; `start` begins to serve."""

    def __init__(self, host: str, port: int, service: Service, stall_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        super().__init__("bulk", listener, stall_s)
        self.port: int = listener.getsockname()[1]
        self._service = service

    def connection(self, sock: socket.socket, address: Any) -> Connection:
        return BulkConnection(FrameSocket(sock), f"{address[0]}:{address[1]}", self._service, self._stall_s)


class BulkConnection(Connection):
    """A transfer that moves no 256 KiB within `stall_s` ends the connection."""

    def transfer(self, session: Session, op: str, request: Any) -> bool:
        if op == "put":
            self._put(session, request)
        elif op == "get":
            self._get(session, request)
        elif op == "commit":
            raise ProtocolError("a commit without a put before it")
        elif op == "release":
            raise ProtocolError("a release on the bulk wire, where a get ends with its last byte")
        else:
            return False
        return True

    def _put(self, session: Session, request: pb.PutRequest) -> None:
        reply, slots = self.service.begin_put(session, request)
        self.send("put", reply)
        if not slots:
            return
        try:
            header, payload_nbytes = self._recv()
            wanted = sum(slot.nbytes for slot in slots)
            if header or payload_nbytes != wanted:
                raise ProtocolError(f"expected {wanted} page bytes, got a frame of {len(header)}+{payload_nbytes}")
            moved = CHUNK_NBYTES
            for slot in slots:
                for start in range(0, slot.nbytes, CHUNK_NBYTES):
                    if moved >= CHUNK_NBYTES:  # each 256 KiB has its time, small pages share it
                        self.socket.arm(self.stall_s)
                        moved = 0
                    self.socket.recv_into(slot[start : start + CHUNK_NBYTES])
                    moved += min(CHUNK_NBYTES, slot.nbytes - start)
            op, commit = self.parse(*self._recv())
            if op != "commit":
                raise ProtocolError(f"expected a commit after the page bytes, got {op}")
            self.send("commit", self.service.commit_put(session, commit))
        finally:
            session.abort()  # of what was not committed

    def _recv(self) -> tuple[bytes, int]:
        self.socket.arm(self.stall_s)
        return self.socket.recv_frame(MESSAGE_NBYTES_MAX)

    def _get(self, session: Session, request: pb.GetRequest) -> None:
        reply, pieces = self.service.begin_get(session, request)
        try:
            self.send("get", reply, sum(piece.nbytes for piece in pieces))
            for piece in pieces:
                for start in range(0, piece.nbytes, CHUNK_NBYTES):
                    self.socket.arm(self.stall_s)
                    self.socket.send(piece[start : start + CHUNK_NBYTES])
        finally:
            session.release()
