"""Compare answers of engines: equal to the last bit, equal but for rounding, or wrong.

The last bits of an answer depend on which tokens are computed together. A restored prefix is
therefore compared with a hit of the same length in the engine's own cache, which computes the same
tokens over the same KV and must be equal to the last bit, and otherwise with computing all. Answers
of one batch are also compared with the same batch in an engine without a connector.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def deviation(found: Answer, expected: Answer) -> tuple[float, int]:
    """Return the largest difference of log-probabilities and its position.

    It goes up to the first token that differs, with the log-probabilities of both tokens there.
    """
    worst = (0.0, 0)
    for position, (mine, yours, token, other) in enumerate(
        zip(found.likely, expected.likely, found.tokens, expected.tokens, strict=False)
    ):
        for one in (str(token), str(other)):
            differs = abs(mine.get(one, UNLIKELY) - yours.get(one, UNLIKELY))
            worst = max(worst, (differs, position))
        if token != other:
            break
    return worst


def close(found: Answer, expected: Answer, rounding: float) -> bool:
    """Return whether two answers are equal but for rounding.

    Up to the first token that differs, log-probabilities must be close. There, both engines must
    find both tokens about as likely. Tokens behind it are not compared.
    """
    if found.finish != expected.finish or len(found.tokens) != len(expected.tokens):
        return False
    return deviation(found, expected)[0] <= rounding


class Verdict(NamedTuple):
    """How an answer compares with the nearest of the expected ones.

    `name`: RIGHT, CLOSE or WRONG. `differs`, `position`: as in `deviation`.
    """

    name: str
    differs: float
    position: int


class Reference:
    """An engine without a connector, and what it answers. Answers are kept by prompt."""

    def __init__(self, engine: Engine, rounding: float) -> None:
        self.engine = engine
        self.rounding = rounding
        self._computed: dict[Any, Answer] = {}
        self._local: dict[Any, Answer] = {}
        self._repeated: dict[Any, Answer] = {}
        self._together: dict[Any, list[list[Answer]]] = {}
        self._after: dict[Any, Answer] = {}

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
            # A recurrent state at the end of a prompt may not be kept: then one token more
            for length in (tokens, tokens + 1):
                self.engine.ask("reset")
                self.engine.generate(prompt[:length], **arguments)
                self._local[key] = self.engine.generate(prompt, **arguments)[0]
                if self._local[key].cached == tokens:
                    break
        return self._local[key]

    def repeated(self, prompt: Sequence[int], hits: Sequence[int], **arguments: Any) -> Answer:
        """Return the answer after requests for the same prompt that began with such hits.

        What a request computes behind a hit is split into other chunks than without the hit.
        """
        key = (tuple(prompt), tuple(hits), tuple(sorted(arguments.items())))
        if key not in self._repeated:
            self.engine.ask("reset")
            if hits[0]:
                self.engine.generate(prompt[: hits[0] + 1], **arguments)
            for _ in hits:
                self.engine.generate(prompt, **arguments)
            self._repeated[key] = self.engine.generate(prompt, **arguments)[0]
        return self._repeated[key]

    def together(
        self, prompts: Sequence[Sequence[int]], cached: bool, **arguments: Any
    ) -> list[Answer]:
        """Return the answers to prompts in one batch, computed or from the engine's own cache."""
        key = (tuple(map(tuple, prompts)), tuple(sorted(arguments.items())))
        if key not in self._together:
            self.engine.ask("reset")
            self._together[key] = [self.engine.generate(*prompts, **arguments) for _ in range(2)]
        return self._together[key][cached]

    def after(self, batch: Sequence[Sequence[int]], prompt: Sequence[int]) -> Answer:
        """Return the answer to a prompt of a batch, asked for alone after the batch."""
        key = (tuple(map(tuple, batch)), tuple(prompt))
        if key not in self._after:
            self.engine.ask("reset")
            self.engine.generate(*batch)
            self._after[key] = self.engine.generate(prompt)[0]
        return self._after[key]

    def verdict(
        self,
        prompt: Sequence[int],
        found: Answer,
        batch: Sequence[Sequence[int]] = (),
        after: Sequence[Sequence[int]] = (),
        hits: Sequence[int] = (),
        **arguments: Any,
    ) -> Verdict:
        """Compare an answer.

        `batch`: all prompts that were asked for at once; `after`: those that were computed at once
        when the prompt was stored; `hits`: of earlier requests for the same prompt.
        """
        candidates: list[Callable[[], Answer]] = [lambda: self.computed(prompt, **arguments)]
        if found.cached:
            candidates.append(lambda: self.local_hit(prompt, found.cached, **arguments))
        if hits:
            candidates.append(lambda: self.repeated(prompt, hits, **arguments))
        if batch:
            candidates.append(
                lambda: self.together(batch, found.cached > 0, **arguments)[batch.index(prompt)]
            )
        if after:
            candidates.append(lambda: self.after(after, prompt))
        nearest = Verdict(WRONG, math.inf, 0)
        for candidate in candidates:
            expected = candidate()
            if equal(found, expected):
                return Verdict(RIGHT, 0.0, 0)
            name = CLOSE if close(found, expected, self.rounding) else WRONG
            one = Verdict(name, *deviation(found, expected))
            nearest = min(nearest, one, key=lambda some: (some.name == WRONG, some.differs))
        return nearest
