"""How often one address may call over gRPC without being known, at a node that asks who calls: health checks, unknown
methods, and what is refused. Each answer takes a moment of the one event loop that serves everybody's calls, so beyond
that a caller waits for his, and then his connection is hung up."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable

from kvstore.errors import Unauthenticated
from node.access.bucket import Bucket
from node.access.gate import Gate
from node.serve.calls import Call

KNOCKS_PER_S = 20.0
KNOCKS_AT_ONCE = 100.0
ADDRESSES_MAX = 4096  # that are remembered
WAIT_S = 5.0
WAITING_MAX = 4096  # calls; more are answered at once


class Knocks:
    """Belongs to the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: OrderedDict[str, Bucket] = OrderedDict()  # by address
        self._waiting = 0
        self._closed = asyncio.Event()

    def welcome(self, call: Call, gate: Gate, op: str) -> bool:
        """Makes him known, unless `op` is empty: what everybody may ask. False: one who is not known and has called too
        often. Raises Unauthenticated."""
        if gate.access.open:
            return True
        try:
            if op:
                call.identify(gate, op)
                return True
        except Unauthenticated:
            if self.hear(call.peer):
                raise
            return False
        return self.hear(call.peer)

    def hear(self, peer: str) -> bool:
        """Whether that is still one that is answered."""
        now = self._clock()
        bucket = self._left.setdefault(peer, Bucket(KNOCKS_AT_ONCE, now))
        self._left.move_to_end(peer)
        if len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)
        return bucket.take(KNOCKS_PER_S, KNOCKS_AT_ONCE, now)

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
