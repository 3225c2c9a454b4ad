"""Compare answers of engines: equal to the last bit, equal but for rounding, or wrong.

The last bits of an answer depend on which tokens are computed together. A restored prefix is
therefore compared with a hit of the same length in the engine's own cache, which computes the same
tokens over the same KV and must be equal to the last bit, and otherwise with computing all. Answers
of one batch are also compared with the same batch in an engine without a connector.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine_control import Answer, Engine

UNLIKELY = -1e9
# Largest difference of log-probabilities that rounding makes. Wrong KV makes larger ones: the case
# `sensitivity` shows it for each model.
ROUNDING = {"float32": 0.01, "bfloat16": 0.35}
RIGHT, CLOSE, WRONG = "right", "close", "wrong"


def equal(found: Answer, expected: Answer) -> bool:
    """Return whether two answers are equal to the last bit of their log-probabilities."""
    return (found.tokens, found.likely, found.finish) == (
        expected.tokens,
        expected.likely,
        expected.finish,
    )


def close(found: Answer, expected: Answer, rounding: float) -> bool:
    """Return whether two answers are equal but for rounding.

    Up to the first token that differs, log-probabilities must be close. There, both engines must
    find both tokens about as likely. Tokens behind it are not compared.
    """
    if found.finish != expected.finish or len(found.tokens) != len(expected.tokens):
        return False
    for mine, yours, token, other in zip(
        found.likely, expected.likely, found.tokens, expected.tokens, strict=True
    ):
        for one in (str(token), str(other)):
            if abs(mine.get(one, UNLIKELY) - yours.get(one, UNLIKELY)) > rounding:
                return False
        if token != other:
            break
    return True


class Reference:
    """An engine without a connector, and what it answers. Answers are kept by prompt."""

    def __init__(self, engine: Engine, rounding: float) -> None:
        self.engine = engine
        self.rounding = rounding
        self._computed: dict[Any, Answer] = {}
        self._local: dict[Any, Answer] = {}
        self._together: dict[Any, list[list[Answer]]] = {}

    def computed(self, prompt: Sequence[int], **arguments: Any) -> Answer:
        """Return the answer to a prompt with nothing in any cache."""
        key = (tuple(prompt), tuple(sorted(arguments.items())))
        if key not in self._computed:
            self.engine.ask("reset")
            self._computed[key] = self.engine.generate(prompt, **arguments)[0]
        return self._computed[key]

    def local_hit(self, prompt: Sequence[int], tokens: int, **arguments: Any) -> Answer:
        """Return the answer with the first `tokens` in the engine's own cache, if it can be."""
        key = (tuple(prompt), tokens, tuple(sorted(arguments.items())))
        if key not in self._local:
            self.engine.ask("reset")
            self.engine.generate(prompt[:tokens] if tokens < len(prompt) else prompt, **arguments)
            self._local[key] = self.engine.generate(prompt, **arguments)[0]
        return self._local[key]

    def together(self, prompts: Sequence[Sequence[int]], cached: bool) -> list[Answer]:
        """Return the answers to prompts in one batch, computed or from the engine's own cache."""
        key = tuple(map(tuple, prompts))
        if key not in self._together:
            self.engine.ask("reset")
            self._together[key] = [self.engine.generate(*prompts) for _ in range(2)]
        return self._together[key][cached]

    def verdict(
        self,
        prompt: Sequence[int],
        found: Answer,
        batch: Sequence[Sequence[int]] = (),
        **arguments: Any,
    ) -> str:
        """Return RIGHT, CLOSE or WRONG. `batch`: all prompts that were asked for at once."""
        candidates: list[Callable[[], Answer]] = [lambda: self.computed(prompt, **arguments)]
        if found.cached:
            candidates.append(lambda: self.local_hit(prompt, found.cached, **arguments))
        if batch:
            candidates.append(lambda: self.together(batch, found.cached > 0)[batch.index(prompt)])
        expected = []
        for candidate in candidates:
            expected.append(candidate())
            if equal(found, expected[-1]):
                return RIGHT
        return CLOSE if any(close(found, one, self.rounding) for one in expected) else WRONG
