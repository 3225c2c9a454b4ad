"""Dynamo's router on streams of the bridge's wires, without a node: names, limits and tiers."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, of the extra `events`")
pytest.importorskip("msgpack", reason="needs msgpack, of the extra `events`")

import msgpack
import zmq
from real_dynamo import BLOCK, INSTALLED, KEYS, STORE, TOKENS, WORKER, Deployment, Router, wait_for
from waiting import wait_until

from kvstore.bridge import publisher as module
from kvstore.bridge.publisher import Publisher
from kvstore.bridge.stored_blocks import StoredBlocks
from kvstore.bridge.wires import Event, MooncakeWire, VllmWire
from kvstore.keys import prefix_hashes

pytestmark = INSTALLED

ONE_RANK = ["{hash}_0_k", "{hash}_0_v"]
Open = Callable[[list[str]], Publisher]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return a function that opens the stream of these objects; it sends what a test sends."""
    monkeypatch.setattr(module, "SNAPSHOT_EVERY_S", 3600.0)
    context: Any = zmq.Context()
    publishers: list[Publisher] = []

    def publisher(objects: list[str]) -> Publisher:
        publishers.append(Publisher(context, wire_of(objects), "tcp://127.0.0.1:*"))
        return publishers[-1]

    yield publisher
    for one in publishers:
        one.close()
    context.term()


def wire_of(objects: list[str], tenant: str = "default", group: str = "") -> MooncakeWire:
    return MooncakeWire("kvstore", "m", tenant, objects, group)


def follow(router: Router, publisher: Publisher, component: str = WORKER) -> None:
    """Return when the router reads the stream."""
    router.shared(TOKENS, component)
    wait_until(lambda: publisher.serve() or publisher._asked)


LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ONE_RANK),
    "null": ({"key_prefix": None, "extra_backend_tag": None}, ONE_RANK),
    "tag": ({"extra_backend_tag": "T"}, ["T_{hash}_0_k", "T_{hash}_0_v"]),
    # What SGLang's workers publish: tag, and served name with `-` for each `/`
    "prefix": (
        {"key_prefix": "T_org-m", "extra_backend_tag": "T"},
        ["T_org-m_{hash}_0_k", "T_org-m_{hash}_0_v"],
    ),
    "ranks": ({"tp_size": 2}, [f"{{hash}}_{rank}_{plane}" for rank in "01" for plane in "kv"]),
    "stages": (
        {"tp_size": 2, "pp_size": 2},
        [f"{{hash}}_{rank}_{stage}_{plane}" for rank in "01" for stage in "01" for plane in "kv"],
    ),
    "latents": ({"is_mla_model": True, "tp_size": 4}, ["{hash}__k"]),
    "latents-in-stages": (
        {"is_mla_model": True, "tp_size": 4, "pp_size": 2},
        ["{hash}_0_k", "{hash}_1_k"],
    ),
    "shards": (
        {"tp_size": 2, "tp_lcm_size": 4, "should_split_heads": True},
        [f"{{hash}}_{shard}_{plane}" for shard in "0123" for plane in "kv"],
    ),
}


def test_names_of_objects_and_blocks(dynamo: Deployment, opened: Open) -> None:
    publishers = {name: opened(objects) for name, (_, objects) in LAYOUTS.items()}
    dynamo.workers(
        {
            name: {**STORE, **more, "kv_events_endpoint": publishers[name].addresses[0]}
            for name, (more, _) in LAYOUTS.items()
        }
    )
    router = dynamo.router()
    for name, publisher in publishers.items():
        objects = LAYOUTS[name][1]
        group = wire_of(objects)._group
        follow(router, publisher, name)
        publisher.stored(BLOCK, KEYS)
        wait_for(router, {0, 1, 2, 3, 4, 5}, name)
        # Looked up by its name, block 0 needs no object now. Blocks 1.. are without one object each
        publisher._send(wire_of(objects, group="another:{hash}").removed(KEYS[:1]))
        objects = objects[: len(KEYS) - 1]
        for number, key in enumerate(objects, 1):
            publisher._send(wire_of([key], group=group).removed([KEYS[number]]))
        wait_for(router, {0, *range(1 + len(objects), len(KEYS))}, name)


def test_streams_that_do_not_count(dynamo: Deployment, opened: Open) -> None:
    """Of another tenant, under names without the prefix, of pages of another size."""
    known: dict[str, dict[str, Any]] = {
        "tenant": {},
        "prefix": {"key_prefix": "m"},
        "size": {"page_size": 2 * BLOCK},
    }
    publishers = {name: opened(ONE_RANK) for name in known}
    dynamo.workers(
        {
            name: {**STORE, **more, "kv_events_endpoint": publishers[name].addresses[0]}
            for name, more in known.items()
        }
    )
    router = dynamo.router()
    for name, publisher in publishers.items():
        follow(router, publisher, name)
    publishers["tenant"]._send(wire_of(ONE_RANK, tenant="other").stored(BLOCK, KEYS))
    publishers["tenant"].stored(BLOCK, KEYS[5:])  # when this is known, the first was read
    publishers["prefix"].stored(BLOCK, KEYS)
    publishers["prefix"]._send(wire_of(["m_{hash}_0_k", "m_{hash}_0_v"]).stored(BLOCK, KEYS[5:]))
    publishers["size"].stored(BLOCK, KEYS)
    for name in ("tenant", "prefix"):
        wait_for(router, {5}, name)
    assert router.shared(TOKENS, "size") == set()


def test_hashes_of_drafting_models_are_of_pairs(dynamo: Deployment, opened: Open) -> None:
    publisher = opened(ONE_RANK)
    endpoint = {"kv_events_endpoint": publisher.addresses[0]}
    dynamo.workers({WORKER: {**STORE, "is_eagle": True, **endpoint}})
    router = dynamo.router()
    follow(router, publisher)
    pairs = [token for pair in itertools.pairwise(TOKENS) for token in pair]
    publisher.stored(BLOCK, prefix_hashes(pairs, 2 * BLOCK))
    wait_for(router, {0, 1, 2, 3, 4})  # the last token is in no pair


@pytest.mark.long
def test_million_entries_are_the_limit(dynamo: Deployment, opened: Open) -> None:
    """An object is an entry, and so is a block. Beyond it all is forgotten."""
    publisher = opened(ONE_RANK)
    dynamo.workers({WORKER: {**STORE, "kv_events_endpoint": publisher.addresses[0]}})
    router = dynamo.router()
    follow(router, publisher)
    told, most = StoredBlocks(), 1_000_000 // 3
    assert publisher._wire.blocks_max == most
    others = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(most)]

    def stored(keys: list[bytes]) -> None:
        publisher.stored(BLOCK, told.stored(b"kv", BLOCK, keys))

    stored(others[: most - 6])
    stored(KEYS)
    wait_for(router, {0, 1, 2, 3, 4, 5})
    stored(others[most - 6 :][:1])
    wait_for(router, set())
    publisher.snapshot(told)  # of the newest blocks, so that it is not too much again
    wait_for(router, {0, 1, 2, 3, 4, 5})
    stored(others[most - 5 :])
    publisher.removed(KEYS[:1])
    wait_for(router, {1, 2, 3, 4, 5})


def test_events_of_vllm_are_not_for_workers_of_dynamo(dynamo: Deployment) -> None:
    """They drop the store's blocks, and forget the engine's when the store's are cleared."""
    context: Any = zmq.Context()
    engine = context.socket(zmq.XPUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    dynamo.workers({WORKER: None}, engine=f"tcp://127.0.0.1:{port}")
    assert engine.poll(60_000)  # a worker subscribes
    router = dynamo.router(shared_cache_type="none", use_kv_events=True)
    wire, sent = VllmWire("kvstore", "m", "low64"), iter(range(1_000_000))

    def send(events: list[Event]) -> None:
        number = next(sent).to_bytes(8, "big")
        engine.send_multipart((b"", number, msgpack.packb([0.0, events, 0])))

    def stored(blocks: int, medium: str, **more: Any) -> list[Event]:
        (event,) = wire.stored(BLOCK, KEYS[:blocks])
        own = {"medium": medium, "locality": "LOCAL", "ownership": None}
        return [{**event, "token_ids": TOKENS[: blocks * BLOCK], **own, **more}]

    def own() -> tuple[int, int]:
        found = router.own(TOKENS)
        return found["device"], found["disk"]

    def told(events: list[Event], device: int, disk: int) -> None:
        """Send until the router knows; it may lose what it is told before it listens."""
        wait_until(lambda: send(events) or own() == (device, disk))

    told(stored(1, "GPU"), 1, 1)
    told(stored(2, "GPU"), 2, 2)
    send(wire.stored(BLOCK, KEYS))
    send(stored(5, "STORAGE", locality="REMOTE"))
    send(stored(5, "STORAGE", ownership="kvstore"))
    send(stored(5, "STORAGE", token_ids=[]))
    send(stored(5, "STORAGE", block_hashes=KEYS[:5]))
    send(stored(5, "KVSTORE"))
    send(wire.removed(KEYS[:1]))
    told(stored(3, "STORAGE"), 2, 3)
    told(wire.cleared(), 0, 0)
    engine.close(linger=0)
    context.term()
