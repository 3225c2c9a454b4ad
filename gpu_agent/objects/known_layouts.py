"""Which layouts the objects of a scope have, for questions that come without one.

A scope is a namespace whose layout is left open: `dataclasses.replace(namespace, layout=ANY)`. An engine that
asks "is this object there?" without saying how large it is means any layout of its scope. This process learns
them from what it stores and loads, and asks the node for those that others stored, but seldom. Who comes in
between misses: a cache may forget.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvstore.client import Client
from kvstore.deadline import Deadline
from kvstore.keys import Namespace
from kvstore.layout import PageLayout, opaque_layout

ANY = opaque_layout(1)  # in place of a scope's layout
# The node is asked no sooner than this after the last time: for a scope of which a layout is known, and for one
# of which none is, where every question would be a miss.
REFRESH_S, FIRST_S = 2.0, 0.1
# Of a scope, the newest: more than one exist only while a configuration changes.
LAYOUTS_MAX = 8
# Twice what a node opens at most. When more were seen, all are forgotten and learned again.
SCOPES_MAX = 4096


class KnownLayouts:
    """Thread-safe. Holds no lock while it talks to the node."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._by_scope: dict[bytes, dict[bytes, Namespace]] = {}  # scope's digest -> layout's fingerprint -> namespace
        self._refreshed_at = float("-inf")

    def namespace(self, scope: Namespace, layout: PageLayout) -> Namespace:
        """The namespace of a scope's objects of this layout; remembered."""
        found = self._by_scope.get(scope.digest, {}).get(layout.fingerprint)
        return found or self._learn(replace(scope, layout=layout), scope.digest)

    def of(self, scope: Namespace) -> list[Namespace]:
        """One namespace for each layout known in this scope."""
        with self._lock:
            return list(self._by_scope.get(scope.digest, {}).values())

    def refresh(self, deadline: Deadline, pause_s: float = REFRESH_S) -> bool:
        """Learns what the node knows, if that was not done just now. Whether it was asked. Raises KVStoreErrors."""
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
