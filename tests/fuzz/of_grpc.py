"""gRPC calls as the servicer gets them from gRPC: a stream of serialized messages for each call."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2
from inside import PAGE_NBYTES, STORED, Inside, commit, gets, puts, unary
from of_access import guarded
from scripted import Bites
from watched import Target

from kvstore.messages import chunk_of, put_parts
from kvstore.pb import kvstore_pb2 as pb
from node.gateway.server import NodeState, Servicer
from node.serving.gateway import GatewayDoor

MESSAGES_MAX = 16
OURS, REFLECTION = "kvstore.KVStore", "grpc.reflection.v1alpha.ServerReflection"
ENDLESS = ("Follow", "Watch", "Feed")  # left out: they wait, or tell for ever


class Context:
    """Stand in for the context of a gRPC call; replies are kept serialized."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:7"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    async def write(self, message: Any) -> None:
        self.written.append(message if isinstance(message, bytes) else message.SerializeToString())


class Served:
    """A gateway without gRPC, connected to a node: its calls are scripted, the node serves them."""

    def __init__(self, house: Inside) -> None:
        node = house.node
        door, self._door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections = GatewayDoor("fuzz", door, node.service, node.grpc.calls, 1.0)
        self._connections.start()
        self.servicer = Servicer(self._door, NodeState(), 32, 1.0)

    def close(self) -> None:
        self.servicer.upstream.close()
        self._door.close()
        self._connections.stop(10.0)
        assert not self._connections.count, "a connection outlived its gateway"


class Details:
    """The details of a call from which gRPC chooses the handler: the name of the method."""

    invocation_metadata: tuple[()] = ()

    def __init__(self, method: str) -> None:
        self.method = method


METHODS = sorted(
    f"/{OURS}/{method.name}" for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods
)
METHODS = [name for name in METHODS if not name.endswith(ENDLESS)] + [
    f"/{REFLECTION}/ServerReflectionInfo"
]


def calls() -> Target:
    """Make a target of gRPC calls.

    The first byte of an input selects the method; the rest are messages, each after its u16 length.
    """
    return _of(Inside(), lambda written: True)


def strangers() -> Target:
    """Make a target of calls without a token: none gets a reply, and no page changes."""
    house = guarded()
    return _of(house, lambda written: not written and house.node.tier.visible_count == 2 * STORED)


def _of(house: Inside, fits: Callable[[list[bytes]], bool]) -> Target:
    loop = asyncio.new_event_loop()
    served: list[Served] = []

    async def messages(bites: Bites, read: Any) -> AsyncIterator[Any]:
        for _ in range(MESSAGES_MAX):
            if bites.left:
                data = bites.sized(2)
                yield read(data) if read else data

    async def call(handler: Any, bites: Bites) -> None:
        context, given = Context(), messages(bites, handler.request_deserializer)
        try:
            if handler.unary_unary is None:
                await handler.stream_stream(given, context)
            elif (request := await anext(given, None)) is not None:
                reply = await handler.unary_unary(request, context)
                context.written += [] if reply is None else [reply]
        finally:
            await given.aclose()  # type: ignore[attr-defined]
        assert fits(context.written), "a reply that this caller must not get"

    def once(data: bytes) -> None:
        bites = Bites(data)
        name = METHODS[bites.number(1) % len(METHODS)]
        if not served:
            served.append(Served(house))
        handlers = served[0].servicer.handlers()
        loop.run_until_complete(
            call(next(filter(None, (some.service(Details(name)) for some in handlers))), bites)
        )

    def check() -> list[str]:
        while served:
            served.pop().close()
        return house.check()

    def close() -> None:
        while served:
            served.pop().close()
        loop.close()
        house.close()

    return Target(once, _conversations, (DecodeError,), check, close)


def _conversations() -> list[bytes]:
    talks = [_call(method.name, unary()[op]) for op, method in _unary_methods().items()]
    talks += [_call(name, get) for get in gets() for name in ("Get", "GetWhole")]
    page = bytes(PAGE_NBYTES)
    for put in puts():
        frames = [
            pb.PutFrame(begin=put),
            *(pb.PutFrame(chunk=pb.PageChunk(data=page[:n])) for n in (4096, 4000, 96)),
        ]
        talks.append(_call("Put", *frames, pb.PutFrame(commit=commit(2))))
        talks.append(_call("Put", *frames[:2], pb.PutFrame(commit=commit(1))))
        count = len(put.prefix_hashes)
        pages = pb.PageChunk(data=page * count)
        whole = pb.PutWholeRequest(begin=put, chunk=pages, commit=commit(count))
        talks.append(_call("PutWhole", whole))
    asked = reflection_pb2.ServerReflectionRequest
    names = [
        asked(list_services="*"),
        asked(file_containing_symbol=OURS),
        asked(file_by_filename="kvstore.proto"),
    ]
    extension = reflection_pb2.ExtensionRequest(containing_type=f"{OURS}.x", extension_number=1)
    return [
        *talks,
        _call("ServerReflectionInfo", *names, asked(file_containing_extension=extension)),
    ]


def _unary_methods() -> dict[str, Any]:
    kinds = {type(message).DESCRIPTOR.full_name: op for op, message in unary().items()}
    methods = pb.DESCRIPTOR.services_by_name["KVStore"].methods
    return {
        kinds[m.input_type.full_name]: m
        for m in methods
        if m.input_type.full_name in kinds and not m.name.endswith(ENDLESS)
    }


def _call(method: str, *messages: Any) -> bytes:
    number = next(n for n, name in enumerate(METHODS) if name.endswith(f"/{method}"))
    wire = [message.SerializeToString() for message in messages]
    return bytes((number,)) + b"".join(struct.pack("<H", len(data)) + data for data in wire)


def chunks() -> Target:
    """Make a target of page chunks, which are parsed without protobuf, with equal results."""

    def once(data: bytes) -> None:
        found = chunk_of(data)
        if found is None:
            return
        for kind in (pb.PutFrame, pb.GetFrame):
            message = kind.FromString(data)
            assert message.WhichOneof("frame") == "chunk", "a chunk that protobuf does not see"
            assert message.chunk.data == found, "protobuf finds other bytes"

    def seeds() -> list[bytes]:
        made = [
            pb.PutFrame(chunk=pb.PageChunk(data=bytes(n))).SerializeToString()
            for n in (0, 1, 127, 128, 300)
        ]
        return [
            *made,
            b"\x12\x84\x80\x80\x80\x00\x0a\x82\x80\x80\x00ab",
            b"\x12\x03\x0a\x01",
            made[1] + made[1],
        ]

    return Target(once, seeds, (DecodeError,), nbytes_max=512)


def wholes() -> Target:
    """Make a target of transfers in one message, parsed without protobuf, with equal results."""

    def once(data: bytes) -> None:
        begin, pages, commit = put_parts(data)
        whole = pb.PutWholeRequest.FromString(data)
        assert whole.begin == pb.PutRequest.FromString(bytes(begin))
        assert whole.chunk.data == pages, "protobuf finds other bytes"
        assert whole.commit == pb.CommitRequest.FromString(bytes(commit))

    def seeds() -> list[bytes]:
        put = pb.PutRequest(namespace=b"n" * 32, prefix_hashes=[b"k" * 32], page_nbytes=200)
        chunk = pb.PageChunk(data=bytes(200))
        leaves = pb.CommitRequest(leaves=[b"leaves.."])
        made = [
            pb.PutWholeRequest(begin=put, chunk=chunk, commit=leaves),
            pb.PutWholeRequest(begin=put, chunk=pb.PageChunk(data=b"x")),
            pb.PutWholeRequest(commit=leaves),
        ]
        wire = [message.SerializeToString() for message in made]
        return [*wire, wire[0] * 2, wire[2] + wire[1], wire[0] + b"\x22\x01a"]

    return Target(once, seeds, (DecodeError,), nbytes_max=512)


TARGETS = {
    "gRPC calls": calls,
    "gRPC strangers": strangers,
    "page chunks": chunks,
    "whole puts": wholes,
}
