"""One model under test: its engines, its prompts, and the checks that all cases share."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comparison import CLOSE, RIGHT, WRONG, Reference
from configuration import Store
from engine_control import Answer, Engine

# How long a case waits until what it wrote can be restored; a connector may save in the background.
PATIENCE_S = 5.0
MANY = "many ranks"  # the engine with several
MANY_PATIENCE_S = 40.0  # they may share few cores
TOKENS = 8


class Skip(Exception):
    """The case does not apply; the message says why."""


@dataclass
class Checks:
    """What a case has compared.

    `wanted`: prompt tokens that a hit could have covered. `differs`: of log-probabilities in close
    answers, the largest.
    """

    wrong: list[str] = field(default_factory=list)
    exact: int = 0
    close: int = 0
    differs: float = 0.0
    restored: int = 0
    wanted: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.exact + self.close + len(self.wrong)


class Session:
    """Engines of one model. `start(role)` returns an engine; `roles` are started at once.

    Roles: "plain" has no connector; "writer", "reader" and MANY have the connector under test.
    `arguments` of checks are those of the engine's `generate`: `max_tokens`, `adapter`.
    """

    def __init__(
        self,
        model: str,
        start: Callable[[str], Engine],
        store: Store,
        rounding: float,
        adapters: Sequence[str] = (),
        roles: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.store = store
        self._start = start
        self._engines: dict[str, Engine] = {}
        self._numbers = random.Random(model)
        self.adapters = adapters
        self.reference = Reference(start("plain"), rounding)
        for role in roles:
            self.engine(role)
        self.checks = Checks()
        # Prompts that the writer has computed, for engines that come later.
        self.written: list[list[int]] = []
        self._patient = True

    # ---- engines ---------------------------------------------------------------------------

    @property
    def plain(self) -> Engine:
        return self.reference.engine

    @property
    def writer(self) -> Engine:
        return self.engine("writer")

    @property
    def reader(self) -> Engine:
        return self.engine("reader")

    def engine(self, role: str) -> Engine:
        if role not in self._engines:
            self._engines[role] = self._start(role)
        return self._engines[role]

    def drop(self, role: str, kill: bool = False) -> None:
        """End an engine; the next use of the role starts another process."""
        engine = self._engines.pop(role, None)
        if engine is not None:
            engine.kill() if kill else engine.close()

    def drop_all(self) -> None:
        """Kill all engines with the connector, after one has died."""
        for role in list(self._engines):
            self.drop(role, kill=True)
        self.store.ensure()

    def close(self) -> None:
        for role in list(self._engines):
            self.drop(role)
        self.plain.close()

    # ---- prompts ---------------------------------------------------------------------------

    @property
    def block(self) -> int:
        return self.plain.block

    @property
    def chunk(self) -> int:
        return self.plain.chunk

    def prompt(self, tokens: int) -> list[int]:
        """Return new random tokens, which share no prefix with other prompts."""
        return [self._numbers.randrange(5, 505) for _ in range(tokens)]

    # ---- checks ----------------------------------------------------------------------------

    def begin(self) -> Checks:
        """Return empty checks for the next case."""
        self.checks, self._patient = Checks(), True
        return self.checks

    def check(
        self,
        label: str,
        prompt: Sequence[int],
        found: Answer,
        batch: Sequence[Sequence[int]] = (),
        after: Sequence[Sequence[int]] = (),
        hits: Sequence[int] = (),
        **arguments: Any,
    ) -> str:
        """Compare an answer with the reference, count it, and return its verdict's name.

        `batch`, `after`, `hits`: as in `Reference.verdict`.
        """
        verdict = self.reference.verdict(prompt, found, batch, after, hits, **arguments)
        if verdict.name == RIGHT:
            self.checks.exact += 1
        elif verdict.name == CLOSE:
            self.checks.close += 1
            self.checks.differs = max(self.checks.differs, verdict.differs)
        else:
            self.checks.wrong.append(
                f"{label}: prompt of {len(prompt)} tokens, {found.cached} restored, differs by "
                f"{verdict.differs:.2f} at token {verdict.position}"
            )
        return verdict.name

    def write(self, label: str, *prompts: Sequence[int], **arguments: Any) -> list[Answer]:
        """Compute prompts one by one in the writer, compare, and let it save them."""
        found = []
        self.writer.fresh()
        for prompt in prompts:
            answer = self.writer.generate(prompt, **arguments)[0]
            self.check(f"{label}, computed", prompt, answer, **arguments)
            self.written.append(list(prompt))
            found.append(answer)
        self.writer.settle()
        return found

    def restore(
        self,
        label: str,
        *prompts: Sequence[int],
        by: str = "writer",
        least: int | None = None,
        after: Sequence[Sequence[int]] = (),
        **arguments: Any,
    ) -> list[Answer]:
        """Serve prompts one by one over poisoned blocks, with nothing in the engine's own cache.

        A hit that does not come yet is asked for again for some seconds. `least`: the tokens
        to wait for; by default all full blocks that leave a token to compute. `after`: as in
        `Reference.verdict`.
        """
        engine, found = self.engine(by), []
        patience_s = MANY_PATIENCE_S if by == MANY else PATIENCE_S
        for prompt in prompts:
            wanted = (len(prompt) - 1 if least is None else least) // self.block * self.block
            end = time.monotonic() + (patience_s if self._patient else 0.0)
            hits: list[int] = []
            while True:
                engine.fresh()
                answer = engine.generate(prompt, **arguments)[0]
                verdict = self.check(
                    f"{label}, restored", prompt, answer, (), after, hits, **arguments
                )
                if answer.cached >= wanted or verdict == WRONG or time.monotonic() > end:
                    break
                if hits[-1:] != [answer.cached]:
                    hits.append(answer.cached)
                time.sleep(0.1)
            self._patient = self._patient and answer.cached >= wanted
            self.checks.restored += answer.cached
            self.checks.wanted += wanted
            found.append(answer)
        return found
