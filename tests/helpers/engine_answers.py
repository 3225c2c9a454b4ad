"""What an engine answers, and when two answers are the same.

What a GPU computes depends in its last bits on which tokens are computed together. So the reference
for a hit in the store is a hit in an engine's own cache, which computes the same tokens over the
same KV: equal to the last bit. Where an engine computes what another found, `agree` allows what
rounding to bfloat16 makes, which wrong KV is far from.
"""

import random
from collections.abc import Sequence
from typing import Any

from engine_apart import EngineApart

ROUNDING = 0.35  # of a log probability; see test_wrong_kv_changes_the_answer
UNLIKELY = -1e9


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens that no other seed begins with."""
    numbers = random.Random(seed)
    return [numbers.randrange(5, 505) for _ in range(tokens)]


def answers(requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[float], str]]:
    """What must not depend on the store: tokens, their float32 log-probabilities to the last bit,
    how they ended.
    """
    return [(request["tokens"], request["logprobs"], request["finish"]) for request in requests]


def cached(requests: Sequence[dict[str, Any]]) -> list[int]:
    """Prompt tokens that each request found in a cache."""
    return [request["cached"] for request in requests]


def found_locally(
    engine: EngineApart, *prompts: Sequence[int], **order: Any
) -> list[dict[str, Any]]:
    """What an engine answers that has the full blocks of a prompt in its own cache, one prompt
    after the other.
    """
    found = []
    for one in prompts:
        engine.reset()
        engine.generate(one, **order)
        found += engine.generate(one, **order)
    return found


def agree(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> bool:
    """Whether these are the same answers but for rounding: each token's log probability is near, up
    to the first that differs (behind it all may), and there both found the other's nearly as likely
    as the other did.
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
