"""Messages between an engine's process and the agents': whole frames, in any pieces."""

import contextlib
import fcntl
import os
import random
import resource
import socket
import threading
from dataclasses import replace

import pytest

from gpu_agent.hints import RequestHints, Retention
from gpu_agent.worker import frames
from gpu_agent.worker import frames as channel_module
from gpu_agent.worker.frames import AgentsEnd, AskedHint, EngineEnd, Kind, Loaded, Order, Saved
from gpu_agent.worker.ipc_memory import opened_storages
from kvstore.errors import ConfigError, Exhausted, InvalidRequest, ProtocolError

ORDER = Order(7, 2, -1, 12.5, [b"k" * 32, b"l" * 16], {"block": bytes(16), "token": b""})


def body_of(frame: bytes) -> bytes:
    nbytes, _ = frames.header(frame)
    body = frame[frames.HEADER.size :]
    assert len(body) == nbytes
    return body


def test_frame_is_equal_after_a_round_trip() -> None:
    assert frames.parse_order(body_of(frames.order_frame(Kind.SAVE, ORDER))) == ORDER
    for saved in (Saved(1, 2, 3, 4, "full"), Saved(1, 2, 3, 0, None)):
        assert frames.parse_saved(body_of(frames.saved_frame(saved))) == saved
    loaded = Loaded(9, 4, 3, "late")
    assert frames.parse_loaded(body_of(frames.loaded_frame(loaded))) == loaded
    assert frames.parse_number(body_of(frames.number_frame(Kind.GATHERED, 5))) == 5
    assert frames.parse_close(body_of(frames.close_frame(2.5))) == 2.5
    assert frames.parse_facts(body_of(frames.facts_frame(Kind.ADD, {"number": 1}))) == {"number": 1}


@pytest.mark.parametrize(
    "parse",
    [
        frames.parse_order,
        frames.parse_saved,
        frames.parse_loaded,
        frames.parse_number,
        frames.parse_question,
        frames.parse_answer,
        frames.parse_close,
        frames.parse_facts,
    ],
)
def test_random_bytes_raise_only_protocol_errors(parse: object, seed: int) -> None:
    draw = random.Random(seed)
    whole = body_of(frames.order_frame(Kind.SAVE, ORDER))
    for _ in range(300):
        data = (
            draw.randbytes(draw.randrange(80))
            if draw.random() < 0.5
            else bytearray(whole[: draw.randrange(len(whole))])
        )
        if data:
            data = bytearray(data)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            parse(bytes(data))  # type: ignore[operator]
        except ProtocolError:
            pass  # the only allowed error


def test_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        frames.frame(Kind.SETUP, bytes(frames.BODY_NBYTES_MAX + 1))


def test_question_of_many_requests_round_trips_and_long_keys_are_refused() -> None:
    """Requests that end in one step are sent in one frame, each with all its groups."""
    groups = [
        ([number % 3, 2], [b"k" * 32, bytes([number % 256]) * 32]) for number in range(16 * 20)
    ]
    question = frames.Question(7, 2.5, groups, b"")
    assert frames.parse_question(body_of(frames.question_frame(Kind.TOUCH, question))) == question
    for lengths in ((65,), (65, 65), (64, 65)):
        head = (
            frames._QUESTION.pack(7, 2.5, 1) + frames._GROUP.pack(0, len(lengths)) + bytes(lengths)
        )
        with pytest.raises(ProtocolError, match="a key of 65 bytes"):
            frames.parse_question(head + bytes(sum(lengths)) + b"\0")


def test_words_of_a_request_round_trip_and_wrong_ones_are_refused() -> None:
    said = RequestHints("session", (Retention(90, 1.5), Retention(9, 1.0, 16, 64)), 0.5, True)
    groups = [([1, 2], [b"k" * 32, b"l" * 32]), ([0], [])]
    asked = AskedHint(said, [range(15, 47, 16), range(0)], 7.5, False, [0.0, 2.0], groups)
    body = body_of(frames.hint_frame(asked))
    assert frames.parse_hint(body) == asked
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            frames.parse_hint(body[:length])
    with pytest.raises(ProtocolError, match="too many"):
        frames.parse_hint(body + b"\0")
    for wrong, why in (
        (replace(asked, after_s=[]), "never sent"),
        (replace(asked, tokens=[range(15, 16), range(0)]), "of another number of pages"),
        (replace(asked, tokens=[range(1 << 70), range(0)]), "no words"),
        (replace(asked, after_s=["soon"]), "no words"),
        (replace(asked, hints=said[:1]), "no words"),
        (replace(asked, hints=("session", [[1, 2, 3, 4, 5]])), "no words"),
    ):
        with pytest.raises(ProtocolError, match=why):
            frames.parse_hint(body_of(frames.hint_frame(wrong)))


def test_frames_arrive_whole_in_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineEnd(ours)
    sent = (
        frames.number_frame(Kind.GATHERED, 1)
        + frames.frame(Kind.READY)
        + frames.saved_frame(Saved(2, 1, 0, 0, None))
    )
    messages = []
    for byte in sent:
        theirs.send(bytes((byte,)))
        messages += engine.received()
    assert [kind for kind, _ in messages] == [Kind.GATHERED, Kind.READY, Kind.SAVED]
    assert list(engine.received()) == []
    theirs.send(frames.frame(Kind.READY))
    theirs.close()
    last = engine.received()
    assert next(last) == (Kind.READY, b"")  # messages before the end are received
    with pytest.raises(ConnectionError):
        next(last)
    engine.close()


def test_engine_queues_what_the_socket_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "UNSENT_NBYTES_MAX", 1 << 20)
    ours, theirs = socket.socketpair()
    engine = EngineEnd(ours)
    order = frames.order_frame(
        Kind.SAVE, Order(1, 1, -1, 0.0, [bytes(32)] * 1000, {"block": bytes(8000)})
    )
    count = 0
    with contextlib.suppress(Exhausted):
        while True:
            engine.send(order)
            count += 1
    assert count > 20
    with pytest.raises(Exhausted, match="bytes of orders wait"):
        engine.send(order)
    messages = []

    def listen() -> None:
        end = AgentsEnd(theirs, os.getpid())
        messages.extend(end.receive() for _ in range(count))
        os.close(end._pidfd)  # the end of its process would close it

    listener = threading.Thread(target=listen)
    listener.start()
    while listener.is_alive():
        engine.flush()
    assert messages == [(Kind.SAVE, body_of(order))] * count
    engine.close()
    theirs.close()


def test_wait_works_with_many_descriptors() -> None:
    """`select` does not support descriptors from 1024 on."""
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    try:
        engine = EngineEnd(socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1500)))
        engine.wait(0.001)
        theirs.send(frames.frame(Kind.READY))
        engine.wait(60.0)
        assert [kind for kind, _ in engine.received()] == [Kind.READY]
        engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ours.close()
        theirs.close()


def test_invalid_memory_description_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no description of memory"):
        opened_storages([{"handle": "00"}])
    with pytest.raises((ConfigError, ProtocolError)):
        opened_storages([{"descriptor": 9999, "nbytes": 4096}])
