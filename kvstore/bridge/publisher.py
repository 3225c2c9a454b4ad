"""Publish batches over ZMQ, to readers that come late, too.

    XPUB    [topic][sequence, 8 bytes big-endian][batch]
    ROUTER  a request [""][first sequence] gets these frames from there on, then sequence -1

The replay buffer begins with a snapshot, so that it is complete at any time. A new subscriber, and
a buffer that is full, cause another one: it begins with the event that clears.

All queues share the bytes of a batch. A reader that takes nothing for `UNREAD_S` is disconnected.
"""

import contextlib
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from kvstore.bridge.stored_blocks import StoredBlocks
from kvstore.bridge.wires import Event, Wire
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.log_rate import LogRate
from kvstore.transports.unix_sockets import remove_stale

log = logging.getLogger(__name__)
log.addFilter(LogRate())

HASHES_AT_ONCE = 1024  # of a batch
BATCHES_MAX = 10_000  # kept since the last snapshot
HWM = 10_000  # batches that wait for a slow subscriber; then some are lost, which it notices
UNREAD_S = 30.0
SNAPSHOT_EVERY_S = 5.0  # at most so often for new subscribers, and for readers with a limit
KEPT = 0.75  # of such a limit
ASKED_AT_ONCE = 256  # subscriptions that one visit reads
REQUESTS_AT_ONCE = 4  # replays that one visit serves
ASKED_NBYTES_MAX = 64 << 10
IPC = "ipc://"
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """A stream of one wire: its sockets, numbers and replay buffer. One thread."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        wire: Wire,
        endpoint: str,
        replay: str = "",
        refresh_s: float = 0.0,
        connect: bool = False,
    ) -> None:
        """Open the sockets. Raises ConfigError if an address can not be used.

        `refresh_s`: how often a snapshot is sent; 0: never. `connect`: a router listens there.
        """
        self._wire = wire
        self._refresh_s = refresh_s
        self._kept: deque[tuple[bytes, zmq.Frame]] = deque()
        self._since_snapshot = 0
        self._snapshot_s = -SNAPSHOT_EVERY_S
        self._asked = False
        self._told = 0  # blocks that readers know, at most
        self._crowded = False  # whether that was beyond their limit: they forgot all
        self._left_out = False  # whether they do not know all
        # Higher than those of a bridge before this one: readers may not notice that it ended
        self._sequence = time.time_ns() // 1000
        self.sockets: list[Any] = []
        self._reader = endpoint if connect else ""
        self._unread_s: float | None = time.monotonic()  # since when it has subscribed to nothing
        self._pub = self._opened(context, zmq.XPUB, endpoint, HWM, connect)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        most = 2 * BATCHES_MAX + HWM
        self._router: Any = self._opened(context, zmq.ROUTER, replay, most) if replay else None

    def _opened(
        self,
        context: "zmq.Context[Any]",
        kind: int,
        endpoint: str,
        most: int,
        connect: bool = False,
    ) -> Any:
        try:
            socket = context.socket(kind)  # a context has 1,023 at most
            self.sockets.append(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, most)
            socket.setsockopt(zmq.MAXMSGSIZE, ASKED_NBYTES_MAX)
            socket.setsockopt(zmq.TCP_MAXRT, round(1000 * UNREAD_S))
            if "[" in endpoint:
                socket.setsockopt(zmq.IPV6, 1)
            path = endpoint.removeprefix(IPC)
            if connect:
                socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a router that is away
                socket.connect(endpoint)
                return socket
            if path != endpoint and path != "*" and not path.startswith("@"):
                remove_stale(path)  # ZMQ replaces whatever has this name
            socket.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            what = "connect to" if connect else "listen at"
            raise ConfigError(f"can not {what} {endpoint}: {error}") from error
        return socket

    @property
    def addresses(self) -> list[str]:
        """Return the addresses where it listens, with their ports."""
        listening = () if self._reader else self.sockets
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in listening]

    def close(self) -> None:
        """Close the sockets; what was not sent is lost."""
        for socket in self.sockets:
            socket.close()

    # ---- events --------------------------------------------------------------------------

    def cleared(self) -> None:
        """Tell that nothing is stored."""
        self._begin()
        self._told, self._crowded, self._left_out = 0, False, False
        if self._wire.gap_clears:
            self._sequence += 1
        self._send(self._wire.cleared())

    def stored(self, block_tokens: int, hashes: Sequence[bytes]) -> None:
        """Tell that these blocks are stored."""
        self._told += len(hashes)
        self._crowded |= 0 < self._wire.blocks_max < self._told
        for some in _some(hashes):
            self._send(self._wire.stored(block_tokens, some))

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Tell that these blocks are stored no longer."""
        self._told -= 0 if self._left_out else len(hashes)
        for some in _some(hashes):
            self._send(self._wire.removed(some))

    def snapshot(self, blocks: StoredBlocks) -> None:
        """Send all stored blocks again, or so many of the newest that more can follow.

        Readers that clear by a gap get none if all are sent: who has lost nothing knows these, and
        finds them meanwhile.
        """
        self._begin()
        most = self._wire.blocks_max or len(blocks)
        if self._crowded or len(blocks) > most:
            most = round(most * KEPT)
            self._sequence += 1
        self._told, self._crowded = min(most, len(blocks)), False
        self._left_out = self._told < len(blocks)
        events = self._wire.cleared()
        for block_tokens, hashes in blocks.newest(most, HASHES_AT_ONCE):
            self._send(events + self._wire.stored(block_tokens, hashes))
            events = []
        if events:
            self._send(events)
        self._since_snapshot = 0

    def wants_snapshot(self) -> bool:
        """Return whether a reader came or forgot all, the buffer is full, or it is time."""
        age_s = time.monotonic() - self._snapshot_s
        return (
            ((self._asked or self._crowded) and age_s >= SNAPSHOT_EVERY_S)
            or self._since_snapshot >= BATCHES_MAX
            or (self._refresh_s > 0 and age_s >= self._refresh_s)
        )

    def _begin(self) -> None:
        """Forget what is kept: what follows begins with the event that clears."""
        self._kept.clear()
        self._since_snapshot, self._asked, self._snapshot_s = 0, False, time.monotonic()

    def _send(self, events: Sequence[Event]) -> None:
        number = self._sequence.to_bytes(8, "big")
        batch = zmq.Frame(self._wire.packed(events), copy=True)  # copied once, for all queues
        self._sequence += 1
        if self._router is not None:
            self._since_snapshot += 1
            self._kept.append((number, batch))
        self._pub.send_multipart((self._wire.topic, number, batch))

    # ---- readers -------------------------------------------------------------------------

    def serve(self) -> None:
        """Read what subscribers and readers of the buffer ask; never waits."""
        for _ in range(ASKED_AT_ONCE):
            try:
                asked = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if not self._wire.topic.startswith(asked[1:]):
                continue
            if asked[:1] == b"\1":
                self._asked, self._unread_s = True, None
            elif asked[:1] == b"\0":
                self._unread_s = time.monotonic()
        self._connect_again()
        router: Any = self._router
        for _ in range(REQUESTS_AT_ONCE if router is not None else 0):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._replay(router, frames)

    def _connect_again(self) -> None:
        """Leave a router that does not subscribe: llm-d's forgets connections that it accepted."""
        now_s = time.monotonic()
        if not self._reader or self._unread_s is None or now_s - self._unread_s < UNREAD_S:
            return
        self._unread_s = now_s
        with contextlib.suppress(zmq.ZMQError):
            self._pub.disconnect(self._reader)
        self._pub.connect(self._reader)

    def _replay(self, router: Any, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.warning("a replay is asked for by %d frames that are none of the wire", len(frames))
            return
        first = frames[2]
        for number, batch in itertools.chain(self._kept, [(END, zmq.Frame())]):
            if number >= first or number == END:
                topic = b"" if number == END else self._wire.topic
                # A reader that does not read loses what is beyond the limit: ROUTER drops it
                router.send_multipart((frames[0], b"", topic, number, batch))


def check_endpoint(endpoint: str, connect: bool = False) -> str:
    """Return an endpoint to listen at, or to connect to. Raises InvalidRequest."""
    found = re.fullmatch(r"tcp://(.+):(\*|[0-9]{1,5})", endpoint)  # of others ZMQ takes a part
    host, port = found.groups() if found else ("", "")
    is_any = port in ("*", "0") or host == "*"
    is_tcp = bool(port) and (port == "*" or int(port) < 1 << 16) and not (connect and is_any)
    if not (endpoint.startswith(IPC) or (is_tcp and (host[0] == "[") == (host[-1] == "]"))):
        aim = "connect to" if connect else "listen at"
        raise InvalidRequest(f"{endpoint[:80]!r} is no address to {aim}: tcp://HOST:PORT")
    return endpoint


def _some(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(hashes), HASHES_AT_ONCE):
        yield hashes[start : start + HASHES_AT_ONCE]
