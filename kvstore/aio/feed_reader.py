"""Read a feed, which blocks its thread, for an event loop."""

import logging
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvstore.errors import Unavailable
from kvstore.sync import Future, start_thread
from kvstore.tracing import carried

if TYPE_CHECKING:
    from kvstore.results.replies import FeedEvent

log = logging.getLogger(__name__)


class FeedReader:
    """Read the events of a feed in a thread, which ends with this object."""

    def __init__(self, events: "Iterator[FeedEvent]") -> None:
        self._wanted: SimpleQueue[Future[FeedEvent] | None] = SimpleQueue()
        try:
            start_thread(carried(partial(_read, events, self._wanted)), "kvstore-aio-feed")
        except RuntimeError as error:
            raise Unavailable(f"no thread for this feed: {error}") from error

    def read(self) -> "Future[FeedEvent]":
        """Return a future of the next event."""
        event: Future[FeedEvent] = Future()
        self._wanted.put(event)
        return event

    def close(self) -> None:
        """End the thread, after its running call."""
        self._wanted.put(None)

    __del__ = close  # a generator of a closed event loop is dropped without its `finally`


def _read(events: "Iterator[FeedEvent]", wanted: "SimpleQueue[Future[FeedEvent] | None]") -> None:
    """Read an event for each future, until there is None."""
    while (done := wanted.get()) is not None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(next(events))
            except BaseException as error:
                log.debug("a feed ended", exc_info=True)
                done.set_exception(error)
        del done  # its callbacks refer to the generator that waits for it, and that to the queue
