"""Pages named by heads and layers: ranks of any number read what others wrote."""

import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import PATIENT

from gpu_agent import AgentConfig, TorchTransfer
from gpu_agent.blocks.backends import AgentBackend, LocalBackend, ShardPool
from gpu_agent.blocks.ranks import BlockRank
from gpu_agent.blocks.save_plan import GroupBlocks, LoadOrder, SaveOrder, StepOrders
from gpu_agent.identity.shards import PAGE_NBYTES_MIN, ShardOptions, head_shards
from gpu_agent.identity.vllm_shards import GroupShard, group_shards, rank_axes
from gpu_agent.kernels.simulated import SimulatedDevice
from gpu_agent.kernels.staged import StagedTransfer
from gpu_agent.layouts.vllm import table_pool
from kvstore import Client, ClientConfig, ConfigError, Namespace
from kvstore.keys import prefix_hashes
from kvstore.tools.node_process import NodeProcess

ROWS, TOKENS = 6, 8  # rows of a view, and tokens of a row
AUTO = ShardOptions()
# The order in memory of layers, rows ("blocks"), heads, tokens and cells
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BHLNC", "BLNHC")


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's class, by which groups are known."""


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


def packed(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**fields, num_head_slots=2)


def nvfp4(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**fields, kv_quant_mode=SimpleNamespace(name="NVFP4"))


class Model:
    """The KV of a whole model: `layers` tensors `[rows, heads, tokens, cell]`."""

    def __init__(
        self, heads: int = 8, layers: int = 4, cell: int = 6, dtype: torch.dtype = torch.int16
    ) -> None:
        self.heads, self.layers, self.cell, self.dtype = heads, layers, cell, dtype
        nbytes = torch.empty(0, dtype=dtype).element_size()
        shape = (layers, ROWS, heads, TOKENS, cell * nbytes)
        self.kv = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)

    def config(self, tp: int, pp: int = 1, backend: str = "FLASH_ATTN", **changes: Any) -> Any:
        layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
        parallel = {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "decode_context_parallel_size": 1,
        }
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**{**parallel, **changes}),
            speculative_config=changes.get("draft"),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: self.heads,
                hf_text_config=SimpleNamespace(num_hidden_layers=self.layers),
            ),
            compilation_config=SimpleNamespace(
                static_forward_context=dict.fromkeys(map(name, range(self.layers)), layer)
            ),
        )

    def rank(
        self, tp: int, tp_rank: int, pp: int = 1, pp_rank: int = 0, order: str = "LBHNC"
    ) -> dict[str, torch.Tensor]:
        """Return a rank's views, in memory of this order."""
        own = max(1, self.heads // tp)
        first = tp_rank * self.heads // tp
        mine = slice(self.layers // pp * pp_rank, self.layers // pp * (pp_rank + 1))
        kv = self.kv[mine, :, first : first + own]
        dims = ["LBHNC".index(letter) for letter in order]
        memory = kv.permute(dims).contiguous().permute([dims.index(i) for i in range(5)])
        return {name(layer): memory[i] for i, layer in enumerate(range(mine.start, mine.stop))}

    def shards(
        self,
        views: dict[str, torch.Tensor],
        config: Any,
        ranks: dict[str, int],
        wanted: ShardOptions = AUTO,
        spec: Callable[..., Any] = FullAttentionSpec,
        block_rows: int = 1,
    ) -> list[GroupShard]:
        tp = config.parallel_config.tensor_parallel_size
        copies = tp if spec is MLAAttentionSpec else max(1, tp // self.heads)
        made = spec(num_kv_heads=next(iter(views.values())).shape[1])
        caches = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=made, layer_names=list(views))]
        )
        pool = table_pool(views, ROWS // block_rows, TOKENS * block_rows)
        axes = rank_axes(config.parallel_config, {"cp": 0, **ranks}, copies)
        (group,) = group_shards(config, caches, views, [pool], axes, wanted)
        return group


def name(layer: int) -> str:
    return f"model.layers.{layer}.attn"


def pages(transfer: Any, shard: GroupShard) -> torch.Tensor:
    blocks = torch.arange(shard.pool.spaces["block"].slots)
    found = torch.empty((len(blocks), shard.pool.layout.page_nbytes), dtype=torch.uint8)
    table = shard.pool.unit_table(blocks, len(blocks))
    transfer.gather(shard.pool, table, list(found), None)
    return found


def put_back(transfer: Any, shard: GroupShard, stored: torch.Tensor) -> None:
    blocks = torch.arange(len(stored))
    table = shard.pool.unit_table(blocks, len(blocks))
    transfer.scatter(shard.pool, table, list(stored), None)


def key(shard: GroupShard) -> tuple[Any, ...]:
    return (shard.pool.layout.fingerprint, shard.layers, *sorted(shard.axes.items()))


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_pages_of_any_ranks_have_the_same_bytes(kernels: bool) -> None:
    """Write with one number of ranks, read with another one, over poisoned memory."""
    draw = random.Random(5)
    for seed in range(2 if kernels else 12):
        heads, dtype = draw.choice([1, 2, 4, 6, 8]), draw.choice([torch.uint8, torch.bfloat16])
        model, block_rows = Model(heads, cell=draw.choice([3, 8]), dtype=dtype), draw.choice([1, 2])
        sizes = [tp for tp in (1, 2, 3, 4, 8, 16) if heads % tp == 0 or tp % heads == 0]
        wanted, stored = ShardOptions(heads, draw.choice([2, 4])), dict[Any, torch.Tensor]()
        transfer: Any = StagedTransfer(SimulatedDevice(seed), 4096) if kernels else TorchTransfer()
        for _ in range(2 if kernels else 4):
            tp, pp, found = draw.choice(sizes), draw.choice([1, 2]), set()
            config = model.config(tp, pp)
            for tp_rank, pp_rank in itertools.product(range(tp), range(pp)):
                views = model.rank(tp, tp_rank, pp, pp_rank, draw.choice(ORDERS))
                ranks = {"tp": tp_rank, "pp": pp_rank}
                shards = model.shards(views, config, ranks, wanted, block_rows=block_rows)
                expected = {layer: view.clone() for layer, view in views.items()}
                for shard in shards:
                    found.add(key(shard))
                    page = pages(transfer, shard)
                    assert torch.equal(page, stored.setdefault(key(shard), page))
                for view in views.values():
                    view.view(torch.uint8).fill_(0xEE)
                for shard in shards:
                    put_back(transfer, shard, stored[key(shard)])
                assert all(
                    torch.equal(view.view(torch.uint8), expected[layer].view(torch.uint8))
                    for layer, view in views.items()
                )
            assert found == stored.keys(), (seed, tp, pp)


def test_shards_as_many_as_ranks_are_the_pages_of_ranks() -> None:
    """Engines that were named by rank find their pages after an upgrade."""
    model = Model()
    for tp_rank in (0, 1):
        views = model.rank(2, tp_rank)
        (shard,) = model.shards(views, model.config(2), {"tp": tp_rank, "pp": 0}, ShardOptions(2))
        whole = table_pool(views, ROWS, TOKENS)
        assert shard.pool.layout == whole.layout
        assert shard.layers == tuple(views)
        assert shard.axes == rank_axes(
            model.config(2).parallel_config, {"tp": tp_rank, "pp": 0, "cp": 0}, 1
        )


@pytest.mark.parametrize(
    ("heads", "ranks", "pages_of_min", "shards"),
    [
        (8, 1, 4.2, 4),
        (8, 2, 4.2, 4),
        (8, 4, 4.2, 4),
        (8, 8, 4.2, 8),  # no fewer shards than ranks
        (8, 1, 0.5, 1),  # a small model
        (8, 1, 99, 8),
        (6, 1, 3.5, 2),  # a power of two, for other numbers of ranks
        (6, 3, 99, 3),
        (1, 1, 99, 1),
    ],
)
def test_default_keeps_pages_large(
    heads: int, ranks: int, pages_of_min: float, shards: int
) -> None:
    assert head_shards(None, heads, ranks, int(pages_of_min * PAGE_NBYTES_MIN)) == shards


def test_default_is_the_same_on_all_ranks_of_all_sizes() -> None:
    model = Model(heads=4, cell=PAGE_NBYTES_MIN // (4 * TOKENS * 4 * 2) * 2)  # 2 pages of a block
    for tp, pp in ((1, 1), (2, 1)):
        views = model.rank(tp, 0, pp, 0)
        shards = model.shards(views, model.config(tp, pp), {"tp": 0, "pp": 0})
        assert {shard.axes["tp_size"] for shard in shards} == {2}
        assert len(shards) == 2 // tp


def test_default_is_the_same_on_all_ranks_with_one_number_of_layer_shards() -> None:
    """Also on one rank that has several layer shards: each is as large as that of other ranks."""
    model = Model(heads=4, cell=PAGE_NBYTES_MIN // (4 * TOKENS * 4 * 2) * 4)  # 2 pages of a half
    for tp, pp in itertools.product((1, 2), repeat=2):
        views, config = model.rank(tp, 0, pp, 0), model.config(tp, pp)
        shards = model.shards(views, config, {"tp": 0, "pp": 0}, ShardOptions(layers=2))
        assert {(shard.axes["tp_size"], shard.axes["pp_size"]) for shard in shards} == {(2, 2)}


def test_default_is_the_same_on_all_ranks_if_a_group_has_more_layers_in_one_half() -> None:
    """A layer of the second half is in another group."""
    model = Model(heads=4, cell=PAGE_NBYTES_MIN // (4 * TOKENS * 4 * 2) * 4)
    found = {}
    for pp in (1, 2):
        found[pp] = dict[int, int]()
        for pp_rank in range(pp):
            views = model.rank(1, 0, pp, pp_rank)
            views.pop(name(3), None)
            ranks = {"tp": 0, "pp": pp_rank}
            for shard in model.shards(views, model.config(1, pp), ranks, ShardOptions(layers=2)):
                found[pp][shard.axes["pp_rank"]] = shard.axes["tp_size"]
    assert found[1] == found[2] == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (MambaSpec, {}),
        (SlidingWindowSpec, {"decode_context_parallel_size": 2}),
        (SlidingWindowSpec, {"prefill_context_parallel_size": 2}),
        (packed, {}),
        (nvfp4, {}),
        (SlidingWindowSpec, {"backend": "B12X"}),
        (SlidingWindowSpec, {"draft": SimpleNamespace()}),
    ],
)
def test_what_is_not_cut_keeps_the_names_of_ranks(
    spec: Callable[..., Any], changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    (shard,) = model.shards(
        model.rank(2, 1), model.config(2, **changes), {"tp": 1, "pp": 0}, ShardOptions(8), spec
    )
    assert (shard.axes["tp_rank"], shard.axes["tp_size"]) == (1, 2)
    assert "head_shards and layer_shards are ignored: this engine has" in caplog.text


def test_heads_beside_each_other_in_a_cell_are_not_cut() -> None:
    """A view with K of all heads and V of all heads in place of heads."""
    model = Model(heads=4)
    views = {layer: view[:, :2] for layer, view in model.rank(1, 0).items()}

    def spec(**fields: Any) -> FullAttentionSpec:
        return FullAttentionSpec(num_kv_heads=model.heads)

    (shard,) = model.shards(views, model.config(1), {"tp": 0, "pp": 0}, ShardOptions(2), spec)
    assert shard.axes["tp_size"] == 1


def test_latents_are_one_shard() -> None:
    model = Model(heads=1)
    for tp, tp_rank in ((1, 0), (4, 3)):
        shards = model.shards(
            model.rank(1, 0),
            model.config(tp),
            {"tp": tp_rank, "pp": 0},
            ShardOptions(4, 2),
            MLAAttentionSpec,
        )
        assert [tuple(shard.axes.values())[:4] for shard in shards] == [(0, 1, 0, 2), (0, 1, 1, 2)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (ShardOptions(3), r"head_shards=3 does not fit 8 KV heads on 2 .* allowed are 2, 4, 8"),
        (ShardOptions(1), "head_shards=1 does not fit"),
        (ShardOptions(None, 3), r"layer_shards=3 does not fit 4 layers on 1 .* are 1, 2, 4"),
    ],
)
def test_shards_that_do_not_fit_are_refused(wanted: ShardOptions, message: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=message):
        model.shards(model.rank(2, 0), model.config(2), {"tp": 0, "pp": 0}, wanted)


def test_layers_outside_the_ranges_of_a_rank_are_refused() -> None:
    """Ranks of uneven sizes (VLLM_PP_LAYER_PARTITION): a load would leave a layer unwritten."""
    model = Model()
    views = model.rank(1, 0)
    del views[name(3)]  # this rank has three of four layers
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.attn is none of the layers 0 to 1"):
        model.shards(views, model.config(1, 2), {"tp": 0, "pp": 0}, ShardOptions(None, 4))


# ---- with a node ------------------------------------------------------------------------------


class Engine:
    """The ranks of an engine, with agents."""

    def __init__(self, model: Model, tp: int, label: str, address: str) -> None:
        self.views = [model.rank(tp, rank, order="BLHNC") for rank in range(tp)]
        config = AgentConfig(staging_nbytes=1 << 16, pending_nbytes_max=1 << 22, hashers=2)
        self.ranks, self.homes, self.spaces = list[BlockRank](), list[AgentBackend](), set()
        for rank, views in enumerate(self.views):
            shards = model.shards(
                views, model.config(tp), {"tp": rank, "pp": 0}, ShardOptions(model.heads)
            )
            groups = [
                ShardPool(Namespace(label, shard.pool.layout, **shard.axes), shard.pool)
                for shard in shards
            ]
            self.spaces |= {group.namespace for group in groups}
            self.homes.append(LocalBackend(groups, ClientConfig(address=address), config))
            writes = rank % max(1, tp // model.heads) == 0
            self.ranks.append(BlockRank(self.homes[-1], writes, [len(groups)]))

    def poll(self) -> None:
        for home in self.homes:
            home.poll()
        time.sleep(0.002)

    def save(self, keys: list[bytes], blocks: list[int]) -> int:
        """Save blocks on all ranks; return the pages stored."""
        orders = StepOrders(1, None, [], [SaveOrder(7, [GroupBlocks(0, keys, blocks)], ())])
        stored = 0
        for rank in self.ranks:
            rank.begin(orders)
            rank.save(orders.saves)
        for rank in self.ranks:
            rank.drain()
            while not rank.report().acknowledged and not rank.busy:
                self.poll()
            while rank.busy:
                self.poll()
                stored += rank.take_counts().pages_saved
        return stored

    def load(self, keys: list[bytes], blocks: list[int]) -> set[int]:
        """Load blocks on all ranks; return the wrong ones."""
        wrong = set[int]()
        for rank in self.ranks:
            rank.begin(StepOrders(2, None, [], []))
            rank.load([LoadOrder("r", [GroupBlocks(0, keys, blocks)])])
            while not (ended := rank.loads_ended()).finished:
                self.poll()
            wrong |= ended.wrong_blocks
        return wrong

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.check() == []
            rank.close()


@pytest.fixture
def label() -> str:
    return f"shards {secrets.token_hex(8)}"


@pytest.fixture
def store(shared_node: NodeProcess) -> Iterator[Client]:
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        yield client


def test_ranks_read_what_other_numbers_of_ranks_wrote(
    shared_node: NodeProcess, store: Client, label: str
) -> None:
    model, keys = Model(heads=4), prefix_hashes(range(3 * TOKENS), TOKENS)
    address = shared_node.address
    writer = Engine(model, 2, label, address)
    assert writer.save(keys, [1, 2, 3]) == 4 * 3  # each shard once
    writer.close()
    for tp in (1, 8):
        reader = Engine(model, tp, label, address)
        assert reader.spaces == writer.spaces
        before = [{layer: view.clone() for layer, view in views.items()} for views in reader.views]
        for views in reader.views:
            for view in views.values():
                view.fill_(-1)
        assert reader.load(keys, [1, 2, 3]) == set()
        assert all(
            torch.equal(view[1:4], kept[layer][1:4])
            for views, kept in zip(reader.views, before, strict=True)
            for layer, view in views.items()
        )
        # A block is right only with all its shards
        space = sorted(writer.spaces, key=lambda one: one.tp_rank)[2]
        assert store.remove(space, keys[1:2]) == [True]
        assert reader.load(keys, [1, 2, 3]) == {2, 3}
        # ... and only what is missing is stored again, once, by one of the ranks that have it
        for views, kept in zip(reader.views, before, strict=True):
            for layer, view in views.items():
                view.copy_(kept[layer])
        assert reader.save(keys, [1, 2, 3]) == 1
        reader.close()
