"""The number of random runs (storms) of engine tests.

SEEDS=1000 runs a thousand; KVSTORE_SEED is the first one's seed.
"""

import os


def storm_seeds(few: int) -> range:
    """Return the seeds of the storms: `few` of them unless SEEDS is set."""
    first = int(os.environ.get("KVSTORE_SEED") or 0)
    return range(first, first + int(os.environ.get("SEEDS") or few))
