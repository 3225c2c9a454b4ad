"""Several loads that an engine waits for as one, layer by layer.

load a   0 . 1 . 2 . 3
load b     0 . . 1 . 2 3
layer      0     1   2 3        ready when the last of them has it
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

from gpu_agent.jobs import LoadResult
from gpu_agent.transfer import Fence


class LayerBatch:
    """Thread-safe. `ready(layer)` is called once a layer of all `loads` is in its slots, ascending per
    load; `failed(error)` once if a load ends early, and `ready` not any more after it."""

    def __init__(
        self,
        layers: Sequence[int],
        loads: int,
        ready: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._missing = dict.fromkeys(layers, loads)
        self._ready = ready
        self._failed = failed
        self._lock = threading.Lock()
        self._over = False

    def placed(self, layer: int, event: Fence) -> None:
        """For `Agent.load`. Waits until the layer is really there: who is told of it does not look at events."""
        if event is not None:
            event.synchronize()
        with self._lock:
            self._missing[layer] -= 1
            if not self._missing[layer] and not self._over:
                self._ready(layer)

    def loaded(self, pages: int, done: "concurrent.futures.Future[LoadResult]") -> None:
        """A load of so many pages is over."""
        result = done.result()
        with self._lock:
            if result.pages < pages and not self._over:
                self._over = True
                self._failed(RuntimeError(f"{result.pages} of {pages} pages: {result.error or 'the rest is gone'}"))
