"""The bridge's streams: their bytes, what they forget and what they refuse."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, of the extra `events`")
pytest.importorskip("msgpack", reason="needs msgpack, of the extra `events`")

import msgpack
import zmq
from router_rules import DynamoSharedIndex, LlmdIndex
from waiting import wait_until
from zmq.utils.monitor import recv_monitor_message

from kvstore.bridge import publisher as module
from kvstore.bridge import wires
from kvstore.bridge.bridge import publish
from kvstore.bridge.publisher import Publisher, check_endpoint
from kvstore.bridge.stored_blocks import StoredBlocks
from kvstore.bridge.wires import FORMS, MooncakeWire, VllmWire
from kvstore.errors import ConfigError, InvalidRequest

A, B, C = (bytes([number]) * 32 for number in range(1, 4))


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_block_is_stored_while_one_kv_has_it() -> None:
    blocks = StoredBlocks()
    assert blocks.stored(b"x", 16, [A, B, A]) == [A, B]
    assert blocks.stored(b"x", 16, [A]) == [], "told again"
    assert blocks.stored(b"y", 32, [B, C]) == [C]
    assert blocks.removed(b"x", [A, B, C]) == [A], "y has B, and x never had C"
    assert blocks.removed(b"x", [B]) == []
    assert sorted(blocks.newest(8, 8)) == [(32, [B, C])]
    assert blocks.removed(b"y", [B, B]) == [B]
    assert len(blocks) == 1
    blocks.reset()
    assert [*blocks.newest(8, 8)] == []
    assert blocks.removed(b"y", [C]) == []


def test_bits_of_kvs_that_are_gone_are_used_again() -> None:
    told = StoredBlocks()
    told.stored(b"x", 16, [A])
    for number in range(1000):
        kv = number.to_bytes(8, "big")
        told.stored(kv, 32, [A, B])
        assert max(told._holders.values()) == 0b11
        told.stored(b"y", 64, [])
        assert told.removed(kv, [A, B, C]) == [B]
    assert [*told.newest(8, 8)] == [(16, [A])]


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


def test_llmd_learns_blocks_from_engines_and_forgets_those_that_nobody_has() -> None:
    wire, index, pods, pool = VllmWire("store", "m"), LlmdIndex(2), ["pod", "other"], "pool:store"
    engine: dict[str, Any] = {"type": "BlockStored", "block_hashes": [A], "medium": "GPU"}
    engine |= {"parent_block_hash": None, "token_ids": [1, 2]}
    for stored in (0.0, 1.0):  # the store had it before the engine did
        index.apply(pool, wire.cleared() + wire.stored(2, [A]))
        assert index.scores([1, 2], pods).get("other", 0.0) == stored
        index.apply("pod", [engine])
    index.apply("pod", [{"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU"}] * 2)
    assert index.scores([1, 2], pods) == {"pod": 1.0, "other": 1.0}
    index.apply(pool, wire.removed([A]))
    index.apply(pool, wire.stored(2, [A]))
    assert index.scores([1, 2], pods) == {}
    index.apply("pod", [engine])
    index.apply(pool, wire.cleared() + wire.stored(2, [A]))
    assert index.scores([1, 2], pods) == {"pod": 1.0, "other": 1.0}


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


@pytest.mark.parametrize("prefix", ["", "tag_org-m_"])
def test_block_has_the_name_that_dynamo_looks_up(prefix: str) -> None:
    """By another name Dynamo would look for each object in each lookup."""
    suffixes = ("_0_k", "_0_v")
    wire = MooncakeWire("p", "m", "default", [f"{prefix}{{hash}}{end}" for end in suffixes])
    index = DynamoSharedIndex()
    index.apply(1, wire.stored(4, [A, B]))
    assert index.hits([A, C], suffixes, prefix) == [True, False]
    assert index.groups_found == {f"sglang-hicache:{prefix}{A.hex()}"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: VllmWire("a@b", "m"),
        lambda: VllmWire("", "m"),
        lambda: VllmWire("p", "m m"),
        lambda: VllmWire("p", "m", "md5"),
        lambda: MooncakeWire("p", "m", "default", ["no place"], "{hash}"),
        lambda: MooncakeWire("p", "m", "default", ["{hash}"], "no place"),
        lambda: check_endpoint("*:5557"),
        lambda: check_endpoint("tcp://*:5557x"),
        lambda: check_endpoint("tcp://*:65536"),
        lambda: check_endpoint("tcp://[::1:5557"),
        lambda: check_endpoint("tcp://router:0", connect=True),
        lambda: check_endpoint("tcp://*:5557", connect=True),
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


def test_too_many_sockets_are_one_error(context: Any) -> None:
    context.set(zmq.MAX_SOCKETS, 1)
    made = [Publisher(context, VllmWire("p", "m"), "tcp://127.0.0.1:9", connect=True)]
    with pytest.raises(ConfigError, match="Too many open files"):
        Publisher(context, VllmWire("p", "m"), "tcp://127.0.0.1:9", connect=True)
    made[0].close()


def test_end_does_not_wait_for_a_name_that_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ's thread is in the resolver for seconds, and a context ends after its thread."""
    found, destroy, made = threading.Event(), zmq.Context.destroy, list[Any]()

    def late(context: Any, linger: int) -> None:
        found.wait(60)
        destroy(context, linger)

    def make(new_context: Callable[[], Any]) -> Sequence[Publisher]:
        made.extend(new_context() for _ in range(2))
        return []

    monkeypatch.setattr(zmq.Context, "destroy", late)
    client: Any = SimpleNamespace(feed=lambda model, idle_s: iter([]))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(client, "m", "", make, print, interrupted)
    assert [context.closed for context in made] == [False, False]
    found.set()
    wait_until(lambda: all(context.closed for context in made))


def test_path_in_use_is_one_error(context: Any, tmp_path: Path) -> None:
    """ZMQ itself would take it: the readers of the bridge there would wait without end."""
    path = tmp_path / "events.sock"
    reader = context.socket(zmq.SUB)
    reader.connect(f"ipc://{path}")
    reader.subscribe(b"")
    first = Publisher(context, VllmWire("p", "m"), f"ipc://{path}")
    for _ in range(2):
        with pytest.raises(ConfigError, match="another process listens"):
            Publisher(context, VllmWire("p", "m"), f"ipc://{path}")
    wait_until(lambda: first.serve() or first._asked)
    first.stored(16, [A])
    assert reader.poll(60_000)
    reader.close()
    first.close()


def test_path_of_a_bridge_that_was_killed_is_taken(context: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "events.sock"))
    Publisher(context, VllmWire("p", "m"), f"ipc://{tmp_path}/events.sock").close()


@pytest.mark.parametrize("name", ["notes", "no/where"])
def test_path_that_is_no_socket_is_one_error(context: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").write_text("kept")
    with pytest.raises(ConfigError, match="can not listen at ipc://"):
        Publisher(context, VllmWire("p", "m"), f"ipc://{tmp_path}/{name}")
    assert (tmp_path / "notes").read_text() == "kept"


@pytest.mark.parametrize("name", ["*", "@kvstore-test"])
def test_path_without_a_file_can_be_listened_at(context: Any, name: str) -> None:
    Publisher(context, VllmWire("p", "m"), f"ipc://{name}").close()


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
    assert [answer[3] != b"" for answer in answers] == [True, False]
    reader.close()
    publisher.close()


def test_reader_that_does_not_read_is_disconnected(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREAD_S", 0.1)
    publisher = Publisher(context, VllmWire("p", "m"), "tcp://127.0.0.1:*")
    monitor = publisher.sockets[0].get_monitor_socket(zmq.EVENT_DISCONNECTED)
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.RCVHWM, 1)
    reader.connect(publisher.addresses[0])
    reader.subscribe(b"")
    hashes = [number.to_bytes(32, "big") for number in range(1024)]

    def is_gone() -> bool:
        publisher.serve()
        publisher.stored(16, hashes)
        return bool(monitor.poll(1))

    wait_until(is_gone)
    assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
    reader.close()
    monitor.close()
    publisher.close()


def listening(context: Any, address: str = "tcp://127.0.0.1:*") -> Any:
    reader = context.socket(zmq.SUB)
    wait_until(lambda: is_bound(reader, address))
    return reader


def is_bound(reader: Any, address: str) -> bool:
    try:
        reader.bind(address)
    except zmq.ZMQError:  # the socket before this one closes in the background
        return False
    return True


def test_router_that_listens_gets_a_snapshot_whenever_it_starts(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-d's router listens for pools, and engines and the bridge connect."""
    monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 0.0)
    reader, told = listening(context), StoredBlocks()
    address = reader.getsockopt_string(zmq.LAST_ENDPOINT)
    publisher = Publisher(context, VllmWire("p", "m"), address, connect=True)
    for stored in (A, B):
        reader.subscribe(b"kv@")
        told.stored(b"x", 16, [stored])
        topic, _, batch = told_again(publisher, told, reader)
        assert topic == b"kv@pool:p@m"
        cleared, blocks = msgpack.unpackb(batch)[1]
        assert (cleared["type"], blocks["block_hashes"][-1]) == ("AllBlocksCleared", stored)
        reader.close()
        wait_until(lambda: publisher.serve() or publisher._unread_s is not None)
        publisher.removed([C])  # waits for nobody
        reader = listening(context, address)
    reader.close()
    publisher.close()


def test_router_that_forgot_a_connection_is_connected_to_again(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-d's did so while it closed its socket: accepted, it stayed open and was never read."""
    monkeypatch.setattr(module, "UNREAD_S", 0.1)
    reader = listening(context)
    monitor = reader.get_monitor_socket(zmq.EVENT_ACCEPTED)
    address = reader.getsockopt_string(zmq.LAST_ENDPOINT)
    publisher = Publisher(context, VllmWire("p", "m"), address, connect=True)
    for _ in range(3):
        wait_until(lambda: publisher.serve() or monitor.poll(10))
        recv_monitor_message(monitor)
    reader.subscribe(b"kv@")
    wait_until(lambda: publisher.serve() or reader.poll(10) or publisher._asked)
    reader.close()
    monitor.close()
    publisher.close()


def test_batches_are_kept_for_replays_only(context: Any) -> None:
    wire = MooncakeWire("p", "m", "default", ["{hash}_0_k"], "{hash}")
    publisher = Publisher(context, wire, "tcp://127.0.0.1:*")
    publisher.stored(16, [A, B])
    assert not publisher._kept
    publisher.close()


def told_again(publisher: Publisher, told: StoredBlocks, reader: Any) -> list[bytes]:
    def is_due() -> bool:
        publisher.serve()
        reader.poll(10)  # subscribes
        return publisher.wants_snapshot()

    wait_until(is_due)
    publisher.snapshot(told)
    assert reader.poll(60_000)
    frames: list[bytes] = reader.recv_multipart()
    return frames


def test_bridge_that_starts_again_is_another_stream() -> None:
    """A reader's socket connects again by itself: only the numbers tell it."""
    wire = MooncakeWire("p", "m", "default", ["{hash}_0_k", "{hash}_0_v"], "sglang-hicache:{hash}")
    index, endpoint = DynamoSharedIndex(), "tcp://127.0.0.1:*"
    with zmq.Context() as readers, readers.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        for stored in (A, B):
            told = StoredBlocks()
            told.stored(b"x", 16, [stored])
            with zmq.Context() as bridges:
                publisher = Publisher(bridges, wire, endpoint)
                if endpoint.endswith("*"):
                    endpoint = publisher.addresses[0]
                    reader.connect(endpoint)
                _, number, batch = told_again(publisher, told, reader)
                index.apply(int.from_bytes(number, "big"), msgpack.unpackb(batch)[1])
                publisher.close()
    assert index.hits([A, B], ("_0_k", "_0_v")) == [False, True]


def test_snapshot_takes_nothing_from_readers_that_lost_nothing(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may be sent every few seconds, because some reader comes and goes, and takes seconds."""
    monkeypatch.setattr(module, "HASHES_AT_ONCE", 1)
    publisher = Publisher(
        context, MooncakeWire("p", "m", "default", ["{hash}_0_k"]), "tcp://127.0.0.1:*"
    )
    index, told = DynamoSharedIndex(), StoredBlocks()
    told.stored(b"x", 16, [A, B])
    with context.socket(zmq.SUB) as reader:
        reader.connect(publisher.addresses[0])
        reader.subscribe(b"")

        def known(frames: list[bytes]) -> list[bool]:
            index.apply(int.from_bytes(frames[1], "big"), msgpack.unpackb(frames[2])[1])
            return index.hits([A, B], ["_0_k"])

        def next_known() -> list[bool]:
            assert reader.poll(60_000)
            return known(reader.recv_multipart())

        assert known(told_again(publisher, told, reader)) == [True, False]
        assert next_known() == [True, True]
        publisher.snapshot(told)
        assert [next_known() for _ in range(2)] == [[True, True]] * 2
        publisher.removed([B])
        assert reader.recv_multipart(), "this batch is lost"
        told.removed(b"x", [B])
        publisher.snapshot(told)
        assert next_known() == [True, False]
        publisher.cleared()
        assert next_known() == [False, False]
    publisher.close()


def test_readers_with_a_limit_know_the_newest_blocks(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo forgets all beyond its limit."""
    monkeypatch.setattr(wires, "ENTRIES_MAX", 3 * 16 + 2)
    monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 0.0)
    suffixes = ("_0_k", "_0_v")
    wire = MooncakeWire("p", "m", "default", [f"{{hash}}{end}" for end in suffixes])
    publisher = Publisher(context, wire, "tcp://127.0.0.1:*")
    keys = [bytes([number]) * 32 for number in range(100)]
    index, told = DynamoSharedIndex(3 * 16 + 2), StoredBlocks()
    with context.socket(zmq.SUB) as reader:
        reader.connect(publisher.addresses[0])
        reader.subscribe(b"")
        told_again(publisher, told, reader)

        def known() -> list[int]:
            if publisher.wants_snapshot():
                publisher.snapshot(told)
            while reader.poll(0):
                _, number, batch = reader.recv_multipart()
                index.apply(int.from_bytes(number, "big"), msgpack.unpackb(batch)[1])
            hits = index.hits(keys, suffixes)
            return [number for number, hit in enumerate(hits) if hit]

        def stored(*numbers: int) -> None:
            some = [keys[number] for number in numbers]
            publisher.stored(16, told.stored(b"x", 16, some))

        def removed(*numbers: int) -> None:
            publisher.removed(told.removed(b"x", [keys[number] for number in numbers]))

        stored(*range(16))
        removed(*range(8))
        stored(*range(8))
        wait_until(lambda: known() == [*range(16)])
        assert not publisher.wants_snapshot(), "all fit"
        for number in range(16, 100):
            stored(number)
            removed(number - 16)  # of these readers know some
            last = number
            wait_until(lambda last=last: last in known())  # type: ignore[misc]
            assert len(known()) >= 10
        removed(*range(84, 90))
        publisher.snapshot(told)
        wait_until(lambda: known() == [*range(90, 100)])
    publisher.close()
