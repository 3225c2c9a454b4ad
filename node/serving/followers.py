"""Let connections wait for the next view of the cluster (the `follow` frame).

    connection thread   polls its socket and the signal until a view, a hang-up, or the time limit
    a new view          sets the signal, which wakes all waiters; later ones wait for a new signal

Waiters sleep until something happens: nothing polls at an interval.
"""

import os
import select
import threading
import time

from kvstore.cluster.view import View
from kvstore.errors import InvalidRequest
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.frames import FrameSocket
from node.cluster.membership import Membership
from node.serving.limits import FOLLOW_S_MAX, FOLLOWERS_MAX, Budget, make_limit


class Followers:
    """The waiters, and their limit. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._budget = Budget(
            make_limit("followers of views", FOLLOWERS_MAX, "make fewer clients, and share them")
        )
        self._lock = threading.Lock()  # guards the signal
        # for the current waiters; None without any since the last view
        self._signal: _Signal | None = None
        membership.on_view(self._heard)

    @property
    def count(self) -> int:
        """Return how many connections wait."""
        return self._budget.used

    def _heard(self, view: View) -> None:
        with self._lock:
            signal, self._signal = self._signal, None
        if signal is not None:
            signal.set()

    def view(self, known: int) -> pb.View | None:
        """Return the view; None if there is none yet, or its number is `known`.

        Raises InvalidRequest if the node has no cluster.
        """
        view = self._membership.view
        if view is None and not self._membership.joining:
            raise InvalidRequest("this node is in no cluster: it has no view")
        return None if view is None or view.number == known else view.message

    def wait(self, peer: str, known: int, seconds: float, sock: FrameSocket) -> pb.View | None:
        """Wait for a view whose number is not `known`, and return it.

        Return None if none came within `seconds`, at most FOLLOW_S_MAX, or if the client sent
        something or hung up. Raises Exhausted if too many wait already.
        """
        end = time.monotonic() + min(seconds, FOLLOW_S_MAX)
        with self._budget.lent(peer):
            while True:
                # before the check, so that no view is missed in between
                signal = self._next_signal()
                view = self.view(known)
                left_s = end - time.monotonic()
                if view is not None or left_s <= 0 or not signal.wait(sock, left_s):
                    return view

    def _next_signal(self) -> "_Signal":
        """Return the signal that the next view sets."""
        with self._lock:
            if self._signal is None:
                self._signal = _Signal()
            return self._signal

    def close(self) -> None:
        """Stop following the membership."""
        self._membership.forget(self._heard)


class _Signal:
    """An event that is set once, for all that wait for it.

    The last reference closes its descriptor.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, sock: FrameSocket, seconds: float) -> bool:
        """Wait.

        Return True when it is set; False when something happens at the socket, or at the time
        limit.
        """
        if not sock.quiet:
            return False
        news = select.poll()
        news.register(self._fd, select.POLLIN)
        news.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        happened = news.poll(1000 * seconds)
        return any(fd == self._fd for fd, _ in happened)

    def __del__(self) -> None:
        os.close(self._fd)
