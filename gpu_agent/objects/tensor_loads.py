"""Fetch tensors into host memory before an engine decides whether to compute them.

    begin ---> FETCHING --- all chunks intact ---> READY --- evicted for another ---> unknown
                  |                                  | ^
                  +--- else: missing for MISS_S   pin v | unpin: the engine has copied it
                                                   PINNED

An engine that counts on a tensor cannot compute it any more when the load fails. So a tensor is
first received and verified here, and `find` returns only those that are complete.
"""

import collections
import concurrent.futures
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_agent.objects.parts import ObjectResults
from gpu_agent.objects.store import ObjectStore
from gpu_agent.objects.tensors import ChunkPool, TensorSpec, chunk_names, read_header, scope_of
from kvstore.keys import Namespace
from kvstore.log_rate import LogRate

log = logging.getLogger(__name__)
log.addFilter(LogRate())

MISS_S = 2.0  # a missing tensor is not looked up again for this long
MISSES_MAX = 4096


@dataclass
class LoadStats:
    """Counters of tensors.

    `late`: the engine did not wait any longer. `no_space`: no free buffer. `wrong`: intact bytes
    that are not the expected tensor.
    """

    fetched: int = 0
    missing: int = 0
    late: int = 0
    no_space: int = 0
    wrong: int = 0


@dataclass
class _Tensor:
    """A tensor in the pool, or on its way there.

    `spec`: the expected one, until `ready`. `since`: when its fetch began; of a ready one, when it
    became ready or was asked for again. `used`: an engine has taken it since.
    """

    rows: int
    kind: str
    slots: list[int]
    spec: TensorSpec | None
    since: float
    fetch: "concurrent.futures.Future[ObjectResults[bool | None]] | None"
    have_first: bool = False
    ready: bool = False
    late: bool = False
    used: bool = False
    pins: int = 0


class TensorLoads:
    """The tensors that are in `pool`, or on their way there. Not thread-safe.

    `patience_s`: how long `pending` is true for one tensor. Fetches end by the store's own
    deadline; one that was late may serve a later request.
    """

    def __init__(
        self,
        store: ObjectStore,
        namespace: Namespace,
        pool: ChunkPool,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = LoadStats()
        self._store, self._scope, self._pool = store, scope_of(namespace), pool
        self._patience_s, self._clock = patience_s, clock
        # The least recently used first
        self._tensors: collections.OrderedDict[str, _Tensor] = collections.OrderedDict()
        self._fetching: set[str] = set()
        self._misses: dict[str, float] = {}  # until when
        # Dtype and all sizes but the first of the newest tensor of a kind: with a right guess one
        # round trip does
        self._guesses: dict[str, TensorSpec] = {}

    def begin(self, identifier: str, rows: int, kind: str) -> None:
        """Begin to fetch a tensor of `rows` rows, unless it is known, or missed a moment ago.

        `kind`: tensors of one kind differ in the number of rows only, as a rule.
        """
        if tensor := self._tensors.get(identifier):
            self._tensors.move_to_end(identifier)
            if tensor.ready:  # this request waits for it, too
                tensor.used, tensor.since = False, self._clock()
            return
        if self._misses.get(identifier, 0.0) > self._clock():
            return
        guess = self._guesses.get(kind)
        spec = guess and TensorSpec(guess.dtype, (rows, *guess.shape[1:]))
        if spec and spec.chunks > len(self._pool):  # the guess may be wrong: the header says
            spec = None
        slots = self._slots(spec.chunks if spec else 1)
        if slots is None:
            self.stats.no_space += 1
            return
        fetch = self._store.get(chunk_names(self._scope, identifier, spec), self._pool.views(slots))
        self._tensors[identifier] = _Tensor(rows, kind, slots, spec, self._clock(), fetch)
        self._fetching.add(identifier)

    def pending(self, identifier: str) -> bool:
        """Return whether it is worth waiting for a tensor."""
        tensor = self._tensors.get(identifier)
        if tensor is None or tensor.ready or tensor.late:
            return False
        if self._clock() - tensor.since <= self._patience_s:
            return True
        tensor.late = True
        self.stats.late += 1
        return False

    def find(self, identifier: str, rows: int) -> TensorSpec | None:
        """Return the spec of a complete tensor with `rows` rows; None otherwise."""
        tensor = self._tensors.get(identifier)
        if tensor is None or not tensor.ready or tensor.rows != rows:
            return None
        return tensor.spec

    def pin(self, identifier: str) -> None:
        """Keep a complete tensor until `unpin`."""
        tensor = self._tensors[identifier]
        tensor.pins, tensor.used = tensor.pins + 1, True

    def content(self, identifier: str) -> tuple[TensorSpec, list[int]]:
        """Return a complete tensor's spec and slots."""
        tensor = self._tensors[identifier]
        assert tensor.spec is not None
        return tensor.spec, tensor.slots

    def unpin(self, identifier: str) -> None:
        """Give back one pin."""
        self._tensors[identifier].pins -= 1

    @property
    def pinned(self) -> int:
        """Return the number of pins."""
        return sum(tensor.pins for tensor in self._tensors.values())

    def poll(self) -> None:
        """Take the fetches that have ended."""
        for identifier in [one for one in self._fetching if self._done(self._tensors[one])]:
            self._advance(identifier, self._tensors[identifier])

    @staticmethod
    def _done(tensor: _Tensor) -> bool:
        return tensor.fetch is not None and tensor.fetch.done()

    def _advance(self, identifier: str, tensor: _Tensor) -> None:
        assert tensor.fetch is not None
        values = tensor.fetch.result().values
        if not tensor.have_first:
            if not values[0]:
                self._drop(identifier, "missing")
                return
            spec = read_header(identifier, self._pool.views(tensor.slots)[0])
            if spec is None or spec.shape[0] != tensor.rows:
                log.warning(
                    "the store's tensor of %.40s is %s, not one of %d rows: it is not used",
                    *(identifier, spec, tensor.rows),
                )
                self._drop(identifier, "wrong")
                return
            tensor.have_first, self._guesses[tensor.kind] = True, spec
            if spec != tensor.spec:
                self._fetch_rest(identifier, tensor, spec)
                return
        if not all(values):
            self._drop(identifier, "missing")
            return
        tensor.ready, tensor.fetch, tensor.since = True, None, self._clock()
        self._fetching.discard(identifier)
        self.stats.fetched += 1

    def _fetch_rest(self, identifier: str, tensor: _Tensor, spec: TensorSpec) -> None:
        """Fetch all chunks but the first, whose header shows another tensor than the guess."""
        self._pool.give(tensor.slots[1:])
        tensor.slots, tensor.spec = tensor.slots[:1], spec
        more = self._slots(spec.chunks - 1)
        if more is None:
            self._drop(identifier, "no_space")
            return
        tensor.slots += more
        names = chunk_names(self._scope, identifier, spec)[1:]
        tensor.fetch = self._store.get(names, self._pool.views(more))
        self._advance_if_done(identifier, tensor)

    def _advance_if_done(self, identifier: str, tensor: _Tensor) -> None:
        if self._done(tensor):
            self._advance(identifier, tensor)

    def _drop(self, identifier: str, counter: str) -> None:
        """Forget a tensor whose fetch has ended, and do not look it up for a while."""
        self._pool.give(self._tensors.pop(identifier).slots)
        self._fetching.discard(identifier)
        if len(self._misses) >= MISSES_MAX:
            self._misses.clear()
        self._misses[identifier] = self._clock() + MISS_S
        setattr(self.stats, counter, getattr(self.stats, counter) + 1)

    def _slots(self, count: int) -> list[int] | None:
        """Take slots, and evict complete tensors for them; None if that is not enough.

        A tensor that was fetched for a request stays until it is used, or until the request may
        have given up: otherwise waiting requests would evict each other's for ever.
        """
        unused_since = self._clock() - self._patience_s
        idle = [
            one
            for one, tensor in self._tensors.items()
            if tensor.ready and not tensor.pins and (tensor.used or tensor.since < unused_since)
        ]
        if self._pool.free + sum(len(self._tensors[one].slots) for one in idle) < count:
            return None
        for identifier in idle:
            if self._pool.free >= count:
                break
            self._pool.give(self._tensors.pop(identifier).slots)
        return self._pool.take(count)

    def check(self) -> list[str]:
        """Return violated invariants; an empty list if there are none."""
        used = [slot for tensor in self._tensors.values() for slot in tensor.slots]
        found = []
        if len(used) != len(set(used)) or len(used) + self._pool.free != len(self._pool):
            found.append(f"{len(used)} used and {self._pool.free} free of {len(self._pool)} slots")
        if self._fetching != {one for one, tensor in self._tensors.items() if not tensor.ready}:
            found.append(f"fetching {sorted(self._fetching)}")
        if any(tensor.pins < 0 for tensor in self._tensors.values()):
            found.append("a tensor was unpinned too often")
        return found
