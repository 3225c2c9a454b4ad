"""Ask several nodes at the same time from one thread: send to all, then receive as they answer.

    send A, send B, send C --> poll --> receive B, receive A --> C: until its deadline

Threads hand the interpreter to each other, which costs more than a small request. Only calls that
wait for nothing but replies are made here: over connections that are idle now, to nodes that did
not fail, with a namespace that they know. `NeedsThread` says that a call would have to wait
otherwise; nothing of it was done.
"""

import select
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore.pb import kvstore_pb2 as pb
from kvstore.steps import Steps, run_async
from kvstore.transports.bulk import BulkWire
from kvstore.transports.channel import ConnectionLease, NodeChannel, NodeConnection
from kvstore.transports.connections import NeedsThread
from kvstore.transports.frames import FrameSocket

Answer = TypeVar("Answer")
# A call as steps; its `connection` is a `PolledConnection`
AskSteps = Callable[[Any, Deadline], Steps[Answer]]
# A call at a node: as steps, and as a function for a thread
NodeCall = tuple[NodeChannel, AskSteps[Answer], Callable[[], Answer]]
RunParallel = Callable[[Sequence[Callable[[], Answer]]], Sequence[Answer | KVStoreError]]

LATE_S = 0.01  # for a reply that is there when the deadline ends
POLL_S_MAX = 86400.0  # `poll` takes no more than 24 days


class PolledConnection:
    """A node's connection for calls of steps; each I/O waits for the reply only."""

    def __init__(self, connection: NodeConnection, wire: BulkWire) -> None:
        self.limits: pb.Limits = connection.limits
        self._wire = wire

    @property
    def wire(self) -> "PolledConnection":
        """Return what makes calls; no attribute, which would leave garbage after each call."""
        return self

    def call(self, op: str, request: Any, deadline: Deadline) -> Awaitable[Any]:
        """Send a request; await its reply."""
        return self._wire.reply(op, request, deadline)


def may_ask(channel: NodeChannel, namespace: Namespace) -> bool:
    """Return whether a call to a node waits for nothing but the reply, as far as is known."""
    connection = channel.connection
    return (
        connection is not None
        and not channel.failing
        and namespace.digest in connection.opened
        and isinstance(connection.wire, BulkWire)
        and connection.wire.is_plain
    )


def call_polled(
    calls: Sequence[NodeCall[Answer]],
    run_parallel: RunParallel[Answer],
    namespace: Namespace,
    limit: Deadline,
) -> list[Answer | KVStoreError]:
    """Make a call at each node, and return what each returned or raised.

    Calls that need a thread are made by `run_parallel`, while others wait for their replies.
    """
    asked = _PolledCalls(calls, namespace, limit)
    try:
        asked.send()
        asked.receive(to_end=False)
        while numbers := asked.pop_left():
            rest: list[Callable[[], Any]] = [asked.receive] if asked.waiting else []
            made = run_parallel([*rest, *(calls[number][2] for number in numbers)])
            asked.found.update(zip(numbers, made[len(rest) :], strict=True))
    finally:
        asked.close()
    return [asked.found[number] for number in range(len(calls))]


class _PolledCalls(Generic[Answer]):
    """Calls of steps, for one thread at a time; `found`: what each returned or raised.

    `waiting`: calls that wait for their replies, by descriptor: number and socket.
    """

    def __init__(
        self, calls: Sequence[NodeCall[Answer]], namespace: Namespace, limit: Deadline
    ) -> None:
        self.found: dict[int, Answer | KVStoreError] = {}
        self.waiting: dict[int, tuple[int, FrameSocket]] = {}
        self._left: list[int] = []
        self._limit = limit
        self._poll = select.poll()
        self._jobs = [_polled_call(channel, ask, namespace, limit) for channel, ask, _ in calls]

    def send(self) -> None:
        """Send the first request of each call."""
        for number in range(len(self._jobs)):
            self._go_on(number)

    def receive(self, to_end: bool = True) -> None:
        """Receive replies as they arrive, and send further requests, until no call waits.

        Or, without `to_end`, until a call needs a thread.
        """
        while self.waiting and (to_end or not self._left):
            ready = [fd for fd, _ in self._poll.poll(_left_ms(self._limit))]
            if not ready and not self._limit.passed:
                continue
            for fd in ready or list(self.waiting):
                number, sock = self.waiting.pop(fd)
                self._poll.unregister(fd)
                if ready and self._limit.passed:
                    sock.arm(LATE_S)
                self._go_on(number)

    def pop_left(self) -> list[int]:
        """Return the calls that need a thread, each once."""
        left, self._left = self._left, []
        return left

    def close(self) -> None:
        """End the calls: after an interrupt their connections can not be used again."""
        for job in self._jobs:
            job.close()

    def _go_on(self, number: int) -> None:
        try:
            sock = self._jobs[number].send(None)
            fd = sock.fileno()
            self.waiting[fd] = number, sock
            self._poll.register(fd, select.POLLIN | select.POLLRDHUP)
        except StopIteration as end:
            self.found[number] = end.value
        except KVStoreError as error:
            self.found[number] = error
        except NeedsThread:
            self._left.append(number)


def _left_ms(limit: Deadline) -> int:
    """Return how long to poll: not before the deadline has passed, if that is soon."""
    left_s = min(POLL_S_MAX, limit.left())
    return 1 + int(1000 * left_s) if left_s > 0 else 0


# These are no `async def`: Python warns of one that an interrupt drops before its first step.
@types.coroutine
def _polled_call(
    channel: NodeChannel, ask: AskSteps[Answer], namespace: Namespace, limit: Deadline
) -> Generator[FrameSocket, None, Answer]:
    steps = channel.steps(_connect(channel), _open, _work(ask), namespace, limit)
    answer: Answer = yield from run_async(steps)
    return answer


def _connect(channel: NodeChannel) -> Callable[[Deadline], Any]:
    @types.coroutine
    def connect(deadline: Deadline) -> Generator[None, None, ConnectionLease]:
        yield from ()
        if lease := channel.lease_now():
            return lease
        raise NeedsThread

    return connect


def _open(connection: NodeConnection, namespace: Namespace, deadline: Deadline) -> Awaitable[None]:
    raise NeedsThread


def _work(ask: AskSteps[Answer]) -> Callable[[NodeConnection, Deadline], Any]:
    @types.coroutine
    def work(
        connection: NodeConnection, deadline: Deadline
    ) -> Generator[FrameSocket, None, Answer]:
        if not isinstance(connection.wire, BulkWire):
            raise NeedsThread
        answer: Answer = yield from run_async(
            ask(PolledConnection(connection, connection.wire), deadline)
        )
        return answer

    return work
