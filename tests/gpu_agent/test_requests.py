"""The request ids in calls to nodes and in the log of an engine's process.

They follow from the engine's own request name, or each call of the engine gets its own id.
"""

import collections
import hashlib
import logging
import re
import time
import uuid

import pytest
import torch
from asking import traces_of_calls
from block_store import BLOCK, TOKENS, FakeRequest, Store

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.blocks.save_plan import GroupBlocks, SaveOrder, StepOrders
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.objects import parts as parts_module
from gpu_agent.objects.parts import ObjectName
from gpu_agent.objects.store import ObjectStore
from gpu_agent.worker import frames
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore import Client, ClientConfig, Namespace, opaque_layout, tracing
from kvstore.keys import prefix_hashes
from kvstore.tracing import Trace, named, packed_now, request, unpacked_all

WAIT_S = 60.0
NOWHERE = ClientConfig("127.0.0.1:1", timeout_s=5.0, connect_timeout_s=5.0)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Trace | None]:
    return traces_of_calls(monkeypatch)


def hashes(count: int) -> list[bytes]:
    return prefix_hashes([uuid.uuid4().int % (1 << 30) for _ in range(count)], 1)


# ---- with request names: blocks --------------------------------------------------------------


def test_all_calls_for_a_request_carry_its_id(client: Client, traces: list[Trace | None]) -> None:
    store = Store(client, uuid.uuid4().hex)
    try:
        first = FakeRequest("cmpl-7", TOKENS)
        store.scheduler.ask(first)
        assert store.matched(first) == 0
        store.scheduler.allocated(first, [[1, 2, 3, 4, 5]], 0)
        del traces[:]  # opening the namespace belongs to no request
        store.step((first, first.num_tokens, [1, 2, 3, 4, 5]))
        store.settle()
        store.scheduler.finished(first, [[1, 2, 3, 4, 5]])
    finally:
        store.close()
    assert traces
    assert set(traces) == {named("cmpl-7")}


def test_save_of_several_requests_carries_all_ids(
    client: Client, traces: list[Trace | None]
) -> None:
    store = Store(client, uuid.uuid4().hex)
    try:
        requests = [FakeRequest(f"cmpl-{i}", [i, *TOKENS[: 2 * BLOCK - 1]]) for i in range(2)]
        for one, blocks in zip(requests, ([1, 2], [3, 4]), strict=True):
            store.scheduler.ask(one)
            assert store.matched(one) == 0
            store.scheduler.allocated(one, [blocks], 0)
        del traces[:]
        store.step((requests[0], 2 * BLOCK, [1, 2]), (requests[1], 2 * BLOCK, [3, 4]))
        store.settle()
    finally:
        store.close()
    assert set(traces) == {named("cmpl-0")._replace(others=(named("cmpl-1"),))}


@pytest.fixture
def place() -> ShardPool:
    views = {f"layers.{i}": torch.zeros((8, 2, BLOCK, 8), dtype=torch.uint8) for i in (0, 1)}
    pool = table_pool(views, 8, BLOCK)
    return ShardPool(Namespace(uuid.uuid4().hex, pool.layout), pool)


def test_agents_process_logs_the_request_ids(
    place: ShardPool, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("gpu_agent").setLevel(logging.INFO)
    rank = BlockRank(
        ProcessBackend([place], NOWHERE, AgentConfig(staging_nbytes=1 << 16)), writes=True
    )
    try:
        rank.begin(StepOrders(1, None, [], []))
        rank.save([SaveOrder(0, [GroupBlocks(0, hashes(2), [1, 2])], ("cmpl-0", "cmpl-1"))])
        end = time.monotonic() + WAIT_S
        while rank.take_counts().pages_dropped < 2:  # until the save has ended, not only been read
            assert time.monotonic() < end
            rank.loads_ended()
            time.sleep(0.01)
    finally:
        rank.close()
        logging.getLogger("gpu_agent").setLevel(logging.NOTSET)
    ids = f"[request {named('cmpl-0').request_id}, {named('cmpl-1').request_id}]"
    log = capfd.readouterr().err
    assert re.search(rf"2 of 2 pages were not stored: .*{re.escape(ids)}", log), log


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_order_carries_its_requests(count: int) -> None:
    names = [f"cmpl-{i}" for i in range(count)]
    with request(*names) if names else tracing.NOTHING:
        order = frames.Order(1, 1, -1, 0.0, [b"k" * 32], {}, packed_now())
        expected = tracing.current()
    body = frames.order_frame(frames.Kind.SAVE, order)[frames.HEADER.size :]
    assert unpacked_all(frames.parse_order(body).trace) == expected
    assert len(order.trace) == count * tracing.PACKED_NBYTES


# ---- without request names -------------------------------------------------------------------


def test_parts_of_an_object_call_share_its_id(
    client: Client, traces: list[Trace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "PART_NBYTES", 4096)
    objects = ObjectStore(client, AgentConfig(staging_nbytes=1 << 20, lookup_timeout_s=5.0))
    try:
        scope, views = (
            Namespace(uuid.uuid4().hex, opaque_layout(4096)),
            list(torch.zeros((4, 4096), dtype=torch.uint8)),
        )
        names = [
            ObjectName(scope, hashlib.sha256(bytes([i])).digest(), opaque_layout(4096))
            for i in range(4)
        ]
        objects.put(names, views).result(WAIT_S)
        objects.exists(names).result(WAIT_S)
        with request("of the engine"):
            objects.get(names, views).result(WAIT_S)
    finally:
        objects.close()
    calls = collections.Counter(traces)
    assert calls.pop(named("of the engine")) >= 4, "expected one call per part"
    assert None not in calls
    assert min(calls.values()) == 1, "expected one lookup"
    assert max(calls.values()) >= 4, "expected one put per part"
    assert len(calls) == 2
