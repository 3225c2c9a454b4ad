"""Recurrent states: saved only when offered, loaded only whole; without an engine."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_agent.blocks.groups import (
    NEVER,
    BlockGroup,
    TrackedRequest,
    loaded_blocks,
    longest_prefix,
    state_group,
)
from gpu_agent.blocks.save_plan import Report, SavePlan
from gpu_agent.blocks.scheduler import BlockScheduler, StateOffer

BLOCK = 16


class Known:
    """An engine's request of `blocks` whole blocks."""

    def __init__(self, blocks: int = 8, name: str = "r") -> None:
        self.request_id, self.num_computed_tokens = name, 0
        self.num_tokens = blocks * BLOCK
        self.block_hashes = [bytes([number]) * 32 for number in range(blocks)]


class NoLookups:
    """Lookups that answer at once that these blocks are stored, per group."""

    def __init__(self, stored: Sequence[bytes]) -> None:
        self.stored = tuple(stored)
        self.touched: list[Any] = []

    def answer(self, request_id: str) -> Any:
        return self.stored

    def awaited(self, request_id: str, timeout_s: float) -> Any:
        return self.stored

    def age_s(self, request_id: str) -> float:
        return 0.0

    def touch(self, request_id: str, question: Any) -> None:
        self.touched.append(question)

    def check(self) -> list[str]:
        return []

    def ask(self, request_id: str, question: Any, earlier: Any = None) -> None: ...

    def drop(self, request_id: str) -> None: ...

    def drop_all(self) -> None: ...

    def open(self, namespaces: Any) -> None: ...

    def poll(self) -> None: ...


class Engine:
    """A scheduler with attention and states, and one request that is scheduled in every step."""

    def __init__(self, stored: Sequence[bytes] = (b"", b""), room: int = 64) -> None:
        self.pinned: list[int] = []
        plan = SavePlan(1, room, 64, self.pinned.extend, self._unpin)
        self.lookups: Any = NoLookups(stored)
        groups = [BlockGroup(BLOCK), state_group(2 * BLOCK)]
        self.scheduler = BlockScheduler(groups, [[], []], BLOCK, 2 * BLOCK, self.lookups, plan)
        self.request: Any = Known()
        self.scheduler.ask(self.request)
        self.steps = 0

    def _unpin(self, blocks: Any) -> None:
        for block in blocks:
            self.pinned.remove(block)

    def step(self, *offers: StateOffer, drafted: bool = False, scheduled: bool = True) -> list[Any]:
        """Run a step that computes 32 tokens; return the saves of states that it orders."""
        tables = [list(range(1, 9)), [0, 0, 0, 0]]
        tokens = {"r": 2 * BLOCK} if scheduled else {}
        orders = self.scheduler.step(
            tokens, lambda name: tables, {"r": offers}, ["r"] if drafted else []
        )
        self.steps += 1
        self.request.num_computed_tokens += 2 * BLOCK * scheduled
        return [
            (keys, blocks)
            for order in orders.saves
            for group, keys, blocks in order.parts
            if group == 1
        ]

    def saved(self) -> list[Any]:
        """Note the result of the newest step, and return the states saved in the next one."""
        self.scheduler.ran(Report(self.steps))
        assert self.scheduler.check() == []
        return self.step(scheduled=False)


def test_state_is_pinned_at_its_offer_and_ordered_after_the_result() -> None:
    engine = Engine()
    assert engine.step(StateOffer(1, 40, 32)) == []
    assert 40 in engine.pinned
    assert engine.step() == []  # the result is not known yet
    engine.scheduler.ran(Report(1))
    assert engine.step() == [([bytes([1]) * 32], [40])]


def test_state_of_a_step_without_a_result_is_dropped() -> None:
    engine = Engine()
    engine.step(StateOffer(1, 40, 32))
    engine.step()  # only its result comes
    assert engine.saved() == []
    assert 40 not in engine.pinned


@pytest.mark.parametrize(
    "offer",
    [
        StateOffer(1, 40, 16),  # within a block
        StateOffer(1, 40, 33),
        StateOffer(1, 0, 32),  # the null block
        StateOffer(1, 40, 0),
        StateOffer(1, 40, 9 * 32),  # beyond the tokens with hashes
        StateOffer(0, 40, 32),  # a group without states
        StateOffer(1, 40, 96),  # stored already
    ],
)
def test_offer_without_a_page_of_its_own_is_not_saved(offer: StateOffer) -> None:
    engine = Engine([b"", b"\0\0\1"])
    engine.scheduler._requests["r"].present = engine.lookups.stored
    engine.step(offer)
    assert engine.saved() == []
    assert 40 not in engine.pinned


def test_states_after_the_first_draft_are_not_saved_until_the_request_starts_anew() -> None:
    engine = Engine()
    engine.step(StateOffer(1, 40, 32))
    engine.step(StateOffer(1, 41, 64), drafted=True)
    engine.step(StateOffer(1, 42, 96))  # perhaps the end of the step with drafts
    engine.step(StateOffer(1, 44, 96), drafted=True)  # the first drafts count, not the last
    assert not {41, 42, 44} & set(engine.pinned)
    engine.request.num_computed_tokens = 0  # it was preempted
    engine.scheduler.allocated(engine.request, [[], []], 0)
    engine.step(StateOffer(1, 43, 64))
    assert 43 in engine.pinned


@pytest.mark.parametrize("how", ["never_saved", "loading", "unscheduled", "unknown"])
def test_offer_of_a_request_that_may_not_be_saved_is_ignored(how: str) -> None:
    engine = Engine()
    state = engine.scheduler._requests["r"]
    state.never_saved, state.loading = how == "never_saved", int(how == "loading")
    if how == "unknown":
        engine.scheduler._requests.clear()
    engine.step(StateOffer(1, 40, 32), scheduled=how != "unscheduled")
    assert engine.saved() == []
    assert 40 not in engine.pinned


def test_reset_drops_states_that_wait_for_the_result() -> None:
    engine = Engine()
    engine.step(StateOffer(1, 40, 32))
    engine.scheduler.reset()
    assert engine.saved() == []
    assert engine.pinned == []


def test_state_without_room_is_counted_as_dropped() -> None:
    engine = Engine(room=1)
    engine.step(StateOffer(1, 40, 32), StateOffer(1, 41, 64))
    assert engine.pinned == [40]  # before attention, which is saved later
    assert engine.scheduler.take_counts().pages_dropped == 1


def test_hit_of_the_whole_prompt_leaves_its_last_block_to_compute() -> None:
    engine = Engine([b"\1" * 8, b"\1" * 4])
    assert engine.scheduler.matched(engine.request, 0) == 6 * BLOCK
    assert engine.scheduler.matched(engine.request, 6 * BLOCK) == 0


def test_request_that_ends_touches_states_with_its_attention() -> None:
    engine = Engine()
    engine.scheduler.finished(engine.request, [[], []])
    (((_, attention), (_, states)),) = engine.lookups.touched
    assert attention == engine.request.block_hashes
    assert states == engine.request.block_hashes[1::2]


def test_states_are_never_saved_by_position() -> None:
    state = TrackedRequest(Known(), [0, 0])  # type: ignore[arg-type]
    tables = [list(range(1, 9)), [11, 12, 13, 14]]
    groups = [BlockGroup(BLOCK), state_group(2 * BLOCK)]
    assert state.plan(groups, BLOCK, 128, tables, 64) == ([range(8), range(0)], 0)
    assert state.next_tokens == 9 * BLOCK
    alone = TrackedRequest(Known(), [0])  # type: ignore[arg-type]
    assert alone.plan(groups[1:], BLOCK, 128, tables[1:], 64) == ([range(0)], 0)
    assert alone.next_tokens == alone.due_tokens == NEVER


def test_deepest_boundary_of_all_groups_and_ranks_is_found(seed: int) -> None:
    """Random pages of random ranks, compared with the definition."""
    rng = random.Random(seed)
    for _ in range(300):
        groups = [
            BlockGroup(BLOCK),
            state_group(rng.choice([16, 32])),
            *rng.choice([[], [BlockGroup(BLOCK, window_tokens=40)], [state_group(64)]]),
        ]
        step = max(group.block_tokens for group in groups)
        share = rng.choice([0.7, 0.95])
        ranks = [
            [
                bytes(rng.random() < (0.5 if group.is_state else share) for _ in range(320 // size))
                for group in groups
                for size in [group.block_tokens]
            ]
            for _ in range(rng.choice([1, 2, 4]))
        ]
        present = [bytes(map(min, *some, some[0])) for some in zip(*ranks, strict=True)]
        local, tokens = step * rng.randrange(3), rng.randrange(330)

        def complete(
            end: int, local: int = local, groups: Any = groups, ranks: Any = ranks
        ) -> bool:
            for rank in ranks:
                for group, there in zip(groups, rank, strict=True):
                    size = group.block_tokens
                    first = (
                        local
                        if not group.needs_tail_only
                        else max(local, end - group.window_tokens)
                    )
                    if not all(there[first // size : end // size]):
                        return False
            return True

        ends = [end for end in range(local + step, 321, step) if end < tokens and complete(end)]
        found = longest_prefix(groups, present, local, tokens - 1, step)
        assert found == max(ends, default=local)
        if found > local:
            last = found // groups[1].block_tokens - 1
            assert list(loaded_blocks(groups[1], local, found)) == [last]
