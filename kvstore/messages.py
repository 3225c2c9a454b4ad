"""Between our values and the protobuf messages that carry them."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.config import GRPC_CHUNK_NBYTES
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace
from kvstore.layout import LayerGroup, PageLayout, Plane
from kvstore.pb import kvstore_pb2 as pb

# Namespace fields that the message has under the same name; the layout is a message of its own.
_SCALARS = (
    "tenant",
    "model",
    "revision",
    "tp_rank",
    "tp_size",
    "pp_rank",
    "pp_size",
    "cp_rank",
    "cp_size",
    "salt",
    "epoch",
    "key_id",
)


def namespace_message(namespace: Namespace) -> pb.Namespace:
    scalars = {name: getattr(namespace, name) for name in _SCALARS}
    return pb.Namespace(layout=layout_message(namespace.layout), **scalars)


def namespace_value(message: pb.Namespace) -> Namespace:
    """Raises InvalidRequest if a field is missing or out of range."""
    if not message.HasField("layout"):
        raise InvalidRequest("namespace: layout is missing")
    scalars = {name: getattr(message, name) for name in _SCALARS}
    return Namespace(layout=layout_value(message.layout), **scalars)


def parse_namespace(data: bytes) -> Namespace:
    """A serialised Namespace message.

    Raises InvalidRequest if it is none, or a wrong one.
    """
    try:
        return namespace_value(pb.Namespace.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("namespace: not a Namespace message") from error


def layout_message(layout: PageLayout) -> pb.PageLayout:
    groups = [
        pb.LayerGroup(
            name=group.name,
            layers=group.layers,
            planes=[
                pb.Plane(
                    name=p.name, dtype=p.dtype, unit_tokens=p.unit_tokens, unit_shape=p.unit_shape
                )
                for p in group.planes
            ],
        )
        for group in layout.groups
    ]
    return pb.PageLayout(page_tokens=layout.page_tokens, groups=groups)


def layout_value(message: pb.PageLayout) -> PageLayout:
    """Raises InvalidRequest if the message does not describe a layout."""
    groups = tuple(
        LayerGroup(
            group.name,
            tuple(group.layers),
            tuple(Plane(p.name, p.dtype, tuple(p.unit_shape), p.unit_tokens) for p in group.planes),
        )
        for group in message.groups
    )
    return PageLayout(message.page_tokens, groups)


def lookup_reply(present: list[bool]) -> pb.LookupReply:
    """The answer to a lookup: presence per key.

    `present` is merged in its wire form, a byte per key: protobuf's own assignment takes 0.2 µs for
    each bool, for 64 keys as much as all the rest that a node does for a lookup.
    """
    prefix_pages = present.index(False) if False in present else len(present)
    reply = pb.LookupReply(prefix_pages=prefix_pages)
    reply.MergeFromString(_PRESENT_TAG + _varint(len(present)) + bytes(present))
    return reply


def get_reply(hits: list[bool], checksums: list[bytes], ttls_ms: list[int]) -> pb.GetReply:
    """The answer to a get; `hits` as above."""
    reply = pb.GetReply(checksums=checksums, ttls_ms=ttls_ms)
    reply.MergeFromString(_HITS_TAG + _varint(len(hits)) + bytes(hits))
    return reply


def chunk_frame(pieces: list[memoryview]) -> bytes:
    """A GetFrame or PutFrame with a chunk of page bytes, in its wire form: as messages, these bytes
    would be copied four times, each time into memory that was just taken from the kernel.
    """
    return b"".join((chunk_head(sum(piece.nbytes for piece in pieces)), *pieces))


def chunk_head(nbytes: int) -> bytes:
    """What is before the page bytes in a frame with a chunk of so many of them."""
    data = _DATA_TAG + _varint(nbytes)
    return _CHUNK_TAG + _varint(len(data) + nbytes) + data


def chunk_of(frame: bytes) -> memoryview | None:
    """The page bytes of a frame that is nothing but a chunk, as other implementations write it,
    too; None for any other, which is for protobuf to read.
    """
    inner, end = _length(frame, 0, _CHUNK_TAG)
    data, start = _length(frame, end, _DATA_TAG) if end else (0, 0)
    whole = start and end + inner == start + data == len(frame)
    return memoryview(frame)[start:] if whole else None


def delimited(number: int, data: bytes | memoryview) -> bytes:
    """A message with nothing but this field, whose value `data` is a message or bytes."""
    return b"".join((_varint(number << 3 | 2), _varint(len(data)), data))


def field_of(message: memoryview) -> tuple[int, memoryview]:
    """(number, value) of the only field of a message, which is a message or bytes; (0, nothing) if
    it is another.
    """
    tag, start = _number(message, 0)
    nbytes, start = _number(message, start)
    whole = tag & 7 == 2 and start + nbytes == len(message)
    return (tag >> 3, message[start:]) if whole else (0, message[:0])


def _number(data: memoryview, position: int) -> tuple[int, int]:
    """(a number of at most five bytes at `position`, where it ends); 0 if there is none."""
    value = 0
    for index in range(5):
        if position + index >= len(data):
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    return 0, len(data)


def _length(frame: bytes, position: int, tag: bytes) -> tuple[int, int]:
    """(length of the field with this tag at `position`, where its bytes begin); (0, 0) if it is
    another.
    """
    if frame[position : position + 1] != tag:
        return 0, 0
    length = shift = 0
    for index in range(position + 1, min(position + 6, len(frame))):
        length |= (frame[index] & 0x7F) << shift
        if frame[index] < 0x80:
            return length, index + 1
        shift += 7
    return 0, 0


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# Wire type 2: length-delimited, as packed repeated fields are.
_PRESENT_TAG = _varint(pb.LookupReply.DESCRIPTOR.fields_by_name["present"].number << 3 | 2)
_HITS_TAG = _varint(pb.GetReply.DESCRIPTOR.fields_by_name["hits"].number << 3 | 2)
# Of both kinds of frames, which tests/core/test_messages.py compares with what protobuf makes.
_CHUNK_TAG = _varint(pb.GetFrame.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2)
_DATA_TAG = _varint(pb.PageChunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2)

FRAME_NBYTES = (
    len(chunk_head(GRPC_CHUNK_NBYTES)) + GRPC_CHUNK_NBYTES
)  # of a frame with a whole chunk


def add_counts(total: pb.NamespaceInfo, more: pb.NamespaceInfo) -> None:
    """Pages and counters of one namespace at another node."""
    total.page_count += more.page_count
    total.disk_page_count += more.disk_page_count
    for field, value in more.counters.ListFields():
        setattr(total.counters, field.name, getattr(total.counters, field.name) + value)


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON values: every field, bytes as hex."""
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        repeated = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        values[field.name] = [_plain(item) for item in value] if repeated else _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return plain(value) if hasattr(value, "DESCRIPTOR") else value
