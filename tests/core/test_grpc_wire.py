"""The gRPC wire against nodes with invalid answers, and the outbox of a put."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from waiting import wait_until

from kvstore import Client
from kvstore.deadline import Deadline
from kvstore.errors import KVStoreError, ProtocolError, Unavailable
from kvstore.pb import kvstore_pb2 as pb
from kvstore.transports.grpc_wire import FRAMES_MAX, GrpcWire, Outbox

PAGE = 4 << 20
Replies = Callable[[Iterator[bytes]], Iterator[bytes]]


@pytest.fixture
def wire_to() -> Iterator[Callable[[Replies], GrpcWire]]:
    """Return a function that makes a wire to a node which answers Put and Get with `replies`."""
    ends: list[Callable[[], Any]] = []

    def start(replies: Replies) -> GrpcWire:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        method = grpc.stream_stream_rpc_method_handler(lambda messages, context: replies(messages))
        handlers = grpc.method_handlers_generic_handler(
            "kvstore.KVStore", {"Put": method, "Get": method}
        )
        server.add_generic_rpc_handlers((handlers,))
        wire = GrpcWire(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        ends.extend((wire.close, lambda: server.stop(0.0).wait()))
        return wire

    yield start
    for end in ends:
        end()


def put(wire: GrpcWire, count: int = 2, seconds: float = 20.0) -> list[int]:
    return wire.put(
        pb.PutRequest(prefix_hashes=[b"key"] * count),
        [(memoryview(bytes(PAGE)),)] * count,
        Deadline(seconds),
    )


def get(wire: GrpcWire) -> Any:
    return wire.get(pb.GetRequest(), [(memoryview(bytearray(8)),)], [0], Deadline(20.0))


def writes(count: int) -> bytes:
    return pb.PutFrameReply(begin=pb.PutReply(verdicts=[pb.WRITE] * count)).SerializeToString()


def ends(call: Callable[[], Any]) -> bool:
    """Return whether the call ends within 20 s."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60.0)
    return not thread.is_alive()


BEGIN = pb.GetFrame(begin=pb.GetReply(hits=[True], checksums=[bytes(16)])).SerializeToString()


@pytest.mark.parametrize(
    "frames", [[b"\xff\xff"], [BEGIN, b"\xff\xff"], [BEGIN, BEGIN], [BEGIN], []]
)
def test_get_with_an_invalid_answer_is_refused(
    wire_to: Callable[[Replies], GrpcWire], frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError, match="the node's answer to a get is incomplete"):
        get(wire_to(lambda messages: iter(frames)))


CHUNK = pb.GetFrame(chunk=pb.PageChunk(data=bytes(8))).SerializeToString()
UNFIT = "the reply to a get does not fit its request"


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (pb.GetReply(hits=[True] * 2, checksums=[bytes(16)] * 2), UNFIT),
        (pb.GetReply(hits=[], checksums=[]), UNFIT),
        (pb.GetReply(hits=[True], checksums=[]), UNFIT),
        (pb.GetReply(hits=[True], checksums=[bytes(16)] * 2), UNFIT),
        (pb.GetReply(hits=[True], checksums=[bytes(16)]), "more page bytes than it announced"),
    ],
)
def test_get_with_the_answer_of_another_is_refused(
    wire_to: Callable[[Replies], GrpcWire], begin: pb.GetReply, message: str
) -> None:
    frames = [pb.GetFrame(begin=begin).SerializeToString(), CHUNK, CHUNK]
    with pytest.raises(ProtocolError, match=message):
        get(wire_to(lambda messages: iter(frames)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_put_with_a_wrong_number_of_verdicts_is_refused(
    wire_to: Callable[[Replies], GrpcWire], count: int
) -> None:
    with pytest.raises(ProtocolError, match=f"{count} verdicts for 2 pages"):
        put(wire_to(lambda messages: iter([writes(count)])))


def test_put_without_an_answer_to_its_commit_is_refused(
    wire_to: Callable[[Replies], GrpcWire],
) -> None:
    def replies(messages: Iterator[bytes]) -> Iterator[bytes]:
        next(messages)
        yield writes(2)
        for _ in messages:
            pass

    with pytest.raises(ProtocolError, match="ended a put without an answer"):
        put(wire_to(replies))


@pytest.mark.parametrize("writing", [False, True])
def test_put_ended_by_the_node_returns_at_once(
    wire_to: Callable[[Replies], GrpcWire], monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    """Neither the caller nor gRPC's thread waits to send the rest."""
    over, errors = threading.Event(), list[str]()

    class Watched(Outbox):
        def __iter__(self) -> Iterator[bytes]:
            try:
                yield from super().__iter__()
            finally:
                over.set()

    def replies(messages: Iterator[bytes]) -> Iterator[bytes]:
        next(messages)
        if writing:
            yield writes(8)
            next(messages)
        raise OSError("the node is in trouble")

    def call() -> None:
        with pytest.raises(KVStoreError) as caught:
            put(wire, count=8, seconds=600.0)
        errors.append(str(caught.value))

    monkeypatch.setattr("kvstore.transports.grpc_wire.Outbox", Watched)
    wire = wire_to(replies)
    assert ends(call)
    assert "in trouble" in errors[0]
    assert over.wait(60.0)


def test_full_outbox_blocks_until_a_frame_is_taken() -> None:
    outbox, sent = Outbox(), list[int]()

    def fill() -> None:
        for number in range(FRAMES_MAX + 2):
            assert outbox.put(b"%d" % number)
            sent.append(number)
        outbox.end()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    wait_until(lambda: len(sent) == FRAMES_MAX)
    thread.join(0.1)
    assert sent == list(range(FRAMES_MAX))
    taken = list[bytes]()
    assert ends(lambda: taken.extend(outbox))
    assert taken == [b"%d" % number for number in range(FRAMES_MAX + 2)]


def test_waiter_for_an_ended_outbox_returns() -> None:
    outbox, results = Outbox(), list[bool]()

    def end() -> None:
        wait_until(lambda: len(results) == FRAMES_MAX)
        threading.Event().wait(0.05)
        outbox.end()

    def fill() -> None:
        for _ in range(FRAMES_MAX + 2):
            results.append(outbox.put(b"frame"))

    ending = threading.Thread(target=end)
    ending.start()
    assert ends(fill)
    assert results == [True] * FRAMES_MAX + [False, False]
    ending.join()


def test_call_without_a_thread_for_grpc_gives_the_channel_up(
    wire_to: Callable[[Replies], GrpcWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: no later call of the channel ended, nor did its close."""
    wire = wire_to(
        lambda messages: iter([pb.PutFrameReply(begin=pb.PutReply()).SerializeToString()])
    )
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        target = repr(getattr(thread, "_target", ""))
        if "anaged" in target or "_run_with_context" in target:  # gRPC's thread for a channel
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unavailable, match="gRPC has no thread"):
            put(wire, 0)
    assert ends(wire.close)


def test_refused_connection_is_named_without_grpcs_preamble() -> None:
    for address in ("127.0.0.1:1", "[::1]:1"):
        with Client(address) as client, pytest.raises(Unavailable) as raised:
            client.node_status()
        assert f":{address}: " in str(raised.value)
        assert "last error" not in str(raised.value)
