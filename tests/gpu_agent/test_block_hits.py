"""Which hits an engine's scheduler accepts, over thousands of requests.

The store's answers and the ranks are simulated, and the clock where it matters.
"""

import random
from typing import Any

import pytest

from gpu_agent.blocks import scheduler as scheduler_module
from gpu_agent.blocks.cost_model import HUNG_S, PAUSE_S_MAX, PROMPT_TOKENS_MIN, LoadCostModel
from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.blocks.save_plan import Report, SavePlan
from gpu_agent.blocks.scheduler import BlockScheduler
from kvstore.transports.channel import CircuitBreaker

BLOCK = 16


class Request:
    def __init__(self, number: int, blocks: int = 4) -> None:
        self.request_id = f"r{number}"
        self.num_computed_tokens = 0
        self.num_tokens = blocks * BLOCK + 6
        self.block_hashes = [(number * 1_000_003 + i).to_bytes(32, "big") for i in range(blocks)]
        self.tables = [list(range(1, blocks + 2))]


class Answers:
    """A stand-in for `Lookups` that answers at once: the first `stored` blocks are stored."""

    def __init__(self) -> None:
        self.stored = 1 << 30
        self._known: dict[str, Any] = {}

    def ask(self, request_id: str, question: Any, earlier: Any = None) -> None:
        self._known[request_id] = tuple(
            tuple(i < self.stored for i in range(len(keys))) for _, keys in question
        )

    def answer(self, request_id: str) -> Any:
        return self._known.get(request_id, ())

    def awaited(self, request_id: str, timeout_s: float) -> Any:
        return self.answer(request_id)

    def age_s(self, request_id: str) -> float | None:
        return 0.0 if request_id in self._known else None

    def drop(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def drop_all(self) -> None:
        self._known.clear()

    def open(self, namespaces: Any) -> None: ...

    def touch(self, request_id: str, question: Any) -> None: ...

    def poll(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the scheduler's clock."""
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "time", clock)
    return clock


def scheduler_of(
    worth: LoadCostModel | None = None, clock: Clock | None = None, takes_slow: bool = False
) -> BlockScheduler:
    answers: Any = Answers()
    plan = SavePlan(1, 1 << 20, 64, lambda blocks: None, lambda blocks: None)
    scheduler = BlockScheduler(
        [BlockGroup(BLOCK)],
        [[]],
        BLOCK,
        BLOCK,
        answers,
        plan,
        cost_model=worth,
        takes_slow=takes_slow,
    )
    if clock:
        scheduler._hit_policy._hangs = CircuitBreaker("loads", PAUSE_S_MAX, clock.monotonic)
    return scheduler


def look_up(scheduler: BlockScheduler, request: Request) -> int | None:
    scheduler.ask(request)
    return scheduler.matched(request, 0)


def admit(scheduler: BlockScheduler, request: Request, offered: int | None) -> int:
    """Admit the request and return the number of the step that begins."""
    scheduler.allocated(request, request.tables, offered or 0)
    return scheduler.step({}, dict).step


def trained_cost_model(load_s: float) -> LoadCostModel:
    """Return a cost model that has seen prompts of 1 ms per token and loads of `load_s` each."""
    worth, now, step, draw = LoadCostModel(), 1000.0, -10_000, random.Random(1)
    worth.step_begins(step, now, [], False)
    worth.step_ended(step, now + 0.01)
    for _ in range(30):
        tokens = draw.choice([300, 900, 3000])
        for parts, seconds in (([], 0.01), ([(0, tokens)], 0.01 + tokens * 1e-3), ([], 0.01)):
            step += 1
            worth.step_begins(step, now, parts, False)
            now += seconds
            worth.step_ended(step, now)
        now += load_s
        worth.loads_ended(1, tokens, now - load_s, now)
    worth._ended_at = worth._prompts_at = worth._loaded_at = (
        0.0  # the test's clock continues from here
    )
    return worth


def test_step_reports_its_prompt_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, reported = scheduler_of(), list[Any]()
    requests = [Request(number, 64) for number in range(2)]
    for request in requests:
        admit(scheduler, request, look_up(scheduler, request) and 0)
    monkeypatch.setattr(
        scheduler._hit_policy, "step_begins", lambda step, now, *what: reported.append(what)
    )
    requests[0].num_computed_tokens = 32
    for tokens in (1, 2, PROMPT_TOKENS_MIN - 1, PROMPT_TOKENS_MIN):
        scheduler.step({"r0": tokens, "r1": 1}, lambda _: [list(range(1, 70))])
    assert reported == [([], False), ([], True), ([], True), ([(32, PROMPT_TOKENS_MIN)], False)]


# ---- loads that hang ------------------------------------------------------------------------


@pytest.mark.parametrize("patience_s", [60.0, 5.0])
def test_hanging_loads_of_abandoned_requests_are_noticed(clock: Clock, patience_s: float) -> None:
    """Regression: hanging loads of ended requests went unnoticed, so later requests hung too."""
    scheduler = scheduler_of(clock=clock)
    waited = 0
    for number in range(100):
        request = Request(number)
        offered = look_up(scheduler, request)
        step = admit(scheduler, request, offered)
        clock.now += 0.01
        scheduler.ran(Report(step))
        if not offered:
            scheduler.finished(request, request.tables)
            clock.now += 1.0
            continue
        waited += 1
        clock.now += min(patience_s, 10.0)
        if patience_s < 10.0:
            scheduler.finished(request, request.tables)
            clock.now += 10.0 - patience_s
        scheduler.ran(Report(step))
        failed = Report(step, finished={request.request_id: 1}, failed={request.request_id})
        scheduler.ran(failed)
        if patience_s > 10.0:
            scheduler.finished(request, request.tables)
    assert 2 <= waited < 20
    assert not scheduler._ended, "ended requests leak"


def test_missing_page_after_a_long_step_is_no_hang(clock: Clock) -> None:
    """The load failed at once, but was reported only after a step of 30 s."""
    scheduler = scheduler_of(clock=clock)
    request = Request(0)
    step = admit(scheduler, request, look_up(scheduler, request))
    clock.now += 30 * HUNG_S
    scheduler.ran(Report(step, finished={"r0": 1}, failed={"r0"}))
    assert [look_up(scheduler, Request(number)) for number in range(1, 20)] == [64] * 19


def test_preempted_request_gets_no_hit_while_loads_hang() -> None:
    scheduler = scheduler_of()
    running, other = Request(0), Request(1)
    step = admit(scheduler, running, look_up(scheduler, running))
    scheduler.ran(Report(step, finished={"r0": 1}))
    scheduler._hit_policy.failed(10.0)
    assert look_up(scheduler, other) == 0
    assert scheduler.matched(running, 0) == 0


def test_no_hit_is_offered_while_a_rank_cannot_load() -> None:
    """A rank whose agents' process died reports so until another one is ready."""
    scheduler = scheduler_of()
    for away, offered in ((0, 64), (1, 0), (2, 0), (0, 64)):
        scheduler.ran(Report(1).add(Report(1, away=away)))
        request = Request(away * 10 + offered)
        assert look_up(scheduler, request) == offered
        scheduler.finished(request, request.tables)


# ---- slow loads -----------------------------------------------------------------------------


@pytest.mark.parametrize("polls", [1, 2, 50])
def test_trial_load_happens_although_the_request_waits(polls: int) -> None:
    """Regression: the trial of a load that seems slow was revoked at the second poll.

    vLLM polls the head of its queue in every step until it has blocks.
    """
    scheduler = scheduler_of(trained_cost_model(load_s=10.0))
    loads = 0
    for number in range(600):
        request = Request(number, 60)
        scheduler.ask(request)
        (offered,) = {scheduler.matched(request, 0) for _ in range(polls)}
        step = admit(scheduler, request, offered)
        if offered:
            scheduler.ran(Report(step, finished={request.request_id: 1}))  # after microseconds
            loads += 1
        scheduler.finished(request, request.tables)
    assert loads > 300, "loads were not noticed to be fast now"
    assert scheduler.take_counts().hits_declined == 600 - loads


def test_saved_prefill_is_counted_when_a_load_has_succeeded() -> None:
    """Also where slow hits are taken: then the model only measures."""
    scheduler = scheduler_of(trained_cost_model(load_s=10.0), takes_slow=True)
    saved_s = []
    for number, failed in enumerate((False, True)):
        request = Request(number, 60)
        offered = look_up(scheduler, request)
        assert offered == 60 * BLOCK
        step = admit(scheduler, request, offered)
        saved_s.append(scheduler.take_counts().prefill_seconds_saved)
        name = request.request_id
        scheduler.ran(Report(step, finished={name: 1}, failed={name} if failed else set()))
        saved_s.append(scheduler.take_counts().prefill_seconds_saved)
    assert saved_s == [0.0, pytest.approx(60 * BLOCK * 1e-3, rel=0.05), 0.0, 0.0]


def test_longer_hit_of_the_same_request_is_decided_again() -> None:
    """Computing 1,000 tokens is faster; after a preemption a hit of 32,000 tokens is loaded."""
    scheduler = scheduler_of(trained_cost_model(load_s=2.0))
    answers: Any = scheduler._lookups
    request = Request(0, 2000)
    answers.stored = 62
    assert look_up(scheduler, request) == 0
    admit(scheduler, request, 0)
    answers.stored = 2000
    assert scheduler.matched(request, 0) == 32_000


def busy(worth: LoadCostModel, load_s: float, hits: int) -> int:
    """Return how many hits of 1,000 tokens are loaded while each step computes 2,048 others."""
    taken, now, step = 0, 5000.0, 0

    def stepped() -> None:
        nonlocal now, step
        step += 1
        worth.step_begins(step, now, [(0, 2048)], False)
        now += 2.058
        worth.step_ended(step, now)

    for _ in range(hits):
        worth.step_begins(step, now, [(0, 2048)], False)
        if worth.is_load_faster(0, 1000, False):
            taken, began = taken + 1, now
            stepped()
            while now < began + load_s:
                stepped()
            worth.loads_ended(1, 1000, began, now)
        else:
            stepped()
    return taken


def test_cost_model_learns_that_loads_became_fast() -> None:
    assert busy(trained_cost_model(load_s=60.0), 0.001, 2000) > 1000


def test_cost_model_learns_that_loads_are_slow() -> None:
    """A load takes 60 s and computing takes 3 s, from the first load on."""
    assert busy(LoadCostModel(), 60.0, 1000) < 200


# ---- cost of a step -------------------------------------------------------------------------


def test_requests_excluded_from_saves_cost_a_step_nothing() -> None:
    """Regression: after a weight update each running request's table was built in every step."""
    scheduler = scheduler_of()
    requests = [Request(number, 64) for number in range(50)]
    for request in requests:
        scheduler.ask(request)
        scheduler.allocated(request, request.tables, 0)
        request.num_computed_tokens = request.num_tokens - 1
    scheduler.reset()
    tables = []

    def table_of(name: str) -> Any:
        tables.append(name)
        return requests[0].tables

    for _ in range(3):
        scheduler.ran(
            Report(scheduler.step({request.request_id: 1 for request in requests}, table_of).step)
        )
    assert tables == []
