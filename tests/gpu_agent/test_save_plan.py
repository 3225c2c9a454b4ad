"""When computed blocks may be saved: pins, steps, acknowledgements, limits."""

import random

import pytest

from gpu_agent.blocks import save_plan
from gpu_agent.blocks.save_plan import GroupBlocks, SavePlan
from kvstore.tracing import REQUESTS_MAX


class Pins:
    """Record the pinned blocks as an engine's block pool does."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def pin(self, blocks: list[int]) -> None:
        self.held += blocks

    def unpin(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held.remove(block)


class Pool(Pins):
    """A block pool with a prefix cache; by default every key is in the block of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: set[int] = set()
        self.spare = 1000

    def cached(self, part: GroupBlocks) -> list[bool]:
        return [block not in self.evicted for block in part.blocks]


def plan_of(pins: Pins, ranks: int = 1, blocks_max: int = 8, order_blocks: int = 4) -> SavePlan:
    return SavePlan(ranks, blocks_max, order_blocks, pins.pin, pins.unpin)


def blocks(*numbers: int, group: int = 0) -> list[GroupBlocks]:
    return [GroupBlocks(group, [b"key%d" % number for number in numbers], list(numbers))]


def test_blocks_are_saved_only_after_their_steps_result() -> None:
    pins = Pins()
    plan = plan_of(pins)
    plan.begin(1)
    plan.stage("a", blocks(3, 4))
    assert pins.held == [3, 4]
    assert plan.orders() == []
    assert plan.busy
    assert plan.ran(1) == set()
    (order,) = plan.orders()
    assert order.parts[0] == (0, [b"key3", b"key4"], [3, 4])
    assert plan.busy
    plan.acknowledge(order.job)
    assert pins.held == []
    assert not plan.busy
    assert plan.check() == []


def test_order_names_the_requests_of_its_blocks() -> None:
    plan = plan_of(Pins(), blocks_max=32, order_blocks=4)
    plan.begin(1)
    plan.stage("a", blocks(1, 2, 3))
    plan.stage("b", [*blocks(3), *blocks(4, 5)])  # block 3 is already being saved for "a"
    plan.ran(1)
    assert [(order.parts[0].blocks, order.requests) for order in plan.orders()] == [
        ([1, 2, 3, 4], ("a", "b")),
        ([5], ("b",)),
    ]
    assert plan.check() == []


def test_order_names_a_limited_number_of_requests() -> None:
    plan = plan_of(Pins(), blocks_max=32, order_blocks=32)
    for i in range(20):
        plan.stage(f"cmpl-{i}", blocks(i))
    (order,) = plan.orders()
    assert order.requests == tuple(f"cmpl-{i}" for i in range(REQUESTS_MAX))
    plan.stage("dropped", blocks(30))
    plan.forget()
    assert plan.orders() == []
    assert plan.check() == []


def test_blocks_of_a_step_without_a_result_are_not_saved() -> None:
    pins = Pins()
    plan = plan_of(pins)
    plan.begin(1)
    plan.stage("a", blocks(1))
    plan.begin(2)
    plan.stage("b", blocks(2))
    assert plan.ran(2) == {"a"}
    assert plan.orders()[0].parts[0].blocks == [2]
    assert pins.held == [2]


def test_blocks_stay_pinned_until_all_ranks_have_read_them() -> None:
    pins = Pins()
    plan = plan_of(pins, ranks=3)
    plan.stage("a", blocks(1))  # no step is outstanding
    (order,) = plan.orders()
    plan.acknowledge(order.job)
    assert pins.held == [1]
    plan.acknowledge(order.job, ranks=2)
    assert pins.held == []


def test_last_block_is_unpinned_first() -> None:
    """The engine reuses blocks in order of release, and a chain should lose its end first."""
    freed: list[int] = []
    plan = SavePlan(1, 8, 4, lambda _: None, freed.extend)
    plan.stage("a", blocks(1, 2) + blocks(3, 4, group=1))
    (order,) = plan.orders()
    plan.acknowledge(order.job)
    assert freed == [4, 3, 2, 1]


def test_order_is_limited_and_names_groups() -> None:
    pins = Pins()
    plan = plan_of(pins, order_blocks=3)
    plan.stage("a", blocks(1, 2) + blocks(3, 4, group=1))
    first, second = plan.orders()
    assert [(part.group, part.blocks) for part in first.parts] == [(0, [1, 2]), (1, [3])]
    assert [(part.group, part.blocks) for part in second.parts] == [(1, [4])]
    assert first.job != second.job


def test_pending_key_is_not_staged_twice() -> None:
    pins = Pins()
    plan = plan_of(pins)
    plan.stage("a", blocks(1))
    # The same tokens in another block; another group.
    plan.stage("b", [GroupBlocks(0, [b"key1"], [7]), GroupBlocks(1, [b"key1"], [8])])
    assert pins.held == [1, 8]


def test_room_is_the_number_of_blocks_that_can_be_pinned() -> None:
    pins = Pins()
    plan = plan_of(pins, blocks_max=3)
    assert plan.room == 3
    plan.stage("a", blocks(1, 2))
    assert plan.room == 1
    (order,) = plan.orders()
    plan.acknowledge(order.job)
    assert plan.room == 3


def test_forget_keeps_blocks_that_ranks_are_reading() -> None:
    pins = Pins()
    plan = plan_of(pins)
    plan.stage("a", blocks(1))
    (order,) = plan.orders()
    plan.stage("b", blocks(2))
    plan.begin(1)
    plan.stage("c", blocks(3))
    plan.forget()
    assert pins.held == [1]
    assert plan.ran(1) == set()
    assert plan.orders() == []
    plan.acknowledge(order.job)
    assert pins.held == []
    assert plan.check() == []


def test_random_calls_leave_nothing_pinned(seed: int) -> None:
    rng = random.Random(seed)
    pins = Pool()
    plan = SavePlan(
        *(2, 20, 3, pins.pin, pins.unpin),
        cached=pins.cached,
        late_max=40,
        spare=lambda: rng.randrange(-2, 9),
    )
    open_jobs: list[int] = []
    seen = 0
    for step in range(1, 400):
        plan.begin(step)
        numbers = rng.sample(range(1000), min(plan.room, rng.randrange(6)))
        plan.stage("r", blocks(*numbers))
        if rng.random() < 0.3:
            plan.defer("r", blocks(*rng.sample(range(1000), rng.randrange(60))))
        pins.evicted = set(rng.sample(range(1000), 100))
        plan.stage_late()
        assert len(pins.held) <= 20
        if rng.random() < 0.7:
            seen = rng.randrange(seen, step + 1)
            plan.ran(seen)
        open_jobs += [order.job for order in plan.orders() for _ in range(2)]
        rng.shuffle(open_jobs)
        while open_jobs and rng.random() < 0.6:
            plan.acknowledge(open_jobs.pop())
        assert plan.check() == []
    plan.ran(400)
    for job in open_jobs:
        plan.acknowledge(job)
    while plan.busy:
        plan.stage_late()
        for order in plan.orders():
            plan.acknowledge(order.job, ranks=2)
    assert pins.held == []
    assert not plan.busy


def test_few_blocks_wait_for_more_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are batched, since each order costs an engine as much as its blocks do."""
    now = 100.0
    monkeypatch.setattr(save_plan.time, "monotonic", lambda: now)
    pins = Pins()
    plan = SavePlan(1, 8, 4, pins.pin, pins.unpin, hold_s=0.05)
    plan.stage("a", blocks(1, 2))
    assert plan.orders() == []
    assert plan.busy  # the engine keeps stepping
    now += 0.04
    plan.stage("b", blocks(3))
    assert plan.orders() == []
    now += 0.02
    (order,) = plan.orders()
    assert order.parts[0].blocks == [1, 2, 3]
    plan.stage("c", blocks(4, 5, 6, 7))
    assert [some.parts[0].blocks for some in plan.orders()] == [[4, 5, 6, 7]]  # a full order
    assert plan.check() == []


def test_blocks_do_not_wait_for_more_while_blocks_are_scarce() -> None:
    pins, scarce = Pins(), True
    plan = SavePlan(1, 8, 4, pins.pin, pins.unpin, hold_s=1000.0, scarce=lambda: scarce)
    plan.stage("a", blocks(1))
    assert [order.parts[0].blocks for order in plan.orders()] == [[1]]
    scarce = False
    plan.stage("a", blocks(2))
    assert plan.orders() == []


def late_plan(pool: Pool, blocks_max: int = 8, late_max: int = 100) -> SavePlan:
    return SavePlan(
        *(1, blocks_max, 4, pool.pin, pool.unpin),
        cached=pool.cached,
        late_max=late_max,
        spare=lambda: pool.spare,
    )


def saved(plan: SavePlan, step: int) -> list[int]:
    """Run empty steps until nothing is left; return the saved blocks in order."""
    found = []
    while plan.busy:
        assert step < 10_000
        orders = plan.orders()
        plan.begin(step)
        plan.stage_late()
        assert plan.check() == []
        for order in orders:
            found += [block for part in order.parts for block in part.blocks]
            plan.acknowledge(order.job)
        plan.ran(step)
        step += 1
    assert plan.check() == []
    return found


def test_all_blocks_of_a_long_prompt_are_saved_after_its_request() -> None:
    """30,007 tokens: 1,875 blocks, of which a quarter of the engine's fit at first."""
    pool = Pool()
    plan = late_plan(pool, blocks_max=640, late_max=2560)
    plan.begin(1)
    plan.stage("r", blocks(*range(640)))
    for first in range(640, 1875, 256):
        plan.defer("r", blocks(*range(first, min(1875, first + 256))))
    plan.ran(1)
    assert saved(plan, 2) == list(range(1875))
    assert plan.take_lost() == 0
    assert pool.held == []


def test_late_block_is_saved_only_after_two_results() -> None:
    """That of the step that computed it, and that of the step in which it was found again."""
    pool = Pool()
    plan = late_plan(pool)
    plan.begin(1)
    plan.defer("a", blocks(1))
    assert not plan.has_late
    assert plan.busy
    plan.ran(1)
    plan.begin(2)
    plan.stage_late()
    assert pool.held == [1]
    assert plan.orders() == []
    plan.ran(2)
    assert saved(plan, 3) == [1]


def test_late_block_of_a_step_without_a_result_is_lost() -> None:
    pool = Pool()
    plan = late_plan(pool)
    plan.begin(1)
    plan.defer("a", blocks(1))
    plan.begin(2)
    plan.defer("b", blocks(2))
    assert plan.ran(2) == set()
    assert saved(plan, 3) == [2]
    assert plan.take_lost() == 1


def test_evicted_late_blocks_are_lost() -> None:
    pool = Pool()
    plan = late_plan(pool)
    plan.defer("a", blocks(1, 2, 3) + blocks(11, 12, group=1))
    pool.evicted = {2, 11}
    assert saved(plan, 1) == [1, 3, 12]
    assert (plan.take_lost(), plan.take_lost()) == (2, 0)


def test_late_blocks_leave_the_engine_its_spare_blocks() -> None:
    pool = Pool()
    pool.spare = 2
    plan = late_plan(pool)
    plan.defer("a", blocks(1, 2, 3))
    plan.stage_late()
    assert pool.held == [1, 2]
    pool.spare = 0
    plan.stage_late()
    assert pool.held == [1, 2]


def test_late_blocks_are_given_up_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(save_plan.time, "monotonic", lambda: now)
    pool = Pool()
    plan = late_plan(pool, blocks_max=2)
    plan.stage("a", blocks(1, 2))
    (order,) = plan.orders()  # no rank ever reads it
    plan.defer("a", blocks(3, 4))
    now += save_plan.LATE_S
    plan.stage_late()
    assert plan.has_late
    now += 1
    plan.stage_late()
    assert (plan.has_late, plan.take_lost()) == (False, 2)
    plan.acknowledge(order.job)
    assert not plan.busy


def test_number_of_late_blocks_is_limited() -> None:
    pool = Pool()
    plan = late_plan(pool, late_max=5)
    plan.defer("a", blocks(1, 2, 3))
    plan.defer("b", blocks(3, 4, 5))  # block 3 is late already
    assert plan.take_lost() == 0
    plan.defer("c", blocks(6))
    assert plan.take_lost() == 3  # the oldest request's
    plan.defer("d", blocks(*range(10, 20)))
    assert plan.take_lost() == 8
    assert plan.check() == []
    assert saved(plan, 1) == [10, 11, 12, 13, 14]


def test_forgotten_late_blocks_are_not_saved() -> None:
    pool = Pool()
    plan = late_plan(pool)
    plan.defer("a", blocks(1))
    plan.begin(1)
    plan.defer("b", blocks(2))
    plan.forget()
    plan.ran(1)
    assert not plan.busy
    plan.defer("c", blocks(1))
    assert saved(plan, 2) == [1]
