"""Publish the feed of one model: a thread reads it, the main thread has the sockets.

While the node can not be reached, routers keep what they know for `AWAY_S`. Then nothing is stored
for them until it answers again.
"""

import contextlib
import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from kvstore.bridge.publisher import Publisher
from kvstore.bridge.stored_blocks import StoredBlocks
from kvstore.client import Client
from kvstore.cluster.feed import AWAY_S
from kvstore.results import FeedEvent

log = logging.getLogger(__name__)

IDLE_S = 1.0
POLL_MS = 50
WAITING_MAX = 64  # events that the feed is ahead
END_S = 0.5  # for the sockets to end
NewContext = Callable[[], "zmq.Context[Any]"]
Say = Callable[..., None]  # (kind, fields): reports to operators


class Bridge:
    """The feed on its way to publishers. The thread that calls `run` has all but the feed."""

    def __init__(
        self, client: Client, model: str, tenant: str, publishers: Sequence[Publisher], say: Say
    ) -> None:
        """Prepare; `tenant`: whose KVs are published."""
        self._client, self._model, self._tenant = client, model, tenant
        self._publishers = publishers
        self._say = say
        self._blocks = StoredBlocks()
        self._waiting: queue.Queue[FeedEvent | BaseException] = queue.Queue(WAITING_MAX)
        self._away = 0  # events of this kind, one after the other
        self._away_since_s = 0.0
        self._hidden = False

    def run(self, safe_point: Callable[[], None]) -> None:
        """Publish without end. Raises what ends the feed, such as a token that is refused.

        `safe_point`: called again and again, to raise what ends the process.
        """
        threading.Thread(target=self._read, daemon=True, name="kvstore-feed").start()
        poller = zmq.Poller()
        for publisher in self._publishers:
            for socket in publisher.sockets:
                poller.register(socket, zmq.POLLIN)
        while True:
            safe_point()
            poller.poll(POLL_MS if self._waiting.empty() else 0)
            self.step()

    def step(self) -> None:
        """Take what has come, and serve readers; does not wait."""
        for event in self._events():
            self.take(event)
        self.tend()

    def tend(self) -> None:
        """Serve readers, and do what is due."""
        for publisher in self._publishers:
            publisher.serve()
        if self._away and time.monotonic() - self._away_since_s >= AWAY_S and not self._hidden:
            self._hidden = True
            for publisher in self._publishers:
                publisher.cleared()
        for publisher in self._publishers:
            if publisher.wants_snapshot() and not self._hidden:
                publisher.snapshot(self._blocks)

    def _read(self) -> None:
        try:
            for event in self._client.feed(self._model, IDLE_S):
                self._waiting.put(event)
        except BaseException as error:
            log.debug("the feed ended", exc_info=True)
            self._waiting.put(error)  # the main thread raises it

    def _events(self) -> Iterator[FeedEvent]:
        for _ in range(WAITING_MAX):
            try:
                event = self._waiting.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    def take(self, event: FeedEvent) -> None:
        """Publish an event."""
        if event.kind == "away":
            self._lost(event.text)
            return
        self._found(event)
        kv, tokens, hashes = event.model.id, event.model.page_tokens, event.prefix_hashes
        if event.kind == "reset":
            self._blocks.reset()
            for publisher in self._publishers:
                publisher.cleared()
        elif event.kind == "ready":
            self._say("ready", blocks=len(self._blocks))
        elif event.model.tenant != self._tenant:
            return
        elif event.kind == "stored":
            if new := self._blocks.stored(kv, tokens, hashes):
                for publisher in self._publishers:
                    publisher.stored(tokens, new)
        elif event.kind == "removed" and (gone := self._blocks.removed(kv, hashes)):
            for publisher in self._publishers:
                publisher.removed(gone)

    def _lost(self, text: str) -> None:
        self._away += 1
        if self._away == 1:
            self._away_since_s = time.monotonic()
            self._say("away", text=text)

    def _found(self, event: FeedEvent) -> None:
        """Go on after an outage. Of a cluster's member that is away, only one event comes."""
        if self._away > 1:
            self._say("back", blocks=len(self._blocks))
        self._away = 0
        if self._hidden:
            self._hidden = False
            if event.kind != "reset":
                for publisher in self._publishers:
                    publisher.snapshot(self._blocks)


def publish(
    client: Client,
    model: str,
    tenant: str,
    make: Callable[[NewContext], Sequence[Publisher]],
    say: Say,
    safe_point: Callable[[], None],
) -> None:
    """Publish a model's feed by the publishers that `make` makes, without end.

    ZMQ looks names up in a context's own thread, and meanwhile that thread sends nothing and does
    not end. So each router that may have a name needs a context of its own.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # refused where the system allows fewer now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each reader
    contexts: list[zmq.Context[Any]] = []

    def new_context() -> "zmq.Context[Any]":
        contexts.append(zmq.Context())
        return contexts[-1]

    publishers: Sequence[Publisher] = ()
    try:
        publishers = make(new_context)
        if listening := [address for one in publishers for address in one.addresses]:
            say("listening", addresses=listening)
        Bridge(client, model, tenant, publishers, say).run(safe_point)
    finally:
        for one in publishers:
            one.close()
        ending = threading.Thread(target=_end, args=(contexts,), daemon=True)
        ending.start()
        ending.join(END_S)


def _end(contexts: "Sequence[zmq.Context[Any]]") -> None:
    for context in contexts:
        context.destroy(linger=0)
