"""Frames of a gateway: who controls one has only the rights of those whose tokens it was given."""

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
    """Nobody hangs up on it: a call asks the kernel for that."""

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
    """Whoever it says it is, without a token that is known: an answer is a refusal, and nothing
    changes.
    """
    house = guarded()

    def once(data: bytes) -> None:
        sent = _asked(house, stream(data))
        assert all(reply.WhichOneof("op") == "error" for reply in replies(sent)), (
            "a stranger is answered"
        )

    unknown = [
        b"",
        behalf(),
        behalf(authorization="Bearer x"),
        behalf(certificate=True, names=["reader"]),
    ]
    return Target(once, lambda: _seeds(unknown), check=house.check, close=house.close)


def readers() -> Target:
    """With the token of a reader: what is another tenant's is never told, and nothing changes."""
    house = guarded()

    def once(data: bytes) -> None:
        first = stream(FRAMES + behalf(authorization=f"Bearer {TOKEN}"))
        sent = _asked(house, first + stream(data))
        assert SECRET[:64] not in sent, "a page of another tenant"
        assert not any(OTHERS.digest in reply.SerializeToString() for reply in replies(sent)), (
            "another tenant's"
        )
        assert not any(
            info.pin_ttl_ms for info in Inventory(house.node.tier).stat(OTHERS.digest, KEYS)
        ), "a pin"

    def seeds() -> list[bytes]:
        return [*_seeds([b"", behalf()]), *(FRAMES + talk for talk in of_others())]

    return Target(once, seeds, check=house.check, close=house.close)


def _asked(house: Inside, data: bytes) -> bytearray:
    """What the node answers, which neither takes nor makes a page."""
    scripted = Socket(data)
    with contextlib.suppress(ConnectionError, KVStoreError):  # told before
        gateway_connection(house, scripted)
    assert house.node.tier.visible_count == 2 * STORED, "pages came or went"
    return scripted.sent


def gateway_connection(house: Inside, scripted: Any) -> None:
    """Served to its end."""
    node = house.node
    serve(GatewayConnection(scripted, node.service, node.grpc.calls, 1.0), Server())


def behalf(**who: Any) -> bytes:
    return request(on_behalf=pb.OnBehalfRequest(address="10.0.0.7:5000", **who))


def _seeds(first: list[bytes]) -> list[bytes]:
    admit = [request(admit=pb.AdmitRequest(op=op)) for op in ("follow", "reflection", "put")]
    talks = [FRAMES + one + talk for one in first for talk in (*conversations(), *admit)]
    return [*talks, *(RAW + stream(talk) for talk in talks[::6])]


TARGETS = {"gateway frames": frames, "gateway strangers": strangers, "gateway readers": readers}
