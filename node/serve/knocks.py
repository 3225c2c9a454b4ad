"""How often one address may call over gRPC without being known, at a node that asks who calls: health checks, unknown
methods, and what is refused. Each answer takes a moment of the one event loop that serves everybody's calls, so beyond
that a caller waits for his, and then his connection is hung up. An address that does not wait, and connects and calls
again and again, is banned (`node.serve.bans`), whoever it is.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import Unauthenticated
from node.access.bucket import Bucket
from node.access.gate import Gate
from node.serve.calls import Call

KNOCKS_PER_S = 20.0
KNOCKS_AT_ONCE = 100.0
BORNE_PER_S = 200.0  # these calls, and new connections of whoever it is; an address with more of them is banned
BORNE_AT_ONCE = 500.0
ADDRESSES_MAX = 4096  # that are remembered, and as many connections
WAIT_S = 5.0
WAITING_MAX = 4096  # calls; more are answered at once

Value = TypeVar("Value")


class Knocks:
    """Belongs to the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: OrderedDict[str, tuple[Bucket, Bucket]] = OrderedDict()  # by address: answers, and what is borne
        self._met: OrderedDict[str, None] = OrderedDict()  # connections, as gRPC calls them
        self._waiting = 0
        self.ban: Callable[[str], None] = lambda peer: None
        self._closed = asyncio.Event()

    def welcome(self, call: Call, gate: Gate, op: str) -> bool:
        """Makes him known, unless `op` is empty: what everybody may ask. False: one who is not known and has called too
        often. Raises Unauthenticated."""
        if gate.access.open:
            return True
        self.meet(call.name, call.peer)
        try:
            if op:
                call.identify(gate, op)
                return True
        except Unauthenticated:
            if self.hear(call.peer):
                raise
            return False
        return self.hear(call.peer)

    def meet(self, name: str, peer: str) -> None:
        """A call of the connection `name` of that address."""
        if name not in self._met:
            self._bear(peer)
        _remember(self._met, name, None)

    def hear(self, peer: str) -> bool:
        """Whether that is still one that is answered."""
        self._bear(peer)
        return self._of(peer)[0].take(KNOCKS_PER_S, KNOCKS_AT_ONCE, self._clock())

    def _bear(self, peer: str) -> None:
        if not self._of(peer)[1].take(BORNE_PER_S, BORNE_AT_ONCE, self._clock()):
            self.ban(peer)

    def _of(self, peer: str) -> tuple[Bucket, Bucket]:
        now = self._clock()
        return _remember(self._left, peer, (Bucket(KNOCKS_AT_ONCE, now), Bucket(BORNE_AT_ONCE, now)))

    async def wait(self) -> None:
        if self._waiting >= WAITING_MAX:
            return
        self._waiting += 1
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), WAIT_S)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed.set()


def _remember(known: OrderedDict[str, Value], name: str, new: Value) -> Value:
    """What is known of it, or else the new one; who was asked for longest ago is forgotten."""
    value = known.setdefault(name, new)
    known.move_to_end(name)
    if len(known) > ADDRESSES_MAX:
        known.popitem(last=False)
    return value
