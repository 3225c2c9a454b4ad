"""The time that times to live, pins on disk and last uses are counted in."""

import time

# Seconds of the clock that also counts while the machine sleeps, at the epoch. Read once: the wall clock may be set by
# days while a node runs, and a page that was promised for an hour must live neither for days nor for a second.
_EPOCH_S = time.clock_gettime(time.CLOCK_BOOTTIME) - time.time()


def unix_s() -> int:
    """Return whole seconds since the epoch, by the wall clock at the start of this process and what passed since."""
    return max(1, int(time.clock_gettime(time.CLOCK_BOOTTIME) - _EPOCH_S))
