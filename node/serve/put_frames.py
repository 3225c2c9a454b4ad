"""The frames of a put over gRPC: what is in them, and their bytes where they belong."""

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest
from kvstore.messages import chunk_of
from kvstore.pb import kvstore_pb2 as pb
from node.serve.calls import Call


def part(frame: bytes | None, kind: str) -> Any:
    """The message in a PutFrame of that kind. Raises InvalidRequest for another one."""
    if frame is None:
        raise InvalidRequest(f"the put ended where a {kind} frame was expected")
    try:
        message = pb.PutFrame.FromString(frame)
    except DecodeError as error:
        raise InvalidRequest("a frame that is no PutFrame message") from error
    got = message.WhichOneof("frame")
    if got != kind:
        raise InvalidRequest(f"a {got} frame where a {kind} frame was expected")
    return getattr(message, kind)


async def fill(slots: list[memoryview], messages: AsyncIterator[Any], call: Call) -> None:
    """Copies chunks one after the other through the slots. Takes no chunk more than it needs."""
    chunk = memoryview(b"")
    for slot in slots:
        while slot.nbytes:
            if not chunk.nbytes:
                frame = await anext(messages, None)
                data = chunk_of(frame) if frame is not None else None
                chunk = memoryview(part(frame, "chunk").data) if data is None else data
                call.moved(chunk.nbytes)
                if not chunk.nbytes:
                    raise InvalidRequest(f"page bytes ended early: {slot.nbytes} bytes of a page are missing")
            count = min(chunk.nbytes, slot.nbytes)
            slot[:count] = chunk[:count]
            slot, chunk = slot[count:], chunk[count:]
    if chunk.nbytes:
        raise InvalidRequest(f"{chunk.nbytes} page bytes more than announced")
