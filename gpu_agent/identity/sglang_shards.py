"""Cut a rank's host pools of SGLang's HiCache into shards (`shards.py`).

A shard is a range of heads, or of layers, that has as few runs of memory as the whole page. No
layout of SGLang has both, so where a rank holds several ranges of both the start ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpu_agent.identity.shards import (
    Shard,
    ShardOptions,
    head_shards,
    layer_shards,
    shards_of_rank,
)
from gpu_agent.layouts.sglang import head_axis, layer_axis
from gpu_agent.pool import KVPool
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a whole model: its layers, and its KV heads in each pool by the pool's name."""

    layers: int
    heads: Mapping[str, int]


class PoolShard(NamedTuple):
    """A part of a pool's pages; None for heads or layers that are named by rank."""

    view: KVPool
    heads: Shard | None = None
    layers: Shard | None = None


class CutPool(NamedTuple):
    """The shards of a pool on one rank.

    `runs`: how many parts of a whole flat page each shard has. `writes`: whether this rank stores
    them; of ranks with the same heads only one does.
    """

    shards: list[PoolShard]
    runs: int = 1
    writes: bool = True


def pool_shards(
    name: str,
    host: Any,
    whole: KVPool,
    engine: Any,
    wanted: ShardOptions,
    model: ModelShape | None,
) -> CutPool:
    """Return the shards of a host pool.

    `engine`: SGLang's HiCacheStorageConfig. `model`: None outside a server. Raises ConfigError for
    options that do not fit the pool, its layout or its ranks.
    """
    heads, copies = _heads(name, host, engine, wanted.heads, model)
    layers = _layers(name, host, engine, wanted.layers, model)
    writes = engine.tp_rank % copies == 0
    if len(heads) > 1 and len(layers) > 1:
        raise ConfigError(
            f"head_shards={wanted.heads} and layer_shards={wanted.layers} can not both cut pool "
            f"{name}: no host layout has ranges of both in one piece. Leave one out, or run with "
            f"a TP size from {wanted.heads} on or a PP size of {wanted.layers}"
        )
    if len(heads) > 1:
        option, axis, layouts = f"head_shards={wanted.heads}", head_axis(host), "page_head"
        ranges = heads
    elif len(layers) > 1:
        option, axis = f"layer_shards={wanted.layers}", layer_axis(host)
        layouts, ranges = "page_first_direct or layer_first", layers
    else:
        return CutPool([PoolShard(whole, heads[0], layers[0])], 1, writes)
    if axis is None:
        raise ConfigError(
            f"{option} can not cut pool {name} ({type(host).__name__}, {host.layout}): start the "
            f"server with --hicache-mem-layout {layouts}; where that is refused too, leave the "
            "option out"
        )
    cut = [axis.cut(part.first, part.end) for part in ranges if part]
    named = [(head, layer) for head in heads for layer in layers]
    shards = [PoolShard(view, *names) for view, names in zip(cut, named, strict=True)]
    return CutPool(shards, axis.runs, writes)


def _heads(
    name: str, host: Any, engine: Any, wanted: int | None, model: ModelShape | None
) -> tuple[list[Shard | None], int]:
    """Return the head shards that a rank holds, and how many ranks hold the same ones."""
    heads, ranks = getattr(host, "head_num", 0), engine.tp_size
    if wanted is None or not heads or name.startswith("draft"):
        return [None], 1
    total = model.heads.get(name) if model else None
    if wanted == ranks and total in (None, heads * ranks):
        return [None], 1
    if total is None and heads == 1 and ranks > 1:
        raise ConfigError(
            f"head_shards={wanted}: how many KV heads pool {name} has on all ranks together is "
            "unknown, because each has one; leave the option out"
        )
    total, copies = total or heads * ranks, 1
    if heads * ranks != total:
        # SGLang gives head `rank // copies` to each rank, unless other ranks divide the tokens
        if heads > 1 or ranks % total or engine.attn_cp_size > 1:
            raise ConfigError(
                f"head_shards={wanted}: pool {name} has {heads} KV heads on each of {ranks} ranks, "
                f"and the model {total} in all; leave the option out"
            )
        copies = ranks // total
    count = head_shards(wanted, total, ranks // copies, 0)
    if count != wanted:
        raise ConfigError(
            f"head_shards={wanted} does not fit pool {name} of one KV head; allowed is 1"
        )
    return [*shards_of_rank(count, engine.tp_rank // copies, ranks // copies, heads)], copies


def _layers(
    name: str, host: Any, engine: Any, wanted: int | None, model: ModelShape | None
) -> list[Shard | None]:
    """Return the layer shards that a rank holds."""
    ranks = engine.pp_size
    if wanted in (None, ranks):
        return [None]
    if model is None:
        raise ConfigError(f"layer_shards={wanted} needs the model's configuration; leave it out")
    count = layer_shards(wanted, model.layers, ranks)
    here = model.layers // ranks
    first = here * engine.pp_rank
    has = tuple(getattr(host, field, None) for field in ("start_layer", "end_layer", "layer_num"))
    # A pool of some of the layers, of a draft's too, or of stages of unequal size
    if has != (first, first + here, here) or getattr(host, "target_layer_num", here) != here:
        raise ConfigError(
            f"layer_shards={wanted}: pool {name} ({type(host).__name__}) of pipeline rank "
            f"{engine.pp_rank} has {has[2]} layers from {has[0]} to {has[1]}, not the layers "
            f"{first} to {first + here} of {model.layers}; leave the option out"
        )
    return [*shards_of_rank(count, engine.pp_rank, ranks, here)]
