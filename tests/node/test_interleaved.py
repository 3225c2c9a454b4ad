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


@pytest.mark.parametrize("part", range(PARTS))
def test_interleaved_users_leave_page_bytes_intact(seed: int, part: int) -> None:
    done: Counter[str] = Counter()
    for number in range(LIVES):
        print(f"life {number}")
        rng = random.Random(f"{seed}/{part}/{number}")
        life = Life(rng, has_below=number % 2 == 0, may_cancel=number % 4 >= 2)
        life.run()
        done += life.done
    # The simulation must have met all events.
    for event in (
        "yields",
        "moves",
        "loads",
        "cancelled",
        "puts",
        "hits",
        "pins",
        "removes",
        "exhausted",
        "copies fetched",
        "erased",
    ):
        assert done[event] > 0, done
