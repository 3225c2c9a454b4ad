"""One gRPC call in a gateway: who makes it, how long it may take, and how it is ended when it must go.

A call costs no thread. It begins as soon as its headers are there, waits for its request no longer than
`REQUEST_S_MAX`, and while it waits it may be asked to leave for one that comes.
"""

import asyncio
import functools
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from kvstore.certificates import names_end_early
from kvstore.checksum import CHUNK_NBYTES
from kvstore.errors import InvalidRequest
from kvstore.tracing import HEADER, parsed
from node.gateway.upstream import on_behalf_of
from node.serve.limits import REQUEST_S_MAX, TRANSFER_NBYTES_PER_S_MIN, Places, peer_of

_names_end_early = functools.lru_cache(256)(names_end_early)  # a connection makes many calls


class Call:
    """Belongs to the event loop's thread. A context: leaving it gives back its place and its timers."""

    def __init__(self, context: Any, places: Places, stall_s: float) -> None:
        self.context = context
        self.address, self.peer = _address_and_peer(context.peer())
        self.ended_because = ""
        self.untaken = False  # the caller does not take a reply: gRPC keeps it until the connection ends
        self._places = places
        self._stall_s = stall_s
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._moved_nbytes = 0
        self._stall: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Call":
        """Raises Exhausted if there is no place."""
        self._place = self._places.enter(self.peer, lambda: self._end("it made room for another call of its peer"))
        return self

    def __exit__(self, *_: object) -> None:
        self._place.close()
        self.untimed()

    @functools.cached_property
    def _headers(self) -> dict[str, Any]:
        """Of several with one name, the first."""
        return dict(reversed(self.context.invocation_metadata() or ()))

    @property
    def on_behalf(self) -> bytes:
        """Who calls, as the node is told: address, the header `authorization`, the certificate's names."""
        names = certificate_names(self.context.auth_context())
        return on_behalf_of(self.address, str(self._headers.get("authorization", "")), names)

    @property
    def trace(self) -> bytes:
        """The trace of the request that this call is a part of, packed for a frame; empty: it came with none."""
        header = self._headers.get(HEADER)
        trace = parsed(str(header)) if header else None
        return b"" if trace is None else trace.packed()

    # ---- time ----------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """The call's coroutine is cancelled and finds the reason. A reply that is on its way goes before: without it
        gRPC takes no status."""
        if self._task is not None and not self.ended_because:
            self.ended_because = reason
            if not self._writing:
                self._task.cancel()

    def _give_up(self, reason: str) -> None:
        """The reply that is on its way is not taken."""
        self.ended_because, self.untaken = self.ended_because or reason, True
        if self._task is not None:
            self._task.cancel()

    def limit(self, seconds: float, reason: str) -> None:
        """All of the call must be over by then."""
        self._limit = self._loop.call_later(seconds, self._end, reason)

    def limit_transfer(self, op: str, nbytes: int) -> None:
        """The page bytes must cross at a lowest rate, and never stall."""
        seconds = nbytes / TRANSFER_NBYTES_PER_S_MIN + self._stall_s
        self.limit(seconds, f"a {op} of {nbytes} bytes was not over after {seconds:.1f} s")
        self._watch_stalls()

    def untimed(self) -> None:
        """What follows has a limit of its own."""
        for timer in (self._stall, self._limit):
            if timer is not None:
                timer.cancel()

    def _watch_stalls(self) -> None:
        """From now on each 256 KiB must be `moved` within `stall_s`: one byte now and then is no progress."""
        self._moved_nbytes = 0
        if self._stall is not None:
            self._stall.cancel()
        reason = f"it moved no {CHUNK_NBYTES >> 10} KiB in {self._stall_s:g} s (stall_s)"
        self._stall = self._loop.call_later(self._stall_s, self._end, reason)

    def moved(self, nbytes: int) -> None:
        self._moved_nbytes += nbytes
        if self._moved_nbytes >= CHUNK_NBYTES:
            self._watch_stalls()

    async def write(self, message: Any) -> None:
        """One reply. Who does not take it in `stall_s` gets no more."""
        reason = f"its reply was not taken in {self._stall_s:g} s (stall_s)"
        waiting = self._loop.call_later(self._stall_s, self._give_up, reason)
        self._writing = True
        try:
            await self.context.write(message)
        finally:
            self._writing = False
            waiting.cancel()
        if self.ended_because:
            raise asyncio.CancelledError

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
        return message

    def stay_idle(self) -> None:
        """It may be asked to leave all along."""
        self._place.idle()


@functools.lru_cache(1024)
def _address_and_peer(name: str) -> tuple[str, str]:
    """(host:port, whose share it counts to) of gRPC's 'ipv4:10.0.0.1:5000', 'ipv6:%5B::1%5D:5000'."""
    kind, _, address = urllib.parse.unquote(name).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "", name
    return address, peer_of(address.rpartition(":")[0].strip("[]"))


def certificate_names(auth: Mapping[str, Iterable[bytes]]) -> tuple[str, ...] | None:
    """Names in the certificate that a call's connection has shown: its first common name, then all its alternative
    names. None: it showed none. Python gets each name as far as its first NUL: a certificate that has one names
    nobody."""
    pem = next(iter(auth.get("x509_pem_cert", ())), b"")
    if not pem:
        return None
    if _names_end_early(pem):
        return ()
    common = list(auth.get("x509_common_name", ()))[:1]
    names = (*common, *auth.get("x509_subject_alternative_name", ()))
    return tuple(filter(None, (name.decode(errors="replace") for name in names)))
