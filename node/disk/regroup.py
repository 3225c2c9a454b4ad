"""Pages on disk that change their pool, because their tenant got a quota or lost it: some at a time, while others are
served."""

import heapq
import threading
import time
from itertools import islice

from node.disk.records import Records

REGROUP_LOOKED_AT = 1024  # records, under one lock: a millisecond or two
REGROUPED = 256


def regroup(records: Records, lock: threading.Lock) -> None:
    """In the order of their last use."""
    strays: list[list[tuple[int, int]]] = []
    for first in range(1, records.number_end, REGROUP_LOOKED_AT):
        with lock:
            strays.append(records.strays(first, min(first + REGROUP_LOOKED_AT, records.number_end)))
        time.sleep(0)  # else this thread would have the lock again
    moving = heapq.merge(*strays, reverse=True)
    while some := list(islice(moving, REGROUPED)):
        with lock:
            for used_s, record in some:
                records.regroup(record, used_s)
        time.sleep(0)
