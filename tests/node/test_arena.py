"""Copying and touching arena memory releases the GIL, so that serving threads run."""

from collections.abc import Iterator

import pytest
from waiting import OthersRun

from node.memory.arena import Arena

HALF = 8 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2 * HALF)
    yield arena
    arena.close()


def test_threads_run_while_a_page_is_moved(arena: Arena, others_run: OthersRun) -> None:
    arena.view(0, 5)[:] = b"moved"
    assert others_run(lambda: arena.copy(0, HALF, HALF))
    assert arena.view(HALF, 5) == b"moved"


def test_threads_run_while_the_arena_is_populated(arena: Arena, others_run: OthersRun) -> None:
    assert others_run(arena.populate)
