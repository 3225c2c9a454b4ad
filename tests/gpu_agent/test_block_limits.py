"""Cost of an engine's steps and limits on memory, for the scheduler's and the ranks' side."""

from typing import Any

import pytest
from block_store import BLOCK, TOKENS, FakeRequest, MakeStore

from gpu_agent.blocks import groups as request_module


def test_blocks_dropped_at_the_end_of_a_request_are_counted(
    stores: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores(blocks_max=1)
    request, table = FakeRequest("r", TOKENS), [[1, 2, 3, 4, 5]]
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, table, 0)
    store.step((request, 70, table[0]))
    store.scheduler.finished(request, table)
    assert store.scheduler.take_counts().pages_dropped == 3
    assert store.scheduler.take_counts().pages_dropped == 0
    assert "3 blocks were not saved" in caplog.text
    store.settle()
    assert store.pins == []


def test_block_table_is_read_only_when_blocks_can_be_saved(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred running requests most complete no block in a step, and each read is a cost."""
    monkeypatch.setattr(request_module, "STAGED_BLOCKS", 4)
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    store.matched(request)
    table = [[1, 2, 3, 4, 5]]
    store.scheduler.allocated(request, table, 0)
    asked = []
    for tokens in (20, 11, 20, 19, 1, 56, 1):
        store.scheduler.step(
            {"r": tokens}, lambda _: asked.append(request.num_computed_tokens) or table
        )
        request.num_computed_tokens += tokens
    assert asked == [0, 31, 51, 127]  # the prompt's blocks at once, later ones in fours
    assert len(store.pins) == 4


def test_load_larger_than_the_pending_limit_succeeds(stores: MakeStore) -> None:
    """Regression: a load over the limit on pending bytes always failed."""
    store = stores(pending_nbytes_max=4096, staging_nbytes=4096, blocks_max=20)
    tokens = list(range(BLOCK * 20))
    request, table = FakeRequest("r", tokens), [list(range(1, 21))]
    assert store.pool.layout.page_nbytes * 20 > 4096
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, table, 0)
    store.step((request, len(tokens), table[0]))
    store.settle()
    again = FakeRequest("s", tokens)
    store.scheduler.ask(again)
    assert store.matched(again) == len(tokens)
    store.scheduler.allocated(again, [list(range(11, 31))], len(tokens))
    assert store.loaded().failed == set()


def test_blocks_waiting_for_room_cost_a_step_nothing(stores: MakeStore) -> None:
    """With a slow store there is usually no room, and thousands of blocks wait."""
    store = stores(blocks_max=4, ranks=2)  # the other rank never acknowledges
    table = Watched(range(1, 31))
    request = FakeRequest("r", list(range(BLOCK * 30)))
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [table], 0)
    store.scheduler.step({"r": BLOCK * 30}, lambda _: [table])
    request.num_computed_tokens = BLOCK * 30
    assert store.pins == [1, 2, 3, 4]
    assert table.reads < 10  # only as many as fit
    before = table.reads
    for _ in range(20):
        store.scheduler.step({"r": 1}, lambda _: [table])
        request.num_computed_tokens += 1
    assert table.reads == before
    assert store.pins == [1, 2, 3, 4]
    store.scheduler.finished(request, [table])
    assert store.scheduler.take_counts().pages_dropped == 26
    store.scheduler.reset()


def test_end_of_a_long_request_reads_its_blocks_a_few_times(stores: MakeStore) -> None:
    """Regression: it read all remaining blocks again for each 256 that found no room."""
    store = stores(blocks_max=4)
    table = Watched(range(1, 10_001))
    request = FakeRequest("r", list(range(BLOCK)))
    request.tokens = list(range(BLOCK * len(table)))
    request.block_hashes = [number.to_bytes(32, "big") for number in range(len(table))]
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [table], 0)
    store.scheduler.step({"r": request.num_tokens}, lambda _: [table])
    request.num_computed_tokens = request.num_tokens
    table.blocks_read = 0
    store.scheduler.finished(request, [table])
    assert store.scheduler.take_counts().pages_dropped == len(table) - 4
    assert table.blocks_read < 5 * len(table)
    store.scheduler.reset()


class Watched(list[int]):
    """A table that counts how often it is read, and how many blocks."""

    reads = blocks_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        found = super().__getitem__(index)
        self.blocks_read += len(found) if isinstance(index, slice) else 1
        return found
