"""A few lives of a RAM tier with its users interleaved; `make test-races` runs hundreds, as
KVSTORE_RACES says.
"""

import os
import random
from collections import Counter

import pytest
from interleaved import Life

LIVES = 12  # of a part: enough that each meets all there is to meet
PARTS = -(-int(os.environ.get("KVSTORE_RACES") or LIVES) // LIVES)


@pytest.mark.parametrize("part", range(PARTS))
def test_pages_keep_their_bytes_whoever_comes_in_between(seed: int, part: int) -> None:
    done: Counter[str] = Counter()
    for number in range(LIVES):
        print(f"life {number}")
        rng = random.Random(f"{seed}/{part}/{number}")
        life = Life(rng, has_below=number % 2 == 0, may_cancel=number % 4 >= 2)
        life.run()
        done += life.done
    # The simulation must have met what it is for.
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
