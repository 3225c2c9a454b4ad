"""Build HTTP/2 by hand: frames, header blocks and gRPC calls, valid or not.

A frame is length (3 bytes), kind, flags, stream (4 bytes), body. Header blocks use HPACK without
Huffman coding.
"""

import functools
import struct
import zlib
from collections.abc import Mapping

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4  # flags
INITIAL_WINDOW, FRAME_NBYTES = 4, 5  # numbers of settings
FRAME_NBYTES_MAX = 1 << 14  # the largest frame that every peer accepts
WINDOW_NBYTES = 65535  # initial window of streams and connections
HEAD_NBYTES = 9
# HPACK: indexed field; literal added to the table; literal without indexing
_INDEXED, _ADDED, _PLAIN = 0x80, 0x40, 0x00
_TABLE_FIRST = 62  # index of the most recent entry


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body
    )


def settings(values: Mapping[int, int] | None = None) -> bytes:
    """Return a SETTINGS frame."""
    return frame(
        SETTINGS, 0, 0, b"".join(struct.pack(">HI", *item) for item in (values or {}).items())
    )


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ACKNOWLEDGED = frame(SETTINGS, ACK)
# A client's preface and settings, and its acknowledgement of the server's settings. Without that, a
# server closes the connection after a while.
GREETING = PREFACE + settings() + ACKNOWLEDGED


def length(nbytes: int) -> bytes:
    """Return an HPACK integer with a prefix of 7 bits."""
    if nbytes < 127:
        return bytes((nbytes,))
    coded, rest = bytearray((127,)), nbytes - 127
    while rest >= 128:
        coded.append(rest % 128 + 128)
        rest //= 128
    return bytes(coded) + bytes((rest,))


def field(name: str, value: str, form: int = _PLAIN) -> bytes:
    """Return a literal header field with a new name."""
    return bytes((form,)) + length(len(name)) + name.encode() + length(len(value)) + value.encode()


def call_fields(path: str, **more: str) -> dict[str, str]:
    """Return the header fields of a gRPC call; in names of `more`, `_` stands for `-`."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "node"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return fields | {name.replace("_", "-"): value for name, value in more.items()}


def block(fields: Mapping[str, str]) -> bytes:
    """Return a header block that does not change the peer's table."""
    return b"".join(field(*item) for item in fields.items())


def indexed(fields: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return a block that adds all fields to the peer's table, and the short block for later."""
    first = b"".join(field(*item, _ADDED) for item in fields.items())
    return first, bytes(_INDEXED | _TABLE_FIRST + index for index in reversed(range(len(fields))))


def message(payload: bytes, compressed: bool = False, nbytes: int | None = None) -> bytes:
    """Return a gRPC message; `nbytes` replaces the true length in its prefix."""
    return struct.pack(">BI", compressed, len(payload) if nbytes is None else nbytes) + payload


def data_frames(stream: int, body: bytes, ends: bool = True) -> bytes:
    """Return DATA frames of the largest size that every peer accepts."""
    pieces = [body[at : at + FRAME_NBYTES_MAX] for at in range(0, len(body), FRAME_NBYTES_MAX)]
    frames = b"".join(frame(DATA, 0, stream, piece) for piece in pieces)
    return frames + frame(DATA, END_STREAM, stream) if ends else frames


def call(path: str, payload: bytes = b"", stream: int = 1) -> bytes:
    """Return a complete gRPC call with one message."""
    head = frame(HEADERS, END_HEADERS, stream, block(call_fields(path)))
    return head + data_frames(stream, message(payload))


@functools.cache
def packed(encoding: str, mib: int) -> bytes:
    """Return `mib` MiB of zeros, compressed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, {"gzip": 31, "deflate": 15}[encoding])
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(mib)) + packer.flush()


def bomb(path: str, encoding: str, mib: int) -> bytes:
    """Return a call whose compressed message expands to `mib` MiB of zeros.

    60 MiB fit a stream's first window.
    """
    head = frame(HEADERS, END_HEADERS, 1, block(call_fields(path, grpc_encoding=encoding)))
    return head + data_frames(1, message(packed(encoding, mib), compressed=True))
