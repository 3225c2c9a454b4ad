"""Frames of a gateway: an attacker in control of it has only the rights of the tokens it got."""

import contextlib
import os
from typing import Any

from inside import KEYS, OTHERS, SECRET, STORED, Inside
from of_access import TOKEN, guarded, of_others, replies
from of_frames import FRAMES, RAW, Server, conversations, serve
from scripted import ScriptedSocket, request, stream
from watched import Target

from kvstore.errors import KVStoreError
from kvstore.pb import kvstore_pb2 as pb
from node.memory.inventory import Inventory
from node.serving.gateway import GatewayConnection


class Socket(ScriptedSocket):
    """A scripted socket with a descriptor, on which a call polls for a hangup that never comes."""

    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self.fd


def frames() -> Target:
    house = Inside()

    def once(data: bytes) -> None:
        gateway_connection(house, Socket(stream(data)))

    return Target(
        once, lambda: _seeds([behalf()]), (ConnectionError, KVStoreError), house.check, house.close
    )


def strangers() -> Target:
    """Make a target of calls on behalf of callers without a known token.

    Each is refused whatever names it claims, and no page changes.
    """
    house = guarded()

    def once(data: bytes) -> None:
        sent = _asked(house, stream(data))
        assert all(reply.WhichOneof("op") == "error" for reply in replies(sent)), (
            "a caller without a token got a reply"
        )

    unknown = [
        b"",
        behalf(),
        behalf(authorization="Bearer x"),
        behalf(certificate=True, names=["reader"]),
    ]
    return Target(once, lambda: _seeds(unknown), check=house.check, close=house.close)


def readers() -> Target:
    """Make a target of calls with a reader's token: no reply has another tenant's data, and no page
    changes.
    """
    house = guarded()

    def once(data: bytes) -> None:
        first = stream(FRAMES + behalf(authorization=f"Bearer {TOKEN}"))
        sent = _asked(house, first + stream(data))
        assert SECRET[:64] not in sent, "a page of another tenant"
        assert not any(OTHERS.digest in reply.SerializeToString() for reply in replies(sent)), (
            "a reply names another tenant's namespace"
        )
        assert not any(
            info.pin_ttl_ms for info in Inventory(house.node.tier).stat(OTHERS.digest, KEYS)
        ), "a page of another tenant was pinned"

    def seeds() -> list[bytes]:
        return [*_seeds([b"", behalf()]), *(FRAMES + talk for talk in of_others())]

    return Target(once, seeds, check=house.check, close=house.close)


def _asked(house: Inside, data: bytes) -> bytearray:
    """Return the node's replies, after a check that no page was stored or removed."""
    scripted = Socket(data)
    with contextlib.suppress(ConnectionError, KVStoreError):  # sent as a reply before
        gateway_connection(house, scripted)
    assert house.node.tier.visible_count == 2 * STORED, "a page was stored or removed"
    return scripted.sent


def gateway_connection(house: Inside, scripted: Any) -> None:
    """Serve a scripted gateway connection to its end."""
    node = house.node
    serve(GatewayConnection(scripted, node.service, node.grpc.calls, 1.0), Server())


def behalf(**who: Any) -> bytes:
    return request(on_behalf=pb.OnBehalfRequest(address="10.0.0.7:5000", **who))


def _seeds(first: list[bytes]) -> list[bytes]:
    admit = [request(admit=pb.AdmitRequest(op=op)) for op in ("follow", "reflection", "put")]
    talks = [FRAMES + one + talk for one in first for talk in (*conversations(), *admit)]
    return [*talks, *(RAW + stream(talk) for talk in talks[::6])]


TARGETS = {"gateway frames": frames, "gateway strangers": strangers, "gateway readers": readers}
