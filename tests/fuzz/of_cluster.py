"""Cluster views, as nodes and engines receive them, and the contents of etcd."""

import json
import struct

from google.protobuf.message import DecodeError
from inside import KEYS, SPACE
from scripted import Bites
from watched import Target

from kvstore.cluster.view import Member, State, View, parse_view, static_view, view_message
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.messages import namespace_message, parse_namespace
from kvstore.pb import kvstore_pb2 as pb
from node.cluster.etcd import Change, Entry, KeysAtRevision
from node.cluster.registry_state import Registered, RegistryState, Settings

MEMBERS = (
    Member("n1", "10.0.0.1:7440"),
    Member("n2", "node-2.example:7440", 2.5, "rack-1", State.JOINING),
    Member("n3", "[fd00::3]:7440", 0.5, "rack-2", State.DRAINING),
)
FLEET = "fleet"


def use(view: View) -> None:
    """Use a view as its receivers do: serialize it and compute the owners of keys."""
    assert parse_view(pb.View.FromString(view.message.SerializeToString())) == view
    for placement in (view.owners, view.holders):
        for owners in placement.owners(SPACE.digest, KEYS):
            assert len(set(owners)) == len(owners)
            assert set(owners) <= set(view.by_id)


def views() -> Target:
    def once(data: bytes) -> None:
        use(parse_view(pb.View.FromString(data)))

    def seeds() -> list[bytes]:
        made = [View(FLEET, 7, MEMBERS, 2), View("one", 1, MEMBERS[:1]), View("none", 1, ())]
        return [view_message(view).SerializeToString() for view in made]

    return Target(once, seeds, (DecodeError,))


def lists() -> Target:
    """Make a target of values of `--cluster static:...`."""

    def once(data: bytes) -> None:
        use(static_view(data.decode(errors="surrogateescape")))

    made = [
        b"static:fleet/n1=a:1,n2=b:2@rack*2.5",
        b"static:f/n1=[::1]:7440",
        b"static:f/n1=h*1e-320,n2=g*nan",
    ]
    return Target(once, lambda: made, nbytes_max=512)


def registry_state() -> Target:
    """Make a target of keys and values in etcd: the first half is read, the rest are changes."""

    def once(data: bytes) -> None:
        bites = Bites(data)
        entries: list[tuple[str, Entry | None]] = []
        while bites.left and len(entries) < 64:
            gone = bites.number(1) == 255
            key = bites.sized(1).decode(errors="replace")  # as `Etcd` decodes it
            value = bites.sized(2)
            entries.append(
                (f"/kvstore/{FLEET}/{key}", None if gone else Entry(value, len(entries) + 1, 0))
            )
        half, known = len(entries) // 2, RegistryState(FLEET)
        known.reset(KeysAtRevision(half, {key: entry for key, entry in entries[:half] if entry}))
        _look(known)
        known.apply(
            Change(key, entry, number) for number, (key, entry) in enumerate(entries[half:], half)
        )
        _look(known)

    def seeds() -> list[bytes]:
        config = _entry("config", Settings(2, 10).value())
        members = [
            _entry(f"members/{m.id}", Registered(m, 4, "0011", "aabb").value()) for m in MEMBERS
        ]
        removed = _entry(
            f"removed/{SPACE.digest.hex()}", json.dumps({"removal": "00ff", "by": "n1"}).encode()
        )
        values = [Registered(m, 4, "0011", "aabb").value() for m in MEMBERS]
        odd = _entry("members/n4", values[0].replace(b"10.0.0.1", rb"\u00e4\u0000"))
        apart = _entry("members/n5", values[1].replace(b": 4,", b": 99,"))
        return [
            config + b"".join(members) + removed,
            b"".join(members) + config,
            removed * 2 + config + odd + apart,
        ]

    return Target(once, seeds, (ConfigError,))


def _entry(key: str, value: bytes) -> bytes:
    return struct.pack("<BB", 0, len(key)) + key.encode() + struct.pack("<H", len(value)) + value


def _look(known: RegistryState) -> None:
    """Read the state as the registry and `NodeStatus` do."""
    try:
        known.removals()
        view = known.view()
    finally:
        pb.PeersStatus(apart=known.apart)
    if view is not None:
        assert parse_view(view.message) == view


def descriptions() -> Target:
    """Make a target of serialized namespaces: parsing and serializing keeps value and digest."""

    def once(data: bytes) -> None:
        value = parse_namespace(data)
        again = parse_namespace(namespace_message(value).SerializeToString())
        assert again == value
        assert again.digest == value.digest

    return Target(once, lambda: [namespace_message(SPACE).SerializeToString()], (InvalidRequest,))


TARGETS = {
    "views": views,
    "member lists": lists,
    "etcd": registry_state,
    "descriptions": descriptions,
}
