"""The parts of a load: whatever ends it, nothing moves any more then, and nothing that was fetched is held."""

import contextlib
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, hashes

from gpu_agent import Agent, AgentConfig, KVPool, TorchTransfer
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer
from gpu_agent.load_pipeline import Fetched, run_pipeline
from kvstore import Client, Namespace


@pytest.mark.parametrize("abreast", [False, True])
def test_a_load_that_ends_early_gives_back_the_part_behind_when_that_does_not_move_any_more(abreast: bool) -> None:
    """One by one the part behind was fetched ahead; abreast it is on its way to the slots."""
    chunk: Any = None
    begun, held = threading.Event(), set[range]()

    def fetch(part: range) -> Fetched:
        stack = contextlib.ExitStack()
        held.add(part)
        stack.callback(held.remove, part)
        if part.start:
            begun.set()
        return Fetched(chunk, stack)

    def place(part: range, _: Fetched) -> int:
        if part.start:
            time.sleep(0.2)
        return 0

    with ThreadPoolExecutor(2) as ahead:
        with contextlib.closing(run_pipeline([range(1), range(1, 2)], fetch, place, ahead, abreast)) as moved:
            assert next(moved) == 0
            assert begun.wait(WAIT_S)
        assert held == set()


@pytest.mark.parametrize("abreast", [False, True])
def test_parts_for_which_there_is_no_thread_move_in_the_callers_and_never_again(
    abreast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps what it can start no thread for: a part was moved once more, into slots that were others' then."""
    fetched, placed = list[range](), list[range]()

    def fetch(part: range) -> Fetched:
        fetched.append(part)
        nothing: Any = None
        return Fetched(nothing, contextlib.ExitStack())

    def place(part: range, _: Fetched) -> int:
        placed.append(part)
        return len(part)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parts = [range(n, n + 1) for n in range(4)]
    with ThreadPoolExecutor(2) as ahead:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert list(run_pipeline(parts, fetch, place, ahead, abreast)) == [1] * 4
        ahead.submit(lambda: None).result(WAIT_S)  # what was queued before has had its turn
    assert fetched == placed == parts


@pytest.mark.parametrize("gpu", [False, True])
def test_a_load_without_threads_for_its_parts_ends_well_and_writes_nothing_later(
    gpu: bool, shm_client: Client, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It failed, and a part of it was moved into the slots when they were another request's."""
    monkeypatch.setattr("gpu_agent.agent.IN_PLACE_NBYTES", 2 * token_pool.layout.page_nbytes)
    namespace = Namespace(model=f"parts-{uuid.uuid4()}", layout=token_pool.layout)
    transfer: Any = StagedTransfer(SimulatedDevice(seed), 4096) if gpu else TorchTransfer()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvstore-ahead"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with Agent(shm_client, namespace, token_pool, AgentConfig(workers=1, staging_nbytes=4096), transfer) as agent:
        assert agent.save(hashes(), SOURCE).done.result(WAIT_S).stored == PAGES
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            result = agent.load(hashes(), TARGET).done.result(WAIT_S)
        assert (result.pages, result.error) == (PAGES, None)
        for plane in token_pool.planes:
            plane.bits[TARGET] = 0
        agent._ahead.submit(lambda: None).result(WAIT_S)  # what was queued before has had its turn
        agent._ahead.shutdown()
        assert not any(plane.bits[TARGET].any() for plane in token_pool.planes)
