"""Waits for pages that another engine is saving, without an engine and with a clock of the test."""

import concurrent.futures
import hashlib
from typing import Any

import pytest

from gpu_agent.blocks.groups import BlockGroup
from gpu_agent.blocks.handover import (
    WAITING_MAX,
    HandoverCounts,
    Handovers,
    Next,
    Ticket,
    read_ticket,
)
from gpu_agent.blocks.lookups import Lookups, Question
from gpu_agent.blocks.save_plan import SavePlan
from gpu_agent.blocks.scheduler import BlockScheduler
from kvstore import LayerGroup, Namespace, PageLayout, Plane, Unavailable
from tests.helpers.block_store import FakeRequest

BLOCK = 16
LAYOUT = PageLayout(BLOCK, (LayerGroup("full", (0,), (Plane("kv", "uint8", (2,)),)),))
SHARDS = [[Namespace("m", LAYOUT, tp_rank=rank, tp_size=2) for rank in (0, 1)]]


class Backend:
    """Lookups that the test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Question, concurrent.futures.Future[Any]]] = []

    def look_up(self, question: Question, timeout_s: float) -> Any:
        self.asked.append((question, concurrent.futures.Future()))
        return self.asked[-1][1]

    def poll(self) -> None: ...


class Waiting:
    """A scheduler's hand-overs and the time."""

    def __init__(self, wait_s: float = 2.0, **group: Any) -> None:
        self.now = 100.0
        self.backend: Any = Backend()
        self.lookups = Lookups(self.backend, 60.0)
        groups = [BlockGroup(BLOCK, **group)]
        self.handovers = Handovers(
            self.lookups, wait_s, HandoverCounts(), groups, BLOCK, BLOCK, 0, lambda: self.now
        )

    def expect(self, name: str = "r", tokens: int = 70) -> FakeRequest:
        request = FakeRequest(name, list(range(tokens)), tokens)
        ticket = self.handovers.promise(request, SHARDS, ())
        assert ticket is not None
        self.handovers.expect(request, ticket, SHARDS)
        return request

    def answer(self, found: int) -> None:
        self.backend.asked[-1][1].set_result((bytes([found]),))


def test_probe_asks_for_the_last_block_in_all_shards() -> None:
    waiting = Waiting()
    request = waiting.expect()
    assert waiting.handovers.next("r", 16) is Next.WAIT
    waiting.now += 0.006
    assert waiting.handovers.next("r", 16) is Next.WAIT
    ((question, _),) = waiting.backend.asked
    assert question == [(SHARDS[0], [request.block_hashes[3]])]
    waiting.answer(1)
    assert waiting.handovers.next("r", 16) is Next.LOOK
    assert waiting.handovers.next("r", 64) is Next.GO
    assert waiting.handovers.counts == HandoverCounts(1, 0, pytest.approx(0.006))


def test_probes_are_few_and_the_wait_ends() -> None:
    """A step every millisecond, and a store that answers at once."""
    waiting = Waiting()
    waiting.expect()
    while (found := waiting.handovers.next("r", 0)) is Next.WAIT:
        if waiting.backend.asked and not waiting.backend.asked[-1][1].done():
            waiting.answer(0)
        waiting.now += 0.001
    assert found is Next.LOOK
    assert 102.0 <= waiting.now < 102.1
    assert len(waiting.backend.asked) < 100
    assert waiting.handovers.next("r", 0) is Next.GO
    assert waiting.handovers.counts.handovers_short == 1


def test_many_that_wait_make_no_more_probes_than_few() -> None:
    """Regression: 256 took a quarter of the scheduler's time."""
    waiting = Waiting(wait_s=0.5)
    names = [str(number) for number in range(200)]
    for name in names:
        waiting.expect(name)
    while waiting.handovers.goal("0"):
        for _, done in waiting.backend.asked:
            if not done.done():
                done.set_result((b"\0",))
        for name in names:
            assert waiting.handovers.rests(name) or waiting.handovers.next(name, 0)
        waiting.now += 0.005
    assert waiting.now < 100.6
    assert 200 <= len(waiting.backend.asked) <= 200 + 500


def test_request_rests_until_something_can_be_new() -> None:
    waiting = Waiting(wait_s=0.008)
    assert not waiting.handovers.rests("r")
    waiting.expect()
    assert not waiting.handovers.rests("r")
    assert waiting.handovers.next("r", 0) is Next.WAIT
    assert waiting.handovers.rests("r")
    waiting.now += 0.006
    assert not waiting.handovers.rests("r")
    assert waiting.handovers.next("r", 0) is Next.WAIT  # probes
    assert not waiting.handovers.rests("r")
    waiting.answer(0)
    assert waiting.handovers.next("r", 0) is Next.WAIT
    assert waiting.handovers.rests("r")
    waiting.now += 0.003  # the wait is over before the next probe
    assert not waiting.handovers.rests("r")
    assert waiting.handovers.next("r", 0) is Next.LOOK


def test_waits_in_vain_become_short_until_one_is_not() -> None:
    """A node may refuse what prefill saves, and answer lookups: each request would wait 2 s."""
    waiting = Waiting()
    handovers = waiting.handovers

    def waits(*names: str) -> list[float]:
        """Let requests wait in vain at the same time; return for how long."""
        begun, ended = waiting.now, dict[str, float]()
        for name in names:
            waiting.expect(name)
        while len(ended) < len(names):
            waiting.now += 1 / 64
            for name in names:
                if handovers.next(name, 0) is not Next.WAIT:
                    ended.setdefault(name, waiting.now - begun)
        return list(ended.values())

    assert [waits("a", "b", "c"), waits("d"), waits("e")] == [[2.0] * 3, [2.0], [2.0]]
    assert waits("f", "g") == [0.25, 2.0], "the long one shows whether this goes on"
    assert [waits("h"), waits("i", "j")] == [[0.25], [0.25, 0.25]]
    waiting.now += 20.0
    assert waits("k", "l") == [0.25, 2.0]
    waiting.expect("m")
    waiting.now += 0.2
    assert handovers.next("m", 64) is Next.GO
    assert waits("n", "o") == [2.0, 2.0]


def test_failed_probe_ends_the_wait() -> None:
    waiting = Waiting()
    waiting.expect()
    waiting.now += 0.1
    assert waiting.handovers.next("r", 0) is Next.WAIT
    waiting.backend.asked[-1][1].set_exception(Unavailable("away"))
    assert waiting.handovers.next("r", 0) is Next.GO


@pytest.mark.parametrize("hangs", [False, True])
def test_store_that_hangs_at_the_end_is_not_asked_again(hangs: bool) -> None:
    waiting = Waiting()
    waiting.expect()
    waiting.now += 1.9
    assert waiting.handovers.next("r", 0) is Next.WAIT
    if not hangs:
        waiting.answer(0)
    waiting.now += 0.2
    assert waiting.handovers.next("r", 0) is (Next.GO if hangs else Next.LOOK)


@pytest.mark.parametrize(("local", "waits"), [(0, True), (32, True), (48, False), (64, False)])
def test_hit_that_would_be_ignored_is_not_waited_for(local: int, waits: bool) -> None:
    """Regression: a request waited 2 s for less than `min_tokens` beyond the engine's own hit."""
    waiting = Waiting()
    plan = SavePlan(1, 1 << 20, 64, lambda blocks: None, lambda blocks: None)
    waiting.backend.open = lambda namespaces, timeout_s: concurrent.futures.Future()
    groups, lookups = [BlockGroup(BLOCK)], waiting.lookups
    scheduler = BlockScheduler(
        groups, SHARDS, BLOCK, BLOCK, lookups, plan, min_tokens=32, handover_wait_s=60.0
    )
    request = FakeRequest("r", list(range(70)), 70)
    ticket = scheduler._handovers.promise(request, SHARDS, ())
    scheduler.ask(request, ticket)
    waiting.backend.asked[-1][1].set_result((bytes(4),))
    assert scheduler.matched(request, local) == (None if waits else 0)


def test_requests_that_wait_are_bounded() -> None:
    waiting = Waiting()
    for number in range(WAITING_MAX + 5):
        waiting.expect(str(number))
    assert waiting.handovers.counts.handovers == WAITING_MAX
    assert waiting.handovers.next(str(WAITING_MAX), 0) is Next.GO
    waiting.handovers.drop("0")
    waiting.expect("one more")
    assert waiting.handovers.next("one more", 0) is Next.WAIT


def test_promise_of_states_ends_with_one() -> None:
    handovers = Waiting(window_tokens=1, is_state=True).handovers
    request = FakeRequest("r", list(range(70)), 70)
    assert handovers.promise(request, SHARDS, ()) is None
    for states, tokens in (({(16, 0), (32, 0)}, 32), ({(32, 0), (80, 0)}, 32)):
        found = handovers.promise(request, SHARDS, states)
        assert found is not None
        assert found.tokens == tokens
    # Decode's prompt may need its last token computed; an earlier end has no state.
    handovers._last_tokens = 1
    short = FakeRequest("s", list(range(32)), 32)
    ticket = handovers.promise(short, SHARDS, {(32, 0)})
    assert ticket is not None
    handovers.expect(short, ticket, SHARDS)
    assert handovers.goal("s") == 0


@pytest.mark.parametrize(("gone", "is_promised"), [(2, True), (3, False)])
def test_window_that_is_gone_is_not_promised(gone: int, is_promised: bool) -> None:
    waiting = Waiting(window_tokens=32)
    ticket = waiting.handovers.promise(FakeRequest("r", list(range(70)), 70), SHARDS, (), {0: gone})
    assert (ticket is not None) == is_promised


def test_ticket_has_the_fields_of_the_format() -> None:
    request = FakeRequest("r", list(range(70)), 70)
    ticket = Waiting().handovers.promise(request, SHARDS, ())
    assert ticket is not None
    (shards,) = SHARDS
    digests = b"".join(sorted(shard.digest for shard in shards))
    whole = b"kvstore-handover-1\0" + len(shards).to_bytes(4, "big") + digests
    key = request.block_hashes[64 // BLOCK - 1]
    assert ticket.fields() == {
        "v": 1,
        "tokens": 64,
        "store": hashlib.sha256(whole).hexdigest()[:32],
        "prompt": hashlib.sha256(key).hexdigest()[:32],
    }


def test_ticket_depends_on_namespaces_and_prompt_only() -> None:
    handovers = Waiting().handovers
    request = FakeRequest("r", list(range(70)), 70)
    ticket = handovers.promise(request, SHARDS, ())
    assert ticket is not None
    assert ticket == handovers.promise(FakeRequest("s", list(range(64)), 64), [SHARDS[0][::-1]], ())
    other = FakeRequest("r", [9, *range(1, 70)], 70)
    assert handovers.promise(other, SHARDS, ()).prompt != ticket.prompt  # type: ignore[union-attr]
    fewer = handovers.promise(request, [SHARDS[0][:1]], ())
    assert fewer is not None
    assert fewer.store != ticket.store
    assert read_ticket(ticket.fields()) == ticket
    assert read_ticket({**ticket.fields(), "more": 1}) == ticket


def test_prompt_that_was_computed_in_part_is_promised_in_part() -> None:
    found = Waiting().handovers.promise(FakeRequest("r", list(range(70)), 40), SHARDS, ())
    assert isinstance(found, Ticket)
    assert found.tokens == 32
