"""What an engine computes before its agents' process is ready is stored when it is: the process is
played by the test, so that it starts as slowly as wanted.
"""

import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from gpu_agent import AgentConfig
from gpu_agent.blocks.backends import GroupPool
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.blocks.save_plan import SaveOrder, SavePart, SavePlan, StepOrders
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


class Played:
    """The agents' process, played by the test: the other end of its socket, and what it
    was given.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self._received = bytearray()

    def is_ready(self, at: float) -> None:
        self.sock.send(frames.frame(Kind.READY, struct.pack("<d", at)))

    def orders(self) -> list[Order]:
        """Saves that were given since the last call."""
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


def place() -> GroupPool:
    views = {f"layers.{i}": torch.zeros((BLOCKS, 2, BLOCK, 8), dtype=torch.uint8) for i in (0, 1)}
    pool = table_pool(views, BLOCKS, BLOCK)
    return GroupPool(Namespace(f"staging {secrets.token_hex(8)}", pool.layout), pool)


def keys(count: int) -> list[bytes]:
    return prefix_hashes([secrets.randbelow(1 << 30) for _ in range(count * BLOCK)], BLOCK)


def until(reached: Callable[[], bool], home: ProcessBackend) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        home.poll()
        time.sleep(0.01)


Starting = tuple[ProcessBackend, Played]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    """A process that has been started and is not ready yet.

    All that it says is heard at once.
    """
    ours, theirs = socket.socketpair()

    def start(self: WorkerProcess) -> None:
        self._channel, self.ready, self._started_at = EngineEnd(ours), False, time.monotonic()
        self._process = SimpleNamespace(pid=1, kill=lambda: None, poll=lambda: 0)  # type: ignore[assignment]

    monkeypatch.setattr(WorkerProcess, "start", start)
    at_once = WorkerTimeouts(restart_s=0.01, saving_s=0.0, idle_s=0.0)
    config = AgentConfig(staging_nbytes=1 << 16, save_timeout_s=SAVE_S)
    with ours, theirs:
        yield ProcessBackend([place()], ClientConfig(), config, timeouts=at_once), Played(theirs)


def test_a_save_ordered_before_the_process_is_ready_has_its_whole_deadline(
    starting: Starting,
) -> None:
    """An H100 with engines of four files that start beside each other: the process took longer than
    a save may.
    """
    home, played = starting
    (agent,) = home.agents(None)
    chain = keys(3)
    job = agent.save(chain, [1, 2, 3])
    home.poll()
    time.sleep(4 * SAVE_S)
    home.poll()
    assert not job.gathered.done()  # the blocks stay pinned: nobody has read them
    ready_at = time.monotonic()
    played.is_ready(ready_at)
    home.poll()
    home.poll()
    (order,) = played.orders()
    assert (list(order.keys), order.until >= ready_at + SAVE_S) == (chain, True)
    played.stored(order)
    home.poll()
    assert job.done.result(0).stored == 3
    assert home.check() == []


def test_staged_saves_are_given_in_order_and_a_few_in_a_step(starting: Starting) -> None:
    """However many there are, no step of the engine pays for all of them."""
    home, played = starting
    (agent,) = home.agents(None)
    chains = [keys(1) for _ in range(50)]
    jobs = [agent.save(chain, [1]) for chain in chains]
    played.is_ready(time.monotonic())
    given: list[Order] = []
    counts = []
    while len(given) < len(jobs):
        home.poll()
        home.poll()
        new = played.orders()
        counts.append(len(new))
        given += new
        assert len(counts) < 50
    assert [order.keys[0] for order in given] == [chain[0] for chain in chains]
    assert max(counts) <= 32
    for order in given:
        played.stored(order)
    home.poll()
    assert all(job.done.result(0).stored == 1 for job in jobs)


def test_orders_that_wait_for_a_process_have_a_limit(
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


def test_a_save_for_a_namespace_that_nobody_reads_any_more_is_not_kept(starting: Starting) -> None:
    home, played = starting
    old = home.agents(None)
    job = old[0].save(keys(2), [1, 2])
    (new,) = home.agents(7)
    home.retire(old)
    assert (job.gathered.done(), job.done.result(0).dropped) == (True, 2)
    kept = new.save(keys(1), [3])
    played.is_ready(time.monotonic())
    home.poll()
    home.poll()
    (order,) = played.orders()
    played.stored(order)
    home.poll()
    assert kept.done.result(0).stored == 1


def test_an_engine_that_waits_for_its_blocks_does_not_wait_for_a_process(
    starting: Starting,
) -> None:
    """Sleep mode: the memory goes away now."""
    home, _ = starting
    (agent,) = home.agents(None)
    job = agent.save(keys(2), [1, 2])
    began = time.monotonic()
    home.wait([job.gathered])
    assert time.monotonic() - began < WAIT_S / 2
    assert job.done.result(0).dropped == 2


def test_an_engine_that_lacks_blocks_gets_those_of_staged_saves_back(starting: Starting) -> None:
    """And those of saves that were given to a process that is ready when they have been read."""
    home, played = starting
    rank = BlockRank(home, writes=True)
    rank.save([SaveOrder(1, [SavePart(0, keys(2), [1, 2])], ("request",))])
    rank.begin(StepOrders(1, None, [], []))
    assert rank.report().acknowledged == {}
    rank.begin(StepOrders(2, None, [], [], scarce=True))
    rank.loads_ended()
    assert rank.report().acknowledged == {1: 1}
    assert rank.take_counts().pages_dropped == 2
    rank.save([SaveOrder(2, [SavePart(0, keys(1), [3])], ("request",))])
    played.is_ready(time.monotonic())
    home.poll()
    rank.begin(StepOrders(3, None, [], [], scarce=True))
    home.poll()
    assert [len(order.keys) for order in played.orders()] == [1]


def test_a_process_that_never_becomes_ready_keeps_no_block_pinned() -> None:
    """Pins end with the first start, what is dropped is counted, and the next starts hold nothing
    at all.
    """
    timeouts = WorkerTimeouts(start_s=0.3, restart_s=0.05, close_s=2.0)
    home = ProcessBackend(
        [place()], ClientConfig(), AgentConfig(), [sys.executable, "-c", NEVER_READY], timeouts
    )
    rank = BlockRank(home, writes=True)
    pinned: set[int] = set()
    plan = SavePlan(1, 8, 4, pinned.update, pinned.difference_update)

    def step(number: int, blocks: list[int]) -> None:
        plan.begin(number)
        if plan.room >= len(blocks) and blocks:
            plan.stage("request", [SavePart(0, keys(len(blocks)), blocks)])
        plan.ran(number)
        rank.begin(StepOrders(number, None, [], []))
        rank.save(plan.orders())
        rank.loads_ended()
        for job, ranks in rank.report().acknowledged.items():
            plan.acknowledge(job, ranks)

    try:
        step(1, [1, 2, 3, 4])
        assert pinned == {1, 2, 3, 4}
        number, end = 2, time.monotonic() + WAIT_S
        while pinned:
            assert time.monotonic() < end
            step(number, [])
            number += 1
            time.sleep(0.01)
        until(lambda: home._child.listens, home)  # another one starts
        step(number, [5, 6])
        step(number + 1, [])
        assert pinned == set()
        assert rank.take_counts().pages_dropped == 6
        assert not plan.busy
    finally:
        rank.close()


def test_how_long_a_process_took_to_be_ready_is_counted_when_it_was_not_when_it_is_heard(
    starting: Starting,
) -> None:
    home, played = starting
    rank = BlockRank(home, writes=True)
    home._child._started_at -= 30.0  # an idle engine does not listen
    rank.loads_ended()
    assert not rank.counted
    played.is_ready(home._child._started_at + 12.5)
    rank.loads_ended()
    assert rank.counted
    counts = rank.take_counts()
    assert (counts.agent_startups, counts.agent_startup_seconds) == (1, pytest.approx(12.5))
    rank.loads_ended()
    assert not rank.counted


def test_between_two_processes_saves_wait_for_the_next(
    starting: Starting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was ready has died: the next one starts at once."""
    home, played = starting
    (agent,) = home.agents(None)
    played.is_ready(time.monotonic())
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
        next_one = Played(theirs)
        next_one.is_ready(time.monotonic())
        home.poll()
        home.poll()
        (order,) = next_one.orders()
        next_one.stored(order)
        home.poll()
        assert job.done.result(0).stored == 2
