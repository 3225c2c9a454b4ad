"""The cost model decides from measured steps and loads whether a hit is faster than computing."""

import random

import pytest

from gpu_agent.blocks.cost_model import (
    PROBED,
    PROBED_SOON,
    PROMPT_TOKENS_MIN,
    SAMPLES_MIN,
    Line,
    LoadCostModel,
)

SMALL_S = 0.002


class Engine:
    """Simulate an engine that computes a token in `token_s`, more if it is late in its prompt.

    It loads a token in `load_token_s`, plus `load_s` per load.
    """

    def __init__(
        self,
        token_s: float,
        late_s: float = 0.0,
        load_s: float = 0.0,
        load_token_s: float = 0.0,
        eager_s: float = 0.0,
    ) -> None:
        """Make an engine; `eager_s` is the extra time of a step with several tokens of a prompt.

        Such a step can not use a CUDA graph.
        """
        self.eager_s = eager_s
        self.worth = LoadCostModel()
        self.token_s, self.late_s, self.load_s, self.load_token_s = (
            token_s,
            late_s,
            load_s,
            load_token_s,
        )
        self.now, self.step, self.draw = 100.0, 0, random.Random(1)

    def computed_s(self, start: int, end: int) -> float:
        return (end - start) * self.token_s + (end * end - start * start) / 2 * self.late_s

    def run(self, *parts: tuple[int, int]) -> None:
        """Run one step whose results arrive before the next one begins."""
        self.step += 1
        short = any(1 < count < PROMPT_TOKENS_MIN for _, count in parts)
        self.worth.step_begins(
            self.step, self.now, [part for part in parts if part[1] >= PROMPT_TOKENS_MIN], short
        )
        self.now += self.eager_s if any(count > 1 for _, count in parts) else 0.0
        self.now += SMALL_S + sum(
            self.computed_s(start, start + count) for start, count in parts if count > 1
        )
        self.worth.step_ended(self.step, self.now)

    def prefill(self, tokens: int, chunk: int = 2048) -> None:
        for start in range(0, tokens, chunk):
            self.run((start, min(chunk, tokens - start)), (50, 1))
        for _ in range(3):
            self.run((tokens, 1))

    def load(self, tokens: int) -> None:
        began_at, self.now = self.now, self.now + self.load_s + tokens * self.load_token_s
        self.worth.loads_ended(1, tokens, began_at, self.now)

    def learn(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            self.prefill(self.draw.choice([700, 3000, 9000]))
            self.load(self.draw.choice([500, 2000, 8000]))


# The 0.9 B model of RESULTS on an H200: 4.3 us per token and 0.14 ns more for each token before it.
# A load takes 16 ms plus 2.4 us per token.
def h200() -> Engine:
    engine = Engine(4.3e-6, 0.14e-9, 0.016, 2.4e-6)
    engine.learn()
    return engine


@pytest.mark.parametrize(
    ("tokens", "taken"), [(1000, False), (2000, False), (8000, True), (30000, True)]
)
def test_short_prompts_are_computed_and_long_ones_loaded(tokens: int, taken: bool) -> None:
    engine = h200()
    assert (engine.computed_s(0, tokens) > engine.load_s + tokens * engine.load_token_s) == taken
    assert engine.worth.is_load_faster(0, tokens, alone=True) == taken


def test_seconds_to_compute_are_told_once_they_are_known() -> None:
    assert LoadCostModel().computing_s(0, 8000) == 0.0
    engine = h200()
    for start, end in ((0, 1000), (0, 8000), (4000, 8000)):
        expected_s = engine.computed_s(start, end)
        assert engine.worth.computing_s(start, end) == pytest.approx(expected_s, rel=0.1)


def test_hit_benefit_excludes_tokens_that_are_computed_anyway() -> None:
    """The last tokens are computed in a step that costs most of what a short prompt costs.

    On an H200 a prompt of 2k tokens took 17 ms and a load 11 ms, but the request after it took 25
    ms.
    """
    engine = Engine(2e-6, 0.1e-9, 0.009, 1e-6, eager_s=0.011)
    for _ in range(12):
        engine.prefill(2055)
        engine.load(2048)
        engine.run((2048, 7))
    assert (
        engine.computed_s(0, 2048) < 0.009 + 2048e-6 < engine.computed_s(0, 2048) + engine.eager_s
    )
    assert not engine.worth.is_load_faster(0, 2048, alone=True)
    assert engine.worth.is_load_faster(0, 30_000, alone=True)


def test_tokens_late_in_a_prompt_cost_more() -> None:
    engine = h200()
    assert not engine.worth.is_load_faster(0, 4000, alone=True)
    assert engine.worth.is_load_faster(40_000, 44_000, alone=True)


def test_hit_cost_includes_other_requests_of_the_step() -> None:
    """A request that waits for other prompts loses more by computing than its own tokens take."""
    engine = h200()
    assert not engine.worth.is_load_faster(0, 2000, alone=True)
    engine.run((0, 8192))
    assert engine.worth.is_load_faster(0, 2000, alone=False)
    assert not engine.worth.is_load_faster(0, 2000, alone=True)


@pytest.mark.parametrize("what", ["steps", "loads"])
def test_hits_are_loaded_until_there_are_enough_samples(what: str) -> None:
    engine = Engine(1e-9, 0.0, 10.0)
    engine.run((10, 1))  # the time of the first step is unknown
    for _ in range(SAMPLES_MIN - 1):
        engine.prefill(500)
        engine.load(500)
    for _ in range(50):
        engine.prefill(500) if what == "steps" else engine.load(500)
    assert engine.worth.is_load_faster(0, 100, alone=True)
    engine.load(500) if what == "steps" else engine.prefill(500)
    assert not engine.worth.is_load_faster(0, 100, alone=True)


def test_slow_hits_are_probed_and_faster_loads_noticed() -> None:
    engine = Engine(1e-6, 0.0, 0.1)
    engine.learn()
    assert sum(engine.worth.is_load_faster(0, 1000, alone=True) for _ in range(4 * PROBED)) == 4
    engine.load_s = 0.0001
    probes = 0
    while not (
        engine.worth.is_load_faster(0, 1000, alone=True)
        and engine.worth.is_load_faster(0, 1000, alone=True)
    ):
        probes += 1
        assert probes < 1000
        engine.load(1000)
    assert engine.worth.is_load_faster(0, 1000, alone=True)


def test_single_slow_step_changes_little() -> None:
    """A step may wait for a compiler or a busy machine."""
    engine = h200()
    engine.step += 1
    engine.worth.step_begins(engine.step, engine.now, [(0, 2048)], False)
    engine.now += 30.0
    engine.worth.step_ended(engine.step, engine.now)
    engine.run((10, 1))
    assert not engine.worth.is_load_faster(0, 1000, alone=True)


def test_overlapping_steps_are_measured_separately() -> None:
    """With asynchronous scheduling two steps are known at a time, each until its results arrive."""
    engine = Engine(2e-6, 0.0, 0.004)
    for _ in range(40):
        first, second = engine.step + 1, engine.step + 2
        engine.worth.step_begins(first, engine.now, [(0, 4000)], False)
        engine.worth.step_begins(second, engine.now + 1e-4, [], False)
        engine.worth.step_ended(first, engine.now + SMALL_S + 4000 * 2e-6)
        engine.worth.step_ended(second, engine.now + 2 * SMALL_S + 4000 * 2e-6)
        engine.now += 2 * SMALL_S + 4000 * 2e-6
        engine.step = second
        engine.load(2000)
    assert not engine.worth.is_load_faster(0, 1500, alone=True)
    assert engine.worth.is_load_faster(0, 2500, alone=True)


@pytest.mark.parametrize("first_s", [0.01, 0.1, 1.0])
def test_slow_first_step_is_forgotten(first_s: float) -> None:
    """Regression: hits were declined forever after a health check of five tokens waited for a
    compiler.

    Samples were clipped to three times the expected value, which was zero.
    """
    engine = Engine(1e-5, load_s=0.01)
    engine.run((10, 1))
    engine.now += first_s
    engine.run((0, 5))
    for _ in range(SAMPLES_MIN):
        engine.prefill(8000)
        engine.load(8000)
    for _ in range(100):
        engine.prefill(8000)
    assert all(engine.worth.is_load_faster(0, 8000, alone=True) for _ in range(3 * PROBED))


def test_hit_cost_recovers_from_a_zero_estimate() -> None:
    """Clipped to three times an expected value of zero, samples would stay zero forever."""
    line = Line()
    for v in range(1, SAMPLES_MIN + 2):
        line.add_sample(1.0, 100.0 * v, 0.0)
    for v in range(1, 100):
        line.add_sample(1.0, 100.0 * (v % 9 + 1), 0.005)
    assert line.at(1.0, 500.0)[1] > 0.004


def test_much_faster_load_is_probed_again_soon() -> None:
    """The next probe does not wait for PROBED hits, since the old estimate may be outdated."""
    engine = Engine(1e-6, load_s=0.1)
    engine.learn()
    while not engine.worth.is_load_faster(0, 1000, alone=True):
        pass
    engine.load_s = 0.001
    engine.load(1000)
    assert any(engine.worth.is_load_faster(0, 1000, alone=True) for _ in range(PROBED_SOON))


@pytest.mark.parametrize("nth", range(1, 2 * SAMPLES_MIN, 3))
def test_slow_load_is_forgotten_soon(nth: int) -> None:
    """Regression: two thousand hits were declined after one slow load.

    The first load may have to connect, or may meet a pause.
    """
    engine = Engine(3e-5, load_s=0.005, load_token_s=2.5e-6)
    loads = declined = 0
    for _ in range(400):
        tokens = engine.draw.choice([1000, 2000, 4000])
        if engine.worth.is_load_faster(0, tokens, alone=True):
            loads += 1
            engine.now += 9.0 * (loads == nth)
            engine.load_s = 9.0 if loads == nth else 0.005
            engine.load(tokens)
        else:
            declined += 1
        engine.prefill(tokens)
    assert declined < 2 * PROBED


@pytest.mark.parametrize("burst", [4, 16])
def test_loads_queued_behind_each_other_are_not_slow(burst: int) -> None:
    """Regression: in a burst of sixteen requests each load seemed to take as long as all of them.

    So bursts were computed rather than loaded.
    """
    engine = h200()
    for _ in range(20):
        ordered_at = engine.now
        for _ in range(burst):
            engine.now += 30_000 * engine.load_token_s
            engine.worth.loads_ended(1, 30_000, ordered_at, engine.now)
    assert engine.worth.is_load_faster(0, 30_000, alone=True)


def test_load_reported_after_a_long_prompt_is_not_slow() -> None:
    """A load's end is noticed only when a step ends, which may compute 8,192 tokens of others."""
    engine = Engine(5e-5, load_s=0.016, load_token_s=2.4e-6)
    engine.learn()
    for _ in range(100):
        ordered_at = engine.now
        engine.run((0, 8192))
        engine.worth.loads_ended(1, 2000, ordered_at, engine.now)
    assert all(engine.worth.is_load_faster(0, 2000, alone=True) for _ in range(PROBED - 1))


def test_loads_ending_together_are_one_sample() -> None:
    engine = Engine(4.3e-6, 0.14e-9, 0.016, 2.4e-6)
    for _ in range(12):
        engine.prefill(2055)
        engine.prefill(9000)
        for loads, tokens in ((1, 2048), (3, 6144)):
            began_at, engine.now = engine.now, engine.now + loads * 0.016 + tokens * 2.4e-6
            engine.worth.loads_ended(loads, tokens, began_at, engine.now)
    assert not engine.worth.is_load_faster(0, 2048, alone=True)


def test_loads_of_one_length_do_not_predict_much_longer_ones() -> None:
    """Regression: on an H200, after eight slow loads of 2k tokens, hits of 30k were computed.

    Computing them took twice as long as loading.
    """
    engine = Engine(4.3e-6, 0.14e-9, 0.025, 2.4e-6)
    for _ in range(12):
        engine.prefill(2055)
        engine.load(2048)
    assert not engine.worth.is_load_faster(0, 2048, alone=True)
    assert engine.worth.is_load_faster(0, 30_000, alone=True)
    for _ in range(12):
        engine.load(30_000)
        engine.prefill(30_007)
    assert not engine.worth.is_load_faster(0, 2048, alone=True)
    assert engine.worth.is_load_faster(0, 30_000, alone=True)


def test_line_is_fitted_and_never_falls() -> None:
    line, draw = Line(), random.Random(2)
    for _ in range(60):
        u, v = draw.uniform(1, 10), draw.uniform(1, 10)
        line.add_sample(u, v, 3 * u + 0.5 * v)
    assert line.at(2, 4) == pytest.approx((8, 8), rel=1e-6)
    falling = Line()
    for v in range(1, 60):
        falling.add_sample(1.0, v, 100.0 - v)
    assert falling.at(1, 1000) >= falling.at(1, 1) >= (0, 0)


def test_steps_without_an_end_are_forgotten() -> None:
    worth = LoadCostModel()
    for step in range(1000):
        worth.step_begins(step, float(step), [(0, 100)], False)
    assert len(worth._steps) <= 64
