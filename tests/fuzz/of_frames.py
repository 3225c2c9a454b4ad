"""Bytes of clients on bulk and shared-memory connections, answered by a real service."""

import contextlib
import os
import struct
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from google.protobuf.message import DecodeError
from inside import PAGE_NBYTES, Inside, commit, gets, puts, unary
from scripted import Bites, ScriptedSocket, payload, request, stream
from watched import Target

from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FIXED_NBYTES, FrameSocket, pack_fixed, unpack_fixed
from kvstore.transports.unix_sockets import DescriptorSocket
from node.auth.access import Caller
from node.serving import connection as connections
from node.serving.bulk import BulkConnection
from node.serving.connection import Ready
from node.serving.limits import REQUEST_NBYTES_FREE, inside
from node.serving.shm import ShmConnection

CALLER = Caller("fuzz")
FRAMES, RAW = b"\1", b"\0"
_UCRED = struct.Struct("@iII")


class Server:
    """Stand in for the server that accepted the connections."""

    def __init__(self, arena_fd: int = -1) -> None:
        self.arena_fd = arena_fd

    def begin(self, connection: Any) -> bool:
        return True

    def done(self, connection: Any) -> bool:
        return True

    has_loop = True

    def change_share(self, connection: Any) -> None: ...

    def wait_gone(self, connection: Any, process_fd: int, pages: int) -> bool:
        return True  # the client's process ends with its script


def conversations() -> list[bytes]:
    """Return conversations as steps of scripts: all requests, puts with pages, and invalid ones."""
    hello = request(hello=pb.HelloRequest(protocol_version=4))
    talks = [hello + request(**{op: message}) for op, message in unary().items()]
    talks += [hello + request(get=get) + request(release=pb.ReleaseRequest()) for get in gets()]
    talks += [
        hello
        + request(put=put)
        + payload(n * PAGE_NBYTES)
        + request(commit=commit(n, b"\7" * PAGE_NBYTES))
        for put in puts()
        for n in (1, 2)
    ]
    talks += [
        hello + request(put=puts()[0]) + request(commit=commit(2)),
        hello + b"\3" + b"\xff" * 12,
    ]
    return talks


# ---- bulk ------------------------------------------------------------------------------------


def bulk() -> Target:
    house = Inside()

    def once(data: bytes) -> None:
        bulk_connection(house, ScriptedSocket(stream(data)))

    def seeds() -> list[bytes]:
        raw = [RAW + stream(FRAMES + talk) for talk in conversations()[::4]]
        return [FRAMES + talk for talk in conversations()] + raw

    return Target(once, seeds, (ConnectionError,), house.check, house.close)


def bulk_connection(house: Inside, scripted: ScriptedSocket) -> None:
    """Serve a scripted bulk connection to its end."""
    serve(
        BulkConnection(FrameSocket(_socket(scripted)), "fuzz", CALLER, house.node.service, 1.0),
        Server(),
    )


def _socket(scripted: ScriptedSocket) -> Any:
    return scripted


def serve(connection: Any, server: Any) -> None:
    """Serve a connection to its end, small requests as the request loop does."""
    try:
        # The script has ended; a protocol error would be ConnectionAbortedError
        with contextlib.suppress(ConnectionResetError), patch.object(connections, "SMALL_RUN", 1):
            loop_goes_on = connection.serve(server)
            while loop_goes_on:
                what = _served(connection, server)
                loop_goes_on = what is Ready.SERVED or (
                    what is Ready.NEEDS_THREAD and connection.proceed(server)
                )
    finally:
        connection.close()


def _served(connection: Any, server: Any) -> Ready:
    what = Ready.ENDED
    try:
        what = connection.serve_ready(server)
    finally:
        if what is Ready.ENDED:
            connection.finish(server)
    return what


# ---- shared memory ---------------------------------------------------------------------------


def shm() -> Target:
    """Make a target of shared-memory connections.

    The first byte of an input selects the descriptor that comes with the first frame.
    """
    house = Inside()
    peer = _UCRED.pack(os.getpid(), os.geteuid(), 0)
    stranger = _UCRED.pack(os.getpid(), os.geteuid() + 7 or 1, 0)
    brought: list[Callable[[], list[int]]] = [
        lambda: [os.pidfd_open(os.getpid())],
        lambda: [os.open("/dev/zero", os.O_RDONLY)],
        lambda: [],
        lambda: [os.pidfd_open(os.getpid())],
    ]

    def once(data: bytes) -> None:
        choice = data[0] % len(brought) if data else 0
        scripted = ScriptedSocket(
            stream(data[1:]), brought[choice](), stranger if choice == 3 else peer
        )
        server: Any = Server(house.node.arena.fd)
        frames = DescriptorSocket(_socket(scripted))
        serve(ShmConnection(frames, CALLER, house.node.service, 1.0, server), server)

    def seeds() -> list[bytes]:
        talks = [b"\0" + FRAMES + talk for talk in conversations()]
        in_place = request(put=puts()[0]) + request(commit=commit(2)) + request(get=gets()[0])
        return [
            *talks,
            b"\0" + FRAMES + in_place,
            *(bytes([choice]) + talks[0][1:] for choice in (1, 2, 3)),
        ]

    return Target(once, seeds, (ConnectionError,), house.check, house.close)


# ---- parts of frames -------------------------------------------------------------------------


def fixed() -> Target:
    """Make a target of frame heads; accepted sizes are within their limits."""

    def once(data: bytes) -> None:
        header_nbytes, payload_nbytes = unpack_fixed(
            data[:FIXED_NBYTES].ljust(FIXED_NBYTES, b"\0"), MESSAGE_NBYTES_MAX
        )
        assert 0 <= header_nbytes <= MESSAGE_NBYTES_MAX
        assert 0 <= payload_nbytes < 1 << 64

    return Target(once, lambda: [pack_fixed(5, 0), pack_fixed(1 << 20, 1 << 40, 3)], nbytes_max=32)


def large() -> Target:
    """Make a target of large requests, which the node scans before it gives them to protobuf.

    Both must find the same operation.
    """
    house = Inside()

    def once(data: bytes) -> None:
        bites = Bites(data)
        shape, times = bites.number(1), bites.number(2)
        unit = bites.sized(1)
        header = bites.take(bites.left) + unit * min(
            times, (REQUEST_NBYTES_FREE << shape % 2) // max(1, len(unit))
        )
        op, inner = inside(header)
        message = pb.BulkRequest()
        try:
            message.MergeFromString(header)
        except DecodeError:
            return
        assert message.WhichOneof("op") == op, f"{message.WhichOneof('op')} is not {op}"
        assert house.node.service.request_parser.parsed(op, inner, "fuzz") == getattr(message, op)

    def seeds() -> list[bytes]:
        made = [pb.BulkRequest(get=get).SerializeToString() for get in gets()]
        made += [
            pb.BulkRequest(**{op: message}).SerializeToString() for op, message in unary().items()
        ]
        many = [
            pb.GetRequest(prefix_hashes=[bytes(40)]),
            pb.GetRequest(ranges=[pb.ByteRange(offset=9, nbytes=300)]),
        ]
        units = [unit.SerializeToString() for unit in many]
        nested = [
            struct.pack("<BHB", 1, 60000, len(unit)) + unit + _open_header(unit, 60000)
            for unit in units
        ]
        return [*nested, *(b"\0\0\0\0" + header for header in made)]

    return Target(once, seeds, check=house.check, close=house.close)


def _open_header(unit: bytes, times: int) -> bytes:
    """Return the tag and length of a get that has `unit` so many times."""
    nbytes = len(unit) * min(times, (REQUEST_NBYTES_FREE << 1) // len(unit))
    whole = pb.BulkRequest(get=pb.GetRequest(namespace=bytes(nbytes - 4))).SerializeToString()
    return whole[: len(whole) - nbytes]


TARGETS = {"bulk": bulk, "shm": shm, "frame heads": fixed, "large requests": large}
