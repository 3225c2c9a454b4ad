"""The gRPC wire, client side: works through proxies and from any language; pages cross in chunks."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from kvstore.checksum import checksum, leaves
from kvstore.config import MESSAGE_NBYTES_MAX
from kvstore.deadline import Deadline
from kvstore.errors import InvalidRequest, ProtocolError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb.kvstore_pb2_grpc import KVStoreStub
from kvstore.wires.chunks import fill, split
from kvstore.wires.status import from_status

_METHODS = {
    "hello": "Hello",
    "open_namespace": "OpenNamespace",
    "list_namespaces": "ListNamespaces",
    "lookup": "Lookup",
    "verify": "Verify",
    "remove": "Remove",
    "pin": "Pin",
    "unpin": "Unpin",
    "list": "List",
    "stat": "Stat",
    "node_status": "NodeStatus",
    "remove_namespace": "RemoveNamespace",
    "flush": "Flush",
    "scrub": "Scrub",
    "recover": "Recover",
}


class GrpcWire:
    """One channel. gRPC multiplexes calls of many threads over it."""

    name = "grpc"

    def __init__(self, target: str, authority: str = "") -> None:
        """`target`: host:port, which gRPC's own resolver then has to find, or what `grpc_target` makes of addresses;
        the peer and what is between are told `authority`."""
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.default_authority", authority or target),
                ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
                # A new channel starts without the old one's reconnect pause.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_reconnect_backoff_ms", 1000),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._stub = KVStoreStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, op: str, request: Any, deadline: Deadline) -> Any:
        try:
            return getattr(self._stub, _METHODS[op])(request, timeout=deadline.remaining())
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error

    def put(self, request: pb.PutRequest, pages: Sequence[memoryview], deadline: Deadline) -> list[int]:
        begun: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

        def frames() -> Iterator[pb.PutFrame]:
            yield pb.PutFrame(begin=request)
            chosen = begun.get()
            for data in split(pages[i] for i in chosen):
                yield pb.PutFrame(chunk=pb.PageChunk(data=data))
            if chosen:
                yield pb.PutFrame(commit=pb.CommitRequest(leaves=[leaves(pages[i]) for i in chosen]))

        try:
            with _whole(self._stub.Put(frames(), timeout=deadline.remaining())) as replies:
                verdicts = list(next(replies).begin.verdicts)
                if len(verdicts) != len(pages):
                    raise ProtocolError(f"{len(verdicts)} verdicts for {len(pages)} pages")
                begun.put([i for i, verdict in enumerate(verdicts) if verdict == pb.WRITE])
                for _ in replies:
                    pass  # the commit's reply; an error would be raised here
            return verdicts
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error
        except StopIteration as error:
            raise ProtocolError("the node ended a put without an answer") from error
        finally:
            begun.put([])  # gRPC's sending thread waits here after a refusal; it must not stay

    def get(
        self, request: pb.GetRequest, buffers: Sequence[memoryview], seeds: Sequence[int], deadline: Deadline
    ) -> tuple[list[bool], list[int]]:
        try:
            with _whole(self._stub.Get(request, timeout=deadline.remaining())) as frames:
                begin = next(frames).begin
                hits = list(begin.hits)
                found = [i for i, hit in enumerate(hits) if hit]
                if len(hits) != len(buffers) or len(begin.checksums) != len(found):
                    raise ProtocolError("the reply to a get does not fit its request")
                fill([buffers[i] for i in found], (frame.chunk.data for frame in frames))
                if next(frames, None) is not None:
                    raise ProtocolError("the node sent more page bytes than it announced")
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error
        except (StopIteration, InvalidRequest) as error:
            raise ProtocolError(f"the node's answer to a get is incomplete: {error}") from error
        corrupt = [
            i for i, expected in zip(found, begin.checksums, strict=True) if checksum(buffers[i], seeds[i]) != expected
        ]
        for i in corrupt:
            hits[i] = False
        return hits, corrupt

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def _whole(replies: Any) -> Iterator[Any]:
    """Around hearing all that a stream answers. Whatever ends that early, an interrupt too, ends the stream: its other
    half is another thread's, which would read pages that are the caller's again."""
    try:
        yield replies
    except BaseException:
        replies.cancel()
        raise


def _translated(error: grpc.RpcError | ValueError) -> Exception:
    if isinstance(error, ValueError):  # how gRPC says that the channel is closed
        return Unavailable(f"the connection was closed: {error}")
    return from_status(error.code().value[0], error.details() or error.code().name)
