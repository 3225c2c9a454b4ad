"""Divide a model's KV by head range and layer range, whatever the number of ranks.

    TP 1   | 0  1  2  3 |            Pages of four head shards. A rank holds the shards of its
    TP 2   | 0  1 | 2  3 |           heads, so ranks of TP 1, 2 and 4 read each other's pages.
    TP 4   | 0 | 1 | 2 | 3 |         Nothing is converted: a shard is a slice of the rank's tensors.

Pure: engines tell what can be cut (`vllm_shards.py`, `sglang.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.errors import ConfigError

# Far below it a node moves fewer bytes per second (decision 0049).
PAGE_NBYTES_MIN = 512 << 10


@dataclass(frozen=True)
class ShardOptions:
    """Numbers of shards of the whole model; None: chosen by `auto`."""

    heads: int | None = None
    layers: int | None = None


class Shard(NamedTuple):
    """Shard `number` of `total`: the items `first` to `end` of those that a rank holds."""

    number: int
    total: int
    first: int
    end: int


def shard_options(own: Mapping[str, Any]) -> ShardOptions:
    """Parse the options `head_shards` and `layer_shards`. Raises ConfigError."""
    return ShardOptions(_count("head_shards", own), _count("layer_shards", own))


def _count(name: str, own: Mapping[str, Any]) -> int | None:
    value = own.get(name, "auto")
    if value == "auto":
        return None
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1 or isinstance(value, (bool, float)):
        raise ConfigError(f'option {name}={value!r} is neither "auto" nor a number from 1 on')
    return count


def head_shards(wanted: int | None, heads: int, ranks: int, block_nbytes: int) -> int:
    """Return the number of head shards.

    `heads`: of the whole model. `ranks`: tensor-parallel ranks with different heads.
    `block_nbytes`: bytes of a block with all heads. By default pages are not smaller than
    PAGE_NBYTES_MIN because of shards, and the number is a power of two, so that every such number
    of ranks up to it shares pages. Raises ConfigError for a number that fits no heads or ranks.
    """
    if heads == 1:  # latents: there is nothing to cut
        return 1
    fits = [n for n in range(ranks, heads + 1, ranks) if heads % n == 0]
    if wanted is None:
        large = [n for n in fits if not n & (n - 1) and block_nbytes // n >= PAGE_NBYTES_MIN]
        return max(large, default=ranks)
    if wanted not in fits:
        raise ConfigError(
            f"option head_shards={wanted} does not fit {heads} KV heads on {ranks} different "
            f"tensor-parallel ranks; allowed are {', '.join(map(str, fits))}"
        )
    return wanted


def layer_shards(wanted: int | None, layers: int, ranks: int) -> int:
    """Return the number of layer shards; by default one for each pipeline rank.

    `layers`: of the whole model. Raises ConfigError for a number that fits no layers or ranks.
    """
    if wanted is None or wanted == ranks:
        return ranks
    fits = [n for n in range(ranks, layers + 1, ranks) if layers % n == 0]
    if wanted not in fits:
        raise ConfigError(
            f"option layer_shards={wanted} does not fit {layers} layers on {ranks} pipeline "
            f"ranks; allowed are {', '.join(map(str, fits)) or ranks}"
        )
    return wanted


def shards_of_rank(count: int, rank: int, ranks: int, items: int) -> list[Shard]:
    """Return the shards that a rank holds.

    `items`: heads, or layers, of this rank. All ranks hold the same number of them.
    """
    held = count // ranks
    step = items // held
    return [
        Shard(rank * held + i, count, i * step, (i + 1) * step if i + 1 < held else items)
        for i in range(held)
    ]
