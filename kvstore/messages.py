"""Convert between our values and protobuf messages."""

from collections.abc import Iterable, Iterator
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
    "part",
)


def namespace_message(namespace: Namespace) -> pb.Namespace:
    """Convert a namespace to its message."""
    scalars = {name: getattr(namespace, name) for name in _SCALARS}
    return pb.Namespace(layout=layout_message(namespace.layout), **scalars)


def namespace_value(message: pb.Namespace) -> Namespace:
    """Convert a message to a namespace. Raises InvalidRequest if a field is missing or invalid."""
    if not message.HasField("layout"):
        raise InvalidRequest("namespace: layout is missing")
    scalars = {name: getattr(message, name) for name in _SCALARS}
    return Namespace(layout=layout_value(message.layout), **scalars)


def parse_namespace(data: bytes) -> Namespace:
    """Parse a serialised Namespace message.

    Raises InvalidRequest if it is none, or a wrong one.
    """
    try:
        return namespace_value(pb.Namespace.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("namespace: not a Namespace message") from error


def layout_message(layout: PageLayout) -> pb.PageLayout:
    """Convert a page layout to its message."""
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
    """Convert a message to a page layout. Raises InvalidRequest."""
    groups = tuple(
        LayerGroup(
            group.name,
            tuple(group.layers),
            tuple(Plane(p.name, p.dtype, tuple(p.unit_shape), p.unit_tokens) for p in group.planes),
        )
        for group in message.groups
    )
    return PageLayout(message.page_tokens, groups)


def lookup_reply(present: list[bool], tiers: bytes = b"") -> pb.LookupReply:
    """Build the reply to a lookup from presence per key; without `tiers` all pages are in RAM.

    It is made from its wire form, a byte per key: protobuf's own assignment takes 0.2 µs per bool,
    for 64 keys as much as everything else in a lookup.
    """
    count = len(present)
    prefix_pages = present.index(False) if False in present else count
    data = (_PREFIX_PAGES_TAG, _varint(prefix_pages), _PRESENT_TAG, _varint(count), bytes(present))
    reply = pb.LookupReply.FromString(b"".join(data))
    if tiers:
        reply.tiers = tiers
    return reply


def get_reply(hits: list[bool], checksums: list[bytes], ttls_ms: list[int]) -> pb.GetReply:
    """Build the reply to a get; `hits` is merged as in `lookup_reply`."""
    reply = pb.GetReply(checksums=checksums, ttls_ms=ttls_ms)
    reply.MergeFromString(_HITS_TAG + _varint(len(hits)) + bytes(hits))
    return reply


def chunk_frame(pieces: list[memoryview]) -> bytes:
    """Build a GetFrame or PutFrame with a chunk of page bytes in its wire form.

    As protobuf messages, these bytes would be copied four times, each time into fresh memory.
    """
    return b"".join((chunk_head(sum(piece.nbytes for piece in pieces)), *pieces))


def chunk_head(nbytes: int) -> bytes:
    """Return the bytes before the page bytes in a frame with a chunk of that size."""
    data = _DATA_TAG + _varint(nbytes)
    return _CHUNK_TAG + _varint(len(data) + nbytes) + data


def chunk_of(frame: bytes) -> memoryview | None:
    """Return the page bytes of a frame that is only a chunk; None for other frames.

    Other implementations may encode the same frame differently: protobuf parses those.
    """
    inner, end = _length(frame, 0, _CHUNK_TAG)
    data, start = _length(frame, end, _DATA_TAG) if end else (0, 0)
    whole = start and end + inner == start + data == len(frame)
    return memoryview(frame)[start:] if whole else None


def delimited(number: int, data: bytes | memoryview) -> bytes:
    """Build a message with only this field, whose value is a message or bytes."""
    return b"".join((_varint(number << 3 | 2), _varint(len(data)), data))


def field_of(message: memoryview) -> tuple[int, memoryview]:
    """Return (number, value) of a message's only field; (0, empty) otherwise."""
    tag, start = _number(message, 0)
    nbytes, start = _number(message, start)
    whole = tag & 7 == 2 and start + nbytes == len(message)
    return (tag >> 3, message[start:]) if whole else (0, message[:0])


def _frames_of(message: memoryview) -> dict[int, memoryview]:
    """Return the frames of a transfer in one message by their field numbers.

    Empty if it has anything else, or one of them twice: protobuf parses those messages.
    """
    found: dict[int, memoryview] = {}
    position = 0
    while position < len(message):
        tag, start = _number(message, position)
        nbytes, start = _number(message, start)
        position = start + nbytes
        if not start or tag not in _FRAME_TAGS or tag in found or position > len(message):
            return {}
        found[tag] = message[start:position]
    return {tag >> 3: value for tag, value in found.items()}


def put_parts(request: bytes) -> tuple[memoryview, memoryview, memoryview]:
    """Return (begin, page bytes, commit) of a PutWholeRequest; begin and commit are serialised.

    Raises DecodeError.
    """
    fields = _frames_of(memoryview(request))
    data = _data_of(fields)
    if data is not None and _COMMIT in fields:
        return fields[_BEGIN], data, fields[_COMMIT]
    whole: Any = pb.PutWholeRequest.FromString(request)
    return (
        memoryview(whole.begin.SerializeToString()),
        memoryview(whole.chunk.data),
        memoryview(whole.commit.SerializeToString()),
    )


def get_parts(reply: bytes) -> tuple[pb.GetReply, memoryview]:
    """Return (begin, page bytes) of a GetWholeReply. Raises DecodeError."""
    fields = _frames_of(memoryview(reply))
    data = _data_of(fields)
    if data is not None:
        return pb.GetReply.FromString(bytes(fields[_BEGIN])), data
    whole = pb.GetWholeReply.FromString(reply)
    return whole.begin, memoryview(whole.chunk.data)


def _data_of(fields: dict[int, memoryview]) -> memoryview | None:
    """Return the page bytes among the frames of a transfer; None if there are no such frames."""
    number, data = field_of(fields.get(_CHUNK, memoryview(b"")))
    return data if number == _DATA and _BEGIN in fields else None


def _number(data: memoryview, position: int) -> tuple[int, int]:
    """Parse a varint of at most five bytes; return it and its end, (0, 0) if there is none."""
    value = 0
    for index in range(5):
        if position + index >= len(data):
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    return 0, 0


def _length(frame: bytes, position: int, tag: bytes) -> tuple[int, int]:
    """Return the length of the field with this tag at `position` and where its bytes begin.

    (0, 0) means that it is another field.
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


_SHORT = tuple(bytes((number,)) for number in range(0x80))


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# Wire type 0 is a number; 2: length-delimited, as packed repeated fields are.
_PREFIX_PAGES_TAG = _varint(pb.LookupReply.DESCRIPTOR.fields_by_name["prefix_pages"].number << 3)
_PRESENT_TAG = _varint(pb.LookupReply.DESCRIPTOR.fields_by_name["present"].number << 3 | 2)
_HITS_TAG = _varint(pb.GetReply.DESCRIPTOR.fields_by_name["hits"].number << 3 | 2)
_BEGIN, _CHUNK, _COMMIT = (
    pb.PutFrame.DESCRIPTOR.fields_by_name[name].number for name in ("begin", "chunk", "commit")
)
_DATA = pb.PageChunk.DATA_FIELD_NUMBER
_FRAME_TAGS = frozenset(number << 3 | 2 for number in (_BEGIN, _CHUNK, _COMMIT))
# The same for both kinds of frames; tests/core/test_messages.py compares with protobuf's output.
_CHUNK_TAG = _varint(pb.GetFrame.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2)
_DATA_TAG = _varint(pb.PageChunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2)

# Bytes of a frame with a whole chunk
FRAME_NBYTES = len(chunk_head(GRPC_CHUNK_NBYTES)) + GRPC_CHUNK_NBYTES


def result(message: Any) -> Any:
    """Convert a reply to its dataclass, as `kvstore.results.conversion.result` does."""
    from kvstore.results import conversion

    return conversion.result(message)


def results(values: Iterable[Any]) -> Iterator[Any]:
    """Convert messages, without those of a namespace that this version can not read."""
    from kvstore.results import conversion

    return conversion.results(values)


def plain(value: Any) -> dict[str, Any]:
    """Convert a message or its dataclass to JSON values: every field, bytes as hex."""
    from kvstore.results import conversion

    return conversion.plain(value)
