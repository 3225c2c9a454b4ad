"""Store and read flat buffers of any size by name, in batches with holes.

For engines that pass bytes in host memory instead of slots of a pool. One call may have gigabytes:

    names, views --- parts of one namespace, PART_NBYTES each --- threads ---> a value per object

Nothing here blocks the caller. Every call's future has its result by the call's deadline, which
includes the time in the queue. A failure of the store is a value, never an exception. No view is
touched after the result, or after the deadline. A read is received in its view and verified there.

An object's layout belongs to its name. A scope is a namespace whose layout is left open:
`dataclasses.replace(namespace, layout=ANY)`. An engine that asks for an object without its size
means any layout of the scope. `KnownLayouts` learns layouts from what this process stores and
loads, and seldom asks the node for those that others stored. Until then such an object is a miss.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gpu_agent.bounded_executor import BoundedExecutor
from gpu_agent.objects.parts import Batch, Ended, ObjectName, ObjectPart, ObjectResults, Value, cut
from gpu_agent.options import AgentConfig
from gpu_agent.outage_log import OutageLog
from kvstore.buffers import byte_view
from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.keys import Namespace
from kvstore.layout import PageLayout, opaque_layout
from kvstore.results import PutOutcome
from kvstore.tracing import request


class ObjectMover:
    """Move the objects of a part between callers' memory and a node. Thread-safe.

    Methods raise KVStoreErrors; otherwise `values` is filled. No view is touched after they return
    or after the part's deadline. A load verifies the checksum in the caller's view: if it fails,
    the view's content is undefined, and the object is no hit.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, part: ObjectPart, values: list[PutOutcome | None]) -> None:
        """Put a part's objects."""
        # A call may name an object twice; it is sent once
        views: dict[bytes, memoryview] = dict(zip(part.hashes, part.views, strict=True))
        timeout_s = part.deadline.remaining()
        outcomes = self._client.put(
            part.namespace, list(views), list(views.values()), timeout_s=timeout_s
        )
        by_hash = dict(zip(views, outcomes, strict=True))
        values[:] = [by_hash[prefix_hash] for prefix_hash in part.hashes]

    def get(self, part: ObjectPart, values: list[bool | None]) -> None:
        """Get a part's objects."""
        timeout_s = part.deadline.remaining()
        values[:] = self._client.get(part.namespace, part.hashes, part.views, timeout_s=timeout_s)


ANY = opaque_layout(1)  # in place of a scope's layout
# Pause between two requests to the node: for a scope with a known layout, and for one without,
# where every lookup would be a miss.
REFRESH_S, FIRST_S = 2.0, 0.1
# Newest layouts of a scope: more than one exist only while a configuration changes.
LAYOUTS_MAX = 8
# Twice what a node opens at most. When more were seen, all are forgotten and learned again.
SCOPES_MAX = 4096


class KnownLayouts:
    """Layouts of scopes. Thread-safe.

    It holds no lock while it calls the node.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._by_scope: dict[
            bytes, dict[bytes, Namespace]
        ] = {}  # scope's digest -> layout's fingerprint -> namespace
        self._refreshed_at = float("-inf")

    def namespace(self, scope: Namespace, layout: PageLayout) -> Namespace:
        """Return and remember the namespace of a scope's objects with this layout."""
        found = self._by_scope.get(scope.digest, {}).get(layout.fingerprint)
        return found or self._learn(replace(scope, layout=layout), scope.digest)

    def of(self, scope: Namespace) -> list[Namespace]:
        """Return a namespace for each layout known in this scope."""
        with self._lock:
            return list(self._by_scope.get(scope.digest, {}).values())

    def refresh(self, deadline: Deadline, pause_s: float = REFRESH_S) -> bool:
        """Learn the node's namespaces, unless just done; return whether the node was called.

        Raises KVStoreErrors.
        """
        with self._lock:
            now = self._clock()
            if now < self._refreshed_at + pause_s:
                return False
            self._refreshed_at = now
        for namespace, _ in self._client.namespaces(timeout_s=deadline.remaining()):
            self._learn(namespace, replace(namespace, layout=ANY).digest)
        return True

    def _learn(self, namespace: Namespace, scope_digest: bytes) -> Namespace:
        with self._lock:
            if scope_digest not in self._by_scope and len(self._by_scope) >= SCOPES_MAX:
                self._by_scope.clear()
            known = self._by_scope.setdefault(scope_digest, {})
            namespace = known.setdefault(namespace.layout.fingerprint, namespace)
            if len(known) > LAYOUTS_MAX:
                del known[next(iter(known))]
            return namespace


QUERY_WORKERS = 2
QUERY_NBYTES = 64  # a key, counted against the limit of pending bytes
QUERIES_NBYTES_MAX = QUERY_NBYTES << 20


@dataclass
class ObjectStats:
    """Counters of objects since the store was made.

    `failed`: neither hit nor miss, because the node did not answer in time.
    """

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


class ObjectStore:
    """A store of objects. Thread-safe.

    One per process; `client` may be shared and is not closed here. `config`: `workers` threads
    store, as many load; timeouts; `pending_nbytes_max` for stores and for loads.
    """

    def __init__(self, client: Client, config: AgentConfig) -> None:
        self.stats = ObjectStats()
        self.outage = OutageLog()
        self._client = client
        self._config = config
        self._known = KnownLayouts(client)
        self._lock = threading.Lock()  # guards the counters
        none, pending = (1, 1), config.pending_nbytes_max
        self._stores: BoundedExecutor[Ended[PutOutcome | None]] = BoundedExecutor(
            "store", config.workers, none, pending
        )
        self._loads: BoundedExecutor[Ended[bool | None]] = BoundedExecutor(
            "load", config.workers, none, pending
        )
        self._mover = ObjectMover(client)
        self._queries: BoundedExecutor[ObjectResults[Any]] = BoundedExecutor(
            "query", QUERY_WORKERS, none, QUERIES_NBYTES_MAX
        )

    # ---- the caller's side -----------------------------------------------------------------

    def put(
        self, names: Sequence[ObjectName], views: Sequence[Any]
    ) -> concurrent.futures.Future[ObjectResults[PutOutcome | None]]:
        """Store objects that are not stored yet; `views` are exactly `layout.page_nbytes` long.

        The result is None for an object that was not sent in time. Raises InvalidRequest for a name
        without a layout or a view of another length.
        """
        flat = [byte_view(view) for view in views]
        parts = cut(names, flat, self._known.namespace, Deadline(self._config.save_timeout_s))
        return self._submit(self._stores, parts, len(names), self._mover.put, self._count_puts)

    def get(
        self, names: Sequence[ObjectName], views: Sequence[Any]
    ) -> concurrent.futures.Future[ObjectResults[bool | None]]:
        """Read objects into writable `views`; True for each that is stored and intact.

        None means that it could not be read in time. Views without True are undefined.
        """
        flat = [byte_view(view, writable=True) for view in views]
        parts = cut(names, flat, self._known.namespace, Deadline(self._config.load_timeout_s))
        return self._submit(self._loads, parts, len(names), self._mover.get, self._count_gets)

    def connect(self) -> None:
        """Connect and learn the node's layouts in the background; log an unreachable node."""
        self._query([], [], self._known.refresh)

    def exists(self, names: Sequence[ObjectName]) -> concurrent.futures.Future[ObjectResults[bool]]:
        """Return which objects are stored; it does not count as a use."""
        values: list[bool] = [False] * len(names)
        return self._query(names, values, partial(self._exists, list(names), values))

    def remove(self, names: Sequence[ObjectName]) -> concurrent.futures.Future[ObjectResults[int]]:
        """Remove objects; return the bytes of each, 0 for an absent one."""
        values: list[int] = [0] * len(names)
        return self._query(names, values, partial(self._remove, list(names), values))

    def close(self) -> None:
        """End queued calls at once and running ones by their deadline.

        Every future has its result then, and no view is touched any more.
        """
        for lane in (self._queries, self._loads, self._stores):
            lane.stopping.set()
        for lane in (self._queries, self._loads, self._stores):
            lane.close(0.0)

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self._queries.check() + self._loads.check() + self._stores.check()

    # ---- parts -----------------------------------------------------------------------------

    def _submit(
        self,
        lane: BoundedExecutor[Ended[Value | None]],
        parts: list[ObjectPart],
        count: int,
        move: Callable[[ObjectPart, list[Value | None]], None],
        counted: Callable[[Ended[Value | None]], None],
    ) -> concurrent.futures.Future[ObjectResults[Value | None]]:
        batch: Batch[Value | None] = Batch(count, len(parts), None)

        def run(part: ObjectPart, _: torch.Tensor) -> Ended[Value | None]:
            values: list[Value | None] = [None] * len(part.hashes)
            error = self._guarded(partial(move, part, values), part.deadline)
            return Ended(part, values, error)

        def failed(part: ObjectPart, reason: str) -> Ended[Value | None]:
            return Ended(part, [None] * len(part.hashes), reason)

        def end(done: concurrent.futures.Future[Ended[Value | None]]) -> None:
            ended = done.result()
            counted(ended)
            if batch.end(ended):
                self._touch(parts)

        with request():
            for part in parts:
                lane.submit(
                    part.nbytes, partial(run, part), partial(failed, part)
                ).add_done_callback(end)
        return batch.done

    def _guarded(self, work: Callable[[], object], deadline: Deadline) -> str:
        """Run a call of the node; return why it failed, or an empty text."""
        try:
            # a call that waited too long in the queue says nothing about the node
            deadline.remaining()
        except DeadlineExceeded as error:
            return str(error)
        try:
            work()
        except KVStoreError as error:
            self.outage.report(error)
            return str(error) or type(error).__name__
        self.outage.report(None)
        return ""

    # ---- queries ---------------------------------------------------------------------------

    def _query(
        self, names: Sequence[ObjectName], values: list[Value], work: Callable[[Deadline], object]
    ) -> concurrent.futures.Future[ObjectResults[Value]]:
        deadline = Deadline(self._config.lookup_timeout_s)

        def run(_: torch.Tensor) -> ObjectResults[Value]:
            error = self._guarded(partial(work, deadline), deadline)
            self._add(query_failed=len(names) if error else 0)
            return ObjectResults(values, error)

        with request():
            return self._queries.submit(
                len(names) * QUERY_NBYTES, run, lambda reason: ObjectResults(values, reason)
            )

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
        """Ask in all namespaces that may hold the objects, then in newly learned ones."""
        asked = self._spaces(names, range(len(names)))
        for namespace, positions in asked.values():
            ask(namespace, positions)
        rest = [i for i, name in enumerate(names) if name.layout is None and open_still(i)]
        strange = any(not self._known.of(names[i].scope) for i in rest)
        if rest and self._known.refresh(deadline, FIRST_S if strange else REFRESH_S):
            for digest, (namespace, positions) in self._spaces(names, rest).items():
                if digest not in asked:
                    ask(namespace, positions)

    def _spaces(
        self, names: list[ObjectName], positions: Iterable[int]
    ) -> dict[bytes, tuple[Namespace, list[int]]]:
        found: dict[bytes, tuple[Namespace, list[int]]] = {}
        for i in positions:
            scope, _, layout = names[i]
            for namespace in (
                [self._known.namespace(scope, layout)] if layout else self._known.of(scope)
            ):
                found.setdefault(namespace.digest, (namespace, []))[1].append(i)
        return found

    def _touch(self, parts: list[ObjectPart]) -> None:
        """Touch a chain whose parts were used piece by piece, so that its tail is oldest.

        The objects have moved already, so a failure costs only the order.
        """
        chains: dict[bytes, list[ObjectPart]] = {}
        for part in parts:
            chains.setdefault(part.namespace.digest, []).append(part)
        for chain in chains.values():
            if len(chain) > 1:
                hashes = [prefix_hash for part in chain for prefix_hash in part.hashes]
                self._query([], [], partial(self._touch_chain, chain[0].namespace, hashes))

    def _touch_chain(self, namespace: Namespace, hashes: list[bytes], deadline: Deadline) -> None:
        self._client.lookup(namespace, hashes, touch=True, timeout_s=deadline.remaining())

    # ---- counts ----------------------------------------------------------------------------

    def _count_puts(self, ended: Ended[PutOutcome | None]) -> None:
        self._add(
            stored=ended.values.count(PutOutcome.STORED),
            existing=ended.values.count(PutOutcome.EXISTS) + ended.values.count(PutOutcome.BUSY),
            refused=ended.values.count(PutOutcome.FULL) + ended.values.count(PutOutcome.AWAY),
            store_failed=ended.values.count(None),
        )

    def _count_gets(self, ended: Ended[bool | None]) -> None:
        values = ended.values
        self._add(
            loaded=values.count(True), missed=values.count(False), load_failed=values.count(None)
        )

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.stats, name, getattr(self.stats, name) + count)
