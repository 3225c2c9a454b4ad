"""Compare the answers of engines.

The last bits of a GPU's results depend on which tokens are computed together. So the reference for
a hit in the store is a hit in an engine's own cache: it computes the same tokens over the same KV,
and must be equal to the last bit. Where an engine computes tokens that another one loaded, `agree`
allows the rounding errors of bfloat16, which are far smaller than the effect of wrong KV.
"""

import random
from collections.abc import Sequence
from typing import Any

from engine_apart import EngineApart

# The largest rounding error of a log probability; see test_wrong_kv_changes_the_answer
ROUNDING = 0.35
UNLIKELY = -1e9


def prompt(seed: int, tokens: int) -> list[int]:
    """Return random tokens; prompts of different seeds share no prefix."""
    numbers = random.Random(seed)
    return [numbers.randrange(5, 505) for _ in range(tokens)]


def answers(requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[float], str]]:
    """Return the tokens, exact float32 log probabilities and finish reason of each request."""
    return [(request["tokens"], request["logprobs"], request["finish"]) for request in requests]


def cached(requests: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many prompt tokens each request found in a cache."""
    return [request["cached"] for request in requests]


def found_locally(
    engine: EngineApart, *prompts: Sequence[int], **order: Any
) -> list[dict[str, Any]]:
    """Return the answers of an engine that has each prompt's full blocks in its own cache.

    The prompts are served one after the other.
    """
    found = []
    for one in prompts:
        engine.reset()
        engine.generate(one, **order)
        found += engine.generate(one, **order)
    return found


def agree(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    """Return whether two lists of answers are equal except for rounding.

    Up to the first token that differs, log probabilities must be close. At that token, both engines
    must find the other's token nearly as likely as the other did. All tokens behind it may differ.
    """
    return all(_agree(one, other) for one, other in zip(found, expected, strict=True))


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["finish"] != other["finish"] or len(one["tokens"]) != len(other["tokens"]):
        return False
    for mine, yours, token, same in zip(
        one["likely"], other["likely"], one["tokens"], other["tokens"], strict=True
    ):
        likely, expected = dict(map(tuple, mine)), dict(map(tuple, yours))
        if not all(
            abs(likely.get(it, UNLIKELY) - expected.get(it, UNLIKELY)) < ROUNDING
            for it in (token, same)
        ):
            return False
        if token != same:
            break
    return True
