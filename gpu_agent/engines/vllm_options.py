"""Parse the options of vLLM's connector: those of gpu_agent.options, and OWN_OPTIONS."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_agent.identity.shards import shard_options
from gpu_agent.options import Options, read_options
from gpu_agent.worker.choice import WHERE
from kvstore.errors import ConfigError

OWN_OPTIONS = (
    "min_tokens",
    "slow_hits",
    "lora",
    "agents",
    "head_shards",
    "layer_shards",
    "handover_wait_s",
)
MIN_TOKENS = 16
HANDOVER_WAIT_S = 2.0
HANDOVER_WAIT_S_MAX = 60.0


def connector_options(values: Mapping[str, Any]) -> Options:
    """Return the connector's options.

    Raises ConfigError for an unknown, removed or invalid one.
    """
    if "load" in values:
        raise ConfigError(
            f"option load={values['load']!r} was removed: delete it; loads are always "
            'asynchronous. With load="sync" '
            "blocks of a failed load could stay in vLLM's prefix cache, and wrong pages could be "
            "stored"
        )
    options = read_options(values, OWN_OPTIONS)
    if options.own.get("agents", "auto") not in WHERE:
        raise ConfigError(f"option agents={options.own['agents']!r} is none of {', '.join(WHERE)}")
    if options.own.get("slow_hits", "decline") not in ("decline", "take"):
        raise ConfigError(
            f'option slow_hits={options.own["slow_hits"]!r} is neither "decline" nor "take"'
        )
    if options.own.get("lora", "skip") not in ("skip", "named"):
        raise ConfigError(f'option lora={options.own["lora"]!r} is neither "skip" nor "named"')
    shard_options(options.own)
    numbers = {
        "min_tokens": _whole(options.own.get("min_tokens", MIN_TOKENS)),
        "handover_wait_s": _seconds(options.own.get("handover_wait_s", HANDOVER_WAIT_S)),
    }
    return replace(options, own={**options.own, **numbers})


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"option min_tokens={value!r} is not a whole number") from None


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= HANDOVER_WAIT_S_MAX:
        raise ConfigError(
            f"option handover_wait_s={value!r} is no number in 0..{HANDOVER_WAIT_S_MAX:g}"
        )
    return seconds
