"""Track one gRPC call in a gateway: its caller, its time limits, and how it is ended early.

A call costs no thread. It starts when its headers arrive and waits at most `REQUEST_S_MAX` for its
request. While it waits it is idle, and a new call may evict it.
"""

import asyncio
import functools
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from kvstore.checksum import CHUNK_NBYTES
from kvstore.errors import InvalidRequest
from kvstore.security.x509 import names_end_early
from kvstore.tracing import HEADER, parsed
from node.gateway.upstream import on_behalf_of
from node.serving.limits import REQUEST_S_MAX, TRANSFER_NBYTES_PER_S_MIN, ConnectionLimiter, peer_of

_names_end_early = functools.lru_cache(256)(names_end_early)  # a connection makes many calls


class Call:
    """The caller, the slot and the timers of one call.

    Use it from the event loop's thread only. As a context manager, leaving it releases the slot and
    stops the timers.
    """

    def __init__(self, context: Any, limiter: ConnectionLimiter, stall_s: float) -> None:
        self.context = context
        self.address, self.peer = _address_and_peer(context.peer())
        self.ended_because = ""
        # the caller does not take a reply: gRPC keeps it until the connection ends
        self.untaken = False
        self._limiter = limiter
        self._stall_s = stall_s
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._moved_nbytes = 0
        self._stall: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Call":
        """Take a slot.

        Raises Exhausted if all are busy.
        """
        self._slot = self._limiter.enter(
            self.peer, lambda: self._end("it was evicted for another call of its peer")
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._slot.close()
        self.untimed()

    @functools.cached_property
    def _headers(self) -> dict[str, Any]:
        """Return the headers by name.

        If a name is repeated, its first value counts.
        """
        return dict(reversed(self.context.invocation_metadata() or ()))

    @property
    def on_behalf(self) -> bytes:
        """Pack the caller for the node: address, authorization header, certificate names."""
        names = certificate_names(self.context.auth_context())
        return on_behalf_of(self.address, str(self._headers.get("authorization", "")), names)

    @property
    def trace(self) -> bytes:
        """Return the trace context of the caller, packed for a frame; empty if it has none."""
        header = self._headers.get(HEADER)
        trace = parsed(str(header)) if header else None
        return b"" if trace is None else trace.packed()

    # ---- time ----------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Cancel the call for this reason, which its handler reports.

        A reply that is being written goes out first: gRPC takes no status before.
        """
        if self._task is not None and not self.ended_because:
            self.ended_because = reason
            if not self._writing:
                self._task.cancel()

    def _give_up(self, reason: str) -> None:
        """Cancel the call during a write that the caller does not read."""
        self.ended_because, self.untaken = self.ended_because or reason, True
        if self._task is not None:
            self._task.cancel()

    def limit(self, seconds: float, reason: str) -> None:
        """End the call after so many seconds."""
        self._limit = self._loop.call_later(seconds, self._end, reason)

    def limit_transfer(self, op: str, nbytes: int) -> None:
        """Limit the transfer of page bytes: a minimum rate for all of it, and no stall."""
        seconds = nbytes / TRANSFER_NBYTES_PER_S_MIN + self._stall_s
        self.limit(seconds, f"a {op} of {nbytes} bytes did not end within {seconds:.1f} s")
        self._watch_stalls()

    def untimed(self) -> None:
        """Stop both timers.

        The next phase has a limit of its own.
        """
        for timer in (self._stall, self._limit):
            if timer is not None:
                timer.cancel()

    def _watch_stalls(self) -> None:
        """Restart the stall timer: `moved` must count 256 KiB in each `stall_s`.

        A few bytes now and then are no progress.
        """
        self._moved_nbytes = 0
        if self._stall is not None:
            self._stall.cancel()
        reason = f"it moved no {CHUNK_NBYTES >> 10} KiB in {self._stall_s:g} s (stall_s)"
        self._stall = self._loop.call_later(self._stall_s, self._end, reason)

    def moved(self, nbytes: int) -> None:
        """Count page bytes that were transferred."""
        self._moved_nbytes += nbytes
        if self._moved_nbytes >= CHUNK_NBYTES:
            self._watch_stalls()

    async def write(self, message: Any) -> None:
        """Write one reply.

        End the call if the caller does not read it within `stall_s`.
        """
        reason = f"its reply was not read within {self._stall_s:g} s (stall_s)"
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
        """Return the first message.

        Until it has arrived the call is idle, and may be evicted.
        """
        waiting = self._loop.call_later(
            REQUEST_S_MAX, self._end, f"no request came in {REQUEST_S_MAX:g} s"
        )
        self._slot.idle()
        try:
            message = await anext(messages, None)
        finally:
            waiting.cancel()
        if not self._slot.busy():
            await asyncio.sleep(REQUEST_S_MAX)  # the cancellation is on its way
        if message is None:
            raise InvalidRequest("the call ended where a request was expected")
        return message

    def stay_idle(self) -> None:
        """Mark the call as idle for all its life: it may be evicted at any time."""
        self._slot.idle()


@functools.lru_cache(1024)
def _address_and_peer(name: str) -> tuple[str, str]:
    """Return (host:port, key for limits) for gRPC's 'ipv4:10.0.0.1:5000' and the like."""
    kind, _, address = urllib.parse.unquote(name).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "", name
    return address, peer_of(address.rpartition(":")[0].strip("[]"))


def certificate_names(auth: Mapping[str, Iterable[bytes]]) -> tuple[str, ...] | None:
    """Return the names in the client certificate of a connection; None if it showed none.

    First the first common name, then all alternative names. Python gets each name up to its first
    NUL, so a certificate with a NUL in a name has no names.
    """
    pem = next(iter(auth.get("x509_pem_cert", ())), b"")
    if not pem:
        return None
    if _names_end_early(pem):
        return ()
    common = list(auth.get("x509_common_name", ()))[:1]
    names = (*common, *auth.get("x509_subject_alternative_name", ()))
    return tuple(filter(None, (name.decode(errors="replace") for name in names)))
