"""R20: a page with a time to live is not found after it, in RAM or on disk."""

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from known_pages import Pages
from local_nodes import Connect, StartNode

from kvstore import Exhausted, PutOutcome
from kvstore.results import Keep
from kvstore.tools.node_process import NodeProcess

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(6)]


class Clock:
    """A clock in seconds since the epoch, set by the test."""

    def __init__(self) -> None:
        self.now_s = 2_000_000_000

    def __call__(self) -> int:
        return self.now_s


def put(client: Any, chain: Pages, keys: list[bytes], ttl_s: float) -> list[PutOutcome]:
    outcomes: list[PutOutcome] = client.put(
        chain.namespace, keys, [chain.content(key) for key in keys], Keep(ttl_s)
    )
    return outcomes


@pytest.mark.parametrize("tiers", ["ram", "ram and disk"])
def test_r20_each_key_has_its_own_time_to_live(
    tmp_path: Path, start_node: StartNode, connect: Connect, tiers: str
) -> None:
    """Pages with different times to live expire each at its own time, on each wire."""
    disk = {"data_dir": str(tmp_path), "disk_nbytes": 1 << 20, "disk_extent_nbytes": 64 << 10}
    node = start_node(**(disk if tiers != "ram" else {}))
    clock = Clock()
    node.tier.clock_s = clock
    if node.disk:
        node.disk._clock_s = clock
    ours = [(connect(node, wire), Pages(f"{wire} {tiers}")) for wire in ("shm", "bulk", "grpc")]
    for client, chain in ours:
        put(client, chain, KEYS[:2], 60.0)
        put(client, chain, KEYS[2:4], 120.0)
        put(client, chain, KEYS[4:], 0.0)
        if node.disk:
            client.flush()
    for after_s, alive in ((59, 6), (60, 4), (119, 4), (120, 2), (1 << 24, 2)):
        clock.now_s = 2_000_000_000 + after_s
        wanted = [False] * (6 - alive) + [True] * alive
        for client, chain in ours:
            assert list(client.lookup(chain.namespace, KEYS).present) == wanted, after_s
            assert chain.get(client, KEYS) == wanted, after_s
            assert [stat.present for stat in client.stat(chain.namespace, KEYS)] == wanted
            assert len(list(client.list_pages(chain.namespace))) == alive
    for client, chain in ours:
        counters = {space.digest: info.counters for space, info in client.namespaces()}
        assert counters[chain.namespace.digest].miss_expired > 0
        assert put(client, chain, KEYS[:2], 60.0) == [PutOutcome.STORED] * 2, (
            "the key of an expired page can not be stored again"
        )
        assert chain.get(client, KEYS[:2]) == [True] * 2


def test_r20_use_and_pin_do_not_extend_the_time_to_live(
    start_node: StartNode, connect: Connect, chain: Pages
) -> None:
    node = start_node()
    node.tier.clock_s = clock = Clock()
    client = connect(node)
    put(client, chain, KEYS, 10.0)
    client.pin(chain.namespace, KEYS, 1000.0)
    clock.now_s += 9
    assert all(chain.get(client, KEYS))
    assert put(client, chain, KEYS, 10.0) == [PutOutcome.EXISTS] * 6
    clock.now_s += 1
    assert not any(chain.get(client, KEYS))
    assert client.node_status().ram.used_nbytes == 0


def test_r20_time_to_live_holds_across_kill_9(
    tmp_path: Path, start_node: StartNode, connect: Connect, chain: Pages
) -> None:
    flags = ("--ram-bytes", "4MiB", "--data-dir", str(tmp_path), "--disk-bytes", "128MiB")
    process = NodeProcess(*flags)
    client = connect(process.address)
    mortal = [chain.content(key) for key in KEYS[:3]]
    with contextlib.suppress(Exhausted):  # a busy disk may take longer than they live
        client.put(chain.namespace, KEYS[:3], mortal, Keep(2.0, durable=True))
    client.put(
        chain.namespace,
        KEYS[3:],
        [chain.content(key) for key in KEYS[3:]],
        Keep(1000.0, durable=True),
    )
    acknowledged = time.time()
    process.kill()
    client = connect(start_node(data_dir=str(tmp_path), disk_nbytes=128 << 20))
    for _ in range(40):  # pages may have expired already; they must once the time is over
        is_over = time.time() >= acknowledged + 2.0
        hits = chain.get(client, KEYS)
        assert hits[3:] == [True] * 3
        if is_over:
            break
        time.sleep(0.1)
    assert is_over
    assert hits[:3] == [False] * 3
