"""The parts of a load: when a load ends for any reason, no copy runs and no page is held."""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, hashes
from waiting import wait_until

from gpu_agent import Agent, AgentConfig, KVPool, LoadResult, TorchTransfer
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer
from gpu_agent.load_pipeline import LoadTask
from gpu_agent.transfer_path import Fetched, PageBatch
from kvstore import Client, Namespace, PutOutcome
from kvstore.deadline import Deadline
from kvstore.errors import Unavailable


class RecordedPath:
    """A `TransferPath` with one page per chunk that records its calls.

    It holds fetched pages and copies them by `place`.
    """

    asks_first = overlaps = True
    lost = False
    chunk_pages = 1

    def __init__(self, in_parallel: bool, place: Callable[[bytes], int]) -> None:
        self.in_parallel = in_parallel
        self.fetched, self.placed, self.held = list[bytes](), list[bytes](), set[bytes]()
        self._place = place

    def verifies_in_slots(self, pool: KVPool) -> bool:
        return self.in_parallel

    def save(self, chunk: PageBatch, gathered: object) -> list[PutOutcome]:
        raise AssertionError("a load saves nothing")

    def fetch(self, chunk: PageBatch) -> Fetched:
        (key,) = chunk.prefix_hashes
        stack = contextlib.ExitStack()
        self.held.add(key)
        stack.callback(self.held.remove, key)
        self.fetched.append(key)
        return Fetched(chunk, stack)

    def place(self, fetched: Fetched, skip_tokens: int, placed: object) -> int:
        (key,) = fetched.chunk.prefix_hashes
        self.placed.append(key)
        return self._place(key)


def load_task(pool: KVPool, count: int, ahead: ThreadPoolExecutor) -> LoadTask:
    table = pool.unit_table(torch.arange(count * pool.layout.page_tokens), count)
    namespace = Namespace(model="parts", layout=pool.layout)
    pages = PageBatch(namespace, hashes(count), pool, table, None, Deadline(WAIT_S))
    return LoadTask(pages, 0, None, ahead, threading.Event())


@pytest.mark.parametrize("in_parallel", [False, True])
def test_load_that_ends_early_waits_for_the_next_part_and_releases_it(
    in_parallel: bool, token_pool: KVPool
) -> None:
    """In turn, the next part is fetched ahead; in parallel, it is already being copied."""
    first, second = hashes(2)

    def place(key: bytes) -> int:
        if key == first:
            wait_until(lambda: second in path.fetched)
        else:
            time.sleep(0.2)
        return 0

    path = RecordedPath(in_parallel, place)
    with ThreadPoolExecutor(2) as ahead:
        task = load_task(token_pool, 2, ahead)
        assert task.run(path)
        assert path.held == set()
        assert sorted(path.placed) == sorted([first, second] if in_parallel else [first])
    assert task.result == LoadResult(0, 0)


@pytest.mark.parametrize("in_parallel", [False, True])
def test_parts_without_a_thread_are_copied_once_by_the_caller(
    in_parallel: bool, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a part was copied once more, into slots that belonged to others by then.

    A thread pool keeps a task that it could start no thread for.
    """
    path = RecordedPath(in_parallel, lambda _: 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ThreadPoolExecutor(2) as ahead:
        task = load_task(token_pool, 4, ahead)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert task.run(path)
        ahead.submit(lambda: None).result(WAIT_S)  # runs after everything queued before
    assert task.result == LoadResult(4, 4)
    assert path.fetched == path.placed == hashes(4)


@pytest.mark.parametrize("in_parallel", [False, True])
def test_load_continues_on_another_path_after_the_last_loaded_page(
    in_parallel: bool, token_pool: KVPool
) -> None:
    class LostPath(RecordedPath):
        def fetch(self, chunk: PageBatch) -> Fetched:
            if chunk.prefix_hashes[0] == hashes()[2]:
                self.lost = True
                raise Unavailable("the near node is gone")
            return super().fetch(chunk)

    lost, other = LostPath(in_parallel, lambda _: 1), RecordedPath(in_parallel, lambda _: 1)
    with ThreadPoolExecutor(2) as ahead:
        task = load_task(token_pool, 5, ahead)
        assert not task.run(lost)
        assert lost.held == set()
        assert task.result == LoadResult(2, 2)
        assert task.run(other)
    assert task.result == LoadResult(5, 5)
    assert sorted(other.placed) == sorted(hashes(5)[2:])


@pytest.mark.parametrize("gpu", [False, True])
def test_load_without_threads_succeeds_and_writes_nothing_later(
    gpu: bool, shm_client: Client, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Regression: the load failed, and a part was later copied into another request's slots."""
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 2 * token_pool.layout.page_nbytes)
    namespace = Namespace(model=f"parts-{uuid.uuid4()}", layout=token_pool.layout)
    transfer: Any = StagedTransfer(SimulatedDevice(seed), 4096) if gpu else TorchTransfer()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvstore-ahead"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with Agent(
        shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer
    ) as agent:
        assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == PAGES
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            result = agent.load(hashes(), TARGET).done.result(WAIT_S)
        assert (result.pages, result.error) == (PAGES, None)
        for plane in token_pool.planes:
            plane.bits[TARGET] = 0
        agent._ahead.submit(lambda: None).result(WAIT_S)  # runs after everything queued before
        agent._ahead.shutdown()
        assert not any(plane.bits[TARGET].any() for plane in token_pool.planes)
