"""Return seconds since the epoch without jumps: for times to live, pins on disk and last uses."""

import time

# Value of CLOCK_BOOTTIME (which also counts while the machine sleeps) at the epoch. Read once,
# because the wall clock may be set by days while a node runs, and a page with a time to live of an
# hour must not live for days or for a second.
_EPOCH_S = time.clock_gettime(time.CLOCK_BOOTTIME) - time.time()


def unix_s() -> int:
    """Return seconds since 1970: the wall clock at the process's start plus the time since."""
    return max(1, int(time.clock_gettime(time.CLOCK_BOOTTIME) - _EPOCH_S))
