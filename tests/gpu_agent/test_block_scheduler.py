"""The scheduler's side and the ranks' side of the store together, without an engine."""

import threading
import time
from typing import Any

import pytest
import torch
from block_store import TOKENS, FakeRequest, MakeStore

from gpu_agent import TorchTransfer
from gpu_agent.blocks import groups as request_module
from gpu_agent.blocks import scheduler
from gpu_agent.blocks.cost_model import LoadCostModel
from gpu_agent.blocks.save_plan import Report
from gpu_agent.layouts.vllm import table_pool
from kvstore.errors import InvalidRequest
from kvstore.keys import prefix_hashes


def test_saved_blocks_load_into_other_blocks(stores: MakeStore) -> None:
    first, second = stores(), stores()
    request = FakeRequest("r", TOKENS)
    first.scheduler.ask(request)
    assert first.matched(request) == 0
    first.scheduler.allocated(request, [[3, 9, 4, 7, 8]], 0)
    first.step((request, 70, [3, 9, 4, 7, 8]))
    assert sorted(first.pins) == [3, 4, 7, 9]  # not the partial one
    first.settle()
    assert first.pins == []
    first.scheduler.finished(request, [[3, 9, 4, 7, 8]])

    again = FakeRequest("s", TOKENS)
    second.scheduler.ask(again)
    assert second.matched(again, 16) == 48
    before = second.content(5)
    second.scheduler.allocated(again, [[5, 11, 12, 13, 14]], 48)
    ended = second.loaded()
    assert (ended.finished, ended.failed, ended.wrong_blocks) == ({"s"}, set(), set())
    for mine, theirs in ((9, 11), (4, 12), (7, 13)):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first.content(mine), second.content(theirs), strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(before, second.content(5), strict=True))
    counts = second.rank.take_counts()
    assert (counts.loads, counts.pages_loaded, counts.loaded_nbytes) == (
        1,
        3,
        3 * second.pool.layout.page_nbytes,
    )


def test_blocks_of_an_unreported_step_are_not_saved(stores: MakeStore) -> None:
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
    orders = store.scheduler.step({"r": 70}, lambda _: [[1, 2, 3, 4, 5]])
    assert orders.saves == []
    following = store.scheduler.step({}, dict)  # steps may overlap
    assert following.saves == []
    store.run(orders)
    store.scheduler.ran(store.rank.report())
    assert [
        part.blocks for order in store.scheduler.step({}, dict).saves for part in order.parts
    ] == [[1, 2, 3, 4]]


def test_drain_waits_until_pinned_blocks_are_read(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, gate = TorchTransfer.gather, threading.Event()

    def gated(*arguments: Any) -> None:
        assert gate.wait(60.0)
        gather(*arguments)

    monkeypatch.setattr(TorchTransfer, "gather", gated)
    store, request, table = stores(), FakeRequest("r", TOKENS), [1, 2, 3, 4, 5]
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [table], 0)
    store.step((request, 70, table))
    for _ in range(3):
        store.step()
    assert store.pins == [1, 2, 3, 4]
    threading.Timer(0.2, gate.set).start()
    store.rank.drain()
    assert gate.is_set()
    store.settle()
    assert store.pins == []


def test_failed_load_is_reported_once_and_its_blocks_saved_again(
    stores: MakeStore,
) -> None:
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.save(request, [1, 2, 3, 4, 5])
    again = FakeRequest("s", TOKENS)
    store.scheduler.ask(again)
    assert store.matched(again) == 64
    client = store.lookups._backend._client
    client.remove(store.namespace, [again.block_hashes[1]])
    store.scheduler.allocated(again, [[11, 12, 13, 14, 15]], 64)
    ended = store.loaded()
    assert (ended.finished, ended.failed, ended.wrong_blocks) == ({"s"}, {"s"}, {12, 13, 14})
    assert [store.matched(again) for _ in range(3)] == [0, 0, 0]
    again.num_computed_tokens = 16
    store.step((again, 54, [11, 12, 13, 14, 15]))
    store.settle()
    assert (
        store.lookups._backend._client.lookup(store.namespace, again.block_hashes).prefix_pages == 4
    )
    assert store.rank.take_counts().loads_failed == 1


def test_blocks_another_connector_loads_after_a_failed_load_are_not_saved(
    stores: MakeStore,
) -> None:
    """After a failed load the request gets no further lookup, so its new blocks are not known as
    computed.

    vLLM counts the tokens of a load as computed when the load is ordered.
    """
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.save(request, [1, 2, 3, 4, 5])
    again = FakeRequest("s", TOKENS)
    store.scheduler.ask(again)
    assert store.matched(again) == 64
    client = store.lookups._backend._client
    client.remove(store.namespace, list(again.block_hashes))
    store.scheduler.allocated(again, [[11, 12, 13, 14, 15]], 64)
    assert store.loaded().failed == {"s"}
    store.step((again, 16, [11, 12, 13, 14, 15]))  # then the request is preempted
    again.num_computed_tokens = 0
    assert store.matched(again) == 0
    store.scheduler.allocated(again, [[21, 22, 23, 24, 25]], 0)
    again.num_computed_tokens = 64
    store.scheduler.finished(
        again, [[21, 22, 23, 24, 25]]
    )  # aborted while the other connector loads
    store.settle()
    assert client.lookup(store.namespace, again.block_hashes[1:]).prefix_pages == 0


def test_blocks_of_a_failed_load_are_not_stored_while_a_rank_loads(
    stores: MakeStore,
) -> None:
    """An engine learns of a failed load only when all ranks have ended it.

    A request aborted before that counts its tokens as computed, though its blocks hold garbage.
    """
    store, table = stores(), [1, 2, 3, 4, 5]
    request = FakeRequest("r", TOKENS)
    store.save(request, table)
    two_ranks = stores(ranks=2)
    aborted = FakeRequest("s", TOKENS)
    two_ranks.scheduler.ask(aborted)
    assert two_ranks.matched(aborted) == 64
    two_ranks.scheduler.allocated(aborted, [[11, 12, 13, 14, 15]], 64)
    step = two_ranks.scheduler.step({}, dict).step
    aborted.num_computed_tokens = 64  # vLLM counts a load as computed when it is ordered
    two_ranks.scheduler.ran(Report(step, finished={"s": 1}, failed={"s"}))
    two_ranks.scheduler.finished(aborted, [[11, 12, 13, 14]])
    assert two_ranks.pins == []
    assert two_ranks.scheduler.step({}, dict).saves == []


def test_pins_are_limited_and_start_at_the_head(stores: MakeStore) -> None:
    store = stores(blocks_max=3)
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
    store.step((request, 70, [1, 2, 3, 4, 5]))
    assert store.pins == [1, 2, 3]
    store.settle()
    store.step((request, 0, [1, 2, 3, 4, 5]))
    assert store.pins == [4]
    store.settle()
    assert (
        store.lookups._backend._client.lookup(store.namespace, request.block_hashes).prefix_pages
        == 4
    )


def test_rank_that_does_not_write_acknowledges_at_once(stores: MakeStore) -> None:
    store = stores(writes=False)
    request = FakeRequest("r", TOKENS)
    store.save(request, [1, 2, 3, 4, 5])
    assert (
        store.lookups._backend._client.lookup(store.namespace, request.block_hashes).prefix_pages
        == 0
    )


def test_null_block_is_neither_saved_nor_loaded(stores: MakeStore) -> None:
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    store.matched(request)
    store.scheduler.allocated(request, [[0, 0, 3, 4, 5]], 0)
    store.step((request, 70, [0, 0, 3, 4, 5]))
    assert store.pins == [3, 4]
    store.settle()


def test_hit_shorter_than_min_tokens_is_a_miss(stores: MakeStore) -> None:
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.save(request, [1, 2, 3, 4, 5])
    for minimum, tokens in ((64, 64), (65, 0)):
        other = stores(min_tokens=minimum)
        again = FakeRequest("s", TOKENS)
        other.scheduler.ask(again)
        assert other.matched(again) == tokens


class RecordingCostModel(LoadCostModel):
    """Record the scheduler's calls and answer `verdict`."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict, self.asked, self.prompts, self.loads = True, 0, list[Any](), list[Any]()

    def step_begins(self, step: int, now: float, parts: list[tuple[int, int]], short: bool) -> None:
        self.prompts += parts

    def loads_ended(self, loads: int, tokens: int, began_at: float, now: float) -> None:
        self.loads.append((loads, tokens, began_at < now))

    def is_load_faster(self, start: int, end: int, alone: bool) -> bool:
        self.asked += 1
        return self.verdict


def test_slow_hit_is_declined_and_not_saved_again(
    stores: MakeStore,
) -> None:
    worth = RecordingCostModel()
    store, table = stores(cost_model=worth), [1, 2, 3, 4, 5]
    request = FakeRequest("r", TOKENS)
    store.save(request, table)
    assert (worth.asked, worth.prompts) == (0, [(0, 70)])  # there was no hit

    hit = FakeRequest("s", TOKENS)
    store.scheduler.ask(hit)
    assert store.matched(hit) == 64
    store.scheduler.allocated(hit, [[11, 12, 13, 14, 15]], 64)
    store.loaded()
    assert worth.loads == [(1, 64, True)]

    worth.verdict, worth.asked = False, 0
    slow = FakeRequest("t", TOKENS)
    store.scheduler.ask(slow)
    assert [store.matched(slow) for _ in range(3)] == [0, 0, 0]
    assert worth.asked == 1
    store.scheduler.allocated(slow, [[6, 7, 8, 9, 10]], 0)
    store.step((slow, 70, [6, 7, 8, 9, 10]))
    assert store.pins == []
    counts = store.scheduler.take_counts()
    assert (counts.hits, counts.hits_declined, counts.hit_tokens) == (1, 1, 64)


def test_engine_with_other_requests_does_not_wait_for_a_lookup(stores: MakeStore) -> None:
    """Requests that skip the store count as other requests."""
    store = stores()
    store.scheduler.step({"a stranger": 1}, dict)
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    assert not store.scheduler._alone(store.scheduler._requests["r"])
    store.scheduler.step({}, dict)
    assert store.scheduler._alone(store.scheduler._requests["r"])


def test_reset_starts_a_new_epoch_on_both_sides(stores: MakeStore) -> None:
    """R2: the ranks get the epoch with their next orders, and a load ordered before fails."""
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.save(request, [1, 2, 3, 4, 5])
    again = FakeRequest("s", TOKENS)
    store.scheduler.ask(again)
    assert store.matched(again) == 64
    store.scheduler.allocated(again, [[11, 12, 13, 14, 15]], 64)
    orders = store.scheduler.step({}, dict)
    store.rank.begin(orders)
    store.rank.load(orders.loads)
    store.scheduler.reset()
    after = store.scheduler.step({}, dict)
    assert after.epoch is not None
    assert after.epoch != store.namespace.epoch
    store.rank.begin(after)
    store.rank.drain()
    ended = store.rank.loads_ended()
    assert (ended.finished, ended.failed) == ({"s"}, {"s"})
    store.scheduler.ran(store.rank.report())
    fresh = FakeRequest("t", TOKENS)
    store.scheduler.ask(fresh)
    assert store.matched(fresh) == 0


def test_generated_blocks_are_saved_in_batches_unless_blocks_are_scarce(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request preempted for lack of blocks resumes with its stored blocks."""
    monkeypatch.setattr(request_module, "STAGED_BLOCKS", 4)
    store, request, table = stores(), FakeRequest("r", list(range(32))), list(range(1, 13))
    store.scheduler.ask(request)
    staged = []
    for step in range(10):  # one block per step: two of the prompt, then the answer's
        if step >= 2:
            request.tokens += range(16)
            request.block_hashes = prefix_hashes(request.tokens, 16)
        store.scarce = step == 3
        before = len(store.pins)
        store.scheduler.step({"r": 16}, lambda _: [table])
        request.num_computed_tokens += 16
        staged.append(len(store.pins) - before)
    assert staged == [1, 1, 0, 2, 0, 0, 0, 4, 0, 0]
    store.scheduler.reset()


def test_preempted_request_repeats_its_lookup_and_old_answers_are_refreshed(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    request = FakeRequest("r", TOKENS)
    store.scheduler.ask(request)
    assert store.matched(request) == 0
    waiting = FakeRequest("w", TOKENS)
    store.scheduler.ask(waiting)
    assert store.matched(waiting) == 0
    store.scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
    store.step((request, 70, [1, 2, 3, 4, 5]))
    store.settle()
    request.num_computed_tokens = 0
    assert store.matched(request) == 64
    assert store.matched(waiting) == 0
    monkeypatch.setattr(scheduler, "REFRESH_S", 0.05)
    time.sleep(0.06)
    offered = []
    while (last := store.scheduler.matched(waiting, 0)) == 0:
        offered.append(last)
        time.sleep(0.005)
    assert last == 64
    assert offered, "the old answer was dropped before a new one came"


def test_reports_of_ranks_are_summed() -> None:
    one, two = Report(5), Report(4)
    one.acknowledged[7] = 1
    two.acknowledged[7] = 1
    two.failed.add("r")
    two.finished["r"] = 1
    total = one.add(two)
    assert (total.step, total.acknowledged, total.finished, total.failed) == (
        4,
        {7: 2},
        {"r": 1},
        {"r"},
    )


def test_layers_of_one_kind_form_a_group_named_after_it() -> None:
    """The pool has a latent with an indexer, small kernel blocks and shared layers."""
    latent = torch.zeros((8, 1, 16, 24), dtype=torch.bfloat16)
    views = {
        "model.layers.1.attn": torch.zeros((8, 1, 16, 24), dtype=torch.bfloat16),
        "model.layers.0.attn": latent,
        "model.layers.2.attn": latent,
        "model.layers.0.indexer": torch.zeros((4, 1, 32, 12), dtype=torch.uint8),
    }
    layout = table_pool(views, 4, 32).layout
    assert [(group.name, group.layers) for group in layout.groups] == [
        ("bfloat16.2x1x16x24", (0, 1)),
        ("uint8.1x1x32x12", (0,)),
    ]
    assert layout.page_tokens == 32
    assert layout.page_nbytes == 2 * 2 * 16 * 24 * 2 + 32 * 12
    with pytest.raises(InvalidRequest, match=r"layers\.1\.attn: 8 rows"):
        table_pool({"model.layers.1.attn": latent}, 5, 32)


def test_page_does_not_depend_on_memory_order() -> None:
    """`BLHNC` packs the layers of a block together, but a page has the same bytes."""
    # [blocks, layers, heads, tokens, cell]
    packed = torch.randint(0, 256, (8, 2, 2, 16, 4), dtype=torch.uint8)
    views = {f"layers.{layer}": packed[:, layer] for layer in (0, 1)}
    apart = {name: view.contiguous() for name, view in views.items()}
    pools = [table_pool(some, 8, 16) for some in (views, apart)]
    assert pools[0].layout == pools[1].layout
    assert all(
        torch.equal(a.bits, b.bits) for a, b in zip(pools[0].planes, pools[1].planes, strict=True)
    )
    assert pools[0].planes[0].bits.data_ptr() == packed.data_ptr()
