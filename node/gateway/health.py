"""What a gateway answers by itself, from what the node tells it: the standard health service, and views of the cluster.

    node --control--> NodeState --> Health.Check, Health.Watch, KVStore.Follow

A watcher is told the newest, not a queue. A node that tells nothing any more is not serving.
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
    """Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._good: dict[str, bool] = {}
        self._view: pb.View | None = None
        self._alone = True
        self._heard_s = time.monotonic()
        self._watchers: set[asyncio.Event] = set()

    # ---- what the node tells -------------------------------------------------------------

    def heard(self) -> None:
        """The node lives."""
        silent = self._silent
        self._heard_s = time.monotonic()
        if silent:
            self._tell()

    def set_health(self, good: dict[str, bool]) -> None:
        """`good`: by the name of a service, all that the node knows."""
        self._good = good
        self._tell()

    def set_view(self, view: pb.View | None, alone: bool) -> None:
        """`view` None: there is none yet, or, if it is `alone`, there will be none."""
        self._view, self._alone = view, alone
        self._tell()

    @property
    def _silent(self) -> bool:
        return time.monotonic() - self._heard_s > SILENT_S_MAX

    def look(self) -> None:
        """Called now and then: watchers hear that the node is silent."""
        if self._silent:
            self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    # ---- what callers ask ----------------------------------------------------------------

    def health(self, name: str) -> Any:
        """Raises KeyError for a name that is not known."""
        good = self._good[name] and not self._silent
        return Reply(status=Reply.SERVING if good else Reply.NOT_SERVING)

    async def watch_health(self, name: str) -> AsyncIterator[Any]:
        """The status now and whenever it changes. Raises KeyError for a name that is not known."""
        told = None
        async for _ in self._changes():
            status = self.health(name)
            if status != told:
                told = status
                yield status

    async def watch_views(self, known: int) -> AsyncIterator[pb.View]:
        """The view now, unless its number is `known`, and every later one. Raises InvalidRequest at a node that is
        alone."""
        if self._alone:
            raise InvalidRequest("this node is in no cluster: it has no view")
        told: pb.View | None = None
        async for _ in self._changes():
            view = self._view
            if view is not None and view is not told and (told or view.number != known):
                yield view
            told = view

    async def _changes(self) -> AsyncIterator[None]:
        """Now, and whenever something has changed."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
