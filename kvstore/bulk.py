"""The bulk TCP wire, client side: protobuf headers, then raw page bytes straight between the
caller's buffers and the socket."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.checksum import CHUNK_NBYTES, running_checksum
from kvstore.config import MESSAGE_NBYTES_MAX, PROTOCOL_VERSION, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, ProtocolError, Unavailable, from_status
from kvstore.frames import FrameSocket
from kvstore.pb import kvstore_pb2 as pb


class BulkWire:
    """A pool of connections to one node; a thread takes one for the length of a call.

    A connection that fails is closed, and with it everything the node held for it. The last one
    returned is the first one taken, so that an idle pool keeps few of them warm.
    """

    name = "bulk"

    def __init__(self, host: str, port: int, config: ClientConfig) -> None:
        self._address = (host, port)
        self._where = f"{host}:{port}"
        self._config = config
        self._turns = threading.BoundedSemaphore(config.connections_max)
        self._lock = threading.Lock()
        self._idle: list[FrameSocket] = []
        self._closed = False

    def connect(self, deadline: Deadline) -> None:
        """Makes sure that one connection can be had. Raises Unavailable or ProtocolError."""
        with self._connection(deadline):
            pass

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        with self._connection(deadline) as connection:
            return _exchange(connection, op, request)[0]

    def put(
        self, request: pb.PutRequest, pages: Sequence[memoryview], seeds: Sequence[int], deadline: Deadline
    ) -> list[int]:
        with self._connection(deadline) as connection:
            verdicts = list(_exchange(connection, "put", request)[0].verdicts)
            if len(verdicts) != len(pages):
                raise ProtocolError(f"{len(verdicts)} verdicts for {len(pages)} pages")
            chosen = [i for i, verdict in enumerate(verdicts) if verdict == pb.WRITE]
            if not chosen:
                return verdicts
            # The bytes, then their checksums in the commit: each chunk is hashed right before it
            # is sent, while it is in the cache.
            connection.send_frame(b"", sum(pages[i].nbytes for i in chosen))
            checksums = [_send_page(connection, pages[i], seeds[i]) for i in chosen]
            _exchange(connection, "commit", pb.CommitRequest(checksums=checksums))
            return verdicts

    def get(
        self, request: pb.GetRequest, buffers: Sequence[memoryview], seeds: Sequence[int], deadline: Deadline
    ) -> tuple[list[bool], list[int]]:
        with self._connection(deadline) as connection:
            reply, payload_nbytes = _exchange(connection, "get", request)
            hits = list(reply.hits)
            found = [i for i, hit in enumerate(hits) if hit]
            if (
                len(hits) != len(buffers)
                or payload_nbytes != sum(buffers[i].nbytes for i in found)
                or len(reply.checksums) != len(found)
            ):
                raise ProtocolError("the reply to a get does not fit its request")
            corrupt = []
            for i, expected in zip(found, reply.checksums, strict=True):
                if _recv_page(connection, buffers[i], seeds[i]) != expected:
                    hits[i] = False
                    corrupt.append(i)
            return hits, corrupt

    @contextlib.contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[FrameSocket]:
        if not self._turns.acquire(timeout=deadline.remaining()):
            count = self._config.connections_max
            raise Exhausted(f"all {count} connections (connections_max) stayed busy for {deadline.seconds:g} s")
        connection = None
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._connect(deadline)
            connection.arm(deadline.remaining())
            yield connection
            self._give_back(connection)
            connection = None
        except _Refused as refused:
            if not isinstance(refused.error, ProtocolError):  # after which the node hangs up
                self._give_back(connection)
                connection = None
            raise refused.error from None
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {self._where} in {deadline.seconds:g} s") from error
        except OSError as error:
            raise Unavailable(f"bulk connection to {self._where} failed: {error}") from error
        finally:
            if connection is not None:
                connection.close()
            self._turns.release()

    def _connect(self, deadline: Deadline) -> FrameSocket:
        timeout_s = min(self._config.connect_timeout_s, deadline.remaining())
        try:
            connection = FrameSocket(socket.create_connection(self._address, timeout=timeout_s))
        except TimeoutError as error:
            raise Unavailable(f"no bulk connection to {self._where} in {timeout_s:g} s") from error
        try:
            connection.arm(timeout_s)
            _exchange(connection, "hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION))
        except TimeoutError as error:
            connection.close()
            raise Unavailable(f"{self._where} accepts bulk connections but does not answer") from error
        except _Refused as refused:  # such as: all sessions are taken
            connection.close()
            raise refused.error from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: FrameSocket | None) -> None:
        assert connection is not None
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Closes idle connections; those in use close when their call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Refused(Exception):
    """The node answered with an error; the stream is in step."""

    def __init__(self, error: KVStoreError) -> None:
        self.error = error


def _exchange(connection: FrameSocket, op: str, request: Any) -> tuple[Any, int]:
    """Sends one request; returns the reply of the same kind and its payload's length."""
    connection.send_frame(pb.BulkRequest(**{op: request}).SerializeToString())
    header, payload_nbytes = connection.recv_frame(MESSAGE_NBYTES_MAX)
    try:
        reply = pb.BulkReply.FromString(header)
    except DecodeError as error:
        raise ProtocolError(f"the answer to {op} is not a BulkReply message") from error
    kind = reply.WhichOneof("op")
    if kind == "error":
        raise _Refused(from_status(reply.error.code, reply.error.message))
    if kind != op:
        raise ProtocolError(f"the node answered {op} with {kind}")
    return getattr(reply, op), payload_nbytes


def _send_page(connection: FrameSocket, page: memoryview, seed: int) -> bytes:
    hasher = running_checksum(seed)
    for start in range(0, page.nbytes, CHUNK_NBYTES):
        chunk = page[start : start + CHUNK_NBYTES]
        connection.send(chunk)
        hasher.update(chunk)
    return hasher.digest()


def _recv_page(connection: FrameSocket, buffer: memoryview, seed: int) -> bytes:
    hasher = running_checksum(seed)
    for start in range(0, buffer.nbytes, CHUNK_NBYTES):
        chunk = buffer[start : start + CHUNK_NBYTES]
        connection.recv_into(chunk)
        hasher.update(chunk)
    return hasher.digest()
