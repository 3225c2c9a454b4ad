"""Blocks computed before the agents' process is ready are saved once it is.

The test plays the process, so that it can start as slowly as needed.
"""

import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.blocks.save_plan import GroupBlocks, SaveOrder, SavePlan, StepOrders
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.worker import frames
from gpu_agent.worker import frames as channel
from gpu_agent.worker.frames import EngineEnd, Kind, Order, Saved
from gpu_agent.worker.process_backend import ProcessBackend
from gpu_agent.worker.worker_process import WorkerProcess, WorkerTimeouts
from kvstore import ClientConfig, Namespace
from kvstore.keys import prefix_hashes

BLOCK, BLOCKS = 16, 32
SAVE_S = 0.05  # the deadline of a save: shorter than any start here
WAIT_S = 60.0
NEVER_READY = "import time; time.sleep(600)"


class FakeProcess:
    """A stand-in for the agents' process: the other end of its socket, and the orders it got."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self._received = bytearray()

    def is_ready(self, at: float) -> None:
        self.sock.send(frames.frame(Kind.READY, struct.pack("<d", at)))

    def orders(self) -> list[Order]:
        """Return the saves ordered since the last call."""
        found = []
        try:
            while data := self.sock.recv(1 << 20):
                self._received += data
        except BlockingIOError:
            pass
        while (frame := channel._first(self._received)) is not None:
            if frame[0] is Kind.SAVE:
                found.append(frames.parse_order(frame[1]))
        return found

    def stored(self, order: Order) -> None:
        self.sock.send(frames.saved_frame(Saved(order.number, len(order.keys), 0, 0, None)))


def place() -> ShardPool:
    views = {f"layers.{i}": torch.zeros((BLOCKS, 2, BLOCK, 8), dtype=torch.uint8) for i in (0, 1)}
    pool = table_pool(views, BLOCKS, BLOCK)
    return ShardPool(Namespace(f"staging {secrets.token_hex(8)}", pool.layout), pool)


def keys(count: int) -> list[bytes]:
    return prefix_hashes([secrets.randbelow(1 << 30) for _ in range(count * BLOCK)], BLOCK)


def until(reached: Callable[[], bool], home: ProcessBackend) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        home.poll()
        time.sleep(0.01)


Starting = tuple[ProcessBackend, FakeProcess]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    """Return a backend whose process has been started but is not ready, and the process's stand-in.

    Messages of the process are received at once.
    """
    ours, theirs = socket.socketpair()

    def start(self: WorkerProcess) -> None:
        self._channel, self.ready, self._started_at = EngineEnd(ours), False, time.monotonic()
        self._process = SimpleNamespace(pid=1, kill=lambda: None, poll=lambda: 0)  # type: ignore[assignment]

    monkeypatch.setattr(WorkerProcess, "start", start)
    at_once = WorkerTimeouts(restart_s=0.01, saving_s=0.0, idle_s=0.0)
    config = AgentConfig(staging_nbytes=1 << 16, save_timeout_s=SAVE_S)
    with ours, theirs:
        yield (
            ProcessBackend([place()], ClientConfig(), config, timeouts=at_once),
            FakeProcess(theirs),
        )


def test_save_ordered_before_readiness_has_its_whole_deadline(
    starting: Starting,
) -> None:
    """Regression: with four engines on an H100, the start took longer than a save may."""
    home, process = starting
    (agent,) = home.agents(None)
    chain = keys(3)
    job = agent.save(chain, [1, 2, 3])
    home.poll()
    time.sleep(4 * SAVE_S)
    home.poll()
    assert not job.gathered.done()  # the blocks stay pinned, as they are unread
    ready_at = time.monotonic()
    process.is_ready(ready_at)
    home.poll()
    home.poll()
    (order,) = process.orders()
    assert (list(order.keys), order.until >= ready_at + SAVE_S) == (chain, True)
    process.stored(order)
    home.poll()
    assert job.done.result(0).stored == 3
    assert home.check() == []


def test_staged_saves_are_sent_in_order_a_few_per_step(starting: Starting) -> None:
    """No single step of the engine sends all of them."""
    home, process = starting
    (agent,) = home.agents(None)
    chains = [keys(1) for _ in range(50)]
    jobs = [agent.save(chain, [1]) for chain in chains]
    process.is_ready(time.monotonic())
    given: list[Order] = []
    counts = []
    while len(given) < len(jobs):
        home.poll()
        home.poll()
        new = process.orders()
        counts.append(len(new))
        given += new
        assert len(counts) < 50
    assert [order.keys[0] for order in given] == [chain[0] for chain in chains]
    assert max(counts) <= 32
    for order in given:
        process.stored(order)
    home.poll()
    assert all(job.done.result(0).stored == 1 for job in jobs)


def test_orders_waiting_for_a_process_have_a_limit(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "UNSENT_NBYTES_MAX", 10_000)
    home, _ = starting
    (agent,) = home.agents(None)
    jobs = [agent.save(keys(30), range(30)) for _ in range(100)]
    dropped = [job for job in jobs if job.done.done()]
    assert 90 < len(dropped) < 100
    assert {job.done.result(0).dropped for job in dropped} == {30}
    home.close()
    assert all(job.gathered.done() and job.done.result(0).dropped == 30 for job in jobs)


def test_staged_save_of_a_retired_namespace_is_dropped(starting: Starting) -> None:
    home, process = starting
    old = home.agents(None)
    job = old[0].save(keys(2), [1, 2])
    (new,) = home.agents(7)
    home.retire(old)
    assert (job.gathered.done(), job.done.result(0).dropped) == (True, 2)
    kept = new.save(keys(1), [3])
    process.is_ready(time.monotonic())
    home.poll()
    home.poll()
    (order,) = process.orders()
    process.stored(order)
    home.poll()
    assert kept.done.result(0).stored == 1


def test_wait_for_blocks_does_not_wait_for_the_process(
    starting: Starting,
) -> None:
    """In sleep mode the memory is freed now."""
    home, _ = starting
    (agent,) = home.agents(None)
    job = agent.save(keys(2), [1, 2])
    began = time.monotonic()
    home.wait([job.gathered])
    assert time.monotonic() - began < WAIT_S / 2
    assert job.done.result(0).dropped == 2


def test_staged_saves_free_their_blocks_when_blocks_are_scarce(starting: Starting) -> None:
    """Saves already given to a ready process free their blocks once they were read."""
    home, process = starting
    rank = BlockRank(home, writes=True)
    rank.save([SaveOrder(1, [GroupBlocks(0, keys(2), [1, 2])], ("request",))])
    rank.begin(StepOrders(1, None, [], []))
    assert rank.report().acknowledged == {}
    rank.begin(StepOrders(2, None, [], [], scarce=True))
    rank.loads_ended()
    assert rank.report().acknowledged == {1: 1}
    assert rank.take_counts().pages_dropped == 2
    rank.save([SaveOrder(2, [GroupBlocks(0, keys(1), [3])], ("request",))])
    process.is_ready(time.monotonic())
    home.poll()
    rank.begin(StepOrders(3, None, [], [], scarce=True))
    home.poll()
    assert [len(order.keys) for order in process.orders()] == [1]


def test_process_that_never_becomes_ready_keeps_no_block_pinned() -> None:
    """Pins end with the first start, dropped pages are counted, and later starts pin nothing."""
    timeouts = WorkerTimeouts(restart_s=0.05, close_s=2.0)
    home = ProcessBackend(
        [place()], ClientConfig(), AgentConfig(), [sys.executable, "-c", NEVER_READY], timeouts
    )
    rank = BlockRank(home, writes=True)
    pinned: set[int] = set()
    plan = SavePlan(1, 8, 4, pinned.update, pinned.difference_update)

    def step(number: int, blocks: list[int]) -> None:
        plan.begin(number)
        if plan.room >= len(blocks) and blocks:
            plan.stage("request", [GroupBlocks(0, keys(len(blocks)), blocks)])
        plan.ran(number)
        rank.begin(StepOrders(number, None, [], []))
        rank.save(plan.orders())
        rank.loads_ended()
        for job, ranks in rank.report().acknowledged.items():
            plan.acknowledge(job, ranks)

    try:
        step(1, [1, 2, 3, 4])
        assert pinned == {1, 2, 3, 4}
        home._child.timeouts = replace(timeouts, start_s=0.3)
        number, end = 2, time.monotonic() + WAIT_S
        while pinned:
            assert time.monotonic() < end
            step(number, [])
            number += 1
            time.sleep(0.01)
        until(lambda: home._child.listens, home)  # the next process starts
        step(number, [5, 6])
        step(number + 1, [])
        assert pinned == set()
        assert rank.take_counts().pages_dropped == 6
        assert not plan.busy
    finally:
        rank.close()


def test_startup_time_ends_when_the_process_was_ready(
    starting: Starting,
) -> None:
    home, process = starting
    rank = BlockRank(home, writes=True)
    home._child._started_at -= 30.0  # an idle engine does not poll
    rank.loads_ended()
    assert not rank.counted
    process.is_ready(home._child._started_at + 12.5)
    rank.loads_ended()
    assert rank.counted
    counts = rank.take_counts()
    assert (counts.agent_startups, counts.agent_startup_seconds) == (1, pytest.approx(12.5))
    rank.loads_ended()
    assert not rank.counted


def test_saves_between_two_processes_wait_for_the_next(
    starting: Starting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a ready process has died the next one starts at once."""
    home, process = starting
    (agent,) = home.agents(None)
    process.is_ready(time.monotonic())
    home.poll()
    ours, theirs = socket.socketpair()

    def again(self: WorkerProcess) -> None:
        self._channel, self.ready, self._started_at = EngineEnd(ours), False, time.monotonic()
        self._process = SimpleNamespace(pid=2, kill=lambda: None, poll=lambda: 0)  # type: ignore[assignment]

    monkeypatch.setattr(WorkerProcess, "start", again)
    home._child._end("a test")
    job = agent.save(keys(2), [1, 2])
    assert not job.done.done()
    until(lambda: home._child.listens, home)
    with ours, theirs:
        next_one = FakeProcess(theirs)
        next_one.is_ready(time.monotonic())
        home.poll()
        home.poll()
        (order,) = next_one.orders()
        next_one.stored(order)
        home.poll()
        assert job.done.result(0).stored == 2
