"""Replies of a malicious node over the bulk wire: a client misses or raises a KVStoreError."""

from typing import Any

from inside import KEYS, PAGE_NBYTES, SPACE, put, unary
from scripted import ScriptedSocket, payload, reply, stream
from watched import Target

from kvstore import ClientConfig
from kvstore.checksum import checksum, key_seed
from kvstore.deadline import Deadline
from kvstore.messages import lookup_reply
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.bulk import BulkConnector, BulkWire
from kvstore.transports.frames import pack_fixed

FILL = 7
PAGE = bytes([FILL]) * PAGE_NBYTES
ASKED = KEYS[:2]
OPS = ["get", "put", *unary(), "follow", "greet"]


class Deaf(BulkConnector):
    """A connector whose connections replay a script."""

    script = b""

    def _connected(self, limit: Deadline) -> Any:
        return ScriptedSocket(self.script)


def answers() -> Target:
    """Make a target of replies to a client; a hit must have the bytes of the requested page.

    The first byte of an input selects the request, the rest is the script of the node's replies,
    beginning with hello.
    """
    config = ClientConfig("127.0.0.1:1", wire="bulk", timeout_s=5.0)
    seeds = [key_seed(SPACE.digest, key) for key in ASKED]
    get = pb.GetRequest(namespace=SPACE.digest, prefix_hashes=ASKED)

    def once(data: bytes) -> None:
        op = OPS[(data[0] if data else 0) % len(OPS)]
        wire = BulkWire("127.0.0.1", 1, config)
        wire._connector = deaf = Deaf("127.0.0.1", 1, config)
        deaf.script = stream(data[1:])
        buffers = [bytearray(PAGE_NBYTES) for _ in ASKED]
        try:
            if op == "get":
                hits, _ = wire.get(
                    get, [(memoryview(buffer),) for buffer in buffers], seeds, Deadline(5.0)
                )
                assert all(page == PAGE for page, hit in zip(buffers, hits, strict=True) if hit), (
                    "a wrong page is a hit"
                )
            elif op == "put":
                wire.put(put(ASKED), [(memoryview(PAGE),)] * 2, Deadline(5.0))
            elif op == "follow":
                for view in wire.follow(1, 5.0, Deadline(5.0)):
                    assert view.members or view.number
            elif op == "greet":
                wire.greet(Deadline(5.0))
            else:
                wire.call(op, unary()[op], Deadline(5.0))
        finally:
            wire.close()

    return Target(once, _scripts)


def _scripts() -> list[bytes]:
    hello = b"\1" + reply(hello=pb.HelloReply(protocol_version=4, instance_id=bytes(8)))
    sums = [checksum(PAGE, key_seed(SPACE.digest, key)) for key in ASKED]
    # A raw frame with header and payload: a step of a script has only one of the two
    header = pb.BulkReply(
        get=pb.GetReply(hits=[True, False], checksums=sums[:1], ttls_ms=[9])
    ).SerializeToString()
    whole = b"\0" + stream(hello) + pack_fixed(len(header), PAGE_NBYTES) + header + PAGE
    put_ = reply(put=pb.PutReply(verdicts=[pb.WRITE, pb.EXISTS])) + reply(
        commit=pb.CommitReply(stored=1)
    )
    talks = {
        "put": put_,
        "get": reply(get=pb.GetReply(hits=[False, False])) + payload(PAGE_NBYTES, FILL),
        "lookup": reply(lookup=lookup_reply([True, False])),
        "list": reply(
            list=pb.ListReply(pages=[pb.PageStat(prefix_hash=KEYS[0])], next_page_token=b"t")
        ),
        "stat": reply(error=pb.Error(code=8, message="full")),
        "follow": reply(follow=pb.View()) + reply(follow=pb.View(cluster="c", number=2)),
        "greet": b"",
        "node_status": reply(node_status=pb.NodeStatusReply(disk=pb.DiskStatus(state="SERVING"))),
    }
    return [
        bytes((OPS.index("get"),)) + whole,
        *(bytes((OPS.index(op),)) + hello + talk for op, talk in talks.items()),
    ]


TARGETS = {"answers": answers}
