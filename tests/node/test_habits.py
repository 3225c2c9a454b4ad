"""How soon pages are used again: what is remembered of chains, what is counted, and what follows for pages' worth."""

import random
from types import SimpleNamespace

from node.ram.chains import Chains
from node.ram.habits import CHAINS_LEAST, END, FIRST, LAST, SHARED, STEP, WEIGHED, Habits, Merits
from node.ram.shadow import LeastWorth, Oldest

MANY, SOME, FEW = range(FIRST, FIRST + STEP)


def pages(habits: Habits, count: int, merit: int = FIRST) -> list[SimpleNamespace]:
    """That are here."""
    return [SimpleNamespace(merit=merit, tick=habits.tick) for _ in range(count)]


def request(habits: Habits, keys: list[int], here_count: int = 0, merit: int = FIRST) -> Merits:
    here = pages(habits, here_count, merit)
    habits.ask(keys, here)
    return habits.use(keys, here)


def test_a_conversation_that_comes_back_has_more_merit_each_time() -> None:
    habits = Habits()
    keys = list(range(10))
    merits = []
    for turn in range(6):
        merits.append(request(habits, keys).new)
        keys = keys[:-1] + [100 * turn + 50 + page for page in range(3)]
    assert merits == [SOME, FEW + STEP, FEW + 2 * STEP, LAST, LAST, LAST]


def test_the_more_a_request_adds_the_less_merit_it_has() -> None:
    habits = Habits()
    assert [
        request(habits, list(range(start, start + count))).new for start, count in ((0, 4), (100, 5), (200, 17))
    ] == [
        FEW,
        SOME,
        MANY,
    ]
    assert request(habits, [*range(3), *range(300, 330)]).new == MANY + STEP


def test_a_use_that_nobody_asked_for_goes_on_with_the_request() -> None:
    """As pages are put one after the other while they are computed."""
    habits = Habits()
    assert request(habits, [1, 2, 3]).new == FEW
    assert habits.use([1, 2, 3, 4], pages(habits, 3)).new == FEW
    assert habits.use([1, 2, 3, 4, 5, 6], pages(habits, 4)).new == FEW
    assert request(habits, [1, 2, 3, 4, 5, 6, 7], 6).new == FEW + STEP


def test_a_prompt_that_many_begin_with_is_shared_and_none_of_them_has_come_back() -> None:
    habits = Habits()
    prompt = list(range(8))
    request(habits, [*prompt, 100, 101, 102])
    for other in range(20):
        assert request(habits, [*prompt, 200 + 10 * other, 201 + 10 * other, 202 + 10 * other], 8) == (SHARED, FEW)


def test_what_is_shared_all_the_time_is_worth_more_than_what_never_comes_back() -> None:
    habits = Habits()
    prompt = list(range(8))
    for other in range(20 * WEIGHED):
        request(habits, [*prompt, *(1000 * (other + 1) + page for page in range(20))], 8 if other else 0, SHARED)
    assert habits.worth(SHARED, habits.tick) > 100 * habits.worth(MANY, habits.tick)


def test_what_comes_back_sooner_is_worth_more() -> None:
    rng = random.Random(1)
    habits = Habits()
    keys: dict[int, list[int]] = {}
    for number in range(100 * WEIGHED):  # what has come back once comes back again, sooner
        name = rng.randrange(200)
        known = keys.get(name)
        keys[name] = [1000 * number + page for page in range(8)] if known is None else [*known, 1000 * number]
        request(habits, keys[name])
        if known is not None:
            keys[name] = [*keys[name], 1000 * number + 1]
            request(habits, keys[name])
        if len(keys[name]) > 14:
            del keys[name]
    now = habits.tick
    assert habits.worth(FEW + STEP, now) > habits.worth(SOME, now) > 0
    assert habits.worth(SOME, now) > habits.worth(SOME, now - (1 << 30)) == 0


def test_a_last_page_that_is_never_used_again_is_worth_nothing() -> None:
    habits = Habits()
    keys: dict[int, list[int]] = {}
    for number in range(40 * WEIGHED):
        name = number % 16
        keys[name] = [*keys.get(name, [])[:-1], *(1000 * number + page for page in range(4))]
        request(habits, keys[name])
    assert habits.worth(END, habits.tick) == 0 < habits.worth(LAST, habits.tick)


def test_so_many_chains_are_remembered_and_the_older_go() -> None:
    habits = Habits()
    habits.remember(3 * CHAINS_LEAST)
    rng = random.Random(3)
    chains = [[rng.getrandbits(62) - (1 << 61) for _ in range(3)] for _ in range(12 * CHAINS_LEAST)]
    for chain in chains:
        request(habits, chain)
    known = [habits._chains.find(chain) is not None for chain in chains]
    assert sum(known) <= 3 * CHAINS_LEAST
    assert sum(known[-CHAINS_LEAST:]) > CHAINS_LEAST * 3 // 4
    assert sum(known[: 4 * CHAINS_LEAST]) < CHAINS_LEAST // 4


def test_chains_stay_known_when_there_is_room_for_more() -> None:
    chains = Chains(64)
    keys = [[100 * number, 100 * number + 1, 100 * number + 2] for number in range(8)]
    for tick, chain in enumerate(keys):
        chains.remember(chain, 1, FIRST, tick)
    known = [chain for chain in keys if chains.find(chain)]
    chains.resize(512, 8)
    assert len(chains) == 512
    assert known == [chain for chain in keys if chains.find(chain)] != []
    found = chains.find([*known[-1][:2], 7, 8])
    assert found is not None
    assert (found.common_count, found.page_count, found.merit, found.asked, found.has_end) == (
        2,
        3,
        FIRST,
        False,
        False,
    )
    chains.ask(found.place)
    found = chains.find([*known[-1], 8])
    assert found is not None
    assert (found.common_count, found.asked, found.has_end) == (3, True, True)
    chains.forget(found.place)
    assert chains.find(known[-1]) is None


def test_a_shadow_of_lru_keeps_what_lru_keeps(seed: int) -> None:
    rng = random.Random(seed)
    shadow, order = Oldest(50), list[int]()  # oldest first
    for _ in range(2000):
        start = rng.randrange(120)
        keys = list(range(start, start + rng.randint(1, 12)))
        assert shadow.run(keys) == next((i for i, key in enumerate(keys) if key not in order), len(keys))
        shadow.use(keys)
        order = [*(key for key in order if key not in keys), *reversed(keys)][-50:]
    assert len(shadow) == 50


def test_a_shadow_of_habits_gives_up_what_is_worth_least() -> None:
    """Ends of chains, here, which never come back."""
    rng = random.Random(4)
    habits = Habits()
    shadow = LeastWorth(40, habits)
    chains = [[100 * chat + page for page in range(5)] for chat in range(8)]
    for number in range(40 * WEIGHED):
        keys = chains[rng.randrange(8)]
        keys[-1] = 10_000 + number
        here = pages(habits, 4)
        habits.ask(keys, here)
        shadow.use(keys, habits.use(keys, here), keys[-1])
        assert len(shadow) <= 40
    assert all(shadow.run(keys) >= 4 for keys in chains)
    shadow.keep(1)
    assert all(shadow.run([key]) == 0 for keys in chains for key in keys if key % 2)


def test_new_pages_that_are_worth_less_than_any_go_first_in_a_shadow_too() -> None:
    habits = Habits()
    shadow = LeastWorth(8, habits)
    for merit in range(END, SHARED + 1):
        habits._worth[merit] = [float(merit)] * len(habits._worth[merit])
    shadow.use(list(range(8)), Merits(LAST, LAST), -1)
    shadow.use([100], Merits(SHARED, FIRST), -1)
    assert shadow.run(list(range(8))) == 8
    shadow.use([200], Merits(SHARED, SHARED), -1)
    assert shadow.run([200]) == 1
