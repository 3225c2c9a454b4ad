"""One gRPC call: whose share it counts to, how long it may take, and how it is ended when it must go.

A call costs no thread. It begins as soon as its headers are there, waits for its request no longer than
`REQUEST_S_MAX`, and while it waits it may be asked to leave for one that comes.
"""

import asyncio
import logging
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic_ns
from typing import Any, TypeVar

from kvstore.checksum import CHUNK_NBYTES
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.identities import Principal
from kvstore.threads import begun
from kvstore.tracing import HEADER, NOTHING, Span, parsed, serving
from node.access.access import Access
from node.access.caller import Caller
from node.access.gate import Gate
from node.serve.limits import REQUEST_S_MAX, Places, peer_of
from node.serve.traffic import TIMED, Traffic
from node.tls import shown_to_grpc

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Call:
    """Belongs to the event loop's thread. A context: leaving it gives back its place and its timers."""

    def __init__(self, context: Any, places: Places, stall_s: float) -> None:
        self.context = context
        self.name = context.peer()
        self.peer = _peer(self.name)
        self.ended_because = ""
        self.request_nbytes = 0
        self.writing = False  # still True at the end: a reply that nobody takes stays in gRPC's memory
        self._places = places
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._gone = False
        self._moved_nbytes = 0
        self._begun_ns = 0  # when its request was there
        self._stall: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self.caller = Caller(self.peer, lambda: self._gone, may_wait=False, wire="grpc")

    def identify(self, gate: Gate, op: str) -> None:
        """Once, before it begins: a call ends soon. Raises Unauthenticated."""
        if gate.access.open:
            return
        principal = gate.known(op, self.peer, lambda: _principal(self.context, gate.access))
        at, self.peer = self.peer, gate.access.share(principal) or self.peer
        self.caller = replace(self.caller, peer=self.peer, who=lambda: principal, at=at)

    def __enter__(self) -> "Call":
        """Raises Exhausted if there is no place."""
        self._place = self._places.enter(self.peer, lambda: self._end("it made room for another call of its peer"))
        return self

    def __exit__(self, *_: object) -> None:
        self._place.close()
        self._gone = True
        self.untimed()

    @contextmanager
    def timed(self, traffic: Traffic, op: str) -> Iterator[None]:
        """Around all of a call. A request is timed from when it is there."""
        edge = traffic.edge(self.caller.wire) if op in TIMED else None
        try:
            yield
        except BaseException as error:
            if edge is not None:
                edge.failed(op, error)
            raise
        if edge is not None:
            edge.answered(op, self._begun_ns)

    def traced(self, op: str) -> Span:
        """Around the same, for the request that it is a part of."""
        headers = (value for name, value in self.context.invocation_metadata() or () if name == HEADER)
        return serving(op, parsed(str(next(headers, "")))) if op in TIMED else NOTHING

    # ---- time ----------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """The call's coroutine is cancelled and finds the reason."""
        if self._task is not None and not self.ended_because:
            self.ended_because = reason
            self._gone = True
            self._task.cancel()

    def limit(self, seconds: float, reason: str) -> None:
        """All of the call must be over by then."""
        self._limit = self._loop.call_later(seconds, self._end, reason)

    def untimed(self) -> None:
        """What follows has a limit of its own."""
        for timer in (self._stall, self._limit):
            if timer is not None:
                timer.cancel()

    def watch_stalls(self) -> None:
        """From now on each 256 KiB must be `moved` within `stall_s`: one byte now and then is no progress."""
        self._moved_nbytes = 0
        if self._stall is not None:
            self._stall.cancel()
        reason = f"it moved no {CHUNK_NBYTES >> 10} KiB in {self._stall_s:g} s (stall_s)"
        self._stall = self._loop.call_later(self._stall_s, self._end, reason)

    def moved(self, nbytes: int) -> None:
        self._moved_nbytes += nbytes
        if self._moved_nbytes >= CHUNK_NBYTES:
            self.watch_stalls()

    async def write(self, message: Any) -> None:
        """One reply. Who does not take it in `stall_s` gets no more."""
        reason = f"its reply was not taken in {self._stall_s:g} s (stall_s)"
        waiting = self._loop.call_later(self._stall_s, self._end, reason)
        self.writing = True
        try:
            await self.context.write(message)
            self.writing = False
        finally:
            waiting.cancel()

    # ---- requests ------------------------------------------------------------------------

    async def request(self, messages: AsyncIterator[Any]) -> Any:
        """The first message. While it has not come, the call may be asked to leave."""
        waiting = self._loop.call_later(REQUEST_S_MAX, self._end, f"no request came in {REQUEST_S_MAX:g} s")
        self._place.idle()
        try:
            message = await anext(messages, None)
        finally:
            waiting.cancel()
        if not self._place.busy():
            await asyncio.sleep(REQUEST_S_MAX)  # the cancellation is on its way
        if message is None:
            raise InvalidRequest("the call ended where a request was expected")
        self._begun_ns = monotonic_ns()
        self.request_nbytes = len(message) if isinstance(message, bytes) else message.ByteSize()
        return message

    def stay_idle(self) -> None:
        """It may be asked to leave all along."""
        self._place.idle()

    async def in_thread(self, threads: Executor, function: Callable[..., Result], *arguments: Any) -> Result:
        """What may take long runs beside the loop. A call that is cancelled waits for it, because what it has
        in hand is in use there; `caller.gone` tells it."""
        running = asyncio.wrap_future(_submitted(threads, function, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._gone = True
            while not running.done():
                await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # seen
            raise
        finally:
            del running  # its error has this frame, and with it the request


def _submitted(threads: Executor, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Raises Exhausted where no thread can be started: then it does not happen later either."""
    future = begun(threads, function, *arguments)
    if future is None:
        raise Exhausted("this node can start no more threads; raise its limit of processes")
    return future


def address_of(name: str) -> tuple[str, int]:
    """(host, port) of gRPC's 'ipv4:10.0.0.1:5000', 'ipv6:%5B::1%5D:5000'; of another kind ('', 0)."""
    kind, _, address = urllib.parse.unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else ("", 0)


def _principal(context: Any, access: Access) -> Principal:
    """By a bearer token, or else by the certificate of the connection."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            return access.of_headers(value, ())
    shown = shown_to_grpc(context.auth_context())
    return access.of_headers("", shown.names if shown else ())


def _peer(name: str) -> str:
    host, _ = address_of(name)
    return peer_of(host) if host else name
