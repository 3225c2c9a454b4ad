"""A fixed sequence of bulk TCP requests to a node, for recording and replaying."""

import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvstore import LayerGroup, Namespace, PageLayout, Plane, prefix_hashes
from kvstore.checksum import leaves
from kvstore.config import PROTOCOL_VERSION
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import pack_fixed

FIXED = struct.Struct("<2sBBIQ")
PLANES = (Plane("k", "bfloat16", (2, 8)), Plane("v", "bfloat16", (2, 8)))
SPACE = Namespace(
    "golden",
    PageLayout(16, (LayerGroup("attention", tuple(range(4)), PLANES),)),
    revision="r1",
    salt="s",
)
KEYS = prefix_hashes(range(32), 16)
PAGES = [
    bytes((i * 7 + number) % 251 for i in range(SPACE.layout.page_nbytes)) for number in range(2)
]

# Reply fields whose values differ between nodes or over time.
OF_THE_MOMENT = {
    *(
        "version",
        "instance_id",
        "bulk_port",
        "metrics_port",
        "shm_socket",
        "protocol_version",
        "pid",
        "rss_nbytes",
    ),
    *(
        "uptime_ms",
        "age_ms",
        "idle_ms",
        "ttl_ms",
        "ttls_ms",
        "pin_ttl_ms",
        "message",
        "huge_nbytes",
        "session_count",
        "offsets",
    ),
}


class Exchange(NamedTuple):
    """A recorded request and the header of its reply.

    `request`: frames of a client, without the page bytes, which follow them if `data` is true. A
    reply is named by the kind of its message.
    """

    name: str
    request: bytes
    data: bool
    reply: bytes


def requests() -> Iterator[tuple[str, bytes, bool]]:
    """Yield the name, the frames and whether pages follow, in the order of the requests."""
    page: dict[str, Any] = {"namespace": SPACE.digest, "prefix_hashes": KEYS}
    named: dict[str, Any] = {
        "hello": {"hello": pb.HelloRequest(protocol_version=PROTOCOL_VERSION)},
        "unknown": {"lookup": pb.LookupRequest(namespace=b"\xff" * 16, prefix_hashes=KEYS)},
        "open": {
            "open_namespace": pb.OpenNamespaceRequest(
                namespace=namespace_message(SPACE), digest=SPACE.digest
            )
        },
        "miss": {"lookup": pb.LookupRequest(**page)},
        "put": {
            "put": pb.PutRequest(
                **page, page_nbytes=SPACE.layout.page_nbytes, ttl_ms=3_600_000, wait_ms=5000
            )
        },
        "commit": {"commit": pb.CommitRequest(leaves=[leaves(content) for content in PAGES])},
        "put again": {"put": pb.PutRequest(**page, page_nbytes=SPACE.layout.page_nbytes)},
        "lookup": {"lookup": pb.LookupRequest(**page, touch=True, near=True, wait_ms=1000)},
        "get": {"get": pb.GetRequest(**page, near=True, wait_ms=1000)},
        "ranges": {
            "get": pb.GetRequest(
                **page, ranges=[pb.ByteRange(offset=512, nbytes=256)], prefix_only=True
            )
        },
        "stat": {"stat": pb.StatRequest(**page)},
        "verify": {"verify": pb.VerifyRequest(**page)},
        "pin": {"pin": pb.PinRequest(**page, ttl_ms=60_000)},
        "unpin": {"unpin": pb.UnpinRequest(**page)},
        "list": {"list": pb.ListRequest(namespace=SPACE.digest, key_prefix=KEYS[0][:2], limit=5)},
        "namespaces": {"list_namespaces": pb.ListNamespacesRequest()},
        "status": {"node_status": pb.NodeStatusRequest()},
        "sweep": {"sweep": pb.SweepRequest(dry=True)},
        "remove": {"remove": pb.RemoveRequest(**page)},
        "remove all": {"remove_namespace": pb.RemoveNamespaceRequest(namespace=SPACE.digest)},
    }
    for name, op in named.items():
        header = pb.BulkRequest(**op).SerializeToString()
        data = pack_fixed(0, len(PAGES[0]) * 2) if name == "commit" else b""
        yield name, data + pack_fixed(len(header), 0) + header, bool(data)


class Caller:
    """A client connection that sends given bytes."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=30.0)

    def ask(self, request: bytes, data: bool) -> tuple[int, bytes, bytes]:
        """Return (frame version, header, payload) of the answer."""
        if data:
            request = request[: FIXED.size] + b"".join(PAGES) + request[FIXED.size :]
        self._sock.sendall(request)
        magic, version, _, header_nbytes, payload_nbytes = FIXED.unpack(self._receive(FIXED.size))
        assert magic == b"KV"
        return version, self._receive(header_nbytes), self._receive(payload_nbytes)

    def _receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            some = self._sock.recv(nbytes - len(data))
            assert some, "the node hung up"
            data += some
        return data

    def close(self) -> None:
        self._sock.close()


def unlike(was: Any, now: Any, path: str = "") -> list[str]:
    """Return the fields of a recorded reply that differ in the current reply; more may exist."""
    found: list[str] = []
    for field, value in was.ListFields():
        place, other = f"{path}.{field.name}", getattr(now, field.name)
        if field.name in OF_THE_MOMENT:
            continue
        if not hasattr(value, "ListFields") and not (
            hasattr(value, "append") and value and hasattr(value[0], "ListFields")
        ):
            found += [] if value == other else [f"{place}: {value!r} / {other!r}"]
        elif hasattr(value, "ListFields"):
            found += unlike(value, other, place)
        elif len(value) != len(other):
            found.append(f"{place}: {len(value)} / {len(other)}")
        else:
            found += [
                line
                for one, two in zip(value, other, strict=True)
                for line in unlike(one, two, f"{place}[]")
            ]
    return found
