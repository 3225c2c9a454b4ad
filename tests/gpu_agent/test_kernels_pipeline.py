"""The order of the pipeline's work, on a device that runs streams in every order CUDA allows.

A missing wait gives a wrong byte, or an early call of a hook, for some seed.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpu_agent import KVPool, TorchTransfer
from gpu_agent.kernels import pipeline
from gpu_agent.kernels import plan as plans
from gpu_agent.kernels.pipeline import CHUNKS_AHEAD, JOBS_MAX, Job, Pipeline, _Ticket
from gpu_agent.kernels.plan import Chunk, Span
from gpu_agent.kernels.simulated import SimulatedDevice, Stream
from gpu_agent.kernels.staged import StagedTransfer
from kvstore import ConfigError, InvalidRequest, LayerGroup, PageLayout, Plane

WAIT_S = 60.0


def slab(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return poisoned memory and pages of the token pool in it, separated by guard bytes."""
    whole = torch.full((count, 1024 + 61), 0x5A, dtype=torch.uint8)
    return whole, [row[30 : 30 + 1024] for row in whole]


def gathered_by_torch(pool: KVPool, units: torch.Tensor, count: int) -> torch.Tensor:
    whole, pages = slab(count)
    TorchTransfer().gather(pool, pool.unit_table(units, count), pages, None)
    return whole


# ---- enqueued work -----------------------------------------------------------------------


def test_whole_pages_are_copied_in_one_call_per_buffer(token_pool: KVPool) -> None:
    device = SimulatedDevice(0)
    transfer = StagedTransfer(device, buffer_nbytes=8192)
    _, pages = slab(12)
    transfer.gather(token_pool, token_pool.unit_table(torch.arange(96), 12), pages, None)
    assert (device.launches, device.copies) == (3, 3 + 1)  # 2 + 4 + 6 pages, and the indices
    transfer.gather(token_pool, token_pool.unit_table(torch.arange(64), 8), pages[:8], None)
    assert (device.launches, device.copies) == (4, 4 + 2)


def test_unsupported_pool_and_buffer_are_refused(token_pool: KVPool) -> None:
    with pytest.raises(ConfigError, match="buffer_nbytes=100 must be at least 4096"):
        StagedTransfer(SimulatedDevice(0), buffer_nbytes=100)
    layout = PageLayout(4, (LayerGroup("g", (0,), (Plane("x", "uint8", (4,)),)),))
    elsewhere = KVPool(
        layout, {("g", 0, "x"): torch.empty((8, 4), dtype=torch.uint8, device="meta")}
    )
    with pytest.raises(InvalidRequest, match="the pool is on meta, this transfer serves cpu"):
        StagedTransfer(SimulatedDevice(0)).gather(
            elsewhere, elsewhere.unit_table(torch.arange(0), 0), [], None
        )


# ---- one job -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_freed_after_the_gather_only(seed: int, token_pool: KVPool) -> None:
    """The slots are freed in time even if another job takes a lane's turn in between.

    A landing page starts such a job.
    """
    transfer, units = (
        StagedTransfer(SimulatedDevice(seed), buffer_nbytes=4096),
        torch.randint(0, 96, (30 * 8,)),
    )
    expected, (whole, pages) = gathered_by_torch(token_pool, units, 30), slab(30)
    free = False

    def gathered() -> None:
        nonlocal free
        free = True
        for plane in token_pool.planes:  # the engine reuses its slots at once
            plane.bits.fill_(0)

    def land(run: range) -> None:
        assert torch.equal(whole[: run.stop], expected[: run.stop])
        if not free and run.start % 3 == 0:
            transfer.gather(token_pool, token_pool.unit_table(units[:8], 1), slab(1)[1], None)

    landed = land if seed % 2 else None
    transfer.gather(token_pool, token_pool.unit_table(units, 30), pages, None, gathered, landed)
    assert free
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_accessed_after_the_engines_enqueued_work(seed: int, token_pool: KVPool) -> None:
    """A save reads what the engine had still to write; a load keeps what it had still to read."""
    device, table = SimulatedDevice(seed), token_pool.unit_table(torch.arange(96), 12)
    transfer, pages = (
        StagedTransfer(device, 4096),
        torch.randint(1, 256, (12, 1024), dtype=torch.uint8),
    )
    read: list[torch.Tensor] = []

    def write(token: int) -> bool:
        for plane in token_pool.planes:
            plane.bits[token].fill_(0)
        return True

    device.engine.steps.extend(partial(write, token) for token in range(96))
    transfer.gather(token_pool, table, list(pages), transfer.fence(token_pool))
    assert not pages.any()

    device.engine.steps.append(
        lambda: read.extend(plane.bits.clone() for plane in token_pool.planes) or True
    )
    transfer.scatter(token_pool, table, list(pages + 1), transfer.fence(token_pool))
    device.engine.synchronize()
    assert not torch.stack(read).any()


@pytest.mark.parametrize("seed", range(20))
def test_layer_event_covers_both_lanes(
    seed: int, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has three chunks; the next layer is copied while the engine reads this one."""
    monkeypatch.setattr(plans, "FRAGMENT_NBYTES_MIN", 1)
    transfer, table = (
        StagedTransfer(SimulatedDevice(seed), 4096),
        token_pool.unit_table(torch.arange(96), 12),
    )
    pages = list(torch.randint(0, 256, (12, 1024), dtype=torch.uint8))
    placed: list[int] = []

    def place(layer: int, event: Any) -> None:
        placed.append(layer)
        event.synchronize()
        for plane in token_pool.planes:
            start = plane.piece.offset
            wanted = torch.stack([page[start : start + plane.piece.nbytes] for page in pages])
            assert plane.piece.layer != layer or torch.equal(
                plane.bits.view(torch.uint8).flatten(), wanted.flatten()
            )

    transfer.scatter(token_pool, table, pages, None, placed=place)
    assert placed == [0, 1]


def test_layers_copied_together_share_an_event(token_pool: KVPool) -> None:
    events: list[object] = []
    transfer, table = StagedTransfer(SimulatedDevice(0)), token_pool.unit_table(torch.arange(8), 1)
    transfer.scatter(
        token_pool, table, slab(1)[1], None, placed=lambda _, event: events.append(event)
    )
    assert len(events) == 2
    assert events[0] is events[1]


# ---- several jobs ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_jobs_of_many_chunks_in_several_threads(
    seed: int, token_pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run more chunks than may be ahead, both directions, and more jobs than tickets at once."""
    monkeypatch.setattr(pipeline, "CHUNKS_AHEAD", 5)
    count = 4 * 5 * 2 + 9  # four pages to a buffer of 4 KiB
    transfer = StagedTransfer(SimulatedDevice(seed), buffer_nbytes=4096)
    source, target = torch.randint(0, 48, (count * 8,)), torch.randint(48, 96, (8,))
    expected = gathered_by_torch(token_pool, source, count)
    wrong: list[object] = []

    def save() -> None:
        whole, pages = slab(count)
        landed: list[int] = []
        transfer.gather(
            token_pool, token_pool.unit_table(source, count), pages, None, landed=landed.extend
        )
        wrong.extend([] if torch.equal(whole, expected) else ["bytes"])
        wrong.extend([] if landed == list(range(count)) else [landed])

    def load() -> None:
        table = token_pool.unit_table(target, 1)
        for _ in range(10):
            transfer.scatter(token_pool, table, [expected[0, 30:1054]], None)

    threads = [threading.Thread(target=work) for work in [save, load] * (JOBS_MAX - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(gathered_by_torch(token_pool, target, 1), expected[:1])


class Toy:
    """A job without pages that records its chunks and the first index read by each fill."""

    def __init__(self, count: int, **hooks: Callable[..., None]) -> None:
        self.filled: list[int] = []
        self.drained: list[int] = []
        self.read: set[int] = set()
        self.drained_before: list[int] = []  # number drained when each chunk was enqueued
        chunks = [Chunk(number, 1, Span(0, 0, 0, 0)) for number in range(count)]
        self.job = Job([torch.full((8,), 77)], chunks, self.fill, self.drain, **hooks)

    def fill(self, chunk: Chunk, _: int, slots: int, stream: Stream) -> None:
        def step() -> bool:
            self.filled.append(chunk.page_first)
            self.read.add(ctypes.c_int64.from_address(slots).value)
            return True

        self.drained_before.append(len(self.drained))
        stream.steps.append(step)

    def drain(self, chunk: Chunk, _: int, __: int, stream: Stream) -> None:
        stream.steps.append(lambda: self.drained.append(chunk.page_first) or True)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("hooked", [False, True])
def test_job_completes_while_another_job_blocks_a_turn(seed: int, turn: int, hooked: bool) -> None:
    """Two of the job's chunks in a row may use the same lane, first or last.

    The other job blocks after chunk `turn`, and its waits do not help the first job.
    """
    lanes, taken, gate = Pipeline(SimulatedDevice(seed), 4096), threading.Event(), threading.Event()

    def block(*_: object) -> None:
        taken.set()
        assert gate.wait(WAIT_S)

    other = Toy(1, queued=block)
    beside = threading.Thread(target=lanes.run, args=(other.job,))

    def queued(chunk: Chunk, _: object) -> None:
        if chunk.page_first == turn:
            beside.start()
            assert taken.wait(WAIT_S)

    def all_filled() -> None:
        assert sorted(toy.filled) == list(range(5))

    toy = Toy(5, queued=queued, **({"all_filled": all_filled} if hooked else {}))
    try:
        lanes.run(toy.job)
        assert sorted(toy.drained) == list(range(5))
        assert toy.read == {77}
    finally:
        gate.set()
        beside.join()


@pytest.mark.parametrize("seed", range(10))
def test_hook_that_raises_leaves_no_work_pending(seed: int) -> None:
    def fail(chunk: Chunk, _: object) -> None:
        if chunk.page_first == 3:
            raise KeyError("mine")

    toy = Toy(6, queued=fail)
    with pytest.raises(KeyError, match="mine"):
        Pipeline(SimulatedDevice(seed), 4096).run(toy.job)
    assert sorted(toy.drained) == [0, 1, 2, 3]


def test_job_is_never_further_ahead_than_its_events() -> None:
    toy = Toy(3 * CHUNKS_AHEAD)
    Pipeline(SimulatedDevice(0), 4096).run(toy.job)
    assert all(
        before >= number + 1 - CHUNKS_AHEAD for number, before in enumerate(toy.drained_before)
    )


def test_buffer_has_one_owner_from_fill_to_drain() -> None:
    """Fills and drains of a buffer alternate, whatever the jobs."""
    halves: dict[int, list[str]] = {}

    def half(name: str) -> Callable[[Chunk, int, int, Stream], None]:
        return lambda _, buffer, __, stream: stream.steps.append(
            lambda: halves.setdefault(buffer, []).append(name) or True
        )

    lanes = Pipeline(SimulatedDevice(3), 4096)
    chunks = [Chunk(0, 1, Span(0, 0, 0, 0))] * (CHUNKS_AHEAD + 9)
    job = Job([torch.zeros(8, dtype=torch.int64)], chunks, half("fill"), half("drain"))
    threads = [threading.Thread(target=lanes.run, args=(job,)) for _ in range(JOBS_MAX + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, halves.values())) == 2 * len(threads) * len(chunks)
    assert all(order == ["fill", "drain"] * (len(order) // 2) for order in halves.values())
    assert len(halves) == pipeline.LANES


def test_indices_of_a_job_are_contiguous_in_large_enough_memory() -> None:
    waiter = _Ticket(SimulatedDevice(0))
    for count in (3, pipeline.SLOTS_NBYTES // 8 - 4, pipeline.SLOTS_NBYTES // 8, 3):
        tables = [torch.arange(4), torch.arange(100, 100 + count)]
        waiter.stage(tables)
        whole = torch.cat(tables)
        assert waiter._room_nbytes == waiter._host.nbytes >= whole.nbytes
        assert torch.equal(waiter._host[: whole.nbytes].view(torch.int64), whole)
