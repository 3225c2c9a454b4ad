"""Keep what the node has sent (health, the view of the cluster), and answer from it in the gateway.

    node --control--> NodeState --> Health.Check, Health.Watch, KVStore.Follow

Watchers get the newest state; states in between may be skipped. A node that is silent counts as not serving.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Request = health_pb2.HealthCheckRequest
Reply = health_pb2.HealthCheckResponse
# A node tells that it lives several times a second. One that has not for so long hangs.
SILENT_S_MAX = 10.0
LOOK_S = 0.5


class NodeState:
    """The last state that the node sent, and those who watch it. Use it from the event loop's thread only."""

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}
        self._view: pb.View | None = None
        self._alone = True
        self._heard_s = time.monotonic()
        self._watchers: set[asyncio.Event] = set()

    # ---- what the node tells -------------------------------------------------------------

    def heard(self) -> None:
        """Note that the node lives."""
        silent = self._silent
        self._heard_s = time.monotonic()
        if silent:
            self._tell()

    def set_health(self, good: dict[str, bool]) -> None:
        """Store the status of every service, by its name."""
        self._good = good
        self._tell()

    def set_view(self, view: pb.View | None, alone: bool) -> None:
        """Store the view. None: there is none yet; None and `alone`: the node is in no cluster."""
        self._view, self._alone = view, alone
        self._tell()

    @property
    def _silent(self) -> bool:
        return time.monotonic() - self._heard_s > SILENT_S_MAX

    def look(self) -> None:
        """Wake watchers if the node has gone silent. Call it periodically."""
        if self._silent:
            self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    # ---- what callers ask ----------------------------------------------------------------

    def health(self, name: str) -> Any:
        """Return the status of a service. Raise KeyError for an unknown name."""
        good = self._good[name] and not self._silent
        return Reply(status=Reply.SERVING if good else Reply.NOT_SERVING)

    async def watch_health(self, name: str) -> AsyncIterator[Any]:
        """Yield the status now and after each change. Raise KeyError for an unknown name."""
        told = None
        async for _ in self._changes():
            status = self.health(name)
            if status != told:
                told = status
                yield status

    async def watch_views(self, known: int) -> AsyncIterator[pb.View]:
        """Yield the view now, unless its number is `known`, and every later one. Raise InvalidRequest if the node is in
        no cluster.
        """
        if self._alone:
            raise InvalidRequest("this node is in no cluster: it has no view")
        told: pb.View | None = None
        async for _ in self._changes():
            view = self._view
            if view is not None and view is not told and (told or view.number != known):
                yield view
            told = view

    async def _changes(self) -> AsyncIterator[None]:
        """Yield now, and after each change."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
