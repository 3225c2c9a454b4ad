"""vLLM's own scheduler over any number of ranks: they read each other's pages."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import scheduler_engine
import torch
from scheduler_engine import BLOCK, HEADS, Engine, Engines, Rank, answer, attend, tokens

pytestmark = pytest.mark.filterwarnings("default")

MODEL_HEADS = 4
CELLS_NBYTES = scheduler_engine.CELLS_NBYTES
P = tokens(7, 60)  # 3 blocks and 12 tokens


class HeadRank(Rank):
    """A worker that has some of the model's KV heads, each with another content."""

    def __init__(self, config: Any, caches: Any, rank: int, patch: Any) -> None:
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        context = config.compilation_config.static_forward_context
        for group in caches.kv_cache_groups:
            context |= dict.fromkeys(group.layer_names, layer)
        super().__init__(config, caches, rank, patch)
        tp = config.parallel_config.tensor_parallel_size
        first, own = rank * MODEL_HEADS // tp, max(1, MODEL_HEADS // tp)
        self.marks = torch.arange(first, first + own, dtype=torch.int32) * 100

    def forward(
        self, group: int, table: list[int], start: int, known: list[int], drafts: list[int]
    ) -> int:
        """Compute `known[start:]` as `Rank` does, over all heads; 0 if any head is wrong."""
        window = (
            getattr(self.caches.kv_cache_groups[group].kv_cache_spec, "sliding_window", None) or 0
        )
        first = max(0, start - window + 1) if window else 0
        rows = torch.tensor([table[position // BLOCK] for position in range(first, len(known))])
        places = torch.arange(first, len(known)) % BLOCK
        past_count, found = start - first, set()
        for layer, name in enumerate(self.caches.kv_cache_groups[group].layer_names):
            view, marks = self.kv[name], self.marks + 1 + layer + 10 * group
            cells = view[rows, :, places]  # [tokens, heads, cell]
            past = cells[:past_count]
            right = (past[:, :, 3] == marks).all(1) & (past[:, :, 0] == past[:, :1, 0]).all(1)
            values = attend(
                torch.where(right, past[:, 0, 0], 999_983).tolist(), known[start:], window
            )
            new = marks[None, :, None].expand(len(values), -1, cells.shape[2]).clone()
            new[:, :, 0] = torch.tensor(values, dtype=torch.int32)[:, None]
            view[rows[past_count:], :, places[past_count:]] = new
            found.add(values[-1])
        return found.pop() if found == {attend([], known, window)[-1]} else 0


@pytest.fixture
def of_ranks(make: Engines, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Make an engine whose ranks divide the heads of one model."""
    monkeypatch.setattr(scheduler_engine, "Rank", HeadRank)
    config = json.loads(json.dumps(scheduler_engine.CONFIG))
    config |= {"num_attention_heads": MODEL_HEADS, "num_key_value_heads": MODEL_HEADS}
    monkeypatch.setattr(scheduler_engine, "CONFIG", config)

    def engine(ranks: int, shards: Any = MODEL_HEADS, **arguments: Any) -> Engine:
        heads = max(1, MODEL_HEADS // ranks)
        monkeypatch.setattr(scheduler_engine, "HEADS", heads)
        nbytes = CELLS_NBYTES // HEADS * heads
        monkeypatch.setattr(scheduler_engine, "CELLS_NBYTES", nbytes)
        options = {"head_shards": shards, "timeout_s": 20.0}
        return make(store=options, ranks=ranks, **arguments)

    return engine


SOME = [(1, [2, 8]), (2, [1, 4]), (4, [1, 2]), (8, [4])]


@pytest.mark.parametrize(
    ("window", "sizes"), [(0, SOME), (40, [(2, [8]), (8, [1])])], ids=["full", "window"]
)
def test_any_ranks_read_what_others_stored(
    of_ranks: Callable[..., Engine], window: int, sizes: list[tuple[int, list[int]]]
) -> None:
    """The ranks of 8 have every head twice, and one of two stores it."""
    for seed, (writes, readers) in enumerate(sizes):
        prompt = tokens(7 + seed, 60)
        writer = of_ranks(writes, window=window)
        assert writer.generate(prompt) == answer(prompt, 8)
        pages = writer.stats.data["pages_saved"]
        assert pages == (1 + bool(window)) * MODEL_HEADS * 4  # 3 blocks, and one of the answer
        for reads in readers:
            reader = of_ranks(reads, window=window)
            assert reader.generate(prompt) == answer(prompt, 8)
            assert reader.cached == {"r": 48}, (writes, reads)


@pytest.mark.parametrize(("shards", "waits"), [((4, 4), 1), ((4, 2), 0)], ids=["same", "different"])
def test_hand_over_between_engines_of_other_ranks(
    of_ranks: Callable[..., Engine], shards: tuple[int, int], waits: int
) -> None:
    first, second = of_ranks(2, shards[0], window=40), of_ranks(1, shards[1], window=40)
    first.add("p", P, 1, kv_transfer_params={"do_remote_decode": True})
    first.run()
    assert second.generate(P, kv_transfer_params=first.answered["p"]) == answer(P, 8)
    assert second.cached == {"r": 48 * waits}
    assert second.stats.data.get("handovers", 0) == waits


class TwoKindsRank(HeadRank):
    """A worker whose layers with a window have twice as many KV heads as the others."""

    def forward(
        self, group: int, table: list[int], start: int, known: list[int], drafts: list[int]
    ) -> int:
        ranks_of_a_head = 1 if group else 2
        self.marks = torch.tensor([self.rank // ranks_of_a_head * 100], dtype=torch.int32)
        return super().forward(group, table, start, known, drafts)


@pytest.mark.parametrize(
    "more", [{"swa_num_key_value_heads": 8}, {"others": [{"num_attention_groups": 8}]}], ids=str
)
def test_ranks_that_share_the_heads_of_some_layers_only_store_each_their_own(
    of_ranks: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """As with MiMo-V2 on 8 ranks: vLLM counts 4 heads, and layers with a window have 8."""
    monkeypatch.setattr(scheduler_engine, "Rank", TwoKindsRank)
    monkeypatch.setattr(scheduler_engine, "CONFIG", {**scheduler_engine.CONFIG, **more})
    for cached in (0, 48):
        engine = of_ranks(8, "auto", window=40)
        assert engine.generate(P) == answer(P, 8)
        assert engine.cached == {"r": cached}


def test_block_without_one_shard_is_computed(of_ranks: Callable[..., Engine]) -> None:
    of_ranks(2).generate(P)
    engine = of_ranks(1)
    ours, keys = engine.ranks[0].connector, engine.add("r", P).block_hashes
    client = ours._rank._backend._client
    assert client.remove(ours._namespaces[0][3], [keys[1]]) == [True]
    engine.run()
    assert engine.outputs == {"r": answer(P, 8)}
    assert engine.cached == {"r": 16}
    again = of_ranks(4)
    assert again.generate(P) == answer(P, 8)
    assert again.cached == {"r": 48}


def test_shard_that_fails_to_load_is_computed(of_ranks: Callable[..., Engine]) -> None:
    """It was there at the lookup."""
    of_ranks(2).generate(P)
    engine = of_ranks(1)
    ours = engine.ranks[0].connector

    def forget(orders: Any) -> None:
        if orders.loads:
            keys = orders.loads[0].parts[0].keys
            assert ours._rank._backend._client.remove(ours._namespaces[0][2], keys[2:]) == [True]
            engine.on_execute = lambda orders: None

    engine.on_execute = forget
    assert engine.generate(P) == answer(P, 8)
    assert engine.stats.data["loads_failed"] == 1


def test_default_for_small_pages_is_the_ranks(of_ranks: Callable[..., Engine]) -> None:
    one = of_ranks(1, shards="auto").ranks[0].connector._namespaces
    two = of_ranks(2, shards="auto").ranks[1].connector._namespaces
    assert [(space.tp_rank, space.tp_size) for (space,) in (*one, *two)] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("shards", [0, 2.5, "many", True, float("inf")])
def test_invalid_number_of_shards_is_refused(of_ranks: Callable[..., Engine], shards: Any) -> None:
    with pytest.raises(Exception, match=r'option head_shards=.* is neither "auto" nor a number'):
        of_ranks(1, shards=shards)


def test_shards_that_do_not_fit_are_refused(of_ranks: Callable[..., Engine]) -> None:
    with pytest.raises(Exception, match="head_shards=2 does not fit 4 KV heads on 4 different"):
        of_ranks(4, shards=2)
