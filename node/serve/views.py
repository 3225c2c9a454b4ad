"""Views of the cluster for those who follow them: each is told the newest, however many it missed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvstore.cluster.view import View
from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from node.peers.membership import Membership


class Views:
    """`watch` belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, membership: Membership) -> None:
        self._loop = loop
        self._membership = membership
        self._watchers: set[asyncio.Event] = set()
        membership.on_view(self._heard)

    def _heard(self, view: View) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def watch(self, known: int) -> AsyncIterator[pb.View]:
        """The view now, unless its number is `known`, and every later one. Raises InvalidRequest at a node that is
        alone."""
        if self._membership.view is None and not self._membership.joining:
            raise InvalidRequest("this node is in no cluster: it has no view")
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            told: View | None = None
            while True:
                view = self._membership.view
                if view is not None and view is not told and (told or view.number != known):
                    yield view.message
                told = view
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def close(self) -> None:
        self._membership.forget(self._heard)
