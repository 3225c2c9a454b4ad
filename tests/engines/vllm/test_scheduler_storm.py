"""vLLM's own scheduler under random faults: aborts, preemptions, slow ranks and vanishing pages.

No answer is wrong, no block leaks, and a fresh engine that loads all pages answers as if it had
computed them. SEEDS=200 runs that many storms; KVSTORE_SEED=7 begins with the seventh.
"""

import contextlib
import os
import random
from collections import Counter
from typing import Any

import pytest
from scheduler_engine import BLOCK, Engine, Engines, answer, tokens

from gpu_agent.blocks.ranks import LoadsEnded

pytestmark = pytest.mark.filterwarnings("default")
FIRST, SEEDS = int(os.environ.get("KVSTORE_SEED") or 1), int(os.environ.get("SEEDS") or 6)
REQUESTS = 30
LIMIT_S = 180.0  # for a storm on a busy machine; it takes some seconds


class Storm:
    """Run random requests on two engines with one store, under faults; `met` counts events."""

    def __init__(self, make: Engines, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.shape: dict[str, Any] = {
            "ranks": rng.choice([1, 2]),
            "window": rng.choice([0, 0, 40]),
            "states": rng.choice([0, BLOCK, 2 * BLOCK]),
        }
        self.met: Counter[str] = Counter()
        # The number of blocks; one request needs up to 18 per group.
        few = rng.choice([26, 40, 128]) * (
            1 + sum(bool(self.shape[n]) for n in ("window", "states"))
        )
        self.engines = [
            make(
                **self.shape,
                blocks=few,
                batch_tokens=rng.choice([48, 64, 512]),
                overlap=rng.random() < 0.5,
                policy=rng.choice(["recompute", "recompute", "fail"]),
            )
            for _ in range(2)
        ]
        for engine in self.engines:
            self._disturb_loads(engine, patch)
            engine.reads_at_once = rng.random() < 0.5

    def _disturb_loads(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        def forget(orders: Any) -> None:
            for order in orders.loads:
                self.met["loads"] += 1
                for part in order.parts:
                    if part.keys and self.rng.random() < 0.4:
                        rank = self.rng.randrange(len(engine.ranks))
                        gone = self.rng.sample(part.keys, self.rng.choice([1, 1, len(part.keys)]))
                        with contextlib.suppress(AssertionError):  # already lost by another load
                            engine.forget(gone, rank, part.group)

        engine.on_execute = forget
        for rank in engine.ranks:  # ranks end their loads in different steps
            ended = rank.connector._rank.loads_ended
            patch.setattr(
                rank.connector._rank,
                "loads_ended",
                lambda ended=ended: LoadsEnded() if self.rng.random() < 0.5 else ended(),
            )

    def prompt(self) -> list[int]:
        """Return a prompt with a shared head and, now and then, a shared tail."""
        head = tokens(self.rng.choice([3, 7, 11]), self.rng.choice([16, 48, 60, 100]))
        return head + tokens(self.rng.choice([13, 17]), self.rng.randrange(1, 120))

    def strike(self, engine: Engine) -> None:
        live = [name for name, request in engine.requests.items() if not request.is_finished()]
        what = self.rng.random()
        if live and what < 0.2:
            name = self.rng.choice(live)
            self.met[f"aborted {engine.requests[name].status.name}"] += 1
            engine.abort(name)
        elif what < 0.35 and engine.scheduler.running and not engine._overlap:
            self.met["preempted"] += 1
            request = self.rng.choice(engine.scheduler.running)
            engine.scheduler.running.remove(request)
            engine.scheduler._preempt_request(request, 0.0)

    def run(self) -> None:
        for number in range(REQUESTS):
            engine = self.rng.choice(self.engines)
            engine.add(f"r{number}", self.prompt(), self.rng.randrange(1, 30))
            for _ in range(self.rng.randrange(12)):
                one = self.rng.choice(self.engines)
                one.step()
                if self.rng.random() < 0.3:
                    self.strike(one)
        for engine in self.engines:
            engine.run(LIMIT_S)

    def check(self) -> list[list[int]]:
        """Check the answers, and return all prompts with their answers."""
        known = []
        for engine in self.engines:
            for name, request in engine.requests.items():
                assert request.is_finished()
                prompt = list(request.prompt_token_ids)
                found = engine.outputs[name]
                assert found == answer(prompt, len(found)), (
                    f"{name} of {request.status.name}: {self.met}"
                )
                known.append(prompt + found)
            assert engine.pool.get_num_free_blocks() == engine.free_blocks
            self.met["loads failed"] += int(engine.stats.data.get("loads_failed", 0))
        return known


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_engines_and_store_after_a_storm_are_correct(
    make: Engines, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    storm = Storm(make, monkeypatch, seed)
    storm.run()
    known = storm.check()
    assert storm.met["loads"], storm.met
    fresh = make(**storm.shape, blocks=512)
    for number, prompt in enumerate(known):
        # Load from the store, and from the caches that went through the storm.
        for engine in (
            fresh,
            *storm.engines,
        ):
            if number % 3 and engine is not fresh:
                continue
            engine.on_execute = lambda orders: None
            engine.add(f"again {number}", prompt, 4)
            engine.run(LIMIT_S)
            assert engine.outputs[f"again {number}"] == answer(prompt, 4), (
                f"{prompt[:3]} {storm.shape} {storm.met}"
            )
    assert any(cached >= BLOCK for cached in fresh.cached.values())
