"""Receive the cluster's views by frames: long polls of `follow` on a separate connection."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from kvstore.deadline import Deadline
from kvstore.errors import ProtocolError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.connections import exchange
from kvstore.transports.frames import FrameSocket

ANSWER_S = 5.0  # seconds for an answer, beside the wait that was requested
EARLY_S = 1.0  # an empty answer earlier than this before the end is an error


class Views(Protocol):
    """Views of a member from now on.

    Iterating raises KVStoreError when it can not continue. `in_grpc`: the iterating thread is
    inside gRPC, and a fork must wait until it is not.
    """

    in_grpc: bool

    def __iter__(self) -> Iterator[pb.View]: ...

    def cancel(self) -> object:
        """End the stream, from any thread."""


class FrameViews:
    """A stream of views, to be iterated once; ends after `seconds`, or when it is cancelled.

    A fork does it no harm: the child has an unused copy of the socket, and not the thread.
    """

    in_grpc = False

    def __init__(
        self,
        connection: FrameSocket,
        number: int,
        seconds: float,
        deadline: Deadline,
        raise_named: Callable[[BaseException, Deadline], None],
    ) -> None:
        """Take the connection over and make a first call without waiting.

        A node that does not know the request answers with ProtocolError here. `number` is that of
        the known view, `raise_named` as in `ConnectionPool`.
        """
        self._connection = connection
        self._number = number
        self._end = time.monotonic() + seconds
        self._raise_named = raise_named
        self._cancelled = False
        self._first = self._ask(0.0, deadline)

    def __iter__(self) -> Iterator[pb.View]:
        try:
            view = self._first
            while True:
                if _is_one(view):
                    # The number that this member has sent, even if others have newer views, so that
                    # it is not sent again.
                    self._number = view.number
                    yield view
                left_s = self._end - time.monotonic()
                if left_s <= 0 or self._cancelled:
                    return
                view = self._ask(left_s, Deadline(left_s + ANSWER_S))
                # Otherwise this would loop without a pause
                if not _is_one(view) and self._end - time.monotonic() > EARLY_S:
                    raise ProtocolError("a node did not wait for a view as requested")
        finally:
            self.cancel()
            self._connection.close()

    def _ask(self, wait_s: float, deadline: Deadline) -> pb.View:
        """Request the next view and return it; an empty view means none came in that time."""
        request = pb.FollowRequest(number=self._number, wait_ms=round(1000 * wait_s))
        try:
            self._connection.arm(deadline.remaining())
            view: pb.View = exchange(self._connection, "follow", request)[0]
        except BaseException as error:
            self.cancel()
            self._connection.close()
            self._raise_named(error, deadline)
            raise
        return view

    def cancel(self) -> None:
        """Cancel the stream here and at the node, from any thread.

        The socket is shut down, because forked children may hold it open.
        """
        self._cancelled = True
        self._connection.shutdown()


def _is_one(view: pb.View) -> bool:
    return bool(view.members or view.number)
