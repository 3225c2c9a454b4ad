"""Access rights: the identities file, and connections of callers with no or few rights."""

import contextlib
from collections.abc import Iterator
from typing import Any

from inside import KEYS, OTHERS, PAGE_NBYTES, SECRET, STORED, Inside, gets, opening, puts, unary
from of_frames import FRAMES, bulk_connection, conversations
from scripted import ScriptedSocket, payload, request, scratch, stream
from watched import Target

from kvstore.errors import KVStoreError
from kvstore.messages import namespace_message
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import ALL, parse, token_line
from kvstore.transports.frames import FIXED_NBYTES, unpack_fixed
from node.auth.access import Access
from node.memory.inventory import Inventory

TOKEN = "default." + "r" * 43
VALUE_NBYTES = 16  # a value of this length or more must not appear in a message about its line


def identities() -> Target:
    """Make a target that parses identities files.

    A message about a wrong line must not quote its values, and no principal may see another
    tenant's models unless they are shared.
    """

    def once(data: bytes) -> None:
        text = data.decode(errors="replace")
        found = parse(text)
        for word in text.split():
            value = word.partition("=")[2]
            assert len(value) < VALUE_NBYTES or not any(
                value in problem for problem in found.problems
            ), "a message quotes the value of a line"
        access = Access("")
        access._take(found)
        sharing = {share.tenant for share in found.shares}
        for principal in (*found.tokens.values(), *found.certificates.values()):
            for tenant in ("team-a", "team-b"):
                sees = access.sees(principal, tenant, "llama")
                assert not sees or tenant in sharing or principal.tenant in (ALL, tenant)
            access.why_no_arena(principal)

    return Target(
        once,
        lambda: [b"\n".join(_lines()), *_lines(), b"token  \0 = #", b"token a hash=" + b"0" * 64],
    )


def _lines() -> list[bytes]:
    expires = "2031-05-06T07:08:09Z"
    made = [
        token_line(
            "ci", TOKEN, tenant="team-a", role="write", models="llama-*,q[a-", expires=expires
        ),
        token_line("op", TOKEN + "x", tenant=ALL, role="admin"),
        "certificate gpu-7 tenant=team-b role=read expires=0001-01-01T00:00:00+23:59",
        "tenant team-a ram=40GiB disk=400GiB",
        "share team-a models=prompts-* with=team-b,team-c  # a comment",
    ]
    return [line.encode() for line in made]


# ---- connections -----------------------------------------------------------------------------


def strangers() -> Target:
    """Make a target of connections without a known token: each request is refused, and no page
    changes.
    """
    return _of(b"", lambda reply: reply.WhichOneof("op") == "error")


def readers() -> Target:
    """Make a target of connections with a reader's token: no reply has another tenant's data, and
    no page changes.
    """
    hello = request(hello=pb.HelloRequest(protocol_version=4, token=TOKEN))
    return _of(hello, lambda reply: OTHERS.digest not in reply.SerializeToString())


def guarded() -> Inside:
    """Return a node whose identities file has one reader."""
    path = scratch() / "identities"
    path.write_text(token_line("reader", TOKEN, tenant="default", role="read") + "\n")
    path.chmod(0o600)
    return Inside(identities=str(path))


def _of(first: bytes, fits: Any) -> Target:
    house = guarded()

    def once(data: bytes) -> None:
        scripted = ScriptedSocket(stream(FRAMES + first) + stream(data))
        with contextlib.suppress(ConnectionAbortedError, KVStoreError):  # sent as a reply before
            bulk_connection(house, scripted)
        assert SECRET[:64] not in scripted.sent, "a page of another tenant"
        assert all(map(fits, replies(scripted.sent))), "a reply that this caller must not get"
        tier = house.node.tier
        assert tier.visible_count == 2 * STORED, "a page was stored or removed"
        assert not any(info.pin_ttl_ms for info in Inventory(tier).stat(OTHERS.digest, KEYS)), (
            "a page of another tenant was pinned"
        )

    def seeds() -> list[bytes]:
        return [FRAMES + talk for talk in (*conversations(), *of_others())]

    return Target(once, seeds, check=house.check, close=house.close)


def of_others() -> list[bytes]:
    """Return a conversation for each request about the namespace of another tenant."""
    talks = []
    for op, message in {**unary(), "get": gets()[0], "put": puts()[0]}.items():
        if isinstance(getattr(message, "namespace", None), bytes):
            message.namespace = OTHERS.digest
            talks.append(request(**{op: message}) + payload(2 * PAGE_NBYTES))
    named = pb.OpenNamespaceRequest(namespace=namespace_message(OTHERS), digest=OTHERS.digest)
    return [*talks, request(open_namespace=named), request(open_namespace=opening("third"))]


def replies(sent: bytearray) -> Iterator[Any]:
    at = 0
    while at < len(sent):
        header_nbytes, payload_nbytes = unpack_fixed(sent[at : at + FIXED_NBYTES], 1 << 30)
        at += FIXED_NBYTES
        yield pb.BulkReply.FromString(bytes(sent[at : at + header_nbytes]))
        at += header_nbytes + payload_nbytes


TARGETS = {"identities": identities, "strangers": strangers, "readers": readers}
