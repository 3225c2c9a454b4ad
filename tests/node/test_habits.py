"""How soon pages are used again: what is counted, and what follows for their worth."""

import random

from node.ram.habits import END, ENDS_LEAST, FIRST, LAST, WEIGHED, Habits
from node.ram.shadow import Shadow


def request(habits: Habits, keys: list[int], known_count: int = 0) -> int:
    habits.ask(keys)
    return habits.use(keys, known_count)


def test_a_conversation_that_comes_back_has_more_merit_each_time() -> None:
    habits = Habits()
    keys = list(range(10))
    merits = []
    for turn in range(7):
        merits.append(request(habits, keys, len(keys) - 3 if turn else 0))
        keys = keys[:-1] + [100 * turn + 50 + page for page in range(3)]
    assert merits == [FIRST, FIRST + 1, FIRST + 2, FIRST + 3, LAST, LAST, LAST]


def test_a_use_that_nobody_asked_for_goes_on_with_the_request() -> None:
    """As pages are put one after the other while they are computed."""
    habits = Habits()
    assert request(habits, [1, 2, 3]) == FIRST
    assert habits.use([1, 2, 3, 4], 3) == FIRST
    assert habits.use([1, 2, 3, 4, 5, 6], 4) == FIRST
    assert request(habits, [1, 2, 3, 4, 5, 6, 7], 6) == FIRST + 1


def test_behind_a_prompt_that_many_share_nobody_has_come_back() -> None:
    habits = Habits()
    prompt = list(range(8))
    request(habits, [*prompt, 100, 101, 102])
    for other in range(20):
        assert request(habits, [*prompt, 200 + 10 * other, 201 + 10 * other, 202 + 10 * other], 8) == FIRST


def test_what_comes_back_sooner_is_worth_more() -> None:
    rng = random.Random(1)
    habits = Habits()
    keys: dict[int, list[int]] = {}
    for number in range(8 * WEIGHED):  # what has come back once comes back again, sooner
        name = rng.randrange(200)
        known = keys.get(name)
        keys[name] = [1000 * number + page for page in range(8)] if known is None else [*known, 1000 * number]
        request(habits, keys[name], len(known or ()))
        if known is not None:
            keys[name] = [*keys[name], 1000 * number + 1]
            request(habits, keys[name], len(keys[name]) - 1)
        if len(keys[name]) > 14:
            del keys[name]
    now = habits.tick
    assert habits.worth(FIRST + 1, now) > habits.worth(FIRST, now) > 0
    assert habits.worth(FIRST, now) > habits.worth(FIRST, now - (1 << 30)) == 0


def test_a_last_page_that_is_never_used_again_is_worth_nothing() -> None:
    habits = Habits()
    keys: dict[int, list[int]] = {}
    for number in range(3 * WEIGHED):
        name = number % 16
        known = keys.get(name, [])
        keys[name] = [*known[:-1], *(1000 * number + page for page in range(4))]
        request(habits, keys[name], max(0, len(known) - 1))
    assert habits.worth(END, habits.tick) == 0 < habits.worth(LAST, habits.tick)


def test_so_many_chains_are_remembered_and_no_more() -> None:
    habits = Habits()
    for number in range(ENDS_LEAST):
        request(habits, [3 * number, 3 * number + 1, 3 * number + 2])
    assert len(habits._chains) == ENDS_LEAST
    assert request(habits, [0, 1, 2, -1]) == FIRST
    last = 3 * (ENDS_LEAST - 1)
    assert request(habits, [last, last + 1, last + 2, -2], 3) == FIRST + 1


def test_a_shadow_of_lru_keeps_what_lru_keeps(seed: int) -> None:
    rng = random.Random(seed)
    shadow, order = Shadow(50), list[int]()  # oldest first
    for _ in range(2000):
        start = rng.randrange(120)
        keys = list(range(start, start + rng.randint(1, 12)))
        assert shadow.run(keys) == next((i for i, key in enumerate(keys) if key not in order), len(keys))
        shadow.use(keys, FIRST, keys[-1], 0)
        order = [*(key for key in order if key not in keys), *reversed(keys)][-50:]
    assert len(shadow) == 50


def test_a_shadow_of_habits_gives_up_what_is_worth_least(seed: int) -> None:
    """Ends of chains, here, which never come back."""
    rng = random.Random(seed)
    habits = Habits()
    shadow = Shadow(40, habits)
    chains = [[100 * chat + page for page in range(5)] for chat in range(8)]
    for number in range(4 * WEIGHED):
        keys = chains[rng.randrange(8)]
        keys[-1] = 10_000 + number
        habits.ask(keys)
        shadow.use(keys, habits.use(keys, 4), keys[-1], habits.tick)
        assert len(shadow) <= 40
    assert all(shadow.run(keys) >= 4 for keys in chains)
    shadow.keep(1)
    assert all(shadow.run([key]) == 0 for keys in chains for key in keys if key % 2)
