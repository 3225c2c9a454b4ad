"""A node in the test's process without server threads: its connections are scripted, and each batch
of inputs gets a new node.
"""

import contextlib
import os
from typing import Any

from kvstore import Namespace, opaque_layout
from kvstore.checksum import leaves
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE
from node.config import NodeConfig
from node.server import Node

PAGE_NBYTES = 4096
SPACE = Namespace("fuzz", opaque_layout(PAGE_NBYTES))
# The namespace of another tenant, with pages of SECRET
OTHERS = Namespace("others", opaque_layout(PAGE_NBYTES), tenant="team-b")
SECRET = b"\x5a" * PAGE_NBYTES
KEYS = [bytes([number]) * 32 for number in range(8)]
STORED = 4  # how many of KEYS have pages
FRESH = KEYS[STORED:]
SETTINGS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "bulk_port": 0,
    "metrics_port": 0,
    "shm_socket": "none",
    "ram_nbytes": 2 << 20,
    "extent_nbytes": 256 << 10,
    "namespaces_max": 16,
    "drain_s": 0.0,
    "stall_s": 1.0,
}


class Inside:
    """A node with pages under the first STORED of KEYS in two namespaces; `check` replaces it."""

    def __init__(self, **settings: Any) -> None:
        self._settings = {**SETTINGS, **settings}
        self._begin()

    def _begin(self) -> None:
        self.node = Node(NodeConfig(**self._settings))
        self.node.service.feed.wait_s_max = 0.01
        self._store(SPACE, bytes(PAGE_NBYTES))
        self._store(OTHERS, SECRET)
        self._descriptors = len(sent_descriptors())  # those that this process had before

    def _store(self, space: Namespace, page: bytes) -> None:
        service, asked = self.node.service, put(KEYS[:STORED])
        asked.namespace = space.digest
        service.call(
            "open_namespace",
            pb.OpenNamespaceRequest(namespace=namespace_message(space), digest=space.digest),
            THE_NODE,
        )
        with service.sessions.open(THE_NODE) as session:
            _, views = service.begin_put(session, asked)
            for view in views:
                view[:] = page
            service.commit_put(session, commit(len(views), page))

    def check(self) -> list[str]:
        """Return what ended connections left behind in the node; then start a new node."""
        node, service = self.node, self.node.service
        wrong = node.check()
        left = {
            "sessions": node.sessions.count,
            "pages being written": node.tier.writing_count,
            "pages being read": node.tier.held_count,
            "bytes of requests": service.requests.used,
            "bytes reserved": node.sessions.reserved.used,
            "bytes held": node.sessions.held.used,
            "long calls": sum(budget.used for budget in service._long_calls.values()),
            "descriptors that clients sent": len(sent_descriptors()) - self._descriptors,
        }
        wrong += [f"{count} {what} are left" for what, count in left.items() if count]
        self.close()
        self._begin()
        return wrong

    def close(self) -> None:
        self.node._end()


def sent_descriptors() -> list[str]:
    """Return this process's open descriptors of the kinds that only scripts send."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of `listdir` itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link in ("anon_inode:[pidfd]", "/dev/zero")]


# ---- requests --------------------------------------------------------------------------------


def put(keys: list[bytes], **more: Any) -> pb.PutRequest:
    return pb.PutRequest(
        namespace=SPACE.digest, prefix_hashes=keys, page_nbytes=PAGE_NBYTES, **more
    )


def commit(count: int, page: bytes = bytes(PAGE_NBYTES)) -> pb.CommitRequest:
    return pb.CommitRequest(leaves=[leaves(page)] * count)


def opening(model: str) -> pb.OpenNamespaceRequest:
    value = Namespace(model, opaque_layout(PAGE_NBYTES))
    return pb.OpenNamespaceRequest(namespace=namespace_message(value), digest=value.digest)


def unary() -> dict[str, Any]:
    """Return one request of each unary operation, by its name in BulkRequest."""
    some: dict[str, Any] = {"namespace": SPACE.digest, "prefix_hashes": KEYS}
    return {
        "hello": pb.HelloRequest(protocol_version=4),
        "open_namespace": opening("other"),
        "list_namespaces": pb.ListNamespacesRequest(),
        "lookup": pb.LookupRequest(**some, touch=True, near=True, wait_ms=9),
        "verify": pb.VerifyRequest(**some),
        "remove": pb.RemoveRequest(namespace=SPACE.digest, prefix_hashes=KEYS[3:5]),
        "pin": pb.PinRequest(**some, ttl_ms=1000),
        "unpin": pb.UnpinRequest(**some),
        "hint": pb.HintRequest(**some, action=pb.HINT_RETAIN, ttl_ms=9, session=b"s"),
        "list": pb.ListRequest(
            namespace=SPACE.digest, key_prefix=b"\1", page_token=KEYS[0], limit=3
        ),
        "stat": pb.StatRequest(**some),
        "query": pb.QueryRequest(model="other", prefix_hashes=KEYS),
        "feed": pb.FeedRequest(model="other", cursor=bytes(28), wait_ms=9),
        "node_status": pb.NodeStatusRequest(),
        "remove_namespace": pb.RemoveNamespaceRequest(
            namespace=opening("other").digest, removal=bytes(16)
        ),
        "flush": pb.FlushRequest(),
        "scrub": pb.ScrubRequest(),
        "recover": pb.RecoverRequest(),
        "drain": pb.DrainRequest(),
        "sweep": pb.SweepRequest(dry=True),
        "record": pb.RecordRequest(ms=20),
        "events": pb.EventsRequest(limit=3),
        "push_identities": pb.PushIdentitiesRequest(content=b"token x\n", check=True),
    }


def gets() -> list[pb.GetRequest]:
    whole = pb.GetRequest(
        namespace=SPACE.digest, prefix_hashes=KEYS, prefix_only=True, near=True, wait_ms=9
    )
    ranges = [pb.ByteRange(offset=0, nbytes=16), pb.ByteRange(offset=4000, nbytes=96)]
    return [whole, pb.GetRequest(namespace=SPACE.digest, prefix_hashes=KEYS, ranges=ranges)]


def puts() -> list[pb.PutRequest]:
    return [
        put(FRESH[:2], ttl_ms=5000),
        put(KEYS[2:5], durable=True, wait_ms=9),
        put(FRESH[2:3], ack_all=True),
        put(FRESH[3:], forwarded_by="n1"),
    ]
