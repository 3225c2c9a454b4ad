"""The bridge's streams: their bytes, what they forget and what they refuse."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, of the extra `events`")
pytest.importorskip("msgpack", reason="needs msgpack, of the extra `events`")

import msgpack
import zmq

from kvstore.bridge.publisher import Publisher, check_endpoint
from kvstore.bridge.told import Told
from kvstore.bridge.wires import FORMS, MooncakeWire, VllmWire
from kvstore.errors import ConfigError, InvalidRequest

A, B, C = (bytes([number]) * 32 for number in range(1, 4))


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_block_is_stored_while_one_kv_has_it() -> None:
    told = Told()
    assert told.stored(b"x", 16, [A, B, A]) == [A, B]
    assert told.stored(b"x", 16, [A]) == [], "told again"
    assert told.stored(b"y", 32, [B, C]) == [C]
    assert told.removed(b"x", [A, B, C]) == [A], "y has B, and x never had C"
    assert told.removed(b"x", [B]) == []
    assert sorted(told.all(8)) == [(32, [B, C])]
    assert told.removed(b"y", [B, B]) == [B]
    assert len(told) == 1
    told.reset()
    assert [*told.all(8)] == []
    assert told.removed(b"y", [C]) == []


def test_events_of_vllm() -> None:
    wire = VllmWire("store", "org/m")
    assert wire.topic == b"kv@pool:store@org/m"
    ts, events, rank = msgpack.unpackb(wire.packed(wire.stored(16, [A]) + wire.removed([B])))
    assert (type(ts), rank) == (float, None)
    where = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "store"}
    assert events[0] == {
        **where,
        "type": "BlockStored",
        "block_hashes": [A],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "lora_name": None,
    }
    assert events[1] == {**where, "type": "BlockRemoved", "block_hashes": [B]}


def test_forms_of_hashes() -> None:
    key = bytes(range(224, 256))
    assert FORMS["bytes"](key) == key
    assert FORMS["low64"](key) == int(key.hex()[-16:], 16)
    assert FORMS["sglang"](key) == int(key.hex()[:16], 16) - (1 << 64)
    assert FORMS["sglang"](A) == int(A.hex()[:16], 16)


def test_events_of_mooncake() -> None:
    wire = MooncakeWire("store", "m", "default", ["{hash}_0_k", "t_{hash}"], "g:{hash}")
    ts, events, rank = msgpack.unpackb(wire.packed(wire.stored(64, [A]) + wire.removed([A])))
    assert (type(ts), rank) == (int, 0)
    assert [event["event_type"] for event in events] == ["stored"] * 2 + ["removed"] * 2
    assert [event["object_key"] for event in events[:2]] == [f"{A.hex()}_0_k", f"t_{A.hex()}"]
    assert {event["group_id"] for event in events} == {f"g:{A.hex()}"}
    assert [event["event_id"] for event in events] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: VllmWire("a@b", "m"),
        lambda: VllmWire("", "m"),
        lambda: VllmWire("p", "m m"),
        lambda: VllmWire("p", "m", "md5"),
        lambda: MooncakeWire("p", "m", "default", ["no place"], "{hash}"),
        lambda: MooncakeWire("p", "m", "default", ["{hash}"], ""),
        lambda: check_endpoint("*:5557"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest):
        make()


def test_address_in_use_is_one_error(context: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="in use"):
            Publisher(context, VllmWire("p", "m"), "tcp://127.0.0.1:*", address)


def test_garbage_from_readers_is_ignored(context: Any) -> None:
    publisher = Publisher(context, VllmWire("p", "m"), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher.stored(16, [A])
    reader = context.socket(zmq.DEALER)
    reader.connect(publisher.addresses[1])
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(8)]):
        reader.send_multipart(frames)
    answers = []
    while not answers or answers[-1][2] != (-1).to_bytes(8, "big", signed=True):
        publisher.serve()
        while reader.poll(10):
            answers.append(reader.recv_multipart())
    assert [int.from_bytes(answer[2], "big", signed=True) for answer in answers] == [0, -1]
    reader.close()
    publisher.close()
