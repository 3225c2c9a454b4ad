"""Answer an engine that polls whether pages are stored, and combine several pools' loads.

`LookupCache` makes lookups in the background and answers at once:

    lookup   None ... None  True|False      new keys of a step go in one call, after `flush`

An answer is kept while a request that used it lives. A miss is looked up again for a later request.
Pages may be gone when they are loaded: `mark_miss` then keeps an engine from requesting them again
and again.

`covered` and `together` find the prefixes that several pools can restore. A pool that is needed for
every token (KV, an indexer) covers the lengths up to its first missing page. A pool that holds the
state at a prefix's end (a sliding window, Mamba) covers the lengths whose last pages are present:

    present, last 2 needed   1 1 0 1 1 1     lengths 1 2 5 6

`LayerBatch` reports the layers of several loads that an engine waits for as one:

    load a   0 . 1 . 2 . 3
    load b     0 . . 1 . 2 3
    layer      0     1   2 3        ready when the last load has it
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

log = logging.getLogger(__name__)
log.addFilter(NamesRequest())

MISS_S = 2.0  # how long a miss is valid for another request: it may have been an outage


def covered(present: Sequence[bool], trailing: int = 0) -> list[int]:
    """Return the lengths in pages, ascending, that one pool covers.

    `trailing`: how many pages it needs at a length's end (fewer for a shorter prefix); 0: all.
    """
    lengths, run = [], 0
    for page, there in enumerate(present):
        run = run + 1 if there else 0
        if not there and not trailing:
            break
        if run >= min(trailing or page + 1, page + 1):
            lengths.append(page + 1)
    return lengths


def together(pools: Sequence[Sequence[int]]) -> list[int]:
    """Return the lengths, ascending, that all pools cover; none if there is no pool."""
    return sorted(set(pools[0]).intersection(*pools[1:])) if pools else []


class LayerBatch:
    """Loads that an engine waits for together, layer by layer.

    Thread-safe.

    `ready(layer)` is called once a layer of all `loads` is in its slots, ascending per load.
    `failed(error)` is called once if a load ends early, and `ready` never after it.
    """

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
        """Note a layer of a load (`Agent.load`).

        Waits until it is really in place: `ready` takes no event.
        """
        if event is not None:
            event.synchronize()
        with self._lock:
            self._missing[layer] -= 1
            if not self._missing[layer] and not self._over:
                self._ready(layer)

    def loaded(self, pages: int, done: "concurrent.futures.Future[LoadResult]") -> None:
        """Note that a load of so many pages is over."""
        result = done.result()
        with self._lock:
            if result.pages < pages and not self._over:
                self._over = True
                self._failed(
                    RuntimeError(
                        f"{result.pages} of {pages} pages: {result.error or 'the rest is missing'}"
                    )
                )


class _Lookup:
    """The answer for one key.

    `found`: None until the store answered or the wait was over. `asker`: the first request.
    `requests`: all requests with this key, for the engine's thread only.
    """

    __slots__ = ("asked", "asker", "found", "requests")

    def __init__(self, asked: float, asker: str) -> None:
        self.asked = asked
        self.asker = asker
        self.found: bool | None = None
        self.requests: set[str] = set()


class LookupCache:
    """Answers by key.

    The engine's thread calls all methods; only `close` waits. `ask(keys)` runs on its own thread,
    with a queue bounded by the keys of live requests. The clock is an argument so that tests need
    not wait.
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
        self._lookups: dict[bytes, _Lookup] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._new: dict[bytes, _Lookup] = {}  # of this step
        self._wanted: dict[bytes, _Lookup] = {}
        self._wake = Condition()  # guards _wanted and _closed
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-lookup", daemon=True)
        run_in_helper_thread(self._thread.start)

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Return whether a page is stored; None: call again later.

        False at the latest after `timeout_s`.
        """
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = self._new[key] = _Lookup(self._clock(), request)
        elif lookup.found is None and self._clock() - lookup.asked > self._timeout_s:
            lookup.found = False
        elif lookup.found is False and request not in lookup.requests and self._is_old(lookup):
            self._new[key] = lookup
            lookup.found, lookup.asked, lookup.asker = None, self._clock(), request
        lookup.requests.add(request)
        self._keys_of.setdefault(request, set()).add(key)
        return lookup.found

    def _is_old(self, lookup: _Lookup) -> bool:
        return self._clock() - lookup.asked > MISS_S

    def flush(self) -> None:
        """Look up the new keys of the step that is over."""
        if self._new:
            with self._wake:
                self._wanted.update(self._new)
                self._wake.notify_all()
            self._new = {}

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """Note that these could not be loaded, whatever the store answered."""
        for key in keys:
            if key in self._lookups:
                self._lookups[key].found = False

    def release(self, request: str) -> None:
        """Forget a request, and the answers that no other request asked for."""
        for key in self._keys_of.pop(request, ()):
            lookup = self._lookups[key]
            lookup.requests.discard(request)
            if not lookup.requests:
                del self._lookups[key]
                self._new.pop(key, None)

    def close(self) -> None:
        """Stop, and wait for the running call."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""
        asked = {
            (request, key) for key, lookup in self._lookups.items() for request in lookup.requests
        }
        known = {(request, key) for request, keys in self._keys_of.items() for key in keys}
        found = (
            []
            if asked == known
            else [f"lookups: {len(asked ^ known)} requests are known on one side only"]
        )
        if not set(self._new) <= set(self._lookups):
            found.append("lookups: a key is new that no request asked for")
        return found

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                wanted, self._wanted = self._wanted, {}
            waiting = {
                key: lookup
                for key, lookup in wanted.items()
                if lookup.found is None and lookup.requests
            }
            if not waiting:
                continue
            with for_request(*dict.fromkeys(lookup.asker for lookup in waiting.values())):
                answers = self._answers(list(waiting))
            for lookup, answer in zip(waiting.values(), answers, strict=True):
                if lookup.found is None:  # not given up meanwhile
                    lookup.found = answer

    def _answers(self, keys: Sequence[bytes]) -> Sequence[bool]:
        try:
            return self._ask(keys)
        except Exception:  # end of a thread's work: the engine needs an answer after any error
            log.exception("a lookup of %d pages failed", len(keys))
            return (False,) * len(keys)
