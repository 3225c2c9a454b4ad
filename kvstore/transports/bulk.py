"""Send and receive pages over bulk TCP, client side: protobuf headers, then raw page bytes.

Page bytes move directly between the caller's buffers and the socket.
"""

import contextlib
import itertools
import socket
import ssl
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvstore.buffers import Pieces, chunks, segments_nbytes
from kvstore.checksum import CHUNK_NBYTES, Leaves, joined_leaves, leaves, root
from kvstore.config import MESSAGE_NBYTES_MAX, PROTOCOL_VERSION, ClientConfig
from kvstore.deadline import Deadline
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, ProtocolError, Unavailable
from kvstore.page_hmac import PageHmacs, receive_buffers, with_hmacs
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.secrets import token_of
from kvstore.steps import Steps, run
from kvstore.transports.connections import (
    ConnectionPool,
    common_version,
    exchange,
    greeting,
    parse_reply,
    request_header,
)
from kvstore.transports.frames import FrameSocket
from kvstore.transports.parallel import ParallelTransfer, split, stream_count
from kvstore.transports.tls import ClientTls, TlsFrameSocket, client_tls, means_no_place
from kvstore.transports.view_stream import FrameViews

# Bytes of a page that one system call sends: sixteen calls of 256 KiB cost more than hashing 4 MiB
# that have left the cache (docs/decisions/0003).
SEND_NBYTES = 4 << 20
# Pages that one call moves, of CHUNK_NBYTES together: small ones are hashed with the GIL held
GROUP_PAGES = 16

Request = TypeVar("Request", pb.PutRequest, pb.GetRequest)
Result = TypeVar("Result")
IsUnchanged = Callable[[bytes, bytes], bool]
OnPage = Callable[[int, "Arrived"], None]


class BulkConnector:
    """Connect to a node's bulk port and say hello: plain or over TLS, at the addresses of its name.

    Thread-safe.

    `where` names the peer in messages; `version` is the protocol version of the first frame.
    """

    def __init__(
        self,
        host: str,
        port: int,
        config: ClientConfig,
        found: Sequence[str] = (),
        tls: ClientTls | None = None,
    ) -> None:
        """Prepare connections to a node's frame port.

        `found` lists the addresses of `host` in the order of trials; without it, `host` is an
        address. `tls` may be passed if it exists already.
        """
        self.where = f"{host}:{port} (bulk)"
        self.version = PROTOCOL_VERSION
        self._found = found or (host,)
        self._port = port
        self._config = config
        self._tls = tls or client_tls(config, host)

    @property
    def is_plain(self) -> bool:
        """Return whether the connections have no TLS."""
        return self._tls is None

    def connect(
        self, limit: Deadline, only_asks: bool = False
    ) -> tuple[FrameSocket, pb.HelloReply]:
        """Return a connection and the node's hello.

        Raises OSError or `Refused`, which `ConnectionPool.raise_named` translates.

        `only_asks`: accept any version, and also a node that is still joining its cluster.
        """
        connection = self._socket(limit)
        with greeting(connection, self.where, limit), self._meant():
            connection.handshake()
            version = 0 if only_asks else self.version
            request = pb.HelloRequest(protocol_version=version, token=token_of(self._config))
            hello: pb.HelloReply = exchange(connection, "hello", request)[0]
        return connection, hello

    def _socket(self, limit: Deadline) -> FrameSocket:
        if self._tls is None:
            return FrameSocket(self._connected(limit), self.version)
        context = self._tls.context()
        return TlsFrameSocket(self._connected(limit), context, self._tls.name, self.version)

    @contextlib.contextmanager
    def _meant(self) -> Iterator[None]:
        """Translate errors of TLS during a greeting into plain words."""
        try:
            yield
        except ssl.SSLError as error:
            if means_no_place(error):
                raise Exhausted(
                    f"{self.where}: the node refuses one more connection; most likely all "
                    "of its connections are in use, or all of this host's: use fewer per "
                    "client, or raise its sessions_max (its log says which)"
                ) from error
            raise Unavailable(self._tls.explain(error) if self._tls else str(error)) from error

    def _connected(self, limit: Deadline) -> socket.socket:
        """Connect to the first address that answers.

        Each address gets a share of the time, so that one that drops packets leaves some for the
        next.
        """
        for number, address in enumerate(self._found):
            share_s = limit.remaining() / (len(self._found) - number)
            try:
                return socket.create_connection((address, self._port), timeout=share_s)
            except OSError as error:
                failed = error
        if isinstance(failed, TimeoutError):
            raise Unavailable(f"no connection to {self.where} in {limit.seconds:.3g} s") from failed
        raise failed


class Arrived(NamedTuple):
    """A page that was received.

    `leaves`: empty if they do not match its checksum. `ttl_ms`: milliseconds until it expires; 0:
    never.
    """

    leaves: bytes
    checksum: bytes
    ttl_ms: int


class BulkWire:
    """Move pages over bulk TCP: page bytes follow the frames' headers.

    A connection is a session: closing it, as after a failure, frees everything the node held for
    it.
    """

    name = "bulk"

    def __init__(
        self,
        host: str,
        port: int,
        config: ClientConfig,
        found: Sequence[str] = (),
        instance_id: bytes = b"",
        version: int = PROTOCOL_VERSION,
        tls: ClientTls | None = None,
    ) -> None:
        """Prepare the transport to one run of a node.

        `found` lists the addresses of `host` in the order of trials; without it, `host` is an
        address. `instance_id` names the node's run, where known; `version` is the protocol's. `tls`
        may be passed if it exists already.
        """
        self.port = port
        self.hello = pb.HelloReply()  # the reply to the first connection
        self._instance_id = instance_id
        self._config = config
        self._connector = BulkConnector(host, port, config, found, tls)
        self._connector.version = version
        self._pool = ConnectionPool(self._connector.where, self._connect, config.connections_max)
        self._threads = ParallelTransfer()

    def connect(self, deadline: Deadline) -> None:
        """Make sure that one connection can be opened.

        Raises Unavailable or ProtocolError.
        """
        with self._pool.connection(deadline):
            pass

    def greet(self, deadline: Deadline) -> pb.HelloReply:
        """Make the first connection to a node in a common version; return its hello.

        All further connections are to the same run of the node. Raises the node's error,
        Unavailable or ProtocolError.
        """
        try:
            self.connect(deadline)
        except ProtocolError:  # an older node may refuse even the first frame of another version
            self._connector.version = PROTOCOL_VERSION - 1
            self.connect(deadline)
        self._instance_id = self.hello.instance_id
        self._connector.version = common_version(self.hello)
        return self.hello

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """Send one request and return its reply."""
        while True:
            with self._pool.attempt(deadline) as connection:
                return exchange(connection, op, request)[0]

    @types.coroutine
    def reply(self, op: str, request: Any, deadline: Deadline) -> Generator[FrameSocket, None, Any]:
        """Send one request over an idle connection; await its reply.

        Yields the connection, to be continued once it can be read or the time is over. Raises
        NeedsThread without an idle connection.
        """
        while True:
            with self._pool.attempt_now(deadline) as connection:
                connection.send_frame(request_header(op, request))
                yield connection
                return parse_reply(op, connection.recv_frame(MESSAGE_NBYTES_MAX)[0])

    def put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
        is_unchanged: IsUnchanged | None = None,
    ) -> list[int]:
        """Send pages; return a PutStatus per key.

        `is_unchanged` receives the key of each page that was sent and the leaves of the sent bytes.
        If it returns False, nothing of the batch is committed: InvalidRequest.
        """
        parts = self._streams(pages)
        if len(parts) == 1:
            return self._put(request, pages, deadline, hmacs, is_unchanged)
        found = self._parallel(
            request,
            parts,
            lambda one, part: self._put(one, pages[part], deadline, hmacs, is_unchanged),
            deadline,
        )
        failed = [error for error in found if isinstance(error, KVStoreError)]
        worse = [error for error in failed if not isinstance(error, Exhausted)]
        if worse or len(failed) == len(found) or (failed and (request.durable or request.ack_all)):
            raise (worse or failed)[0]
        verdicts: list[int] = []
        # A part that found no space is no failure of the others
        for part, said in zip(parts, found, strict=True):
            verdicts += (
                [pb.FULL] * (part.stop - part.start) if isinstance(said, KVStoreError) else said
            )
        return verdicts

    def _put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None,
        is_unchanged: IsUnchanged | None,
    ) -> list[int]:
        while True:
            with self._pool.attempt(deadline) as connection:
                return run(put_steps(PageStream(connection), request, pages, hmacs, is_unchanged))

    def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> tuple[list[bool], list[int]]:
        """Read pages into the buffers and verify them; see `Wire.get`."""
        return hits_of(self.fetch(request, buffers, seeds, deadline, hmacs))

    def fetch(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
        on_page: OnPage | None = None,
    ) -> list[Arrived | None]:
        """Read pages and return, for each found one, its leaves and expiry; None for misses.

        `on_page` is called, by any thread, with the index in the batch of each found one as soon as
        it is here.
        """
        streams = len(self._streams(buffers))
        if streams == 1:
            return self._get(request, buffers, seeds, deadline, hmacs, on_page)
        # In turns, so that pages arrive in about their order, in which a near client copies them
        parts = [slice(first, None, streams) for first in range(streams)]

        def get(one: pb.GetRequest, part: slice) -> list[Arrived | None]:
            placed = on_page and (lambda index, page: on_page(part.start + index * streams, page))
            return self._get(one, buffers[part], seeds[part], deadline, hmacs, placed)

        arrived: list[Arrived | None] = [None] * len(buffers)
        for part, said in zip(parts, self._parallel(request, parts, get, deadline), strict=True):
            if isinstance(said, KVStoreError):
                raise said
            arrived[part] = said
        return arrived

    def _streams(self, pages: Sequence[Pieces]) -> list[slice]:
        """Return the parts of a call's pages, one for each connection."""
        self._pool.check_process()
        return split(
            len(pages), stream_count(len(pages), segments_nbytes(pages[0]) if pages else 0)
        )

    def _parallel(
        self,
        request: Request,
        parts: Sequence[slice],
        transfer: Callable[[Request, slice], Result],
        deadline: Deadline,
    ) -> list[Result | KVStoreError]:
        """Transfer each part of a batch over its own connection; return the results or errors.

        The part that ended last would be the newest, so the chain is touched as a whole: eviction
        must take its end before its head.
        """
        found = self._threads.run(
            [partial(transfer, _part_of(request, part), part) for part in parts]
        )
        if not any(isinstance(one, KVStoreError) for one in found):
            touch = pb.LookupRequest(
                namespace=request.namespace, prefix_hashes=request.prefix_hashes, touch=True
            )
            with contextlib.suppress(KVStoreError):  # the pages are stored in any case
                self.call("lookup", touch, deadline)
        return found

    def _get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None,
        on_page: OnPage | None,
    ) -> list[Arrived | None]:
        while True:
            with self._pool.attempt(deadline) as connection:
                stream = PageStream(connection)
                return run(get_steps(stream, request, buffers, seeds, hmacs, on_page))

    def follow(self, number: int, seconds: float, deadline: Deadline) -> FrameViews:
        """Return the cluster's views from now on, for so many seconds.

        `number`: of the view that is known.

        Raises ProtocolError for a node that does not know this frame.
        """
        return FrameViews(
            self._pool.separate(deadline), number, seconds, deadline, self._pool.raise_named
        )

    @property
    def is_plain(self) -> bool:
        """Return whether the connections have no TLS."""
        return self._connector.is_plain

    def single_stream(self, pages: Sequence[Pieces]) -> bool:
        """Return whether a batch of these pages is best sent over one connection."""
        return len(self._streams(pages)) == 1

    def raise_named(self, error: BaseException, deadline: Deadline) -> None:
        """Raise a connection's failure as a KVStoreError; return if it is one already."""
        self._pool.raise_named(error, deadline)

    def separate(self, deadline: Deadline) -> FrameSocket:
        """Open a connection beside those of the pool, which the caller closes."""
        return self._pool.separate(deadline)

    def _connect(self, deadline: Deadline) -> FrameSocket:
        connection, hello = self._connector.connect(deadline.sooner(self._config.connect_timeout_s))
        if hello.instance_id and hello.instance_id != (self._instance_id or hello.instance_id):
            connection.close()
            raise Unavailable(
                f"{self._pool.where} belongs to another node, or the node was restarted"
            )
        if not self.hello.ByteSize():
            self.hello = hello
        return connection

    def close(self) -> None:
        """Close idle connections; those in use close when their call ends."""
        self._pool.close()
        self._threads.close()


class PageStream(NamedTuple):
    """Requests and pages on a connection; the I/O of the steps below."""

    connection: FrameSocket

    def exchange(self, op: str, request: Any) -> Any:
        """Send a request; return (reply, bytes of the payload behind it)."""
        return exchange(self.connection, op, request)

    def send_pages(self, nbytes: int, pages: Iterable[Pieces]) -> Any:
        """Send pages of so many bytes as a payload; return the leaves of each one's sent bytes."""
        return _send_pages(self.connection, nbytes, pages)

    def recv_pages(self, pages: Sequence[Pieces]) -> Any:
        """Receive pages; return the leaves of each one's received bytes."""
        return _recv_pages(self.connection, pages)


def put_steps(
    stream: Any,
    request: pb.PutRequest,
    pages: Sequence[Pieces],
    hmacs: PageHmacs | None,
    is_unchanged: IsUnchanged | None = None,
) -> Steps[list[int]]:
    """Put pages on one connection; `stream` is a `PageStream`, or one with coroutines."""
    reply, _ = yield stream.exchange("put", request)
    verdicts = list(reply.verdicts)
    if len(verdicts) != len(pages):
        raise ProtocolError(f"{len(verdicts)} verdicts for {len(pages)} pages")
    wanted = [i for i, verdict in enumerate(verdicts) if verdict == pb.WRITE]
    if not wanted:
        return verdicts
    # The leaves follow the bytes, in the commit.
    nbytes = sum(segments_nbytes(pages[i]) + _hmac_nbytes(hmacs) for i in wanted)
    payload = (with_hmacs(pages[i], request.prefix_hashes[i], hmacs) for i in wanted)
    sums = yield stream.send_pages(nbytes, payload)
    sent = zip(wanted, sums, strict=True)
    unchanged = (
        [is_unchanged(request.prefix_hashes[i], of) for i, of in sent] if is_unchanged else []
    )
    if not all(unchanged):
        raise InvalidRequest("a page's bytes changed in memory while it was sent")
    yield stream.exchange("commit", pb.CommitRequest(leaves=sums))
    return verdicts


def get_steps(
    stream: Any,
    request: pb.GetRequest,
    buffers: Sequence[Pieces],
    seeds: Sequence[int],
    hmacs: PageHmacs | None,
    on_page: OnPage | None = None,
) -> Steps[list[Arrived | None]]:
    """Get pages on one connection into the buffers and verify them; `stream` as in `put_steps`.

    `on_page` as in `BulkWire.fetch`.
    """
    reply, payload_nbytes = yield stream.exchange("get", request)
    hits = list(reply.hits)
    found = [i for i, hit in enumerate(hits) if hit]
    if (
        len(hits) != len(buffers)
        or payload_nbytes != sum(segments_nbytes(buffers[i]) + _hmac_nbytes(hmacs) for i in found)
        or len(reply.checksums) != len(found)
        or len(reply.ttls_ms) not in (0, len(found))
    ):
        raise ProtocolError("the reply to a get does not fit its request")
    arrived: list[Arrived | None] = [None] * len(hits)
    ttls_ms = reply.ttls_ms or [0] * len(found)
    targets = [receive_buffers(buffers[i], hmacs) for i in found]
    replies = zip(found, targets, reply.checksums, ttls_ms, strict=True)
    for group in _together(targets):
        for of_leaves in (yield stream.recv_pages(group)):
            i, target, expected, ttl_ms = next(replies)
            intact = root(of_leaves, seeds[i]) == expected
            if not (intact and hmacs) or hmacs.verify(
                request.prefix_hashes[i], target[:-1], target[-1]
            ):
                page = arrived[i] = Arrived(of_leaves if intact else b"", expected, ttl_ms)
                if on_page:
                    on_page(i, page)
    return arrived


def hits_of(found: Sequence[Arrived | None]) -> tuple[list[bool], list[int]]:
    """Return a hit per page, and the positions of pages that failed their checksum."""
    hits = [page is not None and bool(page.leaves) for page in found]
    return hits, [i for i, page in enumerate(found) if page is not None and not page.leaves]


def _part_of(request: Request, part: slice) -> Request:
    """Return the same request for some of its keys."""
    share = type(request)()
    share.CopyFrom(request)
    del share.prefix_hashes[:]
    share.prefix_hashes.extend(request.prefix_hashes[part])
    return share


def _hmac_nbytes(hmacs: PageHmacs | None) -> int:
    """Return the bytes of the HMACs that follow each page."""
    return hmacs.nbytes if hmacs else 0


def _send_pages(connection: FrameSocket, nbytes: int, pages: Iterable[Pieces]) -> list[bytes]:
    """Send pages as a frame's payload; return the leaves of each one's sent bytes."""
    found: list[bytes] = []
    head = [memoryview(connection.begun(b"", nbytes))]
    for group in _together(pages):
        is_large = segments_nbytes(group[0]) > CHUNK_NBYTES
        connection.send_all(head if is_large else itertools.chain(head, *group))
        head = []
        found += [_send_page(connection, page) if is_large else _leaves(page) for page in group]
    return found


def _recv_pages(connection: FrameSocket, pages: Sequence[Pieces]) -> list[bytes]:
    """Receive pages; return the leaves of each one's received bytes."""
    if len(pages) == 1:
        return [_recv_page(connection, pages[0])]
    connection.recv_all(itertools.chain(*pages))
    return [_leaves(page) for page in pages]


def _together(pages: Iterable[Pieces]) -> Iterator[list[Pieces]]:
    """Group pages that one system call moves; a larger page is alone."""
    group: list[Pieces] = []
    room = CHUNK_NBYTES
    for page in pages:
        page_nbytes = segments_nbytes(page)
        if group and (page_nbytes > room or len(group) == GROUP_PAGES):
            yield group
            group, room = [], CHUNK_NBYTES
        group.append(page)
        room -= page_nbytes
    if group:
        yield group


def _leaves(page: Pieces) -> bytes:
    """Return the leaves of a page in segments."""
    return leaves(page[0]) if len(page) == 1 else joined_leaves(page, segments_nbytes(page))


def _send_page(connection: FrameSocket, page: Pieces) -> bytes:
    """Send a page; return the leaves of the sent bytes."""
    running = Leaves(segments_nbytes(page))
    for chunk in chunks(page, itertools.repeat(SEND_NBYTES)):
        if len(chunk) == 1:  # the usual case, and faster for small pages
            connection.send(chunk[0])
        else:
            connection.send_all(chunk)
        for piece in chunk:
            running.update(piece)
    return running.digest()


def _recv_page(connection: FrameSocket, page: Pieces) -> bytes:
    """Receive a page; return the leaves of the received bytes."""
    running = Leaves(segments_nbytes(page))
    for chunk in chunks(page, itertools.repeat(CHUNK_NBYTES)):
        if len(chunk) == 1:
            connection.recv_into(chunk[0])
        else:
            connection.recv_all(chunk)
        for piece in chunk:
            running.update(piece)
    return running.digest()
