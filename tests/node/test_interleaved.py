"""Random lives of a RAM tier with interleaved users.

`make test-races` runs hundreds: KVSTORE_RACES sets their number.
"""

import os
import random
from collections import Counter

import pytest
from interleaved import Life

LIVES = 12  # lives of a part: enough for each part to meet all events
PARTS = -(-int(os.environ.get("KVSTORE_RACES") or LIVES) // LIVES)


COMMON = ("yields", "loads", "puts", "hits", "pins", "removes", "exhausted", "erased")
RARE = ("moves", "cancelled", "copies fetched")


def lives(seed: int, part: int, count: int) -> Counter[str]:
    """Run some lives, and return how often each event happened."""
    done: Counter[str] = Counter()
    for number in range(count):
        print(f"life {number}")
        rng = random.Random(f"{seed}/{part}/{number}")
        life = Life(rng, has_below=number % 2 == 0, may_cancel=number % 4 >= 2)
        life.run()
        done += life.done
    return done


def test_interleaved_users_leave_page_bytes_intact(seed: int) -> None:
    done = lives(seed, 0, 4)
    for event in COMMON:
        assert done[event] > 0, done


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_interleaved_users_leave_page_bytes_intact_in_all_events(seed: int, part: int) -> None:
    done = lives(seed, part, LIVES)
    for event in COMMON + RARE:
        assert done[event] > 0, done
