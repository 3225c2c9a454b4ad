"""The standard health service. Only names that the node has are known; a watcher keeps one status, not a queue."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Request = health_pb2.HealthCheckRequest
Reply = health_pb2.HealthCheckResponse
BEAT_S = 1.0
LATE_S = 30.0  # a loop that has not turned for so long serves nobody


class Health:
    """`set` may be called by any thread; the rest belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._good: dict[str, bool] = {}
        self._watchers: set[asyncio.Event] = set()
        self._beat_s = time.monotonic()
        loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    @property
    def serving(self) -> bool:
        """Of the whole server, asked by another thread: the loop may turn no more."""
        with self._lock:
            good = self._good.get("", False)
        return good and time.monotonic() - self._beat_s < LATE_S

    def set(self, name: str, good: bool) -> None:
        with self._lock:
            self._good[name] = good
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    def status(self, name: str) -> Any:
        """Raises KeyError for a name that is not known."""
        with self._lock:
            return Reply(status=Reply.SERVING if self._good[name] else Reply.NOT_SERVING)

    async def watch(self, name: str) -> AsyncIterator[Any]:
        """The status now and whenever it changes. Raises KeyError for a name that is not known."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            told = None
            while True:
                status = self.status(name)
                if status != told:
                    told = status
                    yield status
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
