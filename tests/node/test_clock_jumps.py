"""The wall clock jumps by days, both ways, while a node serves; only displayed times follow it.

For a longer run set SEEDS=20 CALLS=100000.
"""

import contextlib
import hashlib
import importlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleets import SMALL
from local_nodes import Connect, StartNode

from kvstore import Client, Exhausted, Namespace, PutOutcome, opaque_layout
from kvstore.results import Keep
from kvstore.tools.trace import page_content
from node.config import NodeConfig
from node.server import Node

SEEDS = int(os.environ.get("SEEDS") or 1)
CALLS = int(os.environ.get("CALLS") or 200)
DAY_S = 86400.0
PAGE_NBYTES = 4096
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(40)]
DISK = {
    "ram_nbytes": 1 << 20,
    "extent_nbytes": 64 << 10,
    "disk_nbytes": 2 << 20,
    "disk_extent_nbytes": 64 << 10,
}
# gRPC's Python computes a call's deadline from time.time, but its C core reads the clock itself.
# Only Python's clock jumps here, so that the two would differ by days. A real clock jumps for both.
OF_GRPC = ("_channel", "_common", "_server", "_utilities")
SHORT_TTL_S, LONG_TTL_S, CALL_S = 1.0, 3600.0, 30.0


class WallClock:
    """A replacement of time.time that is wrong by `ahead_s`."""

    def __init__(self) -> None:
        self.right = time.time
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self.right() + self.ahead_s


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    clock = WallClock()
    for name in OF_GRPC:
        module = importlib.import_module(f"grpc.{name}")
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time)))
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock()))
    return clock


@pytest.fixture
def space(request: pytest.FixtureRequest) -> Namespace:
    return Namespace(request.node.name, opaque_layout(PAGE_NBYTES))


@pytest.fixture
def node(start_node: StartNode, tmp_path: Path, wall: WallClock) -> Iterator[Node]:
    node = start_node(**DISK, data_dir=str(tmp_path / "data"))
    yield node
    wall.ahead_s = 0.0


FOREVER = Keep()


def put(
    client: Client, space: Namespace, keys: list[bytes], keep: Keep = FOREVER
) -> list[PutOutcome]:
    return client.put(
        space, keys, [page_content(space.digest, key, PAGE_NBYTES) for key in keys], keep
    )


def get(client: Client, space: Namespace, keys: list[bytes]) -> list[bool]:
    """Return which pages were hits, after comparing the bytes of each."""
    buffers = [bytearray(PAGE_NBYTES) for _ in keys]
    hits = client.get(space, keys, buffers)
    for key, hit, buffer in zip(keys, hits, buffers, strict=True):
        assert not hit or buffer == page_content(space.digest, key, PAGE_NBYTES)
    return hits


@pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S])
@pytest.mark.parametrize("durable", [False, True])
def test_time_to_live_is_counted_without_the_wall_clock(
    node: Node, space: Namespace, connect: Connect, wall: WallClock, jump_s: float, durable: bool
) -> None:
    client = connect(node)
    long, short = KEYS[:2], KEYS[2:4]
    put(client, space, long, Keep(LONG_TTL_S, durable=durable))
    with contextlib.suppress(Exhausted):  # a busy disk may take longer than they live
        put(client, space, short, Keep(SHORT_TTL_S, durable=durable))
    began = time.monotonic()
    wall.ahead_s = jump_s
    assert get(client, space, long) == [True, True]
    left_ms = [stat.ttl_ms for stat in client.stat(space, long)]
    assert all(0 < ms <= 1000 * LONG_TTL_S for ms in left_ms)
    while time.monotonic() < began + SHORT_TTL_S + 1:  # a time to live is in whole seconds
        time.sleep(0.05)
    assert get(client, space, long + short) == [True, True, False, False]


def test_pin_holds_and_ends_without_the_wall_clock(
    node: Node, space: Namespace, connect: Connect, wall: WallClock
) -> None:
    client = connect(node)
    put(client, space, KEYS[:2], Keep(durable=True))
    wall.ahead_s = -3 * DAY_S
    client.pin(space, KEYS[:1], 600.0)
    wall.ahead_s = 3 * DAY_S
    pinned, other = client.stat(space, KEYS[:2])
    assert 0 < pinned.pin_ttl_ms <= 600_000
    assert other.pin_ttl_ms == 0


def test_page_written_under_a_wrong_clock_expires_on_restart(
    tmp_path: Path,
    space: Namespace,
    connect: Connect,
    wall: WallClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart with the right clock the page's expiry lies days ahead, so that its age is
    unknown: it must go.
    """
    wall.ahead_s, keys = 3 * DAY_S, KEYS[:2]
    # What node.clock computes when a process begins
    monkeypatch.setattr("node.clock._EPOCH_S", time.clock_gettime(time.CLOCK_BOOTTIME) - wall())
    config = NodeConfig(**{**SMALL, **DISK, "data_dir": str(tmp_path / "data")})
    node = Node(config)
    node.start()
    client = connect(node)
    put(client, space, keys[:1], Keep(LONG_TTL_S, durable=True))
    put(client, space, keys[1:], Keep(durable=True))
    node.stop()
    wall.ahead_s = 0.0
    monkeypatch.undo()
    node = Node(config)
    try:
        node.start()
        client = connect(node)
        assert get(client, space, keys) == [False, True]
        assert client.stat(space, keys)[1].idle_ms < 1000 * 3600
    finally:
        node.stop()


@pytest.mark.parametrize("number", range(SEEDS))
def test_random_calls_under_a_jumping_clock(
    node: Node, space: Namespace, connect: Connect, wall: WallClock, seed: int, number: int
) -> None:
    """Under a jumping clock pages expire on time, and calls stay within their deadlines.

    Pages with a long time to live, or none, stay. Pages with a short one are not found after it.
    """
    rng = random.Random(seed + number)
    clients = [connect(node, wire, timeout_s=CALL_S) for wire in ("shm", "bulk", "grpc")]
    stays, mortal = KEYS[:10], KEYS[10:]
    put(clients[0], space, stays[:5])
    put(clients[0], space, stays[5:], Keep(LONG_TTL_S + CALLS))
    ends: dict[bytes, float] = {}
    for _ in range(CALLS):
        if rng.random() < 0.3:
            wall.ahead_s = (
                rng.choice((-1, 1))
                * rng.choice((0.0, 1.0, 60.0, DAY_S, 400 * DAY_S))
                * rng.random()
            )
        client, began = rng.choice(clients), time.monotonic()
        some = rng.sample(mortal, 3)
        kind = rng.choice(("put", "get", "get", "stays", "stat", "lookup", "pin", "status"))
        if kind == "put":
            for key, outcome in zip(some, put(client, space, some, Keep(SHORT_TTL_S)), strict=True):
                if outcome is PutOutcome.STORED:
                    ends[key] = time.monotonic() + SHORT_TTL_S
        elif kind == "get":
            for key, hit in zip(some, get(client, space, some), strict=True):
                assert not hit or began <= ends[key], (
                    f"served {began - ends[key]:.2f} s after its expiry"
                )
        elif kind == "stays":
            assert all(get(client, space, rng.sample(stays, 4)))
        elif kind == "stat":
            for stat in client.stat(space, [*some, *stays]):
                assert 0 <= stat.ttl_ms <= 1000 * (LONG_TTL_S + CALLS)
                assert 0 <= stat.idle_ms < 1000 * (LONG_TTL_S + CALLS)
        elif kind == "lookup":
            assert client.lookup(space, stays).prefix_pages == len(stays)
        elif kind == "pin":
            client.pin(space, rng.sample(stays, 2), 0.05)
        else:
            assert client.node_status().uptime_ms < 1000 * (LONG_TTL_S + CALLS)
        assert time.monotonic() - began < CALL_S
