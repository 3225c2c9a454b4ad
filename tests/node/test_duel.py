"""Eviction that learns: it rules where it is better, costs little where it is not, and evicts by all the rules."""

import importlib.util
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from node.ram import order
from node.ram import pool as pools
from node.ram.duel import LEAD_MAX, PAID_OFF, PROOF, STAKE, STAKE_LEAST, Duel, DuelCounters
from node.ram.habits import END, FIRST, GO

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "made_traces.py"
PAGE = 4096
CAPACITY = 1000


@pytest.fixture(scope="module")
def traces() -> Iterator[ModuleType]:
    """A script as a module; benchmarks/ is no package."""
    spec = importlib.util.spec_from_file_location("made_traces", SCRIPT)
    assert spec
    assert spec.loader
    module = sys.modules["made_traces"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["made_traces"]


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pages are in the shadows is the same in each run; in a node it differs from start to start."""

    def keys(digest: bytes, prefix_hashes: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(blake2b(h, digest_size=8).digest(), "little", signed=True) for h in prefix_hashes]

    monkeypatch.setattr(pools, "_keys", keys)


def replay(box: Any, space: Any, chains: Sequence[Sequence[int]]) -> int:
    """Leading pages found: a lookup, a read and a put of each chain, without bytes."""
    digest, hits = space.namespace.digest, 0
    for chain in chains:
        keys = space.keys(*chain)
        box.now_ms += 1
        count = (*box.tier.lookup(digest, keys, False), False).index(False)
        if count:
            box.tier.release([page for page in box.acquire(space, keys[:count]) if page is not None])
        reservation = box.reserve(space, keys)
        if reservation.pages:
            box.commit(reservation)
        hits += count
    return hits


def both(sandbox: Any, chains: Sequence[Sequence[int]]) -> tuple[int, int, Any]:
    """(hits of LRU, of one that learns, the latter's tier)"""
    found = []
    for learns in (False, True):
        box = sandbox(CAPACITY * PAGE, CAPACITY * PAGE, learns)
        found.append(replay(box, box.open("m", PAGE), chains))
        assert box.tier.check() == []
    return found[0], found[1], box


def test_the_habits_of_chats_rule_and_are_worth_it(sandbox: Any, traces: ModuleType) -> None:
    chains = traces.Making(1, 60_000).chats(gap_s=30.0)
    lru, learned, box = both(sandbox, chains)
    asked = sum(map(len, chains))
    assert (learned - lru) / asked > 0.005, (lru, learned, asked)
    duels = box.tier.eviction.order.duels
    assert duels.switches >= 1
    assert duels.shadow_hits_learned > duels.shadow_hits_lru > 0
    assert duels.shadow_asked > asked / 8


@pytest.mark.parametrize("name", ["agents", "documents", "bursts", "chats/agents", "once more/never less"])
def test_what_it_costs_where_lru_is_as_good_is_what_one_reign_may_lose(
    sandbox: Any, traces: ModuleType, name: str
) -> None:
    """What was lost is paid off a page for each 2,000 asked, so that so few pages see one failed reign at most: the
    stake, and what the shadows, of every fourth page, are wrong by. In a trace of 400,000 that is below 0.001."""
    make = traces.Making(2, 30_000)
    chains = {
        "agents": make.agents,
        "documents": make.documents,
        "bursts": make.bursts,
        "chats/agents": lambda: traces.by_turns(6000, make.chats(gap_s=30.0), make.agents()),
        "once more/never less": lambda: traces.by_turns(
            6000, make.chats(30.0, (0.9, 0.0)), make.chats(30.0, (0.15, 0.9, 0.95, 0.95, 0.0))
        ),
    }[name]()
    lru, learned, box = both(sandbox, chains)
    assert learned - lru > -4 * (CAPACITY * STAKE + STAKE_LEAST), (lru, learned, box.tier.eviction.order.duels)


def test_there_is_no_duel_before_room_is_needed_nor_among_few_pages(sandbox: Any) -> None:
    box = sandbox(CAPACITY * PAGE, CAPACITY * PAGE, learns=True)
    space = box.open("m", PAGE)
    replay(box, space, [range(start, start + 16) for start in range(0, CAPACITY, 16)])
    assert box.tier.eviction.order.duels.shadow_asked == 0
    replay(box, space, [range(9000, 9016)] * 2)
    assert box.tier.eviction.order.duels.shadow_asked > 0
    small = sandbox(256 * PAGE, 256 * PAGE, learns=True)
    replay(small, small.open("m", PAGE), [range(start, start + 16) for start in range(0, 2048, 16)])
    assert small.tier.eviction.order.duels.shadow_asked == 0


def lead(duel: Duel, ahead: int, really: int | None = None, asked: int = 0) -> None:
    """The habits' shadow is so many pages ahead or behind, and so is what is really found."""
    duel._judge(ahead, ahead if really is None else really, asked)


def test_who_has_proof_rules_until_the_lead_is_lost() -> None:
    counters = DuelCounters()
    duel = Duel(counters)
    duel.fill(8000)
    proof = int(8000 * PROOF)
    lead(duel, proof)
    assert not duel.learned_rules
    lead(duel, 1)
    assert duel.learned_rules
    lead(duel, -proof + 1, 0)
    assert duel.learned_rules
    lead(duel, -1, 0)
    assert not duel.learned_rules
    assert counters.switches == 2


def test_what_is_really_found_decides_too() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, 8000)
    assert duel.learned_rules
    stake = int(8000 * STAKE) + STAKE_LEAST
    lead(duel, 0, -stake + 1)
    assert duel.learned_rules
    lead(duel, 0, -1)
    assert not duel.learned_rules


def test_what_was_gained_long_ago_counts_no_more() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, 8000)
    for _ in range(10):
        lead(duel, 8000)
    lead(duel, -int(8000 * LEAD_MAX))
    assert not duel.learned_rules


def test_a_loss_is_paid_off_before_the_next_reign() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, 8000)
    lead(duel, -1001)
    assert not duel.learned_rules
    owed = 1001 + int(8000 * STAKE) + STAKE_LEAST
    for _ in range(int(owed / PAID_OFF) // 10_000 - 1):
        lead(duel, 8000, asked=10_000)
        assert not duel.learned_rules
    for _ in range(2):
        lead(duel, 8000, asked=10_000)
    assert duel.learned_rules


def test_who_gained_owes_nothing() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, 8000)
    lead(duel, 5000)
    lead(duel, -2000)
    assert not duel.learned_rules
    lead(duel, 8000)
    assert duel.learned_rules


def test_who_was_far_behind_has_to_catch_up_first() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, -8000)
    lead(duel, 2 * int(8000 * PROOF))
    assert not duel.learned_rules
    lead(duel, 1)
    assert duel.learned_rules


def test_an_advantage_that_is_not_worth_it_proves_nothing() -> None:
    duel = Duel(DuelCounters())
    duel.fill(4000)
    for _ in range(10_000):
        duel._judge(1, 1, 200)
    assert not duel.learned_rules


def test_far_fewer_pages_begin_a_new_duel() -> None:
    duel = Duel(DuelCounters())
    duel.fill(8000)
    lead(duel, 8000)
    assert duel.learned_rules
    duel.fill(7000)
    assert duel.learned_rules
    duel.fill(900)
    assert not duel.learned_rules
    assert duel.check() == []


class Always(Duel):
    """Its habits rule."""

    @property
    def learned_rules(self) -> bool:
        return True

    @learned_rules.setter
    def learned_rules(self, rules: bool) -> None:
        pass


@pytest.fixture
def ruled(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(order, "Duel", Always)
    return lambda pages: sandbox(pages * PAGE, 16 * PAGE, learns=True)


def test_what_goes_first_goes_before_the_ends_and_these_before_the_rest(ruled: Any) -> None:
    box = ruled(48)
    space = box.open("m", PAGE)
    for start in (0, 16, 32):
        box.now_ms += 1
        box.put(space, space.keys(*range(start, start + 16)))
    pages = box.tier.namespace(space.namespace.digest).pages
    assert [number for number in range(48) if pages[space.key(number)].merit == END] == [15, 31, 47]
    assert {page.merit for page in pages.values()} == {END, FIRST + 1}
    box.put(space, space.keys(100))
    assert box.present(space, space.keys(15, 31, 47)) == set(space.keys(31, 47)), "the oldest end"
    box.put(space, space.keys(101, 102))
    assert not box.present(space, space.keys(15, 31, 47))
    newest = pages[space.key(100)]
    pool = newest.namespace.account.pool
    pool.withdraw(newest)
    newest.merit = GO
    pool.admit([newest])
    box.put(space, space.keys(103))
    assert not box.present(space, space.keys(100)), "though it is the newest"
    assert box.tier.check() == []


def test_pages_that_are_held_or_pinned_stay_whatever_they_are_worth(ruled: Any) -> None:
    box = ruled(32)
    space = box.open("m", PAGE)
    held, pinned = space.keys(*range(8)), space.keys(*range(8, 16))
    box.put(space, held + pinned)
    box.pin(space, pinned)
    box.hold(space, held)
    for number in range(100, 400):
        box.put(space, space.keys(number))
        assert box.present(space, held + pinned) == set(held + pinned)
    assert box.tier.check() == []


def test_quotas_hold_whatever_pages_are_worth(ruled: Any) -> None:
    box = ruled(64)
    box.limit(quiet=32 * PAGE, loud=32 * PAGE)
    quiet, loud = box.open("m", PAGE, tenant="quiet"), box.open("m", PAGE, tenant="loud")
    kept = quiet.keys(*range(32))
    box.put(quiet, kept)
    for start in range(0, 480, 16):
        replay(box, loud, [range(start, start + 16)])
        assert box.present(quiet, kept) == set(kept)
        assert box.nbytes("loud") <= 32 * PAGE
    assert len(box.tier.eviction.order.pools()) == 3
    assert box.tier.check() == []


def test_each_pool_has_a_duel_of_its_own(sandbox: Any, traces: ModuleType) -> None:
    box = sandbox(2 * CAPACITY * PAGE, CAPACITY * PAGE, learns=True)
    box.limit(chats=CAPACITY * PAGE)
    chats, scans = box.open("m", PAGE, tenant="chats"), box.open("m", PAGE, tenant="others")
    make = traces.Making(1, 60_000)
    replay(box, scans, make.scan(share=0.2))
    replay(box, chats, make.chats(gap_s=30.0))
    pools = {name: box.tier.eviction.order.accounts.of(name).pool for name in ("chats", "others")}
    assert pools["chats"].duel.habits.tick > 60_000 > pools["others"].duel.habits.tick
    assert not pools["others"].duel.learned_rules
    assert box.tier.check() == []


def test_a_page_costs_few_bytes_more(sandbox: Any) -> None:
    """64 for each page, and what two shadows of up to 511 pages and a table of 1,024 chains cost, whatever there is."""
    count, nbytes = 4096, {}
    for learns in (False, True):
        tracemalloc.start()
        box = sandbox(PAGE * count, PAGE * count, learns)
        space = box.open("m", PAGE)
        replay(box, space, [range(start, start + 16) for start in range(0, 2 * count, 16)])
        box.tier.ghosts.forget()
        box.arena = bytearray()
        nbytes[learns] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert nbytes[True] - nbytes[False] < 64 * count + (1 << 18), nbytes
