"""Keep what an iterator of the feed has told so far."""

import time
from collections.abc import Callable, Iterator

from kvstore import Namespace
from kvstore.keys import block_part
from kvstore.results import FeedEvent

WAIT_S = 60.0


class ToldBlocks:
    """Replays the events of `Client.feed`; call it with `idle_s` of a fraction of a second."""

    def __init__(self, events: Iterator[FeedEvent]) -> None:
        self._events = events
        self.kinds: list[str] = []
        self.stored: dict[bytes, set[bytes]] = {}

    def next(self) -> FeedEvent:
        event = next(self._events)
        self.kinds.append(event.kind)
        keys = self.stored.setdefault(event.model.id, set())
        if event.kind == "reset":
            self.stored = {}
        elif event.kind == "stored":
            keys.update(event.prefix_hashes)
        elif event.kind == "removed":
            keys.difference_update(event.prefix_hashes)
        return event

    def of(self, space: Namespace) -> set[bytes]:
        return self.stored.get(block_part(space).id, set())

    def until(self, holds: Callable[[], bool]) -> None:
        """Take events until this holds."""
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"not told: {self.kinds[-20:]}"
            self.next()

    def until_kind(self, kind: str) -> None:
        end = time.monotonic() + WAIT_S
        while self.next().kind != kind:
            assert time.monotonic() < end, f"no {kind}: {self.kinds[-20:]}"
