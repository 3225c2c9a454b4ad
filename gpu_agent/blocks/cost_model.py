"""Decide whether loading a hit is faster than computing it.

Both costs are measured while the engine runs, in seconds:

    computing   a * tokens + b * sum of the tokens' positions in their prompts
    loading     c * loads + d * tokens

Computing counts the time of a step beyond that of the short step that follows a hit. Both are
least-squares fits in which old samples fade. A hit that would be slower than computing is declined:
otherwise a small model on a fast GPU waits longer for its KV than computing takes.

Overestimating the time of loads is worse than underestimating it, because a declined hit gives no
new sample. So a load that waited for another one counts from that one's end, and one that is much
faster than expected outweighs earlier samples. A load that ended during a prompt's step is noticed
late: its true end lies between the last two polls. Such a sample counts only if one of these two
bounds contradicts the estimate.
"""

import logging
from dataclasses import dataclass

from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.log_rate import LogRate
from kvstore.transports.channel import PAUSE_PER_COST, CircuitBreaker

log = logging.getLogger(__name__)
log.addFilter(LogRate())

STEPS_MAX = 64  # running steps, at most
RETAINED = 0.97  # weight of earlier samples at each new one: about the last thirty count
SAMPLES_MIN = 8  # of both kinds; before that every hit is accepted
PROMPT_TOKENS_MIN = 64  # of one request in one step: fewer are typical of answers, not of prompts
PROBED = 32  # of the hits that seem slow, one in so many is accepted, because costs change
# Below this relative determinant the fit is ill-conditioned: the samples' lengths differ by less
# than a seventh.
CONDITION_MIN = 0.02
RETAINED_DURATION = 0.9  # weight of earlier durations at each new one
STEP_S_MAX = 0.1  # a longer step without a prompt was disturbed
OUTLIER = 3.0  # times the expected duration: other load on the machine, or a compiler
OUTLIER_S_MIN = 0.01  # a shorter excess is no outlier, even while the first samples were disturbed
SURPRISE = 0.5  # share of the expected duration: a load this fast shows that costs have changed
RETAINED_SURPRISED = 0.25  # weight of earlier samples after a surprise
PROBED_SOON = 2  # after a surprise, one in so many is accepted


class Line:
    """The line `y = p * u + q * v`, with p and q at least 0.

    If the samples are too much alike to separate u's share from v's, `at` returns both extremes.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def add_sample(self, u: float, v: float, y: float, kept: float = RETAINED) -> None:
        """Add a sample; outliers count less."""
        if self.samples >= SAMPLES_MIN:
            y = min(y, max(OUTLIER * self.at(u, v)[1], OUTLIER_S_MIN))
        self.samples += 1
        self._uu = kept * self._uu + u * u
        self._uv = kept * self._uv + u * v
        self._vv = kept * self._vv + v * v
        self._uy = kept * self._uy + u * y
        self._vy = kept * self._vy + v * y

    def at(self, u: float, v: float) -> tuple[float, float]:
        """Return the lowest and highest estimate of y."""
        by_u = u * self._uy / self._uu if self._uu else 0.0
        by_v = v * self._vy / self._vv if self._vv else 0.0
        determinant = self._uu * self._vv - self._uv**2
        if determinant <= CONDITION_MIN * self._uu * self._vv:
            return min(by_u, by_v), max(by_u, by_v)
        p = (self._uy * self._vv - self._vy * self._uv) / determinant
        q = (self._vy * self._uu - self._uy * self._uv) / determinant
        if p < 0:
            return by_v, by_v
        if q < 0:
            return by_u, by_u
        return p * u + q * v, p * u + q * v


class MovingAverage:
    """Moving average of a duration, robust against long outliers."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add_sample(self, seconds: float) -> None:
        """Add a duration; a surprising one counts less."""
        fades = RETAINED_DURATION if seconds > SURPRISE * self.seconds else SURPRISE
        self.seconds = fades * self.seconds + (1 - fades) * seconds if self.seconds else seconds


@dataclass(frozen=True)
class _Step:
    began_at: float
    short: bool  # a few tokens of a prompt, as after a hit
    tokens: int  # of prompts
    places: float  # sum of these tokens' positions in their prompts


class LoadCostModel:
    """Cost model of loads and of computing. Not thread-safe.

    Times are of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._computing, self._loading = Line(), Line()
        # Duration of steps without a prompt, and of steps with a few tokens of one
        self._answering, self._short = MovingAverage(), MovingAverage()
        self._steps: dict[int, _Step] = {}
        self._ended_at = 0.0
        self._prompts_at = 0.0  # end of the newest step with a prompt
        # When loads were polled before that; overlapping steps report one step late
        self._polled_at = (0.0, 0.0)
        self._loaded_at = 0.0  # end of the newest load
        self._prompt_tokens = 0  # tokens of prompts in the newest step
        self._slow = 0  # hits that seemed slow since one of them was accepted

    def step_begins(self, step: int, now: float, parts: list[tuple[int, int]], short: bool) -> None:
        """Note that a step is scheduled.

        `parts` has, for each request with at least PROMPT_TOKENS_MIN tokens in it, the tokens
        computed before and in this step. `short` says that another one has fewer, but more than
        one.
        """
        self._prompt_tokens = sum(count for _, count in parts)
        places = sum(count * (start + count / 2) for start, count in parts)
        self._steps[step] = _Step(now, short, self._prompt_tokens, places)
        self._steps.pop(step - STEPS_MAX, None)  # its end was never reported

    def step_ended(self, step: int, now: float) -> None:
        """Note that the engine has the results of a step and of all before it."""
        ours = self._steps.get(step)
        self._steps = {number: later for number, later in self._steps.items() if number > step}
        since, self._ended_at, self._polled_at = (
            self._ended_at,
            now,
            (self._polled_at[1], self._ended_at),
        )
        if ours is None or not since:
            return
        seconds = now - max(since, ours.began_at)
        if ours.tokens:
            self._prompts_at = now
            # A hit ends with a short step, for which there may be no CUDA graph: it costs most of
            # what a short prompt does.
            fixed_s = self._short.seconds or self._answering.seconds
            self._computing.add_sample(ours.tokens, ours.places, max(0.0, seconds - fixed_s))
        else:
            (self._short if ours.short else self._answering).add_sample(min(seconds, STEP_S_MAX))

    def loads_ended(self, loads: int, tokens: int, began_at: float, now: float) -> None:
        """Note that loads have ended by `now`; the first was ordered at `began_at`."""
        since, self._loaded_at = max(began_at, self._loaded_at), now
        seconds = now - since
        expected_s, _ = self._loading.at(loads, tokens)
        if self._prompts_at > since and seconds > expected_s:
            seconds = max(0.0, self._polled_at[0] - since)
            if seconds < expected_s:
                return
        surprised = seconds < SURPRISE * expected_s
        self._loading.add_sample(
            loads, tokens, seconds, RETAINED_SURPRISED if surprised else RETAINED
        )
        if surprised:
            self._slow = PROBED - PROBED_SOON

    def is_load_faster(self, start: int, end: int, alone: bool) -> bool:
        """Return whether to load these tokens of a prompt instead of computing them.

        They would be computed `alone`, or beside prompts such as those in the newest step.
        """
        if min(self._computing.samples, self._loading.samples) < SAMPLES_MIN:
            return True
        _, computed_s = self._computing.at(
            end - start + (0 if alone else self._prompt_tokens), (end - start) * (start + end) / 2
        )
        loaded_s, _ = self._loading.at(1.0, end - start)
        if loaded_s <= computed_s:  # if in doubt it is accepted, and gives a sample
            return True
        self._slow = (self._slow + 1) % PROBED
        return self._slow == 0

    def computing_s(self, start: int, end: int) -> float:
        """Return how long these tokens of a prompt take to compute, at least.

        0 as long as too few prompts were computed to tell.
        """
        if self._computing.samples < SAMPLES_MIN:
            return 0.0
        return self._computing.at(end - start, (end - start) * (start + end) / 2)[0]


# If lookups are answered but loads are not, each request would wait for one. A load that fails
# sooner hit a missing page.
HUNG_S = 1.0
PAUSE_S_MAX = 60.0


class HitPolicy:
    """Decide which hits are accepted: those worth their load, and none while loads hang.

    Not thread-safe. Without a `cost_model`, or if it `takes_slow` ones, a hit is accepted even if
    computing is faster.
    """

    def __init__(self, cost_model: LoadCostModel | None, takes_slow: bool = False) -> None:
        self._cost_model = cost_model
        self._takes_slow = takes_slow
        self._hangs = CircuitBreaker("loads", PAUSE_S_MAX, chance=lambda: 0.0)
        self._hung = 0  # failed loads since the last success
        self._unavailable_ranks = 0  # ranks that can not load now

    def accepts(self, start: int, end: int, alone: bool, granted: bool) -> bool:
        """Return whether to load these tokens; `granted`: the request was accepted before."""
        if self._unavailable_ranks or (
            self._cost_model
            and not self._takes_slow
            and not self._cost_model.is_load_faster(start, end, alone)
        ):
            return False
        return granted or self._loads_end()

    def step_begins(
        self, step: int, now: float, prompts: list[tuple[int, int]], short: bool
    ) -> None:
        """See `LoadCostModel.step_begins`."""
        if self._cost_model:
            self._cost_model.step_begins(step, now, prompts, short)

    def step_ended(self, step: int, now: float, away: int) -> None:
        """Note that a step has ended; `away` ranks cannot load, as their worker process is gone."""
        self._unavailable_ranks = away
        if self._cost_model:
            self._cost_model.step_ended(step, now)

    def loads_ended(self, loads: int, tokens: int, began_at: float, now: float) -> None:
        """Note that loads have succeeded by `now`; the first was ordered at `began_at`."""
        self.succeeded()
        if self._cost_model:
            self._cost_model.loads_ended(loads, tokens, began_at, now)

    def computing_s(self, start: int, end: int) -> float:
        """See `LoadCostModel.computing_s`."""
        return self._cost_model.computing_s(start, end) if self._cost_model else 0.0

    def succeeded(self) -> None:
        """Note that a load has succeeded."""
        self._hung = 0
        self._hangs.success()

    def failed(self, seconds: float) -> None:
        """Note that a load was incomplete after some seconds.

        Hits are refused for as long, and twice as long after each further failure.
        """
        if seconds >= HUNG_S:
            self._hung += 1
            pause_s = min(PAUSE_S_MAX, seconds * 2 ** min(self._hung - 1, 10))
            self._hangs.failure(
                DeadlineExceeded(f"after {seconds:.1f} s"), pause_s / PAUSE_PER_COST
            )
            log.warning(
                "a load was abandoned after %.1f s; while loads hang, hits are computed", seconds
            )

    def _loads_end(self) -> bool:
        """Return whether loads end; after a hanging one a request tries now and then."""
        try:
            self._hangs.enter()
        except Unavailable:
            return False
        return True
