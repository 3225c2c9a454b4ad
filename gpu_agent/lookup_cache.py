"""Which pages are stored: asked in the background, answered at once to an engine that polls.

    lookup   None ... None  True|False      new keys of a step are asked in one call, after `flush`

A verdict stands as long as a request that asked for it lives; a miss is asked about again for a request that comes
later. It is an answer about a cache: pages may be gone when they are loaded, and `mark_miss` then ends what would else
be asked for again and again.
"""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from gpu_agent.load_pipeline import LoadResult
from gpu_agent.transfer import Fence
from kvstore.sync import Condition, run_in_helper_thread
from kvstore.tracing import NamesRequest
from kvstore.tracing import request as for_request

# How much of a prefix several pools can restore together: pure, from what is present of each.
#
# A pool that is needed for every token (KV, an indexer) covers the lengths up to its first
# missing page. A pool that holds the state at a prefix's end (a sliding window, Mamba) covers the
# lengths whose last pages are there, with holes between them:
#
#     present, last 2 needed   1 1 0 1 1 1     lengths 1 2 5 6


def covered(present: Sequence[bool], trailing: int = 0) -> list[int]:
    """Lengths in pages, ascending, that one pool covers. `trailing`: how many pages at a length's end it
    needs (fewer where the prefix is shorter); 0: all of them."""
    lengths, run = [], 0
    for page, there in enumerate(present):
        run = run + 1 if there else 0
        if not there and not trailing:
            break
        if run >= min(trailing or page + 1, page + 1):
            lengths.append(page + 1)
    return lengths


def together(pools: Sequence[Sequence[int]]) -> list[int]:
    """Lengths, ascending, that all of these cover; none if there is no pool."""
    return sorted(set(pools[0]).intersection(*pools[1:])) if pools else []


# Several loads that an engine waits for as one, layer by layer.
#
# load a   0 . 1 . 2 . 3
# load b     0 . . 1 . 2 3
# layer      0     1   2 3        ready when the last of them has it


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


log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

MISS_S = 2.0  # how long a miss is believed when another request asks: it may have been an outage


class _Verdict:
    """`found`: None until the store answered, or was waited for long enough. `asker`: the request that asks first;
    `requests`: all that want to know, for the engine's thread only."""

    __slots__ = ("asked", "asker", "found", "requests")

    def __init__(self, asked: float, asker: str) -> None:
        self.asked = asked
        self.asker = asker
        self.found: bool | None = None
        self.requests: set[str] = set()


class LookupCache:
    """All methods are called by the engine's thread and never wait, but for `close`. `ask(keys)` runs on a
    thread of its own. What waits for it is bounded by the keys of the requests that live.

    The clock is an argument so that tests need not wait.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[bytes]], Sequence[bool]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._clock = clock
        self._verdicts: dict[bytes, _Verdict] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._new: dict[bytes, _Verdict] = {}  # of this step
        self._wanted: dict[bytes, _Verdict] = {}
        self._wake = Condition()  # guards _wanted and _closed
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-lookup", daemon=True)
        run_in_helper_thread(self._thread.start)

    def lookup(self, key: bytes, request: str) -> bool | None:
        """None: ask again later. False at the latest when `timeout_s` is over."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._new[key] = _Verdict(self._clock(), request)
        elif verdict.found is None and self._clock() - verdict.asked > self._timeout_s:
            verdict.found = False
        elif verdict.found is False and request not in verdict.requests and self._is_old(verdict):
            self._new[key] = verdict
            verdict.found, verdict.asked, verdict.asker = None, self._clock(), request
        verdict.requests.add(request)
        self._keys_of.setdefault(request, set()).add(key)
        return verdict.found

    def _is_old(self, verdict: _Verdict) -> bool:
        return self._clock() - verdict.asked > MISS_S

    def flush(self) -> None:
        """The step is over: its new keys are asked now."""
        if self._new:
            with self._wake:
                self._wanted.update(self._new)
                self._wake.notify_all()
            self._new = {}

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded, whatever the store said."""
        for key in keys:
            if key in self._verdicts:
                self._verdicts[key].found = False

    def release(self, request: str) -> None:
        """The request is gone, and verdicts with the last request that asked for them."""
        for key in self._keys_of.pop(request, ()):
            verdict = self._verdicts[key]
            verdict.requests.discard(request)
            if not verdict.requests:
                del self._verdicts[key]
                self._new.pop(key, None)

    def close(self) -> None:
        """Returns when the call that is under way does."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        asked = {(request, key) for key, verdict in self._verdicts.items() for request in verdict.requests}
        known = {(request, key) for request, keys in self._keys_of.items() for key in keys}
        found = [] if asked == known else [f"verdicts: {len(asked ^ known)} askers are known on one side only"]
        if not set(self._new) <= set(self._verdicts):
            found.append("verdicts: a key is new that nobody asked for")
        return found

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                wanted, self._wanted = self._wanted, {}
            waiting = {key: verdict for key, verdict in wanted.items() if verdict.found is None and verdict.requests}
            if not waiting:
                continue
            with for_request(*dict.fromkeys(verdict.asker for verdict in waiting.values())):
                answers = self._answers(list(waiting))
            for verdict, answer in zip(waiting.values(), answers, strict=True):
                if verdict.found is None:  # nobody gave it up meanwhile
                    verdict.found = answer

    def _answers(self, keys: Sequence[bytes]) -> Sequence[bool]:
        try:
            return self._ask(keys)
        except Exception:  # the edge of a thread: whatever broke, the engine gets its answer
            log.exception("a lookup of %d pages broke", len(keys))
            return (False,) * len(keys)
