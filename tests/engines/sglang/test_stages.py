"""Ranks and stages of any number read each other's pages: `head_shards` and `layer_shards`."""

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from harness import buffers, dsa, fill, indexer_transfer, mamba, mha, mla, parallel

from gpu_agent.identity.sglang import _layers
from gpu_agent.identity.sglang_shards import ModelShape, pool_shards
from gpu_agent.identity.shards import ShardOptions
from kvstore import ConfigError

HEADS, LAYERS = 4, 4  # of the served model
BOTH = {"head_shards": HEADS, "layer_shards": 2}
TOKENS = list(range(64))
FEW = 256  # slots of a pool
SLOTS = torch.arange(len(TOKENS))
# Where pages, layers and heads are in a pool's memory, by its kind and layout
AXES = {
    ("mha", "page_head"): (1, 4, 2),
    ("mha", "page_first"): (1, 2, 3),
    ("mha", "page_first_direct"): (1, 2, 4),
    ("mha", "layer_first"): (2, 1, 3),
    ("mla", "page_first_direct"): (0, 1, None),
    ("mla", "layer_first"): (1, 0, None),
}


class Size(NamedTuple):
    """Numbers of tensor-parallel and pipeline-parallel ranks."""

    tp: int
    pp: int


class Ranks:
    """All ranks of a server, of which each has its heads and layers of one model."""

    def __init__(self, engine: Any, kind: str, layout: str, size: Size, options: Any) -> None:
        self._axes, self._layout, self._size = AXES[kind, layout], layout, size
        self.made = [
            self._rank(engine, kind, t, p, options) for t in range(size.tp) for p in range(size.pp)
        ]

    def _rank(self, engine: Any, kind: str, t: int, p: int, options: Any) -> Any:
        here = LAYERS // self._size.pp
        with parallel(t, self._size.tp, p, self._size.pp):
            if kind == "mla":
                pool = mla(self._layout, FEW, layers=range(p * here, (p + 1) * here))
            else:
                heads = max(1, HEADS // self._size.tp)
                pool = mha(self._layout, FEW, heads=heads, layers=here, first_layer=p * here)
            return engine(pool, **options)

    def parts(self, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each rank's tested pages, and the same heads and layers of the whole model."""
        pages, layers, heads = self._axes
        found = []
        for number, made in enumerate(self.made):
            t, p = divmod(number, self._size.pp)
            own = made.host.kv_buffer.view(torch.uint8)
            part = whole.narrow(layers, p * own.shape[layers], own.shape[layers])
            if heads is not None:
                first = t * HEADS // self._size.tp
                part = part.narrow(heads, first, own.shape[heads])
            by_token = self._layout in ("page_first", "layer_first")
            count = len(TOKENS) // (1 if by_token else made.page)
            found.append((own.narrow(pages, 0, count), part.narrow(pages, 0, count)))
        return found


@pytest.mark.parametrize(
    ("v1", "kind", "layout", "shards", "writers", "readers"),
    [
        (1, "mha", "page_head", {"head_shards": 4}, Size(8, 1), Size(1, 1)),
        (0, "mha", "page_head", {"head_shards": 4}, Size(2, 1), Size(8, 1)),
        (0, "mha", "page_first", {"head_shards": 4}, Size(8, 1), Size(4, 1)),
        (1, "mha", "page_first_direct", {"layer_shards": 2}, Size(1, 2), Size(1, 1)),
        (0, "mha", "page_first_direct", {"layer_shards": 4}, Size(2, 1), Size(2, 2)),
        (0, "mha", "layer_first", {"layer_shards": 2}, Size(1, 1), Size(1, 2)),
        (1, "mha", "layer_first", {"layer_shards": 4}, Size(1, 2), Size(1, 1)),
        (1, "mha", "page_first_direct", BOTH, Size(4, 1), Size(8, 2)),
        (1, "mha", "page_first_direct", BOTH, Size(8, 2), Size(4, 1)),
        (0, "mla", "page_first_direct", {"layer_shards": 2}, Size(2, 2), Size(1, 1)),
        (1, "mla", "layer_first", {"layer_shards": 4}, Size(1, 1), Size(2, 2)),
    ],
)
def test_ranks_read_what_others_stored(
    engine: Any,
    served: Any,
    v1: int,
    kind: str,
    layout: str,
    shards: Any,
    writers: Any,
    readers: Any,
) -> None:
    served(num_key_value_heads=HEADS, num_hidden_layers=LAYERS)
    options = {"revision": uuid.uuid4().hex, "interface_v1": v1, **shards}
    whole = engine(mla(layout, FEW, layers=range(LAYERS)) if kind == "mla" else mha(layout, FEW))
    fill(whole.host)
    kv = whole.host.kv_buffer.view(torch.uint8)
    store = Ranks(engine, kind, layout, writers, options)
    copies = max(1, writers.tp // HEADS)
    for number, (own, part) in reversed([*enumerate(store.parts(kv))]):
        made = store.made[number]
        own.copy_(part)
        if kind == "mha" and number // writers.pp % copies:
            own.fill_(0xDD)  # of ranks with the same heads only the first one stores
        done = made.backup(TOKENS, SLOTS).completed_tokens
        assert done == (0 if made.controller.backup_skip else len(TOKENS))
    read = Ranks(engine, kind, layout, readers, options)
    for made, (own, part) in zip(read.made, read.parts(kv), strict=True):
        own.fill_(0xEE)
        tokens, _ = made.fetch(made.query(TOKENS), SLOTS)
        assert tokens == len(TOKENS)
        assert torch.equal(own, part)


def test_all_sizes_have_the_names_of_one(engine: Any, served: Any) -> None:
    """Name pages by shard; as many shards as ranks and stages have the names of ranks."""
    served(num_key_value_heads=HEADS, num_hidden_layers=LAYERS)

    def spaces(layout: str, size: Size, **shards: Any) -> list[Any]:
        ranks = Ranks(engine, "mha", layout, size, shards)
        return [space for made in ranks.made for space in made.backend._pages["kv"].namespaces]

    by_stage = spaces("page_first_direct", Size(1, 2))
    assert spaces("page_first_direct", Size(1, 1), layer_shards=2) == by_stage
    assert spaces("page_first_direct", Size(1, 2), layer_shards=2) == by_stage
    assert len({*spaces("page_first_direct", Size(1, 2), layer_shards=4), *by_stage}) == 6
    by_rank = spaces("page_first", Size(4, 1))
    copies = spaces("page_first", Size(8, 1), head_shards=4)
    assert copies[::2] == copies[1::2] == by_rank
    assert not {*spaces("page_first", Size(8, 1))} & {*by_rank}
    # Stages of unequal size are named apart
    for stage, layers in enumerate([range(1), range(1, 4)]):
        with parallel(stage=stage, stages=2):
            pool = mha("page_first_direct", layers=len(layers), first_layer=layers.start)
            made = engine(pool, layer_shards=2)
        assert not {*made.backend._pages["kv"].namespaces} & {*by_stage}


def test_indexers_are_cut_like_their_latents(engine: Any, served: Any) -> None:
    served(num_hidden_layers=2)
    options, tokens = {"revision": uuid.uuid4().hex, "layer_shards": 2}, list(range(128))
    slots = torch.arange(len(tokens))
    writer = engine(*dsa("page_first_direct", layers=range(2)), **options)
    for host in writer.hosts.values():
        fill(host)
    assert writer.backup(tokens, slots, [indexer_transfer()]).completed_tokens == len(tokens)
    for stage in range(2):
        with parallel(stage=stage, stages=2):
            pools = dsa("page_first_direct", layers=range(stage, stage + 1))
            reader = engine(*pools, **options)
        for host in reader.hosts.values():
            buffers(host)[0].view(torch.uint8).fill_(0xEE)
        found = reader.query(tokens, [indexer_transfer()])
        loaded, _ = reader.fetch(found, slots)
        assert loaded == len(tokens)
        for name, host in reader.hosts.items():
            expected = buffers(writer.hosts[name])[0].view(torch.uint8)[:2, stage : stage + 1]
            assert torch.equal(buffers(host)[0].view(torch.uint8)[:2], expected)


def test_page_without_a_layer_shard_is_a_miss(engine: Any, served: Any) -> None:
    served(num_key_value_heads=HEADS, num_hidden_layers=LAYERS)
    options = {"revision": uuid.uuid4().hex, "layer_shards": 2}
    stages = Ranks(engine, "mha", "page_first_direct", Size(1, 2), options).made
    for stage in stages:
        fill(stage.host)
        stage.backup(TOKENS, SLOTS)
    key = bytes.fromhex(stages[1].hashes(TOKENS)[1])
    space = stages[1].backend._pages["kv"].namespace
    assert stages[1].backend._client.remove(space, [key]) == [True]
    reader = engine(mha("page_first_direct"), **options)
    keys = reader.hashes(TOKENS)
    assert reader.query(TOKENS).storage_hit_count == reader.page
    assert reader.backend.batch_get_v1(keys, SLOTS) == [True] + [False] * (len(keys) - 1)


def stage_pool(first: int, layers: int, **more: Any) -> Callable[[], Any]:
    return lambda: mha("page_first_direct", layers=layers, first_layer=first, **more)


@pytest.mark.parametrize(
    ("pool", "ranks", "shards", "message"),
    [
        (mha, {}, {"layer_shards": 2}, "layer_shards=2 can not cut pool kv .*page_first_direct"),
        (lambda: mha(page=LAYERS), {}, {"layer_shards": 2}, "can not cut pool kv .*page_first"),
        (lambda: mha("page_head"), {}, {"layer_shards": 2}, "--hicache-mem-layout page_first_dir"),
        (
            lambda: mla(layers=range(4)),
            {},
            {"layer_shards": 2},
            "MLATokenToKVPoolHost, page_first.*layer_first",
        ),
        (stage_pool(0, 4), {}, {"layer_shards": 3}, "3 does not fit 4 layers .*are 1, 2, 4"),
        (stage_pool(0, 4), {}, {"layer_shards": "all"}, "layer_shards='all' is neither"),
        (stage_pool(0, 4, v_dim=16), {}, {"layer_shards": 2}, "Asymmetric.*leave the option"),
        # Stages of unequal size, and a pool of some of the layers
        (stage_pool(1, 3), {"stage": 1, "stages": 2}, {"layer_shards": 4}, "3 layers from 1 to 4"),
        (stage_pool(0, 2), {}, {"layer_shards": 2}, "2 layers from 0 to 2, not the layers 0 to 4"),
        (
            lambda: mha("page_first_direct"),
            {},
            {"layer_shards": 2, "head_shards": 4},
            "head_shards=4 and layer_shards=2 can not both cut pool kv",
        ),
        (
            lambda: mha("page_head", heads=1),
            {"rank": 3, "size": 8},
            {"head_shards": 8},
            "head_shards=8 does not fit 4 KV heads on 4 different .*allowed are 4",
        ),
        (
            lambda: mha("page_head", heads=2),
            {"rank": 3, "size": 8},
            {"head_shards": 8},
            "2 KV heads on each of 8 ranks, and the model 4",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    engine: Any, served: Any, pool: Any, ranks: Any, shards: Any, message: str
) -> None:
    served(num_key_value_heads=HEADS, num_hidden_layers=LAYERS)
    with parallel(**ranks), pytest.raises(ConfigError, match=message):
        engine(pool(), **shards)


def test_side_pools_that_can_not_be_cut_are_refused(engine: Any, served: Any) -> None:
    served(num_key_value_heads=HEADS, num_hidden_layers=LAYERS)
    with pytest.raises(ConfigError, match=r"pool mamba \(MambaPoolHost\) .* leave the option out"):
        engine(mha("page_first_direct"), mamba("page_first_direct"), layer_shards=2)


def test_numbers_that_are_not_known_are_not_guessed(engine: Any) -> None:
    with parallel(1, 4), pytest.raises(ConfigError, match=r"how many KV heads .* is unknown"):
        engine(mha("page_head", heads=1), head_shards=2)
    with pytest.raises(ConfigError, match="layer_shards=2 needs the model's configuration"):
        engine(mha("page_first_direct"), layer_shards=2)


def test_one_head_on_all_ranks(engine: Any, served: Any) -> None:
    served(num_key_value_heads=1, num_hidden_layers=LAYERS)
    with parallel(1, 2):
        copy = engine(mha(heads=1), head_shards=1)
        with pytest.raises(ConfigError, match="does not fit pool kv of one KV head"):
            engine(mha(heads=1), head_shards=8)
    pages = engine(mha(heads=1)).backend._pages["kv"]
    assert pages.namespaces == copy.backend._pages["kv"].namespaces


def test_ranks_that_divide_tokens_are_not_taken_for_copies(engine: Any) -> None:
    made = engine(mha(heads=1)).backend
    pool = made._pools["kv"]
    axes = {"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_size": 2}
    ranks = dataclasses.replace(made._engine, **axes)
    model = ModelShape(LAYERS, {"kv": 1})
    with pytest.raises(ConfigError, match="1 KV heads on each of 2 ranks"):
        pool_shards("kv", pool.host, pool.view, ranks, ShardOptions(1), model)


def test_states_of_stages_of_other_sizes_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 may have as many layers with states, and not the same ones."""
    host = mamba().host_pool
    names = []
    for sizes in ("4,4,4", "5,4,3"):
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", sizes)
        names.append([_layers(host, None, stages) for stages in (1, 3)])
    assert names == [["", "4,4,4"], ["", "5,4,3"]]
