"""The connections of browsers: one thread that waits for nobody, two beside it for what takes a moment, and two for
reads of the disk: when that hangs they hang with it, and all else is told and done as ever.

The metrics' thread hands a connection over when its head asks for the console; from then on it is here. A watcher is
told what is new each `EVERY_S`, made once for all who are told the same; who has not taken the event before gets none,
and is hung up if he goes on not taking it. All threads begin with the first connection.
"""

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from kvstore.errors import Exhausted, KVStoreError
from kvstore.threads import begun
from node.console.exchange import Answer, Refused, Request, Watch, Work, error_reply, event, parse, stream_head
from node.serve.limits import CONSOLE_CALLS_MAX, CONSOLE_MAX, CONSOLE_S_MAX, WATCHERS_MAX, Budget, Place, Places, cap
from node.serve.metrics_server import Asker

log = logging.getLogger(__name__)

EVERY_S = 2.0
STALL_S = 15.0  # a watcher who does not take one event in this time
STOP_S = 2.0  # what is at work gets to end
THREADS = 2
_READ_NBYTES = 16 << 10
Respond = Callable[[Request, Asker], Answer]
Result = TypeVar("Result")


class _Visitor:
    """One connection. `end`: when it has to be over, or to have taken what it is sent."""

    def __init__(self, sock: socket.socket, asker: Asker, data: bytes) -> None:
        self.sock = sock
        self.asker = asker
        self.data = data
        self.out = memoryview(b"")
        self.end: float | None = time.monotonic() + CONSOLE_S_MAX
        self.over = False
        self.work: Future[bytes] | None = None
        self.watch: Watch | None = None
        self.place: Place | None = None

    def leave(self) -> None:
        self.over = True

    def gone(self) -> bool:
        return self.over


class ConsoleServer:
    """`take` is called by another thread. `stop` ends all of it."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._places = Places(cap("console connections", CONSOLE_MAX, "close some pages"))
        self._watchers = Budget(cap("console watchers", WATCHERS_MAX, "close some pages"))
        self._calls = Budget(cap("console calls", CONSOLE_CALLS_MAX, "wait for those that run"))
        self._reads = Budget(cap("console reads", CONSOLE_CALLS_MAX, "wait for those that run"))
        self._pool = ThreadPoolExecutor(THREADS, "console-work")
        self._readers = ThreadPoolExecutor(THREADS, "console-read")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._new: deque[_Visitor] = deque()
        self._visitors: dict[int, _Visitor] = {}
        self._running: set[Future[Any]] = set()  # also of visitors who have left
        self._next_s = 0.0  # when watchers are told again
        self._stopping = False
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- from other threads --------------------------------------------------------------

    def take(self, sock: socket.socket, asker: Asker, data: bytes) -> None:
        """A connection, and what it has sent so far."""
        visitor = _Visitor(sock, asker, data)
        with self._lock:
            if self._stopping or not self._started():
                sock.close()
                return
            self._new.append(visitor)
        self._nudge()

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="console", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can be started now
                return False
            self._thread = thread
        return True

    def _nudge(self) -> None:
        with self._lock:
            if not self._closed:  # its number is somebody else's then
                os.eventfd_write(self._wake, 1)

    def begun(self, do: Callable[[], Result]) -> "Future[Result] | None":
        """In a thread beside, if that ends; None: not now."""
        return self._begun(self._pool, do)

    def _begun(self, pool: ThreadPoolExecutor, do: Callable[[], Result]) -> "Future[Result] | None":
        future = begun(pool, do)
        if future is not None:
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        return future

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        if self._thread is not None:
            self._nudge()
            self._thread.join()
        for visitor in [*self._visitors.values(), *self._new]:
            self._close(visitor)
        for pool in (self._pool, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        wait(list(self._running), STOP_S)
        with self._lock:
            self._closed = True
            os.close(self._wake)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:
                log.exception("console: serving failed")
                threading.Event().wait(0.1)

    def _turn(self) -> None:
        for fd, events in self._poll.poll(self._wait_ms()):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif visitor := self._visitors.get(fd):
                self._step(visitor, events)
        while self._new:
            self._admit(self._new.popleft())
        for visitor in list(self._visitors.values()):
            if visitor.work is not None and visitor.work.done():
                self._deliver(visitor, visitor.work)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._tell()
        for fd, visitor in list(self._visitors.items()):
            if visitor.over or (visitor.end is not None and visitor.end <= time.monotonic()):
                self._poll.unregister(fd)
                del self._visitors[fd]
                self._close(visitor)

    def _wait_ms(self) -> float | None:
        ends = [visitor.end for visitor in self._visitors.values() if visitor.end is not None]
        if any(visitor.watch for visitor in self._visitors.values()):
            ends.append(self._next_s)
        return max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None

    def _admit(self, visitor: _Visitor) -> None:
        try:
            visitor.place = self._places.enter(visitor.asker.peer, visitor.leave)
        except Exhausted as error:
            with contextlib.suppress(OSError), visitor.sock:
                visitor.sock.send(error_reply(error))
            return
        visitor.place.idle()  # all but watchers may be asked to leave: the oldest does if too many come
        self._visitors[visitor.sock.fileno()] = visitor
        self._poll.register(visitor.sock, select.POLLIN)
        self._step(visitor, 0)

    def _close(self, visitor: _Visitor) -> None:
        visitor.over = True
        visitor.sock.close()
        if visitor.place is not None:
            visitor.place.close()
            visitor.place = None  # which knows it: together they would keep megabytes until a collection
        self._stop_watch(visitor)

    def _stop_watch(self, visitor: _Visitor) -> None:
        if visitor.watch is not None:
            self._watchers.give(visitor.watch.peer)
            visitor.watch = None

    def _step(self, visitor: _Visitor, events: int) -> None:
        """What can be done without waiting."""
        try:
            if visitor.work is not None or (visitor.watch is not None and not visitor.out.nbytes):
                self._look_whether_there(visitor, events)
            elif visitor.out.nbytes:
                self._write(visitor)
            else:
                self._read(visitor)
        except ssl.SSLWantReadError:
            self._poll.modify(visitor.sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            self._poll.modify(visitor.sock, select.POLLOUT)
        except BlockingIOError:
            pass
        except OSError:
            visitor.over = True

    def _look_whether_there(self, visitor: _Visitor, events: int) -> None:
        """Who has asked has nothing more to say: what still comes from him is his end, or a breach."""
        if events:
            visitor.over = True

    def _read(self, visitor: _Visitor) -> None:
        try:
            while (request := parse(visitor.data)) is None:
                data = visitor.sock.recv(_READ_NBYTES)
                if not data:
                    visitor.over = True
                    return
                visitor.data += data
        except Refused as refused:
            self._send(visitor, refused.answer)
            return
        visitor.data = b""
        self._take_up(visitor, request)

    def _take_up(self, visitor: _Visitor, request: Request) -> None:
        try:
            _guarded(lambda: self._begin(visitor, self._respond(request, visitor.asker)))
        except Refused as refused:
            self._send(visitor, refused.answer)
        except KVStoreError as error:
            self._send(visitor, error_reply(error))

    def _begin(self, visitor: _Visitor, answer: Answer) -> None:
        if isinstance(answer, bytes):
            self._send(visitor, answer)
        elif isinstance(answer, Work):
            self._begin_work(visitor, answer)
        else:
            self._begin_watch(visitor, answer)

    # ---- work ----------------------------------------------------------------------------

    def _begin_work(self, visitor: _Visitor, work: Work) -> None:
        calls, pool = (self._reads, self._readers) if work.reads else (self._calls, self._pool)
        calls.take(work.peer)

        def do() -> bytes:
            try:
                return _guarded(lambda: work.do(visitor.gone))
            except KVStoreError as error:
                return error_reply(error)
            finally:
                calls.give(work.peer)

        visitor.work = self._begun(pool, do)
        if visitor.work is None:
            calls.give(work.peer)
            raise Exhausted("this node can start no more threads; raise its limit of processes")
        visitor.work.add_done_callback(lambda _: self._nudge())
        visitor.end = None  # the service bounds what it does
        self._poll.modify(visitor.sock, select.POLLIN | select.POLLRDHUP)

    def _deliver(self, visitor: _Visitor, work: "Future[bytes]") -> None:
        visitor.work = None
        visitor.end = time.monotonic() + CONSOLE_S_MAX
        self._send(visitor, work.result())

    # ---- watchers ------------------------------------------------------------------------

    def _begin_watch(self, visitor: _Visitor, watch: Watch) -> None:
        self._watchers.take(watch.peer)
        visitor.watch = watch  # which gives it back, whatever comes
        # The kernel takes many events for one who takes none, or has gone without a word: it says so after this time.
        visitor.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_S))
        try:
            first = watch.begin()
        except BaseException:
            self._stop_watch(visitor)
            raise
        if self._watchers.used == 1:
            self._next_s = time.monotonic() + EVERY_S
        assert visitor.place is not None
        visitor.place.busy()
        self._send(visitor, stream_head() + first)

    def _tell(self) -> None:
        for visitor in self._visitors.values():
            if visitor.watch is None or visitor.over or visitor.out.nbytes:
                continue
            try:
                self._send(visitor, _guarded(visitor.watch.go_on))
            except KVStoreError as error:
                self._send(visitor, event("end", error_reply(error).partition(b"\r\n\r\n")[2].decode()))
                visitor.end = time.monotonic() + CONSOLE_S_MAX
                self._stop_watch(visitor)
                visitor.over = not visitor.out.nbytes

    # ---- send ----------------------------------------------------------------------------

    def _send(self, visitor: _Visitor, data: bytes) -> None:
        visitor.out = memoryview(data)
        if visitor.watch is not None:
            visitor.end = time.monotonic() + STALL_S
        self._poll.modify(visitor.sock, select.POLLOUT)
        self._step(visitor, 0)

    def _write(self, visitor: _Visitor) -> None:
        while visitor.out.nbytes:
            visitor.out = visitor.out[visitor.sock.send(visitor.out) :]
        if visitor.watch is None:
            visitor.over = True
        else:
            visitor.end = None
            self._poll.modify(visitor.sock, select.POLLIN | select.POLLRDHUP)


def _guarded(do: Callable[[], Result]) -> Result:
    """What nobody expected is logged, and ends the one request."""
    try:
        return do()
    except (KVStoreError, Refused):
        raise
    except Exception as error:
        log.exception("console: a call failed")
        raise KVStoreError(f"it failed inside the node ({type(error).__name__}); its log says more") from error
