"""Latencies of one kind of call, and the throughput that follows from them."""

import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

PERCENTILES = (50, 90, 99)


class Stopwatch:
    """Times calls one after the other; not thread-safe. Costs 8 bytes per call."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.nbytes = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times its body, also one that raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append(time.perf_counter() - start)

    @property
    def busy_s(self) -> float:
        return sum(self.seconds)

    def gb_per_s(self) -> float:
        """Payload bytes moved per second spent in calls, in 10^9 bytes; 0 before the first call."""
        busy_s = self.busy_s
        return self.nbytes / busy_s / 1e9 if busy_s else 0.0


def latency_ms(seconds: Iterable[float]) -> dict[str, float]:
    """{"p50": ms, "p90": ms, "p99": ms}: the smallest latency that so many percent do not exceed.

    Empty if there is no latency.
    """
    ordered = sorted(seconds)
    count = len(ordered)
    return {f"p{p}": round(ordered[-(-p * count // 100) - 1] * 1e3, 4) for p in PERCENTILES} if count else {}
