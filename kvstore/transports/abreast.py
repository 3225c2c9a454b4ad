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
from typing import Any, TypeVar

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
# A call as steps; its `link` is a `ReplyLink`
AskSteps = Callable[[Any, Deadline], Steps[Answer]]

LATE_S = 0.01  # for a reply that is there when the deadline ends


class ReplyLink:
    """A node's connection for calls of steps; each I/O waits for the reply only."""

    def __init__(self, link: NodeConnection, wire: BulkWire) -> None:
        self.limits: pb.Limits = link.limits
        self.wire = self
        self._wire = wire

    def call(self, op: str, request: Any, deadline: Deadline) -> Awaitable[Any]:
        """Send a request; await its reply."""
        return self._wire.reply(op, request, deadline)


def may_ask(channel: NodeChannel, namespace: Namespace) -> bool:
    """Return whether a call to a node waits for nothing but the reply, as far as is known."""
    link = channel.connection
    return (
        link is not None
        and not channel.failing
        and namespace.digest in link.opened
        and isinstance(link.wire, BulkWire)
        and link.wire.is_plain
    )


def ask_abreast(
    calls: Sequence[tuple[NodeChannel, AskSteps[Answer]]], namespace: Namespace, limit: Deadline
) -> list[Answer | KVStoreError | NeedsThread]:
    """Make a call at each node, and return what each returned or raised."""
    found: dict[int, Answer | KVStoreError | NeedsThread] = {}
    waiting: dict[int, tuple[int, FrameSocket]] = {}  # by descriptor: number and connection
    jobs = [_asked(channel, ask, namespace, limit) for channel, ask in calls]
    poll = select.poll()

    def go_on(number: int) -> None:
        try:
            connection = jobs[number].send(None)
            fd = connection.fileno()
            waiting[fd] = number, connection
            poll.register(fd, select.POLLIN | select.POLLRDHUP)
        except StopIteration as end:
            found[number] = end.value
        except (KVStoreError, NeedsThread) as error:
            found[number] = error

    try:
        for number in range(len(jobs)):
            go_on(number)
        while waiting:
            ready = [fd for fd, _ in poll.poll(_left_ms(limit))]
            for fd in ready or list(waiting):
                number, connection = waiting.pop(fd)
                poll.unregister(fd)
                if ready and limit.passed:
                    connection.arm(LATE_S)
                go_on(number)
    finally:
        for job in jobs:  # after an interrupt: their connections can not be used again
            job.close()
    return [found[number] for number in range(len(jobs))]


def _left_ms(limit: Deadline) -> int:
    return 0 if limit.passed else 1 + int(1000 * limit.remaining())


@types.coroutine
def _asked(
    channel: NodeChannel, ask: AskSteps[Answer], namespace: Namespace, limit: Deadline
) -> Generator[FrameSocket, None, Answer]:
    steps = channel.steps(_connect(channel), _open, _work(ask), namespace, limit)
    answer: Answer = yield from run_async(steps)
    return answer


def _connect(channel: NodeChannel) -> Callable[[Deadline], Any]:
    async def connect(deadline: Deadline) -> ConnectionLease:
        if lease := channel.lease_now():
            return lease
        raise NeedsThread

    return connect


async def _open(link: NodeConnection, namespace: Namespace, deadline: Deadline) -> None:
    raise NeedsThread


def _work(ask: AskSteps[Answer]) -> Callable[[NodeConnection, Deadline], Any]:
    async def work(link: NodeConnection, deadline: Deadline) -> Answer:
        if not isinstance(link.wire, BulkWire):
            raise NeedsThread
        return await run_async(ask(ReplyLink(link, link.wire), deadline))

    return work


__all__ = ["NeedsThread", "ReplyLink", "ask_abreast", "may_ask"]
