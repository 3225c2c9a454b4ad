"""Which blocks of a request are to be saved, and in which step, without a scheduler."""

import pytest
from block_store import FakeRequest

from gpu_agent.blocks.groups import STAGED_BLOCKS, BlockGroup, TrackedRequest


def test_request_is_due_when_any_group_completes_a_block() -> None:
    groups, tables = [BlockGroup(16), BlockGroup(48)], [list(range(1, 14)), list(range(20, 25))]
    state = TrackedRequest(FakeRequest("r", list(range(200))), [0, 0])
    state.plan(groups, 16, 0, tables, 100)
    for computed in range(1, 193):
        due = computed >= state.next_tokens
        assert state.due_tokens == state.next_tokens  # within the prompt
        found, _ = state.plan(groups, 16, computed, tables, 100)
        assert any(found) == due
    answer = TrackedRequest(FakeRequest("r", list(range(10))), [0, 0])
    answer.plan(groups, 16, 10, tables, 100)
    assert (answer.next_tokens, answer.due_tokens) == (16, 16 * STAGED_BLOCKS)


def test_blocks_without_room_are_due_in_the_next_step() -> None:
    groups, tables, tokens = [BlockGroup(16)], [[1, 2, 3, 4]], list(range(20))
    state = TrackedRequest(FakeRequest("r", tokens), [0])
    assert state.plan(groups, 16, 20, tables, 8) == ([range(1)], 0)
    state.request = FakeRequest("r", list(range(50)))
    assert state.due_tokens > 50
    # Blocks were scarce, or the request was not due.
    assert state.plan(groups, 16, 50, tables, 1) == (
        [range(1, 2)],
        1,
    )
    assert state.due_tokens <= 50
    assert state.plan(groups, 16, 50, tables, 1) == ([range(2, 3)], 0)


@pytest.mark.parametrize(("computed", "table", "blocks"), [(70, [1, 2, 3, 4, 5], 2), (40, [1], 1)])
def test_draft_tokens_and_unallocated_blocks_are_not_saved(
    computed: int, table: list[int], blocks: int
) -> None:
    """A draft token counts as computed and has a block, but no hash."""
    state = TrackedRequest(FakeRequest("r", list(range(40))), [0])
    assert state.plan([BlockGroup(16)], 16, computed, [table], 8) == ([range(blocks)], 0)


def test_window_of_a_hit_is_given_up_block_by_block_as_it_leaves() -> None:
    """A hit of 100 tokens ends with 64 of them, and needs two blocks of the window before."""
    groups, tables = [BlockGroup(64), BlockGroup(16, window_tokens=32)], [[1], [*range(2, 10)]]
    state = TrackedRequest(FakeRequest("r", list(range(100))), [0, 0])
    left = [state.plan_tail(groups, 64, computed, lambda: tables)[0] for computed in (90, 100, 116)]
    assert left == [[(), range(2, 3)], [(), range(3, 4)], [(), range(4, 5)]]
    assert state.plan_tail(groups, 64, 500, lambda: tables)[0] == [(), range(5, 6)]
    assert state.planned == [0, 6]
