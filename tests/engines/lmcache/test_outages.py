"""R5, R7 and R11 on LMCache's own wrappers: a node that hangs, is killed, restarts or returns
damaged bytes; late answers; and close.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import stop

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

TIMES = {
    "lookup_timeout_s": 0.4,
    "load_timeout_s": 0.8,
    "save_timeout_s": 0.8,
    "backoff_s_max": 0.5,
}
SLACK_S = 10.0  # for a busy machine; without a deadline none of these calls would ever return


def within(seconds: float, call: Callable[[], Any]) -> Any:
    start = time.monotonic()
    result = call()
    assert time.monotonic() - start < seconds + SLACK_S
    return result


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "the node did not recover"
        time.sleep(0.1)


def test_hung_node_is_a_miss_in_time_and_hits_after_resuming(
    form: str,
    node: NodeProcess,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    keys_of: Any,
    objects_of: Any,
) -> None:
    driver = open_adapter(spec(form, node.address, **TIMES))
    keys, sources = keys_of(4), objects_of(4)
    assert driver.store(keys, sources).is_successful()
    stop(node.pid)
    try:
        targets = objects_of(4, fill=False)
        assert within(0.8, lambda: driver.load(keys, targets)) == [False] * 4
        assert within(0.4, lambda: driver.lookup(keys)) == [False] * 4
        assert not within(0.8, lambda: driver.store(keys, sources)).is_successful()
        within(0.4, lambda: driver.adapter.delete(keys[:1]))
        within(1.0, driver.adapter.report_status)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    eventually(lambda: driver.lookup(keys[1:]) == [True] * 3)
    eventually(lambda: driver.load(keys[1:], targets[1:]) == [True] * 3)
    for source, target in zip(sources[1:], targets[1:], strict=True):
        assert bytes(source.byte_array) == bytes(target.byte_array)


def test_killed_node_is_a_miss_and_hits_after_restart(
    form: str,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    start: Callable[..., NodeProcess],
    tmp_path: Path,
    keys_of: Any,
    objects_of: Any,
) -> None:
    """The node has a disk, so its objects hit again after the restart."""
    flags = ("--ram-bytes", "64MiB", "--extent-bytes", "16MiB", "--data-dir", str(tmp_path))
    keys, sources = keys_of(4), objects_of(4)
    with start(*flags) as node:
        driver = open_adapter(spec(form, node.address, **TIMES))
        assert driver.store(keys, sources).is_successful()
        with Client(ClientConfig(address=node.address)) as client:
            assert client.flush() == 4
        port = node.address.rpartition(":")[2]
        node.kill()
        assert within(0.4, lambda: driver.lookup(keys)) == [False] * 4
        assert within(0.8, lambda: driver.load(keys, objects_of(4, fill=False))) == [False] * 4
        assert not within(0.8, lambda: driver.store(keys, sources)).is_successful()
    with start(*flags, "--port", port):
        targets = objects_of(4, fill=False)
        eventually(lambda: driver.load(keys, targets) == [True] * 4)
        assert driver.lookup(keys) == [True] * 4
        assert [bytes(item.byte_array) for item in targets] == [
            bytes(item.byte_array) for item in sources
        ]
        assert driver.store(keys_of(2, 100), objects_of(2)).is_successful()


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_flipped_byte_is_a_miss(
    form: str,
    wire: str,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    shared_node: NodeProcess,
    keys_of: Any,
    objects_of: Any,
) -> None:
    """The byte is flipped directly in the node's memory."""
    driver = open_adapter(spec(form, shared_node.address, wire=wire))
    keys, sources = keys_of(3), objects_of(3)
    assert driver.store(keys, sources).is_successful()
    client = (
        driver.adapter._client._node.client
        if form == "native_plugin"
        else driver.adapter._node.client
    )
    with Client(ClientConfig(address=shared_node.address, wire="shm")) as mine:
        namespace = next(
            found
            for found, info in mine.namespaces()
            if found.digest in client._fan_out.nodes.only._connection.opened
        )
        with mine.open_get(namespace, [keys[1].chunk_hash]) as slots:
            slots.arena.memory[slots.offsets[0] + 100] ^= 4
    targets = objects_of(3, fill=False)
    assert driver.load(keys, targets) == [True, False, True]
    assert bytes(targets[2].byte_array) == bytes(sources[2].byte_array)
    assert driver.lookup(keys) == [True, False, True]


def test_close_ends_pending_calls(
    form: str,
    node: NodeProcess,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    keys_of: Any,
    objects_of: Any,
) -> None:
    """As at SIGTERM, calls are pending, the node hangs, and buffers are freed after close."""
    driver = open_adapter(spec(form, node.address, **TIMES))
    keys, sources = keys_of(4), objects_of(4)
    assert driver.store(keys, sources).is_successful()
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("kvstore-")}
    stop(node.pid)
    try:
        targets = objects_of(4, fill=False)
        for _ in range(20):
            driver.adapter.submit_load_task(keys, targets)
            driver.adapter.submit_store_task(keys, sources)
            driver.adapter.submit_lookup_and_lock_task(keys, {})
        within(6.0, driver.adapter.close)  # LMCache's wrapper waits for its own thread first
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert [
        thread.name for thread in threads if thread.is_alive() and "populate" not in thread.name
    ] == []
    time.sleep(0.3)
    assert not any(target.raw_data.view(torch.uint8).any() for target in targets)


def test_submit_never_blocks(
    form: str,
    node: NodeProcess,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    keys_of: Any,
    objects_of: Any,
) -> None:
    """LMCache submits while it holds a lock."""
    driver = open_adapter(spec(form, node.address, **TIMES))
    driver.store(keys_of(1), objects_of(1))
    keys, sources = keys_of(512), objects_of(512, shape=(64,))
    stop(node.pid)
    try:
        start = time.monotonic()
        for _ in range(4):
            driver.adapter.submit_store_task(keys, sources)
            driver.adapter.submit_lookup_and_lock_task(keys, {})
        # Eight submissions that waited for their deadlines would take 4.8 s.
        assert time.monotonic() - start < 4.5
    finally:
        os.kill(node.pid, signal.SIGCONT)
