"""Steps that complete no block do not look at requests, and still lose no save."""

import concurrent.futures
import random
from typing import Any

import pytest
from block_store import BLOCK, FakeRequest

from gpu_agent.blocks import groups as request_module
from gpu_agent.blocks import scheduler as scheduler_module
from gpu_agent.blocks.groups import NULL_BLOCK, BlockGroup
from gpu_agent.blocks.lookups import Lookups
from gpu_agent.blocks.save_plan import Report, SavePlan
from gpu_agent.blocks.scheduler import BlockScheduler
from kvstore import Namespace
from kvstore.layout import opaque_layout

NAMESPACE = Namespace("quiet", opaque_layout(4096))


class Nothing:
    """A lookup backend that finds no block."""

    def look_up(self, question: Any, timeout_s: float) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(tuple(bytes(len(keys)) for _, keys in question))
        return done

    def touch(self, question: Any, timeout_s: float) -> Any:
        return self.look_up(question, timeout_s)

    def open(self, namespaces: Any, timeout_s: float) -> Any:
        return self.look_up((), timeout_s)

    def poll(self) -> None: ...

    def pause(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class Side:
    """A scheduler that counts how often block tables are read.

    With `looks` every request is checked in every step.
    """

    def __init__(self, looks: bool, blocks_max: int) -> None:
        self.looks, self.scarce, self.looked = looks, False, 0
        plan = SavePlan(
            1, blocks_max, 4, lambda _: None, lambda _: None, scarce=lambda: self.scarce
        )
        lookups = Lookups(Nothing(), 5.0)
        self.scheduler = BlockScheduler(
            [BlockGroup(BLOCK)], [[NAMESPACE]], BLOCK, BLOCK, lookups, plan
        )
        self.jobs: list[int] = []

    def admit(self, request: FakeRequest, table: list[int], tokens: int = 0) -> None:
        self.scheduler.ask(request)
        assert self.scheduler.matched(request, 0) == 0
        self.scheduler.allocated(request, [table], tokens)

    def step(
        self, scheduled: dict[str, int], tables: dict[str, list[int]], clean: bool
    ) -> list[Any]:
        if self.looks:
            self.scheduler._quiet_steps = 0

        def table_of(name: str) -> list[list[int]]:
            self.looked += 1
            return [tables[name]]

        orders = self.scheduler.step(scheduled, table_of)
        self.jobs += [order.job for order in orders.saves]
        acknowledged = {self.jobs.pop(0): 1} if self.jobs and clean else {}
        self.scheduler.ran(Report(orders.step, acknowledged))
        assert self.scheduler.check() == []
        return [order.parts for order in orders.saves]


@pytest.mark.parametrize("blocks_max", [6, 1000])
def test_saves_equal_those_of_a_full_scan(seed: int, blocks_max: int) -> None:
    draw = random.Random(seed)
    sides = [Side(True, blocks_max), Side(False, blocks_max)]
    live: dict[str, FakeRequest] = {}
    tables: dict[str, list[int]] = {}
    ended, saved = 0, 0
    for step in range(600):
        if len(live) < 5 and draw.random() < 0.1:
            name = f"r{step}"
            live[name] = FakeRequest(
                name, [draw.randrange(1 << 30) for _ in range(draw.randrange(1, 150))]
            )
            tables[name] = [1 + step * 64 + block for block in range(64)]
            for side in sides:
                side.scheduler.ask(live[name])
                assert side.scheduler.matched(live[name], 0) == 0
                side.scheduler.allocated(live[name], [tables[name]], 0)
        scarce = draw.random() < 0.05
        scheduled = {}
        for name, request in live.items():
            left = request.num_tokens - request.num_computed_tokens
            if draw.random() < 0.97:
                scheduled[name] = (
                    min(left, draw.choice([1, 16, 64, 200]))
                    if left > 1
                    else draw.choice([1] * 30 + [3])
                )
        clean = draw.random() < 0.8
        for side in sides:
            side.scarce = scarce
        looked, quiet = (side.step(scheduled, tables, clean) for side in sides)
        assert looked == quiet
        saved += sum(len(part.keys) for parts in quiet for part in parts)
        for name, tokens in scheduled.items():
            request = live[name]
            request.num_computed_tokens += tokens
            while request.num_tokens <= request.num_computed_tokens:  # the answer grows
                request.tokens.append(draw.randrange(1 << 30))
            FakeRequest.__post_init__(request)
        for name in [
            name
            for name, request in live.items()
            if request.num_computed_tokens > 900 or draw.random() < 0.003
        ]:
            request = live.pop(name)
            ended += 1
            for side in sides:
                side.scheduler.finished(request, [tables[name]])
    assert ended
    assert saved > 20
    assert sides[1].looked <= sides[0].looked


def test_requests_that_complete_no_block_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "STAGED_BLOCKS", 4)
    side, request = Side(False, 1000), FakeRequest("r", list(range(40)))
    side.scheduler.ask(request)
    assert side.scheduler.matched(request, 0) == 0
    side.scheduler.allocated(request, [[1, 2, 3, 4, 5, 6, 7, 8]], 0)
    side.step({"r": 40}, {"r": list(range(1, 9))}, True)
    request.num_computed_tokens = 40
    looked, read = side.looked, 0

    class Counted(FakeRequest):
        def __getattribute__(self, name: str) -> Any:
            nonlocal read
            read += name == "num_computed_tokens"
            return super().__getattribute__(name)

    side.scheduler._requests["r"].request = counted = Counted("r", request.tokens, 40)
    for step in range(60):
        side.step({"r": 1}, {"r": list(range(1, 9))}, True)
        object.__setattr__(counted, "num_computed_tokens", vars(counted)["num_computed_tokens"] + 1)
        if step == 54:
            assert (side.looked, read) == (looked, 0)
    assert side.looked > looked  # 96 tokens are six blocks, four of them in the answer


def test_request_that_joins_a_quiet_step_is_read() -> None:
    side, tables = Side(False, 1000), {"r": list(range(1, 9)), "s": [11, 12]}
    side.admit(request := FakeRequest("r", list(range(40))), tables["r"])
    side.step({"r": 40}, tables, True)
    request.num_computed_tokens = 40
    side.step({"r": 1}, tables, True)
    request.num_computed_tokens = 41
    # All but one token of its first block are cached.
    side.admit(FakeRequest("s", list(range(100, 117)), BLOCK - 1), tables["s"])
    side.step({"r": 1, "s": 1}, tables, True)
    request.num_computed_tokens = 42
    assert [part.blocks for parts in side.step({"r": 1}, tables, True) for part in parts] == [[11]]


def test_loading_blocks_are_not_stored_and_window_blocks_not_loaded() -> None:
    side, tables = Side(False, 1000), {"r": [1, NULL_BLOCK, 3, 4]}
    side.admit(FakeRequest("r", list(range(60)), 3 * BLOCK), tables["r"], 3 * BLOCK)
    (load,) = side.scheduler.step({"r": 12}, lambda name: [tables[name]]).loads
    hashes = side.scheduler._requests["r"].request.block_hashes
    assert [(part.blocks, part.keys) for part in load.parts] == [([1, 3], [hashes[0], hashes[2]])]
    assert not side.scheduler.busy


def begin_save() -> tuple[BlockScheduler, int, int]:
    """Return a scheduler with a save that its rank is about to read, its step and its job."""
    side, tables = Side(False, 1000), {"r": [1, 2]}
    side.admit(FakeRequest("r", list(range(2 * BLOCK))), tables["r"])
    first = side.scheduler.step({"r": 2 * BLOCK}, lambda name: [tables[name]])
    side.scheduler.ran(Report(first.step))
    (order,) = (second := side.scheduler.step({}, lambda name: [tables[name]])).saves
    assert side.scheduler.busy
    return side.scheduler, second.step, order.job


def test_engine_steps_until_the_last_save_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "COUNTS_WAIT_S", 60.0)
    scheduler, step, job = begin_save()
    scheduler.ran(Report(step, acknowledged={job: 1}, uncounted=1))
    assert scheduler.busy
    scheduler.ran(Report(step))
    assert not scheduler.busy


def test_engine_becomes_idle_without_a_saves_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "COUNTS_WAIT_S", 0.0)
    scheduler, step, job = begin_save()
    scheduler.ran(Report(step, acknowledged={job: 1}, uncounted=1))
    assert not scheduler.busy
