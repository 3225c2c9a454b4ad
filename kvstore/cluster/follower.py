"""Follow a cluster's views on one thread per client; a client of a single node has none."""

import contextlib
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable

# Imported for its fork handlers: a follower's, registered later, must run before them.
import kvstore.transports.grpc_process  # noqa: F401
from kvstore.errors import KVStoreError
from kvstore.log_rate import LogRate
from kvstore.pb import kvstore_pb2 as pb
from kvstore.sync import Event, NoThread, run_in_helper_thread
from kvstore.transports.view_stream import Views

log = logging.getLogger(__name__)
log.addFilter(LogRate())

# After this long another member is followed, so that a member that hangs or is cut off is not
# trusted for ever.
FOLLOW_S = 15.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 10.0  # pause after a member that could not be followed
# Delay before the first stream: many clients start at once, and then the member that sent the hello
# has a connection already.
FIRST_S_MAX = 0.2
FORK_S_MAX = 0.5  # time that a fork waits for the streams to end
LEAVE_S = 0.01  # time that it waits then for gRPC's own thread to end
END_S = 0.5  # time that `close` waits for the thread, which is a daemon


class _Forks:
    """Keep threads out of gRPC while this process forks.

    A fork while a thread is inside gRPC would leave gRPC unusable in the child and here. Followers
    that use frames continue.
    """

    def __init__(self) -> None:
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        os.register_at_fork(before=self._before, after_in_parent=self._after)

    def _before(self) -> None:
        there = [follower for follower in self.followers if follower.running]
        end = time.monotonic() + FORK_S_MAX
        for follower in there:
            follower.pause()
        # No thread enters gRPC any more
        inside = [follower for follower in there if not follower.outside.is_set()]
        for follower in inside:
            follower.outside.wait(max(0.0, end - time.monotonic()))
        if inside:
            time.sleep(LEAVE_S)

    def _after(self) -> None:
        for follower in list(self.followers):
            follower.go_on()


class Follower:
    """Follow a cluster's views on a thread.

    `ask(turn, seconds)` opens the stream of another member at each turn; `heard` receives each
    view. Both are weakly bound methods: the thread ends when their owner does.
    """

    def __init__(
        self, ask: Callable[[int, float], Views], heard: Callable[[pb.View], None]
    ) -> None:
        self._ask, self._heard = weakref.WeakMethod(ask), weakref.WeakMethod(heard)
        self._lock = threading.Lock()
        self._closed = Event()
        self._ended = Event()
        self._thread: threading.Thread | None = None
        self._views: Views | None = None
        self._pid = os.getpid()
        self._may_run = Event()
        self._may_run.set()
        self.outside = Event()  # set while the thread is outside gRPC
        self.outside.set()
        _forks.followers.add(self)

    @property
    def running(self) -> bool:
        """Return whether the thread runs in this process."""
        return self._thread is not None and not self._ended.is_set() and self._pid == os.getpid()

    def pause(self) -> None:
        """Keep the thread from opening gRPC streams and cancel its stream, if any.

        `outside` is set when the thread has left gRPC.
        """
        with self._lock:
            self._may_run.clear()
            views = self._views
        if views is not None and views.in_grpc:
            with contextlib.suppress(NoThread):  # the fork must not wait longer
                run_in_helper_thread(views.cancel)

    def go_on(self) -> None:
        """Let the thread open streams again after `pause`."""
        self._may_run.set()

    def begin(self) -> None:
        """Start the thread; further calls do nothing."""
        if self._thread is not None:
            return
        try:
            run_in_helper_thread(self._start)
        except (
            RuntimeError
        ) as error:  # the thread limit is reached: the next new connection tries again
            log.warning("changes of the cluster are noticed with new connections only: %s", error)

    def _start(self) -> None:
        """Start the thread where no signal handler can raise: it runs or it does not."""
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            thread = threading.Thread(target=self._follow, name="kvstore-views", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Cancel the stream and end the thread."""
        # After a fork the thread is gone, and a thread of the parent may hold the lock
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed.set()
            self._may_run.set()
            thread, views = self._thread, self._views
        if thread is None:
            return
        if views is not None:
            with contextlib.suppress(NoThread):  # it ends by itself within FOLLOW_S
                run_in_helper_thread(views.cancel)
        if threading.get_ident() != thread.ident:
            self._ended.wait(END_S)

    def _follow(self) -> None:
        try:
            self._run()
        finally:
            self._ended.set()

    def _run(self) -> None:
        turn, failures = random.randrange(1 << 16), 0
        self._closed.wait(random.uniform(0.5, 1.0) * FIRST_S_MAX)
        while not self._closed.is_set():
            try:
                if not self._follow_once(turn):
                    return
                failures = 0
            except KVStoreError as error:
                if self._closed.is_set():
                    return
                log.info("views can not be followed: %s", error)
                failures += 1
            except Exception:
                log.exception("views can not be followed")
                failures += 1
            turn += 1
            longest = min(PAUSE_S_MAX, PAUSE_S_MIN * (1 << min(failures, 16)))
            self._closed.wait(random.uniform(0.5, 1.0) * longest if failures else 0.0)

    def _follow_once(self, turn: int) -> bool:
        """Follow one stream to its end; return False if the owner of the callbacks is gone."""
        ask = self._ask()
        if ask is None:
            return False
        views = ask(turn, FOLLOW_S * random.uniform(0.7, 1.3))
        del ask  # let the owner be freed while this waits
        with self._lock:
            self._views = views
        if self._closed.is_set():
            views.cancel()
        if not views.in_grpc:
            return self._heard_all(views)
        self._enter_grpc()
        try:
            return self._heard_all(views)
        except KVStoreError:
            if self._may_run.is_set():
                raise
            return True  # `pause` was called
        finally:
            self.outside.set()

    def _enter_grpc(self) -> None:
        """Wait until the thread may run and mark it as inside gRPC."""
        while True:
            self._may_run.wait()
            with self._lock:
                if self._may_run.is_set():
                    self.outside.clear()
                    return

    def _heard_all(self, views: Views) -> bool:
        for view in views:
            heard = self._heard()
            if heard is None:
                views.cancel()
                return False
            heard(view)
            del heard
        return True


_forks = _Forks()
