"""How long the storms of engines run: SEEDS=1000 makes a thousand of each; KVSTORE_SEED names the
first one's seed.
"""

import os


def storm_seeds(few: int) -> range:
    """Return the seeds of the storms to run: `few` of them unless SEEDS says how many."""
    first = int(os.environ.get("KVSTORE_SEED") or 0)
    return range(first, first + int(os.environ.get("SEEDS") or few))
