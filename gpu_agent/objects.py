"""Objects: flat buffers of any size, each under a name, stored and read in batches with holes.

For engines that hand over bytes in host memory instead of slots of a pool. One call may carry gigabytes:

    names, views --- parts of one namespace, PART_NBYTES each --- lane of a few threads ---> a value per object

Nothing here blocks the caller. Every call's future has its result by the call's deadline, which is counted
from the call and covers the time in the queue; whatever goes wrong with the store is a value, never an
exception. Callers' memory belongs to them again when the result is there: no view is touched after that, and
none after the deadline. What is read is received elsewhere (in the node's mapped memory, or in a buffer of
the lane), compared with its checksum there, and copied only then.
"""

import concurrent.futures
import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from gpu_agent.config import AgentConfig
from gpu_agent.known_layouts import KnownLayouts
from gpu_agent.lane import Lane
from gpu_agent.outage import Outage
from kvstore.buffers import byte_view
from kvstore.checksum import checksum, key_seed
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import Namespace
from kvstore.layout import PageLayout
from kvstore.results import PutOutcome

log = logging.getLogger(__name__)

# One task of a lane: large enough that its round trip does not count, small enough that the threads share a
# call of a few objects.
PART_NBYTES = 8 << 20
# A call of many objects is cut into larger parts, so that the lane's bookkeeping stays small.
PARTS_MAX = 64
# Received at once into a lane's buffer: what stays in a core's cache until it is copied.
RECEIVED_NBYTES = 4 << 20
QUERY_WORKERS = 2
QUERY_NBYTES = 64  # a key, for the limit on what a lane accepts
QUERIES_NBYTES_MAX = QUERY_NBYTES << 20

Value = TypeVar("Value")


class ObjectName(NamedTuple):
    """`scope`: a namespace whose layout says nothing (`known_layouts.ANY`). `layout`: the object's own;
    None means any, which `exists` and `remove` take."""

    scope: Namespace
    prefix_hash: bytes
    layout: PageLayout | None


@dataclass(frozen=True)
class ObjectResults(Generic[Value]):
    """One value per object. `error`: why the store could not answer for all, empty if it did."""

    values: list[Value]
    error: str = ""


@dataclass
class ObjectStats:
    """Objects since the store was made. `failed`: neither found nor missed, the node did not answer in time."""

    stored: int = 0
    existing: int = 0
    refused: int = 0
    store_failed: int = 0
    loaded: int = 0
    missed: int = 0
    load_failed: int = 0
    asked: int = 0
    found: int = 0
    query_failed: int = 0
    damaged: int = 0


@dataclass(frozen=True)
class _Part:
    """Some objects of one namespace, and where they stand in their call."""

    namespace: Namespace
    positions: list[int]
    hashes: list[bytes]
    views: list[memoryview]
    deadline: Deadline


class ObjectStore:
    """Thread-safe. One per process; `client` may be shared and is not closed here.

    Of `config`: `workers` threads store, as many load; timeouts; `pending_nbytes_max` for stores and for loads;
    `staging_nbytes` for each loading thread, used on wires that map no memory (a larger object gets memory of
    its own each time, which is slower).
    """

    def __init__(self, client: Client, config: AgentConfig) -> None:
        self.stats = ObjectStats()
        self.outage = Outage()
        self._client = client
        self._config = config
        self._known = KnownLayouts(client)
        self._lock = threading.Lock()  # stats
        none, pending = (1, 1), config.pending_nbytes_max
        self._stores: Lane[_Ended[PutOutcome | None]] = Lane("store", config.workers, none, pending)
        self._loads: Lane[_Ended[bool | None]] = Lane("load", config.workers, (1, config.staging_nbytes), pending)
        self._queries: Lane[ObjectResults[Any]] = Lane("query", QUERY_WORKERS, none, QUERIES_NBYTES_MAX)

    # ---- the caller's side -----------------------------------------------------------------

    def put(
        self, names: Sequence[ObjectName], views: Sequence[Any]
    ) -> concurrent.futures.Future[ObjectResults[PutOutcome | None]]:
        """Stores objects that are not stored yet; `views`: buffers of exactly `layout.page_nbytes` bytes.

        None for an object that the node was not asked for in time. Raises InvalidRequest for a name without
        a layout or a view of another length.
        """
        parts = self._parts(names, [byte_view(view) for view in views], Deadline(self._config.save_timeout_s))
        return self._submit(self._stores, parts, len(names), self._put_part, self._count_puts)

    def get(
        self, names: Sequence[ObjectName], views: Sequence[Any]
    ) -> concurrent.futures.Future[ObjectResults[bool | None]]:
        """Reads objects into writable `views`; True for each that is there, intact and in its view.

        None for an object that could not be read in time. The views of others hold what they held.
        """
        flat = [byte_view(view, writable=True) for view in views]
        parts = self._parts(names, flat, Deadline(self._config.load_timeout_s))
        return self._submit(self._loads, parts, len(names), self._get_part, self._count_gets)

    def exists(self, names: Sequence[ObjectName]) -> concurrent.futures.Future[ObjectResults[bool]]:
        """Which objects are stored; does not count as a use."""
        values: list[bool] = [False] * len(names)
        return self._query(names, values, partial(self._exists, list(names), values))

    def remove(self, names: Sequence[ObjectName]) -> concurrent.futures.Future[ObjectResults[int]]:
        """Forgets objects; the bytes that each had, 0 for one that was not there."""
        values: list[int] = [0] * len(names)
        return self._query(names, values, partial(self._remove, list(names), values))

    def close(self) -> None:
        """Ends everything: what is queued at once, what is under way with its current call, so at latest by
        its deadline. Every future has its result then, and nothing touches a view any more."""
        for lane in (self._queries, self._loads, self._stores):
            lane.stopping.set()
        for lane in (self._queries, self._loads, self._stores):
            lane.close(0.0)

    def check(self) -> list[str]:
        """Violations of what must always hold; empty if all is well."""
        return self._queries.check() + self._loads.check() + self._stores.check()

    # ---- parts -----------------------------------------------------------------------------

    def _parts(self, names: Sequence[ObjectName], flat: list[memoryview], deadline: Deadline) -> list[_Part]:
        if len(names) != len(flat):
            raise InvalidRequest(f"{len(names)} names for {len(flat)} buffers")
        groups: dict[bytes, tuple[Namespace, list[int]]] = {}
        for position, (name, view) in enumerate(zip(names, flat, strict=True)):
            if name.layout is None or name.layout.page_nbytes != view.nbytes:
                raise InvalidRequest(f"object {position} has {view.nbytes} bytes, which its layout does not say")
            namespace = self._known.namespace(name.scope, name.layout)
            groups.setdefault(namespace.digest, (namespace, []))[1].append(position)
        step_nbytes = max(PART_NBYTES, sum(view.nbytes for view in flat) // PARTS_MAX)
        return [
            _Part(namespace, some, [names[i].prefix_hash for i in some], [flat[i] for i in some], deadline)
            for namespace, positions in groups.values()
            for some in _runs(positions, max(1, step_nbytes // namespace.layout.page_nbytes))
        ]

    def _submit(
        self,
        lane: "Lane[_Ended[Value | None]]",
        parts: list[_Part],
        count: int,
        move: Callable[[_Part, list[Value | None], torch.Tensor], None],
        counted: Callable[["_Ended[Value | None]"], None],
    ) -> concurrent.futures.Future[ObjectResults[Value | None]]:
        batch: _Batch[Value | None] = _Batch(count, len(parts), None)

        def run(part: _Part, buffer: torch.Tensor) -> "_Ended[Value | None]":
            values: list[Value | None] = [None] * len(part.hashes)
            error = self._guarded(partial(move, part, values, buffer), part.deadline)
            return _Ended(part, values, error)

        def failed(part: _Part, reason: str) -> "_Ended[Value | None]":
            return _Ended(part, [None] * len(part.hashes), reason)

        def end(done: "concurrent.futures.Future[_Ended[Value | None]]") -> None:
            ended = done.result()
            counted(ended)
            if batch.end(ended):
                self._touch(parts)

        for part in parts:
            nbytes = len(part.hashes) * part.namespace.layout.page_nbytes
            lane.submit(nbytes, partial(run, part), partial(failed, part)).add_done_callback(end)
        return batch.done

    def _guarded(self, work: Callable[[], None], deadline: Deadline) -> str:
        """Runs what talks to the node; why it failed, empty if it did not."""
        try:
            deadline.remaining()  # one that waited too long in the queue says nothing about the node
        except DeadlineExceeded as error:
            return str(error)
        try:
            work()
        except KVStoreError as error:
            self.outage.report(error)
            return str(error) or type(error).__name__
        self.outage.report(None)
        return ""

    # ---- the workers' side -----------------------------------------------------------------

    def _put_part(self, part: _Part, values: list[PutOutcome | None], buffer: torch.Tensor) -> None:
        views = dict(zip(part.hashes, part.views, strict=True))  # an object named twice is sent once
        timeout_s = part.deadline.remaining()
        outcomes = self._client.put(part.namespace, list(views), list(views.values()), timeout_s=timeout_s)
        by_hash = dict(zip(views, outcomes, strict=True))
        values[:] = [by_hash[prefix_hash] for prefix_hash in part.hashes]

    def _get_part(self, part: _Part, values: list[bool | None], buffer: torch.Tensor) -> None:
        self._client.open(part.namespace, part.deadline.remaining())  # so that it is known how objects travel
        if self._client.maps_arena:
            step = self._client.batch_pages_max(part.namespace, part.deadline.remaining())
            for some in _runs(range(len(part.hashes)), step):
                self._get_in_place(part, some, values)
            return
        nbytes = part.namespace.layout.page_nbytes
        if nbytes > buffer.numel():
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        room = memoryview(byte_view(buffer.view(-1)))
        for some in _runs(range(len(part.hashes)), max(1, min(RECEIVED_NBYTES, room.nbytes) // nbytes)):
            self._get_buffered(part, some, values, room)

    def _get_in_place(self, part: _Part, some: Sequence[int], values: list[bool | None]) -> None:
        hashes = [part.hashes[i] for i in some]
        damaged = []
        with self._client.open_get(part.namespace, hashes, timeout_s=part.deadline.remaining()) as slots:
            found = [i for i, hit in zip(some, slots.hits, strict=True) if hit]
            for i in set(some) - set(found):
                values[i] = False
            for i, page, expected, offset in zip(found, slots.pages, slots.checksums, slots.offsets, strict=True):
                if checksum(page, key_seed(part.namespace.digest, part.hashes[i])) != expected:
                    damaged.append(i)
                    values[i] = False
                    continue
                self._hand_over(part, i, slots.arena.memory, offset)
                values[i] = True
        if damaged:
            self._report_damaged(part, damaged)

    def _get_buffered(self, part: _Part, some: Sequence[int], values: list[bool | None], room: memoryview) -> None:
        nbytes = part.namespace.layout.page_nbytes
        hashes = [part.hashes[i] for i in some]
        buffers = [room[start : start + nbytes] for start in range(0, len(some) * nbytes, nbytes)]
        hits = self._client.get(part.namespace, hashes, buffers, timeout_s=part.deadline.remaining())
        for place, (i, hit) in enumerate(zip(some, hits, strict=True)):
            if hit:
                self._hand_over(part, i, room, place * nbytes)
            values[i] = hit

    def _hand_over(self, part: _Part, i: int, source: memoryview, offset: int) -> None:
        """Copies verified bytes into the caller's view, unless it is too late for that.

        Without the GIL, which a slice's assignment would keep: 32 MiB take milliseconds.
        """
        part.deadline.remaining()
        if self._loads.stopping.is_set():
            raise Unavailable("the agent is closed")
        view = part.views[i]
        assert view.nbytes == part.namespace.layout.page_nbytes <= source.nbytes - offset
        target, origin = ctypes.c_char.from_buffer(view), ctypes.c_char.from_buffer(source, offset)
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(origin), view.nbytes)

    def _report_damaged(self, part: _Part, damaged: list[int]) -> None:
        """The node checks its copies and drops bad ones; whatever it says, they were misses."""
        log.error("%d objects of model %s did not match their checksum", len(damaged), part.namespace.model)
        self._add(damaged=len(damaged))
        hashes = list(dict.fromkeys(part.hashes[i] for i in damaged))
        try:
            self._client.verify(part.namespace, hashes, timeout_s=part.deadline.remaining())
        except KVStoreError as error:
            log.warning("could not report damaged objects: %s", error)

    # ---- queries ---------------------------------------------------------------------------

    def _query(
        self, names: Sequence[ObjectName], values: list[Value], work: Callable[[Deadline], None]
    ) -> concurrent.futures.Future[ObjectResults[Value]]:
        deadline = Deadline(self._config.lookup_timeout_s)

        def run(_: torch.Tensor) -> ObjectResults[Value]:
            error = self._guarded(partial(work, deadline), deadline)
            self._add(query_failed=len(names) if error else 0)
            return ObjectResults(values, error)

        return self._queries.submit(len(names) * QUERY_NBYTES, run, lambda reason: ObjectResults(values, reason))

    def _exists(self, names: list[ObjectName], values: list[bool], deadline: Deadline) -> None:
        def ask(namespace: Namespace, positions: list[int]) -> None:
            hashes = [names[i].prefix_hash for i in positions]
            found = self._client.lookup(namespace, hashes, timeout_s=deadline.remaining()).present
            for i, present in zip(positions, found, strict=True):
                values[i] = values[i] or present

        try:
            self._ask_all(names, ask, lambda i: not values[i], deadline)
        finally:
            self._add(asked=len(names), found=values.count(True))

    def _remove(self, names: list[ObjectName], values: list[int], deadline: Deadline) -> None:
        def ask(namespace: Namespace, positions: list[int]) -> None:
            first = {names[i].prefix_hash: i for i in reversed(positions)}
            removed = self._client.remove(namespace, list(first), timeout_s=deadline.remaining())
            for i, gone in zip(first.values(), removed, strict=True):
                values[i] += gone * namespace.layout.page_nbytes

        self._ask_all(names, ask, lambda i: True, deadline)

    def _ask_all(
        self,
        names: list[ObjectName],
        ask: Callable[[Namespace, list[int]], None],
        open_still: Callable[[int], bool],
        deadline: Deadline,
    ) -> None:
        """Asks in all namespaces that may hold the objects; in those that others made, too, if it is still open."""
        asked = self._spaces(names, range(len(names)))
        for namespace, positions in asked.values():
            ask(namespace, positions)
        rest = [i for i, name in enumerate(names) if name.layout is None and open_still(i)]
        if rest and self._known.refresh(deadline):
            for digest, (namespace, positions) in self._spaces(names, rest).items():
                if digest not in asked:
                    ask(namespace, positions)

    def _spaces(self, names: list[ObjectName], positions: Iterable[int]) -> dict[bytes, tuple[Namespace, list[int]]]:
        found: dict[bytes, tuple[Namespace, list[int]]] = {}
        for i in positions:
            scope, _, layout = names[i]
            for namespace in [self._known.namespace(scope, layout)] if layout else self._known.of(scope):
                found.setdefault(namespace.digest, (namespace, []))[1].append(i)
        return found

    def _touch(self, parts: list[_Part]) -> None:
        """Parts aged a chain piece by piece; puts its order right, tail oldest. The objects have moved
        already, so a failure costs nothing but the order."""
        chains: dict[bytes, list[_Part]] = {}
        for part in parts:
            chains.setdefault(part.namespace.digest, []).append(part)
        for chain in chains.values():
            if len(chain) > 1:
                hashes = [prefix_hash for part in chain for prefix_hash in part.hashes]
                touch = partial(self._client.lookup, chain[0].namespace, hashes, touch=True)
                self._query([], [], lambda deadline, touch=touch: touch(timeout_s=deadline.remaining()))

    # ---- counts ----------------------------------------------------------------------------

    def _count_puts(self, ended: "_Ended[PutOutcome | None]") -> None:
        self._add(
            stored=ended.values.count(PutOutcome.STORED),
            existing=ended.values.count(PutOutcome.EXISTS) + ended.values.count(PutOutcome.BUSY),
            refused=ended.values.count(PutOutcome.FULL),
            store_failed=ended.values.count(None),
        )

    def _count_gets(self, ended: "_Ended[bool | None]") -> None:
        values = ended.values
        self._add(loaded=values.count(True), missed=values.count(False), load_failed=values.count(None))

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.stats, name, getattr(self.stats, name) + count)


@dataclass(frozen=True)
class _Ended(Generic[Value]):
    """A part, its values and why some are missing."""

    part: _Part
    values: list[Value]
    error: str


class _Batch(Generic[Value]):
    """A call whose parts end one by one, in any thread."""

    def __init__(self, count: int, parts: int, default: Value) -> None:
        self.done: concurrent.futures.Future[ObjectResults[Value]] = concurrent.futures.Future()
        self._values = [default] * count
        self._left = parts
        self._error = ""
        self._lock = threading.Lock()
        if not parts:
            self.done.set_result(ObjectResults(self._values))

    def end(self, ended: _Ended[Value]) -> bool:
        """Takes one part's values in; whether it was the last."""
        with self._lock:
            for position, value in zip(ended.part.positions, ended.values, strict=True):
                self._values[position] = value
            self._error = self._error or ended.error
            self._left -= 1
            last = not self._left
        if last:
            self.done.set_result(ObjectResults(self._values, self._error))
        return last


def _runs(positions: Sequence[int], step: int) -> Iterator[list[int]]:
    for start in range(0, len(positions), step):
        yield list(positions[start : start + step])
