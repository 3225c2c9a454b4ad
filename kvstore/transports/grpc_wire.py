"""Call a node over gRPC, client side: works through proxies; pages travel in chunks."""

import contextlib
import ctypes
import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvstore.buffers import Pieces, segments_nbytes
from kvstore.checksum import joined_leaves, root
from kvstore.config import GRPC_CHUNK_NBYTES, MESSAGE_NBYTES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, ProtocolError, Unavailable
from kvstore.messages import chunk_frame, chunk_head, chunk_of, get_parts
from kvstore.page_hmac import PageHmacs, receive_buffers, with_hmacs
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.sync import NoThread, in_main_thread, run_in_helper_thread, start_thread
from kvstore.tracing import HEADER, current
from kvstore.transports.connections import check_process
from kvstore.transports.frames import fill, runs
from kvstore.transports.grpc_process import gate
from kvstore.transports.status import from_status
from kvstore.transports.tls import ClientTls

Result = TypeVar("Result")

# A transfer of more pages is a stream: its keys and leaves would not fit beside its page bytes
WHOLE_PAGES_MAX = 1024
FRAMES_MAX = 2  # frames waiting to be sent: while one is sent, the next one is made
# Refuse compressed answers by their head. Some grpcio versions that engines have decompress a
# message without a limit and compare its size afterwards, so that a node could fill an engine's
# memory.
IDENTITY_ONLY = 1


class Outbox:
    """Carry frames from the thread that makes them to gRPC's, which sends them.

    One thread puts, another iterates, any may `end` it. Only the thread that puts a frame reads its
    pages, so a finished call never touches them again.
    """

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(FRAMES_MAX)
        self._ended = False

    def put(self, frame: bytes) -> bool:
        """Queue a frame when there is space; return False if the queue was ended."""
        self._room.acquire()
        if self._ended:
            self._room.release()  # so that the next `put` does not wait either
            return False
        self._frames.put(frame)
        return True

    def end(self, *_: object) -> None:
        """End the queue: no more frames are made, or none are sent."""
        self._ended = True
        self._room.release()
        self._frames.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (frame := self._frames.get()) is not None:
            self._room.release()
            yield frame


_Metadata = tuple[tuple[str, str], ...]
_METHODS = {
    "hello": "Hello",
    "open_namespace": "OpenNamespace",
    "list_namespaces": "ListNamespaces",
    "lookup": "Lookup",
    "verify": "Verify",
    "remove": "Remove",
    "pin": "Pin",
    "unpin": "Unpin",
    "hint": "Hint",
    "list": "List",
    "feed": "Feed",
    "query": "Query",
    "stat": "Stat",
    "node_status": "NodeStatus",
    "remove_namespace": "RemoveNamespace",
    "forget": "Forget",
    "flush": "Flush",
    "scrub": "Scrub",
    "recover": "Recover",
    "drain": "Drain",
    "sweep": "Sweep",
    "record": "Record",
    "events": "Events",
    "push_identities": "PushIdentities",
}


class GrpcWire:
    """Call a node over one channel, on which gRPC multiplexes the calls of many threads.

    All calls take a condition of the channel, in any thread. A signal handler that raises just then
    would leave it locked, and every later call and `close` would hang. So the main thread does not
    enter gRPC; a helper thread does.
    """

    name = "grpc"

    def __init__(
        self, target: str, authority: str = "", tls: ClientTls | None = None, token: str = ""
    ) -> None:
        """Prepare a channel to a node.

        `target` is host:port, or addresses in the form of `grpc_target`; then `authority` is the
        name that the peer sees. Without `tls` the channel is plain. Raises Unavailable for unusable
        TLS files.
        """
        self._pid = os.getpid()
        self._stuck = False  # gRPC could not start the thread that ends the channel's calls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if tls is not None and tls.renamed:
            authority = tls.name  # gRPC compares this with the certificate, too, at each call
        options = [
            ("grpc.default_authority", authority or target),
            ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
            ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
            # A new channel starts without the old one's reconnect pause.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0),
        ]
        pems = None if tls is None else tls.pems()
        # Also for calls by IP address
        named = () if tls is None else (("grpc.ssl_target_name_override", tls.name),)

        def channel() -> grpc.Channel:
            if pems is None:
                return grpc.insecure_channel(target, options)
            credentials = grpc.ssl_channel_credentials(
                pems.roots, pems.key or None, pems.chain or None
            )
            return grpc.secure_channel(target, credentials, [*options, *named])

        self._channel = _in_grpc(channel)
        self._stub = KVStoreStub(self._channel)  # type: ignore[no-untyped-call]
        # Frames with page bytes stay in their wire form: see `chunk_frame`.
        self._put = self._channel.stream_stream(
            "/kvstore.KVStore/Put", None, pb.PutFrameReply.FromString
        )
        self._get = self._channel.unary_stream(
            "/kvstore.KVStore/Get", pb.GetRequest.SerializeToString, None
        )
        self._put_whole = self._channel.unary_unary(
            "/kvstore.KVStore/PutWhole", None, pb.PutReply.FromString
        )
        self._get_whole = self._channel.unary_unary(
            "/kvstore.KVStore/GetWhole", pb.GetRequest.SerializeToString, None
        )
        self._whole = True  # the node has these two, as far as is known
        _wires.add(self)

    @property
    def _call_metadata(self) -> _Metadata:
        """Return the metadata of a call: token and trace."""
        trace = current()
        return self._metadata if trace is None else (*self._metadata, (HEADER, trace.header()))

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        """Send one request and return its reply."""
        check_process(self._pid)
        metadata, call = self._call_metadata, getattr(self._stub, _METHODS[op])
        if op == "feed":  # a stream; with `wait_ms`, of one reply
            return self._first(call, request, metadata, deadline)
        try:
            return self._run(lambda: call(request, timeout=deadline.remaining(), metadata=metadata))
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error

    def _first(self, call: Any, request: Any, metadata: _Metadata, deadline: Deadline) -> Any:
        """Return the first reply of a stream."""
        stream = _Stream()

        def first() -> Any:
            replies = call(request, timeout=deadline.remaining(), metadata=metadata)
            with stream.whole(replies):
                return next(replies)

        try:
            return self._run(first, stream.stop)
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error
        except StopIteration as error:
            raise ProtocolError("the node ended a feed without an answer") from error

    def put(
        self,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> list[int]:
        """Send pages to the node, few in one message, many as a stream; see `Wire.put`."""
        check_process(self._pid)
        if self._whole and _is_small(len(pages), len(pages) * request.page_nbytes):
            message = _whole_put(request, pages, hmacs)
            reply = self._call_whole(self._put_whole, message, deadline)
            if reply is not None:
                return _verdicts(reply, len(pages))
        stream, metadata = _Stream(), self._call_metadata
        return self._run(
            partial(self._put_all, stream, metadata, request, pages, deadline, hmacs), stream.stop
        )

    def _put_all(
        self,
        stream: "_Stream",
        metadata: _Metadata,
        request: pb.PutRequest,
        pages: Sequence[Pieces],
        deadline: Deadline,
        hmacs: PageHmacs | None,
    ) -> list[int]:
        outbox = Outbox()
        try:
            with stream.whole(
                self._put(iter(outbox), timeout=deadline.remaining(), metadata=metadata)
            ) as replies:
                # Nothing shall wait for a stream that the node or the deadline ended
                replies.add_done_callback(outbox.end)
                outbox.put(pb.PutFrame(begin=request).SerializeToString())
                verdicts = _verdicts(next(replies).begin, len(pages))
                chosen = [i for i, verdict in enumerate(verdicts) if verdict == pb.WRITE]
                if chosen:
                    _send(
                        (with_hmacs(pages[i], request.prefix_hashes[i], hmacs) for i in chosen),
                        outbox,
                    )
                outbox.end()
                if chosen:
                    next(replies)  # the reply to the commit
                for _ in replies:
                    pass  # an error would be raised here
            return verdicts
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error
        except StopIteration as error:
            raise ProtocolError("the node ended a put without an answer") from error
        finally:
            outbox.end()  # gRPC's sending thread waits there and must end

    def get(
        self,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None = None,
    ) -> tuple[list[bool], list[int]]:
        """Receive pages from the node, few in one message, many as a stream; see `Wire.get`."""
        check_process(self._pid)
        each_nbytes = 0 if hmacs is None else hmacs.nbytes
        nbytes = sum(map(segments_nbytes, buffers)) + each_nbytes * len(buffers)
        if self._whole and _is_small(len(buffers), nbytes):
            reply = self._call_whole(self._get_whole, request, deadline)
            if reply is not None:
                with _complete_get():
                    begin, data = get_parts(reply)
                    chunks = iter([data] if data.nbytes else ())
                    return _received(request, begin, chunks, buffers, seeds, hmacs)
        stream, metadata = _Stream(), self._call_metadata
        return self._run(
            partial(self._get_all, stream, metadata, request, buffers, seeds, deadline, hmacs),
            stream.stop,
        )

    def _get_all(
        self,
        stream: "_Stream",
        metadata: _Metadata,
        request: pb.GetRequest,
        buffers: Sequence[Pieces],
        seeds: Sequence[int],
        deadline: Deadline,
        hmacs: PageHmacs | None,
    ) -> tuple[list[bool], list[int]]:
        try:
            with (
                _complete_get(),
                stream.whole(
                    self._get(request, timeout=deadline.remaining(), metadata=metadata)
                ) as frames,
            ):
                begin = pb.GetFrame.FromString(next(frames)).begin
                chunks = map(_page_bytes, frames)
                return _received(request, begin, chunks, buffers, seeds, hmacs)
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error

    def _call_whole(self, call: Any, request: Any, deadline: Deadline) -> Any:
        """Send a put or get that is one message; return None if the node has no such method."""
        metadata = self._call_metadata
        try:
            return self._run(lambda: call(request, timeout=deadline.remaining(), metadata=metadata))
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._whole = False
                return None
            raise _translated(error) from error

    def follow(
        self, number: int, seconds: float, end: Callable[[], object] = lambda: None
    ) -> "Followed":
        """Open a stream of views for so many seconds.

        `number` is that of the known view. `end` is called when the stream has ended.
        """
        check_process(self._pid)
        request, metadata = pb.FollowRequest(number=number), self._call_metadata

        def begin() -> Any:
            with self._stuck_without_thread():
                return self._stub.Follow(request, timeout=seconds, metadata=metadata)

        return Followed(begin, end)

    def close(self) -> None:
        """End the calls and close the channel.

        In a child of a fork it does nothing: the channel is the parent's. A stuck channel is left
        alone: gRPC would wait for ever for its calls.
        """
        if os.getpid() != self._pid:
            return
        if self._stuck:
            self._keep()
            return
        close = partial(gate.run, self._channel.close)
        if in_main_thread():
            with contextlib.suppress(RuntimeError):
                start_thread(close, "kvstore-close")  # in a thread that is not waited for
        else:
            close()

    def _run(self, work: Callable[[], Result], stop: Callable[[], object] | None = None) -> Result:
        with self._stuck_without_thread():
            return _in_grpc(work, stop)

    @contextlib.contextmanager
    def _stuck_without_thread(self) -> Iterator[None]:
        """Raise Unavailable, and give the channel up, if a thread can not be started.

        Python's gRPC counts its thread before it starts it. If that fails, none comes later, and no
        call of the channel ever ends, not even by its deadline.
        """
        try:
            yield
        except RuntimeError as error:
            self._stuck = True
            raise Unavailable(f"gRPC has no thread: {error}") from error

    def _keep(self) -> None:
        """Keep gRPC's objects for ever, so that nothing waits for the channel's end."""
        calls = (self._put, self._get, self._put_whole, self._get_whole)
        for kept in (self._channel, self._stub, *calls):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class Followed:
    """A stream of views, to be iterated once.

    It starts with the iteration; before that no thread is inside gRPC.
    """

    in_grpc = True

    def __init__(self, begin: Callable[[], Any], end: Callable[[], object]) -> None:
        self._begin, self._at_end = begin, end
        self._views: Any = None
        self._cancelled = False

    def __iter__(self) -> Iterator[pb.View]:
        try:
            self._views = self._begin()
            if self._cancelled:
                return
            yield from self._views
        except ValueError as error:
            raise _translated(error) from error
        except grpc.RpcError as error:
            # The deadline is the stream's normal end
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _translated(error) from error
        finally:
            self.cancel()
            self._at_end()

    def cancel(self) -> None:
        """Cancel the stream, from any thread."""
        self._cancelled = True
        views = self._views
        if views is not None:
            views.cancel()


def _is_small(count: int, nbytes: int) -> bool:
    """Return whether a transfer fits one message, beside its keys and leaves or checksums."""
    return 0 < nbytes <= GRPC_CHUNK_NBYTES and count <= WHOLE_PAGES_MAX


def _whole_put(request: pb.PutRequest, pages: Sequence[Pieces], hmacs: PageHmacs | None) -> bytes:
    """Build a PutWholeRequest: the frames of the put, one after the other."""
    stored = [
        with_hmacs(page, key, hmacs) for page, key in zip(pages, request.prefix_hashes, strict=True)
    ]
    leaves = [joined_leaves(page, segments_nbytes(page)) for page in stored]
    return b"".join(
        (
            pb.PutFrame(begin=request).SerializeToString(),
            chunk_head(sum(map(segments_nbytes, stored))),
            *(view for page in stored for view in page),
            pb.PutFrame(commit=pb.CommitRequest(leaves=leaves)).SerializeToString(),
        )
    )


def _verdicts(reply: pb.PutReply, count: int) -> list[int]:
    verdicts: list[int] = list(reply.verdicts)
    if len(verdicts) != count:
        raise ProtocolError(f"{len(verdicts)} verdicts for {count} pages")
    return verdicts


@contextlib.contextmanager
def _complete_get() -> Iterator[None]:
    """Raise ProtocolError for an answer to a get that lacks something."""
    try:
        yield
    except (StopIteration, InvalidRequest, DecodeError) as error:
        raise ProtocolError(f"the node's answer to a get is incomplete: {error}") from error


def _received(
    request: pb.GetRequest,
    begin: pb.GetReply,
    chunks: Iterator[memoryview],
    buffers: Sequence[Pieces],
    seeds: Sequence[int],
    hmacs: PageHmacs | None,
) -> tuple[list[bool], list[int]]:
    """Copy the hits into their buffers and verify them; see `Wire.get`."""
    hits = list(begin.hits)
    found = [i for i, hit in enumerate(hits) if hit]
    if len(hits) != len(buffers) or len(begin.checksums) != len(found):
        raise ProtocolError("the reply to a get does not fit its request")
    targets = [receive_buffers(buffers[i], hmacs) for i in found]
    made = fill(targets, chunks)
    if next(chunks, None) is not None:
        raise ProtocolError("the node sent more page bytes than it announced")
    corrupt = []
    for i, target, of, expected in zip(found, targets, made, begin.checksums, strict=True):
        if root(of, seeds[i]) != expected:
            hits[i] = False
            corrupt.append(i)
        elif hmacs:
            hits[i] = hmacs.verify(request.prefix_hashes[i], target[:-1], target[-1])
    return hits, corrupt


def _send(pages: Iterable[Pieces], outbox: Outbox) -> None:
    """Send pages in chunks, hash each page after its last one, and send the commit."""
    made = []

    def hashed() -> Iterator[memoryview]:
        for page in pages:
            yield from page
            made.append(joined_leaves(page, segments_nbytes(page)))

    if all(outbox.put(chunk_frame(run)) for run in runs(hashed())):
        outbox.put(pb.PutFrame(commit=pb.CommitRequest(leaves=made)).SerializeToString())


class _Stream:
    """A call that moves pages.

    Whatever ends it early, such as an interrupt, cancels it at the node.
    """

    def __init__(self) -> None:
        self._replies: list[Any] = []
        self._stopped = False

    @contextlib.contextmanager
    def whole(self, replies: Any) -> Iterator[Any]:
        """Register a call's replies so that `stop` can cancel it, and cancel it on errors."""
        self._replies.append(replies)
        try:
            if self._stopped:
                replies.cancel()
            yield replies
        except BaseException:
            replies.cancel()
            raise
        finally:
            self._replies.clear()

    def stop(self) -> None:
        """Cancel the call from another thread."""
        self._stopped = True
        for replies in tuple(self._replies):
            replies.cancel()


def _in_grpc(work: Callable[[], Result], stop: Callable[[], object] | None = None) -> Result:
    """Run gRPC work on the helper thread, and never while this process forks."""
    try:
        return run_in_helper_thread(partial(gate.run, work), stop)
    except NoThread as error:
        raise Unavailable(f"gRPC has no thread: {error}") from error


# gRPC's words before the cause, of each address that does not answer
_VERBOSE = re.compile(
    "failed to connect to all addresses; last error: [A-Z]+: "
    "|(?<=: )Failed to connect to remote host: "
)


def _translated(error: grpc.RpcError | ValueError) -> Exception:
    if isinstance(error, ValueError):  # gRPC raises this for a closed channel
        return Unavailable(f"the connection was closed: {error}")
    details = _VERBOSE.sub("", error.details() or "").replace("%5B", "[").replace("%5D", "]")
    return from_status(error.code().value[0], details or error.code().name)


def _page_bytes(frame: bytes) -> memoryview:
    """Return the page bytes of a GetFrame; empty if it has none.

    Raises DecodeError for what is no GetFrame.
    """
    data = chunk_of(frame)
    return memoryview(pb.GetFrame.FromString(frame).chunk.data) if data is None else data


_wires: "weakref.WeakSet[GrpcWire]" = weakref.WeakSet()


def _keep_channels() -> None:
    """Keep a forked child from ending its parent's channels, even at its exit.

    gRPC would wait for threads and locks that do not exist in the child.
    """
    for wire in list(_wires):
        wire._keep()


os.register_at_fork(after_in_child=_keep_channels)
